"""The best outputs of chosen experts without training: ``down`` by least squares, layer by layer.

Experts that are not chosen leave a gap that those chosen can fill in part, for what neurons add is correlated. One
linear solve does what hundreds of steps of gradient descent on the same error would.
"""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.carve_moe.split import choose


@jax.jit
def _gated(x, gate_up):
    gate, up = jnp.split(x @ gate_up.T, 2, axis=1)
    return jax.nn.silu(gate) * up


def gated(x: np.ndarray, gate_up: np.ndarray) -> np.ndarray:
    """Neurons [T, F] of an MLP ``gate_up`` [2 F, H] of ``x`` [T, H]."""
    return np.asarray(_gated(x, gate_up))


def features(x: np.ndarray, layer: dict, k: int) -> np.ndarray:
    """Neurons [T, F] of all experts, times gates and 0 where not chosen; those of the shared expert come last."""
    scores = x @ layer["router"]["kernel"].T
    odds = np.exp(scores - scores.max(1, keepdims=True))
    gates = len(scores[0]) * odds / odds.sum(1, keepdims=True) * choose(odds, k, 0.0)
    size = layer["experts"]["gate_up"].shape[1] // 2
    # One matrix for all: gate rows of every expert and of the shared one, then up rows.
    routed = layer["experts"]["gate_up"].reshape(-1, 2, size, x.shape[1]).swapaxes(0, 1).reshape(2, -1, x.shape[1])
    merged = np.concatenate([routed, layer["shared"]["gate_up"].reshape(2, -1, x.shape[1])], axis=1)
    neurons = np.array(gated(x, merged.reshape(-1, x.shape[1])))
    neurons[:, : routed.shape[1]] *= np.repeat(gates, size, axis=1)
    return neurons


def token_weights(wanted: np.ndarray) -> np.ndarray:
    """Weights [T, 1] of errors by the norm of what is wanted, which has outliers that would count alone."""
    squares = (wanted**2).sum(1, keepdims=True)
    return (squares + 0.1 * np.median(squares)) ** -0.5


def solve(
    inputs: np.ndarray, wanted: np.ndarray, start: np.ndarray, weight: np.ndarray, penalty: float
) -> np.ndarray:
    """Weights [H, F] that take ``inputs`` [T, F] nearest to ``wanted`` [T, H], drawn to ``start`` [H, F].

    Least squares of errors times ``weight`` [T, 1]. ``penalty`` is relative to the mean square of each input and of
    all, so that neurons that seldom fire stay where they were.
    """
    left = (wanted - inputs @ start.T) * weight
    inputs = inputs * weight
    gram = inputs.T @ inputs
    diagonal = np.diag(gram).copy()
    gram[np.diag_indices_from(gram)] += penalty * (diagonal + diagonal.mean())
    return start + np.linalg.solve(gram, inputs.T @ left).T.astype(np.float32)


def outputs(layer: dict) -> np.ndarray:
    """``down`` of all experts side by side [H, F], that of the shared expert last."""
    down = layer["experts"]["down"]
    return np.concatenate([down.swapaxes(0, 1).reshape(down.shape[1], -1), layer["shared"]["down"]], 1)


def refit(neurons: np.ndarray, wanted: np.ndarray, weight: np.ndarray, layer: dict, penalty: float) -> dict:
    """A carved ``layer`` with ``down`` of all experts fitted to give ``wanted`` [T, H] of their :func:`features`."""
    experts, hidden, size = layer["experts"]["down"].shape
    fitted = solve(neurons, wanted, outputs(layer), weight, penalty)
    down = fitted[:, : experts * size].reshape(hidden, experts, size).swapaxes(0, 1)
    return {
        **layer,
        "experts": {**layer["experts"], "down": down},
        "shared": {**layer["shared"], "down": fitted[:, experts * size :]},
    }
