"""The bit-plane format and the compute on it: arrays in, arrays out; knows nothing of models.

pages             Geometry, BlockShape, RowLayout: how rows sit in pages
bitplanes         NumPy packing, unpacking, and the oracle of every kernel
expert_ffn        routed experts at any mix of bits
paged_attention   attention over KV pages and fresh tokens
linear            products with 16-bit matrices
dispatch          how an op finds its implementation
gpu, native       whether kernels for GPUs and the C++ library can be used here; launch: a kernel in Pallas
"""

import logging
import os
from functools import cache


def chosen_kernels() -> str:
    """The implementation that ops take unless one is named: the environment's ``PWJAX_KERNELS``, else the best here.

    The best is "pallas" where JAX has a CUDA GPU to run on; on CPUs "native" where those kernels are built and have
    vectors to run on; else "xla". It is logged once.
    """
    return os.environ.get("PWJAX_KERNELS") or _told(_best())


def _best() -> str:
    # Here, because it imports JAX.
    from pallas_kernels import gpu, native

    try:
        if not gpu.problem():
            return "pallas"
        return "xla" if native.problem() else cpu_kernels()
    except RuntimeError:  # JAX has no device
        return "xla"


def cpu_kernels() -> str:
    """The best implementation for CPUs, whatever else JAX can run on."""
    from pallas_kernels import native

    return "native" if not native.load()[1] and native.instruction_set() != "portable" else "xla"


@cache
def _told(name: str) -> str:
    logging.getLogger("pwjax").info("kernels: %s", name)
    return name
