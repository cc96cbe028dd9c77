"""From a training loop to text, with no Hugging Face files: train, save with Orbax, quantize, load, generate.

python docs/examples/from_training.py [DIR]

Takes about two minutes on two cores. Files go to DIR, a temporary directory by default.
"""

import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import tokenizers

import pwjax
from pwjax import models

TEXT = "one two three four five six seven eight nine ten and back again. " * 60


def make_tokenizer(text: str) -> tokenizers.Tokenizer:
    """A byte-level BPE, so that every text has tokens; token 0 ends a text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=288, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def train(config: pwjax.ModelConfig, tokens: np.ndarray, steps: int, window: int = 32) -> tuple[dict, list[float]]:
    """A plain optax loop over the functional model; returns the train state and the loss of every step."""
    params = models.init_params(config, seed=0)
    optimizer = optax.adam(5e-3)
    loss_fn = models.loss_fn(config)

    @jax.jit
    def step(params, opt, batch):
        loss, grads = jax.value_and_grad(lambda p: loss_fn(p, batch).mean())(params)
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    opt, losses, rng = optimizer.init(params), [], np.random.default_rng(0)
    for _ in range(steps):
        starts = rng.integers(0, len(tokens) - window, 8)
        params, opt, loss = step(params, opt, np.stack([tokens[s : s + window] for s in starts]))
        losses.append(float(loss))
    return {"params": params, "opt": opt, "step": np.int32(steps)}, losses


def main(folder: Path) -> tuple[list[float], pwjax.Completion]:
    """Run the example in ``folder``; returns the losses and one completion."""
    tokenizer = make_tokenizer(TEXT)
    tokens = np.array(tokenizer.encode(TEXT).ids, np.int32)
    config = pwjax.ModelConfig(
        model_type="qwen2_moe", vocab_size=tokenizer.get_vocab_size(), hidden_size=32, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, num_experts=4, top_k=2, expert_size=32, shared_size=32, norm_topk_prob=False,
        rms_eps=1e-6, rope_theta=1e4, max_positions=64, tie_embeddings=False, qkv_bias=True, eos_token_ids=(0,),
    )  # fmt: skip

    state, losses = train(config, tokens, steps=50)
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} nats per token")

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute() / "checkpoint", state)

    # The optimizer's state is left where it is. A parameter tree in memory does as well as a path.
    model = pwjax.quantize(
        folder / "checkpoint", config, folder / "model.pw",
        text=TEXT, tokenizer=tokenizer, tokens=256, sequence_length=32,
    )

    with pwjax.load(model, memory_budget="8MiB", batch=2) as engine:
        (completion,) = engine.generate(["one two three"], pwjax.SamplingParams(max_tokens=16))
    print(f"{completion.prompt!r} -> {completion.text!r}")
    return losses, completion


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
