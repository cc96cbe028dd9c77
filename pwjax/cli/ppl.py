"""``pwjax ppl``: perplexity of a model on texts, under a budget, and against another run."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from pwjax.cli.options import (
    DEFAULT_KV_DTYPE,
    KV_DTYPES,
    BytesParam,
    check_written,
    json_option,
    quiet_option,
    told_once,
)
from pwjax.errors import UsageError
from pwjax.units import format_bytes

if TYPE_CHECKING:
    from pwjax.evaluate import Run


@click.command()
@click.option("--model", "-m", metavar="DIR", help="Quantized model. Default: the bundled demo model.")
@click.option("--text", "-t", multiple=True, metavar="FILE",
              help="UTF-8 text, - for standard input; may be repeated. Default: modules of Python's standard library.")
@click.option("--bits", type=int, metavar="N", help="Precision of all experts, one that the model has.")
@click.option("--memory-budget", type=BytesParam(), metavar="SIZE",
              help="Device memory for everything: 10GiB, 10GB or bytes. Default: what it takes.")
@click.option("--policy", metavar="NAME",
              help="How a budget is spent: on the best bits of each block (static, the default) or on one width "
                   "(uniform); with --kv-trace, any policy of generate.")
@click.option("--kv-trace", metavar="N|FILE",
              help="Score through the engine while KV grows: the text is one of N sequences alike, or beside the "
                   "arrivals of a JSONL file, as plan --trace takes them.")
@click.option("--kv-dtype", type=click.Choice(KV_DTYPES), default=DEFAULT_KV_DTYPE, show_default=True,
              help="Type in which keys and values are kept, with --kv-trace.")
@click.option("--vs", metavar="BITS|FILE",
              help="KL divergence, top-1 agreement and paired difference against fixed bits or a run of --save.")
@click.option("--save", metavar="FILE", help="Keep the run, for --vs.")
@click.option("--window", type=int, metavar="TOKENS",
              help="Tokens that the model sees at once. Default: 1024, or the model's limit.")
@click.option("--stride", type=int, metavar="TOKENS",
              help="Distance of windows; tokens of an overlap are context only. Default: the window, no overlap.")
@click.option("--max-bytes", type=click.IntRange(min=1), metavar="N", help="Take the first N bytes of all texts.")
@click.option("--max-tokens", type=click.IntRange(min=2), metavar="N", help="Take the first N tokens of each text.")
@click.option("--batch", "-b", type=click.IntRange(min=1), default=4, show_default=True,
              help="Windows at a time, without --kv-trace.")
@json_option
@quiet_option
def command(
    model: str | None,
    text: tuple[str, ...],
    bits: int | None,
    memory_budget: int | None,
    policy: str | None,
    kv_trace: str | None,
    kv_dtype: str,
    vs: str | None,
    save: str | None,
    window: int | None,
    stride: int | None,
    max_bytes: int | None,
    max_tokens: int | None,
    batch: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure perplexity, with its standard error, and bits per byte.

    Every file is a text of its own, cut into windows; every token is predicted from those before it in its window.
    Without --text, modules of Python's standard library are scored that the bundled model was not trained on.
    Without --bits and --memory-budget, experts are at their widest precision.
    """
    if bits is not None and policy is not None:
        raise UsageError(f"--bits {bits} fixes the precision, so --policy {policy} has no effect; give one of them")
    check_written({"--save": save}, kept={"--vs": vs} | {f"--text {name}": name for name in text})
    # Imported late: a typing error should not cost the seconds that JAX takes.
    from pwjax import environment
    from pwjax.evaluate import KVTrace, compare, heldout_documents, measure_perplexity, read_documents
    from pwjax.loading import open_model
    from pwjax.progress import Bars

    environment.enable_compile_cache()
    artifact = open_model(model)
    trace = None if kv_trace is None else KVTrace.parse(kv_trace)
    reference = _reference(vs, artifact.table().widths)
    documents = read_documents(text, max_bytes) if text else heldout_documents(max_bytes)
    bars = Bars(enabled=False if quiet else None)
    shared = {"window": window, "stride": stride, "max_tokens": max_tokens, "batch": batch, "kv_dtype": kv_dtype,
              "keep": vs is not None or save is not None, "report": None if quiet else _compiling(bars),
              "progress": bars}  # fmt: skip
    try:
        found = measure_perplexity(
            artifact, documents, memory_budget, bits=bits, policy=policy or "static", kv_trace=trace, **shared
        )
        result = found.to_json()
        if isinstance(reference, int):
            # The same way through the model, without the pressure.
            alone = None if trace is None else KVTrace()
            reference = measure_perplexity(artifact, documents, bits=reference, kv_trace=alone, **shared).run
        if found.run is not None and reference is not None:
            result["vs"] = {"reference": vs, **compare(artifact, found.run, reference)}
        if found.run is not None and save is not None:
            found.run.save(save)
    finally:
        bars.close()
    result["text_source"] = "files" if text else f"standard library of Python {result['versions']['python']}"
    click.echo(json.dumps(result) if as_json else render(result))


def _reference(vs: str | None, widths: tuple[int, ...]) -> "int | Run | None":
    """Bits of a reference, or a run from a file. UsageError before anything is measured."""
    from pwjax.evaluate import Run

    if vs is None:
        return None
    if not vs.isdigit():
        return Run.load(vs)
    if int(vs) not in widths:
        raise UsageError(f"this model has no {vs} bits for --vs; choose from {', '.join(map(str, widths))}")
    return int(vs)


def _compiling(bars) -> Callable[[str], None]:
    """Tells what is compiled, without a progress bar in the way."""

    def report(what: str) -> None:
        bars.close()
        click.echo(f"compiling {what}", err=True)

    return told_once(report)


def render(result: dict) -> str:
    """The result as text."""
    error = "unknown, one window" if result["stderr"] is None else f"{result['stderr']:.4f}"
    names = ", ".join(result["text"])
    if result["text_source"] != "files":
        names = f"{result['text_source']}, held out from the bundled model: {names}"
    counts = ", ".join(f"{n} at {bits}" for bits, n in result["histogram"].items() if n)
    memory = result["memory"]
    facts = [
        ("perplexity", f"{result['perplexity']:.4f} ± {error}"),
        ("bits per byte", f"{result['bits_per_byte']:.4f}"),
        ("scored", f"{result['tokens']:,} tokens, {result['bytes']:,} bytes"),
        ("text", names),
        *([("left out", f"{', '.join(left_out)}: under two tokens")] if (left_out := result["left_out"]) else []),
        ("windows", f"{result['windows']:,} of {result['window']} tokens, stride {result['stride']}, "
                    f"BOS: {result['bos']}"),
        ("experts", f"{result['mean_bits']:.2f} bits a weight (blocks: {counts})"),
        ("memory", f"budget {format_bytes(memory['budget_bytes'])}, peak {format_bytes(memory['peak_bytes'])}"),
    ]  # fmt: skip
    if len(result["texts"]) > 1:
        facts += [("", f"{_spread(t, 'perplexity', 'stderr')}  {t['name']}") for t in result["texts"]]
    if trace := result.get("kv_trace"):
        facts.append(("KV trace", f"{trace['sequences']} sequences, up to {memory['pages_kv_peak']} pages; mean bits "
                                  f"{trace['mean_bits_start']:.2f} -> {trace['mean_bits_min']:.2f} -> "
                                  f"{trace['mean_bits_end']:.2f}, {trace['demotions']} demotions, "
                                  f"{trace['promotions']} promotions"))  # fmt: skip
    if vs := result.get("vs"):
        interval = vs["nll"]["interval_95"]
        between = "" if interval is None else f", 95 % {interval[0]:+.5f} to {interval[1]:+.5f}"
        facts += [
            (f"vs {vs['reference']}", f"KL {_spread(vs, 'kl', 'kl_stderr', 6)} nats a token"),
            ("", f"top-1 {_spread(vs, 'top1', 'top1_stderr')} of tokens alike"),
            ("", f"NLL {vs['nll']['difference']:+.5f} nats a token{between}"),
        ]
    return "\n".join(f"{name:<14} {value}" for name, value in facts)


def _spread(values: dict, name: str, error: str, digits: int = 4) -> str:
    spread = "" if values[error] is None else f" ± {values[error]:.{digits}f}"
    return f"{values[name]:.{digits}f}{spread}"
