"""Writing one safetensors file tensor by tensor; the library's own writer needs all of them in memory, twice.

The library also writes the memory of a transposed array as it lies, without an error, so rows are put in C order here.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from pwjax.checkpoints.lazy import LayerStack

_NAMES = {"bfloat16": "BF16", "float32": "F32"}


def write_tensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, np.ndarray | LayerStack]],
    metadata: Mapping[str, str] | None = None,
    dtype: DTypeLike = ml_dtypes.bfloat16,
) -> None:
    """Write ``tensors`` as ``dtype``, in the order and with the shapes of ``shapes``; ValueError where they differ.

    ``dtype`` is bfloat16 or float32. A :class:`LayerStack` is read and written one layer at a time. ``metadata`` goes
    into the header.
    """
    dtype = np.dtype(dtype)
    header: dict = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _NAMES[dtype.name], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    expected = iter(shapes.items())
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, value in tensors:
            wanted = next(expected, None)
            if wanted is None or wanted[0] != name or tuple(wanted[1]) != value.shape:
                raise ValueError(f"expected the tensor {wanted}, got {name} {value.shape}")
            for part in value if isinstance(value, LayerStack) else (value,):
                part = np.ascontiguousarray(part.astype(dtype, copy=False))
                file.write(part.view(f"u{dtype.itemsize}").astype(f"<u{dtype.itemsize}", copy=False).data)
        if (left := next(expected, None)) is not None:
            raise ValueError(f"the tensor {left[0]} was not given")
