"""How far does routing differ between prose, code and mathematics, layer by layer?

python -m experiments.train_demo.routing MODEL --data DIR [--out STEM]

MODEL is a Hugging Face directory or an artifact. Counts which experts the tokens of held-out text choose, and writes
STEM.json and STEM.png. Distances between the shares of two domains, for every layer:

* total variation: the part of the routed tokens that would have to move, 0 to 1;
* Jensen-Shannon divergence in bits, 0 to 1;
* the same between two halves of one domain (``within``): what is left where nothing differs but the sample.

``mix`` are the shares under the mixture that the model was trained on. Takes about a minute on two cores.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.texts import encode
from experiments.train_demo.data import MIXTURE
from experiments.train_demo.model import load_model
from pwjax import models
from pwjax.environment import versions

TEXTS = {"prose": "books/books.heldout.txt", "code": "code/python_stdlib.heldout.txt", "math": "math/gsm8k.test.txt"}
# An expert below this share of its layer's routed tokens is hardly trained.
LEAST_SHARE = 0.01


def window_counts(config, params: dict, tokens: np.ndarray, windows: int, window: int) -> np.ndarray:
    """Choices float64[n, L, E] of each expert in ``windows`` windows spread evenly over ``tokens``."""
    rows = tokens[: len(tokens) // window * window].reshape(-1, window).astype(np.int32)
    rows = rows[np.arange(min(windows, len(rows))) * len(rows) // min(windows, len(rows))]
    run = jax.jit(lambda params, row: models.forward(config, params, row[None]).stats.count)
    return np.stack([np.asarray(run(params, jnp.asarray(row)), np.float64) for row in rows])


def share(counts: np.ndarray) -> np.ndarray:
    """Shares float64[L, E] of each layer's choices, from counts of windows."""
    total = counts.sum(0)
    return total / total.sum(1, keepdims=True)


def total_variation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Half the L1 distance of each layer, float64[L]."""
    return np.abs(a - b).sum(1) / 2


def jensen_shannon(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Jensen-Shannon divergence of each layer in bits, float64[L]."""
    middle = (a + b) / 2

    def divergence(p):
        return (p * np.log2(np.where(p > 0, p / np.where(middle > 0, middle, 1), 1))).sum(1)

    return (divergence(a) + divergence(b)) / 2


def report(counts: dict[str, np.ndarray]) -> dict:
    """The numbers of the report, from the counts of each domain."""
    shares = {name: share(value) for name, value in counts.items()}
    mix = sum(MIXTURE[name] * value for name, value in shares.items())
    pairs = {f"{a}-{b}": (shares[a], shares[b]) for a, b in itertools.combinations(shares, 2)}
    within = {name: (share(value[::2]), share(value[1::2])) for name, value in counts.items()}
    moved = {name: total_variation(*pair) for name, pair in pairs.items()}
    noise = {name: total_variation(*halves) for name, halves in within.items()}
    diverged = {name: jensen_shannon(*pair) for name, pair in pairs.items()}
    layers = []
    for layer in range(len(mix)):
        layers.append({
            "layer": layer,
            "total_variation": {name: _round(value[layer]) for name, value in moved.items()},
            "jensen_shannon_bits": {name: _round(value[layer]) for name, value in diverged.items()},
            "within_total_variation": {name: _round(value[layer]) for name, value in noise.items()},
            "share": {
                name: {"min": _round(value[layer].min()), "max": _round(value[layer].max())}
                for name, value in {**shares, "mix": mix}.items()
            },
        })
    rare = [[int(i), int(e), _round(mix[i, e])] for i, e in np.argwhere(mix < LEAST_SHARE)]
    return {
        "layers": layers,
        "mean_total_variation": {name: _round(value.mean()) for name, value in moved.items()},
        "mean_within_total_variation": {name: _round(value.mean()) for name, value in noise.items()},
        "least_share_of_mix": _round(mix.min()),
        "every_expert_above_1_percent_of_mix": not rare,
        "experts_below_1_percent_of_mix": rare,
        "shares": {name: np.round(value, 5).tolist() for name, value in {**shares, "mix": mix}.items()},
    }


def _round(value: float) -> float:
    return round(float(value), 4)


def plot(found: dict, path: Path) -> None:
    """Heat maps of the shares, and the distances by layer; nothing where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed (pip install 'pwjax[plot]'): no picture", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    top = max(max(map(max, found["shares"][name])) for name in TEXTS)
    fig, axes = plt.subplots(1, len(TEXTS) + 1, figsize=(14, 3.4), layout="constrained")
    image = None
    for ax, name in zip(axes, TEXTS, strict=False):
        image = ax.imshow(found["shares"][name], vmin=0, vmax=top, aspect="auto", cmap="viridis")
        ax.set(title=name, xlabel="expert", ylabel="layer")
    fig.colorbar(image, ax=axes[: len(TEXTS)], label="share of routed tokens", shrink=0.9)
    layers = [row["layer"] for row in found["layers"]]
    for name in found["mean_total_variation"]:
        axes[-1].plot(layers, [row["total_variation"][name] for row in found["layers"]], marker="o", label=name)
    noise = [max(row["within_total_variation"].values()) for row in found["layers"]]
    axes[-1].plot(layers, noise, ls=":", color="gray", label="within a domain")
    axes[-1].set(title="distance between domains", xlabel="layer", ylabel="total variation", ylim=(0, None))
    axes[-1].legend(fontsize=8)
    fig.savefig(path, dpi=120)
    plt.close(fig)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face directory or artifact")
    parser.add_argument("--data", type=Path, required=True, help="directory with books/, code/ and math/")
    parser.add_argument("--windows", type=int, default=96, help="windows of each domain")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--out", type=Path, default=Path("routing"), help="stem of the JSON and PNG files")
    args = parser.parse_args()
    if args.windows < 2:
        parser.error("--windows must be at least 2: the halves of a domain are compared")

    config, params, tokenizer = load_model(args.model)
    counts = {}
    for name, file in TEXTS.items():
        text = (args.data / file).read_text(encoding="utf-8", errors="ignore")
        counts[name] = window_counts(config, params, encode(tokenizer, text, np.uint16), args.windows, args.window)
        print(f"{name}: {len(counts[name]) * args.window} tokens", file=sys.stderr, flush=True)
    found = report(counts)
    settings = {"windows": args.windows, "window": args.window, "texts": TEXTS, "mixture": MIXTURE}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    data = {"settings": settings, "versions": versions(), **found}
    args.out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    plot(found, args.out.with_suffix(".png"))
    short = ("mean_total_variation", "mean_within_total_variation", "least_share_of_mix")
    print(json.dumps({key: found[key] for key in short}))


if __name__ == "__main__":
    main()
