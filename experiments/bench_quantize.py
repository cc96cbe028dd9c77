"""How fast does one core quantize? Prints one JSON object: million weights a second per shape and LUT group.

python experiments/bench_quantize.py [--seconds 3] [--rows 256]
"""

import argparse
import json
import time

import numpy as np

from calib.anyprecision import quantize_block

CASES = [(2048, (2, 3, 4, 5, 6), 1), (2048, (3, 4, 5, 6), 1), (1408, (2, 3, 4, 5, 6), 1), (704, (2, 3, 4, 5, 6), 4)]
CASES += [(256, (2, 3, 4, 5, 6), 8), (96, (2, 3, 4, 5, 6), 8), (14336, (2, 3, 4, 5, 6), 1)]


def measure(cols: int, widths: tuple[int, ...], lut_rows: int, rows: int, seconds: float) -> float:
    """Best of several runs, in weights a second: other programs can only slow a run down."""
    rng = np.random.default_rng(0)
    weight = (rng.standard_t(5, (rows, cols)) * 0.02).astype(np.float32)
    importance = (np.exp(2 * rng.normal(size=weight.shape)) * 1e-10).astype(np.float32)
    quantize_block(weight, importance, widths, lut_rows)
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        quantize_block(weight, importance, widths, lut_rows)
        best = max(best, weight.size / (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each case")
    parser.add_argument("--rows", type=int, default=256, help="rows of the test matrix")
    args = parser.parse_args()
    rows = [
        {
            "cols": c,
            "bits": f"{w[0]}-{w[-1]}",
            "lut_rows": g,
            "mweights_per_s": round(measure(c, w, g, args.rows, args.seconds) / 1e6, 3),
        }
        for c, w, g in CASES
    ]
    print(json.dumps({"benchmark": "quantize_block", "threads": 1, "rows": args.rows, "cases": rows}, indent=1))


if __name__ == "__main__":
    main()
