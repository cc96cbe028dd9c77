"""``pwjax export``: a quantized model back to a Hugging Face checkpoint, exact or at fewer bits."""

import json
from pathlib import Path

import click
import numpy as np

from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.hf import save_hf
from pwjax.cli.options import json_option, quiet_option
from pwjax.errors import UsageError
from pwjax.progress import Bars


@click.command()
@click.argument("paths", nargs=-1, metavar="[MODEL] HF_DIR")
@click.option("--bits", type=int, default=16, show_default=True, metavar="N",
              help="Precision of the routed experts: 16 is the original, others are its rounded approximations.")
@click.option("--dtype", type=click.Choice(("bfloat16", "float32")), default="bfloat16", show_default=True,
              help="Type of all tensors. Experts below 16 bits are exact in float32 only.")
@json_option
@quiet_option
def command(paths: tuple[str, ...], bits: int, dtype: str, as_json: bool, quiet: bool) -> None:
    """Write the quantized MODEL (default: the bundled demo model) as a Hugging Face checkpoint HF_DIR.

    At 16 bits the tensors are exactly those that were quantized. Below, they are what the model computes with: equal
    in float32, rounded in bfloat16, which takes half the disk.
    """
    if not 1 <= len(paths) <= 2:
        raise UsageError(
            f"give the directory to write, and before it the model if it is not the bundled one; got {len(paths)} paths"
        )
    artifact = Artifact.open(paths[0] if len(paths) == 2 else _bundled())
    bars = Bars(False if quiet else None)
    try:
        out = export(artifact, paths[-1], bits, lambda done, total: bars("exporting", done, total), dtype)
    finally:
        bars.close()
    size = sum(file.stat().st_size for file in out.iterdir())
    if as_json:
        click.echo(json.dumps({"path": str(out), "bits": bits, "dtype": dtype, "bytes": size}))
    elif not quiet:
        click.echo(f"wrote {out}: experts at {bits} bits, {size / 2**20:,.1f} MiB", err=True)


def export(
    artifact: Artifact, out: str | Path, bits: int, progress=lambda done, total: None, dtype: str = "bfloat16"
) -> Path:
    """Write the checkpoint directory ``out``, one layer of experts in memory at a time; returns its path.

    UsageError where the model has no ``bits``; CheckpointError where ``out`` is taken or cannot be written.
    """
    widths = artifact.geometry.all_bits
    if bits not in widths:
        raise UsageError(f"this model has no {bits} bits; choose from {', '.join(map(str, widths))}")
    params = artifact.source(bits, np.dtype(dtype)).tree()
    return save_hf(out, artifact.config, params, artifact.tokenizer_path, progress, dtype=dtype)


def _bundled() -> Path:
    from pwjax.loading import bundled_model  # imports JAX and the engine

    return bundled_model()
