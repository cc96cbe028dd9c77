"""Samples of runs on the same windows, and what they say: means, paired differences, shares of a gap.

A run is a dictionary with ``nll`` (nats), ``kl`` (nats of divergence from 16 bits, where that was measured) and
``tokens``, a number each for every window, or with ``refused``, the sentence that says why the arm cannot keep that
budget. Windows are the samples of every interval (a bootstrap that draws windows, the same of all arms, 95 %): tokens
of a window depend on each other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from calib.agreement import bootstrap
from pwjax.evaluate.comparison import paired_difference


@dataclass(frozen=True)
class Arm:
    """One way to spend a budget: a policy with its options, or ``bits`` for all experts.

    ``draws``: seeds that the policy is run with; a window's likelihood is then the mean over them. ``model``: one of
    the experiment's models, None for the first.
    """

    policy: str | None = None
    bits: int | None = None
    draws: int = 1
    model: str | None = None

    @property
    def name(self) -> str:
        """As tables call it."""
        return self.policy or f"{self.bits} bits"

    @property
    def each(self) -> list["Arm"]:
        """The arms that are run: one for each seed."""
        if self.draws == 1:
            return [self]
        return [Arm(f"{self.policy}:seed={seed}", model=self.model) for seed in range(self.draws)]


class Samples:
    """``runs`` by :meth:`key`, on texts ``names``; ``models``: the first is that of arms without one."""

    def __init__(self, runs: dict[str, dict], names: Sequence[str], models: Sequence[str], seed: int = 0):
        self.runs, self.names, self.models, self.seed = runs, list(names), list(models), seed

    def key(self, arm: Arm, budget: float | None, text: str) -> str:
        """``budget``: mean bits that experts have left at the peak, None for as much memory as it takes."""
        shown = "no budget" if budget is None else f"{budget:g}"
        return f"{arm.model or self.models[0]} | {arm.name} | {shown} | {text}"

    def of(self, arm: Arm, budget: float | None, text: str) -> dict:
        """One run. KeyError where there is none."""
        return self.runs[self.key(arm, budget, text)]

    def pooled(
        self, arm: Arm, budget: float | None, names: Iterable[str] | None = None
    ) -> dict[str, np.ndarray] | None:
        """``nll``, ``kl`` and ``tokens`` float64[windows] over texts (None: all); None where the arm was refused."""
        runs = [[self.of(one, budget, name) for one in arm.each] for name in names or self.names]
        if any("refused" in run for row in runs for run in row):
            return None
        return {
            what: np.concatenate([np.mean([run[what] for run in row], axis=0, dtype=float) for row in runs])
            for what in ("nll", "kl", "tokens")
            if all(what in run for row in runs for run in row)
        }

    @property
    def peak_share(self) -> float:
        """The most that a run held at its peak, over its budget; ValueError where no run has one."""
        budgeted = (run for run in self.runs.values() if run.get("budget_bytes"))
        return max(run["peak_bytes"] / run["budget_bytes"] for run in budgeted)

    def mean(
        self, arm: Arm, budget: float | None, names: Iterable[str] | None = None, what: str = "nll"
    ) -> float | None:
        """Nats a token, or ``kl`` a token."""
        found = self.pooled(arm, budget, names)
        return None if found is None else float(found[what].sum() / found["tokens"].sum())

    def difference(
        self, arm: Arm, other: Arm, budget: float | None, names: Iterable[str] | None = None, *, other_budget=...,
        what: str = "nll",
    ) -> dict | None:
        """Nats (or ``kl``) a token that ``arm`` has more than ``other``, ``{"difference", "stderr", "interval_95"}``.

        Both at one budget unless ``other_budget`` is given. None where one of them was refused.
        """
        names = list(names or self.names)
        first = self.pooled(arm, budget, names)
        second = self.pooled(other, budget if other_budget is ... else other_budget, names)
        if first is None or second is None:
            return None
        return paired_difference(first[what], second[what], first["tokens"], self.seed)

    def over_budgets(
        self, arm: Arm, other: Arm, budgets: Sequence[float], names: Iterable[str] | None = None, what: str = "nll"
    ) -> dict | None:
        """The difference over several budgets: a window is one sample, with what it has at all of them."""
        names = list(names or self.names)
        pairs = [(self.pooled(arm, b, names), self.pooled(other, b, names)) for b in budgets]
        parts = [(a[what], b[what], a["tokens"]) for a, b in pairs if a and b]
        if len(parts) < len(pairs):
            return None
        return paired_difference(*(np.sum(part, axis=0) for part in zip(*parts, strict=True)), self.seed)

    def recovered(
        self,
        ours: tuple[Arm, float],
        low: tuple[Arm, float],
        full: tuple[Arm, float | None],
        names: Iterable[str] | None = None,
    ) -> dict | None:
        """Share of the gap in likelihood between ``low`` and ``full`` that ``ours`` closes: ``{"share", "interval_95",
        "gap"}``. Arms come with their budgets; a share means nothing where the ``gap`` itself is not clear of zero."""
        names = list(names or self.names)
        found = [self.pooled(*pair, names) for pair in (ours, low, full)]
        if any(one is None for one in found):
            return None
        mine, worst, best = (one["nll"] for one in found if one)
        share = lambda i: (worst[i] - mine[i]).sum(-1) / (worst[i] - best[i]).sum(-1)  # noqa: E731
        limits = list(bootstrap(share, len(mine), self.seed)) if len(mine) > 1 else None
        gap = self.difference(full[0], low[0], full[1], names, other_budget=low[1])
        return {"share": float(share(np.arange(len(mine)))), "interval_95": limits, "gap": gap}


def clear(found: dict | None) -> bool:
    """Whether the whole interval is below zero: fewer nats, so better."""
    return bool(found and found["interval_95"] and found["interval_95"][1] < 0)
