"""The prompt residual from calibration to the engine: what is stored, and equal features of the same sequence."""

import shutil

import numpy as np
import pytest

from calib.blocks import Measured
from calib.residual import Samples, moments_feature, moments_reference, residual, split
from planner import MomentsReference, Observation, ResidualHeads, uniform
from pwjax import Request, SamplingParams, load
from pwjax.calibration import calibrate
from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.tables import write_tables

WIDTHS = (2, 3, 4, 16)


def measured_where(rng, noise: float, sequences=48, layers=2, experts=3) -> tuple[Measured, tuple]:
    """What calibration would measure of random inputs whose damage is that of their second moments, times noise."""
    lead = sequences, layers, experts
    counts = rng.integers(9, 30, lead)
    inputs = [rng.lognormal(0, 1, (*lead, size)) for size in (8, 5)]
    energies = [rng.random((layers, experts, 1, size)) * 4.0 ** -np.arange(3)[:, None] for size in (8, 5)]
    moments = 0.5 * np.stack([np.einsum("nlek,lebk->nleb", m, e) for m, e in zip(inputs, energies, strict=True)], 3)
    damage = moments * np.exp(noise * rng.normal(size=(*lead, 2, 1)))
    by_expert = lambda a: np.moveaxis(a, 0, 2)  # noqa: E731
    by_sequence = by_expert(np.repeat(damage[:, :, :, None], 2, 3))
    norms = rng.uniform(1, 2, (layers, experts, sequences, 2, 4))
    counted = by_expert(counts)
    found = Measured(
        counted.sum(-1), by_sequence.sum(2), by_sequence.sum(2), counted, by_sequence, by_expert(moments), norms,
        *(e.astype(np.float32) for e in energies),
    )  # fmt: skip
    return found, (inputs, counts)


def test_the_form_that_explains_more_is_stored_with_what_its_features_need():
    rng = np.random.default_rng(0)
    measured, (inputs, counts) = measured_where(rng, noise=0.1)
    sources = np.repeat([0, 1], 24)
    arrays, found = residual(measured, sources, WIDTHS, "output", seed=1)
    assert found["best"] == "moments" and found["forms"]["moments"]["used"] and not found["forms"]["paper"]["used"]
    names = ("energy_gate_up", "energy_down", "mean")
    reference = MomentsReference(*(arrays[f"residual/moments/{name}"] for name in names))
    assert reference.energy_gate_up.dtype == np.float16
    samples = Samples.of(measured, "output", True)
    want = moments_feature(samples, split(sources, 1))
    for n in range(3):
        got = reference.features(reference.sums([own[n] for own in inputs]), counts[n])
        np.testing.assert_allclose(got.reshape(want[n].shape), want[n], atol=2e-3)
    again, _ = residual(measured, sources, WIDTHS, "output", seed=1)
    assert all(again[name].tobytes() == array.tobytes() for name, array in arrays.items())


def test_nothing_is_stored_where_nothing_helps():
    rng = np.random.default_rng(0)
    measured, _ = measured_where(rng, noise=0.1)
    alike = measured.counts[..., None, None, None] * 4.0 ** -np.arange(3) * rng.normal(1, 0.01, (2, 3, 48, 2, 2, 1))
    arrays, found = residual(measured._replace(by_sequence=alike), np.zeros(48, int), WIDTHS, "output")
    assert found["best"] is None and not arrays and "the prompt residual is off" in found["notes"]


@pytest.mark.slow
def test_a_prefill_gives_the_features_that_calibration_had_of_the_sequence(tiny_artifact, tiny_config, tmp_path):
    path = shutil.copytree(tiny_artifact, tmp_path / "model.pw")
    windows = np.random.default_rng(0).integers(1, tiny_config.vocab_size, (6, 24)).astype(np.int32)
    made = calibrate(path, windows, tokens=windows.size, sequence_length=24)
    measured = made.sequences[6]
    samples, fitted = Samples.of(measured, "output", True), np.arange(6) > 0
    want = moments_feature(samples, fitted)[0].reshape(-1, 5, 1)
    one = np.ones((2, 5))
    heads = {"weights": one[..., None], "confidence": one, "low": -9 * one, "high": 9 * one}
    reference = moments_reference(samples, measured, fitted)
    tables = {k: v for k, v in made.tables.items() if not k.startswith("residual/")}
    moments = {f"residual/moments/{k}": v for k, v in (heads | reference).items()}
    write_tables(path, tables | moments, made.summary)

    with load(path, batch=2, context=64, kv_dtype="float32") as engine:
        engine.apply(uniform(engine.observe().table, 6))
        engine.settle()
        prompt = Request(
            "one", prompt_token_ids=tuple(windows[0].tolist()), sampling=SamplingParams(max_tokens=30, ignore_eos=True)
        )
        engine.submit(prompt)
        engine.step()
        seen: Observation = engine.observe().observation
        assert (seen.bits == 6).all() and seen.residual is not None
        # What `down` reads is computed with 16 bits in calibration, and with those in force here.
        np.testing.assert_allclose(seen.residual[0::2], want[0::2], atol=2e-3)
        np.testing.assert_allclose(seen.residual[1::2], want[1::2], atol=0.1)
        heads_in_force = engine.observe().table.heads
        assert isinstance(heads_in_force, ResidualHeads) and heads_in_force.form == "moments"
        assert np.abs(want).max() > 0.1
    assert Artifact.open(path).table("paper").heads is None
