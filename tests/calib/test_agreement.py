import numpy as np
import pytest
import scipy.stats

from calib.agreement import (
    agreement,
    bootstrap,
    line,
    ranks,
    reliability,
    slope_through_origin,
    spearman,
    spearman_gain,
)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_ranks_and_spearman_equal_scipy_with_ties_and_batches(rng):
    x, y = rng.integers(0, 6, (4, 30)).astype(float), rng.normal(size=(4, 30))
    np.testing.assert_array_equal(ranks(x), scipy.stats.rankdata(x, axis=-1) - 1)
    wanted = [scipy.stats.spearmanr(a, b).statistic for a, b in zip(x, y, strict=True)]
    np.testing.assert_allclose(spearman(x, y), wanted)
    assert np.isnan(spearman(np.ones(5), np.arange(5.0)))


def test_line_equals_scipy(rng):
    x = rng.normal(size=40)
    y = 3 * x + 1 + rng.normal(size=40)
    fit = scipy.stats.linregress(x, y)
    np.testing.assert_allclose(line(x, y), (fit.slope, fit.intercept, fit.rvalue**2))


def test_a_perfect_prediction_and_one_without_spread(rng):
    measured = rng.exponential(size=50)
    perfect = agreement(measured / 2, measured)
    assert perfect["spearman"] == pytest.approx(1) and perfect["r2"] == pytest.approx(1)
    assert perfect["slope_origin"] == pytest.approx(2) and perfect["slope_origin_95"] == pytest.approx([2, 2])
    constant = agreement(np.ones(50), measured)
    assert constant["spearman"] is None and constant["spearman_95"] is None and constant["r2"] is None
    with pytest.raises(ValueError, match="finite"):
        agreement(np.full(50, np.nan), measured)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    # Slope 1 with noise: of 100 intervals at 95 %, 84 or fewer hold it with a probability below 1e-4.
    held = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        x = rng.uniform(1, 2, 60)
        y = x + rng.normal(size=60)
        slopes = lambda i, x=x, y=y: slope_through_origin(x[i], y[i])  # noqa: E731
        low, high = bootstrap(slopes, 60, seed, 400)
        held += low <= 1 <= high
    assert held > 84


def test_gain_is_paired(rng):
    measured = rng.exponential(size=80)
    good = measured * np.exp(0.1 * rng.normal(size=80))
    bad = measured * np.exp(2 * rng.normal(size=80))
    result = spearman_gain(good, bad, measured)
    assert result["gain_95"][0] > 0 and result["gain_95"][0] < result["gain"] < result["gain_95"][1]
    assert spearman_gain(good, good, measured)["gain_95"] == [0, 0]


def test_reliability_is_the_ceiling_of_a_perfect_predictor(rng):
    truth = rng.normal(size=400)
    samples = truth[:, None] + 2 * rng.normal(size=(400, 8))
    assert reliability(samples) == pytest.approx(float(spearman(truth, samples.mean(1))), abs=0.05)
    assert np.isnan(reliability(samples[:, :1]))
