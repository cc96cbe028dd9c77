"""Kernels in C++ for CPUs, called by XLA, and the loops of k-means, called by :mod:`calib.kmeans_native`: loaded and
registered when first asked for.

``libpwjax.so`` is built by ``pip install`` where a C++ compiler is, or in a source tree by
``python setup.py build_ext --inplace``. Without it the rest of the package works.
"""

import ctypes
import platform
from functools import cache
from pathlib import Path

import jax

LIBRARY = Path(__file__).parent / "libpwjax.so"
# Handlers of XLA's foreign function interface, by the names that programs call them by.
TARGETS = ("pwjax_expert_ffn",)


@cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """The library, its handlers registered, and "" - or None and the reason why it cannot be used."""
    if not LIBRARY.is_file():
        return None, "not built: no C++ compiler was found when the package was installed"
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return None, f"built, but cannot be loaded: {error}"
    library.pwjax_instruction_set.restype = ctypes.c_char_p
    library.pwjax_expert_ffn_scratch.restype = ctypes.c_int64
    library.pwjax_expert_ffn_scratch.argtypes = [ctypes.c_int64] * 4
    if not library.pwjax_instruction_set():
        return None, "PWJAX_NATIVE_ISA names an instruction set that this processor does not have"
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    return library, ""


def instruction_set() -> str:
    """``avx512``, ``avx2`` or ``portable``: what the kernels run on here. RuntimeError where they cannot be used."""
    library, problem = load()
    if library is None:
        raise RuntimeError(f"native kernels on {platform.machine()}: {problem}")
    return library.pwjax_instruction_set().decode()
