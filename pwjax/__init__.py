"""pwjax: Mixture-of-Experts generation whose weight precision moves with the KV cache, under one memory budget.

engine     load, Engine, SamplingParams, Request, Completion, Piece, forward, Resident
precision  plan, Plan, BlockTable, get_policy
models     ModelConfig, quantize, Artifact, load_hf, save_hf, bundled_model
errors     PWJaxError, UsageError, BudgetError, CheckpointError, ArtifactError, PromptError

Names are imported when they are first used, so that ``import pwjax`` and the command line's help stay fast.
"""

import importlib

_NAMES = {
    # Engine
    "load": "pwjax.loading",
    "Engine": "pwjax.engine.engine",
    "SamplingParams": "pwjax.engine.sampling",
    "Request": "pwjax.engine.requests",
    "Completion": "pwjax.engine.sequence",
    "Piece": "pwjax.engine.sequence",
    "forward": "pwjax.functional",
    "Resident": "pwjax.resident",
    # Precision
    "plan": "pwjax.functional",
    "Plan": "planner",
    "BlockTable": "planner",
    "get_policy": "planner",
    # Models
    "ModelConfig": "pwjax.config",
    "quantize": "pwjax.quantization",
    "Artifact": "pwjax.checkpoints.artifact",
    "load_hf": "pwjax.checkpoints.hf",
    "save_hf": "pwjax.checkpoints.hf_save",
    "bundled_model": "pwjax.loading",
    # Errors
    "PWJaxError": "pwjax.errors",
    "UsageError": "pwjax.errors",
    "BudgetError": "pwjax.errors",
    "CheckpointError": "pwjax.errors",
    "ArtifactError": "pwjax.errors",
    "PromptError": "pwjax.errors",
}

__all__ = list(_NAMES)


def __getattr__(name: str):
    if name not in _NAMES:
        raise AttributeError(f"module 'pwjax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
