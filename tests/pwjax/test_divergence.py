import jax
import numpy as np
import pytest

from pwjax.checkpoints.artifact import Artifact
from pwjax.evaluate.divergence import Divergence, kl_from_logits

pytestmark = pytest.mark.usefixtures("quick_programs")


def dense_kl(artifact, params, bits, windows):
    """Mean KL of a token of each window, from dense forwards in NumPy's float64 at the head."""
    from pwjax.checkpoints.tree import flatten, unflatten
    from pwjax.models import forward, logits

    def log_probs(level):
        experts = {f"layers/experts/{name}": w for name, w in artifact.expert_params(level).items()}
        tree = unflatten({name: np.asarray(w, np.float32) for name, w in flatten(params).items()} | experts)
        scores = np.asarray(run(tree, windows), np.float64)
        return scores - np.log(np.exp(scores).sum(-1, keepdims=True))

    run = jax.jit(lambda tree, tokens: logits(artifact.config, tree, forward(artifact.config, tree, tokens).hidden))
    p, q = log_probs(16), log_probs(bits)
    return (np.exp(p) * (p - q)).sum(-1).mean(-1)


def test_divergence_equals_dense_forwards_and_nothing_else_moves(tiny_artifact, tiny_params):
    artifact = Artifact.open(tiny_artifact)
    windows = np.random.default_rng(0).integers(1, 300, (3, 24)).astype(np.int32)
    with Divergence(artifact, windows) as divergence:
        blocks = artifact.config.blocks
        assert divergence.measure(np.full(blocks, 16)).max() < 1e-9
        measured = divergence.measure(np.full(blocks, 3))
        np.testing.assert_allclose(measured, dense_kl(artifact, tiny_params, 3, windows), rtol=2e-3)
        lower, one = divergence.measure(np.full(blocks, 2)), np.full(blocks, 16)
        one[5] = 2
        assert (divergence.measure(one) < lower).all() and divergence.measure(one).min() > 0
        # A plan leaves no trace.
        np.testing.assert_array_equal(divergence.measure(np.full(blocks, 3)), measured)


def test_kl_keeps_small_divergences_and_survives_extreme_logits():
    rng = np.random.default_rng(1)
    p = rng.normal(size=(5, 400)) * 3
    kl = jax.jit(kl_from_logits)
    for scale in (1e-4, 1e-2, 3.0):
        q = p + scale * rng.normal(size=p.shape)
        log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
        wanted = (np.exp(log_p) * (log_p - log_q)).sum(-1)
        got = kl(np.float32(p), np.float32(q))
        np.testing.assert_allclose(got, wanted, rtol=1e-2)
    sure = np.full((2, 5, 400), -200, np.float32)
    sure[0, :, 0] = sure[1, :, 1] = 0
    np.testing.assert_allclose(kl(*sure), 200, rtol=1e-3)
    assert np.isfinite(kl(*-sure)).all()
