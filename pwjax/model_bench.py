"""How fast a model is here, in the manner of llama-bench: prompts and generation, at widths, budgets and batch sizes.

Each row is one engine and one test: ``pp512`` takes ``batch`` prompts of 512 random tokens in, ``tg128`` generates 128
tokens in each of ``batch`` sequences that begin with one token. Rates are tokens of all sequences over the wall time of
the engine's loop, boundaries and moves included. A first run of each test is left out.
"""

import csv
import io
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pwjax import environment
from pwjax.engine.engine import Engine
from pwjax.engine.requests import Request
from pwjax.engine.sampling import SamplingParams
from pwjax.errors import PWJaxError
from pwjax.loading import load, model_identity, open_model
from pwjax.units import format_bytes

SCHEMA = "pwjax-bench-1"
COLUMNS = (
    "model", "bits", "policy", "budget_bytes", "peak_bytes", "mean_bits", "batch", "test", "tokens_per_s",
    "stddev_tokens_per_s", "repetitions",
)  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """One engine: ``bits`` fixed or None for ``policy``; ``budget_bytes`` None for what the model needs at its best."""

    bits: int | None
    policy: str
    budget_bytes: int | None
    batch: int


def bench_model(
    model: str | os.PathLike | None,
    arms: Sequence[Arm],
    prompt_tokens: Sequence[int] = (512,),
    new_tokens: Sequence[int] = (128,),
    repetitions: int = 5,
    kv_dtype: str = "bfloat16",
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """``{"schema", "environment", "settings", "rows"}``, JSON-ready; a row has its raw ``samples``, tokens a second.

    Engines run one after the other, each with all tests. What :func:`pwjax.load` raises; PWJaxError where a sequence
    did not run to its end.
    """
    artifact, rows = open_model(model), []
    tests = [("pp", n, n, 1) for n in prompt_tokens] + [("tg", n, 1, n) for n in new_tokens]
    context = max(prompt + new for _, _, prompt, new in tests)
    began = os.getloadavg() if hasattr(os, "getloadavg") else None
    for arm in arms:
        with load(
            model, arm.budget_bytes, batch=arm.batch, context=context, kv_dtype=kv_dtype, policy=arm.policy,
            bits=arm.bits, prefix_cache=False, shadow=0.0, report=report,
        ) as engine:  # fmt: skip
            for kind, tokens, prompt, new in tests:
                name = f"{kind}{tokens}"
                report(f"{name}, batch {arm.batch}, {arm.bits or arm.policy}")
                timed = [_run(engine, arm.batch, prompt, new, seed) for seed in range(repetitions + 1)][1:]
                samples = [arm.batch * tokens / seconds for seconds in timed]
                stats = engine.stats()
                rows.append({
                    "model": artifact.path.name,
                    "bits": arm.bits,
                    "policy": "fixed" if arm.bits else arm.policy,
                    "budget_bytes": stats["memory"]["budget_bytes"],
                    "peak_bytes": stats["memory"]["peak_bytes"],
                    "mean_bits": stats["precision"]["mean_bits_end"],
                    "batch": arm.batch,
                    "slots": engine.parts.shapes.slots,
                    "test": name,
                    "tokens_per_s": statistics.fmean(samples),
                    "stddev_tokens_per_s": statistics.stdev(samples) if len(samples) > 1 else None,
                    "repetitions": repetitions,
                    "samples": samples,
                    "recompiles_after_warmup": stats["compile"]["recompiles_after_warmup"],
                })  # fmt: skip
    about = {
        "versions": environment.versions(), "cpu": environment.cpu_info(), "devices": environment.devices(),
        "memory": environment.memory_bytes(), "load_before": began,
    }  # fmt: skip
    settings = {"model_sha256": model_identity(artifact), "context": context, "kv_dtype": kv_dtype}
    return {"schema": SCHEMA, "environment": about, "settings": settings, "rows": rows}


def _run(engine: Engine, batch: int, prompt: int, new: int, seed: int) -> float:
    """Seconds until ``batch`` sequences of ``prompt`` random tokens and ``new`` more are done."""
    tokens = np.random.default_rng(seed).integers(1, engine.config.vocab_size, (batch, prompt))
    sampling = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    requests = [Request(i, None, tuple(row.tolist()), sampling) for i, row in enumerate(tokens)]
    began = time.perf_counter()
    done = engine.generate(requests)
    seconds = time.perf_counter() - began
    for completion in done:
        if completion.generated_tokens != new:
            raise PWJaxError(f"a sequence ended early ({completion.finish_reason}): {completion.error}")
    return seconds


def as_csv(rows: Sequence[dict]) -> str:
    """The rows without their samples."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")


def as_markdown(rows: Sequence[dict]) -> str:
    """A table as llama-bench prints it: rates with their standard deviation."""
    head = ("model", "bits", "policy", "budget", "peak", "batch", "test", "tokens/s")
    lines = [f"| {' | '.join(head)} |", "|---|---:|---|---:|---:|---:|---|---:|"]
    for row in rows:
        bits = f"{row['mean_bits']:.2f}" if row["bits"] is None else str(row["bits"])
        spread = "" if row["stddev_tokens_per_s"] is None else f" ± {row['stddev_tokens_per_s']:.2f}"
        budget, peak = (format_bytes(row[f"{name}_bytes"]) for name in ("budget", "peak"))
        lines.append(
            f"| {row['model']} | {bits} | {row['policy']} | {budget} | {peak} | {row['batch']} | {row['test']} | "
            f"{row['tokens_per_s']:.2f}{spread} |"
        )
    return "\n".join(lines)
