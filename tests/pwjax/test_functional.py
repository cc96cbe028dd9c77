"""The functional layer: gradients at mixed bits, plans as data for jit and vmap, commits as pure functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pwjax
from pwjax import functional, models
from pwjax.checkpoints.artifact import Artifact

pytestmark = pytest.mark.usefixtures("quick_programs")
TOKENS = np.arange(20, dtype=np.int32).reshape(2, 10) * 7 % 300


@pytest.fixture(scope="module")
def resident(tiny_artifact):
    return pwjax.Resident.load(tiny_artifact)


@pytest.fixture(scope="module")
def plans(resident):
    rng = np.random.default_rng(0)
    return [rng.choice(resident.model.geometry.all_bits, resident.model.config.blocks) for _ in range(10)]


def mean_nll(scores):
    return -jnp.take_along_axis(jax.nn.log_softmax(scores[:, :-1]), TOKENS[:, 1:, None], axis=-1).mean()


@pytest.mark.slow
def test_gradients_at_mixed_bits_equal_those_of_the_dense_form(exact_activations, tiny_artifact, resident, plans):
    def paged(params, table):
        return mean_nll(pwjax.forward(resident.model, params, table, resident.arena, TOKENS))

    run = jax.jit(jax.value_and_grad(paged))
    artifact = Artifact.open(tiny_artifact)
    experts = jax.tree.map(np.zeros_like, artifact.expert_params(2))
    for bits in artifact.geometry.all_bits:
        chosen = np.asarray(plans[0]).reshape(2, 4, 2) == bits
        for matrix, (name, weights) in enumerate(artifact.expert_params(bits).items()):
            experts[name][chosen[..., matrix]] = weights[chosen[..., matrix]]

    def dense(params):
        whole = {**params, "layers": {**params["layers"], "experts": experts}}
        return mean_nll(models.logits(artifact.config, whole, models.forward(artifact.config, whole, TOKENS).hidden))

    want_loss, want = jax.jit(jax.value_and_grad(dense))(resident.params)
    got_loss, got = run(resident.params, resident.table(plans[0]))
    np.testing.assert_allclose(got_loss, want_loss, rtol=1e-5)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for path, leaf in jax.tree_util.tree_leaves_with_path(got):
        other = dict(jax.tree_util.tree_leaves_with_path(want))[path]
        scale = np.abs(other).max()
        assert scale > 0, path
        np.testing.assert_allclose(leaf, other, atol=1e-4 * scale + 1e-7, err_msg=jax.tree_util.keystr(path))


def test_ten_plans_take_one_compilation_and_vmap_equals_one_at_a_time(resident, plans):
    chosen = [2, 16, plans[1]]

    def run(table):
        return pwjax.forward(resident.model, resident.params, table, resident.arena, TOKENS)

    together = jax.jit(jax.vmap(run))(resident.tables(chosen))
    single = jax.jit(run)
    for got, plan in zip(together, chosen, strict=True):
        np.testing.assert_allclose(got, single(resident.table(plan)), atol=2e-5)
    sums = {float(jnp.sum(single(resident.table(plan)))) for plan in plans}
    assert len(sums) == 10 and single._cache_size() == 1


def test_a_plan_that_is_none_is_told(resident):
    for bits in (7, np.full(3, 4)):
        with pytest.raises(pwjax.UsageError, match="16 bits, each one of 2, 3, 4, 5, 6, 16"):
            resident.table(bits)


def test_commits_drop_padding_and_write_the_rest():
    arena = jnp.zeros((5, 8), jnp.uint32)
    words = np.arange(16, dtype=np.uint32).reshape(2, 8) + 1
    arena = jax.jit(functional.commit_pages)(arena, np.array([3, 5], np.int32), words)
    arena = jax.jit(functional.commit_kv)(arena, np.array([1, 9]), np.array([4, 0]), np.full((2, 2), 7, np.uint32))
    want = np.zeros((5, 8), np.uint32)
    want[3], want[1, 4:6] = words[0], 7
    np.testing.assert_array_equal(arena, want)
