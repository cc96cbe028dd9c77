"""How much quality does each policy keep at equal peak bytes?

    python -m experiments.quality_memory.run --data DIR [--ladders 2-6 3-6] [--budgets 2.5 3 ...] [--model DIR]

Every policy scores the same windows of held-out text while the KV cache of a batch grows beside it, under budgets in
which all experts at N bits and the full cache just fit. Prints, pooled and for each text: the likelihood of every arm;
what `default` gains on every other policy, paired, with intervals; the share of the gap between uniform 3 bit and 16
bit that `default` recovers in the bytes of uniform 3 bit, and whether it is still better in 85 % of them; and what the
ladder of widths does. Likelihood rewards whatever fits the text; the divergence from 16 bits, which is what a plan
costs whether or not the model knows the text, is reported in the same way. The first ladder is the model's own; others
are quantized from its 16-bit rows into --work. About eight seconds a run on two cores with the bundled model, an hour
in all; a run that was stopped goes on.
"""

from collections.abc import Sequence
from pathlib import Path

from experiments.arms import WHOLE, Runs, bits_at, expert_pages, options
from experiments.paired import Arm, Samples, clear
from experiments.quality_memory.ladder import name_of, requantized
from experiments.tables import interval, markdown, percent
from pwjax.loading import open_model

POLICIES = ("default", "paper", "uniform", "uniform-dynamic", "static", "hotness", "random")
# What `default` has to beat, at budgets between all experts at 3 and all at 5 bits.
RIVALS, BETWEEN = ("uniform-dynamic", "hotness", "random"), (3.0, 5.0)
# Bits whose bytes `default` gets, and the share of them in which it should still be better.
NARROW, LESS = 3, 0.85
# The share of the gap to 16 bits that it should close there.
ENOUGH = 0.7


def measure(samples: Samples, arms: dict[str, list[Arm]], budgets: dict[str, list[float]], less: float) -> None:
    """Ask for every run, so that a stopped experiment has the same ones when it goes on."""
    for text in samples.names:
        samples.of(WHOLE, None, text)
        for ladder, own in arms.items():
            samples.of(Arm(bits=NARROW, model=ladder), float(NARROW), text)
            for budget in [b for b in [*budgets[ladder], float(NARROW), less] if b >= least(ladder)]:
                only_default = budget not in budgets[ladder]
                for arm in own[:1] if only_default else own:
                    for one in arm.each:
                        samples.of(one, budget, text)


def least(ladder: str) -> int:
    """The fewest bits of a ladder."""
    return int(ladder.split("-")[0])


def means(samples: Samples, arms: Sequence[Arm], budgets: Sequence[float], names: Sequence[str], what: str) -> dict:
    """``what`` a token, by arm and budget."""
    return {arm.name: {f"{b:g}": samples.mean(arm, b, names, what) for b in budgets} for arm in arms}


def versus(samples: Samples, arms: Sequence[Arm], budgets: Sequence[float], names: Sequence[str], what: str) -> dict:
    """What ``arms[0]`` has more of ``what`` than each other one, by arm and budget."""
    return {
        arm.name: {f"{b:g}": samples.difference(arms[0], arm, b, names, what=what) for b in budgets} for arm in arms[1:]
    }  # fmt: skip


def gap(samples: Samples, ours: Arm, ladder: str, less: float, names: Sequence[str]) -> dict:
    """What ``ours`` makes of the gap between experts at ``NARROW`` and at 16 bits, in their bytes and in fewer."""
    low = Arm(bits=NARROW, model=ladder)
    found = {}
    for label, budget in (("same", float(NARROW)), ("less", less)):
        if budget >= least(ladder):
            found[label] = {
                "recovered": samples.recovered((ours, budget), (low, float(NARROW)), (WHOLE, None), names),
                "over_uniform": samples.difference(ours, low, budget, names, other_budget=float(NARROW)),
            }
    return found


def summary(samples: Samples, arms: dict[str, list[Arm]], budgets: dict[str, list[float]], less: float) -> dict:
    """Everything that is said of the runs: a part for each ladder, in it one for all texts and for each."""
    pools = {"all": samples.names, **{name: [name] for name in samples.names}}
    found = {"full": {pool: samples.mean(WHOLE, None, names) for pool, names in pools.items()}, "less_bits": less}
    found["ladders"] = {
        ladder: {
            pool: {
                "nats": means(samples, own, budgets[ladder], names, "nll"),
                "default_over": versus(samples, own, budgets[ladder], names, "nll"),
                "kl": means(samples, own, budgets[ladder], names, "kl"),
                "default_over_kl": versus(samples, own, budgets[ladder], names, "kl"),
                "gap": gap(samples, own[0], ladder, less, names),
            }
            for pool, names in pools.items()
        }
        for ladder, own in arms.items()
    }
    first, *others = arms
    found["over_first_ladder"] = {
        ladder: {
            f"{b:g}": samples.difference(arms[ladder][0], arms[first][0], b)
            for b in budgets[ladder] if b in budgets[first]
        }
        for ladder in others
    }  # fmt: skip
    for name, compared in (("better_at", "default_over"), ("closer_at", "default_over_kl")):
        found[name] = {
            ladder: {
                rival: [b for b, d in parts["all"][compared][rival].items() if _between(float(b)) and clear(d)]
                for rival in RIVALS if rival in parts["all"][compared]
            }
            for ladder, parts in found["ladders"].items()
        }  # fmt: skip
    return found


def _between(budget: float) -> bool:
    return BETWEEN[0] < budget < BETWEEN[1]


def shown(found: dict) -> dict[str, str]:
    """The tables, by name."""
    made = {}
    for ladder, parts in found["ladders"].items():
        everything = parts["all"]
        budgets = list(next(iter(everything["nats"].values())))
        names = list(everything["nats"])
        for what, compared, digits in (("nats", "default_over", 4), ("kl", "default_over_kl", 5)):
            number = lambda v: "-" if v is None else f"{v:.{digits}f}"  # noqa: B023, E731
            made[f"{what} {ladder}"] = markdown(
                ["budget, bits at the peak", *(f"`{n}`" for n in names)],
                [[b, *(number(everything[what][n][b]) for n in names)] for b in budgets],
            )
            made[f"{compared.replace('_', ' ')} {ladder}"] = markdown(
                ["text", "`default` less", *budgets],
                [
                    [pool, f"`{name}`", *(interval(row[b], digits) for b in budgets)]
                    for pool, part in parts.items()
                    for name, row in part[compared].items()
                    if pool == "all" or name in RIVALS
                ],
            )
    made["gap"] = markdown(
        ["ladder", "text", f"uniform {NARROW} bit's bytes: gap recovered", "over uniform",
         f"{LESS:.0%} of these: gap recovered", "over uniform"],
        [
            [ladder, pool, *(cell for label in ("same", "less") for cell in _gap_cells(part["gap"].get(label)))]
            for ladder, parts in found["ladders"].items() for pool, part in parts.items()
        ],
    )  # fmt: skip
    for ladder, row in found["over_first_ladder"].items():
        made[f"ladder {ladder}"] = markdown([f"`default`, {ladder} less {next(iter(found['ladders']))}", *row],
                                            [["nats a token", *map(interval, row.values())]])  # fmt: skip
    made["verdict"] = verdict(found)
    return made


def _gap_cells(found: dict | None) -> list[str]:
    return ["-", "-"] if found is None else [percent(found["recovered"]), interval(found["over_uniform"])]


def verdict(found: dict) -> str:
    """Whether the claims hold, pooled over texts, a line each."""
    lines = []
    for ladder in found["ladders"]:
        for name, said in (("better_at", "better than"), ("closer_at", "nearer to 16 bits (KL) than")):
            for rival, where in found[name][ladder].items():
                held = "yes" if len(where) >= 2 else "no"
                lines.append([ladder, f"{said} `{rival}` at two budgets or more between 3 and 5 bits", held,
                              f"at {', '.join(where) or 'none'}"])  # fmt: skip
        same, less = (found["ladders"][ladder]["all"]["gap"].get(label) for label in ("same", "less"))
        if same and same["recovered"]:
            held = "yes" if clear(same["recovered"]["gap"]) and same["recovered"]["share"] >= ENOUGH else "no"
            lines.append([ladder, f"{ENOUGH:.0%} of the gap recovered in the bytes of uniform {NARROW} bit", held,
                          percent(same["recovered"])])  # fmt: skip
        if less and less["over_uniform"]:
            held = "yes" if clear(less["over_uniform"]) else "no"
            lines.append([ladder, f"better than uniform {NARROW} bit in {LESS:.0%} of its bytes", held,
                          interval(less["over_uniform"])])  # fmt: skip
    return markdown(["ladder", "claim", "holds", "measured"], lines)


def main() -> None:
    parser = options(__doc__, "runs/quality_memory.json")
    parser.add_argument("--budgets", type=float, nargs="+", default=[2.5, 3.0, 3.25, 3.5, 4.0, 4.5, 5.0])
    parser.add_argument("--ladders", nargs="+", help="default: the model's own, and 3-6")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), help="the first is compared with the others")
    parser.add_argument("--draws", type=int, default=3, help="seeds of the random policy")
    parser.add_argument("--tokens", type=int, default=65536, help="that other ladders are calibrated on")
    parser.add_argument("--work", type=Path, default=Path("runs/quality_memory"), help="models of other ladders")
    args = parser.parse_args()
    base = open_model(args.model)
    own = name_of(base)
    ladders = args.ladders or list(dict.fromkeys([own, "3-6"]))
    models = {
        ladder: base.path if ladder == own
        else requantized(base, ladder, args.work / f"{base.path.stem}-{ladder}.pw", args)
        for ladder in ladders
    }  # fmt: skip
    runs = Runs(args, models)
    arms = {
        ladder: [Arm(p, draws=args.draws if p == "random" else 1, model=ladder) for p in args.policies]
        for ladder in ladders
    }
    budgets = {ladder: [b for b in args.budgets if b >= least(ladder)] for ladder in ladders}
    first = runs.artifacts[ladders[0]]
    less = bits_at(first, int(LESS * expert_pages(first, NARROW)))
    measure(runs, arms, budgets, less)
    found = summary(runs, arms, budgets, less)
    made = shown(found)
    for name, table in made.items():
        print(f"\n{name}\n\n{table}")
    print("\n16 bits: {all:.4f} nats a token".format(**found["full"]))
    print(f"peak bytes: {runs.peak_share:.2%} of the budget at most")
    budget_bytes = {f"{b:g}": runs.bytes_of(b) for b in [*args.budgets, float(NARROW), less]}
    runs.save(budget_bytes=budget_bytes, peak_share=runs.peak_share, summary=found, tables=made)


if __name__ == "__main__":
    main()
