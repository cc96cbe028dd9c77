"""The jax-triton backend of expert_ffn: its kernel in Triton's interpreter, and what is said where it cannot be used.

Triton reads TRITON_INTERPRET when it is imported, so the tests of the kernel run in a process of their own: this file
again. That process has no jax-triton, whose import changes Triton's settings: the kernel is launched without it.
"""

import importlib.util
import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from test_expert_ffn import CASES, WIDE, ExpertFFN, expert_ffn, layer_of, make_tokens

from pallas_kernels import gpu
from pallas_kernels.expert_ffn import api, triton

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module", autouse=True)
def _backend(quick_programs):
    if INTERPRETED:
        from triton_interpreter import launch

        api.IMPLEMENTATIONS["interpreted"] = partial(triton.triton_expert_ffn, launch=launch)
    yield
    api.IMPLEMENTATIONS.pop("interpreted", None)


@pytest.fixture(scope="module")
def layer():
    return layer_of("grouped tables")


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_the_interpreter():
    # -P: the folder that tests start in may hold the sources, without the library that an installed package has.
    command = [sys.executable, "-P", "-m", "pytest", "-q", __file__, "-k", "TestInterpreted"]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-3000:]


@needs_triton
@pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")
class TestInterpreted(ExpertFFN):
    implementation = "interpreted"

    @pytest.mark.parametrize("case", [name for name in CASES if name != WIDE])
    @pytest.mark.parametrize(("tokens", "skew"), [(2, False), (7, True)])
    def test_equals_the_oracle(self, case, tokens, skew):
        self.check(case, tokens, tokens, skew)

    @pytest.mark.parametrize(
        ("case", "bits"),
        [
            *(("grouped tables", bits) for bits in (2, 3, 4, 5, 6, 16)),
            *(("all that can be imported", bits) for bits in (7, 8)),
            *((WIDE, bits) for bits in (3, 7, 16)),  # rows of two tiles
        ],
    )
    def test_every_width(self, case, bits):
        self.check(case, 1, bits, width=bits)

    def test_many_choices_take_the_reference(self):
        geometry, activation = CASES["odd columns"]
        *memory, _ = layer_of("odd columns")
        tokens = make_tokens(40, 1, hidden=geometry.gate_up.cols)
        got, want = (expert_ffn(*tokens, *memory, geometry, name, activation)[0] for name in ("interpreted", "xla"))
        np.testing.assert_array_equal(got, want)

    # The reference's, which many choices take.
    test_a_row_does_not_depend_on_its_neighbours = None
    test_other_bits_do_not_compile_again = None


PROGRAM = """
import os
from functools import partial
import jax, jax.numpy as jnp
from pallas_kernels.expert_ffn import api, triton
from pallas_kernels.pages import BlockShape, Geometry

os.environ["TRITON_CACHE_DIR"] = "kept"
triton._jax_triton()
assert os.environ["TRITON_CACHE_DIR"] == "kept"
from jax_triton import triton_lib
triton_lib.triton_kernel_call_lib.get_compute_capability = lambda device: 90  # there is no device
geometry = Geometry(11264, (3, 4), True, BlockShape(2816, 2048, 4), BlockShape(2048, 1408, 4))
spec = jax.ShapeDtypeStruct
args = (
    spec((1, 2048), jnp.float32), spec((1, 4), jnp.int32), spec((1, 4), jnp.float32), spec((1,), jnp.bool_),
    spec((200_000, 11264), jnp.uint32), spec((60, 2), jnp.int32), spec((60, 2, geometry.slots), jnp.int32),
)
run = jax.jit(partial(triton.triton_expert_ffn, geometry=geometry))
print(run.trace(*args).lower(lowering_platforms=("cuda",)).as_text().count("@triton_kernel_call"))
"""


@pytest.mark.aot
@needs_triton
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("jax_triton", "jax_cuda13_plugin")),
    reason="jax-triton and JAX's CUDA plugin are not both installed",
)
def test_jax_triton_lowers_both_products():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) == 2


@pytest.mark.parametrize(
    ("jax", "jax_triton", "triton", "words"),
    [
        *((*known, "") for known in gpu.TESTED_TRITON),
        ("0.12.0.1", "0.4.1", "3.9.0", "jax-triton 0.4.1 fails with jax 0.12.0.1"),
        ("0.11.2", "0.4.1", "3.6.0", "needs triton>=3.7, got 3.6.0"),
        ("0.10.2", "0.3.1", "3.5.1", "needs triton>=3.6, got 3.5.1"),
        ("0.10.2", None, "3.9.0", "jax-triton not installed"),
        ("0.10.2", None, None, "jax-triton and triton not installed"),
    ],
)
def test_versions_that_cannot_work_together_are_named(jax, jax_triton, triton, words):
    problem = gpu.triton_problem({"jax": jax, "jax-triton": jax_triton, "triton": triton})
    assert words in problem and bool(problem) == bool(words)


def test_on_a_cpu_it_says_why_it_cannot_be_used():
    *memory, _ = layer_of("grouped tables")
    with pytest.raises(ValueError, match="'triton' is unavailable .runs on CUDA GPUs.*xla: available"):
        expert_ffn(*make_tokens(1, 0), *memory, CASES["grouped tables"][0], "triton")
