"""Make ``mixtral.npz`` and ``gemma4.npz``: tiny random models with the logits of transformers, for tests without torch.

    python tests/golden/make_families.py

Keys: ``CASE/config`` (JSON), ``CASE/tokens``, ``CASE/lengths``, ``CASE/logits``, and ``CASE/checkpoint``, the bytes of
``model.safetensors``: in one array, for each array costs some 200 bytes of the file.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent

# What differs from the tiny models of tests/parity/families.py; sequences are longer than the windows.
CASES = {
    "mixtral": {"plain": {}, "windowed_tied": {"sliding_window": 7, "tie_word_embeddings": True}},
    "gemma4": {
        "plain": {"sliding_window": 9},
        # A period of three layers and a rest; values of full layers have their own projection.
        "own_values_rest": {
            "sliding_window": 9, "num_hidden_layers": 5, "attention_k_eq_v": False, "final_logit_softcapping": None,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
        "multimodal": {"multimodal": True, "sliding_window": 9},
    },
}  # fmt: skip


def main() -> None:
    """Write the files."""
    sys.path.insert(0, str(HERE.parent / "parity"))
    import families

    rng = np.random.default_rng(0)
    for family, cases in CASES.items():
        arrays = {}
        for case, changes in cases.items():
            if "layer_types" in changes:
                changes = {**changes, "layer_types": changes["layer_types"][: changes["num_hidden_layers"]]}
            model = families.build(family, **changes)
            tokens, lengths = rng.integers(0, 30, (2, 24), np.int32), np.array([24, 11], np.int32)
            with tempfile.TemporaryDirectory() as folder:
                families.save(model, folder)
                config = json.loads((Path(folder) / "config.json").read_text())
                checkpoint = (Path(folder) / "model.safetensors").read_bytes()
            arrays[f"{case}/config"] = np.array(json.dumps(config, sort_keys=True))
            arrays[f"{case}/tokens"], arrays[f"{case}/lengths"] = tokens, lengths
            arrays[f"{case}/logits"] = families.logits(model, tokens, lengths)
            arrays[f"{case}/checkpoint"] = np.frombuffer(checkpoint, np.uint8)
        out = HERE / f"{family}.npz"
        np.savez_compressed(out, **arrays)
        print(f"{out.name}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
