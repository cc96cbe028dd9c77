"""How long does it take to write a few pages into the arena? Prints one JSON object.

python experiments/bench_commit.py [--arena-mib 1024] [--pages 8] [--page-kib 44]

Times ``Arena.commit_pages``, from the call until the device is done, with words that are on the device already (as
the pager stages them), each time at other random pages. The arena must be written in place: its address before and
after is compared, and a copy of it would show as hundreds of milliseconds. Takes a few seconds, and memory for one
arena. The default page is that of Qwen1.5-MoE.
"""

import argparse
import json
import time

import jax
import numpy as np

from pwjax.environment import cpu_info, versions
from pwjax.memory.arena import COMMIT_WIDTHS, Arena

LIMIT_MS = 5.0


def measure(arena: Arena, pages: int, repeats: int, seed: int) -> list[float]:
    """Milliseconds of each of ``repeats`` commits of ``pages`` pages, after a few that do not count."""
    rng = np.random.default_rng(seed)
    width = next(w for w in arena.page_widths if w >= pages)
    # A few buffers in turn: one that is always in the cache would flatter the result.
    words = [jax.device_put(rng.integers(0, 2**32, (width, arena.page_words), np.uint32)) for _ in range(4)]
    times = []
    for turn in range(repeats + 5):
        ids = rng.choice(arena.num_pages - 1, pages, replace=False) + 1
        start = time.perf_counter()
        arena.commit_pages(ids, words[turn % len(words)])
        arena.wait()
        times.append(1e3 * (time.perf_counter() - start))
    written = arena.read_pages(ids)
    assert np.array_equal(written, np.asarray(words[turn % len(words)])[:pages]), "the pages hold other words"
    return times[5:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arena-mib", type=int, default=1024)
    parser.add_argument("--pages", type=int, default=8, help=f"pages of a commit, at most {COMMIT_WIDTHS[-1]}")
    parser.add_argument("--page-kib", type=int, default=44)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not 1 <= args.pages <= COMMIT_WIDTHS[-1] or args.repeats < 1 or args.page_kib < 1:
        parser.error(f"--pages lies in 1..{COMMIT_WIDTHS[-1]}, --repeats and --page-kib are at least 1")
    num_pages = args.arena_mib * 1024 // args.page_kib
    if num_pages <= args.pages:
        parser.error(f"an arena of {args.arena_mib} MiB has {num_pages} pages of {args.page_kib} KiB: too few")

    arena = Arena(num_pages, args.page_kib * 256)
    arena.wait()
    before = arena.array.unsafe_buffer_pointer()
    times = measure(arena, args.pages, args.repeats, args.seed)
    in_place = arena.array.unsafe_buffer_pointer() == before
    median, p90 = np.percentile(times, [50, 90])
    print(json.dumps({
        "benchmark": "commit_pages",
        "settings": vars(args),
        "device": jax.devices()[0].device_kind,
        "processor": cpu_info()["model"],
        "cores": cpu_info()["cores"],
        "versions": versions(),
        "arena_bytes": arena.nbytes,
        "bytes_per_commit": args.pages * args.page_kib * 1024,
        "median_ms": round(float(median), 4),
        "p90_ms": round(float(p90), 4),
        "min_ms": round(min(times), 4),
        "max_ms": round(max(times), 4),
        "in_place": in_place,
        "limit_ms": LIMIT_MS,
        "within_limit": bool(in_place and median < LIMIT_MS),
        "samples_ms": [round(t, 4) for t in times],
    }))


if __name__ == "__main__":
    main()
