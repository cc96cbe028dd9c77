"""The compiled steps: prefill of one slot, and several decode steps of all slots in one dispatch.

A step only reads the arena and returns the KV rows of its tokens; the engine commits them at the boundary. Nothing
that a plan, a request or a sampling parameter changes is part of a shape, so each program is compiled once.

    prefill[C]   one slot, up to C prompt tokens; samples the next token from the last of them
    score[C]     one slot, up to C given tokens; their log-probabilities (compiled when it is first asked for)
    decode[n]    every slot, up to n tokens each; a slot that stops inside leaves statistics and writes
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention import Past, pack_rows
from pallas_kernels.pages import Geometry
from pwjax.config import ModelConfig
from pwjax.engine.sampling import MAX_LOGPROBS, SamplingArrays, sample, top_logprobs
from pwjax.memory.kv import KVKind
from pwjax.memory.page_table import PageTable
from pwjax.models import Fresh, Output, Paged, RoutingStats, apply, logits

# Stop token ids a slot can have on the device; a request with more is stopped by the host at the boundary.
STOP_IDS = 8
# Tokens whose logits exist at the same time in scoring, at most.
SCORE_ROWS = 8


@dataclass(frozen=True)
class StepShapes:
    """Everything static about the programs of one engine. ``moments``: a prompt's statistics include them."""

    config: ModelConfig
    geometry: Geometry
    slots: int
    context: int
    chunks: tuple[int, ...]
    decode_tokens: int
    kv_dtype: str
    moments: bool = False

    @property
    def kv_kinds(self) -> tuple[KVKind, ...]:
        """How KV of each kind of attention lies in pages."""
        config, size = self.config, jnp.dtype(self.kv_dtype).itemsize
        return tuple(
            KVKind(len(layers), kind.row_words(size), self.geometry.page_words, self.context, kind.window)
            for kind, layers in zip(config.attention_kinds, config.kind_layers, strict=True)
        )

    def kv_pages(self, tokens: int) -> int:
        """KV pages of a sequence of ``tokens`` tokens."""
        return sum(kind.pages(tokens) for kind in self.kv_kinds)

    def kv_tokens(self, pages: int) -> int:
        """Tokens that sequences as long as the context, and one shorter, hold in ``pages`` KV pages."""
        whole, rest = divmod(pages, self.kv_pages(self.context))
        return whole * self.context + bisect_right(range(self.context + 1), rest, key=self.kv_pages) - 1

    @property
    def keys(self) -> tuple[tuple[str, int], ...]:
        """The declared programs: ``(kind, bucket)``."""
        return (*(("prefill", c) for c in self.chunks), ("decode", self.decode_tokens))

    def cut(self, left: int) -> tuple[int, int]:
        """Program size and tokens of the next chunk of a prompt of which ``left`` tokens are to come."""
        bucket = next((c for c in self.chunks if c >= left), self.chunks[-1])
        return bucket, min(left, bucket)

    def kv_commits(self, program: str, bucket: int) -> tuple[tuple[int, int], ...]:
        """``(rows, row_words)`` of each KV commit after a dispatch of a program, dropped rows included."""
        slots = self.slots if program == "decode" else 1
        return tuple((kind.turn_pages * bucket * slots, kind.row_words) for kind in self.kv_kinds)

    @property
    def kv_shapes(self) -> list[tuple[int, int]]:
        """All KV commits of the declared programs."""
        return sorted({commit for key in self.keys for commit in self.kv_commits(*key)})


class Sampled(NamedTuple):
    """Tokens of a dispatch, a leading axis for each generated token.

    ``token`` int32[n, S], ``logprob`` float32[n, S], ``top_ids`` int32[n, S, 20] and ``top_logprobs`` (zeros unless
    wanted), ``live`` bool[n, S]: the token is real.
    """

    token: jax.Array
    logprob: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    live: jax.Array


class Given(NamedTuple):
    """Of given tokens: ``logprob`` float32[C], ``greedy`` bool[C] whether it is the likeliest, and ``hidden``
    float32[C, H], the final hidden states that predict them."""

    logprob: jax.Array
    greedy: jax.Array
    hidden: jax.Array


class Slots(NamedTuple):
    """Per-slot arguments of a dispatch, all of length S (1 for prefill).

    ``past`` int32 tokens in pages; ``limit`` int32 tokens this dispatch may take (0: sits out); ``stop_ids``
    int32[S, STOP_IDS], -1 unused; ``seeds`` uint32; ``params`` SamplingArrays; ``want_top`` bool[] (not per slot).
    """

    past: jax.Array
    limit: jax.Array
    stop_ids: jax.Array
    seeds: jax.Array
    params: SamplingArrays
    want_top: jax.Array


def _choose(config, params, hidden, slots: Slots, positions) -> tuple[jax.Array, ...]:
    """Next token of each row of ``hidden`` float32[S, H], which takes ``positions`` int32[S] in its sequence."""
    scores = logits(config, params, hidden)
    token, logprob = sample(scores, slots.params, slots.seeds, positions)
    empty = (jnp.zeros((*token.shape, MAX_LOGPROBS), jnp.int32), jnp.zeros((*token.shape, MAX_LOGPROBS), jnp.float32))
    count = min(MAX_LOGPROBS, scores.shape[-1])
    pad = ((0, 0), (0, MAX_LOGPROBS - count))
    top = lax.cond(slots.want_top, lambda: tuple(jnp.pad(a, pad) for a in top_logprobs(scores, count)), lambda: empty)
    return token, logprob, *top


def _rows(fresh: Fresh) -> tuple[jax.Array, ...]:
    """KV rows of a dispatch, uint32[L_kind * 2 * B * F, row_words] a kind, in the order of the KV tables."""

    def packed(k: jax.Array, v: jax.Array) -> jax.Array:
        rows = jnp.stack([pack_rows(k), pack_rows(v)], axis=1)
        return rows.reshape(-1, rows.shape[-1])

    return tuple(packed(k, v) for k, v in zip(fresh.k, fresh.v, strict=True))


@jax.named_scope("prefill")
def prefill(shapes: StepShapes, params: Any, arena, table: PageTable, kv_tables, tokens, slot, slots: Slots):
    """``tokens`` int32[1, C] of one ``slot`` int32[]; ``slots.limit`` of them are real.

    Returns ``(Sampled, rows, RoutingStats)`` with one sampled token; the caller ignores it before the last chunk.
    """
    config, out = shapes.config, _chunk(shapes, params, arena, table, kv_tables, tokens, slot, slots)
    last = lax.dynamic_index_in_dim(out.hidden, slots.limit[0] - 1, axis=1, keepdims=False)
    choice = _choose(config, params, last, slots, slots.past + slots.limit)
    sampled = Sampled(*(a[None] for a in choice), live=jnp.ones((1, 1), bool))
    return sampled, _rows(out.fresh), out.stats


@jax.named_scope("score")
def score(shapes: StepShapes, params: Any, arena, table: PageTable, kv_tables, tokens, targets, slot, slots: Slots):
    """As :func:`prefill`, but log-probabilities of given tokens in place of a new one.

    ``targets`` int32[1, C] follow ``tokens``. Returns ``(Given, rows, RoutingStats)``; the head runs on as many tokens
    at a time as there are slots, so that logits take no more room than in :func:`decode`.
    """
    out = _chunk(shapes, params, arena, table, kv_tables, tokens, slot, slots)
    count, rows = tokens.shape[1], min(SCORE_ROWS, shapes.slots)
    pad = -count % rows
    hidden, wanted = jnp.pad(out.hidden[0], ((0, pad), (0, 0))), jnp.pad(targets[0], (0, pad))

    def head(part):
        scores = logits(shapes.config, params, part[0])
        own = jnp.take_along_axis(scores, part[1][:, None], axis=-1)[:, 0]
        return own - jax.nn.logsumexp(scores, axis=-1), scores.argmax(axis=-1) == part[1]

    found = lax.map(head, (hidden.reshape(-1, rows, hidden.shape[-1]), wanted.reshape(-1, rows)))
    logprob, greedy = (a.reshape(-1)[:count] for a in found)
    return Given(logprob, greedy, out.hidden[0]), _rows(out.fresh), out.stats


def _chunk(shapes: StepShapes, params: Any, arena, table: PageTable, kv_tables, tokens, slot, slots: Slots) -> Output:
    """The forward of up to C tokens of one slot."""
    offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = slots.past[:, None] + offsets
    valid = offsets < slots.limit[:, None]
    past = tuple(Past(arena, lax.dynamic_slice_in_dim(kv, slot, 1), slots.past) for kv in kv_tables)
    fresh = Fresh.empty(shapes.config, 1, tokens.shape[1], shapes.kv_dtype)
    paged = Paged(arena, table.bits, table.pages, shapes.geometry, moments=shapes.moments)
    return apply(shapes.config, params, tokens, positions, valid, fresh, past, paged)


@jax.named_scope("decode")
def decode(shapes: StepShapes, params: Any, arena, table: PageTable, kv_tables, last, slots: Slots):
    """Up to ``shapes.decode_tokens`` tokens a slot, from its ``last`` int32[S] token that has no KV yet.

    Returns ``(Sampled, rows, RoutingStats)``. Slot ``s`` fed ``live[:, s].sum()`` tokens; only their rows are real.
    """
    config, n = shapes.config, shapes.decode_tokens
    idle = slots.limit <= 0
    past = tuple(Past(arena, kv, jnp.where(idle, 0, slots.past)) for kv in kv_tables)
    paged = Paged(arena, table.bits, table.pages, shapes.geometry)

    def one(carry, j):
        token, fresh, live, stats = carry
        position = slots.past + j
        out = apply(config, params, token[:, None], position[:, None], live[:, None], fresh, past, paged)
        choice = _choose(config, params, out.hidden[:, 0], slots, position + 1)
        stopped = jnp.any(choice[0][:, None] == slots.stop_ids, axis=-1)
        carry = (choice[0], out.fresh, live & ~stopped & (j + 1 < slots.limit), stats.plus(out.stats))
        return carry, Sampled(*choice, live=live)

    start = (last, Fresh.empty(config, shapes.slots, n, shapes.kv_dtype), ~idle, _no_stats(config))
    (_, fresh, _, stats), sampled = lax.scan(one, start, jnp.arange(n, dtype=jnp.int32))
    return sampled, _rows(fresh), stats


def _no_stats(config: ModelConfig) -> RoutingStats:
    zeros = jnp.zeros((config.num_layers, config.num_experts), jnp.float32)
    return RoutingStats(zeros, zeros, zeros, jnp.zeros((*zeros.shape, 2, 3), jnp.float32))


def compile_step(shapes: StepShapes, key: tuple[str, int], num_pages: int, params: Any) -> jax.stages.Compiled:
    """Compile one program for an arena of ``num_pages``; ``params`` are dense parameters or their shapes."""
    kind, bucket = key
    spec: Any = jax.ShapeDtypeStruct  # stands for arrays wherever these are declared
    config, geometry = shapes.config, shapes.geometry
    layers, experts = config.num_layers, config.num_experts
    rows = shapes.slots if kind == "decode" else 1
    ints, floats = spec((rows,), jnp.int32), spec((rows,), jnp.float32)
    slots = Slots(
        past=ints,
        limit=ints,
        stop_ids=spec((rows, STOP_IDS), jnp.int32),
        seeds=spec((rows,), jnp.uint32),
        params=SamplingArrays(floats, ints, floats, floats),
        want_top=spec((), jnp.bool_),
    )
    table = PageTable(
        spec((layers, experts, 2), jnp.int32),
        spec((layers, experts, 2, geometry.slots), jnp.int32),
        spec((), jnp.int32),
    )
    memory = (
        jax.tree.map(lambda a: spec(a.shape, a.dtype), params),
        spec((num_pages, geometry.page_words), jnp.uint32),
        table,
        tuple(spec(kind.table_shape(shapes.slots), jnp.int32) for kind in shapes.kv_kinds),
    )
    if kind == "prefill":
        args = (spec((1, bucket), jnp.int32), spec((), jnp.int32), slots)
        function = prefill
    elif kind == "score":
        chunk = spec((1, bucket), jnp.int32)
        args = (chunk, chunk, spec((), jnp.int32), slots)
        function = score
    else:
        args = (ints, slots)
        function = decode
    return jax.jit(partial(function, shapes)).lower(*memory, *args).compile()
