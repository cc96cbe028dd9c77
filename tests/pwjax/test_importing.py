"""Packs of any-precision-llm become artifacts with the same weights."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.hf import load_hf, save_hf
from pwjax.cli.quantize import command
from pwjax.errors import CheckpointError
from pwjax.importing import import_pack
from pwjax.presets import preset

WIDTHS = (3, 4, 5)
QUANTIZED = re.compile(r".*(experts\.\d+\.\w+_proj|self_attn\.[qo]_proj)\.weight$")


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_config, tiny_params, packed):
    """(original, pack, {name: (codes, {bits: lut})}) of the tiny model, codes and tables random."""
    folder = tmp_path_factory.mktemp("packs")
    original = save_hf(folder / "original", tiny_config, tiny_params)
    rng, tensors, truth = np.random.default_rng(0), {}, {}
    for name, value in load_file(original / "model.safetensors").items():
        if not QUANTIZED.match(name):
            tensors[name] = value.astype(np.float16)
            continue
        stem, (rows, cols) = name.removesuffix(".weight"), value.shape
        codes = rng.integers(0, 1 << WIDTHS[-1], (rows, cols), np.uint8)
        luts = {b: rng.normal(size=(rows, 1 << b)).astype(np.float16) for b in WIDTHS}
        truth[stem] = (codes, luts)
        tensors[f"{stem}.qweight"] = packed(codes, WIDTHS[-1])
        tensors |= {f"{stem}.lut{b}": lut for b, lut in luts.items()}
    pack = folder / "pack"
    pack.mkdir()
    save_file(tensors, pack / "model.safetensors")
    config = json.loads((original / "config.json").read_text())
    arch = {"model_name": "model", "layers_name": "layers", "module_names": []}
    config["anyprec"] = {"seed_precision": 3, "parent_precision": 5, "group_count": 1, "arch_config": arch}
    (pack / "config.json").write_text(json.dumps(config))
    return original, pack, truth


def exact(truth, stem: str, bits: int) -> np.ndarray:
    codes, luts = truth[stem]
    return np.take_along_axis(luts[bits], (codes >> (WIDTHS[-1] - bits)).astype(np.int64), 1).astype(np.float32)


def check_experts(artifact: Artifact, truth) -> None:
    with artifact.host_store() as store:
        for bits in WIDTHS:
            for layer in range(2):
                stem = f"model.layers.{layer}.mlp.experts.3."
                both = np.concatenate([exact(truth, stem + n, bits) for n in ("gate_proj", "up_proj")])
                assert np.array_equal(artifact.read_block(store, layer, 3, 0, bits), both)
                assert np.array_equal(
                    artifact.read_block(store, layer, 3, 1, bits), exact(truth, stem + "down_proj", bits)
                )


def test_pack_keeps_its_weights_and_has_no_16_bits(made, tmp_path, tiny_config):
    _, pack, truth = made
    artifact = Artifact.open(import_pack(pack, tmp_path / "out.pw"))
    assert artifact.geometry.all_bits == WIDTHS and artifact.geometry.shape(0).lut_rows == 1
    check_experts(artifact, truth)
    assert artifact.verify() == []
    q = artifact.dense_params()["layers"]
    name = "model.layers.1.self_attn.q_proj"
    attention = next(v for k, v in q.items() if k.startswith("attn"))
    assert np.array_equal(attention["q"]["kernel"][1], exact(truth, name, 5).astype(attention["q"]["kernel"].dtype))
    table = artifact.table()
    assert (table.damage[:, -1] == 0).all() and (np.diff(table.damage, axis=1) <= 0).all()


def test_original_gives_16_bits_and_exact_dense_weights(made, tmp_path):
    original, pack, truth = made
    result = CliRunner().invoke(command, [str(pack), str(tmp_path / "out.pw"), "--original", str(original), "--json"])
    assert result.exit_code == 0, result.output
    artifact = Artifact.open(tmp_path / "out.pw")
    assert artifact.geometry.all_bits == (*WIDTHS, 16)
    check_experts(artifact, truth)
    params = load_hf(original)[1]["layers"]["experts"]
    assert np.array_equal(artifact.expert_params(16)["down"], params["down"].astype(np.float32))
    assert (artifact.table().damage[:, -1] == 0).all() and (artifact.table().damage[:, -2] > 0).all()


def test_pickles_are_read_without_running_them(made, tmp_path, tiny_config):
    torch = pytest.importorskip("torch")
    _, pack, truth = made
    (tmp_path / "config.json").write_bytes((pack / "config.json").read_bytes())
    tensors = {k: torch.from_numpy(v) for k, v in load_file(pack / "model.safetensors").items()}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    check_experts(Artifact.open(import_pack(tmp_path, tmp_path / "out.pw")), truth)

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"x": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="not loaded"):
        import_pack(tmp_path, tmp_path / "evil.pw")
    assert not (tmp_path / "ran").exists()


def test_broken_packs_are_told_in_a_sentence(made, tmp_path):
    _, pack, _ = made
    tensors, config = load_file(pack / "model.safetensors"), json.loads((pack / "config.json").read_text())
    stem = "model.layers.0.mlp.experts.1.up_proj"

    def attempt(change=(), **facts):
        folder = tmp_path / f"pack{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        save_file(
            {**{k: v for k, v in tensors.items() if k not in change}, **dict(change)}, folder / "model.safetensors"
        )
        (folder / "config.json").write_text(json.dumps({**config, "anyprec": {**config["anyprec"], **facts}}))
        import_pack(folder, folder / "out.pw")

    for change, facts, words in (
        ({f"{stem}.lut4": np.zeros((3, 16), np.float16)}, {}, f"{stem}.lut4 has the shape"),
        ({"stray.qweight": np.zeros((1, 1, 1), np.int32)}, {}, "stray.qweight is not part of this model"),
        ({f"{stem}.lut4": np.full((32, 16), np.nan, np.float16)}, {}, "not finite"),
        ({}, {"parent_precision": 6}, "lut6 is missing"),
        ({}, {"seed_precision": None}, "only nested packs"),
        ({}, {"group_count": 4}, "group_count 4"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(words)):
            attempt(change, **facts)
    # All experts of a Gemma layer are one tensor, which packs have no form for.
    fused = tmp_path / "fused"
    fused.mkdir()
    save_file({"model.norm.weight": np.ones(4, np.float16)}, fused / "model.safetensors")
    gemma = {**preset("gemma-4-26b-a4b").to_hf(), "anyprec": config["anyprec"]}
    (fused / "config.json").write_text(json.dumps(gemma))
    with pytest.raises(CheckpointError, match=r"experts\.\w+_proj is one tensor of \[128, .*, and packs hold matrices"):
        import_pack(fused, fused / "out.pw")
    result = CliRunner().invoke(command, [str(pack), str(tmp_path / "x.pw"), "--bits", "2-6"])
    assert result.exit_code != 0 and "--bits" in str(result.exception)
