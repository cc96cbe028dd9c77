"""``pwjax bench kernels``: how fast the kernels are on this machine, beside dense XLA in the same run."""

import json
import os

import click

from pwjax.cli.options import json_option, quiet_option
from pwjax.presets import PRESETS

# Sequences of which attention is measured, at most.
MOST_SLOTS = 8


@click.group()
def command() -> None:
    """Measure speed on this machine."""


def _numbers(_ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(f"expected positive numbers with commas between them, got {value!r}", param=param)
    return numbers


@command.command()
@click.option("--preset", type=click.Choice(PRESETS), default=PRESETS[0], show_default=True,
              help="Model whose expert is measured.")
@click.option("--tokens", callback=_numbers, default="1,8,64", show_default=True, help="Tokens an expert gets.")
@click.option("--bits", callback=_numbers, default="3,4,6,16", show_default=True, help="Precisions.")
@click.option("--backend", "backends", multiple=True, help="Implementation; repeatable. Default: all that work here.")
@click.option("--context", type=click.IntRange(min=1), default=1024, show_default=True,
              help="Tokens that attention looks back on, in as many sequences as --tokens says; up to 8 are measured.")
@click.option("--seconds", type=click.FloatRange(min=0.01), default=1.0, show_default=True,
              help="Time for each form; all take turns, five turns at least.")
@json_option
@quiet_option
def kernels(preset: str, tokens: tuple[int, ...], bits: tuple[int, ...], backends: tuple[str, ...], context: int,
            seconds: float, as_json: bool, quiet: bool) -> None:  # fmt: skip
    """Time one expert's gate_up, activation and down, and one layer's attention of a decode step, on weights and KV
    that no cache holds.

    Speedups are against the fastest of three dense forms in bfloat16 and in float32, medians of the same turns. On a
    machine that is busy, times are those of a busy machine.
    """
    from pallas_kernels.expert_ffn import problems
    from pwjax import environment
    from pwjax.errors import UsageError
    from pwjax.kernel_bench import WIDTHS, bench_expert_ffn, bench_paged_attention
    from pwjax.presets import preset as named

    if wrong := sorted(set(bits) - {*WIDTHS, 16}):
        raise UsageError(f"no {wrong[0]} bits here; choose from {', '.join(map(str, (*WIDTHS, 16)))}")
    known = problems()
    usable = tuple(name for name, problem in known.items() if not problem)
    for name in backends:
        if name not in usable:
            why = known.get(name, "unknown")
            raise UsageError(f"backend {name!r} is unavailable ({why}); choose from {', '.join(usable)}")
    config = named(preset)
    report = lambda line: None if quiet else click.echo(line, err=True)  # noqa: E731
    named_or_all = backends or usable
    rows = bench_expert_ffn(config.hidden_size, config.expert_size, tokens, bits, named_or_all, seconds, report=report)
    slots = tuple(n for n in tokens if n <= MOST_SLOTS)
    rows += bench_paged_attention(config, slots, context, named_or_all, seconds, report)
    if as_json:
        about = {"versions": environment.versions(), "cpu": environment.cpu_info(), "load": os.getloadavg()}
        click.echo(json.dumps({**about, "preset": preset, "rows": rows}))
        return
    click.echo("op               tokens  backend         bits  median ms  vs bf16   vs f32  bandwidth")
    for row in rows:
        click.echo(
            f"{row['op']:<16} {row['tokens']:>6}  {row['backend']:<14} {row['bits']!s:>5} {row['median_ms']:>10.3f} "
            f"{row['speedup_vs_bf16']:>7.2f}x {row['speedup_vs_f32']:>7.2f}x {row['fraction_of_bandwidth']:>10.0%}"
        )
