"""Damage tables from what was measured on routed tokens: rare experts, floors, and how far damage adds up.

Blocks are rows ``(layer * experts + expert) * 2 + matrix``; L layers, E experts, B widths. Tables are in nats:
``output`` and ``directional`` a routed token, ``paper`` a served one.
"""

import numpy as np

# Tokens of the layer's mean that every expert is given: one with 32 tokens of its own is half mean, half itself.
PSEUDO_TOKENS = 32
# Standard errors that are added to a mean: experts seen seldom are taken to be worse.
MARGIN = 1.0
# Tokens of all texts that each text is given.
TEXT_TOKENS = 128
# Experts with fewer tokens are named.
FEW_TOKENS = 32
# An outlier is this many robust standard deviations above the median log damage of its matrix.
OUTLIER = 3.0


def conditional_table(tokens: np.ndarray, total: np.ndarray, square: np.ndarray) -> np.ndarray:
    """Mean damage float64[n, B] of a routed token, finite for every expert and never growing with bits.

    ``tokens`` int64[L, E]; ``total`` and ``square`` float64[L, E, 2, B]: sums over them of the damage and its square.
    The mean of an expert is drawn to the mean of its layer as if it had PSEUDO_TOKENS of that one, and MARGIN standard
    errors are added, so few tokens make a block look worse, never better.
    """
    count = tokens[:, :, None, None].astype(np.float64)
    pooled = lambda sums: sums.sum(1, keepdims=True) / np.maximum(count.sum(1, keepdims=True), 1)  # noqa: E731
    weight = count + PSEUDO_TOKENS
    mean, mean_square = ((sums + PSEUDO_TOKENS * pooled(sums)) / weight for sums in (total, square))
    error = np.sqrt(np.maximum(mean_square - mean**2, 0) / weight)
    table = np.minimum.accumulate(mean + MARGIN * error, axis=-1)
    return table.reshape(-1, table.shape[-1])


def text_tables(counts: np.ndarray, by_sequence: np.ndarray, texts: np.ndarray, pooled: np.ndarray) -> np.ndarray:
    """Mean damage float64[K, n, B] of a routed token in each of K texts, never growing with bits.

    ``counts`` int64[L, E, s] tokens and ``by_sequence`` float64[L, E, s, 2, B] sums of damage in each sequence,
    ``texts`` int64[s] the text of each, 0..K-1; ``pooled`` float64[n, B] the :func:`conditional_table` of all, which
    every text is drawn to.
    """
    tables = []
    for text in range(int(texts.max()) + 1):
        own = texts == text
        sums, count = by_sequence[:, :, own].sum(2), counts[:, :, own].sum(2)
        table = drawn(sums, count[..., None, None], pooled.reshape(sums.shape))
        tables.append(np.minimum.accumulate(table.reshape(pooled.shape), axis=-1))
    return np.stack(tables)


def drawn(sums: np.ndarray, count: np.ndarray, pooled: np.ndarray) -> np.ndarray:
    """Mean of one text's ``sums`` over ``count`` tokens, drawn to ``pooled`` as if it had TEXT_TOKENS of that."""
    return (sums + TEXT_TOKENS * pooled) / (count + TEXT_TOKENS)


def served(table: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """Damage float64[n, B] a served token from a conditional table and ``rate`` float64[L, E] choices a token."""
    return table * np.repeat(rate.reshape(-1), 2)[:, None]


def floors(expected: np.ndarray, widths: tuple[int, ...], tokens: np.ndarray) -> np.ndarray:
    """Fewest bits int64[n] that each block should have, the lowest width where nothing is special.

    ``expected`` float64[n, B] is damage a served token, ``tokens`` int64[L, E]. Damage is heavy-tailed: a few blocks
    decide what low bits cost. Those whose damage at the lowest width is an outlier of their matrix get the fewest bits
    at which it no longer is, the widest width at most. An expert with fewer than two tokens is not known: it gets 4
    bits, or what is nearest.
    """
    out = np.full(len(expected), widths[0], np.int64)
    for matrix in (0, 1):
        logs = np.log(np.maximum(expected[matrix::2], np.finfo(float).tiny))
        middle = np.median(logs[:, 0])
        spread = 1.4826 * np.median(np.abs(logs[:, 0] - middle))
        if spread == 0:
            continue
        level = (logs > middle + OUTLIER * spread).sum(1)
        out[matrix::2] = np.asarray(widths)[np.minimum(level, len(widths) - 1)]
    unknown = np.repeat((tokens < 2).reshape(-1), 2)
    out[unknown] = np.maximum(out[unknown], min(widths, key=lambda b: (abs(b - 4), b)))
    return out


def super_additivity(expected: dict[int, np.ndarray]) -> float:
    """How much dearer damage is among blocks of few bits than among blocks of many: 1 where damage adds up.

    ``expected[b]`` float64[n, B] is the damage a served token where all other blocks are at b bits; the ratio is that
    of the sums over all blocks, geometric mean over widths, of the lowest b to the highest.
    """
    low, high = expected[min(expected)].sum(0), expected[max(expected)].sum(0)
    known = (low > 0) & (high > 0)
    return float(np.exp(np.mean(np.log(low[known] / high[known])))) if known.any() else 1.0


def few_tokens(tokens: np.ndarray) -> list[dict[str, int]]:
    """Experts with fewer than FEW_TOKENS tokens, fewest first: ``{"layer", "expert", "tokens"}``."""
    rare = sorted((int(tokens[at]), at) for at in zip(*np.nonzero(tokens < FEW_TOKENS), strict=True))
    return [{"layer": int(layer), "expert": int(expert), "tokens": count} for count, (layer, expert) in rare]
