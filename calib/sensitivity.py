"""Importance of expert weights through JAX, and the damage of running a block at fewer bits.

The model comes in as two callables, so nothing here knows an architecture:

* ``loss(params, tokens int32[T]) -> float32[]``      mean next-token loss of one sequence;
* ``mass(params, tokens int32[T]) -> float32[L, E]``  router weight that each expert received.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calib.anyprecision import QuantizedBlock, weighted_error

Loss = Callable[[Any, jax.Array], jax.Array]
Mass = Callable[[Any, jax.Array], jax.Array]


def squared_gradients(
    loss: Loss,
    join: Callable[[Any, Any], Any],
    experts: Any,
    rest: Any,
    windows: np.ndarray,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Any, np.ndarray]:
    """Summed squared gradients of ``experts``, one sequence at a time, and the loss of each sequence.

    ``join(experts, rest)`` rebuilds the parameters that ``loss`` takes; both halves are pytrees and are used in
    float32. ``windows`` int32[n, T]. Returns ``(importance float32 like experts, losses float64[n])``: the diagonal of
    the empirical Fisher times n, as Any-Precision defines it. ValueError where a loss is not finite.
    """
    experts, rest = (jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree) for tree in (experts, rest))

    def step(total, experts, rest, tokens):
        value, grad = jax.value_and_grad(lambda e: loss(join(e, rest), tokens))(experts)
        return jax.tree.map(lambda t, g: t + g * g, total, grad), value

    # The sum is donated: one copy of it lives on the device, whatever the number of sequences.
    step = jax.jit(step, donate_argnums=0)
    total = jax.tree.map(jnp.zeros_like, experts)
    losses = []
    for index, tokens in enumerate(windows):
        total, value = step(total, experts, rest, jnp.asarray(tokens, jnp.int32))
        losses.append(float(value))
        if not np.isfinite(losses[-1]):
            raise ValueError(
                f"the loss of calibration window {index} is {losses[-1]}: the model or its weights are broken"
            )
        progress(index + 1, len(windows))
    return jax.tree.map(np.array, total), np.array(losses)


def routing_shares(mass: Mass, params: Any, windows: np.ndarray) -> np.ndarray:
    """Share float64[L, E] of the router weight that each expert receives; every layer sums to 1.

    Equation 1 of the paper. An expert that no token chose has the share 0.
    """
    run = jax.jit(mass)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    total = np.sum([np.asarray(run(params, jnp.asarray(t, jnp.int32)), np.float64) for t in windows], axis=0)
    return total / np.maximum(total.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)


def fill_unrouted(importance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give experts without any importance the least mean importance that an expert of the layer has.

    ``importance`` float32[E, N, K] of one layer and matrix. Returns it with such experts made uniform, and their
    numbers. An expert that no calibration token chose must not look free of damage; without any signal in the layer
    all weights count 1.
    """
    mean = importance.mean(axis=(1, 2), dtype=np.float64)
    unrouted = np.flatnonzero(mean == 0)
    if not unrouted.size:
        return importance, unrouted
    filled = importance.copy()
    filled[unrouted] = mean[mean > 0].min() if unrouted.size < len(mean) else 1.0
    return filled, unrouted


def paper_damage(
    weight: np.ndarray, importance: np.ndarray | None, block: QuantizedBlock, widths: tuple[int, ...]
) -> np.ndarray:
    """Damage float64[B] of a block at each width, ``sum h (W - W_b)^2`` (equation 2 of the paper).

    Rounding of tables to float16 may let a wider width lose by a hair; the running minimum is returned.
    """
    return np.minimum.accumulate([weighted_error(weight, importance, block, bits) for bits in widths])
