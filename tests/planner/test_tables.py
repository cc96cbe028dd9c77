"""BlockTable: what it accepts, what it says when it does not, and its sums."""

from dataclasses import replace

import numpy as np
import pytest

from planner import BlockTable, MomentsReference, ResidualHeads, price


@pytest.fixture
def table() -> BlockTable:
    damage = [[4.0, 1.0, 0.0], [2.0, 0.5, 0.0]]
    return BlockTable(1, 1, (2, 3, 16), damage, [[5, 7, 32], [3, 4, 16]], [200, 100], [[1.0]])


def test_names_and_sums(table):
    assert table.blocks == 2
    assert table.locate(1) == (0, 0, 1)
    assert table.name(1) == "layer 0 expert 0 down"
    bits = np.array([16, 2])
    assert table.level(bits).tolist() == [2, 0]
    assert table.bits(table.level(bits)).tolist() == [16, 2]
    assert table.total_pages(bits) == 35
    assert table.total_damage(bits) == 2.0
    assert table.mean_bits(bits) == pytest.approx((16 * 200 + 2 * 100) / 300)
    assert table.histogram(bits) == {2: 1, 3: 0, 16: 1}
    assert table.total_pages(3) == 11


def test_block_index_order(make_table):
    table = make_table(layers=3, experts=5)
    assert table.locate((2 * 5 + 4) * 2 + 1) == (2, 4, 1)


def test_arrays_are_copied_and_read_only():
    damage = np.array([[1.0, 0.0], [1.0, 0.0]])
    table = BlockTable(1, 1, (2, 16), damage, [[1, 2], [1, 2]], [1, 1], [[1.0]])
    damage[:] = 7
    assert table.damage[0, 0] == 1
    with pytest.raises(ValueError, match="read-only"):
        table.pages[0, 0] = 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"widths": (3, 2, 16)}, "widths must ascend"),
        ({"widths": (2, 3, 9)}, "within 2..8"),
        ({"layers": 0}, "layers and experts"),
        ({"experts": 2}, "damage must have the shape"),
        ({"damage": [[1.0, 2.0, 0.0], [2.0, 1.0, 0.0]]}, "expert 0 gate_up has 1 at 2 bits and 2 at 3"),
        ({"damage": [[4.0, np.nan, 0.0], [2.0, 1.0, 0.0]]}, r"damage\[0, 1\] is nan"),
        ({"damage": [[4.0, 1.0, 0.5], [2.0, 0.5, 0.0]]}, "0 at 16 bits"),
        ({"pages": [[5, 7, 32], [0, 4, 16]]}, r"pages\[1, 0\] is 0"),
        ({"params": [200, 0]}, r"params\[1\] is 0"),
        ({"routing_mass": [[-0.1]]}, "routing_mass"),
        ({"routing_rate": [[1.0, 1.0]]}, "routing_rate must have the shape"),
        ({"floors": [2, 4]}, "floors must be widths .* got 4"),
    ],
)
def test_bad_tables_name_the_fault(table, change, words):
    with pytest.raises(ValueError, match=words):
        replace(table, **change)


def test_unknown_width_lists_the_known(table):
    with pytest.raises(ValueError, match="4 bits are not in this table; it has 2, 3, 16"):
        table.level(np.array([2, 4]))
    with pytest.raises(ValueError, match="17 bits"):
        table.level(17)


def test_conditional_damage_counts_as_often_as_tokens_come():
    mass, rate = [[0.9, 0.1, 0.0]], [[1.5, 0.5, 0.0]]
    each = np.tile([4.0, 1.0, 0.0], (6, 1))
    arguments = (1, 3, (2, 3, 16), each, np.tile([5, 7, 32], (6, 1)), [1] * 6, mass)
    table = BlockTable(*arguments, routing_rate=rate, conditional=True)
    assert table.expected[[0, 3]].tolist() == [[6, 1.5, 0], [2, 0.5, 0]]
    assert (table.expected[4, :2] > 0).all(), "what calibration never chose is rare, not free"
    assert table.total_damage(2) == pytest.approx(table.expected[:, 0].sum())
    assert (BlockTable(*arguments).expected == each).all()


def test_damage_follows_todays_routing(make_table):
    table = make_table(experts=8)
    assert np.allclose(price(table, table.routing_mass * 7).damage, table.expected)
    assert np.allclose(price(table, np.zeros((2, 8))).damage, table.expected)
    mass = np.zeros((2, 8))
    mass[:, 3] = 1
    shift = table.routing_shift(mass).reshape(2, 8, 2)
    assert (shift[:, 3] > 1).all() and (np.delete(shift, 3, axis=1) < 1).all()
    # Choices are compared with choices where calibration counted them: an expert of large gates is not chosen more.
    counted = replace(table, routing_rate=np.full((2, 8), 0.5))
    assert np.allclose(counted.routing_shift(np.full((2, 8), 9)), 1)
    assert not np.allclose(counted.routing_shift(table.routing_mass), 1)


def test_residual_heads_scale_by_confidence_and_clip():
    weights = np.zeros((2, 2, 4))
    weights[0, 0, 0], weights[1, 1, 3] = 2.0, 1.0
    heads = ResidualHeads(weights, [[0.5, 1], [1, 1]], np.full((2, 2), -1.0), np.full((2, 2), 3.0))
    used, unused = [1.0, 1.0, 1.0, 1.0], [0.0] * 4
    eta = heads.factor([used, used, unused, unused])
    assert np.allclose(eta, [[np.exp(0.5 * 2), 1], [1, np.exp(1)], [1, 1], [1, 1]])
    assert np.allclose(heads.factor([[9, 0, 0, 0], unused]), [[np.exp(0.5 * 3), 1], [1, 1]])
    with pytest.raises(ValueError, match=r"shape \[n, 4\]"):
        heads.factor(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="low <= high"):
        ResidualHeads(weights, np.ones((2, 2)), np.ones((2, 2)), np.zeros((2, 2)))


def test_moments_say_how_much_a_prompt_hurts_at_each_transition(make_table):
    rng = np.random.default_rng(0)
    table = make_table(layers=1, experts=2)
    steps = len(table.widths) - 1
    energies = [rng.random((1, 2, steps, size)).astype(np.float16) for size in (6, 3)]
    moments = [rng.random((1, 2, size)) for size in (6, 3)]
    tokens = np.array([[5, 0]])
    for own in moments:
        own[:, 1] = 0
    mean = rng.random((4, steps)) + 0.5
    mean[0, 1] = 0
    reference = MomentsReference(*energies, mean)
    features = reference.features(reference.sums(moments), tokens)
    for matrix, (energy, own) in enumerate(zip(energies, moments, strict=True)):
        want = np.log(energy[0, 0].astype(float) @ own[0, 0] / 5 / np.where(mean[matrix] > 0, mean[matrix], 1))
        np.testing.assert_allclose(features[matrix, :, 0], np.where(mean[matrix] > 0, want, 0), rtol=1e-5)
    assert not features[2:].any(), "an expert that the prompt did not use"

    one = np.ones((2, steps))
    heads = ResidualHeads(one[..., None], one, -9 * one, 9 * one, reference)
    assert heads.form == "moments" and np.allclose(heads.factor(features), np.exp(features[..., 0]))
    prices = price(replace(table, heads=heads), residual=features)
    np.testing.assert_allclose(
        -np.diff(prices.damage, axis=1), -np.diff(table.expected, axis=1) * np.exp(features[..., 0])
    )
    with pytest.raises(ValueError, match=rf"shape \[n, {steps}, 1\]"):
        heads.factor(np.zeros((4, 4)))
    with pytest.raises(ValueError, match="of 4 blocks|of 24 blocks|must be of"):
        replace(make_table(), heads=heads)
    with pytest.raises(ValueError, match="mean moments must be"):
        MomentsReference(*energies, mean[:3])
