import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pwjax.cli import cli, main
from pwjax.cli.interrupts import Interrupts

SIGNALS = [signal.SIGINT, signal.SIGTERM]


def hit(number):
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # the handler runs between two instructions


@pytest.mark.parametrize("number", SIGNALS)
def test_raises_at_once_unless_deferred_and_restores_the_handler(number):
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        with interrupts.deferred():
            hit(number)
            assert interrupts.requested
            with pytest.raises(KeyboardInterrupt):
                hit(number)
        with pytest.raises(KeyboardInterrupt):
            hit(number)
    assert signal.getsignal(number) is before


def test_a_signal_before_the_deferred_block_is_remembered():
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            hit(signal.SIGINT)
        with interrupts.deferred():
            assert interrupts.requested


def test_nested_and_ignored():
    with Interrupts() as outer, Interrupts() as inner:
        with inner.deferred():
            hit(signal.SIGTERM)
        assert inner.requested and not outer.requested
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            hit(signal.SIGTERM)
            assert not interrupts.requested
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_callback_that_forgets_exceptions_does_not_swallow_the_signal():
    def _xla_gc_callback():
        hit(signal.SIGINT)  # raising here would be "Exception ignored in"

    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        _xla_gc_callback()
        assert not interrupts.requested
        time.sleep(5)


def test_another_thread_changes_nothing():
    def body():
        with Interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    seen = []
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


@pytest.mark.parametrize(
    "ending",
    [
        "exec('raise KeyboardInterrupt')",  # Python would end by SIGINT although it was caught
        "atexit.register(os.abort); raise KeyboardInterrupt",  # XLA may crash while the interpreter ends
    ],
)
def test_an_interrupted_process_has_the_exit_code_whatever_the_interpreter_does_at_its_end(tmp_path, ending):
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, click, pwjax.cli\n"
        "@click.command()\n"
        f"def command(): print('partial', end=''); {ending}\n"
        "pwjax.cli.LazyGroup.get_command = lambda *_: command\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2]), *filter(None, sys.path)])
    environ = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-P", "-m", "pwjax", "doctor"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "partial") and done.stderr.strip() == "error: interrupted"


def test_an_interrupted_import_is_an_interrupt_and_a_broken_one_is_not(monkeypatch, capsys):
    def broken(**_):
        raise ImportError("encountered an error while initializing the extension")

    def interrupted(**_):
        try:
            hit(signal.SIGINT)
        except KeyboardInterrupt:
            broken()

    for behaviour, code, words in ((interrupted, 130, "interrupted"), (broken, 1, "ImportError")):
        monkeypatch.setattr(cli, "main", behaviour)
        assert main(["version"]) == code
        assert words in capsys.readouterr().err
