"""The dense model's feed-forward layers in experts: routers by ridge regression, ``down`` by least squares.

python -m experiments.carve_moe.carve --data DIR --work WORK [--top-k 10]

Reads windows of the training mixture. Writes the tokenizer to ``WORK/tokenizer``, an Orbax checkpoint of the tree in
``model.py`` to ``WORK/carved``, and to ``WORK/carved.json``, a layer: the energy that the chosen experts carry, by
oracle and by the router, and how far the residual is from the dense model's, relative and squared. Does nothing where
that is done with the same settings.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from tqdm import tqdm

from experiments import tables
from experiments.carve_moe import smollm2
from experiments.carve_moe.data import batch, prepare
from experiments.carve_moe.model import EXPERTS, SHARED, attend, moe_config, split_heads
from experiments.carve_moe.refit import features, gated, outputs, refit, solve, token_weights
from experiments.carve_moe.split import choose, expert_energy, ridge_router, shared_neurons, split


def take(gate_up: np.ndarray, down: np.ndarray, neurons: np.ndarray) -> dict:
    """An MLP of some neurons of an MLP; ``neurons`` int[..., I] may have axes in front."""
    rows = np.concatenate([neurons, neurons + down.shape[1]], axis=-1)
    return {"gate_up": gate_up[rows], "down": np.moveaxis(down[:, neurons], 0, -2)}


def carve_layer(neurons: np.ndarray, reads: np.ndarray, mlp: dict, settings: argparse.Namespace) -> tuple[dict, dict]:
    """Router, experts and shared expert of one layer, and what is to be reported of it.

    ``neurons`` [T, F] are the dense layer's, ``reads`` [T, H] what the carved one will read, from which the router
    must tell.
    """
    experts = settings.experts
    fires = np.abs(neurons) * np.linalg.norm(mlp["down"], axis=0)  # norms of what they add to the residual
    shared = shared_neurons(fires, settings.shared)
    rest = np.setdiff1d(np.arange(fires.shape[1]), shared)
    some = fires[:: max(1, len(fires) // settings.split_tokens), rest]
    groups, carried = split(some, experts, settings.top_k, settings.balance, settings.rounds, settings.seed)
    owner = np.empty(len(rest), int)
    owner[groups.ravel()] = np.repeat(np.arange(experts), groups.shape[1])
    energy = expert_energy(fires[:, rest] ** 2, owner, experts)
    router = ridge_router(reads, energy, settings.penalty, settings.spread)
    share = energy / energy.sum(1, keepdims=True)
    chosen, oracle = (choose(e, settings.top_k, 0.0) for e in (np.exp(reads @ router.T), energy))
    found = {
        "carried_by_round": carried,
        "carried_oracle": float((share * oracle).sum(1).mean()),
        "carried_router": float((share * chosen).sum(1).mean()),
        "selection_rates": [float(chosen.mean(0).min()), float(chosen.mean(0).max())],
    }
    layer = {
        "router": {"kernel": router},
        "experts": take(mlp["gate_up"], mlp["down"], rest[groups]),
        "shared": {**take(mlp["gate_up"], mlp["down"], shared), "gate": np.zeros((1, reads.shape[1]), np.float32)},
    }
    return layer, found


def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Root-mean-square norm of the residual ``x`` [T, H]."""
    return x / np.sqrt((x**2).mean(1, keepdims=True) + smollm2.RMS_EPS) * scale


def carve(dense: dict, tokens: np.ndarray, settings: argparse.Namespace) -> tuple[dict, list[dict]]:
    """The carved tree of ``dense``, fitted on ``tokens`` int32[W, T], and a report a layer.

    Layers are done in order, two residuals side by side: the dense model's, and that of the layers carved so far. Each
    output matrix, of attention and of experts, is fitted to bring the second back to the first, on all but the last
    eighth of the tokens.
    """
    windows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    mask = jnp.tril(jnp.ones((length, length), bool))
    config = moe_config(settings.top_k, settings.experts, settings.shared)
    heads = jax.jit(lambda attn, h: attend(*split_heads(config, attn, h, positions), mask))
    held_out = len(tokens) * length * 7 // 8
    on = slice(held_out)

    def mix(attn: dict, h: np.ndarray) -> np.ndarray:
        return np.asarray(heads(attn, h.reshape(windows, length, -1))).reshape(len(h), -1)

    wanted = found = dense["embed"]["embedding"][tokens.ravel()]
    layers, report = [], []
    for index in tqdm(range(len(dense["layers"]["mlp"]["down"])), desc="layers"):
        p = jax.tree.map(lambda a: a[index], dense["layers"])  # noqa: B023
        output = p["attn"]["o"]["kernel"]
        theirs, ours = (mix(p["attn"], norm(x, p["input_norm"]["scale"])) for x in (wanted, found))
        wanted = wanted + theirs @ output.T
        weight = token_weights(wanted)
        fitted = solve(ours[on], (wanted - found)[on], output, weight[on], settings.refit_penalty)
        found = found + ours @ fitted.T
        x, reads = (norm(r, p["post_norm"]["scale"]) for r in (wanted, found))
        neurons = gated(x, p["mlp"]["gate_up"])
        layer, entry = carve_layer(neurons, reads, p["mlp"], settings)
        wanted = wanted + neurons @ p["mlp"]["down"].T
        neurons, weight = features(reads, layer, settings.top_k), token_weights(wanted)
        layer = refit(neurons[on], (wanted - found)[on], weight[on], layer, settings.refit_penalty)
        found = found + neurons @ outputs(layer).T
        error = (((found - wanted) * weight) ** 2).sum(1)
        entry |= {"residual_error": float(error[on].mean()), "residual_error_held_out": float(error[held_out:].mean())}
        attn = {**p["attn"], "o": {"kernel": fitted}}
        layers.append({**layer, "attn": attn, "input_norm": p["input_norm"], "post_norm": p["post_norm"]})
        report.append({"layer": index, **entry})
        tqdm.write(json.dumps({k: v for k, v in report[-1].items() if "error" in k or "router" in k}))
    return {**dense, "layers": jax.tree.map(lambda *parts: np.stack(parts), *layers)}, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--experts", type=int, default=EXPERTS, help="routed ones")
    parser.add_argument("--shared", type=int, default=SHARED, help="neurons of the shared expert")
    parser.add_argument("--top-k", type=int, default=10)
    parser.add_argument("--windows", type=int, default=384, help="of 256 tokens, to fit on")
    parser.add_argument("--balance", type=float, default=0.5, help="0: most energy; 1: all experts chosen about alike")
    parser.add_argument("--rounds", type=int, default=3, help="of moving neurons")
    parser.add_argument("--split-tokens", type=int, default=8192, help="that neurons are split by; routers take all")
    parser.add_argument("--penalty", type=float, default=0.01)
    parser.add_argument("--refit-penalty", type=float, default=0.05)
    parser.add_argument("--spread", type=float, default=0.05, help="standard deviation of the router's logits")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    try:
        moe_config(args.top_k, args.experts, args.shared)
    except ValueError as error:
        parser.error(str(error))
    settings = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    report_file, distilled = args.work / "carved.json", args.work / "distill"
    if report_file.exists() and json.loads(report_file.read_text())["settings"] == settings:
        return print(f"{args.work / 'carved'} was carved like that before")
    if distilled.exists() and any(distilled.iterdir()):
        raise SystemExit(f"{distilled} was distilled from another carving; move it or take another --work")
    gguf = smollm2.find_gguf()
    smollm2.save_tokenizer(gguf, args.work / "tokenizer")
    # Of a step that training does not reach.
    tokens = batch(prepare(args.data, args.work), 1_000_000, args.windows, 256, args.seed)
    tree, report = carve(smollm2.read_dense(gguf), tokens, args)
    report_file.unlink(missing_ok=True)  # it says that the checkpoint beside it is whole
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((args.work / "carved").absolute(), tree, force=True)
    tables.write(report_file, settings=settings, layers=report)


if __name__ == "__main__":
    main()
