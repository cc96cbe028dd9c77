"""What routed tokens say about one expert's two blocks: importance of its weights, and the error of running it at fewer
bits.

Matrix 0 is ``gate_up``, 1 is ``down``; R routed tokens, B widths, H hidden size, I inner size. Damage is in nats a
routed token: half the mean square of the output error along loss gradients (see :mod:`calib.stream`).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from calib.model import Functions
from calib.rows import LayerTrace, Rows

# Forms that are measured on routed tokens, by the index that arrays of this module have for them.
FORMS = ("output", "directional")


class Importance(NamedTuple):
    """Squared gradients of one expert, ``gate_up`` float32[2I, H] and ``down`` float32[H, I], as sums over windows of
    the square of a window's gradient, divided by the number of tokens; and sums over routed tokens of
    gate^2 * input^2, ``moments`` (float64[H], float64[I])."""

    gate_up: np.ndarray
    down: np.ndarray
    moments: tuple[np.ndarray, np.ndarray]


class PieceErrors(NamedTuple):
    """Damage of a piece of routed tokens: ``damage`` float64[2 matrices, B, 2 forms, C, m] and ``moments`` float64[2
    matrices, B, C, m], what gated squared inputs and :func:`column_energy` say of it, both 0 in unused rows; and
    ``inner`` float32[C, m, I], what ``down`` reads at 16 bits."""

    damage: np.ndarray
    moments: np.ndarray
    inner: np.ndarray


def importance(
    functions: Functions, trace: LayerTrace, expert: int, gate_up: np.ndarray, down: np.ndarray
) -> Importance:
    """Importance of the weights ``gate_up`` [2I, H] and ``down`` [H, I] of ``expert``; zero where it has no tokens."""
    weights = jnp.asarray(gate_up, jnp.float32), jnp.asarray(down, jnp.float32)
    zeros = lambda: jax.tree.map(jnp.zeros_like, weights)  # noqa: E731
    state = (zeros(), zeros(), (jnp.zeros(gate_up.shape[1]), jnp.zeros(down.shape[1])))
    for rows in trace.rows(expert):
        state = _squared_gradients(functions, state, weights, rows)
    _, total, moments = jax.tree.map(np.array, state)
    tokens = np.float32(len(trace.experts))
    return Importance(total[0] / tokens, total[1] / tokens, tuple(m.astype(np.float64) for m in moments))


def piece_errors(
    functions: Functions, rows: Rows, fisher: np.ndarray, exact: tuple, point: tuple, widths: tuple, energy: tuple
) -> PieceErrors:
    """Damage of each matrix at each width on ``rows``, the other matrix being that of the operating point.

    ``exact`` and ``point`` are ``(gate_up, down)``, ``widths`` the same with a leading axis B, ``energy`` theirs of
    :func:`column_energy`.
    """
    damage, moments, inner = _errors(functions, rows, jnp.asarray(fisher, jnp.float32), exact, point, widths, energy)
    by_row = lambda a: np.asarray(a, np.float64).reshape(*a.shape[:-1], *rows.used.shape)  # noqa: E731
    return PieceErrors(by_row(damage), by_row(moments), np.asarray(inner).reshape(*rows.used.shape, -1))


class Measured(NamedTuple):
    """Sums over the routed tokens of one expert, in all and for each of n sequences.

    ``tokens`` int64[]; ``total`` and ``square`` float64[2 forms, 2 matrices, B] of the damage and of its square;
    ``counts`` int64[n] tokens of a sequence, ``by_sequence`` float64[n, 2 forms, 2 matrices, B] of the damage,
    ``moments`` float64[n, 2 matrices, B] of :class:`PieceErrors`; ``norms`` float64[n, 2 matrices, 4] of what a matrix
    reads: gates, gates times norms, gates times squared norms, and the largest norm. ``energy_gate_up`` float32[B, H]
    and ``energy_down`` float32[B, I]: :func:`column_energy`.
    """

    tokens: np.ndarray
    total: np.ndarray
    square: np.ndarray
    counts: np.ndarray
    by_sequence: np.ndarray
    moments: np.ndarray
    norms: np.ndarray
    energy_gate_up: np.ndarray
    energy_down: np.ndarray


def measure(
    functions: Functions,
    trace: LayerTrace,
    expert: int,
    exact: tuple,
    point: tuple,
    widths: tuple,
) -> Measured:
    """Damage of both blocks of ``expert`` at every width over all of its tokens.

    ``exact``, ``point``, ``widths`` as in :func:`piece_errors`.
    """
    sequences, shape = int(trace.sequences[-1]) + 1, (len(FORMS), 2, len(widths[0]))
    exact, point, widths = jax.tree.map(jnp.asarray, (exact, point, widths))
    square, by_sequence, counts = np.zeros(shape), np.zeros((sequences, *shape)), np.zeros(sequences, np.int64)
    moments, norms = np.zeros((sequences, *shape[1:])), np.zeros((sequences, 2, 4))
    energy = column_energy(jnp.asarray(trace.fisher, jnp.float32), exact, widths)
    for rows in trace.rows(expert):
        errors = piece_errors(functions, rows, trace.fisher, exact, point, widths, energy)
        values = errors.damage.transpose(3, 2, 0, 1, 4)  # [C, forms, matrices, B, m]
        square += np.square(values).sum((0, 4))
        filled = rows.sequence >= 0
        np.add.at(counts, rows.sequence[filled], rows.used[filled].sum(-1))
        np.add.at(by_sequence, rows.sequence[filled], values[filled].sum(-1))
        np.add.at(moments, rows.sequence[filled], errors.moments.transpose(2, 0, 1, 3)[filled].sum(-1))
        for matrix, read in enumerate((rows.inputs, errors.inner)):
            norm, gate = np.linalg.norm(read, axis=-1).astype(np.float64) * rows.used, rows.gates
            sums = np.stack([gate, gate * norm, gate * norm**2], -1).sum(1)
            np.add.at(norms[:, matrix, :3], rows.sequence[filled], sums[filled])
            np.maximum.at(norms[:, matrix, 3], rows.sequence[filled], norm.max(1)[filled])
    return Measured(
        counts.sum(), by_sequence.sum(0), square, counts, by_sequence, moments, norms, *map(np.asarray, energy)
    )


def second_moments(
    functions: Functions, trace: LayerTrace, expert: int, gate_up: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``E[g^2 x x^T]`` float32[H, H] and [I, I] of what ``gate_up`` and ``down`` read, means over the expert's tokens;
    zero where it has none. ``gate_up`` is float32[2I, H]."""
    hidden, inner = gate_up.shape[1], functions.inner(jnp.zeros((1, gate_up.shape[1])), jnp.asarray(gate_up)).shape[1]
    state, tokens = (jnp.zeros((hidden, hidden)), jnp.zeros((inner, inner))), 0
    for rows in trace.rows(expert):
        state = _second_moments(functions, state, jnp.asarray(gate_up), rows.inputs, rows.gates)
        tokens += int(rows.used.sum())
    gate, down = (np.asarray(m) / np.float32(max(tokens, 1)) for m in state)
    return gate, down


@jax.jit
def column_energy(fisher: jax.Array, exact: tuple, widths: tuple) -> tuple[jax.Array, jax.Array]:
    """Error ``sum_rows r (W - W_b)^2`` that each input column carries to the layer's output: (float32[B, H], [B, I]).

    A row of ``down`` weighs ``fisher`` float32[H]; a row of ``gate_up`` what the column of ``down`` that follows it
    passes on, activations left out.
    """
    through = fisher @ exact[1] ** 2
    rows = jnp.tile(through, exact[0].shape[0] // through.size), fisher
    energy = lambda r, wide, w: jnp.einsum("r,brk->bk", r, (wide - w) ** 2)  # noqa: E731
    return energy(rows[0], widths[0], exact[0]), energy(rows[1], widths[1], exact[1])


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _squared_gradients(functions: Functions, state, weights, rows: Rows):
    """One piece of tokens into (gradient of the current sequence, sums of squared gradients, input moments)."""

    def tile(state, tile: Rows):
        own, total, moments = state

        def output(weights):
            hidden = functions.inner(tile.inputs, weights[0])
            return tile.gates[:, None] * (hidden @ weights[1].T), hidden

        _, pull, hidden = jax.vjp(output, weights, has_aux=True)
        (fresh,) = pull(tile.gradients)
        own = jax.tree.map(lambda o, f: jnp.where(tile.first, f, o + f), own, fresh)
        total = jax.tree.map(lambda t, o: t + jnp.where(tile.last, o * o, 0.0), total, own)
        weight = (tile.gates**2)[:, None]
        moments = tuple(m + (weight * v**2).sum(0) for m, v in zip(moments, (tile.inputs, hidden), strict=True))
        return (own, total, moments), None

    return lax.scan(tile, state, rows)[0]


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _second_moments(functions: Functions, state, gate_up, inputs, gates):
    """One piece of tokens into sums of gated outer products."""
    x = inputs.reshape(-1, inputs.shape[-1])
    gated = (gates.reshape(-1, 1) * read for read in (x, functions.inner(x, gate_up)))
    return tuple(m + jnp.matmul(g.T, g, precision="highest") for m, g in zip(state, gated, strict=True))


@partial(jax.jit, static_argnums=0)
def _errors(functions: Functions, rows: Rows, fisher, exact, point, widths, energy):
    """Damage float32[2 matrices, B, 2 forms, R] and moments [2, B, R] of each row, and the exact input of ``down``
    [R, I]."""
    inner = functions.inner
    x, gradient = (a.reshape(-1, a.shape[-1]) for a in (rows.inputs, rows.gradients))
    gate = rows.gates.reshape(-1, 1)
    exact_inner, point_inner = inner(x, exact[0]), inner(x, point[0])

    def damage(error):
        error = gate * error
        return 0.5 * jnp.stack([(error * error) @ fisher, (error * gradient).sum(-1) ** 2])

    gate_up = lax.map(lambda w: damage((inner(x, w) - exact_inner) @ point[1].T), widths[0])
    down = lax.map(lambda w: damage(point_inner @ (w - exact[1]).T), widths[1])
    reads = zip(energy, (x, exact_inner), strict=True)
    moments = jnp.stack([0.5 * own @ ((gate * read) ** 2).T for own, read in reads])
    return jnp.stack([gate_up, down]), moments, exact_inner
