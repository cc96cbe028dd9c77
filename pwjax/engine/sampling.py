"""How the next token is chosen: the parameters of a request, and the pure function that applies them to logits.

Order: temperature, then top-k (exactly k, the lowest id wins a tie), then top-p over what top-k left, then min-p.
Every operation works on one row, and a row's random number depends on its own seed and position only, so the
tokens of a request do not depend on who shares its batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pwjax.errors import UsageError

MAX_LOGPROBS = 20
MAX_SEED = 2**32 - 1

# Below this a temperature is greedy in float32 anyway; the clamp only keeps the division finite.
_MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one request.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``max_tokens`` counts new tokens
    only. ``seed`` None lets the engine derive one from its own seed and the request's id. Generation stops before a
    string of ``stop`` (never part of the text), after a token of ``stop_token_ids``, and after the model's own
    end-of-sequence tokens unless ``ignore_eos``. ``logprobs`` n reports the n most likely tokens of every step,
    0 only the chosen one's, None nothing. Raises UsageError on a value out of range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self):
        # Lists come from JSON, a bare string from a hurried hand; stored as tuples so that the object can be a key.
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        ids = (self.stop_token_ids,) if _is_int(self.stop_token_ids) else self.stop_token_ids
        object.__setattr__(self, "stop", _as_tuple(stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple(ids))
        self.validate()

    def validate(self) -> None:
        """Raise UsageError for the first field that is out of range."""
        _whole("max_tokens", self.max_tokens, 1, None, "the number of new tokens")
        _real("temperature", self.temperature, 0.0, None, "0 is greedy")
        _whole("top_k", self.top_k, 0, None, "0 turns it off")
        _real("top_p", self.top_p, 0.0, 1.0, "1 turns it off")
        _real("min_p", self.min_p, 0.0, 1.0, "0 turns it off")
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED, "leave it out for one derived from the request's id")
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise UsageError(f"stop must be a non-empty string or a list of them, got {self.stop!r}")
        if not isinstance(self.stop_token_ids, tuple) or not all(_is_int(t) and t >= 0 for t in self.stop_token_ids):
            raise UsageError(f"stop_token_ids must be a list of token ids of at least 0, got {self.stop_token_ids!r}")
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS, "0 reports the chosen token only")
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos must be true or false, got {self.ignore_eos!r}")

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The fields that a request may set, in the order of declaration."""
        return tuple(f.name for f in fields(cls))

    def with_fields(self, **values) -> Self:
        """A copy with some fields replaced; an unknown name raises UsageError with the list of known ones."""
        unknown = sorted(set(values) - set(self.field_names()))
        if unknown:
            raise UsageError(f"unknown sampling fields {unknown}; known are {', '.join(self.field_names())}")
        return replace(self, **values)

    @property
    def greedy(self) -> bool:
        """Whether no random number is drawn."""
        return self.temperature == 0.0


def _is_int(value) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _as_tuple(value):
    return tuple(value) if isinstance(value, list | tuple) else value


def _allowed(low, high) -> str:
    return f"at least {low}" if high is None else f"from {low} to {high}"


def _whole(name: str, value, low: int, high: int | None, hint: str) -> None:
    if not _is_int(value) or value < low or (high is not None and value > high):
        raise UsageError(f"{name} must be a whole number {_allowed(low, high)} ({hint}), got {value!r}")


def _real(name: str, value, low: float, high: float | None, hint: str) -> None:
    number = isinstance(value, float | np.floating) or _is_int(value)
    if not number or not math.isfinite(value) or value < low or (high is not None and value > high):
        allowed = _allowed(f"{low:g}", None if high is None else f"{high:g}")
        raise UsageError(f"{name} must be a finite number {allowed} ({hint}), got {value!r}")


class SamplingArrays(NamedTuple):
    """The sampling parameters of every slot, as arrays that a compiled step takes as arguments."""

    temperature: jax.Array | np.ndarray  # float32[S]
    top_k: jax.Array | np.ndarray  # int32[S]
    top_p: jax.Array | np.ndarray  # float32[S]
    min_p: jax.Array | np.ndarray  # float32[S]

    @classmethod
    def of(cls, slots: Sequence[SamplingParams | None]) -> Self:
        """Host arrays (NumPy) of ``slots``; an empty slot (None) is greedy."""
        params = [SamplingParams() if p is None else p for p in slots]
        return cls(
            np.array([p.temperature for p in params], np.float32),
            # A k beyond int32 keeps every token of any vocabulary, as the clamp does.
            np.array([min(p.top_k, 2**31 - 1) for p in params], np.int32),
            np.array([p.top_p for p in params], np.float32),
            np.array([p.min_p for p in params], np.float32),
        )


@jax.named_scope("sample")
def sample(
    logits: jax.Array, params: SamplingArrays, seeds: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Choose one token a row: ``(tokens int32[S], logprobs float32[S])``.

    ``logits`` float32[S, V]; ``seeds`` uint32[S], one a request; ``positions`` int32[S], the position that the new
    token takes in its sequence. The log-probability is the model's own (temperature 1, nothing cut off).
    """
    logits = logits.astype(jnp.float32)
    # The first of equal maxima, so the lowest id wins here as well.
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    sampled = params.temperature > 0

    def draw(_):
        return jnp.where(sampled, _draw(logits, params, seeds, positions), greedy)

    # A real branch: an all-greedy batch, the common case, pays for neither cuts nor random numbers.
    tokens = lax.cond(jnp.any(sampled), draw, lambda _: greedy, None)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(logits, axis=-1)


def top_logprobs(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The ``count`` (static) most likely tokens of each row: ``(ids int32[S, count], logprobs float32[S, count])``.

    Most likely first, lower id first among equals; log-probabilities at temperature 1.
    """
    logits = logits.astype(jnp.float32)
    values, ids = lax.top_k(logits, count)
    return ids.astype(jnp.int32), values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def _draw(logits, params: SamplingArrays, seeds, positions):
    """Inverse transform sampling in id order over the tokens that the cuts leave; int32[S].

    In id order, not in order of probability: a row that cuts nothing then gets the same token whether or not a
    neighbour made the search for cuts necessary.
    """
    vocab = logits.shape[-1]
    temperature = jnp.maximum(params.temperature, _MIN_TEMPERATURE)[:, None]
    # The maximum goes first: a tiny temperature would turn large logits into inf - inf.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    top_k = jnp.where((params.top_k <= 0) | (params.top_k > vocab), vocab, params.top_k)
    cuts = (params.temperature > 0) & ((top_k < vocab) | (params.top_p < 1))

    keep = lax.cond(
        jnp.any(cuts),
        lambda _: _keep_top(scaled, top_k, params.top_p) | ~cuts[:, None],
        lambda _: jnp.ones(scaled.shape, bool),
        None,
    )
    keep &= scaled >= jnp.log(params.min_p)[:, None]  # p >= min_p * p_max, and log 0 = -inf keeps all
    mass = jnp.where(keep, jnp.exp(scaled), 0.0)
    cumulative = jnp.cumsum(mass, axis=-1)
    target = _uniform(seeds, positions)[:, None] * cumulative[:, -1:]
    # Sums of different lengths round differently, so the test for mass keeps a removed token from being drawn.
    reached = (cumulative > target) & (mass > 0)
    first = jnp.argmax(reached, axis=-1)
    return jnp.where(jnp.any(reached, axis=-1), first, jnp.argmax(mass, axis=-1)).astype(jnp.int32)


def _keep_top(scaled, top_k, top_p):
    """bool[S, V]: the tokens that top-k and then top-p keep; ``scaled`` has maximum 0 in each row.

    Each cut is the value of the last token kept, found bit by bit: that takes 32 sums over a row where a sort takes
    several times longer, and is as exact.
    """
    keys = _ordered_bits(scaled)
    best = jnp.max(keys, axis=-1, keepdims=True)

    last = _largest(lambda cut: jnp.sum(keys >= cut, axis=-1, keepdims=True) >= top_k[:, None], best)
    above, tied = keys > last, keys == last
    # The last value kept may be shared: then the lowest ids fill the places that are left.
    places = top_k[:, None] - jnp.sum(above, axis=-1, keepdims=True)
    kept = above | (tied & (jnp.cumsum(tied, axis=-1) <= places))

    # A token stays while the mass before it, in order of probability, is short of the wanted share.
    mass = jnp.where(kept, jnp.exp(scaled), 0.0)
    wanted = top_p[:, None] * jnp.sum(mass, axis=-1, keepdims=True)
    last = _largest(lambda cut: jnp.sum(jnp.where(keys >= cut, mass, 0.0), axis=-1, keepdims=True) >= wanted, best)
    above, tied = kept & (keys > last), kept & (keys == last)
    before = jnp.sum(jnp.where(above, mass, 0.0), axis=-1, keepdims=True) + (jnp.cumsum(tied, axis=-1) - 1) * mass
    by_p = above | (tied & ((before < wanted) | (jnp.cumsum(tied, axis=-1) == 1)))
    return jnp.where(top_p[:, None] < 1, by_p, kept)


def _ordered_bits(values):
    """uint32 that order as the float32 ``values`` do, zeros of both signs being equal."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest(holds, most):
    """Largest uint32 [S, 1] up to ``most`` for which ``holds``, which may hold only up to some cut."""

    def try_bit(i, cut):
        candidate = cut | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where((candidate <= most) & holds(candidate), candidate, cut)

    return lax.fori_loop(0, 32, try_bit, jnp.zeros_like(most))


def _uniform(seeds, positions):
    """One float32 in [0, 1) a row, a function of its seed and position alone."""

    def one(seed, position):
        # Named, so that a user's jax_default_prng_impl does not change what a seed means.
        key = jax.random.key(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position), dtype=jnp.float32)

    return jax.vmap(one)(seeds.astype(jnp.uint32), positions.astype(jnp.int32))
