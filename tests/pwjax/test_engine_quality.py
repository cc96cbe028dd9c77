"""Quality classes: floors and damage bounds hold while a request runs, and what cannot be kept is refused."""

import numpy as np
import pytest

import pwjax
from pwjax.engine.quality import Demand
from pwjax.engine.sequence import Completion

LONG = pwjax.SamplingParams(max_tokens=70, ignore_eos=True)


def request(name, **demand) -> pwjax.Request:
    return pwjax.Request(name, None, tuple(range(1, 30)), LONG, **demand)


@pytest.mark.parametrize("demand", [{"min_bits": 4}, {"max_damage": None}])
def test_a_demand_holds_while_its_request_runs(open_tiny, demand):
    # Lowest weights 48 pages, at 4 bits 84; a sequence takes up to 52: the demand and two sequences do not fit.
    with open_tiny(1 + 48 + 100, batch=4) as engine:
        table, pager = engine.parts.table, engine.parts.pager
        if "max_damage" in demand:
            demand = {"max_damage": table.total_damage(4)}
        wanted = Demand.of([request("x", **demand)])
        for name in ("a", "b"):
            engine.submit(request(name))
        engine.submit(request("picky", **demand))
        for name in ("c", "d"):
            engine.submit(request(name))
        done, met, lowest = {}, [], pager.committed
        for _ in range(3000):
            ran = {s.request.id for s in engine.scheduler.running}
            if "picky" in ran:
                met.append(wanted.met(table, pager.committed))
            lowest = np.minimum(lowest, pager.committed)
            done |= {e.id: e for e in engine.step() if isinstance(e, Completion)}
            if engine.idle:
                break
        assert sorted(done) == ["a", "b", "c", "d", "picky"]
        assert all(c.generated_tokens == 70 for c in done.values())
        assert met and all(met) and not wanted.met(table, lowest)
        pager.check_invariants()


def test_fewest_pages_are_looked_up_once(open_tiny, monkeypatch):
    with open_tiny(1 + 48 + 100) as engine:
        table, demand = engine.parts.table, Demand(min_bits=4)
        first = demand.smallest_pages(table)
        assert first is not None and demand.plan(table, first) and not demand.plan(table, first - 2)
        monkeypatch.setattr(Demand, "plan", None)
        assert Demand(min_bits=4).smallest_pages(table) == first


def test_the_price_of_a_demotion_follows_the_floor(open_tiny):
    with open_tiny() as engine:
        table = engine.parts.table
        still = np.zeros(table.blocks, bool)
        assert engine.parts.pager.committed.min() > table.widths[0]

        def price(floor_bits):
            return engine.boundaries._market.demotion(1, engine.boundaries.routing, still, floor_bits)

        assert price(0) < np.inf
        assert price(table.widths[-1]) == np.inf
        assert price(0) < np.inf


def test_demands_that_cannot_be_kept_are_refused_with_numbers(open_tiny):
    with open_tiny(1 + 48 + 100) as engine:
        with pytest.raises(pwjax.PromptError, match=r"are left beside the weights at min_bits 6; lower max_"):
            engine.generate([request(0, min_bits=6)])
        with pytest.raises(pwjax.PromptError, match="at max_damage 0"):
            engine.generate([request(0, max_damage=0)])
        engine.freeze()
        with pytest.raises(pwjax.PromptError, match=r"min_bits 16, but precision is fixed: the lowest block has \d"):
            engine.generate([request(0, min_bits=16)])
    for bad in ({"min_bits": 1}, {"min_bits": 4.0}, {"max_damage": -1}, {"max_damage": float("nan")}):
        with pytest.raises(pwjax.PromptError, match="must be a"):
            request(0, **bad)
