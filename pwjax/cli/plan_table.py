"""``pwjax plan`` of a model that is not quantized: its byte table, from ``config.json`` or a preset alone."""

from pathlib import Path
from typing import Any

from pwjax.cli.options import EngineOptions
from pwjax.config import ModelConfig
from pwjax.errors import UsageError
from pwjax.units import format_bytes


def config_of(options: EngineOptions, preset_name: str | None) -> ModelConfig | None:
    """The configuration to plan for, or None where ``options`` name a quantized model.

    UsageError for both a preset and a model, CheckpointError for a ``config.json`` that cannot be used.
    """
    if preset_name is not None:
        from pwjax.presets import preset

        if options.model is not None:
            raise UsageError(f"give --preset {preset_name} or --model {options.model}, not both")
        return preset(preset_name)
    if options.model is None:
        return None
    path = Path(options.model)
    if path.is_dir() and (path / "config.json").exists() and not (path / "manifest.json").exists():
        path = path / "config.json"
    if not path.is_file():
        return None
    from pwjax.checkpoints.hf_files import read_json

    return ModelConfig.from_hf(read_json(path))


def table(config: ModelConfig, options: EngineOptions, preset_name: str | None):
    """The model as it would be quantized (``Unquantized``), and its JSON-ready byte table."""
    from pwjax import byte_table
    from pwjax.presets import NOTES

    try:
        geometry = byte_table.expected_geometry(config)
    except ValueError as error:
        raise UsageError(f"this model cannot be quantized: {error}") from error
    tokens = min(options.context or config.max_positions, config.max_positions)
    found = byte_table.describe(config, geometry, tokens, options.kv_dtype)
    notes = [
        "in pages: as quantize would choose LUT groups and pages for normally distributed weights; it judges the "
        "weights themselves, so the groups can differ"
    ]
    if preset_name is not None:
        notes.append(f"{preset_name}: {NOTES[preset_name]}")
    if options.memory_budget_bytes is None:
        notes.append(
            "not included: temporaries of the compiled steps, page and KV tables, staging; --memory-budget compiles "
            "the steps and counts them"
        )
    return byte_table.Unquantized(config, geometry), {**found, "notes": notes}


def render(found: dict[str, Any]) -> str:
    """The byte table as text."""
    row = lambda name, *values: f"{name:<30}" + "".join(f"{value:>14}" for value in values)  # noqa: E731
    dense = found["dense_bytes"]
    lines = [row("never paged, bfloat16", format_bytes(sum(dense.values())))]
    lines += [row(f"  {name}", format_bytes(size)) for name, size in dense.items()]
    groups = found["lut_rows"]
    lines += ["", row("experts", "plain", "in pages", "(planes", "LUTs)")]
    for bits, columns in found["expert_bytes"].items():
        paged = columns["paged"]
        parts = [format_bytes(paged[name]) if name in paged else "" for name in ("planes", "luts")]
        totals = [format_bytes(sum(columns[kind].values())) for kind in ("plain", "paged")]
        lines.append(row(f"  {bits} bits", *totals, *parts).rstrip())
    lines += [
        "plain: planes and a LUT for each row, nothing rounded",
        f"in pages: of {format_bytes(found['page_bytes'])}; {groups['gate_up']} rows of gate_up and {groups['down']} "
        "of down share a LUT",
        "",
    ]
    for kind in found["kv"]:
        last = f", of the last {kind['window']:,} tokens" if kind["window"] else ""
        lines.append(
            row(f"KV, {kind['layers']} {kind['name']} layers", format_bytes(kind["token_bytes"])) + f"  a token{last}"
        )
    lines.append(
        row("KV of one sequence", format_bytes(found["sequence_bytes"])) + f"  at {found['sequence_tokens']:,} tokens"
    )
    return "\n".join([*lines, "", *(f"note: {note}" for note in found["notes"])])
