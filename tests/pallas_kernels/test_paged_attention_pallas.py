"""The GPU kernel of paged_attention in Pallas's interpreter, which runs the same kernel on a CPU."""

from functools import partial

import numpy as np
import pytest
from test_paged_attention import PagedAttention, exact, make_fresh, make_past, oracle

from pallas_kernels.paged_attention import api
from pallas_kernels.paged_attention.pallas_gpu import pallas_paged_attention

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def _programs(quick_programs):
    api.IMPLEMENTATIONS["interpreted"] = partial(pallas_paged_attention, interpret=True)
    yield
    del api.IMPLEMENTATIONS["interpreted"]


@pytest.mark.slow
class TestInterpreted(PagedAttention):
    """Everything that every backend must do."""

    implementation = "interpreted"


@pytest.mark.parametrize(
    ("lengths", "page_words", "dtype", "window", "columns"),
    [
        ([0, 1, 37], 40, "float32", None, None),
        ([150, 5], 100, "bfloat16", None, None),
        ([0, 77, 300], 101, "bfloat16", 30, 6),
    ],
)
def test_past_and_fresh_tokens(lengths, page_words, dtype, window, columns):
    rng = np.random.default_rng(sum(lengths))
    past, past_k, past_v = make_past(lengths, dtype, page_words, rng, columns=columns)
    q, fresh_k, fresh_v = make_fresh(rng, len(lengths), 3, 6, dtype)
    want = oracle(q, *exact(fresh_k, fresh_v), 2, lengths, past_k, past_v, window)
    got = api.paged_attention(q, fresh_k, fresh_v, 2, past, 1, window, "interpreted")
    np.testing.assert_allclose(got, want, atol=3e-6)


def test_an_odd_head_of_pairs_is_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="even size"):
        pallas_paged_attention(*make_fresh(rng, 1, 1, 1, "bfloat16", 1, 1, 5), 0, None, 0)
