"""``pwjax replay LOG``: run a logged job again and check that it gives the same tokens."""

import json

import click

from pwjax.cli.options import json_option, quiet_option, told_once


@click.command()
@click.argument("log", metavar="LOG")
@click.option("--model", "-m", metavar="DIR", help="Quantized model. Default: the one that the log names.")
@json_option
@quiet_option
def command(log: str, model: str | None, as_json: bool, quiet: bool) -> None:
    """Repeat the run whose epoch log (generate --log) is LOG, and compare everything, token by token.

    Requests, plans and the order in which copies landed come from the log, not from the clock. Another model, machine,
    version or setting is refused. Exit code 1 with the first difference where the run does not repeat.
    """
    from pwjax import environment
    from pwjax.engine.replay import replay

    environment.enable_compile_cache()
    report = None if quiet else told_once(lambda what: click.echo(f"compiling {what}", err=True))
    done = replay(log, model, report=report)
    if as_json:
        click.echo(json.dumps({**done.__dict__, "equal": True}))
        return
    end = "" if done.complete else "; the log has no end (the run was killed), so it was repeated as far as it goes"
    click.echo(
        f"repeated {done.requests} requests, {done.tokens} tokens and {done.commits} commits over {done.boundaries} "
        f"boundaries: all token ids and records are equal{end}"
    )
