"""How ops find their implementation where a GPU is at hand, without one."""

import jax
import numpy as np
import pytest
from gpu_compile import lower
from test_expert_ffn import CASES, layer_of, make_tokens
from test_paged_attention import make_fresh

from pallas_kernels import chosen_kernels, cpu_kernels, gpu
from pallas_kernels.expert_ffn import expert_ffn
from pallas_kernels.paged_attention import paged_attention

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
GEOMETRY = CASES["odd columns"][0]


def experts():
    """``(function of an implementation's name, arrays)``."""
    *memory, _ = layer_of("odd columns")
    arrays = *make_tokens(2, 0, hidden=GEOMETRY.gate_up.cols), *memory
    return lambda name: lambda *a: expert_ffn(*a, GEOMETRY, name)[0], arrays


def attention():
    arrays = make_fresh(np.random.default_rng(0), 2, 3, 3)
    return lambda name: lambda *a: paged_attention(*a, 0, None, 0, implementation=name), arrays


@pytest.mark.parametrize("op", [experts, attention])
def test_one_program_serves_the_gpu_and_the_cpu(op, monkeypatch):
    monkeypatch.delenv("PWJAX_KERNELS", raising=False)
    monkeypatch.setattr(gpu, "problem", lambda: "")
    assert chosen_kernels() == "pallas"
    of, arrays = op()
    program = jax.jit(of(None))
    # Arrays on a CPU: the kernels for CPUs, and nothing of the GPU's.
    np.testing.assert_array_equal(program(*arrays), jax.jit(of(cpu_kernels()))(*arrays))
    assert "triton" not in program.lower(*arrays).as_text()
    on_gpu = lower(of(None), *arrays).as_text()
    assert "custom_call @__gpu$xla.gpu.triton" in on_gpu and "custom_call @pwjax" not in on_gpu


def test_a_name_is_not_told_apart_by_platform(monkeypatch):
    monkeypatch.setattr(gpu, "problem", lambda: "")
    monkeypatch.setenv("PWJAX_KERNELS", "xla")
    of, arrays = experts()
    assert "triton" not in lower(of(None), *arrays).as_text()


def test_a_gpu_is_said_to_be_too_old(monkeypatch):
    class Device:
        compute_capability = "7.5"

        class client:
            platform_version = "CUDA 13"

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device])
    assert "needs compute capability 8.0, this GPU has 7.5" in gpu.problem()
    Device.compute_capability = "12.0"
    assert not gpu.problem()
