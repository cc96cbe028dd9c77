"""Mixtral through the streaming calibration, against differentiating the whole model."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calib.blocks import importance
from calib.stream import Stream
from pwjax import models
from pwjax.checkpoints.hf import load_hf
from pwjax.checkpoints.source import ParamSource
from pwjax.checkpoints.tree import flatten
from pwjax.streamed import HEAD_TOKENS, StreamedDecoder

CASES = [("mixtral", "windowed_tied")]
T = 24  # longer than the windows of attention
WINDOWS = np.random.default_rng(0).integers(0, 30, (3, T)).astype(np.int32)
CHOSEN = np.array([0, 2])
SEED = 7


@pytest.fixture(params=CASES, ids=lambda case: case[0])
def model(request, tmp_path):
    """Configuration and parameters of a stored checkpoint."""
    family, case = request.param
    with np.load(Path(__file__).parents[1] / "golden" / f"{family}.npz") as file:
        config, checkpoint = (file[f"{case}/{name}"] for name in ("config", "checkpoint"))
    (tmp_path / "model.safetensors").write_bytes(checkpoint.tobytes())
    (tmp_path / "config.json").write_text(str(config))
    return load_hf(tmp_path)


def drawn_loss(config, experts, params, tokens, number):
    """Loss of tokens that the whole model draws, with the random numbers that a stream draws them with."""
    params = {**params, "layers": {**params["layers"], "experts": experts}}
    hidden = models.forward(config, params, tokens[None]).hidden[0]
    scores = jax.nn.log_softmax(models.logits(config, params, hidden), axis=-1)
    key = jax.random.split(jax.random.fold_in(jax.random.key(SEED), number), 1)[0]
    padded = jnp.pad(jax.lax.stop_gradient(scores), ((0, HEAD_TOKENS - T), (0, 0)))
    drawn = jax.random.categorical(key, padded)[:T]
    return -jnp.take_along_axis(scores, drawn[:, None], 1).sum()


@pytest.mark.slow
def test_squared_gradients_are_those_of_the_whole_model(exact_activations, model, tmp_path):
    config, params = model
    whole = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float32), params)
    gradient = jax.jit(jax.grad(lambda experts, *rest: drawn_loss(config, experts, *rest)))
    found = [gradient(whole["layers"]["experts"], whole, WINDOWS[n], n) for n in CHOSEN]
    want = jax.tree.map(lambda *g: sum(np.square(np.asarray(one)) for one in g) / WINDOWS[CHOSEN].size, *found)

    source = ParamSource(config, flatten(params))
    stream = Stream(StreamedDecoder(source), WINDOWS, tmp_path / "stream", SEED)
    assert (stream.forward().count.sum(-1) == T * config.top_k).all()
    for trace in stream.backward(CHOSEN):
        for expert in range(config.num_experts):
            exact = (source.read(f"layers/experts/{n}", trace.layer)[expert] for n in ("gate_up", "down"))
            got = importance(stream.model.functions, trace, expert, *(a.astype(np.float32) for a in exact))
            for name, squares in zip(("gate_up", "down"), got[:2], strict=True):
                whole_model = want[name][trace.layer, expert]
                np.testing.assert_allclose(squares, whole_model, rtol=2e-3, atol=1e-4 * want[name].max())
    assert max(w.max() for w in want.values()) > 0
    losses = jax.jit(models.loss_fn(config))(whole, WINDOWS[CHOSEN])
    np.testing.assert_allclose(stream.losses(), losses, rtol=1e-4)
