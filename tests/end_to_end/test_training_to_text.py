"""The example of the documentation: 50 optax steps, Orbax, quantize, generate, and no Hugging Face file anywhere."""

import runpy
from pathlib import Path

import pytest

from pwjax.checkpoints.artifact import Artifact

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "from_training.py"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    example = runpy.run_path(str(EXAMPLE))
    return folder, example["TEXT"], *example["main"](folder)


@pytest.mark.slow
def test_training_learns_the_text(ran):
    losses = ran[2]
    assert len(losses) == 50 and losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_the_quantized_model_goes_on_with_the_text(ran):
    _, text, _, completion = ran
    assert completion.generated_tokens == 16 and completion.finish_reason == "length"
    assert completion.prompt + completion.text[:12] in text


@pytest.mark.slow
def test_no_hugging_face_files(ran):
    folder = ran[0]
    assert not list(folder.rglob("config.json")) and not list(folder.rglob("model.safetensors"))
    artifact = Artifact.open(folder / "model.pw")
    assert artifact.verify() == [] and artifact.manifest["calibration"]["default"] == "directional"
