"""How an op finds its implementation: nothing falls back."""

from collections.abc import Callable, Iterable, Mapping

from pallas_kernels import chosen_kernels


def problems(implementations: Iterable[str], checks: Mapping[str, Callable[[], str]]) -> dict[str, str]:
    """Every implementation, and why it cannot be used here: empty if it can. ``checks``: of those that may not be."""
    return {name: checks[name]() if name in checks else "" for name in implementations}


def choose(
    op: str, name: str | None, implementations: Iterable[str], checks: Mapping[str, Callable[[], str]]
) -> str:
    """``name``, or where it is None :func:`pallas_kernels.chosen_kernels`; ValueError if unknown or unavailable."""
    asked = "" if name else " (PWJAX_KERNELS)"
    name = name or chosen_kernels()
    if name not in implementations:
        raise ValueError(f"unknown {op} implementation {name!r}{asked}; choose from {', '.join(implementations)}")
    if name in checks and (problem := checks[name]()):
        known = problems(implementations, checks)
        others = "; ".join(f"{other}: {why or 'available'}" for other, why in known.items() if other != name)
        raise ValueError(f"{op} implementation {name!r} is unavailable ({problem}); {others}")
    return name
