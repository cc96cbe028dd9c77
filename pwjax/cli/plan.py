"""``pwjax plan``: what a budget gives, byte by byte, without loading weights."""

import json
from typing import Any

import click

from pwjax.cli import plan_table
from pwjax.cli.options import EngineOptions, engine_options, json_option, quiet_option, told_once
from pwjax.errors import UsageError
from pwjax.presets import PRESETS
from pwjax.units import format_bytes

PARTS = {
    "dense_bytes": "parameters that are never paged",
    "table_bytes": "page and KV tables",
    "step_bytes": "compiled step: temporaries and results",
    "commit_bytes": "commits: arguments",
    "staging_bytes": "pages on their way in",
    "arena_bytes": "arena: expert weights and KV cache",
}


@click.command()
@click.option("--preset", type=click.Choice(PRESETS), help="Plan for a published model, from its sizes alone.")
@engine_options
@click.option("--explain", is_flag=False, flag_value="", metavar="[BLOCK]",
              help="Say how the bits were chosen; of BLOCK (a number, or layer.expert.matrix) in full.")
@click.option("--trace", metavar="FILE", help="What would happen: play arrivals and lengths from a JSONL file.")
@click.option("--step-ms", type=float, default=20.0, show_default=True,
              help="With --trace: time of a step, for requests that arrive at a second and for the pace of moves.")
@json_option
@quiet_option
def command(
    preset: str | None, options: EngineOptions, explain: str | None, trace: str | None, step_ms: float, as_json: bool,
    quiet: bool,
) -> None:
    """Show what fits a memory budget: at which bits, with how much room for the KV cache.

    Takes the options of generate, which accepts every budget that is called fitting, on a machine that has as much
    memory; where this one has less, that is told. The exit code is 0 also where the budget is too small; see "fits"
    and "not_here" in the JSON. Programs are compiled once to measure them.

    With --trace, the engine's own scheduler, pages and policy play a trace without weights: requests of
    {"at_step" or "arrival_s", "prompt_tokens", "max_tokens"}, one a line. It tells the peak of memory, the course of
    bits and KV pages, and how many requests are preempted or refused.

    With --preset, or a Hugging Face config.json (or its directory) as --model, the table of bytes at every width comes
    first, and the budget is divided only where one is given.
    """
    config = plan_table.config_of(options, preset)
    model, found = (None, None) if config is None else plan_table.table(config, options, preset)
    if found is not None and options.memory_budget_bytes is None:
        for name, value in (("--explain", explain), ("--trace", trace)):
            if value is not None:
                raise UsageError(f"{name} is about a budget that is divided: add --memory-budget SIZE")
        click.echo(json.dumps(found) if as_json else plan_table.render(found))
        return
    # Imported late: a typing error should not cost the seconds that JAX takes.
    from pwjax import environment
    from pwjax.loading import open_model

    arrivals = None
    if trace is not None:
        from pwjax.engine.trace import read_trace

        if not 1e-3 <= step_ms <= 1e6:  # click lets NaN through
            raise UsageError(f"--step-ms must be from 0.001 to 1000000, got {step_ms:g}")
        arrivals = read_trace(trace, step_ms)
    environment.enable_compile_cache()
    report = None if quiet else told_once(lambda what: click.echo(f"compiling {what}", err=True))
    model = open_model(options.model) if model is None else model
    # Looked up before minutes of compiling, which a wrong number should not cost.
    block = block_number(model.table(), explain) if explain else None
    view, smallest = look(model, options, report)
    summary = summarize(view, smallest, options)
    if explain is not None:
        summary["explain"] = view.plan.explain(block=block)
    if arrivals and summary["fits"]:
        from pwjax.simulate import simulate

        played = simulate(view, arrivals, step_ms / 1000)
        summary["trace"] = {**played.to_json(), "text": played.render()}
    if found is not None:
        summary["bytes"] = found
    text = render(summary) if found is None else f"{plan_table.render(found)}\n\n{render(summary)}"
    click.echo(json.dumps(summary) if as_json else text)


def block_number(table, name: str) -> int:
    """Number of the block that ``name`` means; UsageError where there is none."""
    from planner import find_block

    try:
        return find_block(table, name)
    except ValueError as error:
        raise UsageError(str(error)) from error


def look(artifact, options: EngineOptions, report=None):
    """``(Outlook, smallest budget in bytes)``: the programs that ``generate`` would take, or all asked for.

    The smallest budget is that of the smallest programs, whatever was asked for: what BudgetError would say.
    """
    from pwjax.errors import BudgetError
    from pwjax.loading import outlook

    asked: dict[str, Any] = {
        "batch": options.batch, "context": options.context, "kv_dtype": options.kv_dtype, "policy": options.policy,
        "bits": options.bits, "report": report,
    }  # fmt: skip
    budget = options.memory_budget_bytes
    try:
        view = outlook(artifact, memory_budget_bytes=budget, **asked)
    except BudgetError as error:
        return outlook(artifact, memory_budget_bytes=budget, shrink=False, **asked), error.smallest_budget_bytes
    try:
        outlook(artifact, memory_budget_bytes=1, **asked)
    except BudgetError as error:
        return view, error.smallest_budget_bytes
    raise AssertionError("a budget of one byte was accepted")


def summarize(view, smallest: int, options: EngineOptions) -> dict[str, Any]:
    """JSON-ready facts of an Outlook; ``not_here`` says why this machine cannot run what fits, or is None."""
    from pwjax.loading import device_lack

    shapes, memory, plan = view.shapes, view.memory, view.plan
    fits = memory.budget_bytes >= smallest
    kv_pages = max(0, memory.capacity_pages - plan.pages_after) if fits else 0
    # A policy that moves gives KV all that is not needed at the lowest bits.
    most_pages = max(kv_pages, memory.capacity_pages - memory.weights_min_pages) if fits and view.moves else kv_pages
    return {
        "fits": fits,
        "not_here": device_lack(memory.total_bytes) if fits else None,
        "budget_bytes": memory.budget_bytes,
        "smallest_budget_bytes": smallest,
        "total_bytes": memory.total_bytes,
        "rows": memory.rows,
        "page_bytes": memory.page_bytes,
        "pages_total": memory.num_pages,
        "pages_weights": plan.pages_after,
        "pages_weights_min": memory.weights_min_pages,
        "pages_weights_max": memory.weights_max_pages,
        "histogram": {str(bits): n for bits, n in plan.table.histogram(plan.bits).items()},
        "mean_bits": plan.table.mean_bits(plan.bits),
        "kv_pages": kv_pages,
        "kv_tokens": shapes.kv_tokens(kv_pages),
        "kv_pages_max": most_pages,
        "kv_tokens_max": shapes.kv_tokens(most_pages),
        "sequence_pages": memory.sequence_pages,
        "slots": shapes.slots,
        "slots_asked": options.batch,
        "context": shapes.context,
        "chunks": list(shapes.chunks),
        "decode_tokens": shapes.decode_tokens,
        "kv_dtype": shapes.kv_dtype,
        "policy": "fixed" if options.bits is not None else options.policy,
    }


def render(summary: dict[str, Any]) -> str:
    """The summary as text."""
    lines = [f"{text:<42} {format_bytes(summary['rows'][name]):>12}" for name, text in PARTS.items()]
    # In bytes as well: rounded units read back could fall just short.
    least = summary["smallest_budget_bytes"]
    least = f"the smallest budget that works is {least} bytes ({format_bytes(least)})"
    lines += [f"{name:<42} {format_bytes(summary[f'{name}_bytes']):>12}" for name in ("total", "budget")] + [""]
    if not summary["fits"]:
        lines.append(f"does not fit; {least}")
    else:
        counts = ", ".join(f"{n:,} at {bits}" for bits, n in summary["histogram"].items() if n)
        kv = f"{summary['kv_pages']:,} pages, {summary['kv_tokens']:,} tokens"
        if summary["kv_pages_max"] > summary["kv_pages"]:
            kv += f"; up to {summary['kv_tokens_max']:,} tokens as experts give up bits"
        slots = f"{summary['slots']:,} sequences of at most {summary['context']:,} tokens at a time"
        if summary["slots"] < summary["slots_asked"]:
            slots += f", not {summary['slots_asked']}"
        here = f", but not here, where {summary['not_here']}" if summary["not_here"] else ""
        lines += [
            f"fits{here}; {least}",
            f"experts   {summary['mean_bits']:.2f} bits a weight at the start (blocks: {counts})",
            f"policy    {summary['policy']}",
            f"KV cache  {kv}",
            f"slots     {slots}",
        ]
    if "explain" in summary:
        lines += ["", summary["explain"]]
    if "trace" in summary:
        lines += ["", summary["trace"]["text"]]
    return "\n".join(lines)
