"""``pwjax quantize``: a checkpoint into a quantized model, resumable, with a report of what each width loses."""

import json
import os
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pwjax.cli.options import json_option, quiet_option
from pwjax.errors import ArtifactError, InterruptedRun, UsageError
from pwjax.progress import Bars
from pwjax.units import format_bytes

NO_TEXT = (
    "note: without --calibration every weight counts the same; quality at few bits is better with a text file like "
    "what the model will be used for"
)
INTERRUPTED = "interrupted; what is finished is kept, and the same command goes on from there"


@click.command()
@click.argument("hf_dir", metavar="HF_DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--bits", default="2-6", show_default=True, metavar="A-B",
              help="Widths that the experts can have, a contiguous range within 2-8.")
@click.option("--calibration", "--text", "calibration", multiple=True, metavar="TEXT_FILE",
              type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
              help='UTF-8 text, or .jsonl with a "text" a line, that says which weights matter; may be repeated. '
                   "Default: all weights count the same.")
@click.option("--weight", "weights", multiple=True, type=click.FloatRange(min=0, min_open=True), metavar="W",
              help="Share of each text, in the order of --calibration. Default: equal.")
@click.option("--tokens", type=click.IntRange(min=2), metavar="N",
              help="Tokens of the texts to use at most. Default: 65536.")
@click.option("--sequence-length", type=click.IntRange(min=2), metavar="N",
              help="Tokens of a sequence. Default: 512, or the model's context if that is less.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N",
              help="Seed of the tokens that calibration draws. Default: 0.")
@click.option("--lut-rows", default="auto", show_default=True, metavar="auto|N",
              help="Output rows that share a table; auto takes the least error at equal pages.")
@click.option("--refine/--no-refine", default=None,
              help="Fit the tables to the text's inputs by least squares, which lowers the loss at no cost in bytes. "
                   "Default: with --calibration, where N K^2 summed over all matrices of N rows and K columns is at "
                   "most 1e11 (some minutes).")
@click.option("--no-16bit", "fallback", flag_value=False, default=True,
              help="Leave out the original rows, two bytes a weight: less disk, but no 16 bits.")
@click.option("--jobs", "-j", type=click.IntRange(min=1), metavar="N",
              help="Threads. The result does not depend on it. Default: one a core.")
@click.option("--config", "config_file", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Hugging Face config.json of the model: HF_DIR is then an Orbax directory of a training run.")
@click.option("--tokenizer", metavar="FILE", type=click.Path(exists=True, path_type=Path),
              help="tokenizer.json, or its directory. Default: HF_DIR's.")
@click.option("--original", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="HF_DIR is a pack of any-precision-llm, and this the checkpoint it was made from: gives 16 bits.")
@json_option
@quiet_option
def command(
    hf_dir: Path,
    out: Path,
    calibration: tuple[Path, ...],
    weights: tuple[float, ...],
    tokens: int | None,
    sequence_length: int | None,
    seed: int | None,
    lut_rows: str,
    jobs: int | None,
    config_file: Path | None,
    tokenizer: Path | None,
    original: Path | None,
    as_json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Quantize the checkpoint HF_DIR into the directory OUT.

    HF_DIR may also be a pack of any-precision-llm: its codes and tables are then kept as they are.

    A run that was stopped goes on at the last finished layer when the same command is given again. OUT appears when
    it is whole; until then the work is in OUT.partial.
    """
    given = {"--weight": weights, "--tokens": tokens, "--sequence-length": sequence_length, "--seed": seed,
             "--refine": settings["refine"] or None}
    useless = [name for name, value in given.items() if value not in (None, ())]
    if not calibration and useless:
        raise UsageError(f"{useless[0]} is about the calibration text: give --calibration TEXT_FILE as well")
    if weights and len(weights) != len(calibration):
        raise UsageError(f"--weight must be given once for each --calibration: {len(weights)} for {len(calibration)}")
    groups = _lut_rows(lut_rows)

    # JAX and the quantizer are imported after what click has checked.
    from pwjax import environment
    from pwjax.calibration_text import SEQUENCE_LENGTH, TOKENS
    from pwjax.checkpoints.writer import refuse_taken
    from pwjax.quantization import parse_bits, quantize

    refuse_taken(out)
    parse_bits(settings["bits"])

    def note(text: str) -> None:
        if not quiet:
            click.echo(text, err=True)

    progress = _Told(note, Bars(False if quiet else None))
    if _import_pack(hf_dir, out, original, progress):
        return _tell(out, as_json, quiet, note)
    config, params = _load(hf_dir, config_file, note)
    if tokenizer is None and (hf_dir / "tokenizer.json").exists():
        tokenizer = hf_dir
    if tokenizer is None and calibration:
        raise UsageError(f"{hf_dir} has no tokenizer.json, which --calibration needs: add --tokenizer FILE")
    if tokenizer is None:
        note(f"note: {hf_dir} has no tokenizer.json; the quantized model will take and give token ids only")
    if calibration:
        environment.enable_compile_cache()
    else:
        note(NO_TEXT)

    try:
        quantize(
            params,
            config,
            out,
            text=calibration or None,
            tokenizer=tokenizer,
            lut_rows=groups,
            tokens=tokens or TOKENS,
            sequence_length=sequence_length or SEQUENCE_LENGTH,
            weights=weights or None,
            seed=seed or 0,
            jobs=jobs or 0,
            progress=progress,
            note=note,
            **settings,
        )
    except KeyboardInterrupt:
        raise InterruptedRun(INTERRUPTED) from None
    finally:
        progress.bars.close()
    _tell(out, as_json, quiet, note)


def _import_pack(path: Path, out: Path, original: Path | None, progress: "_Told") -> bool:
    """Import ``path`` where it is a pack of any-precision-llm; False where it is not."""
    from pwjax.checkpoints.any_precision import is_pack
    from pwjax.importing import import_pack

    context = click.get_current_context()
    if not is_pack(path):
        if original is not None:
            raise UsageError(f"--original belongs to a pack of any-precision-llm, and {path} is none")
        return False
    fixed = [p for p in context.command.params if p.name not in ("hf_dir", "out", "original", "as_json", "quiet")]
    given = [p.opts[0] for p in fixed if p.name and context.get_parameter_source(p.name) != ParameterSource.DEFAULT]
    if given:
        raise UsageError(f"{path} is a pack of any-precision-llm, whose codes are kept as they are: "
                         f"leave out {', '.join(given)}")
    try:
        import_pack(path, out, original=original, progress=progress)
    except KeyboardInterrupt:
        raise InterruptedRun(INTERRUPTED) from None
    finally:
        progress.bars.close()
    return True


def _tell(out: Path, as_json: bool, quiet: bool, note) -> None:
    """Say what was written, and what each width loses."""
    from calib import report

    summary = summarize(out)
    if as_json:
        click.echo(json.dumps(summary))
    if not as_json and not quiet:
        click.echo(report.table(summary["report"]), err=True)
        for text in summary["warnings"]:
            note(f"note: {text}")
        if summary["floors"]:
            raised = [f"{len(names)} at {bits} bits at least" for bits, names in summary["floors"].items()]
            first = next(iter(summary["floors"].values()))[0]
            note(f"blocks that decide, or that the text did not reach (such as {first}): {', '.join(raised)}")
        widths = f"{summary['bits'][0]}-{summary['widths'][-1]}" + (" and 16" if summary["fallback"] else "")
        note(f"wrote {out}: experts at {widths} bits, {format_bytes(summary['disk_bytes'])}")


def summarize(out: Path) -> dict[str, Any]:
    """JSON-ready facts of a fresh artifact: how it was calibrated, and ``report``, relative errors layer by layer."""
    from pwjax.checkpoints.artifact import Artifact

    artifact = Artifact.open(out)
    geometry, calibration = artifact.geometry, artifact.manifest["calibration"]
    return {
        "path": str(out),
        "bits": list(geometry.all_bits),
        "widths": list(geometry.widths),
        "fallback": geometry.fallback,
        "lut_rows": {"gate_up": geometry.shape(0).lut_rows, "down": geometry.shape(1).lut_rows},
        "page_bytes": geometry.page_bytes,
        "disk_bytes": sum(facts["bytes"] for facts in artifact.manifest["files"].values()),
        "windows": calibration["windows"],
        "window_tokens": calibration.get("window_tokens"),
        "mean_loss": calibration.get("mean_loss"),
        "quantizer": calibration.get("quantizer"),
        "damage": calibration["damage"],
        "super_additivity": calibration.get("super_additivity"),
        "few_tokens": calibration.get("few_tokens", []),
        "floors": calibration.get("floors", {}),
        "warnings": calibration.get("warnings", []),
        "report": calibration["report"],
    }


class _Told:
    """Progress bars, and one line where an earlier run has left work to go on from."""

    def __init__(self, note, bars: Bars):
        self.note, self.bars, self._quantizing = note, bars, False

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage == "quantizing" and not self._quantizing:
            self._quantizing = True
            if done > 1:
                self.bars.close()
                self.note(f"resuming: {done - 1} of {total} expert matrices are there")
        self.bars(stage, done, total)


def _load(path: Path, config_file: Path | None, note) -> tuple[Any, Any]:
    """Model config and parameters: of a Hugging Face directory, or of an Orbax one where ``config_file`` is given."""
    from pwjax.checkpoints.hf import HFCheckpoint
    from pwjax.checkpoints.hf_files import read_json
    from pwjax.config import ModelConfig

    if config_file is not None:
        return ModelConfig.from_hf(read_json(config_file)), os.fspath(path)
    if not (path / "config.json").exists():
        if (path / "manifest.json").exists():
            raise ArtifactError(f"{path} is quantized already; pwjax export {path} HF_DIR gives its original back")
        raise UsageError(
            f"{path} is not a Hugging Face checkpoint: it has no config.json; for an Orbax directory add --config FILE"
        )
    checkpoint = HFCheckpoint(path)
    for text in checkpoint.notes:
        note(f"note: {text}")
    return checkpoint.config, checkpoint.source().tree()


def _lut_rows(text: str) -> str | int:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--lut-rows must be auto or a number of rows of at least 1, got {text!r}")
    return int(text)
