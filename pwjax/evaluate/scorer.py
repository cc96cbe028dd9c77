"""Log-likelihoods of whole windows, experts read from the arena at fixed bits, all of it under a memory budget."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from planner import Plan
from pwjax.checkpoints.artifact import Artifact
from pwjax.config import ModelConfig
from pwjax.engine.budget import MemoryPlan
from pwjax.engine.meter import Meter
from pwjax.engine.weights import load_weights
from pwjax.errors import UsageError
from pwjax.evaluate.program import Report, ScoreShapes, compile_score, plan_scoring, shrink_batch
from pwjax.loading import check_device, checked_bits, open_model
from pwjax.memory.arena import program_memory
from pwjax.units import parse_bytes

BATCH = 4
WINDOW = 1024
POLICIES = ("static", "uniform")


class Scored(NamedTuple):
    """One window: ``nll`` float32[n-1] nats of each token after the first, and ``hidden`` float32[n-1, H], the final
    hidden states that predict them, None where they are not asked for."""

    nll: np.ndarray
    hidden: np.ndarray | None


class Scorer:
    """A model on the device that gives the likelihood of tokens; a context manager that frees it.

    ``shapes`` ScoreShapes, ``memory`` MemoryPlan, ``plan`` the bits in force. Make one with :meth:`load`.
    """

    def __init__(self, artifact: Artifact, shapes: ScoreShapes, memory: MemoryPlan, plan: Plan, meter: Meter, progress):
        self.artifact, self.shapes, self.memory, self.plan = artifact, shapes, memory, plan
        self._meter = meter
        self._program = compile_score(shapes, memory.num_pages)
        sizes = program_memory(self._program)
        self._program_bytes = sizes.temp_bytes + sizes.output_bytes - sizes.alias_bytes
        staging = memory.staging_bytes // memory.page_bytes
        self._weights = load_weights(artifact, plan.bits, memory.num_pages, staging, meter=meter, progress=progress)
        # Nothing moves from here on.
        self._weights.transfer.close()
        self._weights.store.close()

    @classmethod
    def load(
        cls,
        model: str | os.PathLike | Artifact | None = None,
        memory_budget: int | str | None = None,
        *,
        bits: int | np.ndarray | None = None,
        policy: str = "static",
        window: int | None = None,
        batch: int = BATCH,
        hidden: bool = False,
        report: Report | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> "Scorer":
        """Load ``model`` (None: the bundled one) at ``bits``, or at the best bits that fit the budget.

        ``policy``: ``static`` chooses bits block by block, ``uniform`` one width for all. ``window`` tokens, at most
        the model's positions; ``batch`` windows a dispatch, fewer where the budget asks for it; ``hidden``: keep final
        hidden states, for comparisons. Without ``bits`` and
        budget the model is at its widest. BudgetError with the smallest budget that works, UsageError, ArtifactError.
        """
        meter = Meter()
        artifact = model if isinstance(model, Artifact) else open_model(model)
        config, table = artifact.config, artifact.table()
        window = checked_window(window, config)
        if batch < 1:
            raise UsageError(f"--batch must be at least 1, got {batch}")
        if policy not in POLICIES:
            raise UsageError(
                f"--policy {policy} moves under memory pressure, and whole windows have no KV cache; "
                f"add --kv-trace 16, or choose from {', '.join(POLICIES)}"
            )
        fixed, budget = checked_bits(bits, table), None if memory_budget is None else parse_bytes(memory_budget)

        def measure(shapes: ScoreShapes) -> tuple[MemoryPlan, Plan]:
            return plan_scoring(shapes, table, budget, fixed, policy, report)

        chosen = shrink_batch(ScoreShapes(config, artifact.geometry, batch, window, hidden), measure)
        check_device(chosen[1].total_bytes)
        if report:
            report(chosen[0].name)
        return cls(artifact, *chosen, meter, progress)

    def score(
        self, windows: Sequence[np.ndarray], progress: Callable[[int, int], None] | None = None
    ) -> Iterator[Scored]:
        """Every window, in order.

        ``windows``: token ids int[len], ``2 <= len <= window``. ``progress(windows, all windows)``.
        """
        batch, weights = self.shapes.batch, self._weights
        for start in range(0, len(windows), batch):
            group = windows[start : start + batch]
            tokens, lengths = np.zeros((batch, self.shapes.window), np.int32), np.zeros(batch, np.int32)
            for row, window in enumerate(group):
                tokens[row, : len(window)], lengths[row] = window, len(window)
            inputs = jax.device_put((tokens, lengths))
            self._meter.observe(self._program_bytes)
            out = jax.device_get(self._program(weights.params, weights.arena.array, weights.page_table.table, *inputs))
            if progress:
                progress(start + len(group), len(windows))
            for row, window in enumerate(group):
                nll, *hidden = (array[row, : len(window) - 1].copy() for array in out)
                yield Scored(nll, hidden[0] if hidden else None)

    @property
    def peak_bytes(self) -> int:
        """Measured so far: live buffers plus the running program's, or the device's own figure where it has one."""
        return max(self._meter.peak_bytes, self._meter.device_peak() or 0)

    def settings(self) -> dict:
        """What a report states of memory and precision, JSON-ready."""
        plan, memory = self.plan, self.memory
        return {
            # One width for all blocks, or null for a mixed plan.
            "bits": int(plan.bits[0]) if np.all(plan.bits == plan.bits[0]) else None,
            "mean_bits": plan.table.mean_bits(plan.bits),
            "histogram": {str(b): n for b, n in plan.table.histogram(plan.bits).items()},
            "memory": {
                "budget_bytes": memory.budget_bytes,
                "peak_bytes": self.peak_bytes,
                **memory.rows,
                "page_bytes": memory.page_bytes,
                "pages_total": memory.num_pages,
                "smallest_budget_bytes": memory.smallest_budget_bytes,
            },
            "window": self.shapes.window,
            "batch": self.shapes.batch,
            "kv_dtype": "float32",
        }

    def close(self) -> None:
        """Free the device memory; harmless when done twice."""
        self._weights.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def checked_window(window: int | None, config: ModelConfig) -> int:
    """``window``, or the default for the model; UsageError for one that the model cannot see."""
    window = min(WINDOW, config.max_positions) if window is None else window
    if not 2 <= window <= config.max_positions:
        raise UsageError(f"--window must be from 2 to the model's {config.max_positions} tokens, got {window}")
    return window
