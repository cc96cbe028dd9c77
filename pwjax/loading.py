"""From a model on disk and a budget to an engine: measure, divide the budget, compile, load."""

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from planner import BlockTable, Plan, Policy, get_policy
from planner.solve import uniform
from pwjax import environment
from pwjax.checkpoints.artifact import Artifact
from pwjax.engine.budget import (
    MemoryPlan,
    ProgramSizes,
    plan_memory,
    program_name,
    remembered_sizes,
    shrink_to_fit,
    step_memory,
)
from pwjax.engine.decisions import Decisions, Live
from pwjax.engine.engine import Engine
from pwjax.engine.eviction import default_damage_per_ms
from pwjax.engine.log import EpochLog, LogSink
from pwjax.engine.meter import Meter
from pwjax.engine.parts import Parts
from pwjax.engine.steps import StepShapes, compile_step
from pwjax.engine.text import Tokenizer
from pwjax.engine.weights import load_weights, params_spec
from pwjax.errors import BudgetError, UsageError
from pwjax.memory import KVPages, Prefixes, ThreadTransfer
from pwjax.memory.host_store import HostStore
from pwjax.memory.transfer import Transfer
from pwjax.units import format_bytes

CHUNKS = (32, 128)
DECODE_TOKENS = 4
KV_DTYPES = ("bfloat16", "float32")
# A dynamic policy starts with room for this many tokens a slot: KV grows into what demotions free.
RESERVE_TOKENS = 64

Report = Callable[[str], None]


class Outlook(NamedTuple):
    """What a budget gives, before anything is allocated: shapes, bytes, and the plan to start with.

    ``running_bytes``: what each program adds to the live buffers while it runs, see ``budget.ProgramSizes``.
    """

    shapes: StepShapes
    memory: MemoryPlan
    plan: Plan
    policy: Policy
    moves: bool
    running_bytes: dict[str, int]


@dataclass(frozen=True)
class Injected:
    """What replays, benchmarks and tests put in the place of the real thing.

    ``transfer`` makes the copies of a page store; ``log`` takes the header and gives what records go to, in place of
    a file; ``decisions`` None is the policy; ``clock`` seconds that only grow.
    """

    transfer: Callable[[HostStore], Transfer] = ThreadTransfer
    log: Callable[[dict], LogSink] | None = None
    decisions: Decisions | None = None
    clock: Callable[[], float] = time.perf_counter


def bundled_model() -> Path:
    """Directory of the demo model that comes with the package."""
    return Path(str(resources.files("pwjax") / "data" / "demo.pw"))


def open_model(model: str | os.PathLike | None) -> Artifact:
    """The artifact at ``model``, None for the bundled one. ArtifactError, UsageError for a Hugging Face directory."""
    path = bundled_model() if model is None else Path(model)
    if (path / "config.json").exists() and not (path / "manifest.json").exists():
        raise UsageError(f"{path} is a Hugging Face checkpoint; quantize it first: pwjax quantize {path} OUT")
    return Artifact.open(path)


def model_identity(artifact: Artifact) -> str:
    """sha256 of the manifest, which holds the sha256 of every other file."""
    return hashlib.sha256((artifact.path / "manifest.json").read_bytes()).hexdigest()


def outlook(
    artifact: Artifact,
    *,
    memory_budget_bytes: int | None = None,
    batch: int = 8,
    context: int | None = None,
    kv_dtype: str = "bfloat16",
    policy: str = "default",
    bits: int | np.ndarray | None = None,
    chunks: tuple[int, ...] = CHUNKS,
    decode_tokens: int = DECODE_TOKENS,
    shrink: bool = True,
    report: Report | None = None,
) -> Outlook:
    """Divide a budget for a model; the same path for ``pwjax plan`` and :func:`load`.

    ``bits`` (one width, or int[n] a block) fixes the precision. With ``shrink``, smaller programs and fewer slots are
    tried before BudgetError; without, the memory plan may say that it does not fit. UsageError for bad values.
    """
    config, geometry = artifact.config, artifact.geometry
    try:
        chosen = get_policy("uniform" if bits is not None else policy)
    except ValueError as error:
        raise UsageError(str(error)) from error
    table = artifact.table(preferred=chosen.damage_form)
    context = config.max_positions if context is None else context
    for name, value in (("--batch", batch), ("--context", context), *(("a chunk", size) for size in chunks)):
        if not isinstance(value, int | np.integer):
            raise UsageError(f"{name} must be a whole number, got {value!r}")
    if not chunks or min(chunks) < 1:
        raise UsageError(f"chunks must be sizes in tokens, at least one of at least 1, got {chunks!r}")
    if not 2 <= context <= config.max_positions:
        raise UsageError(f"--context must be from 2 to the model's {config.max_positions} tokens, got {context}")
    if batch < 1:
        raise UsageError(f"--batch must be at least 1, got {batch}")
    if kv_dtype not in KV_DTYPES:
        raise UsageError(f"unknown KV dtype {kv_dtype!r}; choose from {', '.join(KV_DTYPES)}")
    fixed = checked_bits(bits, table)
    chunks = tuple(c for c in chunks if c < context) or (min(chunks),)
    moves = fixed is None and chosen.moves
    # Nobody asks how much prompts suffer where nothing moves.
    moments = moves and table.heads is not None and table.heads.reference is not None
    shapes = StepShapes(config, geometry, batch, context, chunks, decode_tokens, kv_dtype, moments)
    row_words = config.kv_row_words(4 if kv_dtype == "float32" else 2)
    if row_words > geometry.page_words:
        smaller = "" if kv_dtype == "bfloat16" else "use --kv-dtype bfloat16, or "
        raise UsageError(
            f"a page of this model holds {geometry.page_bytes} bytes, but K of one token in one layer takes "
            f"{row_words * 4} in {kv_dtype}; {smaller}quantize with larger pages"
        )
    params = params_spec(config)

    def sizes(form: StepShapes) -> ProgramSizes:
        return remembered_sizes(form, lambda: step_memory(form, params, report))

    def measure(form: StepShapes) -> MemoryPlan:
        return plan_memory(form, params, table, memory_budget_bytes, fixed, sizes(form))

    if shrink:
        shapes, memory = shrink_to_fit(shapes, measure)
    else:
        memory = measure(shapes)
    if fixed is not None:
        plan = _fixed_plan(table, fixed)
    else:
        plan = chosen.initial(table, memory.capacity_pages, _reserve(memory, shapes, chosen.moves))
    return Outlook(shapes, memory, plan, chosen, moves, sizes(shapes).running_bytes)


def load(
    model: str | os.PathLike | None = None,
    memory_budget: int | str | None = None,
    *,
    batch: int = 8,
    context: int | None = None,
    kv_dtype: str = "bfloat16",
    policy: str = "default",
    bits: int | np.ndarray | None = None,
    chunks: tuple[int, ...] = CHUNKS,
    seed: int = 0,
    prefix_cache: bool = True,
    damage_per_ms: float | None = None,
    shadow: float | None = None,
    log: str | os.PathLike | None = None,
    report: Report | None = None,
    progress: Callable[[int, int], None] | None = None,
    injected: Injected | None = None,
) -> Engine:
    """An engine for the model at ``model`` (None: the bundled one) under ``memory_budget``.

    ``memory_budget`` is bytes or a size such as ``"10GiB"`` (None: enough for full precision and full context);
    ``batch`` slots; ``context`` tokens a sequence, prompt and new ones; ``bits`` fixes the precision, one width or an
    int[n] a block; ``chunks`` the sizes that prompts are cut into; ``seed`` for requests that bring none;
    ``prefix_cache``: requests that begin alike share KV pages, and prompts stay cached; ``damage_per_ms``: predicted
    damage a served token that a millisecond of computing a cached prompt again is worth, None:
    :func:`pwjax.engine.eviction.default_damage_per_ms`; ``shadow``: share of each request's tokens whose distribution
    the log keeps for a measurement at high bits, None: 1/32 of those of requests with ``max_damage``; ``log`` a path
    for the epoch log; ``report`` is told what is being compiled; ``progress(blocks, all blocks)`` while weights load;
    ``injected`` is for replays and tests.
    BudgetError, ArtifactError, UsageError.
    """
    from pwjax.units import parse_bytes

    meter, injected = Meter(), injected or Injected()
    artifact = open_model(model)
    budget = None if memory_budget is None else parse_bytes(memory_budget)
    if damage_per_ms is not None and not 0 <= damage_per_ms < float("inf"):
        raise UsageError(f"damage_per_ms must be a number from 0, got {damage_per_ms!r}")
    if shadow is not None and not 0 <= shadow <= 1:
        raise UsageError(f"shadow must be a share from 0 to 1, got {shadow!r}")
    view = outlook(
        artifact, memory_budget_bytes=budget, batch=batch, context=context, kv_dtype=kv_dtype, policy=policy, bits=bits,
        chunks=chunks, report=report,
    )  # fmt: skip
    check_device(view.memory.total_bytes)
    settings = {
        "memory_budget": budget, "batch": batch, "context": context, "kv_dtype": kv_dtype, "policy": policy,
        "bits": None if bits is None else np.asarray(bits).tolist(), "chunks": list(chunks), "seed": seed,
        "prefix_cache": prefix_cache, "damage_per_ms": damage_per_ms, "shadow": shadow,
    }  # fmt: skip
    header = log_header(model, artifact, settings, view)
    shapes, memory, table = view.shapes, view.memory, view.plan.table
    config = shapes.config
    tokenizer = Tokenizer.load(artifact.tokenizer_path, config.bos_token_id) if artifact.tokenizer_path else None
    with ExitStack() as undo:  # whatever fails below leaves no thread, file or device memory behind
        sink = EpochLog(log, header) if injected.log is None else injected.log(header)
        undo.callback(sink.close)
        programs = {}
        for key in shapes.keys:
            if report:
                report(program_name(key))
            programs[key] = compile_step(shapes, key, memory.num_pages, params_spec(config))
        weights = load_weights(
            artifact, view.plan.bits, memory.num_pages, memory.staging_pages, kv_shapes=shapes.kv_shapes,
            meter=meter, progress=progress, make_transfer=injected.transfer, clock=injected.clock,
        )  # fmt: skip
        undo.callback(weights.close)
        kv = KVPages(weights.allocator, shapes.kv_kinds, shapes.slots)
        parts = Parts(
            shapes=shapes, memory=memory, table=table, programs=programs, kv=kv, policy=view.policy,
            tokenizer=tokenizer, decisions=injected.decisions or Live(view.policy), meter=meter, log=sink,
            start_bits=view.plan.bits, moves=view.moves, seed=seed,
            prefixes=Prefixes(kv, shapes.chunks[-1], prefix_cache),
            damage_per_ms=default_damage_per_ms(table) if damage_per_ms is None else damage_per_ms, shadow=shadow,
            **weights._asdict(),
        )  # fmt: skip
        engine = Engine(parts)
        meter.warm()
        undo.pop_all()
    return engine


def device_lack(need_bytes: int) -> str | None:
    """A clause that says why this machine's device cannot have ``need_bytes``; None where it can, or does not say."""
    device = environment.devices()[0]
    has_bytes = environment.memory_bytes()["total"] if device["platform"] == "cpu" else device["memory_bytes"]
    if has_bytes is None or need_bytes <= has_bytes:
        return None
    return f"the device ({device['kind']}) has {format_bytes(has_bytes)}"


def check_device(need_bytes: int) -> None:
    """BudgetError where this machine's device lacks ``need_bytes``: XLA would abort the process."""
    if lack := device_lack(need_bytes):
        raise BudgetError(
            f"the memory budget comes to {need_bytes} bytes ({format_bytes(need_bytes)}) here, but {lack}; "
            "give a --memory-budget that it holds"
        )


def log_header(model: str | os.PathLike | None, artifact: Artifact, settings: dict, view: Outlook) -> dict:
    """Header of an epoch log: everything beside the records that a run depends on. ``docs/log.md`` lists it.

    ``settings`` are the arguments of :func:`load`; ``model_path`` is a hint where to find the model again, and the
    only part that may differ between a run and its replay.
    """
    shapes = view.shapes
    return {
        "versions": environment.versions(),
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "cpu": environment.cpu_info(),
        "threads": os.cpu_count(),
        "model_path": None if model is None else os.fspath(model),
        "model": model_identity(artifact),
        "geometry": shapes.geometry.to_json(),
        "settings": settings,
        "seed": settings["seed"],
        "policy": settings["policy"] if view.moves or settings["bits"] is None else "fixed",
        "memory": view.memory.to_json(),
        "num_pages": view.memory.num_pages,
        "layers": shapes.config.num_layers,
        "experts": shapes.config.num_experts,
        "slots": shapes.slots,
        "context": shapes.context,
        "chunks": list(shapes.chunks),
        "decode_tokens": shapes.decode_tokens,
        "kv_dtype": shapes.kv_dtype,
        "bits": view.plan.bits.tolist(),
    }


def checked_bits(bits: int | np.ndarray | None, table: BlockTable) -> np.ndarray | None:
    """``bits`` as int[n]; UsageError for a precision that the model does not have."""
    if bits is None:
        return None
    array = np.asarray(bits)
    full = np.full(table.blocks, array) if array.ndim == 0 else array.reshape(-1)
    wrong = sorted(set(full.tolist()) - set(table.widths))
    if wrong:
        raise UsageError(f"this model has no {wrong[0]} bits; choose from {', '.join(map(str, table.widths))}")
    if full.shape != (table.blocks,):
        raise UsageError(f"bits must be one width or one a block ({table.blocks}), got {full.size}")
    return full.astype(np.int64)


def _fixed_plan(table: BlockTable, bits: np.ndarray) -> Plan:
    return replace(uniform(table, int(bits[0])), bits=bits, before=bits, cause="Fixed.")


def _reserve(memory: MemoryPlan, shapes: StepShapes, moves: bool) -> int:
    """Pages that the first plan leaves for KV: all that can be used if it never moves, a start if it does."""
    spare = memory.capacity_pages - memory.weights_min_pages
    if not moves:
        return max(0, min(spare, memory.sequence_pages * shapes.slots))
    start = shapes.kv_pages(RESERVE_TOKENS) * shapes.slots
    return max(0, min(spare, max(start, memory.capacity_pages // 10)))
