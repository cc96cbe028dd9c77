"""``pwjax inspect``: what is in a quantized model, what it takes at every precision, and whether it is whole."""

import json
import sys
from typing import Any

import click
import numpy as np

from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.manifest import DENSE
from pwjax.cli.options import json_option
from pwjax.errors import ArtifactError, UsageError
from pwjax.units import format_bytes


@click.command()
@click.argument("model", metavar="[OUT]", required=False)
@click.option("--verify", is_flag=True, help="Read every byte and check it against checksums.")
@click.option("--log", metavar="LOG", help="Summarize a run instead, from its epoch log.")
@click.option("--plot", metavar="DIR", help="With --log: write timeline.png and bits.png into DIR.")
@click.option("--shadow", is_flag=True, help="With --log: also run its sampled tokens at high bits.")
@json_option
def command(
    model: str | None, verify: bool, log: str | None, plot: str | None, shadow: bool, as_json: bool
) -> None:
    """Summarize the quantized model OUT (default: the bundled one), or verify it; or summarize a run by its log.

    With --log and --shadow, tokens that the run sampled (generate --max-damage or --shadow) are also run at the best
    bits that its memory budget holds for one sequence: predicted damage beside measured KL divergence, request by
    request.
    """
    if log is not None:
        if verify or (model is not None and not shadow):
            raise UsageError("--log summarizes a run: give no model and no --verify with it; --shadow may take a model")
        inspect_log(log, plot, as_json, shadow, model)
        return
    if plot is not None or shadow:
        raise UsageError(f"{'--shadow measures' if shadow else '--plot draws'} a run: add --log LOG")
    from pwjax.loading import open_model

    artifact = open_model(model)
    summary = summarize(artifact)
    if verify:
        summary["problems"] = artifact.verify(_progress)
        _progress("")
    click.echo(json.dumps(summary) if as_json else render(summary))
    if problems := summary.get("problems"):
        count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
        fix = "quantize anew, or copy it again"
        raise ArtifactError(f"{artifact.path} is damaged, {count} found: {problems[0]}; {fix}")


def inspect_log(log: str, plot: str | None, as_json: bool, shadow: bool = False, model: str | None = None) -> None:
    """Print the summary of a run, draw it into the folder ``plot``, and measure its ``shadow`` sample."""
    from pwjax.plots import plot_run
    from pwjax.run_summary import summarize_log

    summary = summarize_log(log)
    written = [str(path) for path in plot_run(summary, plot)] if plot else []
    found = None
    if shadow:
        from pwjax import environment
        from pwjax.evaluate.shadow import measure

        environment.enable_compile_cache()
        found = measure(log, model)
    if as_json:
        measured = {"shadow": found.to_json()} if found else {}
        click.echo(json.dumps({**summary.to_json(), "plots": written, **measured}))
    else:
        lines = [summary.render(), *(f"wrote {path}" for path in written), *([found.render()] if found else [])]
        click.echo("\n".join(lines))


def summarize(artifact: Artifact) -> dict[str, Any]:
    """JSON-ready facts; ``experts`` has one row for each precision that all blocks could have together."""
    geometry, table, files = artifact.geometry, artifact.table(), artifact.manifest["files"]
    params = int(table.params.sum())
    experts = []
    for level, bits in enumerate(table.widths):
        pages = int(table.pages[:, level].sum())
        experts.append({
            "bits": bits,
            "pages": pages,
            "bytes": pages * geometry.page_bytes,
            # Planes, LUTs and the unused ends of pages: what the precision really costs.
            "bits_per_weight": pages * geometry.page_bytes * 8 / params,
            "damage": float(np.sum(table.expected[:, level])),
        })
    return {
        "path": str(artifact.path),
        "config": artifact.config.to_json(),
        "geometry": geometry.to_json(),
        "page_bytes": geometry.page_bytes,
        "blocks": artifact.config.blocks,
        "expert_params": params,
        "dense_bytes": files[DENSE]["bytes"],
        "disk_bytes": sum(facts["bytes"] for facts in files.values()),
        "files": len(files),
        "damage_tables": list(artifact.manifest["calibration"]["damage"]),
        "tokenizer": artifact.tokenizer_path is not None,
        "experts": experts,
    }


def render(summary: dict[str, Any]) -> str:
    """The summary as text."""
    config, geometry = summary["config"], summary["geometry"]
    lut_rows = f"{geometry['gate_up']['lut_rows']} (gate_up), {geometry['down']['lut_rows']} (down)"
    facts = [
        ("path", summary["path"]),
        ("model", f"{config['model_type']}, {config['num_layers']} layers, hidden {config['hidden_size']}, "
                  f"vocabulary {config['vocab_size']}, context {config['max_positions']}"),
        ("experts", f"{config['num_experts']} a layer, {config['top_k']} of them a token, "
                    f"{summary['expert_params'] / 1e6:,.1f} M weights in {summary['blocks']} blocks"),
        ("pages", f"{format_bytes(summary['page_bytes'])} each; rows that share a LUT: {lut_rows}"),
        ("never paged", format_bytes(summary["dense_bytes"])),
        ("on disk", f"{format_bytes(summary['disk_bytes'])} in {summary['files']} files"),
        ("damage", f"tables: {', '.join(summary['damage_tables'])}"),
        ("tokenizer", "included" if summary["tokenizer"] else "none: token ids only"),
    ]
    lines = [f"{name:<12} {text}" for name, text in facts]
    lines += ["", "all experts at   resident     pages  bits a weight  predicted damage"]
    for row in summary["experts"]:
        lines.append(
            f"{row['bits']:>9} bits {format_bytes(row['bytes']):>12} {row['pages']:>9} {row['bits_per_weight']:>14.2f}"
            f" {row['damage']:>17.6g}"
        )
    if "problems" in summary:
        found = [f"problem: {text}" for text in summary["problems"]]
        lines += ["", *(found or ["verified: every byte is as it was written"])]
    return "\n".join(lines)


def _progress(name: str) -> None:
    """One line that overwrites itself, on terminals only; an empty name clears it."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{name and f'checking {name}'}", nl=False, err=True)
