"""Writing one safetensors file tensor by tensor; the library's own writer needs all of them in memory, twice.

The library also writes the memory of a transposed array as it lies, without an error, so rows are put in C order here.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np


def write_bf16(path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write ``tensors`` as bfloat16, in the order and with the shapes of ``shapes``; ValueError where they differ."""
    header: dict = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    expected = iter(shapes.items())
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, value in tensors:
            wanted = next(expected, None)
            if wanted is None or wanted[0] != name or tuple(wanted[1]) != value.shape:
                raise ValueError(f"expected the tensor {wanted}, got {name} {value.shape}")
            value = np.ascontiguousarray(value.astype(ml_dtypes.bfloat16, copy=False))
            file.write(value.view(np.uint16).astype("<u2", copy=False).data)
        if (left := next(expected, None)) is not None:
            raise ValueError(f"the tensor {left[0]} was not given")
