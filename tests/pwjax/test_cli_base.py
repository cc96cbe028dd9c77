import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pwjax.cli as cli
from pallas_kernels import gpu
from pwjax import environment
from pwjax.cli.options import EngineOptions, engine_options
from pwjax.errors import BudgetError, InterruptedRun, PWJaxError, UsageError
from pwjax.units import format_bytes, parse_bytes

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "JAX_PLATFORMS": "cpu"}


def run(capsys, *argv):
    code = cli.main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    "text, count",
    [
        ("10GiB", 10 * 2**30), ("10GB", 10**10), ("10 gb", 10**10), ("1.5KiB", 1536), ("512MiB", 512 * 2**20),
        ("4096", 4096), ("7B", 7), (" 2TiB ", 2**41), (".5MB", 500_000), (123, 123), ("0.1GB", 10**8),
    ],
)
def test_parse_bytes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text, message",
    [
        ("10G", "could mean two sizes; write 10GiB or 10GB"), ("", "is not a size"), ("lots", "is not a size"),
        ("-1GiB", "is not a size"), ("nan", "is not a size"), ("1e9", "is not a size"), ("1GiBs", "is not a size"),
        ("0", "at least 1 byte"), ("0.2B", "at least 1 byte"), (True, "is not a size"), (-5, "at least 1 byte"),
    ],
)
def test_parse_bytes_rejects(text, message):
    with pytest.raises(UsageError, match=message):
        parse_bytes(text)


@given(st.integers(1, 2**50))
def test_format_bytes_is_read_back_within_rounding(count):
    assert abs(parse_bytes(format_bytes(count)) - count) <= count * 0.006


def test_format_bytes():
    assert [format_bytes(n) for n in (0, 768, 1024, 2**20 - 1, 10**10, -2048)] == [
        "0 B", "768 B", "1.00 KiB", "1.00 MiB", "9.31 GiB", "-2.00 KiB",
    ]


def test_help_lists_every_command_and_imports_no_jax():
    code = "import sys, pwjax.cli as c; assert c.main(['--help']) == 0; assert not {'jax', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in cli.COMMANDS:
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(capsys, name):
    code, out, _ = run(capsys, name, "--help")
    assert code == 0 and out.startswith(f"Usage: pwjax {name}")


def test_usage_errors_exit_2_with_one_line(capsys):
    for argv, words in [
        (["nonsense"], "unknown command 'nonsense'; choose from"),
        (["doctor", "--nonsense"], "--nonsense"),
        (["doctor", "extra"], "extra"),
    ]:
        code, out, err = run(capsys, *argv)
        assert code == 2 and out == "" and err.startswith("error: ") and words in err and err.count("\n") == 1


def test_no_command_shows_the_help(capsys):
    code, out, err = run(capsys)
    assert code == 2 and "doctor" in out + err


def failing(error):
    @click.command()
    def command():
        click.echo("partial")
        raise error

    return command


@pytest.mark.parametrize(
    "error, code, words",
    [
        (UsageError("temperature is wrong"), 2, "error: temperature is wrong\n"),
        (BudgetError("needs at least 2.00 GiB"), 1, "error: needs at least 2.00 GiB\n"),
        (InterruptedRun("stopped; 3 results kept"), 130, "error: stopped; 3 results kept\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (FileNotFoundError(2, "No such file", "x.jsonl"), 1, "error: x.jsonl: No such file\n"),
        (ValueError("lut_rows must divide the rows"), 1, "error: lut_rows must divide the rows\n"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), 1, "error: out of device memory; lower --memory-budget"),
        (ZeroDivisionError("division by zero"), 1, "error: internal error, ZeroDivisionError: division by zero"),
        (MemoryError(), 1, "error: out of host memory"),
    ],
)
def test_errors_are_sentences_and_keep_the_output(capsys, monkeypatch, error, code, words):
    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda *_: failing(error))
    monkeypatch.delenv("PWJAX_DEBUG", raising=False)
    got, out, err = run(capsys, "doctor")
    assert (got, out) == (code, "partial\n")
    assert words in err and "Traceback" not in err
    monkeypatch.setenv("PWJAX_DEBUG", "1")
    assert "Traceback" in run(capsys, "doctor")[2]


def test_a_character_that_the_terminal_lacks_loses_no_output():
    code = (
        "import click, pwjax.cli as c\n"
        "command = click.Command('x', callback=lambda: click.echo('caf\\xe9 \\u2585'))\n"
        "c.LazyGroup.get_command = lambda *_: command\n"
        "c.sys.argv = ['pwjax', 'doctor']\n"
        "c.run()\n"
    )
    env = ENV | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"caf\xe9 \\u2585\n", b"")


def test_a_closed_pipe_is_quiet():
    code = (
        "import sys, click, pwjax.cli as c\n"
        "@click.command()\n"
        "def command():\n"
        "    for _ in range(100000): click.echo('x' * 80)\n"
        "c.LazyGroup.get_command = lambda *_: command\n"
        "sys.exit(c.main(['doctor']))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV)
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(60) == 1


def options(capsys, monkeypatch, *argv):
    @click.command()
    @engine_options
    def command(options):
        click.echo(repr(options))

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda *_: command)
    return run(capsys, "doctor", *argv)


def test_engine_options(capsys, monkeypatch):
    assert options(capsys, monkeypatch)[1] == f"{EngineOptions()!r}\n"
    _, out, _ = options(
        capsys, monkeypatch, "--model", "m.pw", "--memory-budget", "2GiB", "--batch", "3", "--context", "99",
        "--kv-dtype", "float32", "--bits", "4",
    )
    assert out == f"{EngineOptions('m.pw', 2**31, 3, 99, 'float32', 4, 'uniform')!r}\n"
    assert "policy='static'" in options(capsys, monkeypatch, "--policy", "static")[1]


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--memory-budget", "10G"], "'--memory-budget': '10G' could mean two sizes"),
        (["--memory-budget", "0"], "at least 1 byte"),
        (["--batch", "0"], "'--batch'"),
        (["--context", "-1"], "'--context'"),
        (["--bits", "9"], "9 is not a precision; choose from 2, 3"),
        (["--kv-dtype", "int8"], "int8"),
        (["--bits", "4", "--policy", "static"], "--policy static has no effect"),
        (["--policy", "uniform"], "add --bits N"),
    ],
)
def test_engine_options_reject(capsys, monkeypatch, argv, words):
    code, out, err = options(capsys, monkeypatch, *argv)
    assert code == 2 and words in err and out == "" and "\n" not in err.strip()


@pytest.mark.parametrize(
    "argv, words",
    [
        (["generate", "--prompts", "in.jsonl", "--log", "in.jsonl"], "--log would overwrite in.jsonl, the file of --"),
        (["generate", "--prompts", "in.jsonl", "--stats", "./in.jsonl"], "--stats would overwrite ./in.jsonl, the"),
        (["generate", "--prompts", "in.jsonl", "-o", "x", "--log", "x"], "--log would overwrite x, the file of --out"),
        (["generate", "hi", "--stats", "x", "--log", "x"], "--log would overwrite x, the file of --stats"),
        (["generate", "hi", "--stats", "."], "cannot write .: it is a directory"),
        (["generate", "hi", "--log", "no/x"], "cannot write no/x: it is a directory, or its directory does not exist"),
        (["ppl", "--text", "a.txt", "--text", "b.txt", "--save", "b.txt"], "overwrite b.txt, the file of --text b.txt"),
        (["ppl", "--text", "a.txt", "--vs", "b.txt", "--save", "b.txt"], "overwrite b.txt, the file of --vs"),
        (["ppl", "--save", "no/x"], "cannot write no/x: "),
    ],
)
def test_what_could_not_be_written_is_told_before_the_work(capsys, monkeypatch, tmp_path, argv, words):
    monkeypatch.chdir(tmp_path)
    files = {name: tmp_path / name for name in ("in.jsonl", "a.txt", "b.txt")}
    for file in files.values():
        file.write_text('"text"\n')
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1
    assert {file.read_text() for file in files.values()} == {'"text"\n'}


def test_a_place_that_takes_no_file_is_told_before_the_work(capsys, monkeypatch, tmp_path):
    from pwjax.cli.generate import _trace

    (tmp_path / "file").write_text("")
    with pytest.raises(PWJaxError, match="cannot write a profiler trace to"), _trace(str(tmp_path / "file" / "trace")):
        pass
    monkeypatch.setattr(os, "access", lambda *_: False)  # chmod stops nobody who is root
    code, _, err = run(capsys, "ppl", "--save", str(tmp_path / "run"))
    assert code == 2 and "there is no permission to, or the file system is read-only" in err


@pytest.mark.parametrize("argv", [["-"], ["--prompts", "-"]])
def test_standard_input_is_utf8_whatever_the_locale(argv):
    code = f"import sys, pwjax.cli as c; sys.exit(c.main(['generate', *{argv}]))"
    env = ENV | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], input=b'"caf\xe9"', capture_output=True, env=env)
    assert done.returncode == 2 and b"standard input" in done.stderr and b"not UTF-8" in done.stderr


@pytest.mark.parametrize("name", ["PWJAX_KERNELS", "PWJAX_ACTIVATIONS"])
def test_a_variable_that_means_nothing_is_refused_and_told(capsys, monkeypatch, name):
    monkeypatch.setenv(name, "foo")
    code, _, err = run(capsys, "generate", "Once", "--max-tokens", "1", "--quiet")
    assert code == 1 and name in err and "'foo'" in err and ("xla" if name == "PWJAX_KERNELS" else "float32") in err
    report = json.loads(run(capsys, "doctor", "--json")[1])
    assert name in report["environment_problem"] and "'foo'" in report["environment_problem"]
    assert "problem" in run(capsys, "doctor")[1]


def test_doctor_and_version(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("PWJAX_CACHE_DIR", str(tmp_path / "cache"))
    code, out, _ = run(capsys, "doctor", "--json")
    report = json.loads(out)
    assert code == 0 and report["devices"][0]["platform"] and report["versions"]["jax"]
    assert report["kernels"]["expert_ffn/xla"] == report["kernels"]["paged_attention/xla"] == "available"
    state = report["kernels"]["expert_ffn/native"]
    assert state.startswith("unavailable: ") or state in {
        f"available, {name} instructions, {kept} activations"
        for name, kept in (
            ("avx512_bf16", "bfloat16"), ("avx512", "float32"), ("avx2", "float32"), ("portable", "float32")
        )
    }
    # Each cache counts what is its own.
    sizes = {"step sizes": 3, "compiled": 5}
    for name, size in sizes.items():
        assert report["caches"][name]["writable"] and report["caches"][name]["bytes"] == 0
        folder = Path(report["caches"][name]["path"])
        assert folder.parent == tmp_path / "cache"
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"x" * size)
    caches = json.loads(run(capsys, "doctor", "--json")[1])["caches"]
    assert {name: cache["bytes"] for name, cache in caches.items()} == sizes
    _, text, _ = run(capsys, "doctor")
    assert "processor" in text and "GiB" in text
    assert json.loads(run(capsys, "version", "--json")[1])["python"]
    assert run(capsys, "version")[1].startswith("pwjax ")
    assert run(capsys, "--version")[1].startswith("pwjax ")


def test_doctor_names_versions_that_do_not_work_together(capsys, monkeypatch):
    installed = {"jax": "0.12.0.1", "jax-triton": "0.4.1", "triton": "3.9.0"}
    monkeypatch.setattr(gpu, "triton_versions", lambda: installed)
    report = json.loads(run(capsys, "doctor", "--json")[1])
    assert "jax-triton 0.4.1 fails with jax 0.12.0.1" in report["extras_problem"]
    assert report["kernels"]["expert_ffn/triton"].startswith("unavailable: ")
    assert report["extras_problem"] in run(capsys, "doctor")[1]
    installed["jax-triton"] = None  # nobody asked for it
    assert json.loads(run(capsys, "doctor", "--json")[1])["extras_problem"] is None


def test_doctor_survives_a_broken_device(capsys, monkeypatch):
    def broken():
        raise RuntimeError("no driver\nat all")

    monkeypatch.setattr(environment, "devices", broken)
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and "none  no driver at all" in out


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("PWJAX_CACHE_DIR", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment.cache_dir() == tmp_path / "pwjax"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    assert environment.compile_cache_dir() == Path("/elsewhere")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_takes_no_more_is_named():
    code = "import sys, pwjax.cli as c; sys.exit(c.main(['version']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, env=ENV)
    assert (done.returncode, done.stderr) == (1, "error: standard output: No space left on device\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_log_that_takes_no_more_is_named_once():
    from pwjax.engine.log import EpochLog
    from pwjax.errors import PWJaxError

    with pytest.raises(PWJaxError, match="cannot write the log /dev/full: No space left on device"):
        EpochLog("/dev/full", {"versions": {}})
    log = EpochLog(None, {})
    log._file, log._path = open("/dev/full", "w", buffering=1), "x"
    with pytest.raises(PWJaxError, match="cannot write the log x"):
        log.write({"kind": "plan"})
    log.write({"kind": "commit"})
    log.close()
