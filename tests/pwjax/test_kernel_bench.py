"""``pwjax bench kernels``: the rows that it promises, on a small expert."""

import json

import pytest

from pallas_kernels.expert_ffn import problems
from pwjax import kernel_bench
from pwjax.cli import main

FIELDS = {
    "op", "shape", "backend", "bits", "tokens", "median_ms", "speedup_vs_bf16", "speedup_vs_f32", "bytes",
    "fraction_of_bandwidth",
}  # fmt: skip


def test_rows(monkeypatch):
    monkeypatch.setattr(kernel_bench, "read_bandwidth", lambda: 1e10)
    backends = tuple(name for name, problem in problems().items() if not problem)
    rows = kernel_bench.bench_expert_ffn(64, 32, (2,), (3, 16), backends, seconds=0.001)
    assert all(set(row) == FIELDS for row in rows)
    assert [row["backend"] for row in rows if row["bits"] in (3, 16)] == [*backends, *backends]
    for kind, key in (("bf16", "speedup_vs_bf16"), ("f32", "speedup_vs_f32")):
        fastest = min(row["median_ms"] for row in rows if row["bits"] == kind)
        for row in rows:
            assert row[key] == pytest.approx(fastest / row["median_ms"])
            assert row["fraction_of_bandwidth"] == pytest.approx(row["bytes"] / row["median_ms"] / 1e7)
    by_bits = {row["bits"]: row["bytes"] for row in rows}
    assert by_bits["f32"] == 2 * by_bits["bf16"] == 2 * by_bits[16] == 4 * 3 * 64 * 32


def test_attention_rows(monkeypatch, tiny_config):
    monkeypatch.setattr(kernel_bench, "read_bandwidth", lambda: 1e10)
    backends = tuple(name for name, problem in problems().items() if not problem)
    rows = kernel_bench.bench_paged_attention(tiny_config, (2,), 40, backends, seconds=0.001)
    assert all(set(row) == FIELDS and row["op"] == "paged_attention" and row["tokens"] == 2 for row in rows)
    assert [(row["backend"], row["bits"]) for row in rows[2:]] == [(name, 16) for name in backends]
    kv_bytes = 2 * 2 * 40 * tiny_config.num_kv_heads * tiny_config.head_dim * 2
    assert [row["bytes"] for row in rows] == [kv_bytes, 2 * kv_bytes, *[kv_bytes] * len(backends)]


def test_usage(capsys):
    assert main(["bench", "kernels", "--bits", "9"]) == 2
    assert "choose from 2, 3, 4, 5, 6, 16" in capsys.readouterr().err
    assert main(["bench", "kernels", "--tokens", "1,x"]) == 2
    assert main(["bench", "kernels", "--backend", "tpu"]) == 2
    assert "'tpu' is unavailable" in capsys.readouterr().err


def test_json(capsys, monkeypatch):
    row = dict.fromkeys(FIELDS, 1)
    monkeypatch.setattr(kernel_bench, "bench_expert_ffn", lambda *a, **k: [row])
    monkeypatch.setattr(kernel_bench, "bench_paged_attention", lambda *a, **k: [row])
    assert main(["bench", "kernels", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [row, row]
    assert main(["bench", "kernels"]) == 0
    assert "median ms" in capsys.readouterr().out
