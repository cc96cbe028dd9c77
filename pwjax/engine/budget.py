"""The budget as a sum: what every part of the device costs, and how many pages are left for the arena.

Only compiled programs are asked for their sizes (temporaries and outputs); they do not depend on the arena's size, so
a small arena stands in. ``pwjax plan`` and the engine take this same path.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels.pages import WORD_BYTES, Geometry
from planner.tables import BlockTable
from pwjax import environment
from pwjax.config import ModelConfig
from pwjax.engine.steps import StepShapes, compile_step
from pwjax.errors import BudgetError
from pwjax.memory.arena import COMMIT_WIDTHS, commit_programs, padded_pages, program_memory
from pwjax.memory.moves import largest_demotion_pages

# Arena of the stand-in compilation: the null page and a few more.
STAND_IN_PAGES = 8
# Staging holds this many of the widest commits: one lands while the next is copied.
STAGING_COMMITS = 2


@dataclass(frozen=True)
class ProgramSizes:
    """``step_bytes`` and ``commit_bytes`` of a :class:`MemoryPlan`; and what a program, by :func:`program_name`, adds
    to the live buffers while it runs."""

    step_bytes: int
    commit_bytes: int
    running_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of every part; ``total_bytes`` never exceeds ``budget_bytes`` where ``fits``.

    ``dense_bytes`` parameters that are not paged; ``table_bytes`` page table (two epochs) and KV tables; ``step_bytes``
    the largest program's temporaries, outputs and small arguments; ``commit_bytes`` arguments of the commits;
    ``staging_bytes`` pages on their way in; ``num_pages`` counts the null page. ``weights_min_pages`` and
    ``weights_max_pages`` are the blocks at their lowest and highest precision; ``sequence_pages`` one full context.
    """

    budget_bytes: int
    dense_bytes: int
    table_bytes: int
    step_bytes: int
    commit_bytes: int
    staging_bytes: int
    page_bytes: int
    num_pages: int
    weights_min_pages: int
    weights_max_pages: int
    sequence_pages: int
    smallest_budget_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the lowest weights and one whole sequence fit."""
        return self.budget_bytes >= self.smallest_budget_bytes

    @property
    def arena_bytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.page_bytes

    @property
    def capacity_pages(self) -> int:
        """Pages that weights and KV share: all but the null page."""
        return max(0, self.num_pages - 1)

    @property
    def staging_pages(self) -> int:
        """Pages of words that may be on their way at any time."""
        return self.staging_bytes // self.page_bytes

    @property
    def rows(self) -> dict[str, int]:
        """The byte table, by part."""
        names = ("dense_bytes", "table_bytes", "step_bytes", "commit_bytes", "staging_bytes", "arena_bytes")
        return {name: getattr(self, name) for name in names}

    @property
    def total_bytes(self) -> int:
        """Sum of :attr:`rows`."""
        return sum(self.rows.values())

    def to_json(self) -> dict:
        """All fields, the derived ones included."""
        return {**asdict(self), "arena_bytes": self.arena_bytes, "total_bytes": self.total_bytes, "fits": self.fits}


def tree_bytes(tree) -> int:
    """Bytes of the arrays (or their shapes) in a tree."""
    return sum(int(np.prod(a.shape)) * np.dtype(a.dtype).itemsize for a in jax.tree.leaves(tree))


def program_name(key: tuple[str, int]) -> str:
    """Readable name of a compiled step: ``prefill 32``."""
    return f"{key[0]} {key[1]}"


def step_memory(shapes: StepShapes, params, report: Callable[[str], None] | None = None) -> ProgramSizes:
    """Sizes of the programs of ``shapes``, read from their compilation."""
    page_words = shapes.geometry.page_words
    fixed = tree_bytes(params) + STAND_IN_PAGES * page_words * WORD_BYTES
    step, running = 0, {}
    for key in shapes.keys:
        if report:
            report(program_name(key))
        sizes = program_memory(compile_step(shapes, key, STAND_IN_PAGES, params))
        step = max(step, sizes.extra_bytes - fixed - _tables(shapes)[0])
        running[program_name(key)] = sizes.running_bytes
    programs = commit_programs(STAND_IN_PAGES, page_words, COMMIT_WIDTHS, shapes.kv_shapes)
    sizes = {key: program_memory(program).extra_bytes for key, program in programs.items()}
    pages = max(size for (name, *_), size in sizes.items() if name == "commit_pages")
    # The rows of all kinds of attention are there while one of them is written.
    rows = max(sum(sizes["commit_kv", *commit] for commit in shapes.kv_commits(*key)) for key in shapes.keys)
    return ProgramSizes(step, max(pages, rows), running)


def remembered_sizes(shapes: Any, measure: Callable[[], ProgramSizes]) -> ProgramSizes:
    """``measure()``, kept in the user's cache; ``shapes`` is a dataclass with all that the programs depend on."""
    facts = {
        "kind": type(shapes).__name__,
        **asdict(shapes),
        "versions": environment.versions(),
        "source": _source_digest(),
        "device": [jax.default_backend(), jax.devices()[0].device_kind],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]
    path = environment.step_sizes_dir() / f"{digest}.json"
    try:
        step, commit, running = json.loads(path.read_text())
        return ProgramSizes(int(step), int(commit), {name: int(size) for name, size in running.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        pass
    sizes = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(astuple(sizes)))
        os.replace(temporary, path)
    except OSError:
        pass  # a cache that cannot be written costs time, nothing else
    return sizes


@lru_cache(maxsize=1)
def _source_digest() -> str:
    """sha256 over the code that programs are compiled from: a version number stays the same while it is edited."""
    sha = hashlib.sha256()
    for package in ("pwjax", "pallas_kernels"):
        for file in sorted(Path(str(resources.files(package))).rglob("*.py")):
            sha.update(file.read_bytes())
    return sha.hexdigest()


def page_table_bytes(config: ModelConfig, geometry: Geometry) -> int:
    """Bytes of one epoch of the page table on the device."""
    return config.blocks * (geometry.slots + 1) * 4 + 4


def _tables(shapes: StepShapes) -> tuple[int, int]:
    """Bytes of one page table with the KV tables, and of the page table alone."""
    page_table = page_table_bytes(shapes.config, shapes.geometry)
    return page_table + sum(4 * math.prod(kind.table_shape(shapes.slots)) for kind in shapes.kv_kinds), page_table


def plan_memory(
    shapes: StepShapes,
    params,
    table: BlockTable,
    budget_bytes: int | None,
    fixed_bits: int | np.ndarray | None = None,
    sizes: ProgramSizes | None = None,
) -> MemoryPlan:
    """Divide ``budget_bytes`` (None: whatever the best case needs) among the parts.

    ``params`` are dense parameters or their shapes; ``sizes`` the result of :func:`step_memory`, measured here if
    not given. With ``fixed_bits`` the weights neither rise nor fall.
    """
    sizes = sizes or step_memory(shapes, params)
    step_bytes, commit_bytes = sizes.step_bytes, sizes.commit_bytes
    with_kv, page_table = _tables(shapes)
    page_bytes = shapes.geometry.page_bytes
    sequence_pages = shapes.kv_pages(shapes.context)
    if fixed_bits is None:
        # Of small blocks the page count need not rise with the bits, so each block has its own extremes.
        low, high = int(table.pages.min(1).sum()), int(table.pages.max(1).sum())
    else:
        low = high = int(table.total_pages(fixed_bits))
    moves = fixed_bits is None
    # A fixed plan stages only while it loads, before any sequence runs; one commit at a time is enough then.
    staging_pages = COMMIT_WIDTHS[-1] * (STAGING_COMMITS if moves else 1)
    if moves:
        # A demotion in one part needs no free page, so pressure can always be answered.
        staging_pages = max(staging_pages, padded_pages(largest_demotion_pages(shapes.geometry)))
    staging = staging_pages * page_bytes
    rest = tree_bytes(params) + with_kv + page_table + step_bytes + commit_bytes + staging
    smallest = rest + (1 + low + sequence_pages) * page_bytes
    if budget_bytes is None:
        budget_bytes = rest + (1 + high + sequence_pages * shapes.slots) * page_bytes
    return MemoryPlan(
        budget_bytes=budget_bytes,
        dense_bytes=tree_bytes(params),
        table_bytes=with_kv + page_table,
        step_bytes=step_bytes,
        commit_bytes=commit_bytes,
        staging_bytes=staging,
        page_bytes=page_bytes,
        num_pages=max(0, (budget_bytes - rest) // page_bytes),
        weights_min_pages=low,
        weights_max_pages=high,
        sequence_pages=sequence_pages,
        smallest_budget_bytes=smallest,
    )


def shrink_to_fit(
    shapes: StepShapes, measure: Callable[[StepShapes], MemoryPlan]
) -> tuple[StepShapes, MemoryPlan]:
    """The first of ``shapes`` and its smaller forms whose plan fits, with the plan.

    Smaller: only the smallest prefill chunk and one decode token a dispatch, then half the slots, down to one.
    BudgetError with the smallest budget that works where none fits.
    """
    plan = measure(shapes)
    if plan.fits:
        return shapes, plan
    small = replace(shapes, chunks=shapes.chunks[:1], decode_tokens=1)
    # The smallest form first: where even that does not fit, compiling those between would only cost time.
    plan, slots = measure(replace(small, slots=1)), shapes.slots
    while plan.fits:
        form = replace(small, slots=slots)
        if slots == 1 or measure(form).fits:
            return form, measure(form)
        slots //= 2
    raise BudgetError(
        f"the memory budget of {plan.budget_bytes} bytes is too small: one sequence of {shapes.context} tokens "
        f"beside the experts at the lowest precision they may have needs {plan.smallest_budget_bytes} bytes "
        f"({plan.smallest_budget_bytes / 2**20:.1f} MiB); raise --memory-budget or lower --context",
        plan.smallest_budget_bytes,
    )
