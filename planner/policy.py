"""The names of all policies, and how one is asked for by a string.

``name`` or ``name:option=value,option=value``: ``default:routing=off,residence=32``. A policy is made once per
engine, asked for an initial plan, then asked at every boundary. It is deterministic: its only state is what it saw in
earlier observations.
"""

from dataclasses import fields
from math import inf
from types import UnionType
from typing import Any, get_args

from planner.baselines import HotnessPolicy, RandomPolicy, StaticPolicy, UniformDynamicPolicy, UniformPolicy
from planner.default import DefaultPolicy
from planner.observe import Policy
from planner.paper import PaperPolicy

POLICIES = {
    "default": DefaultPolicy,
    "paper": PaperPolicy,
    "static": StaticPolicy,
    "uniform": UniformPolicy,
    "uniform-dynamic": UniformDynamicPolicy,
    "hotness": HotnessPolicy,
    "random": RandomPolicy,
}


def get_policy(name: str, **options) -> Policy:
    """A new policy by name; ``options`` are its fields. ValueError lists the names, or the options it takes."""
    name, _, text = name.partition(":")
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; choose from {', '.join(POLICIES)}")
    kind = POLICIES[name]
    types = {f.name: f.type for f in fields(kind)}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        options[key] = _parsed(name, key, value, types[key]) if key in types else None
    unknown = sorted(set(options) - set(types))
    if unknown:
        raise ValueError(
            f"policy {name!r} has no option {', '.join(unknown)}; it takes {', '.join(types) or 'no options'}"
        )
    return kind(**options)


def _parsed(name: str, key: str, value: str, annotation: Any) -> Any:
    """The value of an option in a string. ``annotation``: that of its field, a type or a union of types."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    try:
        if bool in kinds:
            return {"on": True, "off": False}[value]
        if int in kinds and value.isdecimal():
            return int(value)
        if float in kinds and 0 <= (number := float(value)) < inf:
            return number
    except (KeyError, ValueError):
        pass
    names = {bool: "on or off", float: "a number from 0", int: "a whole number from 0"}
    allowed = next((said for kind, said in names.items() if kind in kinds), "set from Python")
    raise ValueError(f"policy {name!r}: option {key} must be {allowed}, got {value!r}")
