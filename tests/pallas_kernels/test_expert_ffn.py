"""Every expert_ffn implementation against a NumPy oracle on blocks of mixed precision: one shared class of tests."""

from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from lesser_sets import run_again

from pallas_kernels import bitplanes as bp
from pallas_kernels import chosen_kernels, native
from pallas_kernels.expert_ffn import IMPLEMENTATIONS, dense_expert_ffn, expert_ffn, problems
from pallas_kernels.expert_ffn.grouping import group, tile_count
from pallas_kernels.pages import BlockShape, Geometry

GROUP = jax.jit(group, static_argnums=(2, 3))
EXPERTS, TOP_K = 5, 3


def geometry(page_words, widths, fallback, hidden, inner, lut_rows):
    blocks = BlockShape(2 * inner, hidden, lut_rows[0]), BlockShape(hidden, inner, lut_rows[1])
    return Geometry(page_words, widths, fallback, *blocks)


GEOMETRY = geometry(96, (2, 3, 4, 5, 6), True, 40, 24, (4, 8))
# Rows of several registers, for code that is written in such.
WIDE = "wide"
CASES = {
    "grouped tables": (GEOMETRY, "silu"),
    "all that can be imported": (geometry(160, (3, 4, 5, 6, 7, 8), False, 72, 30, (1, 1)), "gelu_pytorch_tanh"),
    "odd columns": (geometry(140, (4, 5), True, 35, 33, (3, 5)), "silu"),
    WIDE: (geometry(420, (2, 3, 4, 5, 6, 7, 8), True, 808, 52, (4, 1)), "gelu_pytorch_tanh"),
}


class Block:
    """Random codes and tables, as calibration would hand them over."""

    def __init__(self, shape: BlockShape, geometry: Geometry, rng):
        self.codes = rng.integers(0, 1 << geometry.parent, (shape.rows, shape.cols), dtype=np.uint8)
        self.luts = {
            b: np.sort(rng.normal(size=(shape.groups, 1 << b)) * 0.3, 1).astype(np.float16) for b in geometry.widths
        }
        self.scales = rng.uniform(0.5, 1.5, shape.rows).astype(np.float16)

    def round_tables(self) -> "Block":
        """The same with entries rounded to bfloat16."""
        self.luts = {b: lut.astype(ml_dtypes.bfloat16).astype(np.float16) for b, lut in self.luts.items()}
        return self


def make_layer(seed: int, geometry: Geometry = GEOMETRY, width: int | None = None, rounded: bool = False):
    """``(arena, bits, pages, weights)``: experts at random bits or all at ``width``, pages scattered, weights from the
    oracle, of tables that are ``rounded`` there alone.
    """
    rng = np.random.default_rng(seed)
    bits = rng.choice([width] if width else geometry.all_bits, (EXPERTS, 2)).astype(np.int32)
    pages = np.zeros((EXPERTS, 2, geometry.slots), np.int32)
    need = sum(geometry.block_pages(m, int(bits[e, m])) for e in range(EXPERTS) for m in (0, 1))
    ids = iter(rng.permutation(np.arange(1, need + 20)))
    arena = rng.integers(0, 2**32, (need + 20, geometry.page_words), dtype=np.uint32)
    arena[0] = 0
    weights = {}
    for expert in range(EXPERTS):
        for m in (0, 1):
            shape, b = geometry.shape(m), int(bits[expert, m])
            # The sums of wide layers stay as large as those of narrow ones.
            original = (rng.normal(size=(shape.rows, shape.cols)) * 0.3).astype(ml_dtypes.bfloat16)
            block = Block(shape, geometry, rng)
            host = bp.block_pages(block, original, geometry, m)
            known = bp.block_pages(block.round_tables(), original, geometry, m) if rounded else host
            weights[expert, m] = bp.read_block(known, geometry, m, b)
            for slot, page in zip(geometry.table_slots(m, b), geometry.host_pages(m, b), strict=True):
                pages[expert, m, slot] = next(ids)
                arena[pages[expert, m, slot]] = host[page]
    return jnp.asarray(arena), jnp.asarray(bits), jnp.asarray(pages), weights


@cache
def layer_of(case: str, width: int | None = None, rounded: bool = False):
    return make_layer(0, CASES[case][0], width, rounded)


def bfloat16(x):
    """``x`` rounded, in its own type."""
    return x.astype(ml_dtypes.bfloat16).astype(x.dtype)


def oracle(x, experts_of, gates, valid, weights, activation="silu", rounded=False):
    """Token by token in float64: output, squared norms of both blocks' inputs, and their second moments by expert; and
    how far an output may lie off because one input of ``down`` was near the middle between two it is ``rounded`` to.
    """
    hidden, inner_size = weights[0, 1].shape
    read = bfloat16 if rounded else lambda x: x
    y, stats, near = np.zeros(x.shape), np.zeros((*experts_of.shape, 2)), np.zeros(x.shape)
    moments = np.zeros((EXPERTS, hidden)), np.zeros((EXPERTS, inner_size))
    for t in np.flatnonzero(valid):
        for j, expert in enumerate(experts_of[t]):
            gate, up = np.split(weights[expert, 0].astype(np.float64) @ read(x[t]), 2)
            if activation == "silu":
                inner = gate / (1 + np.exp(-gate)) * up
            else:
                inner = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
            y[t] += gates[t, j] * (weights[expert, 1].astype(np.float64) @ read(inner))
            near[t] += gates[t, j] * np.abs(weights[expert, 1] * inner).max(1) * (2**-8 if rounded else 0)
            stats[t, j] = (x[t] @ x[t], inner @ inner)
            for own, given in zip(moments, (x[t], inner), strict=True):
                own[expert] += (gates[t, j] * given) ** 2
    return y, stats, moments, near


def make_tokens(tokens: int, seed: int, skew: bool = False, hidden: int = GEOMETRY.gate_up.cols):
    rng = np.random.default_rng(seed)
    # Gates and ups of one size, however many columns there are.
    x = (rng.normal(size=(tokens, hidden)) * min(1.0, np.sqrt(40 / hidden))).astype(np.float32)
    experts_of = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)]).astype(np.int32)
    if skew:
        experts_of[:] = np.arange(TOP_K)
    gates = rng.uniform(0, 1, (tokens, TOP_K)).astype(np.float32)
    return x, experts_of, gates, rng.uniform(size=tokens) < 0.8


@pytest.fixture(scope="module")
def layer():
    return layer_of("grouped tables")


class ExpertFFN:
    """What every backend must do; a backend is a subclass that names it."""

    implementation: str

    def rounds(self) -> bool:
        """Whether inputs of products and tables are rounded to bfloat16."""
        return False

    def check(self, case, tokens, seed, skew=False, width=None):
        geometry, activation = CASES[case]
        *memory, weights = layer_of(case, width, self.rounds())
        x, experts_of, gates, valid = make_tokens(tokens, seed, skew, geometry.gate_up.cols)
        valid[0] = True
        run = jax.jit(lambda *a: expert_ffn(*a, geometry, self.implementation, activation, moments=True))
        y, stats, moments = run(x, experts_of, gates, valid, *memory)
        want_y, want_stats, want_moments, near = oracle(
            x, experts_of, gates, valid, weights, activation, self.rounds()
        )
        assert np.all(np.abs(y - want_y) <= 2e-4 + 1e-7 * np.abs(want_y) + near)
        np.testing.assert_allclose(stats, want_stats, rtol=2e-4, atol=2e-4)
        for got, want in zip(moments, want_moments, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)

    @pytest.mark.parametrize("case", [name for name in CASES if name != WIDE])
    @pytest.mark.parametrize(("tokens", "skew"), [(1, False), (2, True), (7, False), (65, False), (64, True)])
    def test_equals_the_oracle(self, case, tokens, skew):
        self.check(case, tokens, tokens, skew)

    def test_no_valid_token_gives_zero(self, layer):
        *memory, _ = layer
        x, experts_of, gates, valid = make_tokens(4, 1)
        y, stats = expert_ffn(x, experts_of, gates, np.zeros_like(valid), *memory, GEOMETRY, self.implementation)
        assert not np.any(y) and not np.any(stats)

    def test_a_row_does_not_depend_on_its_neighbours(self, layer):
        *memory, _ = layer
        x, experts_of, gates, valid = make_tokens(16, 2)
        valid[:] = True
        run = jax.jit(lambda *a: expert_ffn(*a, GEOMETRY, self.implementation)[0])
        together = np.asarray(run(x, experts_of, gates, valid, *memory))
        for t in (0, 5, 15):
            alone = np.asarray(run(x, experts_of, gates, np.arange(16) == t, *memory))
            np.testing.assert_array_equal(alone[t], together[t])

    def test_other_bits_do_not_compile_again(self, layer):
        tokens = make_tokens(3, 3)
        run = jax.jit(lambda *a: expert_ffn(*a, GEOMETRY, self.implementation))
        arena = jnp.zeros((400, GEOMETRY.page_words), jnp.uint32)
        for seed in range(3):
            _, bits, pages, _ = make_layer(seed)
            run(*tokens, arena, bits, pages)
        assert run._cache_size() == 1


class TestXla(ExpertFFN):
    implementation = "xla"


@pytest.mark.skipif(bool(problems()["native"]), reason=problems()["native"])
class TestNative(ExpertFFN):
    implementation = "native"

    def rounds(self):
        return native.activations() == "bfloat16"

    @pytest.mark.parametrize("bits", (2, 3, 4, 5, 6, 7, 8, 16))
    @pytest.mark.parametrize("tokens", (1, 3, 8, 20))
    def test_every_width(self, bits, tokens):
        self.check(WIDE, tokens, bits, width=bits)

    @pytest.mark.parametrize("case", CASES)
    def test_bits_of_a_row_are_those_of_any_other_program(self, case):
        # Alone, in a small group and in a large one: three ways through the kernel.
        geometry, activation = CASES[case]
        *memory, _ = layer_of(case)
        x, experts_of, gates, valid = make_tokens(40, 5, True, geometry.gate_up.cols)
        run = jax.jit(lambda *a: expert_ffn(*a, geometry, "native", activation))
        whole = [np.asarray(a) for a in run(x, experts_of, gates, np.ones_like(valid), *memory)]
        for count in (1, 2, 5, 8, 9):
            part = run(x[:count], experts_of[:count], gates[:count], np.ones(count, bool), *memory)
            for got, want in zip(part, whole, strict=True):
                np.testing.assert_array_equal(got, want[:count])

    @pytest.mark.parametrize(
        ("what", "value", "message"),
        [
            ("bits", 7, "7 bits are not in this model"),
            ("bits", 1, "1 bits are not in this model"),
            ("pages", -1, "outside of the arena"),
            ("pages", 2**31 - 1, "outside of the arena"),
            ("experts_of", EXPERTS, "not one of 5"),
            ("experts_of", -1, "not one of 5"),
        ],
    )
    def test_what_is_out_of_range_is_an_error_and_no_stray_read(self, layer, what, value, message):
        arena, bits, pages, _ = layer
        x, experts_of, gates, valid = make_tokens(2, 3)
        valid[:] = True
        if what == "bits":
            bits = bits.at[experts_of[0, 0], 1].set(value)
        elif what == "pages":
            pages = pages.at[experts_of[0, 0], 0, 0].set(value)
        else:
            experts_of[1, 2] = value
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(expert_ffn(x, experts_of, gates, valid, arena, bits, pages, GEOMETRY, "native"))
        if what == "experts_of":
            valid[1] = False  # a masked token's choices are not looked at
            expert_ffn(x, experts_of, gates, valid, arena, bits, pages, GEOMETRY, "native")

    def test_shapes_are_checked_inside(self, layer):
        arena, bits, pages, _ = layer
        tokens = make_tokens(2, 3)
        with pytest.raises(jax.errors.JaxRuntimeError, match="slots a block"):
            jax.block_until_ready(expert_ffn(*tokens, arena, bits, pages[..., :-1], GEOMETRY, "native"))
        with pytest.raises(jax.errors.JaxRuntimeError, match="does not fit in a page"):
            jax.block_until_ready(expert_ffn(*tokens, arena[:, :16], bits, pages, GEOMETRY, "native"))

    @pytest.mark.parametrize("instructions", ["portable", "avx2", "avx512"])
    def test_lesser_instruction_sets(self, instructions):
        run_again(__file__, "TestNative and (every_width or range or row_are or odd)", instructions)


class TestNativeExact(TestNative):
    """Inputs of products as they are: the same tests, none of what is rounded in the oracle."""

    @pytest.fixture(autouse=True)
    def exact(self, exact_activations):
        if not exact_activations:
            pytest.skip("the other tests are exact")

    def rounds(self):
        return False

    test_lesser_instruction_sets = None


def test_gradients_equal_those_of_the_dense_form(layer, exact_activations):
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


def test_without_a_name_the_best_of_this_machine_is_taken(layer, monkeypatch):
    *memory, _ = layer
    tokens = make_tokens(2, 0)
    run = lambda name: expert_ffn(*tokens, *memory, GEOMETRY, name)[0]  # noqa: E731
    for name in ("xla", "native") if not native.problem() else ("xla",):
        monkeypatch.setenv("PWJAX_KERNELS", name)
        np.testing.assert_array_equal(run(None), run(name))
    monkeypatch.delenv("PWJAX_KERNELS")
    vectors = not native.problem() and native.instruction_set() != "portable"
    assert chosen_kernels() == ("native" if vectors else "xla")
    np.testing.assert_array_equal(run(None), run(chosen_kernels()))
    monkeypatch.setattr(native, "load", lambda: (None, "not built"))
    assert chosen_kernels() == "xla"
    np.testing.assert_array_equal(run(None), run("xla"))


def test_scalar_code_is_not_taken_unless_it_is_named(monkeypatch):
    monkeypatch.delenv("PWJAX_KERNELS", raising=False)
    monkeypatch.setattr(native, "problem", lambda: "")
    monkeypatch.setattr(native, "instruction_set", lambda: "portable")
    assert chosen_kernels() == "xla"
    monkeypatch.setattr(native, "instruction_set", lambda: "avx2")
    assert chosen_kernels() == "native"


def test_an_unknown_implementation_names_the_known_ones(layer):
    *memory, _ = layer
    with pytest.raises(ValueError, match="xla"):
        expert_ffn(*make_tokens(1, 0), *memory, GEOMETRY, "tritn")


def test_an_implementation_that_is_unavailable_says_why_and_names_the_others(layer, monkeypatch):
    *memory, _ = layer
    monkeypatch.setattr(native, "load", lambda: (None, "not built"))
    assert problems().keys() == IMPLEMENTATIONS.keys()
    with pytest.raises(ValueError, match="not built.*xla: available"):
        expert_ffn(*make_tokens(1, 0), *memory, GEOMETRY, "native")


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
