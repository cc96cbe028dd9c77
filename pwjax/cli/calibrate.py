"""``pwjax calibrate``: damage tables of a quantized model, checked against what running it loses."""

import json
from pathlib import Path

import click

from pwjax.cli.options import json_option, quiet_option
from pwjax.progress import Bars


@click.command()
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--heldout", multiple=True, metavar="FILE",
              help="UTF-8 text for the truth check, other than --text; may be repeated. Default: modules of Python's "
                   "standard library.")
@click.option("--report", "report_file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
              default=Path("report.json"), show_default=True,
              help="Where the report goes; a page to read and pictures are written beside it.")
@click.option("--no-truth", "truth", flag_value=False, default=True, help="Leave out the truth check.")
@click.option("--changes", type=click.IntRange(min=3), default=200, show_default=True, metavar="N",
              help="Changes of one block that the truth check runs.")
@click.option("--plans", type=click.IntRange(min=3), default=50, show_default=True, metavar="N",
              help="Mixed plans that it runs at each of three byte levels.")
@click.option("--heldout-tokens", type=click.IntRange(min=2), default=8192, show_default=True, metavar="N",
              help="Tokens that every plan is run on, taken evenly from all held-out files.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="Draws changes and plans.")
@json_option
@quiet_option
def command(
    out: Path,
    heldout: tuple[str, ...],
    report_file: Path,
    truth: bool,
    changes: int,
    plans: int,
    heldout_tokens: int,
    seed: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Check the damage tables of the quantized model OUT against measured loss, and report.

    What is measured is kept in REPORT.measurements.jsonl: a check that was stopped goes on from there.
    """
    from pwjax import calibration_report, environment
    from pwjax.checkpoints.artifact import Artifact
    from pwjax.evaluate import heldout_documents, read_documents
    from pwjax.evaluate.truth import check_truth

    environment.enable_compile_cache()
    artifact = Artifact.open(out)
    found = None
    bars = Bars(False if quiet else None)
    try:
        if truth:
            documents = read_documents(heldout) if heldout else heldout_documents()
            found = check_truth(
                artifact, calibration_report.forms(artifact), documents, changes=changes, plans=plans, seed=seed,
                heldout_tokens=heldout_tokens, measurements=report_file.with_suffix(".measurements.jsonl"),
                progress=bars,
            )  # fmt: skip
    finally:
        bars.close()
    report = calibration_report.build(artifact, found)
    files = calibration_report.write(report, report_file)
    if as_json:
        click.echo(json.dumps(report))
    elif not quiet:
        click.echo(files[1].read_text("utf-8"))
