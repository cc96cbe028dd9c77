"""The bit-plane format and the compute on it: arrays in, arrays out; knows nothing of models.

pages             Geometry, BlockShape, RowLayout: how rows sit in pages
bitplanes         NumPy packing, unpacking, and the oracle of every kernel
expert_ffn        routed experts at any mix of bits
paged_attention   attention over KV pages and fresh tokens
dispatch          how an op finds its implementation
gpu, native       whether kernels for GPUs and the C++ library can be used here; launch: a kernel in Pallas
"""

import logging
import os
from functools import cache


def chosen_kernels() -> str:
    """The implementation that ops take unless one is named: the environment's ``PWJAX_KERNELS``, else the best here.

    The best is "native" where those kernels are built and have vectors to run on, else "xla"; it is logged once.
    """
    return os.environ.get("PWJAX_KERNELS") or _told(_best())


def _best() -> str:
    # Here, because it imports JAX.
    from pallas_kernels import native

    try:
        usable = not native.problem()
    except RuntimeError:  # JAX has no device
        return "xla"
    return "native" if usable and native.instruction_set() != "portable" else "xla"


@cache
def _told(name: str) -> str:
    logging.getLogger("pwjax").info("kernels: %s", name)
    return name
