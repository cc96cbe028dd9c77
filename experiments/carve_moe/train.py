"""Distill the carved model: ``python -m experiments.carve_moe.train --data DIR --work WORK [--top-k 10]``.

End to end, with the dense model as the teacher; attention and norms move too, the embedding does not. Resumes from the
last Orbax checkpoint in ``WORK/distill``, also after Ctrl-C, SIGTERM or a kill. ``--steps`` may be changed at a resume,
which moves the end of the learning rate's fall with it. Writes ``WORK/distill.json``, the curve, at every checkpoint.
"""

import argparse
import json
import signal
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from tqdm import tqdm

from experiments.carve_moe import smollm2
from experiments.carve_moe.data import batch, prepare
from experiments.carve_moe.distill import Weights, distillation_loss
from experiments.carve_moe.model import config_of


def schedule(steps: int, fall: float) -> optax.Schedule:
    """Share of the peak rate: a rise over ten steps, then 1, and a linear fall over the last share ``fall``."""

    def rate(step):
        left = (steps - step) / max(1.0, fall * steps)
        return jnp.minimum(1.0, (step + 1) / 10) * jnp.clip(left, 0.02, 1.0)

    return rate


def optimizer(rate: optax.Schedule, peak: float, router_peak: float) -> optax.GradientTransformation:
    """Adam, with a rate of its own for routers, whose weights are small: their logits differ by hundredths."""

    def groups(params):
        kind = lambda path, _: "router" if "router" in [p.key for p in path] else "rest"  # noqa: E731
        return jax.tree_util.tree_map_with_path(kind, params)

    def adam(scale: float) -> optax.GradientTransformation:
        return optax.adam(lambda step: scale * rate(step), b1=0.9, b2=0.98, mu_dtype=jnp.bfloat16)

    both = optax.partition({"rest": adam(peak), "router": adam(router_peak)}, groups)
    return optax.chain(optax.clip_by_global_norm(1.0), both)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where carve.py wrote")
    parser.add_argument("--top-k", type=int, default=10)
    parser.add_argument("--steps", type=int, default=450, help="steps of the whole run, resumed ones included")
    parser.add_argument("--rows", type=int, default=4, help="windows of a step")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--peak", type=float, default=2e-4, help="peak learning rate")
    parser.add_argument("--router-peak", type=float, default=1e-5, help="the same of routers")
    parser.add_argument("--fall", type=float, default=0.7, help="last share of the steps, of falling rate")
    parser.add_argument("--balance", type=float, default=1.0, help="weight of the balance term")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-minutes", type=float, default=10.0, help="between checkpoints")
    args = parser.parse_args()

    arrays = prepare(args.data, args.work)
    # Half the memory; what is exported is bfloat16 too.
    teacher = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), smollm2.read_dense(smollm2.find_gguf()))
    with ocp.StandardCheckpointer() as checkpointer:
        carved = checkpointer.restore((args.work / "carved").absolute())
    config = config_of(carved, args.top_k)
    params = jax.tree.map(jnp.asarray, {name: carved[name] for name in ("layers", "norm")})
    tx = optimizer(schedule(args.steps, args.fall), args.peak, args.router_peak)
    state = {"params": params, "opt": tx.init(params), "step": np.zeros((), np.int64)}
    weights = Weights(balance=args.balance)

    objective = jax.value_and_grad(distillation_loss(config, weights), has_aux=True)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params, opt, teacher, tokens):
        (_, metrics), grads = objective(params, teacher, tokens)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, metrics

    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    manager = ocp.CheckpointManager((args.work / "distill").absolute(), options=options)
    curve, history = [], args.work / "distill.json"
    if manager.latest_step() is not None:
        state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(state))
        stored = json.loads(history.read_text())["curve"] if history.exists() else []
        curve = [c for c in stored if c["step"] < int(state["step"])]
    settings = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    stop, saved = [], time.monotonic()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.append(True))
    first = int(state["step"])
    for step in tqdm(range(first, args.steps), initial=first, total=args.steps, mininterval=30):
        tokens = batch(arrays, step, args.rows, args.window, args.seed)
        began, cpu = time.perf_counter(), time.process_time()
        state["params"], state["opt"], metrics = update(state["params"], state["opt"], teacher, tokens)
        metrics = {name: np.asarray(value) for name, value in metrics.items()}
        rates = metrics.pop("rates")
        entry = {
            "step": step, "tokens": (step + 1) * tokens.size,
            **{name: float(value) for name, value in metrics.items()},
            "least_rate": float(rates.min()), "greatest_rate": float(rates.max()),
            "seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu,
        }  # fmt: skip
        curve.append(entry)
        print(json.dumps({name: round(v, 4) if isinstance(v, float) else v for name, v in entry.items()}), flush=True)
        if not np.isfinite(entry["kl"]):
            raise SystemExit(f"the divergence is {entry['kl']} at step {step}; lower --peak")
        state["step"] = np.asarray(step + 1, np.int64)
        if stop or step + 1 == args.steps or time.monotonic() - saved > 60 * args.save_minutes:
            history.write_text(json.dumps({"settings": settings, "curve": curve}))
            manager.save(step + 1, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
            saved = time.monotonic()
        if stop:
            print("stopped; the same command resumes", flush=True)
            break
    manager.close()


if __name__ == "__main__":
    main()
