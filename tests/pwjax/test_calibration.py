"""Calibrating while quantizing and afterwards: the same tables, after any kill; experts that no token reached."""

import errno
import itertools
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from calib.anyprecision import dequantize, quantize_block
from planner import price
from pwjax.calibration import calibrate, discard
from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.manifest import TABLES
from pwjax.checkpoints.tables import write_tables
from pwjax.checkpoints.tree import param_shapes, unflatten
from pwjax.config import ModelConfig
from pwjax.errors import ArtifactError, UsageError
from pwjax.quantization import quantize

pytestmark = pytest.mark.usefixtures("quick_programs")

CONFIG = ModelConfig(
    model_type="qwen2_moe", vocab_size=30, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
    num_experts=4, top_k=2, expert_size=8, shared_size=0, norm_topk_prob=True, rms_eps=1e-6, rope_theta=1e4,
    max_positions=32, tie_embeddings=True, qkv_bias=False, bos_token_id=0,
)  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyzABC"
LONG = {"text": np.random.default_rng(3).integers(0, 30, 300), "tokens": 256, "sequence_length": 16}
TEXT = {"text": np.random.default_rng(1).integers(0, 30, 70), "tokens": 32, "sequence_length": 16}


@pytest.fixture(scope="module")
def params():
    """Random; expert 3 of layer 0 is never chosen."""
    rng = np.random.default_rng(0)
    flat = {n: rng.normal(0, 0.3, s).astype(np.float32) for n, s in param_shapes(CONFIG).items()}
    flat["layers/post_norm/scale"] = np.abs(flat["layers/post_norm/scale"]) + 1
    flat["embed/embedding"] = np.abs(flat["embed/embedding"])
    flat["layers/router/kernel"][0, 3] = -9
    return unflatten(flat)


@pytest.fixture(scope="module")
def made(tmp_path_factory, params):
    return quantize(params, CONFIG, tmp_path_factory.mktemp("made") / "a.pw", **TEXT)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_tables_are_finite_and_rare_experts_are_named(made):
    artifact = Artifact.open(made)
    facts, table = artifact.manifest["calibration"], artifact.table()
    assert table.conditional and (table.damage[:, 0] > 0).all() and np.isfinite(table.damage).all()
    assert {"layer": 0, "expert": 3, "tokens": 0} in facts["few_tokens"]
    never = [e for e in facts["few_tokens"] if e["tokens"] == 0]
    assert f"{len(never)} of them none" in facts["warnings"][0]
    assert facts["unrouted"] == [
        f"layer {e['layer']} expert {e['expert']} {name}" for e in never for name in ("gate_up", "down")
    ]
    assert table.floors[6:8].tolist() == [4, 4] and "layer 0 expert 3 down" in facts["floors"]["4"]
    np.testing.assert_allclose(table.routing_rate.sum(1), CONFIG.top_k)
    assert facts["super_additivity"] > 0 and facts["points"] == [6, 4]


@pytest.fixture
def small_batches(monkeypatch):
    """Batches of the size that ``made`` has, whose programs are there."""
    monkeypatch.setattr("calib.stream.BATCH_TOKENS", 64)


def test_codes_and_refined_tables_follow_the_inputs_the_same_way_every_time(tmp_path, params, small_batches):
    plain = quantize(params, CONFIG, tmp_path / "plain.pw", **LONG, refine=False)
    artifact = Artifact.open(plain)
    moments = load_file(plain / TABLES)["moments/gate_up"]
    coded, exact = (artifact.expert_params(b)["gate_up"].astype(np.float64) for b in (2, 16))
    rows = artifact.geometry.shape(0).lut_rows
    uniform = [dequantize(quantize_block(w, None, (2, 3), rows), 2) for w in exact.reshape(-1, *exact.shape[2:])]
    loss = lambda got: float((moments[:, :, None] * (exact - np.reshape(got, exact.shape)) ** 2).sum())  # noqa: E731
    assert loss(coded) < 0.97 * loss(uniform)
    facts = artifact.manifest["calibration"]["quantizer"]
    assert facts["weights"].startswith("mean gate^2") and facts["refined_blocks"] == 0

    refined = [quantize(params, CONFIG, tmp_path / f"{jobs}.pw", **LONG, jobs=jobs) for jobs in (1, 2)]
    assert contents(refined[0]) == contents(refined[1])
    made = Artifact.open(refined[0])
    many = load_file(plain / TABLES)["tokens"].reshape(-1).repeat(2) >= 64
    assert 0 < made.manifest["calibration"]["quantizer"]["refined_blocks"] < 16 and many.any()
    for level in range(3):
        loss = [each.table("output").expected[many, level].sum() for each in (made, artifact)]
        assert loss[0] < loss[1]
    with pytest.raises(UsageError, match="give text as well"):
        quantize(params, CONFIG, tmp_path / "none.pw", refine=True)


def test_an_artifact_is_calibrated_anew_to_the_same_tables(made, tmp_path):
    told = []
    again = calibrate(made, **TEXT, note=told.append)
    old = load_file(made / TABLES)
    assert sorted(again.tables) == sorted(old) and "of memory and" in told[0]
    for name, table in again.tables.items():
        # Quantizing keeps importance in bfloat16 until the codes are made.
        np.testing.assert_allclose(table, old[name], rtol=5e-3 if name == "damage/paper" else 0, err_msg=name)
    measured = again.sequences[4]
    assert measured.by_sequence.shape == (2, 4, 2, 2, 2, 5) and measured.norms.shape == (2, 4, 2, 2, 4)

    # Until its tables are where they belong the work stays, and none of it is done twice.
    work = made.with_name("a.pw.calibrating")
    steps = []
    kept = calibrate(made, **TEXT, progress=lambda *step: steps.append(step))
    assert not steps and all((kept.tables[name] == table).all() for name, table in again.tables.items())
    assert work.exists()
    discard(made)
    assert not work.exists()

    copy = Path(shutil.copytree(made, tmp_path / "copy.pw"))
    write_tables(copy, {**again.tables, "more": np.ones(3)}, {**again.summary, "seed": 5})
    assert Artifact.open(copy).verify() == []
    facts = Artifact.open(copy).manifest["calibration"]
    assert facts["seed"] == 5 and facts["report"] == Artifact.open(made).manifest["calibration"]["report"]


def test_texts_are_kept_apart_for_the_planner(made, tmp_path, monkeypatch):
    rng = np.random.default_rng(5)
    texts = ["".join(LETTERS[i] for i in rng.integers(0, high, 200)) for high in (8, 29)]
    arguments = {"text": texts, "tokenizer": one_token_a_letter(), "tokens": 128, "sequence_length": 16}
    error = itertools.count(0, -1)
    monkeypatch.setattr("calib.residual.judge", lambda *_: {"helps": True, "on": next(error)})
    assert not any("text" in name for name in calibrate(made, **arguments).tables), "64 tokens are no kind of text"
    monkeypatch.setattr("calib.text.LEAST_KIND_TOKENS", 64)
    found = calibrate(made, **arguments)
    discard(made)
    copy = Path(shutil.copytree(made, tmp_path / "copy.pw"))
    write_tables(copy, found.tables, found.summary)
    artifact = Artifact.open(copy)
    assert [text["windows"] for text in artifact.manifest["calibration"]["texts"]] == [4, 4]
    table = artifact.table()
    assert table.kinds.damage.shape == (2, *table.damage.shape)
    assert table.heads.reference.kind_mean.shape == (2, *table.heads.reference.mean.shape)
    # Both texts use nearly the same experts in a random model, so neither is sure.
    first, second = (price(table, usage).mixture for usage in table.kinds.usage)
    assert first[0] > second[0]
    assert artifact.table("output").kinds is not None and Artifact.open(made).table().kinds is None
    assert artifact.table("paper").kinds is None and artifact.table("directional@6").kinds is None
    assert artifact.table("paper").heads.form == "paper"

    # All of it or nothing.
    for name, wrong in {
        "texts/damage/directional": found.tables["texts/damage/directional"].astype(np.float32),
        "texts/routing_rate": None,
        "residual/moments/text_mean": found.tables["residual/moments/text_mean"][:1],
    }.items():
        tables = {n: t for n, t in found.tables.items() if n != name} | ({} if wrong is None else {name: wrong})
        write_tables(copy, tables, found.summary)
        with pytest.raises(ArtifactError, match=name):
            Artifact.open(copy)

    # All tensors that docs/artifact.md lists are there, and as it says.
    document, listed = Path(__file__).parents[2] / "docs" / "artifact.md", {}
    rows = re.findall(r"^\| (`.+?`) \| (\w+)`\[(.+?)\]` \|", document.read_text("utf-8"), re.M)
    for names, dtype, axes in rows:
        listed |= {name: (dtype, axes.count(",") + 1) for name in re.findall("`(.+?)`", names)}
    short = lambda name: re.sub("^(texts/)?damage/.*", r"\1damage/<kind>", name)  # noqa: E731
    assert {short(n): (t.dtype.name, t.ndim) for n, t in found.tables.items()} == listed


def one_token_a_letter() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(["?", *LETTERS])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer


class Killed(BaseException):
    """Stands for a process that is gone: no handler of errors sees it."""


@pytest.mark.parametrize("renamed", [0, 1])
def test_a_write_of_tables_that_is_killed_leaves_the_old_or_the_new_ones(made, tmp_path, monkeypatch, renamed):
    copy = Path(shutil.copytree(made, tmp_path / "copy.pw"))
    tables, replace = load_file(copy / TABLES), os.replace
    left = [renamed]

    def kill(*names):
        if not left[0]:
            raise Killed
        left[0] -= 1
        replace(*names)

    monkeypatch.setattr(os, "replace", kill)
    with pytest.raises(Killed):
        write_tables(copy, tables | {"more": np.ones(3)}, {**Artifact.open(made).manifest["calibration"], "seed": 5})
    monkeypatch.undo()
    artifact = Artifact.open(copy)
    assert artifact.verify() == [] and ("more" in artifact.calibration_tables()) == bool(renamed)
    assert (artifact.manifest["calibration"]["seed"] == 5) == bool(renamed)
    write_tables(copy, tables, artifact.manifest["calibration"])
    assert Artifact.open(copy).verify() == [] and not list(copy.rglob("*.new"))


def test_a_full_disk_leaves_the_old_tables(made, tmp_path, monkeypatch):
    copy = Path(shutil.copytree(made, tmp_path / "copy.pw"))
    before, sync, calls = contents(copy), os.fsync, []

    def full(file):
        calls.append(file)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactError, match=r"cannot write the tables of .*No space left"):
        write_tables(copy, load_file(copy / TABLES), Artifact.open(copy).manifest["calibration"])
    assert len(calls) == 2 and contents(copy) == before


@pytest.mark.slow
def test_killed_at_any_layer_it_goes_on_to_the_same_bytes(tmp_path, params, small_batches):
    steps = []
    made = quantize(params, CONFIG, tmp_path / "count.pw", **LONG, progress=lambda *step: steps.append(step))
    assert Artifact.open(made).manifest["calibration"]["quantizer"]["refined_blocks"]
    rng = np.random.default_rng(2)
    for at in sorted(rng.choice(len(steps), 8, replace=False)):
        left = [int(at)]

        def kill(*_step, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        out = tmp_path / f"{at}.pw"
        with pytest.raises(KeyboardInterrupt):
            quantize(params, CONFIG, out, **LONG, progress=kill)
        quantize(params, CONFIG, out, **LONG)
        assert contents(out) == contents(made), steps[at]


def test_what_cannot_be_calibrated(made, tmp_path, params):
    with pytest.raises(UsageError, match="at least 2 tokens"):
        calibrate(made, [1])
    bare = quantize(params, CONFIG, tmp_path / "bare.pw", fallback=False)
    with pytest.raises(ArtifactError, match="no 16-bit pages"):
        calibrate(bare, **TEXT)
