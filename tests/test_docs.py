"""What the documents show works: Python blocks run, commands parse, links lead somewhere, tables are complete."""

import json
import re
import shlex
from pathlib import Path

import click
import numpy as np
import pytest

from pwjax.checkpoints.artifact import Artifact
from pwjax.cli import COMMANDS, cli
from pwjax.engine.budget import ProgramSizes

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "experiments/**/*.md")
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: str, *languages: str) -> list[tuple[str, int]]:
    """(text, line it starts on) of the fenced blocks of a document in one of ``languages``."""
    text = (ROOT / document).read_text("utf-8")
    found = [m for m in FENCE.finditer(text) if m[1] in languages]
    return [(m[2], text.count("\n", 0, m.start(2)) + 1) for m in found]


def run_python(document: str) -> dict:
    """Run the Python blocks of a document in one namespace, and return it."""
    names = {"__name__": "__docs__"}
    for text, line in blocks(document, "python"):
        # Empty lines in front, so that a traceback names the line of the document.
        exec(compile("\n" * (line - 1) + text, document, "exec"), names)
    return names


def shown_commands(document: str) -> list[str]:
    """Every ``pwjax`` command line of a document, joined where it goes on, without what the shell would do."""
    lines = []
    for text, _ in blocks(document, "sh", "bash", "console"):
        for line in text.replace("\\\n", " ").splitlines():
            lines += [part.strip().removeprefix("$ ") for part in line.split("#")[0].split("&&")]
    return [line for line in lines if re.match(r"(\S+/)?pwjax ", line) and "COMMAND" not in line]


@pytest.fixture
def beside_model(tiny_artifact, tmp_path, monkeypatch) -> Path:
    """A working directory with ``model.pw``; the bundled model is the tiny one, for speed."""
    (tmp_path / "model.pw").symlink_to(tiny_artifact, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pwjax.loading.bundled_model", lambda: tiny_artifact)
    return tmp_path


def test_readme_python_runs(beside_model, capsys, monkeypatch, quick_programs):
    # Sizes of programs are not measured: that would compile them once more.
    monkeypatch.setattr("pwjax.loading.remembered_sizes", lambda *_: ProgramSizes(4 << 20, 1 << 20))
    names = run_python("README.md")
    assert names["logits"].shape == (8, 33, 256) and np.isfinite(names["logits"]).all()
    assert (beside_model / "mine.pw" / "manifest.json").exists()
    assert "release" in capsys.readouterr().out


def test_evaluation_python_runs(capsys):
    found = run_python("docs/evaluation.md")["found"]
    assert found["interval_95"][0] <= found["difference"] <= found["interval_95"][1]
    assert "nats a token, 95 %" in capsys.readouterr().out


@pytest.mark.slow
def test_library_python_runs(beside_model, capsys):
    names = run_python("docs/library.md")
    assert names["epochs"] and [len(one) for one in names["logprobs"]][1] == 3
    assert np.isfinite(names["logits"]).all() and np.isfinite(names["gradient"]["embed"]["embedding"]).all()


def test_the_numpy_reader_equals_ours(beside_model, capsys):
    read_block = run_python("docs/artifact.md")["read_block"]
    artifact = Artifact.open("model.pw")
    with artifact.host_store() as store:
        for bits in artifact.geometry.all_bits:
            for layer, expert, matrix in ((0, 0, 0), (0, 1, 1), (1, 3, 0), (1, 2, 1)):
                ours = artifact.read_block(store, layer, expert, matrix, bits)
                np.testing.assert_array_equal(read_block("model.pw", layer, expert, matrix, bits), ours)


def test_manifest_keys_are_documented(tiny_artifact):
    manifest = json.loads((tiny_artifact / "manifest.json").read_text())
    section = (ROOT / "docs/artifact.md").read_text().split("## manifest.json")[1].split("##")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {key for row in rows for key in re.findall(r"`(\w+)`", row)} == set(manifest)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_parse(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in shown_commands(document):
        _, name, *arguments = shlex.split(line)
        assert name in COMMANDS, line
        # Input that a reader would have: parsing asks for directories and files that exist.
        for argument in arguments:
            if argument == "HF_DIR" or argument.endswith("/hf"):
                Path(argument).mkdir(parents=True, exist_ok=True)
            elif argument.endswith(".txt"):
                Path(argument).parent.mkdir(parents=True, exist_ok=True)
                Path(argument).touch()
        try:
            cli.get_command(click.Context(cli), name).make_context(name, arguments)
        except click.UsageError as error:
            pytest.fail(f"{document}: {line}: {error.format_message()}")


def test_readme_shows_every_command_once():
    rows = re.findall(r"^\| `pwjax (\w+)", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(COMMANDS), "the README's command table has one row a command"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document):
    # `docs/x.md`, `pwjax/engine/meter.py` and the like; a module may be named from its package on.
    text = re.sub(r"```.*?^```", "", (ROOT / document).read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    names = re.findall(r"`([a-z][\w./-]*/[\w-]+\.(?:py|md|json|ya?ml))`", text)
    names += [link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link]
    roots = (ROOT, ROOT / "pwjax", (ROOT / document).parent)
    missing = [name for name in names if not any((root / name).exists() for root in roots)]
    assert not missing, f"{document} names files that are not there: {missing}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_one_word_for_one_thing(document):
    assert not re.search(r"\bKV blocks?\b", (ROOT / document).read_text("utf-8")), "say KV page: a block is a matrix"
