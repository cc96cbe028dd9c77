"""How an op finds its implementation: nothing falls back."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax import lax

from pallas_kernels import chosen_kernels, cpu_kernels, native

# What :func:`choose` gives where none is named and a GPU is at hand: one program for the GPU and for the CPU.
BY_PLATFORM = "by platform"


def problems(implementations: Iterable[str], checks: Mapping[str, Callable[[], str]]) -> dict[str, str]:
    """Every implementation, and why it cannot be used here: empty if it can. ``checks``: of those that may not be."""
    return {name: checks[name]() if name in checks else "" for name in implementations}


def choose(
    op: str, name: str | None, implementations: Iterable[str], checks: Mapping[str, Callable[[], str]]
) -> str:
    """``name``, or where it is None :func:`pallas_kernels.chosen_kernels`; ValueError if unknown or unavailable, or
    where ``PWJAX_ACTIVATIONS`` means nothing.

    Where none is named here or in the environment, and the best is for GPUs: ``BY_PLATFORM``.
    """
    native.check_activations()
    asked = "" if name else " (PWJAX_KERNELS)"
    if not name and not os.environ.get("PWJAX_KERNELS") and chosen_kernels() == "pallas":
        return BY_PLATFORM
    name = name or chosen_kernels()
    if name not in implementations:
        raise ValueError(f"unknown {op} implementation {name!r}{asked}; choose from {', '.join(implementations)}")
    if name in checks and (problem := checks[name]()):
        known = problems(implementations, checks)
        others = "; ".join(f"{other}: {why or 'available'}" for other, why in known.items() if other != name)
        raise ValueError(f"{op} implementation {name!r} is unavailable ({problem}); {others}")
    return name


def call(name: str, implementations: Mapping[str, Callable], arrays: tuple, *static: Any) -> Any:
    """The implementation that :func:`choose` gave, of ``arrays`` and then ``static``.

    ``BY_PLATFORM`` is told apart when a program is lowered: where its arrays lie says what it runs on.
    """

    def of(which: str) -> Callable:
        return lambda *arrays: implementations[which](*arrays, *static)

    if name != BY_PLATFORM:
        return of(name)(*arrays)
    return lax.platform_dependent(*arrays, cuda=of("pallas"), cpu=of(cpu_kernels()), default=of("xla"))
