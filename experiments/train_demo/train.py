"""Train the bundled model: ``python -m experiments.train_demo.train --data DIR --work DIR``.

Resumes from the last Orbax checkpoint in ``--work``, also after Ctrl-C, SIGTERM or a kill; writes ``loss.json`` and
``loss.png`` as it goes and the Hugging Face layout to ``WORK/hf`` at the end. The first part of the run uses short
windows, the last part long ones. ``README.md`` beside it has the commands of the bundled model.
"""

import argparse
import json
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from tqdm import tqdm

from experiments.train_demo.data import batch, prepare
from pwjax import models
from pwjax.checkpoints.hf import save_hf
from pwjax.config import ModelConfig
from pwjax.errors import CheckpointError


def model_config(vocab_size: int) -> ModelConfig:
    """The bundled model: Qwen2-MoE architecture, 11.0 M parameters, 7.1 M of them in routed experts."""
    return ModelConfig(
        model_type="qwen2_moe", vocab_size=vocab_size, hidden_size=256, num_layers=6, num_heads=8, num_kv_heads=4,
        head_dim=32, num_experts=16, top_k=4, expert_size=96, shared_size=128, norm_topk_prob=False, rms_eps=1e-6,
        rope_theta=10000.0, max_positions=2048, tie_embeddings=False, qkv_bias=True, eos_token_ids=(0,),
    )  # fmt: skip


def schedule(steps: int, peak: float) -> optax.Schedule:
    """Warm-up, plateau, then a linear fall over the last 40 %: the end can be moved by restarting with other steps."""
    return optax.join_schedules(
        [
            optax.linear_schedule(peak / 20, peak, 40),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, peak / 50, int(0.4 * steps)),
        ],
        [40, int(0.6 * steps)],
    )


def optimizer(params: dict, steps: int, peak: float) -> optax.GradientTransformation:
    """Muon for the matrices of the layers (each expert on its own), Adam for everything else."""

    def kind(path, leaf):
        names = [p.key for p in path]
        matrix = names[0] == "layers" and names[-1] in ("kernel", "gate_up", "down") and "router" not in names
        if not matrix:
            return None
        return optax.contrib.MuonDimensionNumbers(reduction_axis=(leaf.ndim - 1,), output_axis=(leaf.ndim - 2,))

    dimensions = jax.tree_util.tree_map_with_path(kind, params)
    rate = schedule(steps, peak)
    muon = optax.contrib.muon(
        rate, consistent_rms=0.2, ns_steps=4, weight_decay=0.05, adam_b2=0.98,
        muon_weight_dimension_numbers=dimensions, adam_learning_rate=rate,
    )  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def loss_and_stats(config: ModelConfig, balance: float):
    """Cross entropy plus the weak load-balancing loss; the metrics are ``nll`` and the routed ``share`` [L, E]."""

    def loss(params, tokens):
        nll, out = models.next_token_nll(config, params, tokens)
        share = out.stats.count / out.stats.count.sum(-1, keepdims=True)
        prob = out.stats.prob / out.stats.prob.sum(-1, keepdims=True)
        uneven = config.num_experts * jnp.sum(share * prob, -1).mean()
        return nll.mean() + balance * uneven, {"nll": nll.mean(), "share": share}

    return loss


def save_curve(work: Path, curve: list[dict]) -> None:
    """Write ``loss.json``, and ``loss.png`` where matplotlib is installed."""
    partial = work / "loss.json.tmp"
    partial.write_text(json.dumps(curve))
    partial.replace(work / "loss.json")
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 4))
    ax.plot([c["tokens"] for c in curve], [c["nll"] for c in curve], lw=0.5, alpha=0.5)
    smooth = np.convolve([c["nll"] for c in curve], np.ones(20) / 20, "valid") if len(curve) > 20 else []
    ax.plot([c["tokens"] for c in curve][len(curve) - len(smooth) :], smooth)
    ax.set(xlabel="tokens", ylabel="training loss (nats per token)", title="Demo model")
    fig.tight_layout()
    fig.savefig(work / "loss.png", dpi=120)
    plt.close(fig)


def main() -> None:
    """Command line of the training run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory with books/, code/ and math/")
    parser.add_argument("--work", type=Path, required=True, help="checkpoints, curve and result")
    parser.add_argument("--steps", type=int, default=690, help="steps of the whole run, resumed ones included")
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--window", type=int, default=256, help="tokens of a window")
    parser.add_argument("--long-window", type=int, default=1024)
    parser.add_argument("--long-share", type=float, default=0.2, help="last share of the steps, on long windows")
    parser.add_argument("--vocab", type=int, default=4096, help="entries of the tokenizer")
    parser.add_argument("--peak", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--balance", type=float, default=0.15, help="weight of the load-balancing loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    args = parser.parse_args()
    if max(args.window, args.long_window) > args.tokens_per_step:
        parser.error("--tokens-per-step must hold at least one window of each length")

    _, arrays = prepare(args.data, args.work, args.vocab)
    print({name: f"{len(a) / 1e6:.2f} M tokens" for name, a in arrays.items()}, flush=True)
    config = model_config(args.vocab)
    params = models.init_params(config, args.seed)
    tx = optimizer(params, args.steps, args.peak)
    state = {"params": params, "opt": tx.init(params), "step": np.zeros((), np.int64)}
    objective = jax.value_and_grad(loss_and_stats(config, args.balance), has_aux=True)

    @jax.jit
    def update(params, opt, tokens):
        (_, metrics), grads = objective(params, tokens)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, metrics

    manager = ocp.CheckpointManager(args.work.absolute() / "ckpt", options=ocp.CheckpointManagerOptions(max_to_keep=2))
    curve = []
    if manager.latest_step() is not None:
        state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(state))
        history = args.work / "loss.json"
        stored = json.loads(history.read_text()) if history.exists() else []
        curve = [c for c in stored if c["step"] < int(state["step"])]
    stop = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.append(True))
    bar = tqdm(range(int(state["step"]), args.steps), initial=int(state["step"]), total=args.steps, mininterval=30)
    tokens_seen = curve[-1]["tokens"] if curve else 0
    for step in bar:
        window = args.long_window if step >= (1 - args.long_share) * args.steps else args.window
        tokens = batch(arrays, step, args.tokens_per_step // window, window, args.seed)
        began = time.perf_counter()
        state["params"], state["opt"], metrics = update(state["params"], state["opt"], tokens)
        nll, share = float(metrics["nll"]), np.asarray(metrics["share"])
        tokens_seen += args.tokens_per_step
        curve.append(
            {"step": step, "tokens": tokens_seen, "nll": nll, "min_share": float(share.min()),
             "max_share": float(share.max()), "seconds": time.perf_counter() - began}
        )  # fmt: skip
        bar.set_postfix(nll=f"{nll:.3f}", min_share=f"{share.min():.3f}", refresh=False)
        if not np.isfinite(nll):
            raise SystemExit(f"loss is {nll} at step {step}; lower --peak")
        state["step"] = np.asarray(step + 1, np.int64)
        if stop or (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save_curve(args.work, curve)
            manager.save(step + 1, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
        if stop:
            print("stopped; the same command resumes", flush=True)
            return
    manager.close()
    try:
        save_hf(args.work / "hf", config, state["params"], tokenizer_file=args.work / "tokenizer.json")
    except CheckpointError as error:
        raise SystemExit(f"the model is trained and in {args.work / 'ckpt'}, but: {error}") from None
    print(f"wrote {args.work / 'hf'}", flush=True)


if __name__ == "__main__":
    main()
