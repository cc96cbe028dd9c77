"""Checkpoints exchanged with transformers: what either side saves, the other computes the same with, at every width."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'pwjax[hf]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'pwjax[hf]'")

import families  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from pwjax.checkpoints.artifact import Artifact  # noqa: E402
from pwjax.checkpoints.hf import HFCheckpoint, load_hf, save_hf  # noqa: E402
from pwjax.checkpoints.tree import flatten  # noqa: E402
from pwjax.cli.export import export  # noqa: E402
from pwjax.engine.weights import load_weights  # noqa: E402
from pwjax.models import Paged, forward, logits  # noqa: E402
from pwjax.quantization import quantize  # noqa: E402

pytestmark = pytest.mark.parity

TOLERANCE = 2e-4
LENGTHS = np.array([60, 7])
TOKENS = np.random.default_rng(0).integers(0, families.VOCAB - 4, (2, 60), np.int32)
VALID = np.arange(60)[None] < LENGTHS[:, None]


def ours(config, params, paged=None):
    """Logits of the dense form, or of the paged one."""

    @jax.jit
    def run(params, paged):
        return logits(config, params, forward(config, params, TOKENS, jnp.asarray(LENGTHS), paged=paged).hidden)

    return np.asarray(run(params, paged))


def worst(left, right):
    assert np.abs(right[VALID]).max() > 1  # a model that says nothing would agree with everything
    return np.abs(left - right)[VALID].max()


def read_by_transformers(folder):
    """Logits of a checkpoint of ours in float32, after a load that found every tensor and no other."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    # The head of a tied model is the embedding, and in neither file.
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert set(info["missing_keys"]) <= tied
    return families.logits(model.eval(), TOKENS, LENGTHS)


@pytest.fixture(scope="module", params=families.FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def made(family, saved_family, tmp_path_factory):
    """The artifact of a random model at 2 to 4 and 16 bits, with LUT groups so that row scales are at work."""
    _, folder = saved_family(family)
    source = HFCheckpoint(folder).source()
    out = tmp_path_factory.mktemp(family) / "model.pw"
    return Artifact.open(quantize(source.tree(), source.config, out, bits="2-4", lut_rows=4))


def test_import_computes_the_same(family, saved_family):
    model, folder = saved_family(family)
    config, params = load_hf(folder)
    assert worst(ours(config, params), families.logits(model, TOKENS, LENGTHS)) < TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_saving_again_changes_nothing(family, saved_family, tmp_path, dtype):
    model, folder = saved_family(family)
    config, params = load_hf(folder)
    save_hf(tmp_path / "ours", config, params, dtype=dtype, shard_bytes=8_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    assert np.array_equal(read_by_transformers(tmp_path / "ours"), families.logits(model, TOKENS, LENGTHS))


@pytest.mark.parametrize("bits", [2, 4, 16])
def test_export_is_what_the_paged_form_computes(made, tmp_path, bits):
    export(made, tmp_path / "exact", bits, dtype="float32")
    config, params = load_hf(tmp_path / "exact", dtype=np.float32)
    dense = ours(config, params)
    theirs = read_by_transformers(tmp_path / "exact")
    pages = int(made.table().total_pages(bits))
    weights = load_weights(made, np.full(config.blocks, bits), pages + 1, 64)
    try:
        table = weights.page_table.table
        paged = ours(made.config, weights.params, Paged(weights.arena.array, table.bits, table.pages, made.geometry))
    finally:
        weights.close()
    assert worst(dense, theirs) < TOLERANCE and worst(paged, theirs) < TOLERANCE
    # Widths differ by far more than that, and the rounded export by little more.
    exact = ours(made.config, jax.tree.map(np.asarray, made.source().tree()))
    assert worst(exact, theirs) < TOLERANCE if bits == 16 else worst(exact, theirs) > 0.05
    export(made, tmp_path / "rounded", bits)
    assert worst(read_by_transformers(tmp_path / "rounded"), theirs) < 0.1


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_names_that_transformers_holds_in_memory(family, saved_family, tmp_path):
    """Fused experts, as a state dictionary saved by hand has them."""
    from safetensors.torch import save_file

    model, folder = saved_family(family)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    state = {n: v.to(torch.bfloat16).contiguous() for n, v in model.state_dict().items()}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in state)
    save_file(state, tmp_path / "model.safetensors")
    wanted, found = flatten(load_hf(folder)[1]), flatten(load_hf(tmp_path)[1])
    assert all(found[name].tobytes() == value.tobytes() for name, value in wanted.items())


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_wider_checkpoints(family, saved_family, tmp_path, dtype):
    # The values are those of bfloat16, so that every type but float16's range holds them exactly.
    model, folder = saved_family(family)
    families.save(model, tmp_path / "wide", dtype)
    notes = []
    _, params = load_hf(tmp_path / "wide", notes.append)
    assert notes == [f"wide holds {dtype} tensors; they are rounded to bfloat16"]
    wanted, found = flatten(load_hf(folder)[1]), flatten(params)
    for name, value in wanted.items():
        if dtype == "float32":
            assert found[name].tobytes() == value.tobytes()
        np.testing.assert_allclose(found[name].astype(np.float32), value.astype(np.float32), atol=1e-6, rtol=1e-2)


def test_the_multimodal_checkpoint(tmp_path):
    model = families.build("gemma4", multimodal=True)
    families.save(model, tmp_path / "hf")
    notes = []
    config, params = load_hf(tmp_path / "hf", notes.append)
    assert len(notes) == 1 and "tensors of the vision and audio towers are skipped" in notes[0]
    assert worst(ours(config, params), families.logits(model, TOKENS, LENGTHS)) < TOLERANCE
    # What is written is the text model alone.
    save_hf(tmp_path / "text", config, params)
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] == "gemma4_text"
    assert worst(read_by_transformers(tmp_path / "text"), families.logits(model, TOKENS, LENGTHS)) < TOLERANCE
