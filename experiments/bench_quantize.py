"""How fast do so many cores quantize? Prints one JSON object: million weights a second per shape and LUT group.

python experiments/bench_quantize.py [--seconds 3] [--rows 256] [--threads 1 2]

Threads quantize matrices of their own, as ``pwjax quantize --jobs`` does. ``of_cpu`` divides by the processor time
spent instead of the time passed: what one undisturbed core does, on a machine that has other work.
"""

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from calib import kmeans_native
from calib.anyprecision import quantize_block

CASES = [(2048, (2, 3, 4, 5, 6), 1), (2048, (3, 4, 5, 6), 1), (1408, (2, 3, 4, 5, 6), 1), (704, (2, 3, 4, 5, 6), 4)]
CASES += [(256, (2, 3, 4, 5, 6), 8), (96, (2, 3, 4, 5, 6), 8), (14336, (2, 3, 4, 5, 6), 1)]


def measure(cols: int, widths: tuple[int, ...], lut_rows: int, rows: int, seconds: float, threads: int) -> dict:
    """Best of several rounds, in million weights a second: other programs can only slow a round down."""
    rng = np.random.default_rng(0)
    weight = (rng.standard_t(5, (rows, cols)) * 0.02).astype(np.float32)
    importance = (np.exp(2 * rng.normal(size=weight.shape)) * 1e-10).astype(np.float32)
    work = lambda _: quantize_block(weight, importance, widths, lut_rows)  # noqa: E731
    best = cpu = 0.0
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start, busy = time.perf_counter(), time.process_time()
            list(pool.map(work, range(4 * threads)))
            millions = 4 * threads * weight.size / 1e6
            best = max(best, millions / (time.perf_counter() - start))
            cpu = max(cpu, millions / (time.process_time() - busy))
    return {"mweights_per_s": round(best, 3), "of_cpu": round(cpu, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each case")
    parser.add_argument("--rows", type=int, default=256, help="rows of the test matrix")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads, each case with all of them")
    args = parser.parse_args()
    rows = [
        {"cols": c, "bits": f"{w[0]}-{w[-1]}", "lut_rows": g, "threads": t}
        | measure(c, w, g, args.rows, args.seconds, t)
        for c, w, g in CASES
        for t in args.threads
    ]
    loops = "NumPy" if kmeans_native.library() is None else "C++"
    print(json.dumps({"benchmark": "quantize_block", "rows": args.rows, "loops": loops, "cases": rows}, indent=1))


if __name__ == "__main__":
    main()
