"""A model calibrated on one kind of text serves another: what do online routing and the prompt residual recover?

    python -m experiments.domain_shift.run --data DIR [--budget 3] [--model DIR] [--out FILE]

Copies of the model are calibrated on prose alone, on code alone and on mathematics alone (``--tokens`` of each training
text). The first serves code and mathematics, the second prose, each with the whole planner, without routing, without
the residual and without both, at equal peak bytes. The differences are paired with a copy that was calibrated on what
is served, so what `without both` loses is the price of the shift, and 0 is all that could be recovered. Half an hour
on two cores with the bundled model; a stopped run goes on (--work, --out).
"""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from experiments import texts
from experiments.arms import Runs, options
from experiments.paired import Arm, Samples
from experiments.tables import interval, markdown, percent
from pwjax.calibration import discard
from pwjax.calibration_report import recalibrate
from pwjax.loading import open_model
from pwjax.progress import Bars

# Calibrated on, and served.
SHIFTS = (("prose", "code"), ("prose", "math"), ("code", "prose"))
ARMS = {
    "full": Arm("default"), "without routing": Arm("default:routing=off"),
    "without residual": Arm("default:residual=off"), "without both": Arm("default:routing=off,residual=off"),
}  # fmt: skip


def calibrated(model: Path, folder: Path, text: Path | str, tokens: int) -> Path:
    """A copy of the model with tables from ``text``, made once."""
    out, done = folder / "model.pw", folder / "done"
    if not done.exists():
        shutil.copytree(model, out, dirs_exist_ok=True)
        bars = Bars()
        recalibrate(out, [text], tokens=tokens, progress=bars)
        bars.close()
        done.touch()
        discard(out)
    return out


def summary(samples: Samples, budget: float) -> dict:
    """By shift: ``nats`` of the copy calibrated on what is served, what each arm is ``over`` it, and the share of the
    loss without both layers that the full form has ``recovered``."""
    found = {}
    for source, served in SHIFTS:
        own = replace(ARMS["full"], model=served)
        shifted = {name: replace(arm, model=source) for name, arm in ARMS.items()}
        found[f"{source} | {served}"] = {
            "nats": samples.mean(own, budget, [served]),
            "over": {name: samples.difference(arm, own, budget, [served]) for name, arm in shifted.items()},
            "recovered": samples.recovered(
                (shifted["full"], budget), (shifted["without both"], budget), (own, budget), [served]
            ),
        }
    return found


def shown(found: Mapping[str, dict]) -> dict[str, str]:
    """The table, by name."""
    rows = [
        [*shift.split(" | "), f"{row['nats']:.4f}", *(interval(row["over"][name]) for name in ARMS),
         percent(row["recovered"])]
        for shift, row in found.items()
    ]  # fmt: skip
    head = ["calibrated on", "serves", "nats a token, calibrated on it", *ARMS, "recovered by both"]
    return {"shifts": markdown(head, rows)}


def main() -> None:
    parser = options(__doc__, "runs/domain_shift.json")
    parser.add_argument("--budget", type=float, default=3.0)
    parser.add_argument("--tokens", type=int, default=12288, help="of calibration")
    parser.add_argument("--work", type=Path, default=Path("runs/domain_shift"))
    args = parser.parse_args()
    if args.data is None:
        parser.error("--data DIR is needed: training and held-out texts of three kinds, see experiments/texts.py")
    base = open_model(args.model).path
    models = {
        name: calibrated(base, args.work / name, text, args.tokens) for name, text in texts.training(args).items()
    }
    runs = Runs(args, models)
    found = summary(runs, args.budget)
    made = shown(found)
    print(made["shifts"])
    runs.save(calibration_tokens=args.tokens, summary=found, tables=made)


if __name__ == "__main__":
    main()
