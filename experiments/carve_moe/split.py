"""Which neurons become which expert: those that fire together, so that few experts carry most of a token's energy.

``fires`` float32[T, F] is what each neuron adds to the residual on T tokens, as its output's norm.
"""

import numpy as np
from scipy.optimize import linear_sum_assignment


def shared_neurons(fires: np.ndarray, size: int) -> np.ndarray:
    """The ``size`` neurons that matter most always, in ascending order.

    Half by the mean share of a token's energy, half by the share of all energy: the few neurons that make the huge
    activations of some tokens, which attention rests on, must never be switched off.
    """
    energy = fires**2
    share = energy / energy.sum(1, keepdims=True)
    score = share.mean(0) + energy.mean(0) / energy.mean(0).sum()
    return np.sort(np.argsort(-score, kind="stable")[:size])


def assign(gain: np.ndarray) -> np.ndarray:
    """Expert int[N] of each neuron with the greatest total ``gain`` [N, E], every expert with as many neurons."""
    neurons, experts = gain.shape
    _, slot = linear_sum_assignment(np.repeat(gain, neurons // experts, axis=1), maximize=True)
    return slot // (neurons // experts)


def choose(energy: np.ndarray, k: int, balance: float) -> np.ndarray:
    """bool[T, E]: the ``k`` experts of each token with the most energy [T, E].

    ``balance`` 0 to 1: how much of an expert's mean log energy is taken off before; 1 lets all be chosen about alike.
    """
    scores = np.log(energy + 1e-12)
    scores = scores - balance * scores.mean(0)
    chosen = np.zeros(energy.shape, bool)
    np.put_along_axis(chosen, np.argpartition(-scores, k - 1, axis=1)[:, :k], True, axis=1)
    return chosen


def expert_energy(share: np.ndarray, experts_of: np.ndarray, experts: int) -> np.ndarray:
    """Energy [T, E] of experts from that of neurons [T, N]."""
    member = np.eye(experts, dtype=np.float32)[experts_of]
    return share @ member


def split(
    fires: np.ndarray, experts: int, k: int, balance: float, rounds: int, seed: int
) -> tuple[np.ndarray, list[float]]:
    """Neurons int[E, N / E] of each expert, and the energy that the chosen experts carry, a round.

    Starts from balanced k-means on neurons' patterns, then alternates: each token chooses its ``k`` experts, and
    neurons move to the experts that are chosen where they fire. Without ``balance`` no round carries less energy than
    the one before.
    """
    energy = fires**2
    share = energy / energy.sum(1, keepdims=True)
    patterns = np.sqrt(share) - np.sqrt(share).mean(0)
    patterns = (patterns / (np.linalg.norm(patterns, axis=0) + 1e-12)).T
    rng = np.random.default_rng(seed)
    centers = patterns[rng.choice(len(patterns), experts, replace=False)]
    for _ in range(4):
        experts_of = assign(patterns @ centers.T)
        centers = np.stack([patterns[experts_of == e].mean(0) for e in range(experts)])
        centers /= np.linalg.norm(centers, axis=1, keepdims=True) + 1e-12
    carried = []
    for last in [False] * rounds + [True]:
        chosen = choose(expert_energy(share, experts_of, experts), k, balance)
        gain = share.T @ chosen.astype(np.float32)
        carried.append(float(np.take_along_axis(gain, experts_of[:, None], 1).sum() / len(fires)))
        if not last:
            experts_of = assign(gain)
    return np.stack([np.flatnonzero(experts_of == e) for e in range(experts)]), carried


def ridge_router(x: np.ndarray, energy: np.ndarray, penalty: float, spread: float) -> np.ndarray:
    """Router kernel float32[E, H] that predicts log ``energy`` [T, E] against the token's mean from ``x`` [T, H].

    ``penalty`` is relative to the mean squared entry of ``x``; predictions are scaled to the standard deviation
    ``spread``, for gates follow a softmax of them.
    """
    target = np.log(energy + 1e-9 * energy.mean())
    target -= target.mean(1, keepdims=True)
    gram = x.T @ x / len(x)
    gram += penalty * np.trace(gram) / len(gram) * np.eye(len(gram))
    kernel = np.linalg.solve(gram, x.T @ target / len(x)).T
    return (kernel * spread / (x @ kernel.T).std()).astype(np.float32)
