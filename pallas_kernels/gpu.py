"""Whether kernels for GPUs can be used here."""

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
