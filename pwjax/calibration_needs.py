"""How much memory and disk a calibration takes at most, from shapes alone."""

import numpy as np

from calib.rows import PIECE_ROWS
from calib.stream import batch_windows, spill_bytes
from pallas_kernels.expert_ffn.grouping import tile_count
from pallas_kernels.expert_ffn.reference import tile_rows
from pallas_kernels.paged_attention.reference import BLOCK_QUERIES
from pwjax.calibration_text import CalibrationText
from pwjax.checkpoints.tree import param_shapes
from pwjax.config import ModelConfig
from pwjax.models.decoder import head_parts
from pwjax.streamed import HEAD_TOKENS
from pwjax.units import format_bytes

# Python, JAX, compiling, and what the allocator keeps.
BASE_BYTES = 900 << 20


def memory_bytes(config: ModelConfig, widths: tuple[int, ...], windows: int, length: int) -> int:
    """Most host memory that a calibration on ``windows`` sequences of ``length`` holds on the CPU, beside parameters
    that the caller keeps in memory.

    The outer parameters and, one after another: a layer on the device and its largest parameter as it was read; that
    layer and a batch of tokens through it, backward; the layer's experts on the host and one of them at every width;
    the head and the batch. How often what is kept is what XLA's buffers hold, which the tests ask it.
    """
    shapes, hidden = param_shapes(config), config.hidden_size
    inside = [2 * int(np.prod(shape[1:], dtype=np.int64)) for n, shape in shapes.items() if n.startswith("layers/")]
    outer = sum(2 * int(np.prod(shape, dtype=np.int64)) for n, shape in shapes.items() if not n.startswith("layers/"))
    layer, expert = sum(inside), 4 * 3 * config.expert_size * hidden
    tokens = batch_windows(windows, length) * length
    # Activations float32: what tiles of experts read and give, the dense MLP, attention, and a layer's inputs.
    choices = tokens * config.top_k
    of_tile = tile_rows(choices, config.num_experts)
    tiled = of_tile * tile_count(choices, config.num_experts, of_tile)
    heads = config.num_heads * max(kind.head_dim for kind in config.attention_kinds)
    token = 7 * (config.shared_size + config.mlp_size) + 4 * heads + 16 * hidden
    scores = 4 * config.num_heads * min(BLOCK_QUERIES, length) * length
    batch = 4 * (tokens * token + 5 * tiled * hidden + scores)
    piece = 4 * PIECE_ROWS * (8 * hidden + 12 * config.expert_size) + 12 * (hidden**2 + config.expert_size**2)
    logits = 4 * config.vocab_size * (6 * HEAD_TOKENS + 2 * hidden // head_parts(config.vocab_size))
    return BASE_BYTES + outer + max(
        layer + max(inside),
        layer + batch + 3 * expert,
        config.num_experts * expert // 2 + (3 * len(widths) + 10) * expert + piece,
        outer + logits + 16 * tokens * hidden,
    )  # fmt: skip


def disk_bytes(
    config: ModelConfig, text: CalibrationText, widths: tuple[int, ...], importance: bool, refine: bool = False
) -> int:
    """Bytes on disk that a calibration needs at most; ``importance`` and second moments to ``refine`` by are kept until
    the codes are made, the error of every input column at both operating points until the end."""
    windows = text.windows.tokens
    spilled = spill_bytes(len(windows), text.count, windows.shape[1], config.hidden_size, config.num_layers)
    experts = config.num_layers * config.num_experts
    moments = 4 * (config.hidden_size**2 + config.expert_size**2) * experts
    columns = 2 * 4 * len(widths) * (config.hidden_size + config.expert_size) * experts
    return spilled + 2 * config.expert_params * importance + moments * refine + columns


def needs(
    config: ModelConfig, text: CalibrationText, widths: tuple[int, ...], importance: bool, refine: bool = False
) -> str:
    """A sentence for people."""
    count, length = len(text.windows.tokens), text.windows.tokens.shape[1]
    memory = format_bytes(memory_bytes(config, widths, count, length))
    disk = format_bytes(disk_bytes(config, text, widths, importance, refine))
    return (
        f"calibrating with {text.count} sequences of {length} tokens, chosen from {count}: at most {memory} of memory "
        f"and {disk} of disk"
    )
