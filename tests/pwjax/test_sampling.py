import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pwjax.engine.sampling import SamplingArrays, SamplingParams, _keep_top, sample, top_logprobs
from pwjax.errors import UsageError

SAMPLE = jax.jit(sample)


def draw(logits, params, seeds=None, positions=None):
    """Tokens of rows ``logits`` [S, V] under one SamplingParams a row (or one for all)."""
    logits = np.asarray(logits, np.float32)
    rows = len(logits)
    params = [params] * rows if isinstance(params, SamplingParams) else params
    seeds = np.zeros(rows, np.uint32) if seeds is None else np.asarray(seeds, np.uint32)
    positions = np.arange(rows, dtype=np.int32) if positions is None else np.asarray(positions, np.int32)
    tokens, logprobs = SAMPLE(logits, SamplingArrays.of(params), seeds, positions)
    return np.asarray(tokens), np.asarray(logprobs)


def support(row, params, draws=400):
    return set(draw(np.tile(np.float32(row), (draws, 1)), params)[0].tolist())


def reference_keep(row, params):
    """The tokens that may be drawn, by the definition, in float64."""
    row = np.asarray(row, np.float64)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    order = order[: params.top_k or len(row)]
    p = np.exp((row[order] - row.max()) / params.temperature)
    p /= p.sum()
    before = np.cumsum(p) - p
    kept = [i for i, b in zip(order, before, strict=True) if params.top_p >= 1 or b < params.top_p] or order[:1]
    return {i for i in kept if np.exp((row[i] - row.max()) / params.temperature) >= params.min_p}


def test_temperature_zero_is_argmax_and_the_lowest_id_wins():
    logits = [[1, 3, 3, 2], [0, 0, 0, 0], [-5, -np.inf, -4, -np.inf]]
    tokens, logprobs = draw(logits, SamplingParams())
    assert tokens.tolist() == [1, 0, 2]
    expected = jax.nn.log_softmax(jnp.array(logits, jnp.float32))[np.arange(3), tokens]
    np.testing.assert_allclose(logprobs, expected, rtol=1e-6)


def test_top_k_is_exact_under_ties():
    assert support([1, 3, 3, 3, 2], SamplingParams(temperature=1, top_k=2)) == {1, 2}
    assert support([0, 0, 0, 0, 0], SamplingParams(temperature=1, top_k=3)) == {0, 1, 2}


@pytest.mark.parametrize("top_k", [4, 5, 10**12])
def test_top_k_beyond_the_vocabulary_keeps_all(top_k):
    assert support([0.0, 0.1, 0.2, 0.3], SamplingParams(temperature=1, top_k=top_k)) == {0, 1, 2, 3}


def test_top_p_ends():
    row = np.log([0.1, 0.5, 0.3, 0.1])
    assert support(row, SamplingParams(temperature=1, top_p=0.0)) == {1}
    assert support(row, SamplingParams(temperature=1, top_p=0.5)) == {1}
    assert support(row, SamplingParams(temperature=1, top_p=0.7)) == {1, 2}
    assert support(row, SamplingParams(temperature=1, top_p=0.85)) == {0, 1, 2}
    assert support(row, SamplingParams(temperature=1, top_p=1.0)) == {0, 1, 2, 3}


def test_min_p_is_relative_to_the_best():
    row = np.log([0.5, 0.26, 0.2, 0.04])
    assert support(row, SamplingParams(temperature=1, min_p=0.5)) == {0, 1}
    assert support(row, SamplingParams(temperature=1, min_p=1.0)) == {0}


def test_frequencies_follow_the_distribution():
    p = np.array([0.5, 0.2, 0.2, 0.1])
    tokens, _ = draw(np.tile(np.log(p), (20000, 1)), SamplingParams(temperature=1))
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 20000, p, atol=0.015)
    tokens, _ = draw(np.tile(np.log(p), (20000, 1)), SamplingParams(temperature=0.5))
    sharp = p**2 / (p**2).sum()
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 20000, sharp, atol=0.015)


@given(
    row=st.lists(st.sampled_from([-np.inf, -3.0, -1.0, 0.0, 0.5, 0.5, 2.0]), min_size=8, max_size=8),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([0.0, 0.13, 0.5, 0.77, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.4]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
)
def test_only_kept_tokens_are_drawn(row, top_k, top_p, min_p, temperature):
    if max(row) == -np.inf:
        row[3] = 0.0
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    allowed = {i for i in reference_keep(row, params) if row[i] > -np.inf}
    assert support(row, params) <= allowed
    if len(allowed) == 1:
        assert support(row, params) == allowed


@given(st.integers(0, 2**32 - 1), st.integers(0, 10_000), st.randoms())
def test_a_row_does_not_depend_on_its_neighbours(seed, position, random):
    rng = np.random.default_rng(random.randint(0, 1000))
    row = rng.normal(size=50).astype(np.float32)
    mine = SamplingParams(temperature=0.9)
    others = [
        SamplingParams(),
        SamplingParams(temperature=1.5, top_k=3),
        SamplingParams(temperature=0.7, top_p=0.4, min_p=0.01),
    ]
    picks = []
    for slot in range(4):
        logits = rng.normal(size=(4, 50)).astype(np.float32)
        logits[slot] = row
        params = [random.choice(others) for _ in range(4)]
        params[slot] = mine
        seeds, positions = rng.integers(0, 2**32, 4), rng.integers(0, 999, 4)
        seeds[slot], positions[slot] = seed, position
        tokens, logprobs = draw(logits, params, seeds, positions)
        picks.append((tokens[slot], logprobs[slot]))
    assert len(set(picks)) == 1


def test_seed_and_position_both_matter():
    logits = np.zeros((64, 1000), np.float32)
    params = SamplingParams(temperature=1)
    first, _ = draw(logits, params, np.zeros(64), np.arange(64))
    again, _ = draw(logits, params, np.zeros(64), np.arange(64))
    other, _ = draw(logits, params, np.ones(64), np.arange(64))
    assert (first == again).all() and len(set(first)) > 50 and (first != other).sum() > 50


@pytest.mark.parametrize("temperature", [1e-30, 1e-4, 1e30])
def test_extreme_temperatures_stay_finite(temperature):
    logits = [[1e30, -1e30, 0.0], [5.0, 80.0, -np.inf]]
    tokens, logprobs = draw(logits, SamplingParams(temperature=temperature))
    assert np.isfinite(logprobs).all() and ((tokens >= 0) & (tokens < 3)).all()
    if temperature < 1:
        assert tokens.tolist() == [0, 1]


def test_the_kept_set_is_exact():
    rng = np.random.default_rng(3)
    rows = np.round(rng.normal(size=(300, 40)) * 2, 1).astype(np.float32)  # rounded, so that many values tie
    rows[:40] = rng.integers(0, 2, size=(40, 40))
    rows[40:60, 5:] = -np.inf
    top_k, top_p = rng.integers(1, 41, 300), rng.uniform(0, 1, 300)
    scaled = rows - rows.max(-1, keepdims=True)
    kept = np.asarray(jax.jit(_keep_top)(scaled, top_k.astype(np.int32), top_p.astype(np.float32)))
    for row, k, p, got in zip(rows, top_k, top_p, kept, strict=True):
        params = SamplingParams(temperature=1, top_k=int(k), top_p=float(np.float32(p)))
        assert set(np.flatnonzero(got)) == reference_keep(row, params)


def test_greedy_batch_takes_a_branch_without_loops_or_random_numbers():
    lowered = jax.jit(sample).lower(
        jnp.zeros((2, 64)), SamplingArrays.of([None, None]), jnp.zeros(2, jnp.uint32), jnp.zeros(2, jnp.int32)
    )
    hlo = lowered.compile().as_text()
    entry = hlo[hlo.index("ENTRY"):]
    assert " conditional(" in entry and " while(" not in entry and " while(" in hlo


def test_top_logprobs():
    ids, values = top_logprobs(jnp.array([[1.0, 3.0, 3.0, 2.0]]), 3)
    assert np.asarray(ids).tolist() == [[1, 2, 3]]
    np.testing.assert_allclose(values, jax.nn.log_softmax(jnp.array([[1.0, 3.0, 3.0, 2.0]]))[:, [1, 2, 3]], rtol=1e-6)


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", True),
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "hot"),
        ("top_k", -1), ("top_k", 2.0),
        ("top_p", 1.01), ("top_p", -0.01), ("top_p", float("nan")), ("top_p", None),
        ("min_p", 2), ("seed", -1), ("seed", 2**32), ("seed", 0.5),
        ("stop", ("",)), ("stop", (1,)), ("stop", None), ("stop_token_ids", (-1,)), ("stop_token_ids", ("a",)),
        ("logprobs", 21), ("logprobs", -1), ("ignore_eos", 1),
    ],
)
def test_out_of_range_is_a_sentence(field, value):
    with pytest.raises(UsageError, match=f"{field} must be .*got") as caught:
        SamplingParams(**{field: value})
    assert caught.value.exit_code == 2


def test_params_normalise_and_reject_unknown_fields():
    params = SamplingParams(stop="###", stop_token_ids=[3, 4])
    assert params.stop == ("###",) and params.stop_token_ids == (3, 4) and params.greedy
    assert hash(params) == hash(SamplingParams(stop=["###"], stop_token_ids=(3, 4)))
    assert params.with_fields(top_k=4).top_k == 4
    with pytest.raises(UsageError, match=r"unknown sampling fields \['temprature'\].*temperature"):
        params.with_fields(temprature=1)
