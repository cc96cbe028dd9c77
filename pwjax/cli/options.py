"""Options that several commands share, declared once: what ``plan`` calls fitting, ``generate`` accepts."""

import functools
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import click

from pwjax.errors import UsageError
from pwjax.units import parse_bytes

DEFAULT_BATCH = 8
DEFAULT_KV_DTYPE = "bfloat16"
DEFAULT_POLICY = "default"
KV_DTYPES = ("bfloat16", "float32")
BITS = (2, 3, 4, 5, 6, 7, 8, 16)


@dataclass(frozen=True)
class EngineOptions:
    """What decides memory and precision; the same for every command that loads a model.

    ``model`` None is the bundled one; ``memory_budget_bytes`` None is no limit but the machine's; ``context`` tokens
    None is the model's own; ``bits`` set is the fixed precision, and the policy is then ``"uniform"``.
    """

    model: str | None = None
    memory_budget_bytes: int | None = None
    batch: int = DEFAULT_BATCH
    context: int | None = None
    kv_dtype: str = DEFAULT_KV_DTYPE
    bits: int | None = None
    policy: str = DEFAULT_POLICY


def results_file(output: str | None, options: EngineOptions, **more):
    """The results file, bound to everything that results depend on: model, ``options`` and ``more``, JSON-ready.

    A context manager; of None where there is no ``output``.
    """
    if output is None:
        return nullcontext()
    # Imported late: a typing error should not cost the seconds that JAX takes.
    from pwjax.engine.output import ResultWriter
    from pwjax.loading import model_identity, open_model

    settings = {**vars(options), "model": model_identity(open_model(options.model)), **more}
    return ResultWriter(Path(output), settings)


def check_written(files: Mapping[str, str | None], kept: Mapping[str, str | None]) -> None:
    """UsageError, before hours of work, where ``files`` could not be written, or would overwrite what they must not.

    Both map options to paths, None where an option is not given: not ``kept`` files, and not one another.
    """
    taken = {Path(path).resolve(): option for option, path in kept.items() if path}
    for option, path in files.items():
        if not path:
            continue
        target = Path(path).resolve()
        if target.is_dir() or not target.parent.is_dir():
            raise UsageError(f"cannot write {path}: it is a directory, or its directory does not exist")
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            raise UsageError(f"cannot write {path}: there is no permission to, or the file system is read-only")
        if target.exists() and not target.is_file():
            continue  # a device or pipe takes from everyone
        if target in taken:
            raise UsageError(f"{option} would overwrite {path}, the file of {taken[target]}; name another")
        taken[target] = option


class BytesParam(click.ParamType):
    """A click option type that gives an int of bytes."""

    name = "size"

    def convert(self, value, param, ctx):
        """Parse, and let click name the option in the error."""
        try:
            return parse_bytes(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


def engine_options(function: Callable) -> Callable:
    """Add the shared options to a command, which receives them as one ``options: EngineOptions``."""

    @functools.wraps(function)
    def command(*args, model, memory_budget, batch, context, kv_dtype, bits, policy, **rest):
        if bits is not None and policy not in (None, "uniform"):
            raise UsageError(f"--bits {bits} fixes the precision, so --policy {policy} has no effect; give one of them")
        policy = "uniform" if bits is not None else policy or DEFAULT_POLICY
        if policy == "uniform" and bits is None:
            raise UsageError("--policy uniform needs the precision: add --bits N")
        options = EngineOptions(model, memory_budget, batch, context, kv_dtype, bits, policy)
        return function(*args, options=options, **rest)

    for decorate in reversed(_ENGINE_OPTIONS):
        command = decorate(command)
    return command


def json_option(function: Callable) -> Callable:
    """``--json``: machine-readable output; the command receives ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def quiet_option(function: Callable) -> Callable:
    """``--quiet``: no progress and no summary; the command receives ``quiet``."""
    return click.option("--quiet", "-q", is_flag=True, help="No progress bar and no summary.")(function)


def told_once(report: Callable[[str], None]) -> Callable[[str], None]:
    """``report`` without repetitions: a program is compiled to be measured, then again at its size."""
    told: set[str] = set()

    def once(what: str) -> None:
        if what not in told:
            told.add(what)
            report(what)

    return once


def _bits(_ctx, _param, value: int | None) -> int | None:
    if value is not None and value not in BITS:
        raise click.BadParameter(f"{value} is not a precision; choose from {', '.join(map(str, BITS))}")
    return value


_ENGINE_OPTIONS = (
    click.option("--model", "-m", metavar="DIR", help="Quantized model. Default: the bundled demo model."),
    click.option("--memory-budget", type=BytesParam(), metavar="SIZE",
                 help="Device memory for everything: 10GiB, 10GB or bytes. Default: what the model needs at its best."),
    click.option("--batch", "-b", type=click.IntRange(min=1), default=DEFAULT_BATCH, show_default=True,
                 help="Sequences that run at the same time."),
    click.option("--context", "-c", type=click.IntRange(min=1), metavar="TOKENS",
                 help="Longest sequence, prompt and new tokens. Default: the model's own limit."),
    click.option("--kv-dtype", type=click.Choice(KV_DTYPES), default=DEFAULT_KV_DTYPE, show_default=True,
                 help="Type in which keys and values are kept."),
    click.option("--bits", type=int, callback=_bits, metavar="N",
                 help="Fixed precision of the experts, one of 2-8 or 16, in place of a policy."),
    click.option("--policy", metavar="NAME",
                 help=f"How precision follows memory pressure. Default: {DEFAULT_POLICY}."),
)
