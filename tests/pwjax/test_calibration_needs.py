"""The memory that a calibration states is not exceeded by the buffers of its programs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from calib import stream
from pwjax.calibration_needs import BASE_BYTES, memory_bytes
from pwjax.checkpoints.tree import param_shapes, unflatten
from pwjax.config import ModelConfig
from pwjax.presets import preset
from pwjax.streamed import DecoderFunctions

WIDTHS = (2, 3, 4, 5, 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen1.5-moe-a2.7b", "mixtral-8x7b"])
def test_the_programs_keep_to_it(name):
    """What XLA says of the backward pass of a layer and of the head, at the size of real models."""
    config: ModelConfig = replace(preset(name), num_layers=1)
    shapes, functions = param_shapes(config), DecoderFunctions(config)
    bits = lambda shape: jax.ShapeDtypeStruct(shape, jnp.uint16)  # noqa: E731
    layer = {n.removeprefix("layers/"): bits(shape[1:]) for n, shape in shapes.items() if n.startswith("layers/")}
    x = jax.ShapeDtypeStruct((4, 512, config.hidden_size), jnp.float32)
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    last = "embed/embedding" if config.tie_embeddings else "lm_head/kernel"
    head = unflatten({n: bits(shapes[n]) for n in ("norm/scale", last)})
    lowered = (
        stream._backward.lower(functions, config.attention_kinds[0], unflatten(layer), x, x),
        stream._head.lower(functions, head, x, ints(4, 512), ints(4), ints()),
    )
    for program in lowered:
        memory = program.compile().memory_analysis()
        used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        assert used < memory_bytes(config, WIDTHS, 16, 512) - BASE_BYTES
