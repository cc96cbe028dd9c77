"""``pwjax doctor``: what this machine has, what works on it, and why the rest does not."""

import json
import os
from pathlib import Path
from typing import Any

import click

from pwjax import environment
from pwjax.cli.options import json_option
from pwjax.units import format_bytes


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Show versions, devices and what works on this machine."""
    report = examine()
    click.echo(json.dumps(report) if as_json else render(report))


def examine() -> dict[str, Any]:
    """The whole report, JSON-ready. A device that cannot be started is part of the report, not an error."""
    try:
        devices, problem = environment.devices(), None
    except Exception as error:  # whatever a broken driver makes JAX raise
        devices, problem = [], " ".join(str(error).split())
    return {
        "versions": environment.versions(),
        "extras": environment.optional_versions(),
        "extras_problem": _extras_problem(),
        "devices": devices,
        "device_problem": problem,
        "cpu": environment.cpu_info(),
        "memory_bytes": environment.memory_bytes(),
        "kernels": kernels({device["platform"] for device in devices}),
        "caches": {
            "step sizes": _directory(environment.step_sizes_dir()),
            "compiled": _directory(environment.compile_cache_dir()),
        },
        "environment_problem": _environment_problem(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("JAX_", "XLA_", "PWJAX_"))},
    }


def kernels(platforms: set[str]) -> dict[str, str]:
    """``"op/implementation"`` and ``"available"``, or the reason why it is not."""
    from pallas_kernels import expert_ffn, linear, native, paged_attention

    found = {}
    ops = {"expert_ffn": expert_ffn, "paged_attention": paged_attention, "linear": linear}
    for name, op in ops.items():
        problems = op.problems() if platforms else dict.fromkeys(op.IMPLEMENTATIONS, "JAX has no device")
        state = {which: f"unavailable: {why}" if why else "available" for which, why in problems.items()}
        if state["native"] == "available":
            state["native"] += f", {native.instruction_set()} instructions"
            if name != "paged_attention":
                state["native"] += f", {native.activations()} activations"
        found |= {f"{name}/{which}": what for which, what in state.items()}
    return found


def _extras_problem() -> str | None:
    """Installed versions of jax, jax-triton and triton that do not work together; None where nobody asked for them."""
    from pallas_kernels import gpu

    versions = gpu.triton_versions()
    return gpu.triton_problem(versions) or None if versions["jax-triton"] else None


def _environment_problem() -> str | None:
    """A variable of ours that means nothing; None where all do."""
    from pallas_kernels import dispatch, expert_ffn

    try:
        dispatch.choose("kernel", None, expert_ffn.IMPLEMENTATIONS, {})
    except ValueError as error:
        return str(error)
    return None


def _directory(path: Path) -> dict[str, Any]:
    # The nearest folder that is there decides: a cache is made when it is first needed.
    nearest = next((p for p in (path, *path.parents) if p.exists()), path)
    usable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() and usable else 0
    return {"path": str(path), "writable": usable, "bytes": size}


def render(report: dict[str, Any]) -> str:
    """The report as text, one fact a line."""
    lines = []

    def section(title: str, rows: list[tuple[str, str]]) -> None:
        lines.append(title)
        width = max((len(name) for name, _ in rows), default=0)
        lines.extend(f"  {name:<{width}}  {text}" for name, text in rows)

    def size(count: int | None) -> str:
        return "not reported" if count is None else format_bytes(count)

    section("versions", list(report["versions"].items()))
    extras = [(name, version or "not installed") for name, version in report["extras"].items()]
    section("extras", extras + ([("problem", report["extras_problem"])] if report["extras_problem"] else []))
    devices = [
        (f"{d['platform']}:{d['id']}", f"{d['kind']}, memory {size(d['memory_bytes'])}") for d in report["devices"]
    ]
    section("devices", devices or [("none", report["device_problem"] or "JAX found no device")])
    cpu, memory = report["cpu"], report["memory_bytes"]
    section("host", [
        ("processor", f"{cpu['model']}, {cpu['cores']} cores"),
        ("features", " ".join(cpu["features"]) or "none of those that kernels use"),
        ("memory", f"{size(memory['total'])}, {size(memory['available'])} available"),
    ])
    section("kernels", list(report["kernels"].items()))
    section("caches", [
        (name, f"{c['path']} ({format_bytes(c['bytes'])}{'' if c['writable'] else ', NOT writable'})")
        for name, c in report["caches"].items()
    ])
    if report["environment"]:
        problem = report["environment_problem"]
        section("environment", [*report["environment"].items(), *([("problem", problem)] if problem else [])])
    return "\n".join(lines)
