"""Every expert_ffn implementation against a NumPy oracle on blocks of mixed precision: one shared class of tests."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import bitplanes as bp
from pallas_kernels.expert_ffn import IMPLEMENTATIONS, dense_expert_ffn, expert_ffn
from pallas_kernels.expert_ffn.grouping import group, tile_count
from pallas_kernels.pages import BlockShape, Geometry

GROUP = jax.jit(group, static_argnums=(2, 3))
EXPERTS, HIDDEN, INNER, TOP_K = 5, 40, 24, 3
GEOMETRY = Geometry(96, (2, 3, 4, 5, 6), True, BlockShape(2 * INNER, HIDDEN, 4), BlockShape(HIDDEN, INNER, 8))


class Block:
    """Random codes and tables, as calibration would hand them over."""

    def __init__(self, shape: BlockShape, rng):
        self.codes = rng.integers(0, 64, (shape.rows, shape.cols), dtype=np.uint8)
        self.luts = {
            b: np.sort(rng.normal(size=(shape.groups, 1 << b)) * 0.3, 1).astype(np.float16) for b in GEOMETRY.widths
        }
        self.scales = rng.uniform(0.5, 1.5, shape.rows).astype(np.float16)


def make_layer(seed: int):
    """``(arena, bits, pages, weights)``: experts at random bits, pages scattered, weights from the oracle."""
    rng = np.random.default_rng(seed)
    bits = rng.choice(GEOMETRY.all_bits, (EXPERTS, 2)).astype(np.int32)
    pages = np.zeros((EXPERTS, 2, GEOMETRY.slots), np.int32)
    need = sum(GEOMETRY.block_pages(m, int(bits[e, m])) for e in range(EXPERTS) for m in (0, 1))
    ids = iter(rng.permutation(np.arange(1, need + 20)))
    arena = rng.integers(0, 2**32, (need + 20, GEOMETRY.page_words), dtype=np.uint32)
    arena[0] = 0
    weights = {}
    for expert in range(EXPERTS):
        for m in (0, 1):
            shape, b = GEOMETRY.shape(m), int(bits[expert, m])
            original = (rng.normal(size=(shape.rows, shape.cols)) * 0.3).astype(ml_dtypes.bfloat16)
            host = bp.block_pages(Block(shape, rng), original, GEOMETRY, m)
            weights[expert, m] = bp.read_block(host, GEOMETRY, m, b)
            for slot, page in zip(GEOMETRY.table_slots(m, b), GEOMETRY.host_pages(m, b), strict=True):
                pages[expert, m, slot] = next(ids)
                arena[pages[expert, m, slot]] = host[page]
    return jnp.asarray(arena), jnp.asarray(bits), jnp.asarray(pages), weights


def oracle(x, experts_of, gates, valid, weights):
    """Token by token in float64: output, squared norms of both blocks' inputs, and their second moments by expert."""
    y, stats = np.zeros(x.shape), np.zeros((*experts_of.shape, 2))
    moments = np.zeros((EXPERTS, HIDDEN)), np.zeros((EXPERTS, INNER))
    for t in np.flatnonzero(valid):
        for j, expert in enumerate(experts_of[t]):
            gate, up = np.split(weights[expert, 0].astype(np.float64) @ x[t], 2)
            inner = gate / (1 + np.exp(-gate)) * up
            y[t] += gates[t, j] * (weights[expert, 1].astype(np.float64) @ inner)
            stats[t, j] = (x[t] @ x[t], inner @ inner)
            for own, read in zip(moments, (x[t], inner), strict=True):
                own[expert] += (gates[t, j] * read) ** 2
    return y, stats, moments


def make_tokens(tokens: int, seed: int, skew: bool = False):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, HIDDEN)).astype(np.float32)
    experts_of = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)]).astype(np.int32)
    if skew:
        experts_of[:] = np.arange(TOP_K)
    gates = rng.uniform(0, 1, (tokens, TOP_K)).astype(np.float32)
    return x, experts_of, gates, rng.uniform(size=tokens) < 0.8


@pytest.fixture(scope="module")
def layer():
    return make_layer(0)


@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
class TestExpertFFN:
    """What every backend must do."""

    @pytest.mark.parametrize(("tokens", "skew"), [(1, False), (2, True), (7, False), (65, False), (64, True)])
    def test_equals_the_oracle(self, layer, implementation, tokens, skew):
        *memory, weights = layer
        x, experts_of, gates, valid = make_tokens(tokens, tokens, skew)
        valid[0] = True
        run = jax.jit(lambda *a: expert_ffn(*a, GEOMETRY, implementation, moments=True))
        y, stats, moments = run(x, experts_of, gates, valid, *memory)
        want_y, want_stats, want_moments = oracle(x, experts_of, gates, valid, weights)
        np.testing.assert_allclose(y, want_y, atol=2e-4)
        np.testing.assert_allclose(stats, want_stats, rtol=2e-4, atol=2e-4)
        for got, want in zip(moments, want_moments, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)

    def test_no_valid_token_gives_zero(self, layer, implementation):
        *memory, _ = layer
        x, experts_of, gates, valid = make_tokens(4, 1)
        y, stats = expert_ffn(x, experts_of, gates, np.zeros_like(valid), *memory, GEOMETRY, implementation)
        assert not np.any(y) and not np.any(stats)

    def test_a_row_does_not_depend_on_its_neighbours(self, layer, implementation):
        *memory, _ = layer
        x, experts_of, gates, valid = make_tokens(16, 2)
        valid[:] = True
        run = jax.jit(lambda *a: expert_ffn(*a, GEOMETRY, implementation)[0])
        together = np.asarray(run(x, experts_of, gates, valid, *memory))
        for t in (0, 5, 15):
            alone = np.asarray(run(x, experts_of, gates, np.arange(16) == t, *memory))
            np.testing.assert_array_equal(alone[t], together[t])

    def test_other_bits_do_not_compile_again(self, layer, implementation):
        tokens = make_tokens(3, 3)
        run = jax.jit(lambda *a: expert_ffn(*a, GEOMETRY, implementation))
        arena = jnp.zeros((400, GEOMETRY.page_words), jnp.uint32)
        for seed in range(3):
            _, bits, pages, _ = make_layer(seed)
            run(*tokens, arena, bits, pages)
        assert run._cache_size() == 1


def test_gradients_equal_those_of_the_dense_form(layer):
    *memory, weights = layer
    x, experts_of, gates, valid = make_tokens(9, 4)
    stacked = [jnp.asarray(np.stack([weights[e, m] for e in range(EXPERTS)])) for m in (0, 1)]

    def paged(x, gates):
        return jnp.sum(jnp.sin(expert_ffn(x, experts_of, gates, valid, *memory, GEOMETRY, moments=True)[0]))

    def dense(x, gates):
        return jnp.sum(jnp.sin(dense_expert_ffn(x, experts_of, gates, valid, *stacked)))

    grads = (jax.jit(jax.grad(form, (0, 1)))(x, gates) for form in (paged, dense))
    for got, want in zip(*grads, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def test_an_unknown_implementation_names_the_known_ones(layer):
    *memory, _ = layer
    with pytest.raises(ValueError, match="xla"):
        expert_ffn(*make_tokens(1, 0), *memory, GEOMETRY, "tritn")


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "tile_rows"), [(1, 1, 1, 1), (5, 3, 2, 2), (40, 9, 4, 8), (17, 4, 3, 1), (3, 9, 1, 8)]
)
@pytest.mark.parametrize("seed", range(3))
def test_grouping_serves_every_choice_once(tokens, experts, k, tile_rows, seed):
    rng = np.random.default_rng(seed)
    experts_of = rng.integers(0, experts, (tokens, k)).astype(np.int32)
    valid = rng.uniform(size=tokens) < 0.7
    groups = jax.tree.map(np.asarray, GROUP(experts_of, valid, experts, tile_rows))
    tiles = tile_count(tokens * k, experts, tile_rows)
    assert groups.choice.shape == (tiles, tile_rows)
    served = groups.choice.reshape(-1)
    real = served < tokens * k
    assert sorted(served[real]) == sorted(np.flatnonzero(np.repeat(valid, k)))
    assert not real.reshape(tiles, -1)[groups.used :].any()
    for flat, slot in zip(np.flatnonzero(np.repeat(valid, k)), groups.slot[valid].reshape(-1), strict=True):
        assert served[slot] == flat and groups.expert[slot // tile_rows] == experts_of.reshape(-1)[flat]
    assert np.all(groups.slot[~valid] == tiles * tile_rows)
