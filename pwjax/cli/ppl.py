"""``pwjax ppl``: perplexity of a model on text, at fixed bits or at the best bits of a budget."""

import json
from collections.abc import Callable

import click

from pwjax.cli.options import BytesParam, json_option, quiet_option, told_once
from pwjax.errors import UsageError
from pwjax.units import format_bytes


@click.command()
@click.option("--model", "-m", metavar="DIR", help="Quantized model. Default: the bundled demo model.")
@click.option("--text", "-t", multiple=True, metavar="FILE",
              help="UTF-8 text, - for standard input; may be repeated. Default: modules of Python's standard library.")
@click.option("--bits", type=int, metavar="N", help="Precision of all experts, one that the model has.")
@click.option("--memory-budget", type=BytesParam(), metavar="SIZE",
              help="Device memory for everything: 10GiB, 10GB or bytes. Default: what it takes.")
@click.option("--policy", type=click.Choice(("static", "uniform")),
              help="How a budget is spent: on the best bits of each block (static, the default) or on one width.")
@click.option("--window", type=int, metavar="TOKENS",
              help="Tokens that the model sees at once. Default: 1024, or the model's limit.")
@click.option("--stride", type=int, metavar="TOKENS",
              help="Distance of windows; tokens of an overlap are context only. Default: the window, no overlap.")
@click.option("--max-bytes", type=click.IntRange(min=1), metavar="N", help="Take the first N bytes of the text.")
@click.option("--max-tokens", type=click.IntRange(min=2), metavar="N", help="Take the first N tokens of the text.")
@click.option("--batch", "-b", type=click.IntRange(min=1), default=4, show_default=True, help="Windows at a time.")
@json_option
@quiet_option
def command(
    model: str | None,
    text: tuple[str, ...],
    bits: int | None,
    memory_budget: int | None,
    policy: str | None,
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
    # Imported late: a typing error should not cost the seconds that JAX takes.
    from pwjax import environment
    from pwjax.evaluate import heldout_documents, measure_perplexity, read_documents
    from pwjax.progress import Bars

    environment.enable_compile_cache()
    documents = read_documents(text, max_bytes) if text else heldout_documents(max_bytes)
    bars = Bars(enabled=False if quiet else None)
    try:
        result = measure_perplexity(
            model, documents, memory_budget, bits=bits, policy=policy or "static", window=window, stride=stride,
            max_tokens=max_tokens, batch=batch, report=None if quiet else _compiling(bars), progress=bars,
        ).to_json()  # fmt: skip
    finally:
        bars.close()
    result["text_source"] = "files" if text else f"standard library of Python {result['versions']['python']}"
    click.echo(json.dumps(result) if as_json else render(result))


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
        ("windows", f"{result['windows']:,} of {result['window']} tokens, stride {result['stride']}, "
                    f"BOS: {result['bos']}"),
        ("experts", f"{result['mean_bits']:.2f} bits a weight (blocks: {counts})"),
        ("memory", f"budget {format_bytes(memory['budget_bytes'])}, peak {format_bytes(memory['peak_bytes'])}"),
    ]  # fmt: skip
    return "\n".join(f"{name:<14} {value}" for name, value in facts)
