"""Every linear implementation against NumPy on bits of bfloat16: one shared class of tests."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from lesser_sets import run_again

from pallas_kernels import native
from pallas_kernels.linear import Member, linear, problems

# Rows and columns: one row, parts of registers and of tiles, several chunks and items of work.
SHAPES = [(1, 64), (5, 7), (37, 40), (24, 528), (700, 1030)]


def make(rows, cols, tokens, seed=0):
    """``(x, bits of three matrices, the same in float64)``."""
    rng = np.random.default_rng(seed)
    weights = (rng.normal(size=(3, rows, cols)) * cols**-0.5).astype(ml_dtypes.bfloat16)
    return rng.normal(size=(tokens, cols)).astype(np.float32), weights.view(np.uint16), weights.astype(np.float64)


class Linear:
    """What every backend must do; a backend is a subclass that names it."""

    implementation: str

    def read(self, x):
        """``x`` as it is multiplied."""
        return x

    @pytest.mark.parametrize(("rows", "cols"), SHAPES)
    @pytest.mark.parametrize("tokens", (1, 3, 8, 20))
    def test_equals_the_oracle(self, rows, cols, tokens):
        x, bits, weights = make(rows, cols, tokens)
        run = jax.jit(lambda x, stack, i: linear(x, Member(stack, i), implementation=self.implementation))
        for index in (0, 2):
            np.testing.assert_allclose(run(x, bits, index), self.read(x) @ weights[index].T, atol=2e-5)

    @pytest.mark.parametrize("lead", ((), (2, 3)))
    def test_a_matrix_by_itself_and_any_leading_axes(self, lead):
        x, bits, weights = make(24, 40, 6)
        x = x[0] if not lead else x.reshape(*lead, 40)
        y = linear(x, jnp.asarray(bits[1]), parts=4, implementation=self.implementation)
        assert y.shape == (*lead, 24)
        np.testing.assert_allclose(y, self.read(x) @ weights[1].T, atol=2e-5)

    def test_the_gradient_by_the_input(self):
        x, bits, weights = make(24, 40, 3)

        def loss(x):
            return jnp.sum(jnp.sin(linear(x, jnp.asarray(bits[0]), parts=2, implementation=self.implementation)))

        want = np.cos(self.read(x) @ weights[0].T) @ weights[0]
        np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), want, atol=2e-5)


class TestXla(Linear):
    implementation = "xla"


@pytest.mark.skipif(bool(problems()["native"]), reason=problems()["native"])
class TestNative(Linear):
    implementation = "native"

    def read(self, x):
        return x.astype(ml_dtypes.bfloat16).astype(x.dtype) if native.activations() == "bfloat16" else x

    @pytest.mark.parametrize(("rows", "cols"), SHAPES)
    def test_bits_of_a_row_are_those_of_any_other_program(self, rows, cols):
        # Alone, in a few and in many: three ways through the kernel.
        x, bits, _ = make(rows, cols, 40)
        run = jax.jit(lambda x: linear(x, jnp.asarray(bits[0]), implementation="native"))
        whole = np.asarray(run(x))
        for count in (1, 2, 5, 8, 9):
            np.testing.assert_array_equal(run(x[:count]), whole[:count])

    @pytest.mark.parametrize("index", (-1, 3))
    def test_an_index_out_of_range_is_an_error(self, index):
        x, bits, _ = make(5, 8, 1)
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"matrix {index} is not one of 3"):
            jax.block_until_ready(linear(x, Member(jnp.asarray(bits), jnp.int32(index)), implementation="native"))

    @pytest.mark.parametrize("instructions", ["portable", "avx2", "avx512"])
    def test_lesser_instruction_sets(self, instructions):
        run_again(__file__, "TestNative and (oracle or program or range)", instructions)


class TestNativeExact(TestNative):
    """The same with an input that is not rounded."""

    @pytest.fixture(autouse=True)
    def exact(self, exact_activations):
        if not exact_activations:
            pytest.skip("the other tests are exact")

    test_lesser_instruction_sets = None


def test_matrices_of_a_stack_are_not_copied():
    if problems()["native"]:
        pytest.skip(problems()["native"])
    x, bits, _ = make(700, 1030, 1)
    run = jax.jit(lambda x, stack, i: linear(x, Member(stack, i), implementation="native"))
    memory = run.lower(x, bits, 1).compile().memory_analysis()
    assert memory.temp_size_in_bytes < bits[0].nbytes / 10


def test_without_a_name_the_best_of_this_machine_is_taken(monkeypatch):
    x, bits, _ = make(24, 528, 2)
    run = lambda name: linear(x, jnp.asarray(bits[0]), implementation=name)  # noqa: E731
    for name in ("xla", "native") if not problems()["native"] else ("xla",):
        monkeypatch.setenv("PWJAX_KERNELS", name)
        np.testing.assert_array_equal(run(None), run(name))


def test_an_unknown_implementation_names_the_known_ones():
    x, bits, _ = make(5, 8, 1)
    with pytest.raises(ValueError, match="xla, native"):
        linear(x, jnp.asarray(bits[0]), implementation="nativ")
