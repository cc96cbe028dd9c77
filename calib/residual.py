"""Prompt residual: how much more, or less, one sequence suffers from few bits than calibration text did on average.

A transition ``j`` takes a block from width ``j+1`` of the table to width ``j``; its damage is the difference of the two
columns, here always a mean over the tokens routed to the expert. Heads predict ``rho``, the logarithm of a sequence's
damage over the average one, and the planner multiplies the damage of a transition by (paper, equations 5 and 6)

    eta = exp(alpha * c * clip(rho, low, high))         rho = weights . (mean norm, RMS norm, maximum norm, 1)

``c`` is the head's R² on sequences it was not fitted to, clipped to 0..1, and ``low``, ``high`` are quantiles of what
was seen. Norms are of what the matrix reads, over the tokens of the sequence that were routed to the expert, the first
two weighted by the gate: ``mean = sum g |x| / sum g``, ``RMS = sqrt(sum g |x|^2 / sum g)``.

Where calibration keeps its texts apart (:func:`calib.damage.text_tables`), ``moments`` predicts the deviation from a
sequence's own text, since the planner tells texts by their routing already; ``paper`` that from all text, as written.

Three forms are fitted. ``paper`` has the three norms. ``gate`` has one number, the logarithm of the mean gate over its
average: errors are scaled by the gate, so damage goes with its square. ``moments`` has the logarithm of
``sum_k E[g^2 x_k^2] e_k`` over its average, ``e_k`` being the error that column ``k`` of the matrix carries to the
layer's output (:func:`calib.blocks.column_energy`).

n sequences, L layers, E experts, 2 matrices, B widths. ``texts`` int64[n]: the text of each sequence, None: all one.
"""

from typing import NamedTuple

import numpy as np

from calib.agreement import bootstrap
from calib.blocks import FORMS, Measured
from calib.damage import drawn
from pallas_kernels.pages import MATRICES

# Fewer routed tokens say nothing about a sequence.
LEAST_TOKENS = 8
# Fewer sequences that a form was not fitted to prove nothing.
LEAST_SEQUENCES = 5
RIDGE = 1e-3
CLIP = (0.02, 0.98)
# Forms whose features the engine takes from a prompt.
ENGINE_FORMS = ("paper", "moments")


class Samples(NamedTuple):
    """Per sequence and expert. ``tokens`` and ``gates`` (sums) float64[n, L, E]; ``norms`` float64[n, L, E, 2, 3]: sums
    of ``g |x|`` and ``g |x|^2``, maximum of ``|x|``; ``damage`` and ``moments`` float64[n, L, E, 2, B], sums over
    routed tokens."""

    tokens: np.ndarray
    gates: np.ndarray
    norms: np.ndarray
    damage: np.ndarray
    moments: np.ndarray

    @classmethod
    def of(cls, measured: Measured, form: str, fallback: bool) -> "Samples":
        """From what calibration measured, leading axes [L, E]; ``fallback`` adds 16 bits, which are without damage."""
        wide = lambda a: np.concatenate([a, np.zeros((*a.shape[:-1], 1))], -1) if fallback else a  # noqa: E731
        norms, damage = measured.norms, measured.by_sequence[:, :, :, FORMS.index(form)]
        parts = measured.counts, norms[..., 0, 0], norms[..., 1:], wide(damage), wide(measured.moments)
        return cls(*(np.moveaxis(part, 2, 0).astype(np.float64) for part in parts))

    def features(self) -> np.ndarray:
        """float64[n, L, E, 2, 4]: mean, RMS and maximum norm, and 1; zeros where a sequence did not use the expert."""
        gates = self.gates[..., None]
        mean, square = (
            np.divide(self.norms[..., i], gates, out=np.zeros_like(self.norms[..., i]), where=gates > 0) for i in (0, 1)
        )
        used = np.broadcast_to(gates > 0, mean.shape).astype(float)
        return np.stack([mean, np.sqrt(square), self.norms[..., 2], used], -1)


class Heads(NamedTuple):
    """``weights`` float64[2, B-1, F]; the rest float64[2, B-1]. ``held_out_r2`` clipped to 0..1 is ``confidence``."""

    weights: np.ndarray
    confidence: np.ndarray
    low: np.ndarray
    high: np.ndarray
    held_out_r2: np.ndarray

    def factor(self, features: np.ndarray) -> np.ndarray:
        """``eta`` float64[..., 2, B-1] of ``features`` float64[..., 2, B-1 or 1, F], alpha 1."""
        rho = (features * self.weights).sum(-1)
        return np.exp(self.confidence * np.clip(rho, self.low, self.high))


def transitions(sums: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Mean damage of each transition on a routed token, float64[..., 2, B-1]; 0 without tokens."""
    steps = sums[..., :-1] - sums[..., 1:]
    count = tokens[..., None, None]
    return np.divide(steps, count, out=np.zeros_like(steps), where=count > 0)


def averages(
    sums: np.ndarray, tokens: np.ndarray, fitted: np.ndarray, texts: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Mean of each transition on a routed token over the sequences ``fitted`` bool[n]: ``(float64[L, E, 2, B-1] of all,
    float64[K, L, E, 2, B-1] of each text)``, None without ``texts``; ``sums`` float64[n, L, E, 2, B]."""
    pooled = transitions(sums[fitted].sum(0), tokens[fitted].sum(0))
    if texts is None:
        return pooled, None
    of_text = []
    for text in range(int(texts.max()) + 1):
        own = fitted & (texts == text)
        total, count = sums[own].sum(0), tokens[own].sum(0)[..., None, None]
        of_text.append(drawn(total[..., :-1] - total[..., 1:], count, pooled))
    return pooled, np.stack(of_text)


def average(sums: np.ndarray, tokens: np.ndarray, fitted: np.ndarray, texts: np.ndarray | None) -> np.ndarray:
    """What :func:`averages` expects of every sequence, float64[n or 1, L, E, 2, B-1]."""
    pooled, of_text = averages(sums, tokens, fitted, texts)
    return pooled[None] if of_text is None else of_text[texts]


def moments_feature(samples: Samples, fitted: np.ndarray, texts: np.ndarray | None = None) -> np.ndarray:
    """Log of a sequence's moment estimate over the average of those ``fitted`` bool[n]: [n, L, E, 2, B-1, 1]."""
    mean = average(samples.moments, samples.tokens, fitted, texts)
    return _log_ratio(transitions(samples.moments, samples.tokens), mean)[..., None]


def gate_feature(samples: Samples, fitted: np.ndarray) -> np.ndarray:
    """Log of a sequence's mean gate over the average of those ``fitted`` bool[n]: float64[n, L, E, 2, 1, 1]."""
    own = np.divide(samples.gates, samples.tokens, out=np.zeros_like(samples.gates), where=samples.tokens > 0)
    mean = samples.gates[fitted].sum(0) / np.maximum(samples.tokens[fitted].sum(0), 1)
    feature = _log_ratio(own, mean)[..., None, None, None]
    return np.broadcast_to(feature, (*own.shape, 2, 1, 1))


def fit_heads(features: np.ndarray, samples: Samples, fitted: np.ndarray, texts: np.ndarray | None = None) -> Heads:
    """Heads by ridge regression on the sequences ``fitted`` bool[n], judged on the others.

    ``features`` float64[n, L, E, 2, B-1 or 1, F]. Samples count by their tokens; those with fewer than LEAST_TOKENS,
    or without damage, are left out. Without samples a head predicts 0 with confidence 0.
    """
    target, known = _targets(samples, fitted, texts)
    weight = np.broadcast_to(samples.tokens[..., None, None], target.shape) * known
    features = np.broadcast_to(features, (*target.shape, features.shape[-1]))
    shape = target.shape[-2:]
    heads = Heads(np.zeros((*shape, features.shape[-1])), *(np.zeros(shape) for _ in range(4)))
    for head in np.ndindex(shape):
        own, held = weight[(fitted, ..., *head)], weight[(~fitted, ..., *head)]
        x, y = features[(..., *head, slice(None))], target[(..., *head)]
        if not (own > 0).sum() > x.shape[-1] or not (held > 0).any():
            continue
        heads.weights[head] = _ridge(x[fitted][own > 0], y[fitted][own > 0], own[own > 0])
        heads.low[head], heads.high[head] = np.quantile(y[fitted][own > 0], CLIP)
        rho = np.clip(x[~fitted][held > 0] @ heads.weights[head], heads.low[head], heads.high[head])
        seen, w = y[~fitted][held > 0], held[held > 0]
        spread = (w * (seen - np.average(seen, weights=w)) ** 2).sum()
        heads.held_out_r2[head] = 1 - (w * (seen - rho) ** 2).sum() / spread if spread > 0 else 0.0
    np.clip(heads.held_out_r2, 0, 1, out=heads.confidence)
    return heads


def judge(
    samples: Samples, eta: np.ndarray, fitted: np.ndarray, seed: int = 0, texts: np.ndarray | None = None
) -> dict:
    """Does ``eta`` float64[n, L, E, 2, B-1] predict the damage of sequences that were not ``fitted``? JSON-ready.

    Error of a sequence: ``sum |predicted - measured| / sum measured`` over blocks and transitions, where predicted is
    the average damage a routed token (of its text), times its tokens, times eta (``on``) or 1 (``off``). ``change`` is
    on minus off, paired, with a 95 % bootstrap interval over sequences; ``helps`` where that is below 0 and there are
    LEAST_SEQUENCES or more.
    """
    _, known = _targets(samples, fitted, texts)
    count = samples.tokens[..., None, None] * known
    mean = average(samples.damage, samples.tokens, fitted, texts)
    measured = transitions(samples.damage, samples.tokens)
    error = lambda factor: np.abs(mean * factor - measured) * count  # noqa: E731
    total = (measured * count)[~fitted].sum((1, 2, 3, 4))
    on, off = ((error(f)[~fitted].sum((1, 2, 3, 4)) / total)[total > 0] for f in (eta, 1.0))
    if not on.size:
        return {"sequences": 0, "off": None, "on": None, "change": None, "change_95": None, "helps": False}
    low, high = bootstrap(lambda i: (on - off)[i].mean(-1), on.size, seed)
    return {
        "sequences": int(on.size),
        "off": float(off.mean()),
        "on": float(on.mean()),
        "change": float((on - off).mean()),
        "change_95": [low, high],
        "helps": bool(high < 0) and on.size >= LEAST_SEQUENCES,
    }


def split(sources: np.ndarray, seed: int, share: float = 2 / 3) -> np.ndarray:
    """Which sequences to fit on, bool[n]: at random ``share`` of each source (int[n]), one of two at most."""
    rng, fitted = np.random.default_rng(seed), np.zeros(len(sources), bool)
    for source in np.unique(sources):
        own = rng.permutation(np.flatnonzero(sources == source))
        fitted[own[: max(1, min(round(share * own.size), own.size - 1))]] = True
    return fitted


def residual(
    measured: Measured, texts: np.ndarray, widths: tuple[int, ...], form: str, seed: int = 0
) -> tuple[dict[str, np.ndarray], dict]:
    """Fit and judge all forms: arrays for the tables, and the ``residual`` part of a report, JSON-ready.

    ``measured`` has leading axes [L, E], ``texts`` int[n] the text of each sequence, ``widths`` of the tables, 16
    included where there is a fallback; ``form`` of damage. The arrays are those of ``planner.ResidualHeads``: for
    ``paper``, and under ``moments/`` for ``moments`` with its reference. Of a form that does not lower the error of
    sequences that it was not fitted to there are none, nor of ``moments`` where ``paper`` lowers it more and texts are
    not kept apart. ``best`` of the report is the form in force, which lowers it most, None: neither, the residual is
    off. ``gate`` is judged only.
    """
    samples, fitted = Samples.of(measured, form, widths[-1] == 16), split(texts, seed)
    apart = texts if len(np.unique(texts)) > 1 else None
    features = {
        "paper": samples.features()[..., None, :],
        "gate": gate_feature(samples, fitted),
        "moments": moments_feature(samples, fitted, apart),
    }
    beyond = {"paper": None, "gate": None, "moments": apart}
    heads = {name: fit_heads(feature, samples, fitted, beyond[name]) for name, feature in features.items()}
    verdicts = {
        name: judge(samples, heads[name].factor(features[name]), fitted, seed, beyond[name]) for name in features
    }
    helping = [name for name in ENGINE_FORMS if verdicts[name]["helps"]]
    usable = helping if apart is None else [name for name in helping if name == "moments"]
    best = min(usable, key=lambda name: verdicts[name]["on"], default=None)
    arrays = _arrays("residual", heads["paper"]) if "paper" in helping else {}
    if best == "moments":
        arrays |= _arrays("residual/moments", heads["moments"])
        found = moments_reference(samples, measured, fitted, apart)
        arrays |= {f"residual/moments/{name}": array for name, array in found.items()}
    report = {
        "fitted": int(fitted.sum()),
        "held_out": int((~fitted).sum()),
        "damage": form,
        "best": best,
        "forms": {
            name: {
                "verdict": verdicts[name],
                "used": name == best,
                "heads": [
                    {
                        "matrix": MATRICES[matrix],
                        "transition": f"{widths[j + 1]} to {widths[j]}",
                        "r2": float(heads[name].held_out_r2[matrix, j]),
                        "confidence": float(heads[name].confidence[matrix, j]),
                    }
                    for matrix in (0, 1)
                    for j in reversed(range(len(widths) - 1))
                ],
            }
            for name in features
        },
        "notes": _notes(verdicts, best),
    }
    return arrays, report


def moments_reference(
    samples: Samples, measured: Measured, fitted: np.ndarray, texts: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """What :func:`moments_feature` of other sequences is computed from; see ``planner.MomentsReference``.

    ``energy_gate_up`` float16[L, E, B-1, H], ``energy_down`` float16[L, E, B-1, I]: the energy that a transition adds
    to each column, the largest of a block and transition being 1; ``mean`` float64[n, B-1] of the ``fitted`` bool[n],
    in the same unit, and ``text_mean`` float64[K, n, B-1] of each text.
    """
    layers, experts, _, widths = samples.moments.shape[1:]
    reference, largest = {}, []
    for name in ("energy_gate_up", "energy_down"):
        energy = getattr(measured, name)
        energy = np.concatenate([energy, np.zeros_like(energy[:, :, :1])], 2)[:, :, :widths]
        step = energy[:, :, :-1] - energy[:, :, 1:]
        scale = np.abs(step).max(-1)
        scale[scale == 0] = 1
        reference[name] = (step / scale[..., None]).astype(np.float16)
        largest.append(scale)
    mean, of_text = averages(samples.moments, samples.tokens, fitted, texts)
    # Moments carry the half of a mean square that damage has.
    unit, blocks = 0.5 * np.stack(largest, 2).astype(np.float64), layers * experts * 2
    reference["mean"] = (mean / unit).reshape(blocks, -1)
    if of_text is not None:
        reference["text_mean"] = (of_text / unit).reshape(len(of_text), blocks, -1)
    return reference


def _arrays(prefix: str, heads: Heads) -> dict[str, np.ndarray]:
    return {f"{prefix}/{name}": getattr(heads, name) for name in ("weights", "confidence", "low", "high")}


def _notes(verdicts: dict, best: str | None) -> list[str]:
    """Which form failed, and what follows."""
    failed = {name: verdict for name, verdict in verdicts.items() if not verdict["helps"]}
    notes = [
        f"{name} was judged on {verdict['sequences']} sequences, at least {LEAST_SEQUENCES} are needed: give more text"
        if verdict["sequences"] < LEAST_SEQUENCES
        else f"{name} does not lower the error of sequences that it was not fitted to"
        for name, verdict in failed.items()
    ]
    return [*notes, "the prompt residual is off" if best is None else f"{best} is in force"]


def _targets(samples: Samples, fitted: np.ndarray, texts: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Log of each sequence's damage over the average, and which are known: [n, L, E, 2, B-1]."""
    mean = average(samples.damage, samples.tokens, fitted, texts)
    own = transitions(samples.damage, samples.tokens)
    known = (samples.tokens >= LEAST_TOKENS)[..., None, None] & (own > 0) & (mean > 0)
    return _log_ratio(own, mean), known


def _log_ratio(own: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """``log(own / mean)``, 0 where one of them is not positive."""
    known = (own > 0) & (mean > 0)
    return np.log(np.where(known, own, 1) / np.where(known, mean, 1))


def _ridge(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Weighted ridge regression of ``y`` [s] on ``x`` [s, F] in the units of ``x``; a constant column is not shrunk."""
    weight = weight / weight.sum()
    mean = weight @ x
    scale = np.sqrt(weight @ (x - mean) ** 2)
    varies = scale > 1e-9 * np.abs(mean)
    z = (x - mean)[:, varies] / scale[varies]
    slope = np.linalg.solve(z.T @ (weight[:, None] * z) + RIDGE * np.eye(z.shape[1]), z.T @ (weight * (y - weight @ y)))
    out = np.zeros(x.shape[1])
    out[varies] = slope / scale[varies]
    constant = np.flatnonzero(~varies & (mean != 0))
    if constant.size:
        out[constant[0]] = (weight @ y - mean[varies] @ out[varies]) / mean[constant[0]]
    return out
