"""A model calibrated on one kind of text serves another: what do online routing and the prompt residual recover?

    python -m experiments.domain_shift.run --data DIR [--bits 3] [--model DIR] [--out FILE]

Copies of the model are calibrated on prose alone, on code alone and on mathematics alone (``--tokens`` of each
training text). The first serves code and mathematics, the second prose, each with the whole planner, without routing,
without the residual and without both, at equal peak bytes. The differences are paired with a copy that was calibrated
on what is served, so 0 is all that could be recovered. A stopped run goes on (--work, --out).
"""

import shutil
from pathlib import Path

from experiments.arms import Arm, Runs, interval, markdown, options
from pwjax.calibration import discard
from pwjax.calibration_report import recalibrate
from pwjax.evaluate.comparison import paired_difference
from pwjax.loading import open_model
from pwjax.progress import Bars

TRAINING = {
    "prose": "books/books.train.txt", "code": "code/python_stdlib.train.txt", "math": "math/gsm8k.train.txt",
}  # fmt: skip
# Calibrated on, and served.
SHIFTS = (("prose", "code"), ("prose", "math"), ("code", "prose"))
ARMS = {
    "full": Arm("default"), "without routing": Arm("default:routing=off"),
    "without residual": Arm("default:residual=off"), "without both": Arm("default:routing=off,residual=off"),
}  # fmt: skip


def calibrated(model: Path, folder: Path, text: Path, tokens: int) -> Path:
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


def main() -> None:
    parser = options(__doc__, "runs/domain_shift.json")
    parser.add_argument("--bits", type=float, default=3.0, help="budget")
    parser.add_argument("--tokens", type=int, default=12288, help="of calibration")
    parser.add_argument("--work", type=Path, default=Path("runs/domain_shift"))
    args = parser.parse_args()
    if args.data is None:
        parser.error("--data is needed: training and held-out texts by the names of experiments/arms.py")
    base = open_model(args.model).path
    runs = {}
    for name, file in TRAINING.items():
        model = calibrated(base, args.work / name, args.data / file, args.tokens)
        runs[name] = Runs(args, model, args.work / f"{name}.json")
    rows, found = [], {}
    for source, served in SHIFTS:
        own = runs[served].pooled(ARMS["full"], args.bits, [served])
        row = {}
        for name, arm in ARMS.items():
            shifted = runs[source].pooled(arm, args.bits, [served])
            row[name] = paired_difference(shifted["nll"], own["nll"], own["tokens"], args.seed)
        found[f"{source}, {served}"] = row
        rows.append([source, served, f"{Runs.mean(own):.4f}", *(interval(row[name]) for name in ARMS)])
    print(markdown(["calibrated on", "serves", "nats a token, calibrated on it", *ARMS], rows))
    everything = Runs(args)
    everything.runs = {f"{name} | {key}": run for name, of in runs.items() for key, run in of.runs.items()}
    everything.save(over_own_calibration=found)


if __name__ == "__main__":
    main()
