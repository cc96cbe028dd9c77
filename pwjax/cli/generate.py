"""``pwjax generate``: text from one prompt, or a JSONL job that can be killed and resumed."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import click

from pwjax.cli.interrupts import Interrupts
from pwjax.cli.options import (
    EngineOptions,
    check_written,
    engine_options,
    json_option,
    quiet_option,
    results_file,
    told_once,
)
from pwjax.errors import InterruptedRun, PromptError, PWJaxError, UsageError
from pwjax.units import format_bytes


@click.command()
@click.argument("prompt", required=False)
@click.option("--prompts", metavar="FILE", help="JSONL of prompts, or - for standard input; see below.")
@click.option("--output", "-o", metavar="FILE", help="JSONL to append results to; a killed job resumes from it.")
@click.option("--chat", is_flag=True, help="Prompts are what a user says: put them into the model's chat template.")
@engine_options
@click.option("--max-tokens", type=int, default=128, show_default=True, help="New tokens at most.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the run; each request derives its own.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="Keep the k most likely tokens; 0 turns it off.")
@click.option("--top-p", type=float, default=1.0, help="Keep the smallest set of this probability; 1 turns it off.")
@click.option("--min-p", type=float, default=0.0, help="Drop tokens below this share of the likeliest; 0: off.")
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-sequence token.")
@click.option("--min-bits", type=int, metavar="N", help="No expert matrix below N bits while a request runs.")
@click.option("--max-damage", type=float, metavar="D", help="Bound on the predicted damage a token; see pwjax plan.")
@click.option("--shadow", type=click.FloatRange(0, 1), metavar="SHARE",
              help="Share of tokens to keep in --log for inspect --shadow. Default: 1/32 where damage is bounded.")
@click.option("--no-prefix-cache", is_flag=True, help="Do not share KV pages among prompts that begin alike.")
@click.option("--skip-bad-lines", is_flag=True, help="Leave out lines of --prompts that are no requests.")
@click.option("--stats", "stats_file", metavar="FILE", help="Write memory, precision and speed of the run as JSON.")
@click.option("--log", metavar="FILE",
              help="Write the epoch log: plans, commits, admissions, as JSON lines. A resumed job keeps the old one.")
@click.option("--profile", metavar="DIR", help="Write a JAX profiler trace of the run to DIR.")
@json_option
@quiet_option
def command(
    prompt: str | None,
    prompts: str | None,
    output: str | None,
    chat: bool,
    options: EngineOptions,
    shadow: float | None,
    no_prefix_cache: bool,
    skip_bad_lines: bool,
    stats_file: str | None,
    log: str | None,
    profile: str | None,
    min_bits: int | None,
    max_damage: float | None,
    as_json: bool,
    quiet: bool,
    **sampling: Any,
) -> None:
    """Continue PROMPT (or - for standard input), or every prompt of a JSONL file.

    A line of --prompts is a JSON string, or an object with "prompt", "prompt_token_ids" or "messages" (a chat, as in
    [{"role": "user", "content": "Hello"}]), and optionally "id", "min_bits", "max_damage" and sampling fields such as
    "max_tokens", "temperature", "seed", "stop", "stop_token_ids", "logprobs".
    """
    if (prompt is None) == (prompts is None):
        raise UsageError("give one prompt, or --prompts FILE" + (", not both" if prompt is not None else ""))
    if output and not prompts:
        raise UsageError("--output keeps the results of a job: give --prompts FILE as well")
    # Imported late: a typing error should not cost the seconds that JAX takes.
    from pwjax.engine.requests import Request, read_requests, request_seed
    from pwjax.engine.sampling import SamplingParams

    run_seed = sampling.pop("seed")
    defaults = SamplingParams(**{**sampling, "seed": run_seed, "stop": tuple(sampling["stop"])})
    if prompts is not None:
        requests = read_requests(prompts, defaults, skip_bad_lines=skip_bad_lines)
    else:
        text = _standard_input() if prompt == "-" else prompt
        requests = [Request(0, text, None, defaults.with_fields(seed=request_seed(run_seed, 0)))]
    if shadow and log is None:
        raise UsageError("--shadow keeps a sample in the epoch log: add --log FILE")
    check_written({"--stats": stats_file, "--log": log}, kept={"--prompts": prompts, "--output": output})
    requests = [
        replace(r, min_bits=min_bits if r.min_bits is None else r.min_bits,
                max_damage=max_damage if r.max_damage is None else r.max_damage)
        for r in requests
    ]  # fmt: skip
    requests = _rendered(requests, chat, options.model)
    total, refused = len(requests), {}

    demand = {"min_bits": min_bits, "max_damage": max_damage}
    sampling = {name: getattr(defaults, name) for name in defaults.field_names()}
    with Interrupts() as interrupts, results_file(output, options, sampling=sampling, **demand) as writer:
        if writer:
            known = [r.key for r in requests]
            # Refused again, as it were: the exit code of a job does not depend on how often it was resumed.
            refused = {key: writer.refused[key] for key in known if key in writer.refused}
            requests = writer.left(requests)
            if len(requests) < total and not quiet:
                nothing = "" if requests else ", nothing is left to do"
                click.echo(f"resuming: {total - len(requests)} of {total} results are there{nothing}", err=True)
            if not requests:
                return _raise_refused(refused)
            if log and writer.finished and Path(log).is_file():
                earlier = _set_aside(Path(log))
                click.echo(f"the log of the run that stopped is now {earlier}", err=True)
        with _load(options, run_seed, log, quiet, not no_prefix_cache, shadow) as engine:
            emit = _Emitter(as_json, writer, single=prompts is None)
            began = time.perf_counter()
            bar = _bar(len(requests), show=prompts is not None and not quiet)
            with bar as bar, _trace(profile), interrupts.deferred():
                for request in requests:
                    engine.submit(request)
                # Not engine.stream: what a step has finished is kept, then the run may end.
                while not (engine.idle or interrupts.requested):
                    for event in engine.step():
                        emit(event, bar)
            emit.finish()
            interrupted = not engine.idle
            stats = engine.stats()
            transfers = stats["transfers"]
            if transfers["failed"]:
                click.echo(_failures(transfers), err=True)
            if not quiet and emit.tokens:
                click.echo(_summary(stats, emit.tokens, time.perf_counter() - began), err=True)
            if stats_file:
                _write_stats(stats_file, stats)
    if interrupted:
        done = f" after {total - len(requests) + emit.count} of {total} requests" if prompts else ""
        raise InterruptedRun(f"interrupted{done}" + ("; the same command goes on" if writer else ""))
    _raise_refused(refused | emit.refused)


def _set_aside(log: Path) -> Path:
    """Give the file another name, the first of ``LOG.1``, ``LOG.2``, … that is free; PWJaxError where that fails."""
    earlier = next(p for n in count(1) if not (p := log.with_name(f"{log.name}.{n}")).exists())
    try:
        return log.rename(earlier)
    except OSError as error:
        raise PWJaxError(f"cannot keep the log of the run that stopped as {earlier}: {error.strerror}") from error


def _standard_input() -> str:
    """All of it, whatever the locale says that its encoding is; PromptError where it is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start + 1}") from error


def _rendered(requests: list, chat: bool, model: str | None) -> list:
    """The requests with messages, or all with a prompt where ``chat``, turned into prompts of the chat template."""
    if chat:
        said = lambda text: ({"role": "user", "content": text},)  # noqa: E731
        requests = [r if r.prompt is None else replace(r, prompt=None, messages=said(r.prompt)) for r in requests]
    if all(r.messages is None for r in requests):
        return requests
    from pwjax.engine.text import Tokenizer
    from pwjax.loading import open_model

    artifact = open_model(model)
    if artifact.tokenizer_path is None:
        raise PromptError(f"{artifact.path} has no tokenizer and so no chat template; give prompt_token_ids")
    tokenizer = Tokenizer.load(artifact.tokenizer_path, artifact.config.bos_token_id)
    return [r.rendered(tokenizer) for r in requests]


class _Emitter:
    """Sends events to standard output and to the results file."""

    def __init__(self, as_json: bool, writer, single: bool):
        self.as_json, self.writer, self.single = as_json, writer, single
        self.count = self.tokens = 0
        self.refused: dict[str, str] = {}
        self._open_line = False

    def __call__(self, event, bar) -> None:
        from pwjax.engine.sequence import Piece

        if isinstance(event, Piece):
            if self.single and not self.as_json:
                sys.stdout.write(event.text)
                sys.stdout.flush()
                self._open_line = True
            return
        self.count += 1
        self.tokens += event.generated_tokens
        if event.finish_reason == "refused":
            self.refused[str(event.id)] = str(event.error)
        if self.writer:
            self.writer.write(event.to_json())
        if self.as_json and (not self.writer):
            click.echo(json.dumps(event.to_json()))
        elif not self.single and not self.writer:
            click.echo(f"[{event.id}] {event.text}")
        if bar:
            bar.update()

    def finish(self) -> None:
        """End the streamed line."""
        if self._open_line:
            sys.stdout.write("\n")
        sys.stdout.flush()


def _load(
    options: EngineOptions, seed: int, log: str | None, quiet: bool, prefix_cache: bool, shadow: float | None
):
    """The engine, with what is compiled and loaded told on standard error."""
    from pwjax import environment
    from pwjax.loading import load

    environment.enable_compile_cache()
    engine = load(
        options.model,
        options.memory_budget_bytes,
        batch=options.batch,
        context=options.context,
        kv_dtype=options.kv_dtype,
        policy=options.policy,
        bits=options.bits,
        seed=seed,
        prefix_cache=prefix_cache,
        shadow=shadow,
        log=log,
        report=None if quiet else told_once(lambda what: click.echo(f"compiling {what}", err=True)),
    )
    if not quiet and engine.parts.shapes.slots < options.batch:
        click.echo(f"note: the budget leaves room for {engine.parts.shapes.slots} sequences at a time", err=True)
    return engine


@contextmanager
def _bar(total: int, show: bool) -> Iterator[Any]:
    """A progress bar on a terminal."""
    from tqdm import tqdm

    with tqdm(total=total, unit="request", file=sys.stderr, disable=None if show else True) as bar:
        yield bar


@contextmanager
def _trace(directory: str | None) -> Iterator[None]:
    """A profiler trace of the body, where a directory is given; PWJaxError where it cannot be written."""
    if directory is None:
        yield
        return
    import jax

    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(directory)
    except Exception as error:
        raise PWJaxError(f"cannot write a profiler trace to {directory}: {error}") from error
    try:
        yield
    finally:
        jax.profiler.stop_trace()


def _raise_refused(refused: dict[str, str]) -> None:
    """PromptError that names the first requests that could not run, where there are any."""
    if refused:
        named = [f"request {key!r} was refused: {reason}" for key, reason in list(refused.items())[:3]]
        more = [f"and {len(refused) - 3} more"] if len(refused) > 3 else []
        raise PromptError("; ".join(named + more))


def _write_stats(path: str, stats: dict) -> None:
    try:
        Path(path).write_text(json.dumps(stats, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise PWJaxError(f"cannot write the statistics to {path}: {error.strerror}") from error


def _failures(transfers: dict) -> str:
    """Told even with --quiet: the results are right, but the precision is not what the budget allows."""
    stuck = transfers["blocks_given_up"]
    stuck = f"; {stuck} expert matrices kept their bits for good" if stuck else ""
    return f"warning: {transfers['failed']} copies of expert pages failed{stuck} ({transfers['last_failure']})"


def _summary(stats: dict, tokens: int, seconds: float) -> str:
    memory, precision = stats["memory"], stats["precision"]
    bits = f"{precision['mean_bits_start']:.2f}"
    if precision["epochs"] > 1:
        bits += f" -> {precision['mean_bits_min']:.2f} -> {precision['mean_bits_end']:.2f}"
    return (
        f"{tokens} tokens in {seconds:.1f} s ({tokens / max(seconds, 1e-9):.1f} tokens/s), "
        f"budget {format_bytes(memory['budget_bytes'])}, peak {format_bytes(memory['peak_bytes'])}, mean bits {bits}"
    )
