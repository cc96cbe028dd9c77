"""The dense model's feed-forward layers in experts: routers by ridge regression, ``down`` by least squares.

python experiments/carve_moe/carve.py --data DIR --work WORK [--top-k 10]

Reads windows of the training mixture. Writes the tokenizer to ``WORK/tokenizer``, an Orbax checkpoint of the tree in
``model.py`` to ``WORK/carved``, and to ``WORK/carved.json`` the energy that the chosen experts carry, a layer: chosen
by oracle, and by the router.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import smollm2
from data import batch, prepare
from model import moe_config, run_layers
from refit import refit, silu
from split import choose, expert_energy, ridge_router, shared_neurons, split
from tqdm import tqdm


def neuron_outputs(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Norm float32[T, F] of what each neuron of an MLP adds to the residual of ``x`` [T, H]."""
    gate, up = np.split(x @ gate_up.T, 2, axis=1)
    return np.abs(silu(gate) * up) * np.linalg.norm(down, axis=0)


def take(gate_up: np.ndarray, down: np.ndarray, neurons: np.ndarray) -> dict:
    """An MLP of some neurons of an MLP; ``neurons`` int[..., I] may have axes in front."""
    rows = np.concatenate([neurons, neurons + down.shape[1]], axis=-1)
    return {"gate_up": gate_up[rows], "down": np.moveaxis(down[:, neurons], 0, -2)}


def carve_layer(x: np.ndarray, mlp: dict, settings: argparse.Namespace) -> tuple[dict, dict]:
    """Router, experts and shared expert of one layer, and what is to be reported of it."""
    experts, neurons = settings.experts, mlp["down"].shape[1]
    size = neurons // (experts + 1)
    fires = neuron_outputs(x, mlp["gate_up"], mlp["down"])
    shared = shared_neurons(fires, size)
    rest = np.setdiff1d(np.arange(neurons), shared)
    some = fires[:: max(1, len(x) // settings.split_tokens), rest]
    groups, carried = split(some, experts, settings.top_k, settings.balance, settings.rounds, settings.seed)
    owner = np.empty(len(rest), int)
    owner[groups.ravel()] = np.repeat(np.arange(experts), size)
    energy = expert_energy(fires[:, rest] ** 2, owner, experts)
    # Fitted on one half and judged on the other, then fitted on all.
    half = np.arange(len(x)) % 2 == 0
    fit = lambda on: ridge_router(x[on], energy[on], settings.penalty, settings.spread)  # noqa: E731
    share = energy / energy.sum(1, keepdims=True)
    chosen = choose(np.exp(x[~half] @ fit(half).T), settings.top_k, 0.0)
    rates = choose(energy, settings.top_k, 0.0).mean(0)
    found = {
        "carried_by_round": carried,
        "carried_oracle": float((share * choose(energy, settings.top_k, 0.0)).sum(1).mean()),
        "carried_router": float((share[~half] * chosen).sum(1).mean()),
        "oracle_rates": [float(rates.min()), float(rates.max())],
        "router_rates": [float(chosen.mean(0).min()), float(chosen.mean(0).max())],
    }
    layer = {
        "router": {"kernel": fit(np.ones(len(x), bool))},
        "experts": take(mlp["gate_up"], mlp["down"], rest[groups]),
        "shared": {**take(mlp["gate_up"], mlp["down"], shared), "gate": np.zeros((1, x.shape[1]), np.float32)},
    }
    return layer, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--experts", type=int, default=15, help="routed ones; the shared one is as large")
    parser.add_argument("--top-k", type=int, default=10)
    parser.add_argument("--windows", type=int, default=32, help="of 256 tokens, to calibrate on")
    parser.add_argument("--balance", type=float, default=0.5, help="0: most energy; 1: all experts chosen about alike")
    parser.add_argument("--rounds", type=int, default=3, help="of moving neurons")
    parser.add_argument("--split-tokens", type=int, default=2730, help="that neurons are split by; routers take all")
    parser.add_argument("--penalty", type=float, default=0.01)
    parser.add_argument("--refit-penalty", type=float, default=0.2)
    parser.add_argument("--spread", type=float, default=0.05, help="standard deviation of the router's logits")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    gguf = smollm2.find_gguf()
    smollm2.save_tokenizer(gguf, args.work / "tokenizer")
    arrays = prepare(args.data, args.work)
    dense = smollm2.read_dense(gguf)
    config = moe_config(args.top_k, args.experts)
    inputs = jax.jit(lambda params, rows: run_layers(config, params, rows)[1][0].astype(jnp.float16))
    cache = args.work / f"inputs-{args.windows}.npy"
    if not cache.exists():
        parts = []
        for step in tqdm(range(args.windows // 8), desc="calibration"):
            # Steps that training does not reach.
            parts.append(np.asarray(inputs(dense, batch(arrays, 1_000_000 + step, 8, 256, args.seed))))
        np.save(cache, np.concatenate(parts, axis=1))
    seen = np.load(cache, mmap_mode="r")
    layers, report = [], []
    for index in tqdm(range(smollm2.LAYERS), desc="layers"):
        mlp = {name: w[index] for name, w in dense["layers"]["mlp"].items()}
        x = seen[index].astype(np.float32)
        layer, found = carve_layer(x, mlp, args)
        layer, errors = refit(x, mlp, layer, args.top_k, args.refit_penalty)
        layers.append(layer)
        report.append({"layer": index, **found, **errors})
    tree = {name: t for name, t in dense["layers"].items() if name != "mlp"}
    tree |= jax.tree.map(lambda *parts: np.stack(parts), *layers)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((args.work / "carved").absolute(), {**dense, "layers": tree}, force=True)
    settings = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()}
    (args.work / "carved.json").write_text(json.dumps({"settings": settings, "layers": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
