"""Arrival traces: which requests come when, as lengths only. For a what-if, and for engines that should see the same.

A trace is a JSONL file, one request a line::

    {"at_step": 0, "prompt_tokens": 512, "max_tokens": 128}
    {"arrival_s": 0.35, "prompt_tokens": 64, "max_tokens": 256}

``at_step`` counts turns of the engine's loop; ``arrival_s`` seconds, turned into steps by the time that a step takes.
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from pwjax.engine.engine import Engine
from pwjax.engine.requests import Request
from pwjax.engine.sampling import SamplingParams
from pwjax.engine.sequence import Completion
from pwjax.errors import UsageError

KEYS = ("at_step", "arrival_s", "prompt_tokens", "max_tokens")
MOST = 10**18  # what 64 bits hold


@dataclass(frozen=True)
class Arrival:
    """One request of a trace: ``max_tokens`` are generated, no fewer."""

    at_step: int
    prompt_tokens: int
    max_tokens: int


def read_trace(path: str | os.PathLike, step_ms: float) -> list[Arrival]:
    """The arrivals of a file, in their order of steps. UsageError that names the line for anything else."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the trace {path}: {error}") from error
    arrivals = [_arrival(line, f"{path}, line {i}", step_ms) for i, line in enumerate(lines, 1) if line.strip()]
    if not arrivals:
        raise UsageError(f"the trace {path} holds no request")
    return sorted(arrivals, key=lambda arrival: arrival.at_step)


def _arrival(line: str, where: str, step_ms: float) -> Arrival:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON") from error
    if not isinstance(value, dict) or ("at_step" in value) == ("arrival_s" in value):
        raise UsageError(f"{where}: a request is an object with exactly one of at_step and arrival_s")
    unknown = sorted(set(value) - set(KEYS))
    if unknown:
        raise UsageError(f"{where}: unknown key {unknown[0]!r}; allowed are {', '.join(KEYS)}")
    for name, least in (("at_step", 0), ("prompt_tokens", 1), ("max_tokens", 1)):
        if name == "at_step" and "arrival_s" in value:
            continue
        if type(value.get(name)) is not int or not least <= value[name] < MOST:
            raise UsageError(f"{where}: {name} must be a whole number from {least} to 10^18, got {value.get(name)!r}")
    seconds = value.get("arrival_s", 0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e9:
        raise UsageError(f"{where}: arrival_s must be seconds from 0, got {seconds!r}")
    step = value["at_step"] if "at_step" in value else int(seconds * 1000 / step_ms)
    return Arrival(step, value["prompt_tokens"], value["max_tokens"])


def run_trace(
    engine: Engine, arrivals: Iterable[Arrival], watch: Callable[[int], None] | None = None
) -> list[Completion]:
    """Drive ``engine`` through a trace, prompts drawn by their place in it; completions in the order in which they end.

    ``watch(step)`` after every step. Steps at which nothing runs or waits are passed over.
    """
    waiting = sorted(enumerate(arrivals), key=lambda item: item[1].at_step)
    step, done = 0, []
    while waiting or not engine.idle:
        if engine.idle:
            step = max(step, waiting[0][1].at_step)
        while waiting and waiting[0][1].at_step <= step:
            index, arrival = waiting.pop(0)
            # A prompt of a billion tokens is refused like one that is a token too long, and takes no memory to make.
            length = min(arrival.prompt_tokens, engine.config.max_positions + 1)
            ids = np.random.default_rng(index).integers(1, engine.config.vocab_size, length)
            sampling = SamplingParams(max_tokens=arrival.max_tokens, temperature=0, ignore_eos=True)
            engine.submit(Request(index, prompt_token_ids=tuple(ids.tolist()), sampling=sampling))
        done += [event for event in engine.step() if isinstance(event, Completion)]
        step += 1
        if watch:
            watch(step)
    return done
