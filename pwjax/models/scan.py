"""A scan over layers of different kinds: compile time grows with the pattern that repeats, never with the depth.

Equal neighbours of a pattern (a *run*) are scanned inside, the repetitions of the pattern outside::

    S S S S S F | S S S S S F | ...   ->   scan over periods of (scan of 5 S, then F)
"""

from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Segment(NamedTuple):
    """``repeats`` times a pattern, given as ``runs`` of ``(kind, layers)``."""

    repeats: int
    runs: tuple[tuple[int, int], ...]


# ``body(kind, carry, (shared, own)) -> (carry, (shared out, own out))`` of one layer.
Body = Callable[[int, Any, tuple[Any, Any]], tuple[Any, tuple[Any, Any]]]


def segments(layer_kinds: tuple[int, ...]) -> tuple[Segment, ...]:
    """The kinds of all layers as one repeated pattern and a rest, such that the fewest layers are compiled."""

    def split(period: int) -> tuple[Segment, ...]:
        repeats = 1
        while layer_kinds[repeats * period : (repeats + 1) * period] == layer_kinds[:period]:
            repeats += 1
        rest = layer_kinds[repeats * period :]
        first = Segment(repeats, _runs(layer_kinds[:period]))
        return (first, Segment(1, _runs(rest))) if rest else (first,)

    options = (split(period) for period in range(1, len(layer_kinds) + 1))
    return min(options, key=lambda option: sum(len(segment.runs) for segment in option))


def scan_layers(layer_kinds: tuple[int, ...], body: Body, carry: Any, shared: Any, own: tuple) -> tuple:
    """Run ``body`` on every layer in order: ``(carry, shared outputs, outputs a kind)``.

    ``shared`` leaves [L, ...] are for all layers, ``own[kind]`` leaves [L_kind, ...] for those of a kind; outputs come
    back in the same two forms.
    """
    outputs, own_outputs = [], [[] for _ in own]
    at, own_at = 0, [0] * len(own)
    for repeats, runs in segments(layer_kinds):
        count = sum(n for _, n in runs)
        own_count = [sum(n for k, n in runs if k == kind) for kind in range(len(own))]
        part = _take(shared, at, repeats * count)
        own_part = tuple(_take(tree, own_at[k], repeats * own_count[k]) for k, tree in enumerate(own))
        at += repeats * count
        own_at = [first + repeats * n for first, n in zip(own_at, own_count, strict=True)]
        if len(runs) == 1:
            kind = runs[0][0]
            carry, (y, own_y) = lax.scan(_layer(body, kind), carry, (part, own_part[kind]))
            outputs.append(y)
            own_outputs[kind].append(own_y)
            continue
        own_xs = tuple(_fold(tree, repeats, n) for tree, n in zip(own_part, own_count, strict=True))
        xs = _fold(part, repeats, count), own_xs
        carry, (y, own_y) = lax.scan(_period(body, runs, len(own)), carry, xs)
        outputs.append(_unfold(y))
        for kind, tree in enumerate(own_y):
            if own_count[kind]:
                own_outputs[kind].append(_unfold(tree))
    return carry, _join(outputs), tuple(_join(parts) for parts in own_outputs)


def _layer(body: Body, kind: int) -> Callable:
    return lambda carry, item: body(kind, carry, item)


def _period(body: Body, runs: tuple[tuple[int, int], ...], kinds: int) -> Callable:
    """One repetition of a pattern, as the body of a scan."""

    def period(carry, item):
        shared, own = item
        outputs, own_outputs = [], [[] for _ in range(kinds)]
        at, own_at = 0, [0] * kinds
        for kind, count in runs:
            part = _take(shared, at, count), _take(own[kind], own_at[kind], count)
            carry, (y, own_y) = lax.scan(_layer(body, kind), carry, part)
            outputs.append(y)
            own_outputs[kind].append(own_y)
            at, own_at[kind] = at + count, own_at[kind] + count
        return carry, (_join(outputs), tuple(_join(parts) for parts in own_outputs))

    return period


def _runs(kinds: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((kind, len(list(group))) for kind, group in groupby(kinds))


def _take(tree: Any, first: int, count: int) -> Any:
    """``leaf[first:first+count]``; the leaf itself where that is all of it."""
    return jax.tree.map(lambda a: a if count == a.shape[0] else a[first : first + count], tree)


def _fold(tree: Any, repeats: int, count: int) -> Any:
    return jax.tree.map(lambda a: a.reshape(repeats, count, *a.shape[1:]), tree)


def _unfold(tree: Any) -> Any:
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), tree)


def _join(trees: list) -> Any:
    """Leaves one after the other; None where there is none."""
    if len(trees) < 2:
        return trees[0] if trees else None
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)
