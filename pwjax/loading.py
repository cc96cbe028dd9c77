"""From a model on disk and a budget to an engine: measure, divide the budget, compile, load."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from planner import BlockTable, Plan, Policy, get_policy
from planner.solve import uniform
from pwjax import environment
from pwjax.checkpoints.artifact import Artifact
from pwjax.engine.budget import MemoryPlan, plan_memory, remembered_sizes, shrink_to_fit, step_memory
from pwjax.engine.engine import Engine
from pwjax.engine.log import EpochLog
from pwjax.engine.meter import Meter
from pwjax.engine.parts import Parts
from pwjax.engine.steps import StepShapes, compile_step
from pwjax.engine.text import Tokenizer
from pwjax.engine.weights import load_weights, params_spec
from pwjax.errors import UsageError
from pwjax.memory import KVPages

CHUNKS = (32, 128)
DECODE_TOKENS = 4
KV_DTYPES = ("bfloat16", "float32")
# A dynamic policy starts with room for this many tokens a slot: KV grows into what demotions free.
RESERVE_TOKENS = 64

Report = Callable[[str], None]


class Outlook(NamedTuple):
    """What a budget gives, before anything is allocated: shapes, bytes, and the plan to start with."""

    shapes: StepShapes
    memory: MemoryPlan
    plan: Plan
    policy: Policy
    moves: bool


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
    table = artifact.table(chosen.damage_form)
    context = config.max_positions if context is None else context
    if not 2 <= context <= config.max_positions:
        raise UsageError(f"--context must be from 2 to the model's {config.max_positions} tokens, got {context}")
    if batch < 1:
        raise UsageError(f"--batch must be at least 1, got {batch}")
    if kv_dtype not in KV_DTYPES:
        raise UsageError(f"unknown KV dtype {kv_dtype!r}; choose from {', '.join(KV_DTYPES)}")
    fixed = checked_bits(bits, table)
    chunks = tuple(c for c in chunks if c < context) or (min(chunks),)
    shapes = StepShapes(config, geometry, batch, context, chunks, decode_tokens, kv_dtype)
    if shapes.row_words > geometry.page_words:
        smaller = "" if kv_dtype == "bfloat16" else "use --kv-dtype bfloat16, or "
        raise UsageError(
            f"a page of this model holds {geometry.page_bytes} bytes, but K of one token in one layer takes "
            f"{shapes.row_words * 4} in {kv_dtype}; {smaller}quantize with larger pages"
        )
    params = params_spec(config)

    def measure(form: StepShapes) -> MemoryPlan:
        sizes = remembered_sizes(form, lambda: step_memory(form, params, report))
        return plan_memory(form, params, table, memory_budget_bytes, fixed, sizes)

    if shrink:
        shapes, memory = shrink_to_fit(shapes, measure)
    else:
        memory = measure(shapes)
    if fixed is not None:
        plan = _fixed_plan(table, fixed)
    else:
        plan = chosen.initial(table, memory.capacity_pages, _reserve(memory, shapes, chosen.moves))
    return Outlook(shapes, memory, plan, chosen, fixed is None and chosen.moves)


def load(
    model: str | os.PathLike | None = None,
    memory_budget: int | str | None = None,
    *,
    batch: int = 8,
    context: int | None = None,
    kv_dtype: str = "bfloat16",
    policy: str = "default",
    bits: int | np.ndarray | None = None,
    seed: int = 0,
    log: str | os.PathLike | None = None,
    report: Report | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """An engine for the model at ``model`` (None: the bundled one) under ``memory_budget``.

    ``memory_budget`` is bytes or a size such as ``"10GiB"`` (None: enough for full precision and full context);
    ``batch`` slots; ``context`` tokens a sequence, prompt and new ones; ``bits`` fixes the precision, one width or an
    int[n] a block; ``seed`` for requests that bring none; ``log`` a path for the epoch log; ``report`` is told what
    is being compiled; ``progress(blocks, all blocks)`` while weights load. BudgetError, ArtifactError, UsageError.
    """
    from pwjax.units import parse_bytes

    meter = Meter()
    artifact = open_model(model)
    budget = None if memory_budget is None else parse_bytes(memory_budget)
    view = outlook(
        artifact, memory_budget_bytes=budget, batch=batch, context=context, kv_dtype=kv_dtype, policy=policy, bits=bits,
        report=report,
    )  # fmt: skip
    shapes, memory, table = view.shapes, view.memory, view.plan.table
    config, geometry = shapes.config, shapes.geometry
    tokenizer = Tokenizer.load(artifact.tokenizer_path, config.bos_token_id) if artifact.tokenizer_path else None
    programs = {}
    for key in shapes.keys:
        if report:
            report(f"{key[0]} {key[1]}")
        programs[key] = compile_step(shapes, key, memory.num_pages, params_spec(config))
    kv_shapes = sorted({(shapes.kv_rows(*key), shapes.row_words) for key in shapes.keys})
    weights = load_weights(
        artifact, view.plan.bits, memory.num_pages, memory.staging_pages, kv_shapes=kv_shapes, meter=meter,
        progress=progress,
    )  # fmt: skip
    kv = KVPages(
        weights.allocator, slots=shapes.slots, layers=config.num_layers, max_tokens=shapes.context,
        page_words=geometry.page_words, row_words=shapes.row_words,
    )  # fmt: skip
    header = {
        "versions": environment.versions(),
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "threads": os.cpu_count(),
        "geometry": geometry.to_json(),
        "model": model_identity(artifact),
        "seed": seed,
        "policy": policy if view.moves or bits is None else "fixed",
        "memory": memory.to_json(),
        "slots": shapes.slots,
        "chunks": list(shapes.chunks),
        "decode_tokens": shapes.decode_tokens,
        "kv_dtype": kv_dtype,
        "bits": view.plan.bits.tolist(),
    }
    parts = Parts(
        shapes=shapes, memory=memory, table=table, programs=programs, kv=kv, policy=view.policy, tokenizer=tokenizer,
        meter=meter, log=EpochLog(log, header), start_bits=view.plan.bits, moves=view.moves, seed=seed,
        **weights._asdict(),
    )  # fmt: skip
    meter.warm()
    return Engine(parts)


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
    tokens = shapes.geometry.page_words // shapes.row_words
    start = -(-RESERVE_TOKENS // tokens) * 2 * shapes.config.num_layers * shapes.slots
    return max(0, min(spare, max(start, memory.capacity_pages // 10)))
