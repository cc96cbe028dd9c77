"""The README's session: what a budget gives, a job under pressure, and what bits cost on text.

    python -m experiments.session [--keep DIR]

Writes the README's job of 64 prompts and runs `pwjax plan`, `pwjax generate` and `pwjax ppl` as they stand there, with
the bundled model; prints what they say, what moved, and the perplexity at each width. Two minutes on two idle cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments.tables import markdown

PROMPTS = (
    "It was a dark night, and the old captain", "def __init__(self, name, value=None):\n", "The train left the",
    "class Reader:\n    def read(self", "Janet has 12 apples", "My dear friend,", "import os\nimport re\n", "In May",
)  # fmt: skip
# The first ask for much, so that KV grows beyond what is free; the others leave room again.
LONG, SHORT, COUNTS = 220, 60, (24, 40)
WIDTHS = (16, 6, 5, 4, 3)


def job() -> list[dict]:
    """The lines of ``in.jsonl``."""
    lengths = [LONG] * COUNTS[0] + [SHORT] * COUNTS[1]
    return [
        {"id": i, "prompt": PROMPTS[i % len(PROMPTS)], "max_tokens": length, "ignore_eos": True}
        for i, length in enumerate(lengths)
    ]


def pwjax(*arguments: str, show: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command of ours; SystemExit with what it said where it fails."""
    if show:
        print(f"$ pwjax {' '.join(arguments)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "pwjax", *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done


def session(folder: Path) -> None:
    """Everything, with the job's files in ``folder``."""
    print(pwjax("plan", "--memory-budget", "24MiB").stdout)
    source, out, stats = folder / "in.jsonl", folder / "out.jsonl", folder / "stats.json"
    source.write_text("".join(json.dumps(line) + "\n" for line in job()))
    out.unlink(missing_ok=True)
    print("$ pwjax generate --prompts in.jsonl --output out.jsonl --memory-budget 22MiB", flush=True)
    options = ("--prompts", source, "--output", out, "--memory-budget", "22MiB", "--stats", stats)
    print(pwjax("generate", *map(str, options), show=False).stderr.splitlines()[-1])
    found = json.loads(stats.read_text())
    moved, compiled = found["precision"], found["compile"]["recompiles_after_warmup"]
    print(f"{moved['demotions']} demotions, {moved['promotions']} promotions, {compiled} compiled after the start\n")
    ppl = [json.loads(pwjax("ppl", "--bits", str(bits), "--json").stdout) for bits in WIDTHS]
    print(markdown(["bits", *map(str, WIDTHS)], [["perplexity", *(f"{p['perplexity']:.3f}" for p in ppl)]]))
    print(f"\n{ppl[0]['tokens']:,} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the job's files there")
    args = parser.parse_args()
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        session(args.keep)
    else:
        with tempfile.TemporaryDirectory() as folder:
            session(Path(folder))


if __name__ == "__main__":
    main()
