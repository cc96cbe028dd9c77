"""Artifacts: deterministic, atomic, resumable, and every fault named."""

import errno
import json
import re
import shutil
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pwjax import quantization
from pwjax.checkpoints import writer as writers
from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.manifest import SEAL, file_sha256, sealed
from pwjax.checkpoints.tables import write_tables
from pwjax.checkpoints.tree import EXPERTS, dense_shapes, flatten, param_shapes, unflatten
from pwjax.config import ModelConfig
from pwjax.errors import ArtifactError, CheckpointError, UsageError
from pwjax.loading import bundled_model
from pwjax.models import init_params
from pwjax.quantization import quantize

pytestmark = pytest.mark.usefixtures("quick_programs")

CONFIG = ModelConfig(
    model_type="qwen2_moe", vocab_size=50, hidden_size=32, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=16,
    num_experts=4, top_k=2, expert_size=20, shared_size=24, norm_topk_prob=False, rms_eps=1e-6, rope_theta=1e4,
    max_positions=64, tie_embeddings=False, qkv_bias=True,
)  # fmt: skip
TOKENS = np.random.default_rng(1).integers(0, 50, (3, 24))


def make_params(config=CONFIG, seed=0):
    rng = np.random.default_rng(seed)
    return unflatten(
        {
            name: (rng.standard_t(4, shape) * 0.05).astype(ml_dtypes.bfloat16)
            for name, shape in param_shapes(config).items()
        }
    )


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def params():
    return make_params()


@pytest.fixture(scope="module")
def made(tmp_path_factory, params):
    return quantize(params, CONFIG, tmp_path_factory.mktemp("made") / "out.pw", text=TOKENS)


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made, tmp_path / "copy.pw")


def test_shapes_are_those_of_the_model():
    wanted = jax.tree.map(lambda x: x.shape, jax.eval_shape(lambda: init_params(CONFIG)))
    assert {k: tuple(v) for k, v in flatten(wanted).items()} == param_shapes(CONFIG)


def test_artifact_holds_the_model(made, params):
    artifact = Artifact.open(made)
    assert artifact.config == CONFIG and artifact.geometry.all_bits == (2, 3, 4, 5, 6, 16)
    flat = flatten(params)
    dense = flatten(artifact.dense_params())
    assert sorted(dense) == sorted(dense_shapes(CONFIG))
    assert all(np.array_equal(dense[name].view(np.uint16), flat[name].view(np.uint16)) for name in dense)
    exact = artifact.expert_params(16)
    for name in EXPERTS:
        assert np.array_equal(exact[name.split("/")[-1]], flat[name].astype(np.float32))
    errors = [
        sum(float(((artifact.expert_params(b)[n] - exact[n]) ** 2).sum()) for n in exact)
        for b in artifact.geometry.widths
    ]
    assert errors == sorted(errors, reverse=True)
    assert artifact.verify() == []
    assert artifact.tokenizer_path is None and not made.with_name("out.pw.partial").exists()


def test_table_is_ready_for_the_planner(made):
    table = Artifact.open(made).table()
    assert table.widths == (2, 3, 4, 5, 6, 16) and table.blocks == 24
    assert np.allclose(table.routing_mass.sum(axis=1), 1)
    assert (table.damage[:, 0] > table.damage[:, 4]).all() and (table.damage[:, :5] > 0).all()
    assert set(table.params) == {40 * 32, 32 * 20}
    with pytest.raises(ArtifactError, match="no damage table 'hessian'; it has directional"):
        Artifact.open(made).table("hessian")


def test_calibration_names_the_table_that_the_planner_takes(copy):
    path = copy / "calibration" / "tables.safetensors"
    tables, manifest = load_file(path), json.loads((copy / "manifest.json").read_text())
    tables["damage/output"] = tables["damage/paper"] * 3
    tables["routing_rate"] = np.full((3, 4), 0.5)
    tables["floors"] = np.full(24, 3)
    tables |= {f"residual/{name}": np.zeros((2, 5)) for name in ("confidence", "low", "high")}
    tables["residual/weights"] = np.zeros((2, 5, 4))
    save_file(tables, path)
    manifest["calibration"] |= {"damage": ["paper", "output"], "default": "output"}
    manifest["files"]["calibration/tables.safetensors"] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    (copy / "manifest.json").write_bytes(sealed(manifest))
    artifact = Artifact.open(copy)
    table, paper = artifact.table(), artifact.table(preferred="paper")
    assert artifact.table(preferred="directional").conditional, "what is not there cannot be preferred"
    assert np.allclose(table.expected, 1.5 * paper.expected) and table.conditional and not paper.conditional
    assert (table.floors == 3).all() and table.heads is not None and table.heads.shape == (2, 5)
    assert table.heads.form == "paper"
    energies = {"energy_gate_up": np.full((3, 4, 5, 40), 0.5, np.float16), "energy_down": np.ones((3, 4, 5, 20))}
    moments = {"weights": np.full((2, 5, 1), 0.7), "mean": np.full((24, 5), 2.0), **energies}
    moments |= {name: np.ones((2, 5)) for name in ("confidence", "low", "high")}
    write_tables(copy, tables | {f"residual/moments/{k}": v for k, v in moments.items()}, manifest["calibration"])
    artifact = Artifact.open(copy)
    heads = artifact.table().heads
    assert heads is not None and heads.reference is not None and np.all(heads.weights == 0.7)
    assert np.array_equal(heads.reference.energy_gate_up, energies["energy_gate_up"])
    assert artifact.table("paper").heads.form == "paper", "the paper's residual goes with the paper's table"
    del tables["residual/low"]
    save_file(tables, path)
    manifest["files"]["calibration/tables.safetensors"] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    (copy / "manifest.json").write_bytes(sealed(manifest))
    with pytest.raises(ArtifactError, match="residual/low"):
        Artifact.open(copy).table()


def test_manifest_names_no_machine_and_reports_errors(made):
    manifest = json.loads((made / "manifest.json").read_text())
    calibration = manifest["calibration"]
    assert calibration["damage"][0] == calibration["default"] == "directional"
    assert {"paper", "output", "output@4"} < set(calibration["damage"]) and calibration["windows"] == 3
    assert len(calibration["report"]) == 6 and calibration["report"][0]["relative_error"]["6"] < 1e-2
    assert str(made.parent) not in json.dumps(manifest)
    assert set(manifest["files"]) == set(contents(made)) - {"manifest.json"}


@pytest.mark.parametrize("jobs", [1, 3])
def test_equal_inputs_give_equal_bytes(made, tmp_path, params, jobs):
    again = quantize(
        jax.tree.map(lambda x: x.astype(np.float32), params), CONFIG, tmp_path / "b", text=TOKENS, jobs=jobs
    )
    assert contents(again) == contents(made)


def test_killed_run_resumes_to_the_same_bytes(made, tmp_path, params, monkeypatch):
    seen = []

    def dies(stage, done, total):
        seen.append((stage, done))
        if stage == "quantizing" and done == 12:  # in the second layer
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(params, CONFIG, tmp_path / "out.pw", text=TOKENS, progress=dies)
    assert not (tmp_path / "out.pw").exists()
    with pytest.raises(ArtifactError, match="another model, text or settings"):
        quantize(params, CONFIG, tmp_path / "out.pw", text=TOKENS, bits="2-5")
    seen.clear()
    quantize(params, CONFIG, tmp_path / "out.pw", text=TOKENS, progress=lambda *a: seen.append(a[:2]))
    assert seen[0] == ("quantizing", 9)  # neither calibration nor the first layer again
    assert contents(tmp_path / "out.pw") == contents(made)
    assert [p.name for p in tmp_path.iterdir()] == ["out.pw"]


def test_full_disk_keeps_finished_layers(tmp_path, params, monkeypatch):
    real = writers.LayerFile.add

    def full(self, pages):
        if calls.append(None) or len(calls) > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, pages)

    calls = []
    monkeypatch.setattr(writers.LayerFile, "add", full)
    with pytest.raises(ArtifactError, match=r"disk is full while writing layer_001\.bin; finished layers are kept"):
        quantize(params, CONFIG, tmp_path / "out.pw")
    monkeypatch.undo()
    seen = []
    quantize(params, CONFIG, tmp_path / "out.pw", progress=lambda *a: seen.append(a[1]))
    assert seen[0] == 9 and Artifact.open(tmp_path / "out.pw").verify() == []


def test_disk_space_is_checked_first(tmp_path, params, monkeypatch):
    monkeypatch.setattr(writers.shutil, "disk_usage", lambda _p: SimpleNamespace(free=1 << 20))
    with pytest.raises(ArtifactError, match="not enough disk space"):
        quantize(params, CONFIG, tmp_path / "out.pw")


def test_output_that_is_taken_is_refused(tmp_path, params):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(ArtifactError, match="not an empty directory"):
        quantize(params, CONFIG, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert Artifact.open(quantize(params, CONFIG, tmp_path / "empty", fallback=False)).geometry.all_bits[-1] == 6


def test_two_runs_on_one_output(tmp_path):
    with writers.ArtifactWriter(tmp_path / "o", CONFIG, "key"), pytest.raises(ArtifactError, match="another run"):
        writers.ArtifactWriter(tmp_path / "o", CONFIG, "key")
    assert not list(tmp_path.iterdir())  # nothing was written, nothing is left


def test_without_text_every_weight_counts_once(tmp_path, params):
    artifact = Artifact.open(quantize(params, CONFIG, tmp_path / "o", bits="3-4", lut_rows=(4, 2), page_words=512))
    assert artifact.manifest["calibration"]["damage"] == ["unweighted"]
    assert artifact.geometry.gate_up.lut_rows == 4 and artifact.geometry.page_words == 512
    gap = artifact.expert_params(3)["down"][1, 2] - artifact.expert_params(16)["down"][1, 2]
    assert artifact.table().damage[(1 * 4 + 2) * 2 + 1, 0] == pytest.approx(float((gap**2).sum()), rel=1e-5)
    assert np.array_equal(artifact.table().routing_mass, np.full((3, 4), 0.25))


def test_open_names_files_that_are_missing_or_cut(copy):
    (copy / "pages" / "layer_001.crc32").unlink()
    with open(copy / "pages" / "layer_000.bin", "r+b") as file:
        file.truncate(100)
    (copy / "pages" / "layer_009.bin").touch()
    with pytest.raises(
        ArtifactError, match=r"layer_000\.bin has 100 bytes.*layer_001\.crc32 is missing.*layer_009\.bin does"
    ):
        Artifact.open(copy)
    shutil.rmtree(copy / "calibration")
    with pytest.raises(ArtifactError, match=r"calibration/tables\.safetensors is missing"):
        Artifact.open(copy)


def test_open_names_missing_extra_and_misshapen_tensors(copy):
    dense = load_file(copy / "dense.safetensors")
    dense["layers/router/kernel"] = dense["layers/router/kernel"][:, :2]
    dense["norm/stray"] = dense.pop("norm/scale")
    save_file(dense, copy / "dense.safetensors")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"]["dense.safetensors"]["bytes"] = (copy / "dense.safetensors").stat().st_size
    (copy / "manifest.json").write_bytes(sealed(manifest))
    with pytest.raises(ArtifactError) as caught:
        Artifact.open(copy)
    for words in (
        "norm/scale is missing",
        "norm/stray is not part",
        "router/kernel has the shape [3, 2, 32] instead of [3, 4",
    ):
        assert words in str(caught.value)


def test_a_flipped_bit_outside_of_the_pages_is_found_before_it_is_used(tmp_path):
    copy = tmp_path / "demo.pw"
    shutil.copytree(bundled_model(), copy)
    names = [name for name in Artifact.open(copy).manifest["files"] if not name.startswith("pages/")]
    assert {"dense.safetensors", "calibration/tables.safetensors", "tokenizer.json"} <= set(names)
    for name in names:
        whole = (copy / name).read_bytes()
        data = bytearray(whole)
        data[len(data) // 2] ^= 1
        (copy / name).write_bytes(data)
        with pytest.raises(ArtifactError, match=rf"{re.escape(name)} (is corrupted|has another sha256)"):
            Artifact.open(copy).dense_params()
        (copy / name).write_bytes(whole)


def test_a_flipped_bit_of_the_manifest_is_found_or_changes_nothing(tmp_path):
    copy = tmp_path / "demo.pw"
    shutil.copytree(bundled_model(), copy)
    file, said = copy / "manifest.json", Artifact.open(copy).manifest
    whole, found = file.read_bytes(), 0
    for at in range(0, len(whole), 61):
        data = bytearray(whole)
        data[at] ^= 1 << at % 7
        file.write_bytes(data)
        try:
            there = Artifact.open(copy).manifest
        except ArtifactError:
            found += 1
        else:  # a space became another one, or the seal lost its name
            assert all(there.get(name) == value for name, value in said.items() if name != SEAL)
    assert found > len(whole) / 61 / 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(schema=99), "schema 99"),
        (lambda m: m.update(format="x"), "not the manifest"),
        (lambda m: m.pop("files"), "damaged"),
        (lambda m: m["geometry"].update(page_words=4), "damaged"),
        (lambda m: m["config"].update(hidden_size=48), "damaged"),
        (lambda m: m["files"].pop("dense.safetensors"), "not in the manifest"),
        (lambda m: m["files"].update({"../x": {"bytes": 0, "sha256": "0" * 64}}), "outside"),
    ],
)
def test_damaged_manifest(copy, change, words):
    manifest = json.loads((copy / "manifest.json").read_text())
    change(manifest)
    (copy / "manifest.json").write_bytes(sealed(manifest))
    with pytest.raises(ArtifactError, match=words):
        Artifact.open(copy)


def test_open_of_something_else(tmp_path):
    with pytest.raises(ArtifactError, match="no quantized model at"):
        Artifact.open(tmp_path / "nothing")
    with pytest.raises(ArtifactError, match="it has no manifest"):
        Artifact.open(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ArtifactError, match="cannot be read"):
        Artifact.open(tmp_path)


def test_verify_names_the_corrupted_page(copy):
    page_bytes = Artifact.open(copy).geometry.page_bytes
    data = bytearray((copy / "pages" / "layer_002.bin").read_bytes())
    data[5 * page_bytes + 3] ^= 64
    (copy / "pages" / "layer_002.bin").write_bytes(data)
    problems = Artifact.open(copy).verify()
    assert len(problems) == 2 and "sha256" in problems[0] and problems[1].endswith("1 corrupted pages: 5")


def test_params_that_do_not_fit_are_named(tmp_path, params):
    flat = flatten(params)
    flat["layers/router/kernel"] = flat["layers/router/kernel"][:1]
    del flat["norm/scale"]
    with pytest.raises(
        CheckpointError, match=r"norm/scale is missing; layers/router/kernel has the shape \[1, 4, 32\]"
    ):
        quantize(unflatten(flat), CONFIG, tmp_path / "o")
    flat = flatten(params)
    flat["layers/experts/down"] = flat["layers/experts/down"].copy()
    flat["layers/experts/down"][1, 2, 3, 4] = np.nan
    with pytest.raises(CheckpointError, match="layers/experts/down has values that are not finite"):
        quantize(unflatten(flat), CONFIG, tmp_path / "o")
    with pytest.raises(CheckpointError, match="no parameters of this model"):
        quantize({"weights": 1}, CONFIG, tmp_path / "o")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bits", ["2", "2-8", (3, 4, 5), 4, range(2, 7)])
def test_bits_that_can_be(bits):
    widths = quantization.parse_bits(bits)
    assert widths == tuple(range(widths[0], widths[-1] + 1))


@pytest.mark.parametrize("bits", ["1-4", "2-9", "6-2", (2, 4), (), "x", "2-", None])
def test_bits_that_cannot_be(bits):
    with pytest.raises(UsageError, match="contiguous range within 2-8"):
        quantization.parse_bits(bits)


def test_settings_that_cannot_be(tmp_path, params):
    for kwargs, words in (
        ({"lut_rows": 7}, "does not divide the 40 rows of gate_up"),
        ({"lut_rows": "best"}, "auto"),
        ({"lut_rows": (4, 2, 1)}, "a pair of numbers"),
        ({"lut_rows": 2.5}, "a pair of numbers"),
        ({"page_words": 8}, "cannot hold"),
        ({"text": "hello"}, "tokenizer"),
        ({"text": np.array([[1, 50]])}, "token 50 is not in the vocabulary"),
        ({"text": [1]}, "at least 2 tokens"),
        ({"text": tmp_path / "nothing.txt"}, "cannot read the calibration text"),
    ):
        with pytest.raises(UsageError, match=words):
            quantize(params, CONFIG, tmp_path / "o", **kwargs)
    assert not list(tmp_path.iterdir())
