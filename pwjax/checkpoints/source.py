"""Parameters of a model one layer at a time, wherever they are: in memory, a Hugging Face directory, an artifact."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from pwjax.checkpoints.lazy import LayerStack
from pwjax.checkpoints.tree import unflatten
from pwjax.config import ModelConfig


class ParamSource:
    """All parameters by flat name: ``flat`` maps them to arrays, or to :class:`LayerStack` where they stay on disk.

    ``config`` ModelConfig. Layers are given out as ``dtype``. What is on disk is read anew at each call, so a pass
    over the layers holds one of them at a time.
    """

    def __init__(
        self, config: ModelConfig, flat: Mapping[str, np.ndarray | LayerStack], dtype: DTypeLike = ml_dtypes.bfloat16
    ):
        self.config, self.flat, self.dtype = config, dict(flat), np.dtype(dtype)

    def layer(self, layer: int) -> dict[str, np.ndarray]:
        """Every parameter of one layer: flat name, ``layers/`` included, to its array without the layers' axis."""
        return {name: self.read(name, layer) for name in self.names(layer)}

    def names(self, layer: int) -> list[str]:
        """Flat names of the parameters of one layer."""
        return [n for n in self.flat if n.startswith("layers/") and layer in stack_layers(self.config, n)]

    def read(self, name: str, layer: int) -> np.ndarray:
        """One parameter of one layer."""
        return self._cast(self.flat[name][stack_layers(self.config, name).index(layer)])

    def outer(self) -> dict[str, np.ndarray]:
        """What lies outside of the layers: embedding, last norm, head."""
        return {name: self._cast(value) for name, value in self.flat.items() if not name.startswith("layers/")}

    def _cast(self, value) -> np.ndarray:
        return np.asarray(value).astype(self.dtype, copy=False)

    def tree(self) -> dict:
        """The nested parameter tree, stacks left on disk: what ``quantize`` and ``save_hf`` take."""
        return unflatten(self.flat)


def stack_layers(config: ModelConfig, name: str) -> tuple[int, ...]:
    """Numbers of the layers that a parameter's first axis goes through, in its order.

    All of them, but for the attention of a model with several kinds, ``layers/attn_<kind>/...``.
    """
    group = name.split("/")[1]
    for kind, layers in zip(config.attention_kinds, config.kind_layers, strict=True):
        if config.other_kinds and group == config.attention_group(kind):
            return layers
    return tuple(range(config.num_layers))
