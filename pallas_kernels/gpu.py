"""Kernels for GPUs: whether they can be used here, and how Pallas is asked to run one."""

from collections.abc import Callable
from typing import Any

import jax


def problem() -> str:
    """Why this backend cannot be used here; empty if it can."""
    if jax.default_backend() != "gpu":
        return f"runs on CUDA GPUs, JAX's default backend is {jax.default_backend()}"
    if "cuda" not in jax.devices()[0].client.platform_version.lower():
        return "runs on CUDA GPUs, this GPU is of another make"
    try:
        from jax.experimental.pallas import triton  # noqa: F401
    except ImportError as error:
        return f"this JAX has no Triton backend of Pallas: {error}"
    return ""


def launch(
    kernel: Callable,
    name: str,
    grid: tuple,
    out_shape: Any,
    inputs: tuple,
    warps: int,
    stages: int,
    interpret: bool,
    aliases: dict[int, int] | None = None,
) -> Any:
    """``kernel`` on whole arrays, one program for each point of ``grid``."""
    # Here, since Pallas takes as long to import as all the rest.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        in_specs=[whole] * len(inputs),
        out_specs=jax.tree.map(lambda _: whole, out_shape),
        input_output_aliases=aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )(*inputs)
