"""What calibration needs of a model: layers that can be run one at a time.

Shapes: B windows, T tokens, H hidden size, k choices a token, I inner size of an expert.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np


class Trace(NamedTuple):
    """What the routed experts of a layer saw: ``inputs`` float32[B, T, H], ``experts`` int32[B, T, k], ``gates``
    float32[B, T, k]."""

    inputs: jax.Array
    experts: jax.Array
    gates: jax.Array


class Functions(Protocol):
    """The arithmetic of a model: pure functions, compiled once for all equal objects, so they must be hashable.

    Parameters are pytrees that only the model understands.
    """

    def __hash__(self) -> int: ...

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer."""
        ...

    def run(self, kind: Hashable, params: Any, x: jax.Array, bump: jax.Array) -> tuple[jax.Array, Trace]:
        """Output float32[B, T, H] of a layer for its input ``x``, with ``bump`` float32[B, T, H] added to the weighted
        sum of its routed experts."""
        ...

    def loss(self, head: Any, x: jax.Array, tokens: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of one window's output ``x`` float32[T, H] of the last layer: the summed negative log-likelihood of one
        token a position drawn from the model itself, and the mean one of the ``tokens`` int32[T] that came next."""
        ...

    def inner(self, x: jax.Array, gate_up: jax.Array) -> jax.Array:
        """Input float32[n, I] of ``down`` for rows ``x`` float32[n, H]; an expert's output is ``inner @ down.T``."""
        ...


class StreamedModel(Protocol):
    """A decoder that gives out the weights of one layer at a time."""

    @property
    def functions(self) -> Functions:
        """Its arithmetic."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers."""
        ...

    @property
    def hidden_size(self) -> int:
        """H."""
        ...

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Input float32[B, T, H] of layer 0 for ``tokens`` int32[B, T]."""
        ...

    def kind(self, layer: int) -> Hashable:
        """Layers of one kind share a compiled program."""
        ...

    def layer(self, layer: int) -> Any:
        """Parameters of a layer, on the device."""
        ...

    def head(self) -> Any:
        """Parameters of the final norm and the head, on the device."""
        ...
