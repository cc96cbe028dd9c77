"""The GPU kernels of expert_ffn in Pallas's interpreter, which runs the same kernels on a CPU."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from test_expert_ffn import WIDE, Block, ExpertFFN, layer_of

from pallas_kernels import bitplanes as bp
from pallas_kernels.expert_ffn import api, pallas_gpu
from pallas_kernels.expert_ffn.gpu_grouped import grouped
from pallas_kernels.expert_ffn.gpu_stream import streamed
from pallas_kernels.expert_ffn.gpu_tiles import Weights
from pallas_kernels.expert_ffn.grouping import group
from pallas_kernels.expert_ffn.tuning import Blocks
from pallas_kernels.pages import BlockShape, Geometry

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
INTERPRETED = partial(pallas_gpu.pallas_expert_ffn, interpret=True, operands=jnp.float32)


@pytest.fixture(scope="module", autouse=True)
def _programs(quick_programs):
    api.IMPLEMENTATIONS["interpreted"] = INTERPRETED
    yield
    del api.IMPLEMENTATIONS["interpreted"]


@pytest.fixture(scope="module")
def layer():
    return layer_of("grouped tables")


@pytest.mark.slow
class TestInterpreted(ExpertFFN):
    """Everything that every backend must do; the interpreter compiles for minutes."""

    implementation = "interpreted"

    @pytest.mark.parametrize("tokens", (1, 20))
    def test_rows_of_several_tiles(self, tokens):
        self.check(WIDE, tokens, 3)


class TestInterpretedQuickly(ExpertFFN):
    """The same with few widths: one program of each form."""

    implementation = "interpreted"

    @pytest.mark.parametrize(("tokens", "skew"), [(2, True), (65, False)])
    def test_equals_the_oracle(self, tokens, skew):
        self.check("odd columns", tokens, tokens, skew)

    test_no_valid_token_gives_zero = None
    test_a_row_does_not_depend_on_its_neighbours = None
    test_other_bits_do_not_compile_again = None


def one_matrix(cols: int, bits: int, rows: int = 40, experts: int = 3):
    """``(geometry, weights float32[experts, rows, cols], Weights)`` of down matrices, pages scattered."""
    rng = np.random.default_rng(cols)
    widths, fallback = ((3,), True) if bits == 16 else ((bits,), False)
    shape = BlockShape(rows, cols, 4)
    # Pages of a few rows, and of no whole number of tiles.
    geometry = Geometry(3 * shape.dense_row_words + 7, widths, fallback, BlockShape(2 * cols, rows), shape)
    need = geometry.block_pages(1, bits)
    ids = rng.permutation(np.arange(1, 1 + experts * need)).reshape(experts, need)
    arena = rng.integers(0, 2**32, (1 + experts * need, geometry.page_words), np.uint32)
    pages, dense = np.zeros((experts, 2, geometry.slots), np.int32), []
    for expert, own in enumerate(ids):
        original = (rng.normal(size=(rows, cols)) * cols**-0.5).astype(ml_dtypes.bfloat16)
        host = bp.block_pages(Block(shape, geometry, rng), original, geometry, 1)
        dense.append(bp.read_block(host, geometry, 1, bits))
        pages[expert, 1, list(geometry.table_slots(1, bits))] = own
        arena[own] = host[list(geometry.host_pages(1, bits))]
    table = np.full((experts, 2), bits, np.int32)
    return geometry, np.stack(dense), Weights(*map(jnp.asarray, (arena, table, pages)))


WIDTHS = (2, 3, 4, 5, 6, 7, 8, 16)
SLOW = [(form, cols, bits) for form in (streamed, grouped) for cols in (704, 2048) for bits in WIDTHS]


@pytest.mark.parametrize(
    ("form", "cols", "bits"),
    [
        (streamed, 704, 5), (streamed, 1408, 3), (streamed, 2048, 4), (streamed, 2816, 16),
        (grouped, 704, 8), (grouped, 2816, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)  # fmt: skip
def test_real_depths(form, cols, bits):
    geometry, dense, weights = one_matrix(cols, bits)
    rng = np.random.default_rng(bits)
    x = rng.normal(size=(5, cols)).astype(np.float32)
    # Expert 1 has no row, expert 2 one row, and the last tiles are not in use.
    experts_of = np.array([[0], [0], [2], [0], [0]], np.int32)
    groups = group(experts_of, np.ones(5, bool), 3, 16 if form is grouped else 2)
    source = jnp.where(groups.choice < 5, groups.choice, 0)
    run = jax.jit(lambda x, source, groups, w: form(x, source, groups, w, geometry, 1, "silu", Blocks(), True))
    got = np.asarray(run(x, source, groups, weights)).reshape(-1, dense.shape[1])[np.asarray(groups.slot)[:, 0]]
    want = np.einsum("tk,tnk->tn", x.astype(np.float64), dense[experts_of[:, 0]].astype(np.float64))
    # Activations of grouped products are rounded to 12 bits, half a unit at the most in either operand.
    bound = np.einsum("tk,tnk->tn", np.abs(x), np.abs(dense[experts_of[:, 0]]))
    bound *= 2**-11 if form is grouped else 2**-21
    assert np.all(np.abs(got - want) <= bound), np.max(np.abs(got - want) / bound)
