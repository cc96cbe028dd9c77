"""Kernels for GPUs: whether they can be used here, and how Pallas is asked to run one."""

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

import jax


def problem() -> str:
    """Why this backend cannot be used here; empty if it can."""
    if jax.default_backend() != "gpu":
        return f"runs on CUDA GPUs, JAX's default backend is {jax.default_backend()}"
    if "cuda" not in jax.devices()[0].client.platform_version.lower():
        return "runs on CUDA GPUs, this GPU is of another make"
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability and float(capability) < 8:
        return f"needs compute capability 8.0, this GPU has {capability}"
    try:
        from jax.experimental.pallas import triton  # noqa: F401
    except ImportError as error:
        return f"this JAX has no Triton backend of Pallas: {error}"
    return ""


# jax, jax-triton and triton: sets of versions whose kernels compile and, in the interpreter, give the right numbers.
TESTED_TRITON = (("0.10.2", "0.3.1", "3.9.0"),)


def triton_versions() -> dict[str, str | None]:
    """Versions of jax, jax-triton and triton; None for what is not installed."""

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in ("jax", "jax-triton", "triton")}


def triton_problem(versions: Mapping[str, str | None]) -> str:
    """Why ``versions``, as of :func:`triton_versions`, cannot work together; empty if they can, or may."""
    if missing := [name for name in ("jax-triton", "triton") if not versions[name]]:
        return f"{' and '.join(missing)} not installed: pip install 'pwjax[gpu]' with Python 3.11"
    jax_version, jax_triton, triton = (_numbers(versions[name]) for name in ("jax", "jax-triton", "triton"))
    remedy = "tested are " + "; ".join("jax {}, jax-triton {}, triton {}".format(*known) for known in TESTED_TRITON)
    if jax_triton >= (0, 4) and jax_version >= (0, 12):
        return f"jax-triton {versions['jax-triton']} fails with jax {versions['jax']}: {remedy}"
    # What their own requirements say, which pip does not enforce on what is installed later.
    least = (3, 7) if jax_triton >= (0, 4) else (3, 6)
    if triton < least:
        needed = ".".join(map(str, least))
        return f"jax-triton {versions['jax-triton']} needs triton>={needed}, got {versions['triton']}: {remedy}"
    return ""


def _numbers(version: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (version or "").split(".") if part.isdigit())


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
