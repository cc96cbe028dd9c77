"""Would another planner or another damage beat `hotness` where `default` is not clear of it?

    python -m experiments.quality_memory.changes --data DIR [--budgets 3.25 3.5] [--model DIR] [--out FILE]

Changes of the default policy, each alone, score the windows of `quality_memory` in the same bytes. For each: what it
needs more than `default` and than `hotness`, in likelihood and in divergence from 16 bits, over all budgets, for all
texts and for each. What a change is, is the docstring of its policy here. Some ten seconds a run on two cores with the
bundled model, a quarter of an hour in all; a run that was stopped goes on.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from experiments.arms import Runs, options
from experiments.paired import Arm, Samples
from experiments.tables import interval, markdown
from planner.damage import Prices, price
from planner.default import DefaultPolicy
from planner.plan import Plan
from planner.policy import POLICIES
from planner.tables import BlockTable


class OutputDamage(DefaultPolicy):
    """Damage is the error of a block's output, without the gradient of the loss."""

    damage_form = "output"


class PaperDamage(DefaultPolicy):
    """Damage of the paper's form."""

    damage_form = "paper"


class HalfSensitivity(DefaultPolicy):
    """Damage is the geometric mean of the default's and of `hotness`'s: what calibration measured counts for half."""

    def _prices(self, o=None) -> Prices:
        routing, tokens = (o.routing_choices, o.routing_tokens) if o else (None, None)
        theirs = price(self._table, routing, tokens, pseudo_choices=self.pseudo_choices, sensitivity=False)
        return Prices(np.sqrt(super()._prices(o).damage * theirs.damage))


class OneTable(DefaultPolicy):
    """Damage of all of calibration's texts together, not of those that the routing looks like."""

    def initial(self, table: BlockTable, capacity_pages: int, reserve_pages: int) -> Plan:
        """The default's, and from then on of that table alone."""
        return super().initial(replace(table, kinds=None), capacity_pages, reserve_pages)


CHANGES = {
    "default-output": OutputDamage, "default-paper-damage": PaperDamage, "default-half-sensitivity": HalfSensitivity,
    "default-one-table": OneTable,
}  # fmt: skip
# Options of the policy as it is: the residual counts twice; routing is believed at once, or late.
SETTINGS = ("default:strength=2", "default:pseudo_choices=2", "default:pseudo_choices=128")
DEFAULT, HOTNESS = Arm("default"), Arm("hotness")


def summary(samples: Samples, budgets: Sequence[float]) -> dict:
    """Differences over all budgets, by change (`default` itself the first), rival, measure, and text."""
    pools = {"all": samples.names, **{name: [name] for name in samples.names}}
    return {
        name: {
            rival.name: {
                what: {pool: samples.over_budgets(Arm(name), rival, budgets, names, what)
                       for pool, names in pools.items()}
                for what in ("nll", "kl")
            }
            for rival in (DEFAULT, HOTNESS)
        }
        for name in ("default", *CHANGES, *SETTINGS)
    }  # fmt: skip


def shown(found: dict) -> dict[str, str]:
    """A table for each rival and measure, by name."""
    made = {}
    for rival in (DEFAULT.name, HOTNESS.name):
        for what, digits in (("nll", 4), ("kl", 5)):
            rows = {name: part[rival][what] for name, part in found.items() if name != rival}
            made[f"{what} less {rival}"] = markdown(
                [f"less `{rival}`", *next(iter(rows.values()))],
                [[f"`{name}`", *(interval(d, digits) for d in row.values())] for name, row in rows.items()],
            )
    return made


def main() -> None:
    parser = options(__doc__, "runs/changes.json")
    parser.add_argument("--budgets", type=float, nargs="+", default=[3.25, 3.5])
    args = parser.parse_args()
    POLICIES.update(CHANGES)
    runs = Runs(args, {"model": args.model})
    found = summary(runs, args.budgets)
    made = shown(found)
    for name, table in made.items():
        print(f"\n{name}\n\n{table}")
    runs.save(summary=found, tables=made)


if __name__ == "__main__":
    main()
