"""Do damage tables of one kind of text serve another kind, and does a mixed table serve all?

    python -m experiments.domain_tables.run --domain prose=books.train.txt,books.heldout.txt \\
        --domain code=python.train.txt,python.heldout.txt --domain math=gsm8k.train.txt,gsm8k.test.txt

For each domain, and for all of them mixed, a copy of the model is calibrated on the training file(s) with equally many
tokens. The planner's plan of each table at the pages of --mean-bits is then run on the held-out text of every domain:
as a fixed plan, and priced with the domain's own routing (of the domain's training text, so that nothing is seen of the
held-out one). Apart from that, an engine with the mixed table serves a few held-out prompts of each kind, and what it
tells its policy is what plans are priced with, with and without the prompt residual; these are run on the same prompts.
Writes results.json: KL of every plan on every domain with paired bootstrap intervals against the best table there, rank
correlation between tables, and the blocks whose damage differs most. With the defaults and three domains about ten
minutes on one core; a run that was stopped goes on (work lies in --work).
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np

import pwjax
from calib.agreement import bootstrap, spearman
from planner import Observation, price
from pwjax.calibration import discard
from pwjax.calibration_report import recalibrate
from pwjax.checkpoints.artifact import Artifact
from pwjax.engine.text import Tokenizer
from pwjax.environment import enable_compile_cache, versions
from pwjax.evaluate import read_documents
from pwjax.evaluate.divergence import Divergence
from pwjax.evaluate.sampled_plans import greedy_plan, target_pages
from pwjax.evaluate.windows import spread_windows
from pwjax.loading import open_model
from pwjax.progress import Bars

MIXED = "mixed"
# Behind the name of a table: its plan under the routing of the text that is served; under what a policy sees in an
# engine that serves it, and with the residual of its prompts besides.
ROUTED, SERVED, RESIDUAL = ", routed", ", served", ", served, with residual"
REQUESTS, NEW_TOKENS = 8, 32


def calibrated(model: Path, folder: Path, texts: list[Path], tokens: int, seed: int) -> Artifact:
    """A copy of the model in ``folder`` with tables from ``texts``, made once."""
    done = folder / "done"
    if not done.exists():
        shutil.copytree(model, folder / "model.pw", dirs_exist_ok=True)
        bars = Bars()
        recalibrate(folder / "model.pw", texts, tokens=tokens, seed=seed, progress=bars)
        bars.close()
        done.touch()
        discard(folder / "model.pw")
    return Artifact.open(folder / "model.pw")


def served(artifact: Artifact, prompts: np.ndarray, budget: str) -> Observation:
    """What the policy sees last while an engine serves ``prompts`` int[n, T] all at once."""
    seen: list[Observation] = []
    sampling = pwjax.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    with pwjax.load(artifact.path, budget, context=prompts.shape[1] + NEW_TOKENS, batch=len(prompts)) as engine:
        engine.on_boundary(lambda b: seen.append(b.snapshot.observation) if b.phase == "pressure" else None)
        list(engine.generate([pwjax.Request(i, None, tuple(map(int, p)), sampling) for i, p in enumerate(prompts)]))
    return [observation for observation in seen if observation.residual is not None][-1]


def against(kl: np.ndarray, best: np.ndarray, seed: int) -> dict:
    """Mean of ``kl`` float64[windows] and its ratio to that of the best table, windows resampled in pairs."""
    ratio = lambda i: kl[i].mean(-1) / best[i].mean(-1)  # noqa: E731
    low_high = bootstrap(ratio, len(kl), seed)
    return {"kl": float(kl.mean()), "over_best": float(kl.mean() / best.mean()), "over_best_95": low_high}


def compared(kl: dict[str, np.ndarray], seed: int) -> dict[str, dict]:
    """:func:`against` the best plan that a table made."""
    best = min((name for name in kl if name != "uniform"), key=lambda name: kl[name].mean())
    return {name: against(samples, kl[best], seed) for name, samples in kl.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--domain", action="append", required=True, metavar="NAME=TRAIN,HELDOUT")
    parser.add_argument("--model", type=Path, help="default: the bundled one")
    parser.add_argument("--tokens", type=int, default=12288, help="tokens each table is made of")
    parser.add_argument("--heldout-tokens", type=int, default=8192, help="of each domain")
    parser.add_argument("--mean-bits", type=float, default=4.0)
    parser.add_argument("--budget", default="40MiB", help="memory of the engine that serves a few prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/domain_tables"))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    args = parser.parse_args()
    domains = {name: [Path(p) for p in files.split(",")] for name, files in (d.split("=", 1) for d in args.domain)}
    enable_compile_cache()
    base = open_model(args.model)
    sources = {name: [train] for name, (train, _) in domains.items()} | {MIXED: [t for t, _ in domains.values()]}
    artifacts = {n: calibrated(base.path, args.work / n, files, args.tokens, args.seed) for n, files in sources.items()}
    tables = {name: artifact.table() for name, artifact in artifacts.items()}
    pages, rng = target_pages(tables[MIXED], args.mean_bits), np.random.default_rng(args.seed)
    plans = {name: greedy_plan(table, table.expected, pages, rng) for name, table in tables.items()}
    fixed = plans | {"uniform": np.full(tables[MIXED].blocks, round(args.mean_bits))}

    tokenizer = Tokenizer.load(base.tokenizer_path, base.config.bos_token_id)
    results, in_engine = {}, {}
    for domain, (_, heldout) in domains.items():
        documents = read_documents([str(heldout)])
        windows, _ = spread_windows(documents, tokenizer, base.config.vocab_size, args.heldout_tokens, 512)
        with Divergence(base, windows) as divergence:
            kl = {name: divergence.measure(bits) for name, bits in fixed.items()}
            for name, table in tables.items():
                damage = price(table, tables[domain].usage).damage
                kl[name + ROUTED] = divergence.measure(greedy_plan(table, damage, pages, rng))
        results[domain] = compared(kl, args.seed)
        prompts = windows[:REQUESTS]
        seen = served(artifacts[MIXED], prompts, args.budget)
        with Divergence(base, prompts) as divergence:
            kl = {"uniform": divergence.measure(fixed["uniform"])}
            for name, features in ((domain, None), (MIXED, None), (MIXED, seen.residual)):
                damage = price(tables[name], seen.routing_choices, seen.routing_tokens, features).damage
                plan = greedy_plan(tables[name], damage, pages, rng)
                kl[name + (SERVED if features is None else RESIDUAL)] = divergence.measure(plan)
        in_engine[domain] = compared(kl, args.seed)
        for found in (results[domain], in_engine[domain]):
            print(domain, {name: round(r["over_best"], 3) for name, r in found.items()}, file=sys.stderr)
    lowest = {name: table.expected[:, 0] for name, table in tables.items()}
    report = {
        "question": "do damage tables of one kind of text serve another kind, and does a mixed table serve all?",
        # File names alone: results should not tell where files lie.
        "command": [re.sub(r"[^=,]*/", "", argument) for argument in sys.argv],
        "form": artifacts[MIXED].manifest["calibration"].get("default"),
        "tokens": args.tokens,
        "heldout_tokens": args.heldout_tokens,
        "mean_bits": args.mean_bits,
        "pages": pages,
        "seed": args.seed,
        "versions": versions(),
        "kl": results,
        "kl_on_served_prompts": in_engine,
        "within_5_percent_everywhere": {
            name: all(r[name]["over_best"] <= 1.05 for r in results.values()) for name in (MIXED, MIXED + ROUTED)
        },
        "spearman_between_tables": {f"{a}, {b}": float(spearman(lowest[a], lowest[b]))
                                    for a in lowest for b in lowest if a < b},
        "blocks_that_plans_treat_differently": {f"{a}, {b}": int((plans[a] != plans[b]).sum())
                                                for a in lowest for b in lowest if a < b},
        "differ_most": _differ_most(tables, list(domains)),
    }  # fmt: skip
    args.out.write_text(json.dumps(report, indent=1) + "\n")


def _differ_most(tables: dict, domains: list[str]) -> list[dict]:
    """Blocks whose damage at the lowest width depends most on the domain."""
    damage = np.array([tables[name].expected[:, 0] for name in domains])
    spread = damage.max(0) / np.maximum(damage.min(0), np.finfo(float).tiny)
    table = tables[domains[0]]
    return [
        {"block": table.name(int(i)), **{name: float(d[i]) for name, d in zip(domains, damage, strict=True)}}
        for i in np.argsort(-spread)[:10]
    ]


if __name__ == "__main__":
    main()
