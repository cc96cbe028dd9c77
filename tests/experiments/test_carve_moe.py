"""Carving a dense model into experts: neurons, rotary order, and equality with the dense model."""

import argparse
import dataclasses
import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.carve_moe import carve, data, distill, model, refit, smollm2, split
from pwjax import models
from pwjax.models.layers import rotate

HIDDEN, NEURONS, LAYERS, VOCAB, EXPERTS, SHARED = 32, 72, 2, 96, 7, 16


@pytest.fixture(scope="module")
def dense():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return (rng.normal(size=shape) * shape[-1] ** -0.5).astype(np.float32)

    attn = {"q": (32, HIDDEN), "k": (16, HIDDEN), "v": (16, HIDDEN), "o": (HIDDEN, 32)}
    return {
        "embed": {"embedding": draw(VOCAB, HIDDEN) * 5},
        "norm": {"scale": np.ones(HIDDEN, np.float32)},
        "layers": {
            "input_norm": {"scale": np.ones((LAYERS, HIDDEN), np.float32)},
            "post_norm": {"scale": np.ones((LAYERS, HIDDEN), np.float32)},
            "attn": {name: {"kernel": draw(LAYERS, *shape)} for name, shape in attn.items()},
            "mlp": {"gate_up": draw(LAYERS, 2 * NEURONS, HIDDEN), "down": draw(LAYERS, HIDDEN, NEURONS)},
        },
    }


@pytest.fixture(scope="module")
def carved(dense):
    options = argparse.Namespace(
        experts=EXPERTS, shared=SHARED, top_k=4, balance=0.5, rounds=2, split_tokens=128, penalty=0.01, spread=0.25,
        seed=0,
    )  # fmt: skip
    x = np.random.default_rng(1).normal(size=(128, HIDDEN)).astype(np.float32)
    mlps = [{name: w[i] for name, w in dense["layers"]["mlp"].items()} for i in range(LAYERS)]
    layers = [carve.carve_layer(refit.gated(x, mlp["gate_up"]), x, mlp, options)[0] for mlp in mlps]
    tree = {name: t for name, t in dense["layers"].items() if name != "mlp"}
    return {**dense, "layers": tree | jax.tree.map(lambda *parts: np.stack(parts), *layers)}


def config(top_k):
    return dataclasses.replace(
        model.moe_config(top_k), vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=LAYERS, num_heads=2,
        num_kv_heads=1, head_dim=16, num_experts=EXPERTS, expert_size=8, shared_size=SHARED, max_positions=64,
    )  # fmt: skip


TOKENS = np.random.default_rng(2).integers(0, VOCAB, (2, 24)).astype(np.int32)


@pytest.fixture
def float32_products(monkeypatch):
    """Products in float32, so that forms compare to rounding errors of float32."""
    product = lambda form, a, b: jnp.einsum(form, a, b)  # noqa: E731
    monkeypatch.setattr(model, "_product", product)
    monkeypatch.setattr(distill, "_product", product)


def test_all_experts_with_an_idle_router_are_the_dense_model(dense, carved, float32_products):
    layers = carved["layers"]
    idle = {**carved, "layers": {**layers, "router": {"kernel": np.zeros_like(layers["router"]["kernel"])}}}
    wanted, _ = model.run_layers(config(EXPERTS), dense, TOKENS)
    folded = jax.tree.map(jnp.asarray, model.fold(config(EXPERTS), idle))
    found = models.forward(config(EXPERTS), folded, jnp.asarray(TOKENS)).hidden
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_the_form_for_training_is_qwen2_moe_when_folded(carved, float32_products):
    wanted, (_, _, routed) = model.run_layers(config(4), carved, TOKENS)
    out = models.forward(config(4), jax.tree.map(jnp.asarray, model.fold(config(4), carved)), TOKENS)
    np.testing.assert_allclose(out.hidden, wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out.stats.count, routed.chosen.sum(1), atol=1e-3)


def _refit(dense, carved, k, idle=False):
    """A layer, the layer refitted to be the dense one on 896 tokens, and a function: its error on 128 others."""
    layer = {name: jax.tree.map(lambda a: a[0], carved["layers"][name]) for name in ("router", "experts", "shared")}
    if idle:
        layer["router"] = {"kernel": np.zeros_like(layer["router"]["kernel"])}
    x = np.random.default_rng(7).normal(size=(1024, HIDDEN)).astype(np.float32)
    mlp = {name: w[0] for name, w in dense["layers"]["mlp"].items()}
    wanted = refit.gated(x, mlp["gate_up"]) @ mlp["down"].T
    weight, neurons = refit.token_weights(wanted), refit.features(x, layer, k)
    fitted = refit.refit(neurons[:896], wanted[:896], weight[:896], layer, 0.01)

    def error(one):
        found, _ = model.moe(config(k), one, x[896:])
        return float((((found - wanted[896:]) * weight[896:]) ** 2).sum(1).mean())

    return layer, fitted, error


def test_refitting_what_is_already_equal_changes_nothing(dense, carved, float32_products):
    layer, fitted, error = _refit(dense, carved, EXPERTS, idle=True)
    assert error(layer) < 1e-10
    np.testing.assert_allclose(fitted["experts"]["down"], layer["experts"]["down"], atol=1e-5)
    np.testing.assert_allclose(fitted["shared"]["down"], layer["shared"]["down"], atol=1e-5)


def test_refitting_comes_nearer_to_the_dense_layer_on_tokens_it_has_not_seen(dense, carved, float32_products):
    layer, fitted, error = _refit(dense, carved, 4)
    assert error(fitted) < 0.9 * error(layer)


def test_carving_layer_by_layer_stays_nearer_than_carving_alone(dense, carved, float32_products):
    options = argparse.Namespace(
        experts=EXPERTS, shared=SHARED, top_k=4, balance=0.5, rounds=2, split_tokens=128, penalty=0.01,
        refit_penalty=0.05, spread=0.05, seed=0,
    )  # fmt: skip
    tokens = np.random.default_rng(9).integers(0, VOCAB, (48, 24)).astype(np.int32)
    shape = config(4)
    carve.moe_config, kept = lambda *_: shape, carve.moe_config
    try:
        tree, report = carve.carve(dense, tokens, options)
    finally:
        carve.moe_config = kept
    wanted, _ = model.run_layers(shape, dense, TOKENS)
    error = [np.mean((model.run_layers(shape, one, TOKENS)[0] - wanted) ** 2) for one in (carved, tree)]
    assert error[1] < 0.9 * error[0]
    assert len(report) == LAYERS and all(0 < r["residual_error"] < 1 for r in report)


@pytest.mark.parametrize("shared", [96, 576])
def test_a_carved_tree_tells_its_config(shared):
    wanted = model.moe_config(10, 15, shared)
    layers = {
        "router": {"kernel": np.zeros((30, 15, 576))}, "shared": {"down": np.zeros((30, 576, shared))},
    }  # fmt: skip
    assert model.config_of({"layers": layers}, 10) == wanted
    assert wanted.expert_size * 15 + shared == smollm2.FFN


def test_experts_must_divide_the_neurons_that_are_not_shared():
    with pytest.raises(ValueError, match="1536 neurons less 100 shared ones are not 15 equal experts"):
        model.moe_config(10, 15, 100)


def test_carving_again_is_done_once_and_never_under_what_was_distilled(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["carve", "--data", str(tmp_path), "--work", str(tmp_path), "--windows", "8"])
    settings = dict(
        experts=15, shared=576, top_k=10, windows=8, balance=0.5, rounds=3, split_tokens=8192, penalty=0.01,
        refit_penalty=0.05, spread=0.05, seed=0,
    )  # fmt: skip
    (tmp_path / "distill" / "56").mkdir(parents=True)
    (tmp_path / "carved.json").write_text(json.dumps({"settings": settings, "layers": []}))
    carve.main()
    assert "before" in capsys.readouterr().out
    (tmp_path / "carved.json").write_text(json.dumps({"settings": settings | {"shared": 96}, "layers": []}))
    with pytest.raises(SystemExit, match="distilled from another carving"):
        carve.main()


def test_experts_that_were_not_chosen_have_a_gradient(carved):
    layer = jax.tree.map(lambda a: jnp.asarray(a[0]), carved["layers"])
    x = jax.random.normal(jax.random.key(0), (1, HIDDEN))

    def total(bias):
        router = {"kernel": layer["router"]["kernel"] + bias[:, None] * x[0] / jnp.sum(x**2)}
        return (model.moe(config(4), {**layer, "router": router}, x)[0] ** 2).sum()

    _, routed = model.moe(config(4), layer, x)
    assert np.round(routed.chosen).sum() == 4
    assert (np.abs(jax.grad(total)(jnp.zeros(EXPERTS))) > 1e-8).all()


def test_divergence_and_its_gradient(float32_products):
    student, teacher = np.random.default_rng(3).normal(size=(2, 16, HIDDEN)).astype(np.float32)
    head = np.random.default_rng(4).normal(size=(VOCAB, HIDDEN)).astype(np.float32) * 0.3

    def plain(x):
        p, q = (jax.nn.log_softmax(rows @ head.T, -1) for rows in (teacher, x))
        return jnp.sum(jnp.exp(p) * (p - q), -1).mean()

    value, gradient = jax.value_and_grad(distill.divergence)(student, teacher, head)
    wanted_value, wanted = jax.value_and_grad(plain)(student)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-4)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-3, atol=1e-5)


def test_unpermuted_rows_rotate_in_halves_as_their_pairs_did():
    heads, size = 3, 8
    halves = np.random.default_rng(5).normal(size=(heads * size, 4)).astype(np.float32)
    # llama.cpp's order: what rotates together is side by side.
    pairs = halves.reshape(heads, 2, size // 2, 4).swapaxes(1, 2).reshape(heads * size, 4)
    np.testing.assert_array_equal(smollm2.unpermute(pairs, heads), halves)
    x, positions = np.random.default_rng(6).normal(size=(5, 4)).astype(np.float32), np.arange(5)
    angle = positions[:, None, None] * 10.0 ** (-np.arange(size // 2) / (size // 2))
    y = (x @ pairs.T).reshape(5, heads, size // 2, 2)
    cos, sin = np.cos(angle), np.sin(angle)
    turned = np.stack([y[..., 0] * cos - y[..., 1] * sin, y[..., 1] * cos + y[..., 0] * sin], -1)
    ours = rotate((x @ smollm2.unpermute(pairs, heads).T).reshape(1, 5, heads, size), positions[None], 10.0)
    np.testing.assert_allclose(ours[0].reshape(5, heads, 2, size // 2).swapaxes(2, 3), turned, rtol=1e-4, atol=1e-5)


@given(seed=st.integers(0, 1000), k=st.integers(1, 4), balance=st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=20, deadline=None)
def test_a_split_is_a_partition_into_equal_parts(seed, k, balance):
    fires = np.exp(np.random.default_rng(seed).normal(size=(40, 24))).astype(np.float32)
    groups, carried = split.split(fires, 4, k, balance, 3, seed)
    assert groups.shape == (4, 6) and sorted(groups.ravel()) == list(range(24))
    assert all(0 < c <= 1.0001 for c in carried)
    if balance == 0:
        assert (np.diff(carried) > -1e-5).all()


def test_neurons_that_fire_together_become_one_expert():
    rng = np.random.default_rng(0)
    owner = rng.permutation(np.repeat(np.arange(4), 8))
    active = np.stack([rng.permutation(4) < 2 for _ in range(200)])
    fires = np.where(active[:, owner], 1.0, 0.05) * rng.uniform(0.8, 1.2, (200, 32))
    groups, carried = split.split(fires.astype(np.float32), 4, 2, 0.0, 3, 0)
    assert all(len(set(owner[group])) == 1 for group in groups) and carried[-1] > 0.99


def test_the_shared_expert_takes_the_neurons_that_always_fire():
    fires = np.full((10, 8), 0.1, np.float32)
    fires[:, [2, 5]] = 1.0
    np.testing.assert_array_equal(split.shared_neurons(fires, 2), [2, 5])


def test_a_router_that_can_be_linear_is_found():
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(400, 12)), rng.normal(size=(5, 12))
    found = split.ridge_router(x, np.exp(x @ kernel.T), 1e-6, 0.25)
    order = lambda scores: np.argsort(scores, axis=1)  # noqa: E731
    np.testing.assert_array_equal(order(x @ found.T), order(x @ kernel.T))
    assert (x @ found.T).std() == pytest.approx(0.25, rel=1e-4)


def test_paragraphs_come_once_and_never_from_text_that_is_evaluated_on(tmp_path):
    fresh = "the pier is a landmark of the town and the longest of its kind"
    known = "he had a guest starring role on the television series in that year"
    answers = {
        "Pier": fresh, "Pier again": f"{fresh}, they say", "Nothing": "too short",
        "Actor": "As is told, He had a guest-starring role, on the television series in that year.",
    }  # fmt: skip
    path = tmp_path / "answers.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for title, text in answers.items():
            file.write(json.dumps({"nq_annotated_gold": {"title": title, "long_answer": text}}) + "\n")
    assert data.paragraphs(path, f"before {known} after") == f"Pier\n\n{fresh}\n\n"
    assert "Actor" in data.paragraphs(path, "")
