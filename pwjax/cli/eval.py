"""``pwjax eval``: tasks on local files with their official metrics, under a memory budget; resumable."""

import hashlib
import json

import click

from pwjax.cli.interrupts import Interrupts
from pwjax.cli.options import EngineOptions, engine_options, json_option, quiet_option, results_file, told_once
from pwjax.errors import InterruptedRun, PromptError, UsageError
from pwjax.units import format_bytes


@click.command()
@click.argument("files", nargs=-1)
@engine_options
@click.option("--output", "-o", metavar="FILE", help="JSONL to append records to; a killed run resumes from it.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Take the first N items of each file.")
@click.option("--chat", is_flag=True, help="Put prompts into the model's chat template, where a task allows it.")
@click.option("--shots", type=click.IntRange(min=1), metavar="N", help="GSM8K: solved questions in front of each.")
@click.option("--shots-from", metavar="FILE", help="Where the solved questions are, the first --shots of it.")
@click.option("--needle", metavar="TEXT", help="Hide a code in stretches of this UTF-8 text, and ask for it.")
@click.option("--needle-tokens", type=click.IntRange(min=16), default=512, show_default=True,
              help="Tokens of a stretch; --limit stretches, 20 by default.")
@json_option
@quiet_option
def command(
    files: tuple[str, ...],
    options: EngineOptions,
    output: str | None,
    limit: int | None,
    chat: bool,
    shots: int | None,
    shots_from: str | None,
    needle: str | None,
    needle_tokens: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Score tasks of FILES (JSONL, plain or .gz), whose layout tells what they are.

    Known are LongBench's files, key-value retrieval, GSM8K, minimal pairs (BLiMP), and needle tests made by --needle.
    Answers are generated greedily, or likelihoods compared, by the engine under --memory-budget and --policy.
    """
    if not files and needle is None:
        raise UsageError("give at least one task file, or --needle TEXT")
    if (shots is None) != (shots_from is None):
        raise UsageError("--shots N and --shots-from FILE go together")
    from pwjax import environment
    from pwjax.evaluate.run_tasks import run_items, summarize
    from pwjax.evaluate.tasks import read_items, read_rows, read_shots
    from pwjax.progress import Bars

    environment.enable_compile_cache()
    solved = read_shots(shots_from, shots) if shots_from and shots else []
    items = [item for file in files for item in read_items(file, limit, solved)]
    if solved and all(item.task != "gsm8k" for item in items):
        raise UsageError("--shots go in front of GSM8K's questions, and none of the files has its layout")
    items += _needles(options.model, needle, needle_tokens, limit or 20) if needle else []
    if len({item.id for item in items}) < len(items):
        raise UsageError("two items have the same id; files of one name, or rows of one _id, cannot be told apart")
    bars, records = Bars(enabled=False if quiet else None), []
    told = "\0".join(f"{i.id}\0{i.prompt}\0{i.pair}\0{i.max_tokens}" for i in sorted(items, key=lambda item: item.id))
    bound = {"chat": chat, "items_sha256": hashlib.sha256(told.encode()).hexdigest()}
    with Interrupts() as interrupts, results_file(output, options, **bound) as writer:
        left = [item for item in items if writer is None or item.id not in writer.finished]
        if len(left) < len(items) and not quiet:
            click.echo(f"resuming: {len(items) - len(left)} of {len(items)} results are there", err=True)
        stats = None
        if left:
            with _load(options, quiet) as engine, interrupts.deferred():
                try:
                    for record in run_items(engine, left, chat, lambda: bool(interrupts.requested)):
                        records.append(record)
                        if writer:
                            writer.write(record)
                        bars("scoring items", len(items) - len(left) + len(records), len(items))
                finally:
                    bars.close()
                stats = engine.stats()
    if len(records) < len(left):
        raise InterruptedRun("interrupted" + ("; the same command goes on" if output else ""))
    if output:
        wanted = {item.id for item in items}
        records = [record for _, record in read_rows(output) if record["id"] in wanted]
    result = {
        "tasks": summarize(records),
        "policy": "fixed" if options.bits is not None else options.policy,
        "bits": options.bits,
        "stats": stats,
        "versions": environment.versions(),
    }
    click.echo(json.dumps(result) if as_json else render(result))
    refused = [record for record in records if record["finish_reason"] == "refused"]
    if refused:
        raise PromptError(f"{len(refused)} items were refused, the first {refused[0]['id']!r}: {refused[0]['error']}")


def _needles(model: str | None, path: str, tokens: int, count: int) -> list:
    """Needle items of a text, by the model's own tokens."""
    from pwjax.engine.text import Tokenizer
    from pwjax.evaluate.tasks import needle_items
    from pwjax.evaluate.texts import read_documents
    from pwjax.loading import open_model

    artifact = open_model(model)
    if artifact.tokenizer_path is None:
        raise UsageError(f"{artifact.path} has no tokenizer.json, so text cannot be counted in tokens")
    tokenizer = Tokenizer.load(artifact.tokenizer_path, artifact.config.bos_token_id)
    return needle_items(read_documents([path])[0].text, tokenizer, tokens, count)


def _load(options: EngineOptions, quiet: bool):
    from pwjax.loading import load

    return load(
        options.model, options.memory_budget_bytes, batch=options.batch, context=options.context,
        kv_dtype=options.kv_dtype, policy=options.policy, bits=options.bits,
        report=None if quiet else told_once(lambda what: click.echo(f"compiling {what}", err=True)),
    )  # fmt: skip


def render(result: dict) -> str:
    """The result as a table."""
    lines = [f"{'task':<36} {'items':>6}  metrics"]
    for task, own in result["tasks"].items():
        found = []
        for name, value in own["metrics"].items():
            spread = "" if value["stderr"] is None else f" ± {value['stderr']:.4f}"
            found.append(f"{name} {value['mean']:.4f}{spread}")
        refused = f"  ({own['refused']} refused)" if own["refused"] else ""
        lines.append(f"{task:<36} {own['items']:>6}  {'  '.join(found)}{refused}")
    if stats := result["stats"]:
        memory, precision = stats["memory"], stats["precision"]
        bits = " -> ".join(f"{precision[f'mean_bits_{name}']:.2f}" for name in ("start", "min", "end"))
        budget, peak = (format_bytes(memory[f"{name}_bytes"]) for name in ("budget", "peak"))
        lines.append(f"budget {budget}, peak {peak}, mean bits {bits}")
    return "\n".join(lines)
