"""Page files that shrink, go bad or disappear under a running job: precision stops moving there, the job goes on."""

import os
import shutil

import numpy as np
import pytest
from prompts import PROMPTS

import pwjax
from pwjax.engine.replay import replay
from pwjax.loading import Injected
from pwjax.memory import ThreadTransfer
from pwjax.memory.faults import FaultyStore

LONG = pwjax.SamplingParams(max_tokens=100, ignore_eos=True)


def serve(engine, harm):
    """Twelve long requests; ``harm`` comes after two turns, when everything is loaded."""
    for i in range(12):
        engine.submit(pwjax.Request(i, PROMPTS[i % 6], None, LONG))
    done = [event for _ in range(2) for event in engine.step()]
    harm()
    while not engine.idle:
        done += engine.step()
    finished = [e for e in done if isinstance(e, pwjax.Completion)]
    assert sorted(c.id for c in finished) == list(range(12))
    assert all(c.finish_reason == "length" and c.generated_tokens == 100 for c in finished)
    engine.parts.pager.check_invariants()
    engine.parts.kv.check_invariants()
    stats = engine.stats()
    assert stats["memory"]["peak_bytes"] <= stats["memory"]["budget_bytes"]
    return stats


def lose(path, how):
    if how == "disappears":
        os.unlink(path)
    elif how == "shrinks":
        os.truncate(path, 1000)
    else:
        with open(path, "r+b") as file:
            file.write(os.urandom(os.path.getsize(path)))


@pytest.mark.parametrize("how", ["shrinks", pytest.param("goes bad", marks=pytest.mark.slow)])
def test_lost_pages_stop_moves_and_never_the_job(open_tiny, tiny_artifact, tmp_path, how):
    model, log = tmp_path / "model.pw", tmp_path / "log"
    shutil.copytree(tiny_artifact, model)
    with open_tiny(path=model, log=log) as engine:
        start = engine.parts.pager.committed
        stats = serve(engine, lambda: lose(model / "pages" / "layer_000.bin", how))
        transfers = stats["transfers"]
        assert transfers["failed"] > 0 and transfers["blocks_given_up"] > 0
        assert ("truncated" if how == "shrinks" else "checksum") in transfers["last_failure"]
        given_up = engine.parts.pager.given_up
        assert np.array_equal(engine.parts.pager.committed[given_up], start[given_up])
    # The same failures, told by the log, over pages that are whole again: the same tokens.
    assert replay(log, tiny_artifact).requests == 12


@pytest.mark.slow
def test_a_file_that_is_removed_is_read_on(open_tiny, tiny_artifact, tmp_path):
    model = tmp_path / "model.pw"
    shutil.copytree(tiny_artifact, model)
    with open_tiny(path=model) as engine:
        stats = serve(engine, lambda: lose(model / "pages" / "layer_000.bin", "disappears"))
        assert stats["transfers"]["failed"] == 0 and stats["precision"]["demotions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_faulty_reads_change_no_token_under_the_same_commits(open_tiny, tmp_path, rate):
    stores = []

    def transfer(store):
        stores.append(FaultyStore(store, rate, 0, late_s=0.01))
        return ThreadTransfer(stores[0])

    log = tmp_path / "log"
    with open_tiny(log=log, injected=Injected(transfer=transfer)) as engine:
        stats = serve(engine, lambda: setattr(stores[0], "armed", True))
    assert sum(stores[0].faults.values()) > 0 and stats["transfers"]["failed"] > 0
    # A replay reads everything without a fault; only what was committed is the same.
    assert replay(log).requests == 12
