"""Damage of routed tokens as a table: rare experts look worse, never better; the blocks that decide get floors."""

import numpy as np

from calib.damage import FEW_TOKENS, TEXT_TOKENS, conditional_table, few_tokens, floors, super_additivity, text_tables

WIDTHS = (2, 3, 4)


def sums(tokens: np.ndarray, each: np.ndarray, spread: float = 0.0):
    """Sums of ``tokens`` [L, E] draws of mean ``each`` [B] and standard deviation ``spread * each``."""
    count = tokens[:, :, None, None] * np.ones((1, 1, 2, 1))
    return tokens, count * each, count * each**2 * (1 + spread**2)


def test_few_tokens_give_the_mean_of_the_layer_and_a_margin():
    each = np.array([4.0, 1.0, 0.25])
    tokens = np.array([[1000, 1000, 1, 0]])
    exact = conditional_table(*sums(tokens, each))
    np.testing.assert_allclose(exact, np.tile(each, (8, 1)), rtol=1e-6)
    noisy = conditional_table(*sums(tokens, each, spread=1.0)).reshape(4, 2, 3)
    assert np.isfinite(noisy).all() and (noisy[2:] > noisy[:2].max(0)).all() and (noisy[3] >= noisy[2]).all()
    assert (noisy[0] < 1.05 * each).all()
    assert not conditional_table(*sums(0 * tokens, each)).any()


def test_more_bits_never_look_worse():
    tokens = np.full((2, 3), 50)
    table = conditional_table(*sums(tokens, np.array([1.0, 2.0, 0.5])))
    np.testing.assert_allclose(table, np.tile([1.0, 1.0, 0.5], (12, 1)), rtol=1e-6)


def test_outliers_and_unknown_experts_get_floors():
    rng = np.random.default_rng(0)
    expected = np.exp(0.1 * rng.normal(size=(2 * 40, 1))) * 4.0 ** -np.array(WIDTHS)
    tokens = np.full((1, 40), 100)
    calm = floors(expected, WIDTHS, tokens)
    assert (calm == 2).sum() > 70
    expected[11] *= 4.0
    expected[20] *= 1e9
    tokens[0, 30] = 1
    found = floors(expected, WIDTHS, tokens)
    assert found[11] == 3 and found[20] == 4 and found[60:62].tolist() == [4, 4]
    assert few_tokens(tokens) == [{"layer": 0, "expert": 30, "tokens": 1}] and FEW_TOKENS > 1
    assert (floors(np.ones((4, 3)), WIDTHS, np.full((1, 2), 9)) == 2).all()


def test_super_additivity_is_the_ratio_of_the_lower_point_to_the_higher():
    high = np.array([[4.0, 2.0, 0.0], [4.0, 0.0, 0.0]])
    assert super_additivity({6: high, 4: 1.5 * high}) == 1.5
    assert super_additivity({6: 0 * high, 4: high}) == 1.0


def test_texts_have_tables_of_their_own_drawn_to_the_average():
    rng = np.random.default_rng(0)
    counts, texts = np.full((2, 3, 8), 4000), np.repeat([0, 1], 4)
    each = np.sort(rng.uniform(1, 9, (2, 2, 3, 1, 2, 3)), axis=-1)[..., ::-1]  # [K, L, E, 1, 2, B]
    by_sequence = counts[..., None, None] * np.concatenate([each[0].repeat(4, 2), each[1].repeat(4, 2)], 2)
    pooled = each.mean(0).reshape(12, 3)
    tables = text_tables(counts, by_sequence, texts, pooled)
    assert tables.shape == (2, 12, 3)
    np.testing.assert_allclose(tables, each.reshape(2, 12, 3), rtol=0.05)
    # A text without tokens has the average, and one with as many as it is given is half way there.
    counts[0, 1, :4], by_sequence[0, 1, :4] = 0, 0
    counts[0, 2, :4], by_sequence[0, 2, :4] = TEXT_TOKENS // 4, TEXT_TOKENS // 4 * each[0, 0, 2]
    tables = text_tables(counts, by_sequence, texts, pooled).reshape(2, 2, 3, 2, 3)
    blocks = pooled.reshape(2, 3, 2, 3)
    np.testing.assert_allclose(tables[0, 0, 1], blocks[0, 1])
    np.testing.assert_allclose(tables[0, 0, 2], (blocks[0, 2] + each[0, 0, 2, 0]) / 2)
    assert (np.diff(tables, axis=-1) <= 0).all()
