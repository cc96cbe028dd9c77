"""Kernels in C++ for CPUs, called by XLA, and the loops of k-means, called by :mod:`calib.kmeans_native`: loaded and
registered when first asked for.

``libpwjax.so`` is built by ``pip install`` where a C++ compiler is, or in a source tree by
``python setup.py build_ext --inplace``. Without it the rest of the package works.

Where the processor multiplies bfloat16, the inputs of products and the entries of lookup tables are rounded to it, and
sums are float32. ``PWJAX_ACTIVATIONS=float32`` in the environment keeps them as they are: the exact mode. It is read
when a program is traced.
"""

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

import jax

LIBRARY = Path(__file__).parent / "libpwjax.so"
# Handlers of XLA's foreign function interface, by the names that programs call them by.
TARGETS = ("pwjax_expert_ffn", "pwjax_paged_attention", "pwjax_linear")


@cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """The library, its handlers registered, and "" - or None and the reason why it cannot be used."""
    if not LIBRARY.is_file():
        return None, "not built: no C++ compiler was found when the package was installed"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.pwjax_instruction_set.restype, library.pwjax_instruction_set.argtypes = ctypes.c_char_p, [ctypes.c_bool]
        for name, sizes in (("expert_ffn", 4), ("paged_attention", 5), ("linear", 2)):
            scratch = getattr(library, f"pwjax_{name}_scratch")
            scratch.restype, scratch.argtypes = ctypes.c_int64, [ctypes.c_int64] * sizes
    except (OSError, AttributeError) as error:  # an attribute is missing in a library built from older sources
        return None, f"built, but cannot be loaded: {error}"
    if not library.pwjax_instruction_set(False):
        return None, "PWJAX_NATIVE_ISA names an instruction set that this processor does not have"
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    return library, ""


def problem() -> str:
    """Why these kernels cannot be used here; empty if they can."""
    if jax.default_backend() != "cpu":
        return f"runs on CPUs, JAX's default backend is {jax.default_backend()}"
    return load()[1]


def check_activations() -> None:
    """ValueError for a ``PWJAX_ACTIVATIONS`` that means nothing."""
    asked = os.environ.get("PWJAX_ACTIVATIONS") or "bfloat16"
    if asked not in ("bfloat16", "float32"):
        raise ValueError(f"PWJAX_ACTIVATIONS is {asked!r}; it may be bfloat16 (the default) or float32")


def exact() -> bool:
    """Whether inputs of products are to be kept in float32 (``PWJAX_ACTIVATIONS=float32``)."""
    return os.environ.get("PWJAX_ACTIVATIONS") == "float32"


def instruction_set() -> str:
    """``avx512_bf16``, ``avx512``, ``avx2`` or ``portable``: what products run on here.

    RuntimeError where the kernels cannot be used.
    """
    library, problem = load()
    if library is None:
        raise RuntimeError(f"native kernels on {platform.machine()}: {problem}")
    return library.pwjax_instruction_set(exact()).decode()


def activations() -> str:
    """``bfloat16`` or ``float32``: what inputs of products are rounded to here."""
    return "bfloat16" if instruction_set().endswith("bf16") else "float32"
