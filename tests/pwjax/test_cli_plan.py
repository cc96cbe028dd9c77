"""What ``pwjax plan`` says of a budget is what loading does with it."""

import json

import pytest

import pwjax.cli as cli
from pwjax.checkpoints.artifact import Artifact
from pwjax.errors import BudgetError
from pwjax.loading import outlook


def run(capsys, *argv):
    code = cli.main(["plan", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def plan(capsys, tiny_artifact):
    def run_json(*argv):
        code, out, err = run(capsys, "--model", tiny_artifact, "--batch", 4, "--quiet", "--json", *argv)
        assert code == 0 and err == ""
        return json.loads(out)

    return run_json


def test_without_a_budget_the_best_fits(plan, tiny_artifact):
    found = plan()
    assert found["fits"] and found["mean_bits"] == 16 and found["histogram"]["16"] == 16
    assert sum(found["rows"].values()) == found["total_bytes"] <= found["budget_bytes"]
    assert set(found["rows"]) == {
        "dense_bytes", "table_bytes", "step_bytes", "commit_bytes", "staging_bytes", "arena_bytes"
    }  # fmt: skip
    assert found["pages_weights"] == Artifact.open(tiny_artifact).table().total_pages(16) == 192
    # Four full sequences; a page of 64 words holds eight tokens of 8 words, two layers, K and V.
    assert found["kv_pages"] == 4 * found["sequence_pages"] == 256 and found["kv_tokens"] == 512
    assert found["slots"] == 4 and found["context"] == 128


def test_the_smallest_budget_is_where_loading_begins(plan, tiny_artifact):
    smallest = plan()["smallest_budget_bytes"]
    artifact = Artifact.open(tiny_artifact)
    below = plan("--memory-budget", smallest - 1)
    assert not below["fits"] and below["smallest_budget_bytes"] == smallest and below["kv_pages"] == 0
    with pytest.raises(BudgetError, match=f"needs {smallest} bytes") as caught:
        outlook(artifact, memory_budget_bytes=smallest - 1, batch=4)
    assert caught.value.smallest_budget_bytes == smallest

    exact = plan("--memory-budget", smallest)
    view = outlook(artifact, memory_budget_bytes=smallest, batch=4)
    assert exact["fits"] and exact["total_bytes"] <= smallest and exact["slots"] == view.shapes.slots == 1
    assert exact["kv_pages_max"] == exact["sequence_pages"] == 64
    # A policy that never moves leaves the whole sequence its room from the start.
    static = plan("--memory-budget", smallest, "--policy", "static")
    assert static["fits"] and static["kv_pages"] == 64 and static["pages_weights"] == 48


def test_between_the_bounds_bits_are_mixed_and_kv_can_grow(plan):
    found = plan("--memory-budget", plan()["budget_bytes"] - 250 * 256)
    assert found["fits"] and 2 < found["mean_bits"] < 16
    assert sum(found["histogram"].values()) == 16
    assert found["kv_pages_max"] == found["kv_pages"] + found["pages_weights"] - 48
    static = plan("--memory-budget", found["budget_bytes"], "--policy", "static")
    assert static["kv_pages_max"] == static["kv_pages"] and static["policy"] == "static"


def test_fixed_bits(plan):
    found = plan("--bits", 4)
    assert found["policy"] == "fixed" and found["mean_bits"] == 4 and found["pages_weights"] == 80
    assert found["kv_pages_max"] == found["kv_pages"] == 256
    assert found["smallest_budget_bytes"] > plan("--bits", 2)["smallest_budget_bytes"]
    assert found["kv_dtype"] == "bfloat16"


def test_text(capsys, tiny_artifact):
    arguments = ("--model", tiny_artifact, "--batch", 4, "--quiet")
    code, out, _ = run(capsys, *arguments, "--explain")
    assert code == 0 and "arena: expert weights" in out and "fits; the smallest budget" in out
    assert "The plan meets its target." in out
    code, out, _ = run(capsys, *arguments, "--explain", "0.1.down")
    assert code == 0 and "layer 0 expert 1 down (block 3): 16 bits" in out and "no move: it is at its best" in out
    code, out, _ = run(capsys, *arguments, "--memory-budget", "1KiB")
    assert code == 0 and "does not fit; the smallest budget that works is " in out


def test_a_budget_that_this_machine_lacks_is_told(capsys, plan, tiny_artifact, monkeypatch):
    monkeypatch.setattr("pwjax.environment.memory_bytes", lambda: {"total": 2**30, "available": None})
    most, more = plan("--memory-budget", "1GiB"), plan("--memory-budget", "1025MiB")
    assert most["fits"] and most["not_here"] is None
    # It is still planned: a larger machine may be meant.
    assert more["fits"] and more["not_here"].endswith("has 1.00 GiB") and more["kv_tokens"] > most["kv_tokens"]
    code, out, _ = run(capsys, "--model", tiny_artifact, "--batch", 4, "--quiet", "--memory-budget", "1025MiB")
    assert code == 0 and "fits, but not here, where the device (" in out
    assert f"KV cache  {more['kv_pages']:,} pages, " in out and more["kv_pages"] > 1000
    assert plan("--memory-budget", 1)["not_here"] is None  # it does not fit anywhere


def test_bad_values(capsys, tiny_artifact, tmp_path):
    for argv, code, words in [
        (["--model", tiny_artifact, "--bits", 7], 2, "this model has no 7 bits; choose from 2, 3"),
        (["--model", tiny_artifact, "--context", 129], 2, "from 2 to the model's 128 tokens"),
        (["--model", tiny_artifact, "--policy", "magic"], 2, "unknown policy 'magic'"),
        (["--model", tiny_artifact, "--batch", 4, "--quiet", "--explain", "16"], 2, "there is no block '16'"),
        (["--model", tmp_path / "no.pw"], 1, "no.pw"),
        *((["--model", tiny_artifact, "--trace", "x", "--step-ms", ms], 2, "--step-ms must be from") for ms in
          ("nan", "inf", "0", "1e-300")),
    ]:
        got, out, err = run(capsys, *argv)
        assert got == code and out == "" and words in err and err.count("\n") == 1


def test_a_preset_is_planned_from_its_sizes(capsys):
    code, out, err = run(capsys, "--preset", "gemma-4-26b-a4b", "--json")
    found = json.loads(out)
    assert code == 0 and err == "" and found["layers"] == 30 and found["experts"] == 128
    four = found["expert_bytes"]["4"]
    assert four["plain"]["planes"] == 11_418_992_640 and sum(four["paged"].values()) % found["page_bytes"] == 0
    assert [(kind["window"], kind["token_bytes"]) for kind in found["kv"]] == [(1024, 204_800), (None, 20_480)]
    assert found["sequence_tokens"] == 262_144
    assert found["sequence_bytes"] == 1024 * 204_800 + 262_144 * 20_480
    assert any("normally distributed weights" in note for note in found["notes"])
    assert any("not included: temporaries" in note for note in found["notes"])
    code, out, _ = run(capsys, "--preset", "gemma-4-26b-a4b", "--context", 1000, "--kv-dtype", "float32")
    assert code == 0 and "never paged, bfloat16" in out and "at 1,000 tokens" in out and "400.00 KiB  a token" in out


def test_a_config_is_planned_as_its_preset(capsys, tmp_path):
    from importlib import resources

    text = (resources.files("pwjax") / "data" / "presets" / "qwen1.5-moe-a2.7b.json").read_text()
    (tmp_path / "config.json").write_text(text)
    wanted = json.loads(run(capsys, "--preset", "qwen1.5-moe-a2.7b", "--json")[1])
    for model in (tmp_path, tmp_path / "config.json"):
        found = json.loads(run(capsys, "--model", model, "--json")[1])
        assert {k: v for k, v in found.items() if k != "notes"} == {k: v for k, v in wanted.items() if k != "notes"}
    (tmp_path / "config.json").write_text(text.replace("silu", "relu"))
    for argv, code, words in [
        (["--model", tmp_path], 1, "hidden_act = 'relu' is not supported"),
        (["--model", tmp_path, "--preset", "qwen1.5-moe-a2.7b"], 2, "not both"),
        (["--preset", "gpt"], 2, "gemma-4-26b-a4b"),
        (["--preset", "mixtral-8x7b", "--explain"], 2, "--explain is about a budget that is divided: add --memory-b"),
        (["--preset", "mixtral-8x7b", "--trace", "t.jsonl"], 2, "--trace is about a budget that is divided"),
    ]:
        got, out, err = run(capsys, *argv)
        assert got == code and out == "" and words in err and err.count("\n") == 1


@pytest.mark.slow
def test_a_budget_is_divided_as_for_the_quantized_model(capsys, tmp_path, tiny_config, tiny_params):
    from pwjax.byte_table import expected_geometry
    from pwjax.quantization import quantize

    geometry = expected_geometry(tiny_config)
    groups = (geometry.gate_up.lut_rows, geometry.down.lut_rows)
    made = quantize(tiny_params, tiny_config, tmp_path / "m.pw", lut_rows=groups, page_words=geometry.page_words)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config.to_hf()))
    common = ("--batch", 2, "--context", 64, "--quiet", "--json", "--memory-budget")
    smallest = json.loads(run(capsys, "--model", made, *common, 1)[1])["smallest_budget_bytes"]
    for budget in (smallest - 1, smallest, smallest + (100 << 10)):
        real = json.loads(run(capsys, "--model", made, *common, budget)[1])
        planned = json.loads(run(capsys, "--model", tmp_path / "config.json", *common, budget)[1])
        # Which blocks get more bits depends on their damage, which only the real model knows.
        same = {"fits", "rows", "smallest_budget_bytes", "pages_total", "pages_weights_min", "kv_pages_max", "slots"}
        assert {key: planned[key] for key in same} == {key: real[key] for key in same}
        assert planned["bytes"]["page_bytes"] == real["page_bytes"]
