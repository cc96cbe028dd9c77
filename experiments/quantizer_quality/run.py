"""How far is the quantizer from the exact optimum, at its seed width and at every width that it splits into?

python experiments/quantizer_quality/run.py [--rows 4] [--out experiments/quantizer_quality/results.json]

For rows of heavy-tailed random numbers under lognormal weights, and for rows of the bundled model's real expert
weights, in groups as the model shares tables and alone: weighted error divided by that of the best clustering with so
many clusters (dynamic programming over all borders), and error of every split divided by that of the exact 2-means of
its cluster. A minute or two.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from calib.kmeans import nested_kmeans
from pwjax.checkpoints.artifact import Artifact
from pwjax.environment import versions
from pwjax.loading import bundled_model

RANGES = ((2, 6), (3, 6), (4, 6), (6, 6))


def optima(x: np.ndarray, w: np.ndarray, clusters: int) -> np.ndarray:
    """Least weighted errors float64[clusters] of 1..``clusters`` intervals of ascending ``x``."""
    x = x - np.average(x, weights=w)
    mass, moment = (np.concatenate([[0], np.cumsum(part)]) for part in (w, w * x))
    inside = mass[:, None] - mass
    gain = np.divide((moment[:, None] - moment) ** 2, inside, out=np.zeros_like(inside), where=inside > 0)
    gain[np.triu_indices(len(gain), 1)] = -np.inf
    best, out = gain[:, 0], []
    for _ in range(clusters):
        out.append((w * x * x).sum() - best[-1])
        best = (best + gain).max(axis=1)
    return np.array(out)


def samples(rows: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """``(name, values, weights)`` float32[R, K]."""
    rng = np.random.default_rng(0)
    for tail, spread in ((3, 0.0), (3, 2.0), (5, 4.0)):
        values = rng.standard_t(tail, (rows, 2048)).astype(np.float32)
        weights = np.exp(spread * rng.normal(size=values.shape)).astype(np.float32)
        yield f"Student t, {tail} degrees, weights exp({spread:g} N), K = 2048", values, weights
    artifact = Artifact.open(bundled_model())
    with artifact.host_store() as store:
        for matrix, name in enumerate(("gate_up", "down")):
            weight = np.concatenate([artifact.read_block(store, layer, 3, matrix, 16)[:8] for layer in range(4)])
            for group in (1, 4):
                values = weight[: rows * group].reshape(-1, group * weight.shape[1])
                where = f"bundled model, {name}, {group} rows of {weight.shape[1]}"
                yield where, values, np.ones_like(values)


def quality(values: np.ndarray, weights: np.ndarray, best: np.ndarray, seed: int, parent: int) -> dict:
    """Ratios of one clustering; ``best`` float64[R, 64] are the optima."""
    codes, tables = nested_kmeans(values, weights, seed, parent)
    values, weights = values.astype(np.float64), weights.astype(np.float64)
    errors, splits = {}, []
    for bits, table in tables.items():
        own = codes >> (parent - bits)
        error = weights * np.square(values - np.take_along_axis(table, own.astype(np.int64), 1))
        ratio = error.sum(1) / best[:, (1 << bits) - 1]
        total = error.sum() / best[:, (1 << bits) - 1].sum()
        errors[bits] = {"all_rows": round(float(total), 5), "worst_row": round(float(ratio.max()), 5)}
        for row in range(len(values) if bits > seed else 0):
            for cluster in range(1 << (bits - 1)):
                mine = np.flatnonzero(own[row] >> 1 == cluster)
                mine = mine[np.argsort(values[row, mine], kind="stable")]
                exact = optima(values[row, mine], weights[row, mine], 2)[1] if len(mine) > 2 else 0.0
                if exact > 1e-12 * weights[row].sum():
                    splits.append(error[row, mine].sum() / exact)
    return {
        "bits": f"{seed}-{parent}",
        "error_to_optimum": errors,
        "splits": len(splits),
        "worst_split_to_two_means": round(float(max(splits, default=1.0)), 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4, help="groups of each kind")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    args = parser.parse_args()
    results = []
    for name, values, weights in samples(args.rows):
        order = np.argsort(values, axis=1, kind="stable")
        ordered = [np.take_along_axis(a.astype(np.float64), order, 1) for a in (values, weights)]
        best = np.array([optima(x, w, 64) for x, w in zip(*ordered, strict=True)])
        for seed, parent in RANGES:
            results.append({"data": name, **quality(values, weights, best, seed, parent)})
            print(json.dumps(results[-1]), flush=True)
    facts = {"command": "python experiments/quantizer_quality/run.py", "rows": args.rows, "versions": versions()}
    args.out.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
