"""The decoder: padding is invisible, chunks change nothing, the paged form has the gradients of the dense one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import pwjax
from pwjax import models
from pwjax.checkpoints.artifact import Artifact
from pwjax.models import Decoder, Fresh
from pwjax.models.layers import rms_norm, softmax


@pytest.fixture(scope="module")
def config(tiny_config):
    return tiny_config


@pytest.fixture(scope="module")
def params(tiny_params):
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tiny_params)


TOKENS = np.random.default_rng(0).integers(0, 300, (2, 12)).astype(np.int32)


@pytest.mark.parametrize("columns", (1, 2, 7, 60, 256, 2816))
@pytest.mark.parametrize("form", ("norm", "softmax"))
def test_a_row_does_not_depend_on_the_number_of_rows(form, columns):
    x = np.random.default_rng(columns).normal(size=(128, columns)).astype(np.float32)
    exact = x.astype(np.float64)
    if form == "norm":
        run = jax.jit(lambda x: rms_norm(x, None, 1e-6))
        want = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6)
    else:
        x *= 30
        run, want = jax.jit(softmax), scipy.special.softmax(30 * exact, axis=-1)
    whole = np.asarray(run(x))
    np.testing.assert_allclose(whole, want, rtol=2e-5, atol=1e-30)
    for count in (1, 2, 8, 16, 64):
        np.testing.assert_array_equal(run(x[:count]), whole[:count])


def test_the_softmax_has_the_derivatives_of_a_softmax():
    x = np.random.default_rng(0).normal(size=(3, 60)).astype(np.float32)
    got, want = (jax.grad(lambda x, f=f: jnp.sum(jnp.sin(9 * f(x))))(x) for f in (softmax, jax.nn.softmax))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_padding_reaches_neither_outputs_nor_statistics(config, params):
    run = jax.jit(lambda tokens, n: models.forward(config, params, tokens, n))
    lengths = np.array([12, 5])
    padded = np.where(np.arange(12) < lengths[:, None], TOKENS, 0)
    other = np.where(np.arange(12) < lengths[:, None], TOKENS, 77)
    a, b = run(padded, lengths), run(other, lengths)
    np.testing.assert_array_equal(a.hidden[1, :5], b.hidden[1, :5])
    jax.tree.map(np.testing.assert_array_equal, a.stats, b.stats)
    assert np.all(np.asarray(a.stats.count).sum(-1) == config.top_k * lengths.sum())
    alone = jax.jit(lambda tokens: models.forward(config, params, tokens))(TOKENS[1:, :5])
    np.testing.assert_allclose(a.hidden[1, :5], alone.hidden[0], atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fresh_tokens_in_pieces_equal_the_whole(config, params, dtype):
    apply = jax.jit(lambda *inputs: Decoder(config).apply({"params": params}, *inputs))

    def run(pieces):
        fresh, out, at = Fresh.empty(config, 2, 12, dtype), [], 0
        for size in pieces:
            positions = jnp.broadcast_to(jnp.arange(at, at + size), (2, size))
            valid = jnp.ones((2, size), bool)
            result = apply(TOKENS[:, at : at + size], positions, valid, fresh)
            fresh, at = result.fresh, at + size
            out.append(result.hidden)
        return jnp.concatenate(out, 1)

    np.testing.assert_allclose(run([12]), run([5, 1, 6]), atol=2e-5)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_routing_mass_sums_to_the_gates(config, params, norm_topk_prob):
    config = replace(config, norm_topk_prob=norm_topk_prob)
    stats = jax.jit(lambda p: models.forward(config, p, TOKENS).stats)(params)
    total = np.asarray(stats.mass).sum(-1)
    assert np.allclose(total, TOKENS.size, rtol=1e-5) == norm_topk_prob and np.all(total <= TOKENS.size * 1.00001)
    np.testing.assert_allclose(np.asarray(stats.prob).sum(-1), TOKENS.size, rtol=1e-5)


@pytest.mark.slow
def test_gradients_of_the_paged_form_equal_those_of_the_dense_form(exact_activations, tiny_artifact, config):
    artifact = Artifact.open(tiny_artifact)
    dense = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), artifact.dense_params())
    whole = {**dense, "layers": {**dense["layers"], "experts": artifact.expert_params(3)}}
    loss = lambda hidden: jnp.mean(jnp.sin(hidden))  # noqa: E731
    want = jax.jit(jax.grad(lambda p: loss(models.forward(config, p, TOKENS).hidden)))(whole)
    with pwjax.load(tiny_artifact, bits=3, batch=1, context=64) as engine, engine.frozen() as (_, table, arena):
        paged = models.Paged(arena, table.bits, table.pages, engine.model.geometry)
        got = jax.jit(jax.grad(lambda p: loss(models.forward(config, p, TOKENS, paged=paged).hidden)))(dense)
    del want["layers"]["experts"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-6), got, want)


def test_training_lowers_the_loss_and_reaches_every_parameter(config, params):
    loss = jax.jit(lambda p: models.loss_fn(config)(p, TOKENS).mean())
    grads = jax.jit(jax.grad(loss))(params)
    assert all(np.any(np.asarray(g)) for g in jax.tree.leaves(grads))
    stepped = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
    assert loss(stepped) < loss(params)


def test_random_parameters_have_the_shapes_of_the_checkpoint(config):
    from pwjax.checkpoints.tree import flatten, param_shapes

    shapes = {name: a.shape for name, a in flatten(models.init_params(config)).items()}
    assert shapes == dict(param_shapes(config))
