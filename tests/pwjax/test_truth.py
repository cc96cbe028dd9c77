import json
from dataclasses import replace

import numpy as np
import pytest

from planner import BlockTable, TextKinds
from pwjax.errors import UsageError
from pwjax.evaluate.measurements import Measurements
from pwjax.evaluate.sampled_plans import greedy_plan, mixed_plans, single_changes, target_pages
from pwjax.evaluate.texts import Document
from pwjax.evaluate.windows import spread_windows


@pytest.fixture
def table():
    """Three layers of four experts; heavy-tailed damage, pages as of the demo model."""
    rng = np.random.default_rng(0)
    n, widths = 24, (2, 3, 4, 5, 6, 16)
    damage = np.exp(rng.normal(size=(n, 1))) * 4.0 ** -np.array(widths)
    damage[:, -1] = 0
    pages = np.tile([[5, 7, 9, 11, 13, 32], [3, 4, 5, 6, 8, 16]], (n // 2, 1))
    mass = rng.dirichlet(np.ones(4), 3)
    return BlockTable(3, 4, widths, damage, pages, np.tile([49152, 24576], n // 2), mass)


def test_mixed_plans_hold_equal_pages_and_span_a_range(table):
    for mean_bits in (3, 3.5):
        plans = mixed_plans(table, {"paper": table.damage}, mean_bits, 24, seed=3)
        pages = [table.total_pages(p.bits) for p in plans]
        assert set(pages) == {target_pages(table, mean_bits)}
        assert max(p.bits.max() for p in plans) <= 6
        best = table.total_damage(greedy_plan(table, table.damage, pages[0], np.random.default_rng(0)))
        damage = np.array([table.total_damage(p.bits) for p in plans])
        assert (damage > 0.95 * best).all() and damage.max() > 1.5 * best
        assert {p.recipe.split(",")[0] for p in plans} == {"paper", "hotness", "layers", "random"}
        again = mixed_plans(table, {"paper": table.damage}, mean_bits, 24, seed=3)
        assert all((a.bits == b.bits).all() for a, b in zip(plans, again, strict=True))


def test_routing_counts_once_whether_damage_is_of_a_routed_or_of_a_served_token(table):
    # Powers of two, so that dividing by them and multiplying again is exact.
    rate = 2.0 ** np.random.default_rng(1).integers(-2, 3, (3, 4))
    served = replace(table, routing_rate=rate)
    routed = replace(served, damage=table.damage / rate.repeat(2)[:, None], conditional=True)
    assert (routed.damage != served.damage).any() and (routed.expected == served.expected).all()
    # What calibration found text by text changes nothing where damage is given.
    texts = TextKinds(np.stack([routed.damage, 2 * routed.damage]), np.stack([rate, rate[::-1]]))
    routed = replace(routed, kinds=texts)
    for mean_bits in (3, 3.5):
        pages = target_pages(table, mean_bits)
        best = [greedy_plan(t, t.expected, pages, np.random.default_rng(0)) for t in (served, routed)]
        assert (best[0] == best[1]).all() and routed.total_damage(best[0]) == served.total_damage(best[0])
        sets = [mixed_plans(t, {"form": t.expected}, mean_bits, 24, seed=3) for t in (served, routed)]
        assert all((a.bits == b.bits).all() and a.recipe == b.recipe for a, b in zip(*sets, strict=True))


def test_single_changes_are_distinct_and_at_most_all(table):
    plans = single_changes(table, 1000, seed=0, others=16)
    assert len(plans) == 24 * 5 == len({tuple(p.bits) for _, p in plans})
    for block, plan in plans:
        assert list(np.flatnonzero(plan.bits != 16)) == [block]
    assert len(single_changes(table, 7, seed=0, others=16)) == 7


def test_measurements_resume_after_a_torn_line_and_refuse_another_run(tmp_path):
    calls = []

    def measure(bits):
        calls.append(int(bits[0]))
        return np.array([bits[0] / 3, 1.0])

    path = tmp_path / "m.jsonl"
    first = Measurements(measure, {"seed": 0}, path)
    values = [first(np.array([b, 16])) for b in (2, 3, 2)]
    first.close()
    assert calls == [2, 3] and (values[0] == values[2]).all()
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    second = Measurements(measure, {"seed": 0}, path)
    assert whole.startswith(path.read_bytes()) and path.read_bytes().endswith(b"\n")
    assert np.array([2, 16]) in second and np.array([3, 16]) not in second
    assert (second(np.array([2, 16])) == values[0]).all() and (second(np.array([3, 16])) == values[1]).all()
    second.close()
    assert calls == [2, 3, 3] and path.read_bytes() == whole
    assert all(json.loads(line) for line in path.read_text().splitlines())
    with pytest.raises(UsageError, match="seed differ"):
        Measurements(measure, {"seed": 1}, path)
    header_end = whole.index(b"\n") + 1
    for cut in (1, header_end - 1, header_end, len(whole) - 1):
        # With what a file system may put after a power cut where no data came.
        path.write_bytes(whole[:cut] + b"\0\xff" * (cut > header_end))
        resumed = Measurements(measure, {"seed": 0}, path)
        assert [(resumed(np.array([b, 16])) == v).all() for b, v in zip((2, 3), values, strict=False)] == [True, True]
        resumed.close()
        assert path.read_bytes() == whole
    path.write_bytes(whole[:header_end] + b"half\n" + whole[header_end:])
    with pytest.raises(UsageError, match="is damaged"):
        Measurements(measure, {"seed": 0}, path)
    assert b"half" in path.read_bytes()


def test_windows_are_spread_over_documents_and_whole(tiny_tokenizer):
    from pwjax.engine.text import Tokenizer

    tokenizer = Tokenizer.load(tiny_tokenizer)
    long = Document("long", "".join(f"line {i} of it\n" for i in range(3000)))
    short = Document("short", "The quick brown fox. " * 8)
    windows, owners = spread_windows([long, short], tokenizer, 300, tokens=16 * 20, length=16)
    assert windows.shape[1] == 16 and (owners == 0).sum() == 10 and 1 <= (owners == 1).sum() <= 10
    first, last = (tokenizer.decode(windows[i].tolist()) for i in (0, 9))
    assert "line 0 of" in first and "of it" in last and last not in "".join(long.text[:20000])
    with pytest.raises(UsageError, match="tiny.*fills a window of 16"):
        spread_windows([Document("tiny", "a")], tokenizer, 300, tokens=64, length=16)
