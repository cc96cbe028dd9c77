"""The distilled model as a Hugging Face checkpoint directory, Qwen2-MoE, with tokenizer and chat template.

python -m experiments.carve_moe.export --work WORK --out DIR [--top-k 10]
"""

import argparse
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments.carve_moe.model import config_of, fold
from pwjax.checkpoints.hf import save_hf
from pwjax.config import ModelConfig


def load_distilled(work: Path, top_k: int) -> tuple[ModelConfig, dict]:
    """Config, and the float32 tree as it is trained, of the last step in ``work/distill``, or of ``work/carved``."""
    with ocp.StandardCheckpointer() as checkpointer:
        params = checkpointer.restore((work / "carved").absolute())
    with ocp.CheckpointManager((work / "distill").absolute()) as manager:
        step = manager.latest_step()
        if step is not None:
            params |= manager.restore(step, args=ocp.args.StandardRestore())["params"]
    print(f"distilled for {step or 0} steps", flush=True)
    return config_of(params, top_k), jax.tree.map(np.asarray, params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory that does not exist yet")
    parser.add_argument("--top-k", type=int, default=10)
    args = parser.parse_args()
    config, params = load_distilled(args.work, args.top_k)
    save_hf(args.out, config, fold(config, params), tokenizer_file=args.work / "tokenizer" / "tokenizer.json")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
