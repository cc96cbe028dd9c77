"""The bit-plane format and the compute on it: arrays in, arrays out; knows nothing of models.

pages             Geometry, BlockShape, RowLayout: how rows sit in pages
bitplanes         NumPy packing, unpacking, and the oracle of every kernel
expert_ffn        routed experts at any mix of bits
paged_attention   attention over KV pages and fresh tokens
dispatch          how an op finds its implementation
gpu, native       whether kernels for GPUs and the C++ library can be used here
"""

import os


def chosen_kernels() -> str:
    """The implementation that an op takes unless one is named: the environment's ``PWJAX_KERNELS``, else "xla"."""
    return os.environ.get("PWJAX_KERNELS") or "xla"
