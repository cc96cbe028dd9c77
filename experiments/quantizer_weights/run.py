"""What should the clustering of a weight matrix minimize? KL on held-out text decides.

python experiments/quantizer_weights/run.py [--out experiments/quantizer_weights/results.json]

Quantizes the experts of the bundled model, all blocks at one width, with each of

* uniform   every weight counts once;
* fisher    squared gradients of the mean next-token loss, summed over windows (Any-Precision);
* moments   E[g^2 x^2] of the expert's inputs, one number a column: the mean square of what an error does to its output;

and once more each with tables refined: least squares against the full second moment E[g^2 x x^T], codes fixed. Means
of KL against 16 bits, and of paired differences to ``fisher``, with bootstrap intervals over windows. Some minutes.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from calib.anyprecision import QuantizedBlock, dequantize, quantize_block
from calib.refine import refine_block
from calib.text import windows as cut_windows
from pwjax import models
from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.inputs import load_tokenizer
from pwjax.checkpoints.tree import EXPERTS, flatten, unflatten
from pwjax.environment import versions
from pwjax.evaluate import heldout_documents
from pwjax.evaluate.divergence import kl_from_logits
from pwjax.loading import bundled_model
from pwjax.models.layers import activate, linear

WIDTHS = (2, 3, 4, 5, 6)
# Modules of the standard library that are not among the held-out ones: code, and prose about it.
CALIBRATION = ("argparse.py", "textwrap.py", "heapq.py", "pydoc_data/topics.py")


def texts(names: tuple[str, ...]) -> list[str]:
    """Sources of this Python's standard library."""
    import sysconfig

    return [(Path(sysconfig.get_path("stdlib")) / name).read_text("utf-8") for name in names]


def input_moments(config, params: dict, windows: np.ndarray) -> list[np.ndarray]:
    """``E[g^2 x x^T]`` float64[L, E, K, K] of the inputs of ``gate_up`` and of ``down``, a mean over routed tokens."""
    kinds = config.attention_kinds
    out = [np.zeros((config.num_layers, config.num_experts, k, k)) for k in (config.hidden_size, config.expert_size)]

    @partial(jax.jit, static_argnums=0)
    def layer(kind, own, x, positions):
        step = models.decoder_layer(
            config, kinds[kind], own, x, positions, jnp.ones(positions.shape, bool), models.whole_sequences(kinds[kind])
        )
        x, experts, gates = step.trace
        weight = jnp.zeros((len(x), config.num_experts)).at[jnp.arange(len(x))[:, None], experts].add(gates**2)

        def one(gate_up, w):
            gate, up = jnp.split(linear(x, gate_up), 2, axis=-1)
            inner = activate(config, gate) * up
            total = jnp.maximum((w > 0).sum(), 1)
            return [jnp.einsum("t,ti,tj->ij", w, h, h, precision="highest") / total for h in (x, inner)]

        return step.x, jax.lax.map(lambda item: one(*item), (own["experts"]["gate_up"], weight.T))

    x = params["embed"]["embedding"][windows]
    positions = jnp.broadcast_to(jnp.arange(windows.shape[1], dtype=jnp.int32), windows.shape)
    for index in range(config.num_layers):
        own = models.layer_params(config, params["layers"], index)
        x, moments = layer(config.layer_kinds[index], own, x, positions)
        for total, part in zip(out, moments, strict=True):
            total[index] = np.asarray(part, np.float64)
    return out


def squared_gradients(loss, join, experts: dict, rest: dict, windows: np.ndarray) -> dict:
    """Squared gradients of ``loss`` by ``experts``, summed over windows, float32."""
    add = jax.jit(lambda total, tokens: jax.tree.map(lambda t, g: t + g * g, total, jax.grad(of)(experts, tokens)))
    of = lambda e, tokens: loss(join(e, rest), tokens)  # noqa: E731
    total = jax.tree.map(jnp.zeros_like, experts)
    for tokens in windows:
        total = add(total, tokens)
    return jax.tree.map(np.asarray, total)


def fill_unrouted(importance: np.ndarray) -> np.ndarray:
    """``importance`` [E, ...] where experts that no token chose count alike, as the least of the others."""
    mean = importance.reshape(len(importance), -1).mean(1)
    filled = importance.copy()
    filled[mean == 0] = mean[mean > 0].min() if mean.any() else 1.0
    return filled


def blocks(stack: np.ndarray) -> np.ndarray:
    """[L, E, ...] as [L * E, ...]."""
    return np.asarray(stack).reshape(-1, *stack.shape[2:])


def quantized(weight: np.ndarray, importance: np.ndarray | None, lut_rows: int) -> list[QuantizedBlock]:
    """All blocks of one matrix, float32[L, E, N, K]."""
    given = [None] * len(blocks(weight)) if importance is None else blocks(importance)
    return [quantize_block(w, h, WIDTHS, lut_rows) for w, h in zip(blocks(weight), given, strict=True)]


def column_weights(moment: np.ndarray) -> np.ndarray:
    """The diagonal float64[L, E, K] of second moments, experts without tokens filled."""
    diagonal = np.einsum("leii->lei", moment)
    return np.stack([fill_unrouted(layer) for layer in diagonal])


def interval(values: np.ndarray, rng: np.random.Generator) -> list[float]:
    """95 % bootstrap interval of the mean over windows."""
    means = values[rng.integers(0, len(values), (4000, len(values)))].mean(1)
    return [float(v) for v in np.percentile(means, [2.5, 97.5])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=16, help="windows of calibration, and as many of held-out text")
    parser.add_argument("--window-tokens", type=int, default=512)
    parser.add_argument("--bits", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--ridge", type=float, default=0.01, help="of the mean diagonal of the second moment")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    args = parser.parse_args()

    artifact = Artifact.open(bundled_model())
    config, geometry = artifact.config, artifact.geometry
    encode = lambda text: load_tokenizer(artifact.tokenizer_path).encode(text).ids  # noqa: E731
    train = cut_windows(texts(CALIBRATION), args.window_tokens, args.windows, encode).tokens
    test = cut_windows([d.text for d in heldout_documents()], args.window_tokens, args.windows, encode).tokens
    flat = {n: jnp.asarray(np.asarray(v), jnp.float32) for n, v in flatten(artifact.source(16).tree()).items()}
    params = unflatten(flat)
    note = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731

    moments = input_moments(config, params, train)
    note("moments are there")
    loss = models.loss_fn(config)
    experts = {n: flat[n] for n in EXPERTS}
    rest = {n: v for n, v in flat.items() if n not in EXPERTS}
    join = lambda e, r: unflatten({**r, **e})  # noqa: E731
    fisher = squared_gradients(lambda p, t: loss(p, t[None])[0], join, experts, rest, train)
    note("squared gradients are there")
    weights = {
        "uniform": [None, None],
        "fisher": [np.stack([fill_unrouted(layer) for layer in fisher[n]]) for n in EXPERTS],
        "moments": [column_weights(moment) for moment in moments],
    }
    arms = {
        name: [quantized(flat[n], own[m], geometry.shape(m).lut_rows) for m, n in enumerate(EXPERTS)]
        for name, own in weights.items()
    }
    note("quantized")

    logits = jax.jit(lambda p, t: models.logits(config, p, models.forward(config, p, t).hidden))
    divergence = jax.jit(lambda p, t, reference: kl_from_logits(reference, logits(p, t)).mean(-1))
    batches = test.reshape(-1, 4, test.shape[1]) if len(test) % 4 == 0 else test[:, None]
    reference = [logits(params, batch) for batch in batches]

    def measure(arm: list, bits: int) -> np.ndarray:
        changed = {
            n: jnp.asarray(np.stack([dequantize(b, bits) for b in arm[m]]).reshape(flat[n].shape))
            for m, n in enumerate(EXPERTS)
        }
        own = join(changed, rest)
        return np.concatenate([np.asarray(divergence(own, b, r)) for b, r in zip(batches, reference, strict=True)])

    kl: dict[int, dict[str, np.ndarray]] = {}
    for bits in args.bits:
        kl[bits] = {}
        for name, arm in arms.items():
            better = [
                [
                    refine_block(b, w, h, (bits,), args.ridge)
                    for b, w, h in zip(arm[m], blocks(flat[n]), blocks(moments[m]), strict=True)
                ]
                for m, n in enumerate(EXPERTS)
            ]
            for label, own in ((name, arm), (f"{name}, refined", better)):
                kl[bits][label] = measure(own, bits)
                note(f"{bits} bits, {label}: KL {kl[bits][label].mean():.5f}")
    rng = np.random.default_rng(0)
    rows = [
        {
            "bits": bits,
            "weights": name,
            "kl": float(values.mean()),
            "kl_interval": interval(values, rng),
            "minus_fisher": float((values - by_name["fisher"]).mean()),
            "minus_fisher_interval": interval(values - by_name["fisher"], rng),
        }
        for bits, by_name in kl.items()
        for name, values in by_name.items()
    ]
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "out"}
    result = {"command": "python experiments/quantizer_weights/run.py", "settings": settings, "versions": versions(),
              "calibration_tokens": int(train.size), "held_out_tokens": int(test.size), "results": rows}  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
