"""A stacked parameter that is read one layer at a time, so that a large checkpoint never has to fit in memory."""

from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike


class LayerStack:
    """Stands where an array [L, ...] would: ``stack[layer]`` reads that layer, iteration reads all in turn.

    ``shape`` is that of the whole; ``read(layer)`` gives one layer, of type ``dtype``. ``np.asarray(stack)`` reads all.
    """

    def __init__(
        self, shape: tuple[int, ...], read: Callable[[int], np.ndarray], dtype: DTypeLike = ml_dtypes.bfloat16
    ):
        self.shape, self.dtype, self._read = tuple(shape), np.dtype(dtype), read

    @property
    def ndim(self) -> int:
        """Axes, the layers' included."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes if it were read as a whole."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, layer: int) -> np.ndarray:
        if not 0 <= layer < self.shape[0]:
            raise IndexError(f"layer {layer} is not in 0..{self.shape[0] - 1}")
        return self._read(layer)

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self._read, range(self.shape[0]))

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        """The whole array; always a copy."""
        out = np.empty(self.shape, self.dtype)
        for layer, value in enumerate(self):
            out[layer] = value
        return out if dtype is None else out.astype(dtype, copy=False)


def bf16(value: np.ndarray | LayerStack) -> np.ndarray:
    """As bfloat16, without a copy where it is already."""
    return np.asarray(value).astype(ml_dtypes.bfloat16, copy=False)
