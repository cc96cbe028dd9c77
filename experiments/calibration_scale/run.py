"""How much memory and time does calibration take at the layer size of a real model?

Two layers with the shapes of Qwen1.5-MoE-A2.7B and random weights are made on disk, quantized by plain rounding (what
clustering costs is measured by ``bench_quantize.py``) and calibrated: forward and backward at 16 bits, at 6 and at 4.
Peak resident memory is that of a process which does nothing else; time a layer is extrapolated to all 24. Takes some
15 minutes of processor time with 1,024 tokens, and 6 GB of disk under ``--folder``.

    python experiments/calibration_scale/run.py --tokens 1024 --out experiments/calibration_scale/qwen1.5-moe.json
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

LAYERS, ALL_LAYERS, ALL_EXPERTS = 2, 24, 60


def make_config(experts: int = ALL_EXPERTS):
    """Qwen1.5-MoE-A2.7B with two layers and a small vocabulary: the layers are what is measured."""
    from pwjax.config import ModelConfig

    return ModelConfig(
        model_type="qwen2_moe", vocab_size=4096, hidden_size=2048, num_layers=LAYERS, num_heads=16,
        num_kv_heads=16, head_dim=128, num_experts=experts, top_k=4, expert_size=1408, shared_size=5632,
        norm_topk_prob=False, rms_eps=1e-6, rope_theta=1e6, max_positions=8192, tie_embeddings=True, qkv_bias=True,
    )  # fmt: skip


def draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random bfloat16 weights in the scale of a trained model."""
    if name.endswith("norm/scale"):
        return np.ones(shape, ml_dtypes.bfloat16)
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (values * np.float32(shape[-1] ** -0.5)).astype(ml_dtypes.bfloat16)


class Rounded:
    """Codes of one block: rows cut at equal steps between their extremes; one table for all rows, scaled by row."""

    def __init__(self, weight: np.ndarray, widths: tuple[int, ...]):
        top = np.abs(weight).max(1, keepdims=True)
        parent = widths[-1]
        steps = 1 << parent
        self.codes = np.clip((weight / top + 1) * (steps / 2), 0, steps - 1).astype(np.uint8)
        self.scales = top[:, 0].astype(np.float16)
        ladder = {b: (np.arange(1 << b) + 0.5) * 2 / (1 << b) - 1 for b in widths}
        self.luts = {b: np.tile(v.astype(np.float16), (len(weight) // 32, 1)) for b, v in ladder.items()}


def make(folder: Path, experts: int) -> None:
    """Write the pages of all layers; runs in a process of its own."""
    from pallas_kernels.bitplanes import block_pages
    from pwjax.checkpoints import manifest as manifests
    from pwjax.checkpoints.writer import ArtifactWriter

    config = make_config(experts)
    geometry = geometry_of(config)
    with ArtifactWriter(folder / "model.pw", config, f"synthetic, {experts} experts") as writer:
        writer.begin(geometry)
        for layer in range(LAYERS):
            with writer.layer(layer) as file:
                for expert in range(config.num_experts):
                    for matrix, shape in enumerate(manifests.block_shapes(config)):
                        weight = expert_weight(shape, layer, expert, matrix)
                        block = Rounded(weight.astype(np.float32), geometry.widths)
                        file.add(block_pages(block, weight, geometry, matrix))


def geometry_of(config):
    """Pages of 44 KiB, tables shared by 32 rows."""
    from pwjax.checkpoints import manifest as manifests

    return manifests.geometry_for(config, (32, 32), 11264, (2, 3, 4, 5, 6), True)


def expert_weight(shape: tuple[int, int], layer: int, expert: int, matrix: int) -> np.ndarray:
    """Weights of one block, the same in every process."""
    return draw("expert", shape, 1 + (layer * 1000 + expert) * 2 + matrix)


def calibrate(folder: Path, count: int, tokens: int, length: int, pipe) -> None:
    """The three passes, timed layer by layer; runs in a process of its own."""
    from pwjax.calibration import Calibration, operating_points
    from pwjax.calibration_needs import memory_bytes
    from pwjax.calibration_text import calibration_text
    from pwjax.checkpoints.lazy import LayerStack
    from pwjax.checkpoints.source import ParamSource
    from pwjax.checkpoints.tree import EXPERTS, param_shapes
    from pwjax.streamed import CodedExperts

    config = make_config(count)
    geometry = geometry_of(config)
    pages = folder / "model.pw.partial" / "artifact" / "pages"
    experts = CodedExperts(pages, geometry, config)

    def originals(matrix):
        def read(layer):
            shape = geometry.shape(matrix)
            out = np.empty((config.num_experts, shape.rows, shape.cols), ml_dtypes.bfloat16)
            for expert in range(config.num_experts):
                out[expert] = experts.original(layer, expert, matrix)
            return out

        return read

    flat = {}
    for number, (name, shape) in enumerate(param_shapes(config).items()):
        flat[name] = (
            LayerStack(shape, originals(EXPERTS.index(name))) if name in EXPERTS else draw(name, shape, 10**6 + number)
        )
    held = sum(value.nbytes for value in flat.values() if isinstance(value, np.ndarray))
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # noqa: E731
    marks, peaks, start = {}, {"before": peak()}, time.perf_counter()

    def progress(stage, done, total):
        marks[stage], peaks[stage] = round(time.perf_counter() - start, 1), peak()

    text = calibration_text(np.random.default_rng(0).integers(0, config.vocab_size, 4 * tokens), config,
                            tokens=tokens, sequence_length=length)  # fmt: skip
    calibration = Calibration(ParamSource(config, flat), text, folder / "scratch", progress)
    seconds = {}
    calibration.run_original(lambda *_: np.zeros((2, 5)))
    seconds["16"] = time.perf_counter() - start
    for bits in operating_points(geometry.widths):
        begin = time.perf_counter()
        calibration.run_point(bits, experts)
        seconds[str(bits)] = time.perf_counter() - begin
    pipe.send(
        {
            "used_tokens": text.count * length,
            "candidate_tokens": int(text.windows.tokens.size),
            "seconds_of_pass": {name: round(value, 1) for name, value in seconds.items()},
            "marks_seconds": marks,
            "cpu_seconds": round(time.process_time(), 1),
            "seconds_per_layer": round(sum(seconds.values()) / LAYERS, 1),
            "seconds_24_layers": round(sum(seconds.values()) / LAYERS * ALL_LAYERS, 1),
            "peak_rss_bytes_until": peaks,
            "peak_rss_bytes": peak(),
            "held_bytes": held,
            "stated_bytes": memory_bytes(config, geometry.widths, *text.windows.tokens.shape),
        }
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=ALL_EXPERTS)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--folder", type=Path, default=Path("runs/calibration_scale"))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(given.folder / "scratch", ignore_errors=True)
    # Fresh processes: peak memory is then that of calibration alone.
    spawn = multiprocessing.get_context("spawn")
    for target, extra in ((make, ()), (calibrate, (given.tokens, given.sequence_length))):
        receive, send = spawn.Pipe(duplex=False)
        args = (given.folder, given.experts, *extra) if target is make else (given.folder, given.experts, *extra, send)
        child = spawn.Process(target=target, args=args)
        child.start()
        send.close()
        found = receive.recv() if target is calibrate else None
        child.join()
        if child.exitcode:
            sys.exit(child.exitcode)
    assert found is not None
    result = {
        "command": "python " + " ".join(sys.argv),
        "model": f"2 layers of Qwen1.5-MoE-A2.7B shapes with {given.experts} of 60 experts, vocabulary of 4,096",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        **found,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
