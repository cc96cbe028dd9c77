"""The record of routing: decay, prompts of requests, and their merge by KV pages."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from planner import BlockTable, MomentsReference, ResidualHeads
from pwjax.engine.routing import HALF_LIFE_TOKENS, RoutingRecord, features
from pwjax.models.moe import RoutingStats, _norm_sums

LAYERS, EXPERTS = 2, 3


@pytest.fixture
def record():
    n, mass = LAYERS * EXPERTS * 2, np.array([[0.5, 0.3, 0.2]] * LAYERS)
    return RoutingRecord(BlockTable(LAYERS, EXPERTS, (2, 16), [[1, 0]] * n, [[1, 2]] * n, [1] * n, mass, 2 * mass))


def stats(tokens, expert, norm=1.0):
    """Statistics of ``tokens`` that all chose ``expert`` twice, with inputs of one ``norm``."""
    mass = np.zeros((LAYERS, EXPERTS), np.float32)
    mass[:, expert] = tokens
    norms = mass[..., None, None] * np.array([[norm, norm**2, 0]] * 2)
    norms[:, expert, :, 2] = norm
    return RoutingStats(mass, 2 * mass, mass, norms)


def sequence(order, slot):
    return SimpleNamespace(order=order, slot=slot)


KV = SimpleNamespace(slot_pages=lambda slot: [3, 1, 0][slot])


def test_mass_starts_with_calibration_and_decays_by_tokens(record):
    assert np.allclose(record.shares[0], [0.5, 0.3, 0.2]) and record.tokens == 0
    record.add(stats(HALF_LIFE_TOKENS, 0))
    assert np.allclose(record.shares, [1, 0, 0])
    record.add(stats(HALF_LIFE_TOKENS, 1))
    assert np.allclose(record.shares, [1 / 3, 2 / 3, 0])
    assert record.tokens == pytest.approx(1.5 * HALF_LIFE_TOKENS)
    assert np.allclose(record.choices, 2 * record.mass), "two choices for every unit of router weight in these stats"


def test_prompts_are_merged_by_kv_pages_and_forgotten_with_their_request(record):
    one, two = sequence(1, 0), sequence(2, 1)
    assert record.prompts([one], KV) == (None, None)
    record.add(stats(10, 0, 2.0), one)
    record.add(stats(30, 1, 4.0), one)
    record.add(stats(5, 1, 8.0), two)
    mass, residual = record.prompts([one, two], KV)
    assert np.allclose(mass, [0.75 * 0.25, 0.75 * 0.75 + 0.25, 0])
    assert residual.shape == (LAYERS * EXPERTS * 2, 4)
    assert np.allclose(residual[0], [0.75 * 2, 0.75 * 2, 0.75 * 2, 0.75])
    assert np.allclose(residual[2], [0.75 * 4 + 2, 0.75 * 4 + 2, 0.75 * 4 + 2, 1])
    assert not residual[4:6].any(), "an expert that no prompt used has no features"
    mass, _ = record.prompts([two], KV)
    assert np.allclose(mass, [0, 1, 0])
    assert np.allclose(record.prompts([one, two], KV)[0], mass), "a request that left is not remembered"


def test_moments_of_prompts_are_summed_over_chunks_and_merged(record):
    energies = [np.ones((LAYERS, EXPERTS, 1, size), np.float16) for size in (4, 2)]
    one = np.ones((2, 1))
    reference = MomentsReference(*energies, np.full((LAYERS * EXPERTS * 2, 1), 0.5))
    record = RoutingRecord(replace(record._table, heads=ResidualHeads(one[..., None], one, -one, one, reference)))

    def chunk(tokens, moment):
        moments = [np.zeros((LAYERS, EXPERTS, size), np.float32) for size in (4, 2)]
        for own in moments:
            own[:, 1] = moment
        return stats(tokens, 1)._replace(moments=tuple(moments))

    one, two = sequence(1, 0), sequence(2, 1)
    record.add(chunk(3, 6.0), one)
    record.add(chunk(5, 2.0), one)
    record.add(chunk(4, 4.0), two)
    _, residual = record.prompts([one, two], KV)
    assert residual.shape == (LAYERS * EXPERTS * 2, 1, 1) and not residual[:2].any()
    # Every token makes two choices of the expert; sums over columns of all prompts together, a choice, over the mean.
    want = [np.log(k * (8 + 4) / (16 + 8) / 0.5) for k in (4, 2)]
    np.testing.assert_allclose(residual[2:4, 0, 0], want)
    record.add(chunk(5, 2.0))
    assert np.array_equal(record.prompts([one, two], KV)[1], residual), "generated tokens change nothing"
    record.add(stats(5, 1), two)
    assert record.prompts([one, two], KV)[1] is None, "a program without moments says nothing"


def test_features_are_computed_once_a_chunk(record, monkeypatch):
    asked = []
    monkeypatch.setattr("pwjax.engine.routing.features", lambda *sums: asked.append(1) or features(*sums))
    one, two = sequence(1, 0), sequence(2, 1)
    record.add(stats(10, 0, 2.0), one)
    record.add(stats(5, 1, 8.0), two)
    first = record.prompts([one, two], KV)[1]
    record.add(stats(7, 2))  # generated
    assert np.array_equal(record.prompts([one, two], KV)[1], first) and len(asked) == 2
    record.add(stats(10, 0, 4.0), one)
    assert record.prompts([one, two], KV)[1][0, 0] == pytest.approx(0.75 * 3) and len(asked) == 3
    record.prompts([], KV)
    record.add(stats(10, 0, 6.0), one)
    assert record.prompts([one], KV)[1][0, 0] == pytest.approx(6), "nothing is known of a request that left"


def test_norms_of_a_step_give_the_three_features():
    rng = np.random.default_rng(0)
    weight, experts = rng.random((7, 2), np.float32), rng.integers(0, EXPERTS, (7, 2))
    weight[3:5] = 0
    squares = rng.random((7, 2, 2), np.float32) * 9
    squares[3:5] = 0
    sums = np.asarray(jax.jit(_norm_sums, static_argnums=3)(weight, experts, squares, EXPERTS))
    mass = np.zeros(EXPERTS)
    np.add.at(mass, experts, weight)
    found = features(mass[None], sums[None])[0]
    for expert in range(EXPERTS):
        at = (experts == expert) & (weight > 0)
        norm, gate = np.sqrt(squares[at]), weight[at][:, None]
        mean, rms = (gate * norm).sum(0) / gate.sum(), np.sqrt((gate * norm**2).sum(0) / gate.sum())
        assert np.allclose(found[expert].T, [mean, rms, norm.max(0), [1, 1]], rtol=1e-5)


def test_statistics_of_two_dispatches_join():
    joined = jax.jit(RoutingStats.plus)(stats(10, 0, 2.0), stats(30, 0, 4.0))
    assert float(joined.mass[0, 0]) == 40 and np.allclose(joined.norms[0, 0, 0], [140, 520, 4])
