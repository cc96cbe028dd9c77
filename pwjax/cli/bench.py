"""``pwjax bench``: how fast a model is on this machine; ``pwjax bench kernels``: its kernels, beside dense XLA."""

import json
import os

import click

from pwjax.cli.options import (
    DEFAULT_KV_DTYPE,
    DEFAULT_POLICY,
    KV_DTYPES,
    BytesParam,
    json_option,
    quiet_option,
    told_once,
)
from pwjax.presets import PRESETS

# Sequences of which attention is measured, at most.
MOST_SLOTS = 8


def _numbers(_ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(f"expected positive numbers with commas between them, got {value!r}", param=param)
    return numbers


def _sizes(_ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(BytesParam().convert(part, param, _ctx) for part in value.split(","))


@click.group(invoke_without_command=True)
@click.option("--model", "-m", metavar="DIR", help="Quantized model. Default: the bundled demo model.")
@click.option("-p", "prompt", callback=_numbers, default="512", show_default=True, metavar="N,...",
              help="Tokens of a prompt that is taken in.")
@click.option("-n", "new", callback=_numbers, default="128", show_default=True, metavar="N,...",
              help="Tokens that are generated.")
@click.option("-r", "repetitions", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each test.")
@click.option("-o", "output", type=click.Choice(("md", "csv", "json")), default="md", show_default=True,
              help="Form of the result; json has raw samples and the environment.")
@click.option("--bits", callback=lambda c, p, v: _numbers(c, p, v) if v else (), metavar="N,...",
              help="Fixed precisions, in place of a policy.")
@click.option("--policy", "policies", default=DEFAULT_POLICY, show_default=True, metavar="NAME,...",
              help="How precision follows memory pressure.")
@click.option("--memory-budget", "budgets", callback=_sizes, metavar="SIZE,...",
              help="Device memory for everything. Default: what the model needs at its best.")
@click.option("--batch", "-b", "batches", callback=_numbers, default="1", show_default=True, metavar="N,...",
              help="Sequences at a time.")
@click.option("--kv-dtype", type=click.Choice(KV_DTYPES), default=DEFAULT_KV_DTYPE, show_default=True,
              help="Type in which keys and values are kept.")
@quiet_option
@click.pass_context
def command(ctx: click.Context, model: str | None, prompt: tuple[int, ...], new: tuple[int, ...], repetitions: int,
            output: str, bits: tuple[int, ...], policies: str, budgets: tuple[int, ...], batches: tuple[int, ...],
            kv_dtype: str, quiet: bool) -> None:  # fmt: skip
    """Measure speed on this machine: prompts and generation of a model, or (kernels) its kernels.

    Lists are separated by commas, and every combination is a row. On a machine that is busy, rates are those of a busy
    machine.
    """
    if ctx.invoked_subcommand is not None:
        return
    from pwjax import environment
    from pwjax.errors import UsageError
    from pwjax.loading import open_model
    from pwjax.model_bench import Arm, as_csv, as_markdown, bench_model

    artifact = open_model(model)
    widths = artifact.table().widths
    if wrong := sorted(set(bits) - set(widths)):
        raise UsageError(f"this model has no {wrong[0]} bits; choose from {', '.join(map(str, widths))}")
    # The context holds the prompt and a token, or a token and what is generated.
    if (longest := max(*prompt, *new) + 1) > artifact.config.max_positions:
        limit = artifact.config.max_positions
        raise UsageError(f"-p and -n need {longest} tokens of context, but the model takes {limit}; lower them")
    environment.enable_compile_cache()
    precisions = [(b, "uniform") for b in bits] or [(None, name) for name in policies.split(",")]
    arms = [Arm(b, policy, budget, batch) for budget in budgets or (None,) for batch in batches
            for b, policy in precisions]  # fmt: skip
    report = told_once(lambda line: None if quiet else click.echo(line, err=True))
    result = bench_model(model, arms, prompt, new, repetitions, kv_dtype, report)
    if output == "json":
        click.echo(json.dumps(result))
    else:
        click.echo((as_markdown if output == "md" else as_csv)(result["rows"]))


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
