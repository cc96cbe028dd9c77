"""The command line: ``pwjax COMMAND``, one module a command, imported when the command is used.

Text and JSON go to standard output, everything else to standard error. Exit codes: 0 done, 1 failed, 2 usage,
130 interrupted. An error is one sentence; ``PWJAX_DEBUG=1`` adds the traceback.
"""

import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import click

from pwjax.cli.interrupts import Interrupts
from pwjax.errors import PWJaxError

# name -> (module that holds `command`, line of the help). The help is here so that `pwjax --help` imports nothing.
COMMANDS = {
    "generate": ("pwjax.cli.generate", "Generate text under a memory budget."),
    "quantize": ("pwjax.cli.quantize", "Quantize a Hugging Face checkpoint."),
    "plan": ("pwjax.cli.plan", "Show what fits a memory budget, without loading weights."),
    "calibrate": ("pwjax.cli.calibrate", "Check what fewer bits cost, block by block."),
    "ppl": ("pwjax.cli.ppl", "Measure perplexity on text."),
    "eval": ("pwjax.cli.eval", "Score tasks on local files."),
    "bench": ("pwjax.cli.bench", "Measure how fast a model, or its kernels, are here."),
    "inspect": ("pwjax.cli.inspect", "Summarize or verify a quantized model."),
    "replay": ("pwjax.cli.replay", "Repeat a logged run and compare every token."),
    "export": ("pwjax.cli.export", "Write a quantized model as a Hugging Face checkpoint."),
    "doctor": ("pwjax.cli.doctor", "Show versions, devices and what works on this machine."),
    "version": ("pwjax.cli.version", "Print the version."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called; importing JAX takes longer than a help text should."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which a new user meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command; None if there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(COMMANDS[cmd_name][0]).command

    def resolve_command(self, ctx: click.Context, args: list[str]):
        """As click does it, but an unknown name is told the known ones."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"unknown command {args[0]!r}; choose from {', '.join(COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from pwjax.environment import package_version

        click.echo(f"pwjax {package_version() or 'source'}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
              help="Print the version and exit.")
def cli() -> None:
    """Mixture-of-experts generation in JAX under one memory budget.

    Expert weights give up bits when the KV cache grows and get them back when it shrinks.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's) and return its exit code; never raises."""
    interrupts = Interrupts()
    try:
        with interrupts:
            code = cli.main(args=None if argv is None else list(argv), prog_name="pwjax", standalone_mode=False)
        # A pipe that was closed early shows here, while it can still be handled.
        sys.stdout.flush()
        # click hands ctx.exit(n) back as n, and a command's own return value otherwise.
        return code if isinstance(code, int) and not isinstance(code, bool) else 0
    except click.exceptions.Abort:
        return _fail("interrupted", 130)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "pwjax"
        return _fail(f"{_sentence(error.format_message())} (see '{where} --help')", 2)
    except click.ClickException as error:
        return _fail(_sentence(error.format_message()), error.exit_code)
    except PWJaxError as error:
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # The reader has left, as `| head` does. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as error:
        named = error.filename
        if named is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
            # Writers of files name them in errors of their own.
            named = "standard output"
        return _fail(f"{named}: {error.strerror}" if named and error.strerror else str(error.strerror or error), 1)
    except MemoryError:
        return _fail("out of host memory; lower --memory-budget, --batch or --context", 1)
    except ValueError as error:
        # The lower packages report bad values so, with a sentence of their own.
        return _fail(str(error), 1)
    except Exception as error:
        if isinstance(error, ImportError) and interrupts.requested:  # packages make one of what stops their import
            return _fail("interrupted", 130)
        return _fail(_unexpected(error), 1)


def run() -> NoReturn:
    """:func:`main` as a process: ends with its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A terminal that has no such character gets its number: no result of hours may be lost over a letter.
        sys.stdout.reconfigure(errors="backslashreplace")
    code = main()
    if code == 130:
        # Everything is closed by now. The interpreter's own end would crash where XLA still compiles in a thread of
        # its own, and would end by SIGINT where the interrupt had passed through an exec(), as imports use it.
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _unexpected(error: Exception) -> str:
    text = str(error).strip().splitlines()
    first = text[0] if text else "no message"
    if "RESOURCE_EXHAUSTED" in first:
        return f"out of device memory; lower --memory-budget, --batch or --context ({first})"
    return f"internal error, {type(error).__name__}: {first} (PWJAX_DEBUG=1 shows where)"


def _sentence(text: str) -> str:
    return " ".join(text.split()).removesuffix(".")


def _fail(message: str, code: int) -> int:
    """Print ``error: message`` to standard error, with the traceback if asked for; returns ``code``."""
    try:
        sys.stdout.flush()  # what was produced comes before the reason why there is no more
    except OSError:
        pass
    if os.environ.get("PWJAX_DEBUG") == "1":
        traceback.print_exc()
    click.echo(f"error: {message}", err=True)
    return code
