"""Load what training or quantization wrote, in the dense form: for the scripts that measure the demo model."""

from pathlib import Path

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.hf import load_hf
from pwjax.config import ModelConfig


def load_model(path: Path, bits: int = 16) -> tuple[ModelConfig, dict, Tokenizer]:
    """Config, float32 parameters and tokenizer of a Hugging Face directory, or of an artifact at ``bits``."""
    if (path / "manifest.json").exists():
        artifact = Artifact.open(path)
        config, params = artifact.config, artifact.dense_params()
        params["layers"]["experts"] = artifact.expert_params(bits)
    else:
        if bits != 16:
            raise SystemExit(f"{path} is not quantized, so it has no {bits} bits: give an artifact, or no --bits")
        config, params = load_hf(path)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    return config, params, Tokenizer.from_file(str(path / "tokenizer.json"))
