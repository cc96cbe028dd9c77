"""KL divergence of any plan from 16 bits on fixed windows of tokens, over the full vocabulary.

Every page of every width is on the device (:class:`pwjax.resident.Resident`), so a plan is nothing but a page table: no
page moves and nothing compiles from one plan to the next. The 16-bit side is kept as final hidden states
(float32, hidden size a token), and the head runs on both sides; that is exact and far smaller than log-probabilities.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pwjax.checkpoints.artifact import Artifact
from pwjax.errors import PWJaxError
from pwjax.evaluate.program import HEAD_TOKENS
from pwjax.memory.arena import free
from pwjax.models import Paged, forward, logits
from pwjax.resident import Model, Resident

# Tokens of one dispatch: enough that each expert is dequantized for many tokens, few enough for a small machine.
DISPATCH_TOKENS = 4096


def kl_from_logits(reference: jax.Array, scores: jax.Array) -> jax.Array:
    """``KL(softmax(reference) || softmax(scores))`` along the last axis, nats.

    Written as ``sum p (exp(-d) - 1 + d)`` with ``d = log p - log q``, whose terms are never negative: the usual
    ``sum p d`` loses a divergence of 1e-6 in the rounding of logarithms.
    """
    log_p, log_q = jax.nn.log_softmax(reference, -1), jax.nn.log_softmax(scores, -1)
    p, d = jnp.exp(log_p), log_p - log_q
    # exp(-d) could overflow where p is next to nothing; there the plain form is exact enough.
    near = d > -8
    terms = jnp.where(near, p * (jnp.expm1(-jnp.where(near, d, 0.0)) + d), jnp.exp(log_q) - p + p * d)
    return jnp.maximum(terms.sum(-1), 0.0)


def _divergence(model: Model, params, arena, table, tokens, reference) -> tuple[jax.Array, jax.Array]:
    """KL float32[B, W] of ``tokens`` int32[B, W] from final hidden states ``reference`` float32[B, W, H], and the
    plan's own hidden states, which one run at 16 bits turns into the reference of all others."""
    paged = Paged(arena, table.bits, table.pages, model.geometry)
    hidden = forward(model.config, params, tokens, paged=paged).hidden
    rows = jnp.stack([reference, hidden]).reshape(2, -1, hidden.shape[-1])
    count = rows.shape[1]
    rows = jnp.pad(rows, ((0, 0), (0, -count % HEAD_TOKENS), (0, 0)))
    rows = jnp.moveaxis(rows.reshape(2, -1, HEAD_TOKENS, rows.shape[-1]), 1, 0)
    kl = lax.map(lambda part: kl_from_logits(*logits(model.config, params, part)), rows)
    return kl.reshape(-1)[:count].reshape(tokens.shape), hidden


class Divergence:
    """A model with all its pages on the device and the 16-bit side of ``windows``; free it with :meth:`close`.

    ``windows`` int32[n, W], whole windows of one length. ``reference_bits``: 16, or the widest that there is.
    """

    def __init__(self, artifact: Artifact, windows: np.ndarray):
        self.windows, self.reference_bits = windows, artifact.geometry.all_bits[-1]
        batch = max(1, min(len(windows), DISPATCH_TOKENS // windows.shape[1]))
        self._model = Resident.load(artifact)
        self._program = jax.jit(partial(_divergence, self._model.model))
        self._batches = []
        table = self._model.table(self.reference_bits)
        empty = jnp.zeros((batch, windows.shape[1], artifact.config.hidden_size), jnp.float32)
        for start in range(0, len(windows), batch):
            part = windows[start : start + batch]
            tokens = jnp.asarray(np.concatenate([part, np.repeat(part[:1], batch - len(part), 0)]), jnp.int32)
            _, reference = self._program(self._model.params, self._model.arena, table, tokens, empty)
            self._batches.append((tokens, reference))

    def measure(self, bits: np.ndarray) -> np.ndarray:
        """Mean KL of a token of each window, float64[n], nats, of the plan ``bits`` int[blocks] (rows of BlockTable).

        PWJaxError where it is not finite.
        """
        model, table = self._model, self._model.table(bits)
        parts = [self._program(model.params, model.arena, table, *batch)[0] for batch in self._batches]
        kl = np.concatenate(jax.device_get(parts)).astype(np.float64)[: len(self.windows)].mean(1)
        if not np.isfinite(kl).all():
            raise PWJaxError("the model gives likelihoods that are not finite; its parameters may be damaged")
        return kl

    def close(self) -> None:
        """Free the device memory; harmless when done twice."""
        free((self._model.params, self._model.arena, self._batches))

    def __enter__(self) -> "Divergence":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
