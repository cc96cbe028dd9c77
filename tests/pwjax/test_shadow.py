"""The shadow measurement: what a run samples, that nothing else changes, and what it is held against."""

import json
import math

import numpy as np
import pytest

import pwjax
from pwjax.cli import main
from pwjax.engine.log import read_log
from pwjax.engine.replay import replay
from pwjax.engine.shadow import SHARE, chosen, share_of
from pwjax.errors import UsageError
from pwjax.evaluate.shadow import measure, shared_kl

pytestmark = pytest.mark.usefixtures("quick_programs")
LONG = pwjax.SamplingParams(max_tokens=60, temperature=0.8, ignore_eos=True)


def run(open_tiny, log, pages=1 + 48 + 100, shadow=0.3, policy="default", **demand):
    """Tokens of three requests, the last with a demand."""
    greedy = LONG.with_fields(temperature=0.0)
    requests = [pwjax.Request(f"r{i}", None, tuple(range(1 + i, 30 + i)), s) for i, s in enumerate((LONG, greedy))]
    requests.append(pwjax.Request("bounded", None, tuple(range(3, 30)), LONG, **demand))
    with open_tiny(pages, log=log, shadow=shadow, policy=policy) as engine:
        tokens = [c.token_ids for c in engine.generate(requests)]
        stats = engine.stats()
    assert stats["compile"]["recompiles_after_warmup"] == 0
    assert stats["memory"]["peak_bytes"] <= stats["memory"]["budget_bytes"]
    return tokens


def finished(log):
    return {r["id"]: r for r in read_log(log)[1] if r["kind"] == "finish"}


def test_a_sample_is_kept_and_measured(open_tiny, tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    tokens = run(open_tiny, log, max_damage=1e6)
    found = finished(log)
    for own, record in zip(tokens, found.values(), strict=True):
        indices = [index for index, *_ in record["shadow"]]
        assert indices == [i for i in range(60) if chosen(record["order"], i, 0.3)] and 5 < len(indices) < 35
        for index, damage, ids, logprobs in record["shadow"]:
            assert damage > 0 and len(set(ids)) == 20
            assert record["id"] != "r1" or own[index] == ids[0]
            assert 0.1 < sum(map(math.exp, logprobs)) <= 1 + 1e-4
    assert replay(log).requests == 3

    assert main(["inspect", "--log", str(log), "--shadow", "--json"]) == 0
    shadow = json.loads(capsys.readouterr().out)["shadow"]
    assert [r["id"] for r in shadow["requests"]] == list(found)
    assert [r["tokens"] for r in shadow["requests"]] == [len(r["shadow"]) for r in found.values()]
    for r in shadow["requests"]:
        assert 0 < r["measured"] < 10 and r["standard_error"] > 0
        assert r["predicted"] == pytest.approx(np.mean([s[1] for s in found[r["id"]]["shadow"]]))
    assert [r["kept"] for r in shadow["requests"]] == [None, None, True]
    # One sequence leaves more pages to the blocks than the run had.
    assert shadow["damage"] < min(r["predicted"] for r in shadow["requests"])
    assert main(["inspect", "--log", str(log), "--shadow"]) == 0
    assert "bounded" in capsys.readouterr().out


def test_sampling_changes_no_token(open_tiny, tmp_path):
    """The programs are the same ones, so is what they give."""
    logs = [tmp_path / "with", tmp_path / "without"]
    # Where precision moves, it follows the clock.
    tokens = [run(open_tiny, log, shadow=s, policy="static") for log, s in zip(logs, (0.3, 0.0), strict=True)]
    assert tokens[0] == tokens[1]
    assert [any("shadow" in record for record in finished(log).values()) for log in logs] == [True, False]
    with pytest.raises(UsageError, match="no shadow sample"):
        measure(logs[1])


@pytest.mark.slow
def test_tokens_that_ran_at_high_bits_do_not_diverge(open_tiny, tmp_path):
    log = tmp_path / "log.jsonl"
    run(open_tiny, log, pages=2000, max_damage=1.0)
    shadow = measure(log)
    assert shadow.mean_bits == 16 and shadow.damage == 0
    for r in shadow.requests:
        assert r.predicted == 0 and r.measured < 1e-4


def test_bounded_requests_are_sampled_unless_told_otherwise(open_tiny, tmp_path):
    plain, bounded = (pwjax.Request(0, "a", max_damage=limit) for limit in (None, 1.0))
    assert share_of(plain, None) == 0 and share_of(bounded, None) == SHARE
    assert share_of(plain, 0.5) == share_of(bounded, 0.5) == 0.5 and share_of(bounded, 0.0) == 0
    share = np.mean([chosen(3, i, 0.25) for i in range(4000)])
    assert share == pytest.approx(0.25, abs=0.02)
    with pytest.raises(UsageError, match="share from 0 to 1"):
        open_tiny(shadow=1.5)
    assert main(["generate", "x", "--shadow", "0.1"]) == 2
    assert main(["inspect", "--shadow"]) == 2


def test_the_divergence_is_a_lower_bound_and_exact_where_all_tokens_are_named():
    rng = np.random.default_rng(0)
    for _ in range(50):
        high, used = (np.log(rng.dirichlet(np.ones(30))) for _ in range(2))
        whole = float(np.sum(np.exp(high) * (high - used)))
        top = [[(int(i), float(side[i])) for i in np.argsort(-side)[:n]] for side in (high, used) for n in (8, 30)]
        assert 0 <= shared_kl(top[0], top[2]) <= whole
        assert shared_kl(top[1], top[3]) == pytest.approx(whole)
    assert shared_kl(top[0], top[0]) == 0
