import numpy as np
import pytest

from calib.residual import Samples, _notes, fit_heads, gate_feature, judge, moments_feature, split


def samples_where(log_ratio, rng, sequences=60, layers=2, experts=6, widths=4):
    """Samples whose damage a token is exp(log_ratio(norms)) of an average that differs from block to block."""
    shape = sequences, layers, experts
    tokens = rng.integers(10, 60, shape).astype(float)
    gates = 0.3 * tokens
    mean = rng.uniform(5, 9, (*shape, 2))
    norms = np.stack([gates[..., None] * mean, gates[..., None] * (mean * 1.1) ** 2, mean * 1.5], -1)
    average = np.exp(rng.normal(size=(1, layers, experts, 2, 1))) * 4.0 ** -np.arange(widths)
    factor = np.exp(log_ratio(mean))[..., None]
    damage = tokens[..., None, None] * average * factor
    return Samples(tokens, gates, norms, damage, damage.copy())


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_a_residual_that_norms_explain_is_found_and_helps(rng):
    samples = samples_where(lambda norm: 0.4 * (norm - 7) + 0.05 * rng.normal(size=norm.shape), rng)
    fitted = split(np.repeat([0, 1, 2], 20), seed=1)
    assert 0.6 < fitted.mean() < 0.72
    heads = fit_heads(samples.features()[..., None, :], samples, fitted)
    assert heads.confidence.shape == (2, 3) and (heads.confidence > 0.9).all()
    eta = heads.factor(samples.features()[..., None, :])
    # Twice the norm difference, twice the effect: the head is in the units of the features.
    assert np.corrcoef(np.log(eta[..., 0, 0]).ravel(), samples.features()[..., 0, 0].ravel())[0, 1] > 0.98
    verdict = judge(samples, eta, fitted)
    assert verdict["helps"] and verdict["on"] < 0.3 * verdict["off"] and verdict["change_95"][1] < 0


def test_a_residual_that_norms_do_not_explain_is_told(rng):
    samples = samples_where(lambda norm: rng.normal(size=norm.shape), rng)
    fitted = split(np.zeros(60, int), seed=1)
    heads = fit_heads(samples.features()[..., None, :], samples, fitted)
    assert (heads.confidence < 0.1).all()
    verdict = judge(samples, heads.factor(samples.features()[..., None, :]), fitted)
    assert abs(verdict["change"]) < 0.05 * verdict["off"]
    assert np.isfinite(heads.weights).all() and (heads.low <= heads.high).all()


def test_moments_predict_what_they_measure(rng):
    samples = samples_where(lambda norm: rng.normal(size=norm.shape), rng)
    fitted = split(np.zeros(60, int), seed=1)
    feature = moments_feature(samples, fitted)
    heads = fit_heads(feature, samples, fitted)
    np.testing.assert_allclose(heads.weights, 1, atol=0.01)
    assert judge(samples, heads.factor(feature), fitted)["helps"]


def test_damage_that_goes_with_the_squared_gate_is_found(rng):
    samples = samples_where(lambda norm: 0.01 * rng.normal(size=norm.shape), rng)
    gate = rng.uniform(0.1, 0.5, samples.tokens.shape)
    scaled = samples.damage * (gate**2)[..., None, None]
    samples = samples._replace(gates=samples.tokens * gate, damage=scaled)
    fitted = split(np.zeros(60, int), seed=1)
    heads = fit_heads(gate_feature(samples, fitted), samples, fitted)
    np.testing.assert_allclose(heads.weights, 2, atol=0.3)
    assert (heads.confidence > 0.8).all()
    assert judge(samples, heads.factor(gate_feature(samples, fitted)), fitted)["helps"]


def test_experts_without_tokens_change_nothing(rng):
    samples = samples_where(lambda norm: 0.4 * (norm - 7), rng)
    fitted = split(np.zeros(60, int), seed=1)
    for array in samples:
        array[:, 1, 2] = 0
    heads = fit_heads(samples.features()[..., None, :], samples, fitted)
    features = samples.features()
    assert not features[:, 1, 2].any() and (heads.factor(features[..., None, :])[:, 1, 2] == 1).all()
    assert np.isfinite(judge(samples, heads.factor(features[..., None, :]), fitted)["on"])
    empty = Samples(*(np.zeros((6, *array.shape[1:])) for array in samples))
    nothing = fit_heads(empty.features()[..., None, :], empty, split(np.zeros(6, int), 0))
    assert not nothing.weights.any() and not nothing.confidence.any()


def test_texts_that_differ_are_told_by_their_averages_not_by_the_residual(rng):
    texts = np.repeat([0, 1, 2], 20)
    samples = samples_where(lambda norm: 0.01 * rng.normal(size=norm.shape), rng)
    level = np.exp([-1.0, 0.0, 1.0])[texts][:, None, None, None, None]
    samples = samples._replace(
        damage=samples.damage * level, moments=samples.moments * level, tokens=20 * samples.tokens
    )
    samples = samples._replace(damage=20 * samples.damage, moments=20 * samples.moments)
    fitted = split(texts, seed=1)
    alike = np.ones((*samples.tokens.shape, 2, 3))
    apart = judge(samples, alike, fitted, texts=texts)
    assert apart["off"] < 0.15 * judge(samples, alike, fitted)["off"]
    # Nothing is left to predict.
    heads = fit_heads(moments_feature(samples, fitted, texts), samples, fitted, texts)
    assert (np.abs(np.log(heads.factor(moments_feature(samples, fitted, texts)))) < 0.2).all()


def test_what_was_not_proved_is_told_apart_from_what_failed():
    judged = {"sequences": 40, "helps": False}, {"sequences": 2, "helps": False}, {"sequences": 40, "helps": True}
    notes = _notes(dict(zip(("paper", "gate", "moments"), judged, strict=True)), "moments")
    assert "does not lower" in notes[0] and "2 sequences, at least 5" in notes[1] and notes[2] == "moments is in force"
