"""``pwjax calibrate``: damage tables of a quantized model from its own 16-bit pages, checked against measured loss."""

import json
from pathlib import Path

import click

from pwjax.cli.options import json_option, quiet_option
from pwjax.errors import InterruptedRun, UsageError
from pwjax.progress import Bars

NO_TEXT = "note: calibrating on a little built-in text; --text FILE with text like that of use is better"
FILE = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)


@click.command()
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--text", "-t", multiple=True, metavar="FILE", type=FILE,
              help="UTF-8 text, or .jsonl with a \"text\" a line, to calibrate on; may be repeated, one file a kind of "
                   "text. Default: some modules of Python's standard library.")
@click.option("--weight", "weights", multiple=True, type=click.FloatRange(min=0, min_open=True), metavar="W",
              help="Share of each --text, given once for each. Default: equal shares.")
@click.option("--heldout", multiple=True, metavar="FILE", type=FILE,
              help="UTF-8 text to check the tables on; may be repeated. Default: other modules of Python's standard "
                   "library.")
@click.option("--tokens", type=click.IntRange(min=2), metavar="N", help="Tokens to calibrate on. Default: 65536.")
@click.option("--sequence-length", type=click.IntRange(min=2), metavar="N",
              help="Tokens of a sequence. Default: 512, or the model's context if that is less.")
@click.option("--report", "report_file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
              default=Path("report.json"), show_default=True,
              help="Where the report goes; a page to read and pictures are written beside it.")
@click.option("--check-only", is_flag=True, help="Leave OUT as it is: check and report the tables that it has.")
@click.option("--no-truth", "truth", flag_value=False, default=True, help="Leave out the truth check.")
@click.option("--changes", type=click.IntRange(min=3), default=200, show_default=True, metavar="N",
              help="Changes of one block that the truth check runs.")
@click.option("--plans", type=click.IntRange(min=3), default=50, show_default=True, metavar="N",
              help="Mixed plans that it runs at each of three byte levels.")
@click.option("--heldout-tokens", type=click.IntRange(min=2), default=8192, show_default=True, metavar="N",
              help="Tokens that every plan is run on, taken evenly from all held-out files.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="Draws tokens of the loss, changes and plans.")
@json_option
@quiet_option
def command(
    out: Path,
    text: tuple[Path, ...],
    weights: tuple[float, ...],
    heldout: tuple[Path, ...],
    tokens: int | None,
    sequence_length: int | None,
    report_file: Path,
    check_only: bool,
    truth: bool,
    changes: int,
    plans: int,
    heldout_tokens: int,
    seed: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Calibrate the quantized model OUT anew, and check what its tables say against measured loss.

    The tables in OUT are replaced; codes and weights stay. The damage form whose plans lose least on the held-out text
    becomes the model's default. A run that was stopped goes on when the same command is given again: what is
    calibrated is kept beside OUT, what is measured in REPORT.measurements.jsonl.
    """
    if check_only and (text or weights or tokens or sequence_length):
        raise UsageError(
            "--check-only keeps the tables of the model: leave out --text, --weight, --tokens and --sequence-length"
        )
    if weights and len(weights) != len(text):
        raise UsageError(f"--weight must be given once for each --text: {len(weights)} for {len(text)}")
    from pwjax import calibration_report, environment
    from pwjax.calibration import discard
    from pwjax.calibration_text import SEQUENCE_LENGTH, TOKENS
    from pwjax.checkpoints.artifact import Artifact
    from pwjax.evaluate import heldout_documents, read_documents
    from pwjax.evaluate.truth import check_truth

    environment.enable_compile_cache()
    wanted = (not check_only and not text) or (truth and not heldout)
    modules = heldout_documents() if wanted else []

    def note(sentence: str) -> None:
        if not quiet:
            click.echo(sentence, err=True)

    if not text and not check_only:
        note(NO_TEXT)
    residual, found, bars = None, None, Bars(False if quiet else None)
    try:
        if not check_only:
            residual = calibration_report.recalibrate(
                out, list(text) or [document.text for document in modules[::2]], tokens=tokens or TOKENS,
                sequence_length=sequence_length or SEQUENCE_LENGTH, weights=weights or None, seed=seed, progress=bars,
                note=note,
            )  # fmt: skip
        artifact = Artifact.open(out)
        if truth:
            documents = read_documents([str(file) for file in heldout]) if heldout else modules[1::2]
            found = check_truth(
                artifact, calibration_report.forms(artifact), documents, changes=changes, plans=plans, seed=seed,
                heldout_tokens=heldout_tokens, measurements=report_file.with_suffix(".measurements.jsonl"),
                progress=bars,
            )  # fmt: skip
            if not check_only:
                artifact = calibration_report.choose_default(artifact, found["best"])
    except KeyboardInterrupt:
        raise InterruptedRun("interrupted; what is finished is kept, and the same command goes on from there") from None
    finally:
        bars.close()
    report = calibration_report.build(artifact, found, residual)
    files = calibration_report.write(report, report_file)
    if not check_only:
        discard(out)
    if as_json:
        click.echo(json.dumps(report))
    elif not quiet:
        click.echo(f"wrote {', '.join(map(str, files))}", err=True)
        click.echo(files[1].read_text("utf-8"), nl=False)
