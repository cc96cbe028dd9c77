"""The lm-eval adapter against lm-eval's own ``hf`` model on the exported checkpoint: tasks that need no network."""

import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pwjax[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'pwjax[hf]'")
lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'pwjax[eval]'")

from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from pwjax.checkpoints.artifact import Artifact  # noqa: E402
from pwjax.cli.export import export  # noqa: E402
from pwjax.lm_harness import PWJaxLM  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("quick_programs")]

BITS, CONTEXT = 4, 64
ROWS = [
    {"text": "The quick brown fox", "choices": [" jumps over", " lazy"], "label": 0},
    {"text": "def f(x):", "choices": ["\n    return x", " café", " 42"], "label": 1},
    # Longer than the context: it loses its beginning.
    {"text": "12 + 30 = 42, naïve café. " * 9, "choices": ["The", " fox jumps"], "label": 1},
    {"text": "The lazy dog. ", "choices": ["The quick", "x"], "label": 0},
]
TASKS = {
    "choice": {"output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}",
               "doc_to_target": "label", "metric_list": [{"metric": "acc"}]},
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
                "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]},
    "generate": {"output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{choices[0]}}",
                 "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
                 "metric_list": [{"metric": "exact_match"}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory, tiny_artifact):
    """``{"ours", "hf"}``: what ``simple_evaluate`` returns for each."""
    folder = tmp_path_factory.mktemp("lm_eval")
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, task in TASKS.items():
        shared = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
                  "test_split": "test"}  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps(shared | task))
    export(Artifact.open(tiny_artifact), folder / "hf", BITS, dtype="float32")
    # As the model's own tokenizer.json says, and not what a family's class would make of it.
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps(about))
    ours = PWJaxLM(str(tiny_artifact), batch_size=2, max_length=CONTEXT, bits=BITS, kv_dtype="float32", chunks=(32,))
    theirs = HFLM(str(folder / "hf"), dtype="float32", device="cpu", max_length=CONTEXT - 1, batch_size=2)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    run = lambda model: lm_eval.simple_evaluate(  # noqa: E731
        model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    try:
        return {"ours": run(ours), "hf": run(theirs)}
    finally:
        ours.engine.close()


def responses(result, task):
    return [sample["resps"] for sample in sorted(result["samples"][task], key=lambda sample: sample["doc_id"])]


def test_log_likelihoods_and_greedy_flags(results):
    both = [responses(results[side], "choice") for side in ("ours", "hf")]
    for ours, theirs in zip(*both, strict=True):
        for (mine,), (other,) in zip(ours, theirs, strict=True):
            assert float(mine[0]) == pytest.approx(float(other[0]), abs=2e-3)
            assert str(mine[1]) == str(other[1])
    flat = [float(one[0][0]) for row in both[0] for one in row]
    assert np.ptp(flat) > 1 and results["ours"]["results"]["choice"] == results["hf"]["results"]["choice"]


def test_rolling_log_likelihoods(results):
    both = [responses(results[side], "rolling") for side in ("ours", "hf")]
    values = np.array([[float(row[0][0]) for row in side] for side in both])
    np.testing.assert_allclose(values[0], values[1], rtol=1e-4)


def test_generated_text(results):
    both = [responses(results[side], "generate") for side in ("ours", "hf")]
    assert both[0] == both[1] and any(row[0][0] for row in both[0])
