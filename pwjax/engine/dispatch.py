"""Dispatches: sequences to the arguments of a compiled step, and the fresh KV rows of its tokens to their pages.

Pages for every token that a dispatch can commit are reserved before it (see ``engine.scheduler``).
"""

from collections.abc import Sequence as Seq
from typing import Any

import jax
import numpy as np

from pwjax.engine.parts import Parts
from pwjax.engine.sampling import SamplingArrays
from pwjax.engine.sequence import Sequence
from pwjax.engine.steps import STOP_IDS, Given, Sampled, Slots, compile_step
from pwjax.errors import BudgetError
from pwjax.memory import program_memory
from pwjax.models import RoutingStats


class Dispatcher:
    """Runs the programs of an engine, commits what they computed and advances ``kv_tokens`` of its sequences."""

    def __init__(self, parts: Parts):
        self._parts = parts
        self._temp_bytes = {key: program_memory(program).temp_bytes for key, program in parts.programs.items()}

    def prefill(self, sequence: Sequence) -> tuple[Sampled, RoutingStats]:
        """The next chunk of a sequence; the sampled token (on the host) counts after the last chunk only."""
        parts = self._parts
        bucket, count = self._cut(sequence)
        tokens = _padded(sequence.tokens(sequence.kv_tokens, count), bucket)
        slots = self._slots([sequence], [count])
        with parts.meter.prefill.timed():
            key = ("prefill", bucket)
            sampled, rows, stats = self._run(key, tokens, np.int32(sequence.slot), slots)
            self._commit(parts.kv.places(sequence.slot, sequence.kv_tokens, count, bucket), rows)
            sampled = self._result(key, sampled)
        parts.meter.prefill.tokens += count
        sequence.kv_tokens += count
        return sampled, stats

    def score(self, sequence: Sequence) -> tuple[Given, RoutingStats]:
        """The next chunk of a sequence: what is found, on the host, of the ``count`` tokens that follow those of it.

        Compiled when it is first asked for; BudgetError where its program does not fit beside the arena.
        """
        parts = self._parts
        bucket, count = self._cut(sequence)
        key = ("score", bucket)
        self._compile(key)
        start = sequence.kv_tokens
        tokens, targets = (_padded(sequence.tokens(at, count), bucket) for at in (start, start + 1))
        slots = self._slots([sequence], [count])
        with parts.meter.prefill.timed():
            given, rows, stats = self._run(key, tokens, targets, np.int32(sequence.slot), slots)
            self._commit(parts.kv.places(sequence.slot, start, count, bucket), rows)
            given = self._result(key, given)
        parts.meter.prefill.tokens += count
        sequence.kv_tokens += count
        return Given(*(a[:count] for a in given)), stats

    def decode(self, running: Seq[Sequence | None], limits: Seq[int]) -> tuple[Sampled, RoutingStats]:
        """Up to ``limits[slot]`` tokens of the sequence in every slot, None sits out; the tokens are on the host."""
        parts, tokens = self._parts, self._parts.shapes.decode_tokens
        last = np.array([s.generated[-1] if s else 0 for s in running], np.int32)
        with parts.meter.decode.timed():
            sampled, rows, stats = self._run(("decode", tokens), last, self._slots(running, limits))
            sampled = self._result(("decode", tokens), sampled)
        places = []
        for slot, sequence in enumerate(running):
            fed = int(sampled.live[:, slot].sum()) if sequence else 0
            places.append(parts.kv.places(slot, sequence.kv_tokens if sequence else 0, fed, tokens))
            if sequence:
                parts.meter.decode.tokens += fed
                sequence.kv_tokens += fed
        # A kind at a time: its places of all slots, [layers, 2, slots, tokens].
        by_kind = zip(*places, strict=True)
        self._commit([[np.stack(a, axis=2) for a in zip(*kind, strict=True)] for kind in by_kind], rows)
        return sampled, stats

    def _cut(self, sequence: Sequence) -> tuple[int, int]:
        """Program and tokens of the next chunk: by the prompt alone, so that neighbours and pressure change nothing."""
        return self._parts.shapes.cut(sequence.prefill_target - sequence.kv_tokens)

    def _compile(self, key: tuple[str, int]) -> None:
        parts = self._parts
        if key in parts.programs:
            return
        with parts.meter.compiling():
            program = compile_step(parts.shapes, key, parts.memory.num_pages, parts.params)
        sizes = program_memory(program)
        need = sizes.running_bytes
        if need > parts.memory.step_bytes:
            raise BudgetError(
                f"the program {key[0]} {key[1]} needs {need} bytes, but the budget has {parts.memory.step_bytes} for "
                "the programs of generation; load with a larger batch, which has larger programs"
            )
        parts.programs[key], self._temp_bytes[key] = program, sizes.temp_bytes

    def _run(self, key: tuple[str, int], *arguments) -> tuple[Any, tuple[jax.Array, ...], RoutingStats]:
        parts = self._parts
        parts.kv.apply()
        # Before anything is written where a page is copied from.
        for source, target in parts.kv.copies:
            parts.arena.copy_pages(source, target)
        parts.kv.copies.clear()
        program = parts.programs[key]
        with jax.profiler.TraceAnnotation(f"{key[0]} {key[1]}"):
            return program(parts.params, parts.arena.array, parts.page_table.table, parts.kv.table, *arguments)

    def _result(self, key: tuple[str, int], result: Any) -> Any:
        """``result`` of the program ``key`` on the host; a reading of the meter once it is there.

        By then, what the program gave back is alive, and so are pages that landed while it ran.
        """
        result = jax.device_get(result)
        self._parts.meter.observe(self._temp_bytes[key])
        return result

    def _commit(self, places: Seq[Seq[np.ndarray]], rows: Seq[jax.Array]) -> None:
        """Write the rows of every kind of attention to their pages and words."""
        for (page, word), kind_rows in zip(places, rows, strict=True):
            self._parts.arena.commit_kv(page, word, kind_rows)

    def _slots(self, sequences: Seq[Sequence | None], limits: Seq[int]) -> Slots:
        """Per-slot arguments of a dispatch; None is an empty slot."""
        stop_ids = np.full((len(sequences), STOP_IDS), -1, np.int32)
        for row, sequence in zip(stop_ids, sequences, strict=True):
            ids = self._stop_ids(sequence) if sequence else ()
            row[: len(ids)] = ids
        sampling = [s.request.sampling if s else None for s in sequences]
        steps = self._parts.shapes.decode_tokens
        sampled = (
            s is not None and any(map(s.shadowed, range(min(limit, steps))))
            for s, limit in zip(sequences, limits, strict=True)
        )
        # Host arrays, which a compiled program takes where it declares device arrays.
        host: dict[str, Any] = {
            "past": np.array([s.kv_tokens if s else 0 for s in sequences], np.int32),
            "limit": np.array(limits, np.int32),
            "stop_ids": stop_ids,
            "seeds": np.array([s.seed if s else 0 for s in sequences], np.uint32),
            "want_top": np.bool_(any(p and p.logprobs for p in sampling) or any(sampled)),
        }
        return Slots(**host, params=SamplingArrays.of(sampling))

    def _stop_ids(self, sequence: Sequence) -> tuple[int, ...]:
        """Those that the program looks for; the rest is found by ``Sequence.push`` when the dispatch is over."""
        sampling = sequence.request.sampling
        eos = () if sampling.ignore_eos else self._parts.shapes.config.eos_token_ids
        return (*eos, *sampling.stop_token_ids)[:STOP_IDS]


def _padded(tokens: Seq[int], width: int) -> np.ndarray:
    """``tokens`` as int32[1, width], zeros behind them."""
    out = np.zeros((1, width), np.int32)
    out[0, : len(tokens)] = tokens
    return out
