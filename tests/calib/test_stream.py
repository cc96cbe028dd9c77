"""Streaming calibration of a toy model, against differentiating the whole of it at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calib.blocks import importance, measure, second_moments
from calib.model import Trace
from calib.stream import Stream

pytestmark = pytest.mark.usefixtures("quick_programs")
L, E, K, H, INNER, VOCAB, T = 3, 4, 2, 8, 6, 11, 10


class Toy:
    """Running means for attention, then a mixture of experts; two kinds of layers."""

    num_layers, num_experts, hidden_size = L, E, H
    functions = property(lambda self: self)

    def __init__(self):
        rng = np.random.default_rng(0)
        draw = lambda *shape: rng.normal(0, 0.5, shape).astype(np.float32)  # noqa: E731
        self.table = draw(VOCAB, H)
        self.layers = [{"router": draw(E, H), "up": draw(E, 2 * INNER, H), "down": draw(E, H, INNER)} for _ in range(L)]
        self.fetched = []

    # What is compiled (run, loss, inner) reads nothing of an instance: all toys share their programs.

    def __eq__(self, other):
        return isinstance(other, Toy)

    def __hash__(self):
        return hash(Toy)

    def embed(self, tokens):
        return self.table[tokens]

    def kind(self, layer):
        return "odd" if layer % 2 else "even"

    def layer(self, layer):
        self.fetched.append(layer)
        return jax.tree.map(jnp.asarray, self.layers[layer])

    def run(self, kind, params, x, bump):
        mean = jnp.cumsum(x, 1) / jnp.arange(1, x.shape[1] + 1)[:, None]
        seen = jnp.tanh(x + mean if kind == "even" else x - mean)
        gates, experts = jax.lax.top_k(jax.nn.softmax(seen @ params["router"].T), K)
        hidden = jax.vmap(self.inner, (None, 0))(seen.reshape(-1, H), params["up"]).reshape(E, *x.shape[:2], INNER)
        out = jnp.einsum("ebti,ehi->bteh", hidden, params["down"])
        picked = jnp.take_along_axis(out, experts[..., None], 2)
        return x + jnp.tanh((gates[..., None] * picked).sum(2) + bump), Trace(seen, experts, gates)

    def head(self):
        return jnp.asarray(self.table)

    def loss(self, head, x, tokens, key):
        scores = jax.nn.log_softmax(x @ head.T)
        drawn = jax.random.categorical(key, jax.lax.stop_gradient(scores))
        one = lambda s, t: -jnp.take_along_axis(s, t[:, None], 1)[:, 0]  # noqa: E731
        return one(scores, drawn).sum(), one(scores[:-1], tokens[1:]).mean()

    def expert(self, layer, expert):
        return self.layers[layer]["up"][expert], self.layers[layer]["down"][expert]

    def inner(self, x, gate_up):
        gate, up = jnp.split(x @ gate_up.T, 2, -1)
        return jax.nn.silu(gate) * up

    def whole(self, layers, bumps, tokens, number, seed):
        """Drawn loss of one window, everything at once."""
        x = jnp.asarray(self.table)[tokens][None]
        for layer in range(L):
            x, _ = self.run(self.kind(layer), layers[layer], x, bumps[layer])
        return self.loss(self.head(), x[0], tokens, jax.random.fold_in(jax.random.key(seed), number))[0]


@pytest.fixture(scope="module")
def toy():
    return Toy()


WINDOWS = np.random.default_rng(1).integers(0, VOCAB, (5, T)).astype(np.int32)
CHOSEN = np.array([0, 2, 3])


@pytest.fixture(scope="module")
def truth(toy):
    """Gradients of each chosen window's drawn loss: of all weights, and of every layer's bump."""
    grad = jax.jit(jax.grad(toy.whole, (0, 1)), static_argnums=4)
    zeros = [jnp.zeros((1, T, H))] * L
    return [grad(jax.tree.map(jnp.asarray, toy.layers), zeros, WINDOWS[n], n, 7) for n in CHOSEN]


def run(toy, folder, monkeypatch, stop=None):
    """Everything that calibration takes from a stream; ``stop(stage, layer)`` may raise."""
    monkeypatch.setattr("calib.stream.BATCH_TOKENS", 2 * T)  # two windows a batch: the last is not full
    stream = Stream(toy, WINDOWS, folder, seed=7, progress=stop or (lambda *a: None))
    routing, kept = stream.forward(), {}
    rough = lambda w: np.round(w * 4) / 4  # noqa: E731
    for trace in stream.backward(CHOSEN):
        for expert in range(E):
            exact = toy.expert(trace.layer, expert)
            point = tuple(map(rough, exact))
            widths = tuple(np.stack([w * 0, w * 0.9, rough(w)]) for w in exact)
            squares = importance(toy, trace, expert, *exact)
            kept["moments", trace.layer, expert] = second_moments(toy, trace, expert, exact[0])
            gradients = [(r.gradients[r.used], r.gates[r.used], r.inputs[r.used]) for r in trace.rows(expert)]
            kept[trace.layer, expert] = squares, measure(toy, trace, expert, exact, point, widths), gradients
        kept[trace.layer] = trace.fisher
    return routing, kept


@pytest.fixture(scope="module")
def result(toy, tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        return run(toy, tmp_path_factory.mktemp("stream"), monkeypatch)


def test_routing_counts_every_window(result):
    routing, _ = result
    assert routing.count.shape == (5, L, E) and (routing.count.sum(-1) == T * K).all()
    assert ((routing.square <= routing.mass) & (routing.mass <= routing.count)).all()


def test_importance_is_the_squared_gradient_of_each_window(result, truth):
    for layer in range(L):
        for matrix, name in enumerate(("up", "down")):
            want = sum(np.square(np.asarray(weights[layer][name])) for weights, _ in truth) / (len(CHOSEN) * T)
            for expert in range(E):
                got = result[1][layer, expert][0][matrix]
                np.testing.assert_allclose(got, want[expert], rtol=2e-4, atol=1e-7)


def test_second_moments_are_those_of_gated_inputs(result):
    for layer in range(L):
        for expert in range(E):
            squares, _, pieces = result[1][layer, expert]
            gated = np.concatenate([gates[:, None] * inputs for _, gates, inputs in pieces])
            moments = result[1]["moments", layer, expert]
            np.testing.assert_allclose(moments[0], gated.T @ gated / len(gated), rtol=1e-4, atol=1e-6)
            for moment, sums in zip(moments, squares.moments, strict=True):
                np.testing.assert_allclose(np.diagonal(moment), sums / len(gated), rtol=1e-4)


def test_fisher_is_the_mean_square_of_the_gradient_at_the_experts(result, truth):
    for layer in range(L):
        want = np.mean([np.square(np.asarray(bumps[layer])[0]) for _, bumps in truth], (0, 1))
        np.testing.assert_allclose(result[1][layer], want, rtol=1e-4)


def test_damage_is_the_error_along_the_gradient(toy, result):
    _, kept = result
    inner = lambda x, w: np.asarray(toy.inner(x, w))  # noqa: E731
    for layer in range(L):
        for expert in range(E):
            _, measured, pieces = kept[layer, expert]
            if not pieces:
                assert measured.tokens == 0 and not measured.total.any()
                continue
            gradient, gate, x = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
            up, down = toy.expert(layer, expert)
            rough = np.round(down * 4) / 4
            error = gate[:, None] * ((inner(x, up * 0.9) - inner(x, up)) @ rough.T)
            assert measured.tokens == len(x)
            along = 0.5 * (error * gradient).sum(1) ** 2
            np.testing.assert_allclose(measured.total[1, 0, 1], along.sum(), rtol=1e-3)
            np.testing.assert_allclose(measured.square[1, 0, 1], (along**2).sum(), rtol=1e-3)
            np.testing.assert_allclose(measured.total[0, 0, 1], 0.5 * (error**2 @ kept[layer]).sum(), rtol=1e-3)
            np.testing.assert_allclose(measured.by_sequence.sum(0), measured.total)
            # Columns of 90 % of a matrix: their error is a hundredth of their square, weighed by what reads it.
            through = np.tile(kept[layer] @ down**2, 2)
            energy = (through[:, None] * (0.1 * up) ** 2).sum(0)
            want = 0.5 * ((gate[:, None] * x) ** 2 @ energy).sum()
            np.testing.assert_allclose(measured.moments[:, 0, 1].sum(), want, rtol=1e-3)
            assert measured.counts.sum() == measured.tokens and (measured.counts > 0).sum() <= len(CHOSEN)


@pytest.mark.slow
def test_a_small_change_costs_what_damage_says(toy, truth, result):
    """The loss of a window moves by the error along the gradient: damage is half its square."""
    layers = jax.tree.map(jnp.asarray, toy.layers)
    changed = jax.tree.map(lambda x: x, layers)
    changed[1] = {**changed[1], "down": changed[1]["down"] * (1 + 1e-3)}
    zeros = [jnp.zeros((1, T, H))] * L
    loss = lambda p: float(toy.whole(p, zeros, WINDOWS[CHOSEN[0]], CHOSEN[0], 7))  # noqa: E731
    slope = sum((truth[0][0][1]["down"] * toy.layers[1]["down"]).ravel()) * 1e-3
    assert abs(loss(changed) - loss(layers) - slope) < 0.05 * abs(slope)


def test_killed_anywhere_it_goes_on_to_the_same_numbers(toy, result, tmp_path, monkeypatch):
    batches = 3
    steps = [("forward", n + 1) for n in range(L * batches)] + [("head", n) for n in (1, 2)]
    steps += [("backward", n + 1) for n in range(L * 2)]
    same = lambda a, b: jax.tree.all(jax.tree.map(np.array_equal, a, b))  # noqa: E731
    for at in (4, len(steps) // 2, len(steps) - 4):  # on the way up, between layers, on the way down
        seen = []

        def stop(*args, at=at, seen=seen):
            seen.append(args)
            if len(seen) == at + 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(toy, tmp_path / str(at), monkeypatch, stop)
        toy.fetched.clear()
        routing, kept = run(toy, tmp_path / str(at), monkeypatch)
        assert same(routing, result[0]) and all(same(kept[key], result[1][key]) for key in kept)
        finished = (steps[at][1] - 1) // batches if steps[at][0] == "forward" else L
        assert len(toy.fetched) <= 2 * L - finished


def test_a_broken_loss_names_the_window(toy, tmp_path):
    broken = Toy()
    broken.table = np.full_like(broken.table, np.nan)
    stream = Stream(broken, WINDOWS, tmp_path)
    stream.forward()
    with pytest.raises(ValueError, match="loss of calibration window 0 is nan"):
        next(iter(stream.backward(CHOSEN)))
