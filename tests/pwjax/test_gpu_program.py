"""A whole decode step compiled by XLA for an H200, without one: ``pytest -m aot``, needs the CUDA plugin of JAX.

``pip install --no-deps jax-cuda13-plugin==V jax-cuda13-pjrt==V`` with V the version of jax, and a CUDA toolkit.
In a process of its own, since the plugin is loaded before JAX starts.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CUDA = Path("/usr/local/cuda")
pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None, reason="the CUDA plugin is not installed"
    ),
    pytest.mark.skipif(not CUDA.is_dir(), reason=f"no CUDA toolkit in {CUDA}"),
]

TARGET = """gpu_device_info {
 threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
 device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
 cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
} platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""

PROGRAM = f"""
import json
from functools import partial
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from pallas_kernels.expert_ffn import api as experts
from pallas_kernels.paged_attention import api as attention
from pwjax.byte_table import expected_geometry
from pwjax.checkpoints.tree import dense_shapes, unflatten
from pwjax.config import ModelConfig
from pwjax.engine.steps import StepShapes, compile_step

jax.devices()
topology = topologies.get_topology_desc(
    topology_name="h200", platform="cuda", topology="1x1x1", target_config='''{TARGET}''')
# The device is there on paper only.
experts.PROBLEMS["pallas"] = attention.PROBLEMS["pallas"] = lambda: ""
jax.ShapeDtypeStruct = partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(topology.devices[0]))
config = ModelConfig(
    model_type="qwen2_moe", vocab_size=4096, hidden_size=2048, num_layers=2, num_heads=16, num_kv_heads=16,
    head_dim=128, num_experts=60, top_k=4, expert_size=1408, shared_size=5632, norm_topk_prob=False, rms_eps=1e-6,
    rope_theta=1e6, max_positions=8192, tie_embeddings=False, qkv_bias=True, eos_token_ids=(0,),
)
params = unflatten({{n: jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in dense_shapes(config).items()}})
geometry = expected_geometry(config, (3, 4), False, (4, 4))
shapes = StepShapes(config, geometry, 4, 4096, (256,), 4, "bfloat16")
for num_pages in (20_000, 200_000):
    compiled = compile_step(shapes, ("decode", 4), num_pages, params)
    memory = compiled.memory_analysis()
    print(json.dumps({{
        "arena": num_pages * geometry.page_bytes, "temporaries": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes, "kernels": compiled.as_text().count("__gpu$xla.gpu.triton"),
    }}))
"""


def test_a_decode_step_for_an_h200_does_not_copy_the_arena():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "PWJAX_KERNELS": "pallas", "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={CUDA}",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)
    small, large = (json.loads(line) for line in done.stdout.splitlines())
    # gate_up and down of the experts, and attention.
    assert small["kernels"] >= 3
    assert large["temporaries"] == small["temporaries"] < 64 << 20
    assert large["arguments"] - small["arguments"] == large["arena"] - small["arena"]
