"""The compiled program that scores a batch of windows, and the bytes it and the weights take.

The forward is the engine's, without a KV cache: a window is seen whole, its keys and values are not rounded. One
program of fixed shape serves every window; the head runs on a few tokens at a time, so that there are never logits
of a whole window.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.pages import Geometry
from planner import BlockTable, Plan, get_policy
from pwjax import environment
from pwjax.config import ModelConfig
from pwjax.engine.budget import STAND_IN_PAGES, MemoryPlan, ProgramSizes, page_table_bytes, remembered_sizes, tree_bytes
from pwjax.engine.weights import params_spec
from pwjax.errors import BudgetError
from pwjax.memory.arena import COMMIT_WIDTHS, commit_programs, program_memory
from pwjax.memory.page_table import PageTable
from pwjax.models import Paged, forward, logits
from pwjax.units import format_bytes

# Tokens whose logits exist at the same time.
HEAD_TOKENS = 128

Report = Callable[[str], None]


@dataclass(frozen=True)
class ScoreShapes:
    """Everything static about the program: ``batch`` windows of ``window`` tokens.

    ``hidden``: it returns the final hidden states too, from which a distribution can be had again.
    """

    config: ModelConfig
    geometry: Geometry
    batch: int
    window: int
    hidden: bool = False

    @property
    def name(self) -> str:
        """What a user is told is being compiled."""
        return f"score {self.batch} x {self.window}"


def token_nll(
    shapes: ScoreShapes, params: dict, arena: jax.Array, table: PageTable, tokens: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, ...]:
    """Negative log-likelihood float32[B, W-1] of each next token of ``tokens`` int32[B, W], in nats, and where
    ``shapes.hidden`` the hidden states float32[B, W-1, H] that predict it.

    ``lengths`` int32[B]: tokens of each window, padding on the right; what is past the end is 0.
    """
    paged = Paged(arena, table.bits, table.pages, shapes.geometry)
    hidden = forward(shapes.config, params, tokens[:, :-1], lengths - 1, paged=paged).hidden
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), tokens[:, 1:].reshape(-1)
    pad = -len(targets) % HEAD_TOKENS
    rows, targets = jnp.pad(rows, ((0, pad), (0, 0))), jnp.pad(targets, (0, pad))

    def head(part):
        scores = logits(shapes.config, params, part[0])
        wanted = jnp.take_along_axis(scores, part[1][:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(scores, axis=-1) - wanted

    nll = lax.map(head, (rows.reshape(-1, HEAD_TOKENS, rows.shape[-1]), targets.reshape(-1, HEAD_TOKENS)))
    nll = nll.reshape(-1)[: nll.size - pad].reshape(hidden.shape[:2])
    nll = jnp.where(jnp.arange(nll.shape[1]) < lengths[:, None] - 1, nll, 0.0)
    return (nll, hidden) if shapes.hidden else (nll,)


def compile_score(shapes: ScoreShapes, num_pages: int) -> jax.stages.Compiled:
    """Program ``(params, arena, table, tokens, lengths) -> (nll, ...)`` of :func:`token_nll`."""
    return _compile_score(shapes, num_pages, environment.kernels())


@lru_cache(maxsize=8)
def _compile_score(shapes: ScoreShapes, num_pages: int, _kernels: str) -> jax.stages.Compiled:
    spec: Any = jax.ShapeDtypeStruct  # stands for arrays wherever these are declared
    config, geometry = shapes.config, shapes.geometry
    blocks = (config.num_layers, config.num_experts, 2)
    table = PageTable(spec(blocks, jnp.int32), spec((*blocks, geometry.slots), jnp.int32), spec((), jnp.int32))
    arena = spec((num_pages, geometry.page_words), jnp.uint32)
    tokens, lengths = spec((shapes.batch, shapes.window), jnp.int32), spec((shapes.batch,), jnp.int32)
    program = jax.jit(partial(token_nll, shapes))
    return program.lower(params_spec(config), arena, table, tokens, lengths).compile()


def plan_scoring(
    shapes: ScoreShapes, table: BlockTable, budget_bytes: int | None, bits: np.ndarray | None, policy: str,
    report: Report | None = None,
) -> tuple[MemoryPlan, Plan]:
    """Divide a budget (None: what is needed) between program and weights; ``bits`` int[n] fixes the precision."""
    config, geometry = shapes.config, shapes.geometry
    params = params_spec(config)
    if bits is None and budget_bytes is None:
        bits = np.full(table.blocks, table.widths[-1])
    # Sizes do not depend on the arena; where its size is known, what is compiled here is what will run.
    pages = STAND_IN_PAGES if bits is None else 1 + table.total_pages(bits)

    def measure() -> ProgramSizes:
        if report:
            report(shapes.name)
        known = tree_bytes(params) + pages * geometry.page_bytes + page_table_bytes(config, geometry)
        step = program_memory(compile_score(shapes, pages)).extra_bytes - known
        commits = commit_programs(STAND_IN_PAGES, geometry.page_words, COMMIT_WIDTHS).values()
        return ProgramSizes(step, max(program_memory(program).extra_bytes for program in commits))

    sizes = remembered_sizes(shapes, measure)
    step, commit = sizes.step_bytes, sizes.commit_bytes
    dense, tables = tree_bytes(params), 2 * page_table_bytes(config, geometry)
    staging = COMMIT_WIDTHS[-1] * geometry.page_bytes
    rest = dense + tables + step + commit + staging
    low, high = (table.total_pages(b if bits is None else bits) for b in (table.widths[0], table.widths[-1]))
    if budget_bytes is None:
        budget_bytes = rest + (1 + high) * geometry.page_bytes
    if bits is None:
        plan = get_policy(policy).initial(table, (budget_bytes - rest) // geometry.page_bytes - 1, 0)
    else:
        plan = Plan(table, bits, bits, cause="Fixed.")
    memory = MemoryPlan(
        budget_bytes=budget_bytes, dense_bytes=dense, table_bytes=tables, step_bytes=step, commit_bytes=commit,
        staging_bytes=staging, page_bytes=geometry.page_bytes, num_pages=1 + plan.pages_after, weights_min_pages=low,
        weights_max_pages=high, sequence_pages=0, smallest_budget_bytes=rest + (1 + low) * geometry.page_bytes,
    )  # fmt: skip
    return memory, plan


def shrink_batch(
    shapes: ScoreShapes, measure: Callable[[ScoreShapes], tuple[MemoryPlan, Plan]]
) -> tuple[ScoreShapes, MemoryPlan, Plan]:
    """The largest batch, by halves, that fits its budget; BudgetError with the smallest that works."""
    memory, plan = measure(shapes)
    if memory.fits:
        return shapes, memory, plan
    memory, plan = measure(replace(shapes, batch=1))
    if not memory.fits:
        raise BudgetError(
            f"the memory budget of {memory.budget_bytes} bytes is too small: one window of {shapes.window} tokens with "
            f"the experts at their lowest allowed precision needs {memory.smallest_budget_bytes} bytes "
            f"({format_bytes(memory.smallest_budget_bytes)}); raise --memory-budget or lower --window",
            memory.smallest_budget_bytes,
        )
    batch = shapes.batch // 2
    while batch > 1:
        larger = measure(replace(shapes, batch=batch))
        if larger[0].fits:
            return replace(shapes, batch=batch), *larger
        batch //= 2
    return replace(shapes, batch=1), memory, plan
