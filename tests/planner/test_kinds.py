"""Kinds of text: a mixture is told by its routing, and damage is then that of the texts that tokens come from."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import BlockTable, MomentsReference, ResidualHeads, TextKinds, demote, price

LAYERS, EXPERTS = 3, 8


def make_kinds(table: BlockTable, seed: int = 0, count: int = 3) -> TextKinds:
    """Texts that use different experts, and whose damage differs from block to block."""
    rng = np.random.default_rng(seed)
    mass = rng.dirichlet(np.full(table.experts, 0.3), (count, table.layers))
    return TextKinds(table.damage * np.exp(rng.normal(size=(count, table.blocks, 1))), mass)


@pytest.fixture
def table(make_table) -> BlockTable:
    table = replace(make_table(layers=LAYERS, experts=EXPERTS), conditional=True)
    kinds = make_kinds(table)
    return replace(table, kinds=kinds, routing_mass=kinds.usage.mean(0))


@given(shares=st.lists(st.floats(0, 1), min_size=3, max_size=3).filter(lambda s: sum(s) > 0.1))
def test_a_mixture_is_told_by_its_routing(shares):
    rng = np.random.default_rng(1)
    mass = rng.dirichlet(np.full(EXPERTS, 0.3), (3, LAYERS))
    kinds = TextKinds(np.ones((3, LAYERS * EXPERTS * 2, 2)), mass)
    true = np.array(shares) / sum(shares)
    found = kinds.mixture(np.einsum("k,kle->le", true, kinds.usage))
    assert found.sum() == pytest.approx(1) and (found >= 0).all()
    np.testing.assert_allclose(found, true, atol=0.12)


def test_one_text_alone_has_its_own_damage(table):
    for text, mass in enumerate(table.kinds.usage):
        prices = price(table, mass)
        assert prices.mixture[text] > 0.95
        # Experts that no other text uses are its own to the last percent.
        own = np.repeat(mass.ravel() > 0.5, 2)
        expected = (table.rate * prices.routing)[:, None] * table.kinds.damage[text]
        np.testing.assert_allclose(prices.damage[own], expected[own], rtol=0.1)


def test_damage_lies_between_the_texts_and_never_grows_with_bits(table):
    rng = np.random.default_rng(2)
    for _ in range(20):
        prices = price(table, rng.dirichlet(np.ones(EXPERTS), LAYERS))
        damage = prices.damage / (table.rate * prices.routing)[:, None]
        least, most = table.kinds.damage.min(0), table.kinds.damage.max(0)
        assert (damage >= least * (1 - 1e-9)).all() and (damage <= most * (1 + 1e-9)).all()
        assert (np.diff(prices.damage, axis=1) <= 0).all() and not prices.damage[:, -1].any()


def test_without_routing_and_in_the_ablations_the_average_counts(table):
    assert (price(table).damage == table.expected).all() and price(table).mixture is None
    mass = table.kinds.usage[0]
    assert price(table, mass, sensitivity=False).mixture is None
    nothing = price(table, np.zeros_like(mass))
    assert nothing.mixture is None and np.allclose(nothing.damage, table.expected)
    # Three tokens say little: calibration's own mixture still counts.
    few, many = price(table, mass, 3.0).mixture, price(table, mass, 3000.0).mixture
    assert few[0] < many[0]


def test_equal_texts_change_nothing(table):
    same = replace(table, kinds=TextKinds(np.stack([table.damage] * 3), table.kinds.usage))
    mass = table.kinds.usage[1]
    np.testing.assert_allclose(price(same, mass).damage, price(replace(table, kinds=None), mass).damage)


def test_the_residual_is_of_what_the_texts_do_not_tell(table):
    steps = len(table.widths) - 1
    mean = np.ones((table.blocks, steps))
    of_text = np.stack([mean * factor for factor in (4.0, 1.0, 0.25)])
    energy = np.ones((LAYERS, EXPERTS, steps, 2), np.float16)
    reference = MomentsReference(energy, energy, mean, of_text)
    one = np.ones((2, steps))
    heads = ResidualHeads(one[..., None], one, -9 * one, 9 * one, reference)
    features = np.full((table.blocks, steps, 1), np.log(4.0))
    features[5] = 0
    chances = np.zeros((3, table.blocks))
    chances[0] = 1
    eta = heads.factor(features, 1.0, chances)
    np.testing.assert_allclose(eta, 1)
    assert (heads.factor(features)[0] > 3.9).all()
    chances[:] = [[0], [0.5], [0.5]]
    np.testing.assert_allclose(heads.factor(features, 1.0, chances)[0], 4 / 0.625)
    full = price(replace(table, heads=heads), table.kinds.usage[0], residual=features)
    assert full.residual.shape == (table.blocks, steps) and np.isfinite(full.damage).all()


def test_explain_names_the_texts(table):
    prices = price(table, table.kinds.usage[2])
    plan = demote(table, np.full(table.blocks, 6), 20, [np.full(table.blocks, 2)], prices=prices)
    assert "text 3 of calibration" in plan.explain(block=plan.changes()[0].block)


def test_kinds_that_cannot_be_are_refused(table):
    kinds = table.kinds
    for damage, mass, words in (
        (kinds.damage[0], kinds.usage, "damage [K, n, B]"),
        (kinds.damage[:2], kinds.usage, "damage [K, n, B]"),
        (-kinds.damage, kinds.usage, "not negative"),
        (kinds.damage * np.nan, kinds.usage, "finite"),
        (kinds.damage, 0 * kinds.usage, "in every layer"),
        (kinds.damage[..., ::-1], kinds.usage, "must not grow with bits"),
    ):
        with pytest.raises(ValueError, match="^[^\n]*$") as error:
            TextKinds(damage, mass)
        assert words in str(error.value)
    for wrong, words in (
        ({"conditional": False}, "routed token"),
        ({"kinds": TextKinds(kinds.damage[:, :-2], kinds.usage)}, "must be of"),
        ({"kinds": TextKinds(kinds.damage + 1, kinds.usage)}, "0 at 16 bits"),
    ):
        with pytest.raises(ValueError) as error:
            replace(table, **wrong)
        assert words in str(error.value)
