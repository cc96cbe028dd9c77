"""How many rows should share a table? Error against bytes for every group size, and what ``auto`` takes.

    python -m experiments.lut_groups.run [--rows 64] [--out experiments/lut_groups/results.json]

Experts whose two matrices are [2048, K], heavy-tailed weights under lognormal importance; bytes are whole pages, planes
and tables with their row scales, per weight. Half a minute.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from calib.lut_groups import choose_lut_rows
from pallas_kernels.pages import BlockShape, Geometry
from pwjax.environment import versions

WIDTHS = (2, 3, 4, 5, 6)
COLS = (128, 704, 1408, 2048, 4096)
OUT_ROWS = 2048
# One token's keys of one layer: 16 heads of 128, bfloat16.
KV_ROW_WORDS = 1024


def curves(cols: int, rows: int) -> dict:
    """Error and bits a weight of every group at every width, and the choice, for one K."""
    rng = np.random.default_rng(cols)
    weight = (rng.standard_t(5, (rows, cols)) * 0.02).astype(np.float32)
    importance = (np.exp(2 * rng.normal(size=weight.shape)) * 1e-10).astype(np.float32)
    shape = (OUT_ROWS, cols)
    choice = choose_lut_rows(([(weight, importance)],) * 2, (shape, shape), WIDTHS, False, KV_ROW_WORDS)
    groups = {}
    for group, errors in choice.errors[0].items():
        block = BlockShape(*shape, group)
        geometry = Geometry(choice.page_words, WIDTHS, False, block, block)
        bits = {b: 8 * geometry.block_pages(0, b) * geometry.page_bytes / block.params for b in WIDTHS}
        groups[group] = {b: {"error": errors[b], "bits_per_weight": round(bits[b], 4)} for b in WIDTHS}
    return {"cols": cols, "page_bytes": 4 * choice.page_words, "auto": choice.lut_rows[0], "groups": groups}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="rows that are quantized; a multiple of 64")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    args = parser.parse_args()
    results = [curves(cols, args.rows) for cols in COLS]
    facts = {"command": "python -m experiments.lut_groups.run", "rows": args.rows, "versions": versions()}
    args.out.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    for row in results:
        print(f"K = {row['cols']}: auto takes {row['auto']} rows a table, pages of {row['page_bytes']} bytes")


if __name__ == "__main__":
    main()
