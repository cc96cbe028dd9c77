"""How much memory and disk a calibration takes at most, from shapes alone."""

import numpy as np

from calib.rows import PIECE_ROWS
from calib.stream import BATCH_TOKENS, spill_bytes
from pwjax.calibration_text import CalibrationText
from pwjax.checkpoints.tree import param_shapes
from pwjax.config import ModelConfig
from pwjax.streamed import HEAD_TOKENS
from pwjax.units import format_bytes

# Python, JAX, and what the allocator keeps.
BASE_BYTES = 700 << 20


def memory_bytes(config: ModelConfig, widths: tuple[int, ...], length: int) -> int:
    """Most host memory that a calibration with sequences of ``length`` holds on the CPU, beside parameters that the
    caller keeps in memory.

    One layer as it was read and on the device, and as much again for what the allocator and the compiled program keep
    (measured by ``experiments/calibration_scale``), with the activations of a batch; or one expert at every width; or
    the head.
    """
    shapes = param_shapes(config)
    size = lambda name: 2 * int(np.prod(shapes[name], dtype=np.int64))  # noqa: E731
    layer = sum(size(name) for name in shapes if name.startswith("layers/")) // config.num_layers
    outer = sum(size(name) for name in shapes if not name.startswith("layers/"))
    expert = 4 * 3 * config.expert_size * config.hidden_size
    tokens, row = max(BATCH_TOKENS, length), 4 * max(config.hidden_size, 2 * config.expert_size)
    run = 4 * layer + tokens * row * (8 + 6 * config.top_k)
    block = layer + expert * (2 * len(widths) + 10) + 12 * PIECE_ROWS * row
    head = outer + 6 * HEAD_TOKENS * 4 * config.vocab_size + 4 * tokens * row
    return BASE_BYTES + outer + max(run, block, head)


def disk_bytes(config: ModelConfig, text: CalibrationText, importance: bool, refine: bool = False) -> int:
    """Bytes on disk that a calibration needs at most; ``importance`` and second moments to ``refine`` by are kept until
    the codes are made."""
    windows = text.windows.tokens
    spilled = spill_bytes(len(windows), text.count, windows.shape[1], config.hidden_size, config.num_layers)
    moments = 4 * (config.hidden_size**2 + config.expert_size**2) * config.num_layers * config.num_experts
    return spilled + 2 * config.expert_params * importance + moments * refine


def needs(
    config: ModelConfig, text: CalibrationText, widths: tuple[int, ...], importance: bool, refine: bool = False
) -> str:
    """A sentence for people."""
    count, length = len(text.windows.tokens), text.windows.tokens.shape[1]
    memory = format_bytes(memory_bytes(config, widths, length))
    disk = format_bytes(disk_bytes(config, text, importance, refine))
    return (
        f"calibrating with {text.count} sequences of {length} tokens, chosen from {count}: at most {memory} of memory "
        f"and {disk} of disk"
    )
