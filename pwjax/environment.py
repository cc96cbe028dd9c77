"""What this program runs on: versions, devices, processor features, and where compiled programs are kept."""

import hashlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

from pallas_kernels import chosen_kernels, native

DISTRIBUTIONS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy", "safetensors", "tokenizers")
OPTIONAL_DISTRIBUTIONS = ("jax-cuda13-plugin", "jax-triton", "triton", "torch", "transformers", "matplotlib", "lm-eval")
# What CPU kernels can make use of, in the spelling of /proc/cpuinfo.
CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vbmi", "avx512_bf16", "amx_bf16")


def package_version(distribution: str = "pwjax") -> str | None:
    """Installed version of a distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def base_versions() -> dict[str, str]:
    """Versions of ours, Python and the base packages. JSON-ready; imports nothing heavy."""
    found = {"pwjax": package_version() or "source", "python": platform.python_version()}
    return found | {name: package_version(name) or "missing" for name in DISTRIBUTIONS}


def versions() -> dict[str, str]:
    """What results depend on: :func:`base_versions`, and the kernels that run here. JSON-ready."""
    return base_versions() | {"kernels": kernels()}


def kernels() -> str:
    """The kernels that programs are compiled with from now on, with the instruction set where they have one."""
    chosen = chosen_kernels()
    return f"{chosen}, {native.instruction_set()}" if chosen == "native" else chosen


def optional_versions() -> dict[str, str | None]:
    """Versions of what the extras bring, None for what is not installed."""
    return {name: package_version(name) for name in OPTIONAL_DISTRIBUTIONS}


def cpu_info() -> dict[str, Any]:
    """``{"model", "cores", "features"}``: usable cores, and which of CPU_FEATURES there are (empty if unknown)."""
    model, flags = platform.processor() or platform.machine(), set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                model = value.strip()
            elif name.strip() in ("flags", "Features"):
                flags = set(value.split())
                break
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"model": model, "cores": cores, "features": [f for f in CPU_FEATURES if f in flags]}


def memory_bytes() -> dict[str, int | None]:
    """``{"total", "available"}`` bytes of host memory, None where the system does not say."""
    found: dict[str, int | None] = {"total": None, "available": None}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                found["total" if name == "MemTotal" else "available"] = int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return found


def devices() -> list[dict[str, Any]]:
    """JAX devices as ``{"id", "platform", "kind", "memory_bytes"}``; starts JAX's backend."""
    import jax

    found = []
    for device in jax.devices():
        stats = device.memory_stats() or {}
        found.append({
            "id": device.id,
            "platform": device.platform,
            "kind": device.device_kind,
            "memory_bytes": stats.get("bytes_limit"),
        })
    return found


def cache_dir() -> Path:
    """The user's cache directory of this package: ``$PWJAX_CACHE_DIR``, or ``pwjax`` under the XDG or macOS one."""
    if named := os.environ.get("PWJAX_CACHE_DIR"):
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pwjax"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pwjax"


def step_sizes_dir() -> Path:
    """Where measured sizes of compiled programs are kept, so that a budget need not compile to be divided."""
    return cache_dir() / "step-memory"


def compile_cache_dir() -> Path:
    """Where compiled programs are kept; ``$JAX_COMPILATION_CACHE_DIR`` has the last word.

    One folder for each processor and jaxlib: a home directory can be shared, and machine code for another processor
    may not run.
    """
    if named := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(named)
    cpu = cpu_info()
    machine = "\0".join([platform.machine(), cpu["model"], *cpu["features"], package_version("jaxlib") or ""])
    return cache_dir() / f"xla-{hashlib.sha256(machine.encode()).hexdigest()[:12]}"


def enable_compile_cache() -> Path | None:
    """Let JAX keep compiled programs in ``compile_cache_dir``; None if that cannot be written (then nothing changes).

    For command lines: a library must not change the JAX configuration of the program that imports it.
    """
    import jax

    path = compile_cache_dir()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(path, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
