"""The truth check: is predicted damage what running the model loses?

Measured is the mean KL divergence of a token, 16 bits against a plan, on held-out text. Three kinds of plans are run:

* *changes*: one block at fewer bits, all others at 16;
* *mixed*: sets of plans that hold equal pages (:mod:`pwjax.evaluate.sampled_plans`);
* *planned*: what the planner makes of each damage form at the same pages, noise left out, and uniform widths.

The prediction of a plan is the sum of its blocks' expected damage. A predictor that knows only bytes stands beside
every form: pages kept back from 16 bits.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from calib.agreement import agreement, bootstrap, reliability, spearman_gain
from planner import BlockTable
from pwjax.checkpoints.artifact import Artifact
from pwjax.engine.text import Tokenizer
from pwjax.environment import versions
from pwjax.errors import ArtifactError
from pwjax.evaluate.divergence import Divergence
from pwjax.evaluate.measurements import Measurements
from pwjax.evaluate.sampled_plans import SampledPlan, greedy_plan, mixed_plans, single_changes, target_pages
from pwjax.evaluate.texts import Document
from pwjax.evaluate.windows import spread_windows
from pwjax.progress import Progress, silent

CHANGES, PLANS = 200, 50
MEAN_BITS = (3.0, 3.5, 4.0)
HELDOUT_TOKENS, WINDOW = 8192, 512
BYTES = "bytes only"


def check_truth(
    artifact: Artifact,
    tables: Mapping[str, BlockTable],
    documents: Sequence[Document],
    *,
    changes: int = CHANGES,
    plans: int = PLANS,
    mean_bits: Sequence[float] = MEAN_BITS,
    heldout_tokens: int = HELDOUT_TOKENS,
    window: int = WINDOW,
    seed: int = 0,
    measurements: Path | None = None,
    progress: Progress = silent,
) -> dict:
    """Run the check and return the ``truth`` part of a report, JSON-ready.

    ``tables`` by form, equal but for their damage, be it of a routed or of a served token. ``measurements``: a file
    that lets a stopped check go on. UsageError, ArtifactError.
    """
    if artifact.tokenizer_path is None:
        raise ArtifactError(f"{artifact.path} has no tokenizer.json, so text cannot be scored")
    config = artifact.config
    tokenizer = Tokenizer.load(artifact.tokenizer_path, config.bos_token_id)
    # Shorter windows rather than a text left out.
    window = min(window, config.max_positions, max(heldout_tokens // len(documents), 64))
    windows, owners = spread_windows(documents, tokenizer, config.vocab_size, heldout_tokens, window)
    table = next(iter(tables.values()))
    others = table.widths[-1]
    levels = [m for m in mean_bits if table.widths[0] <= m <= max(b for b in table.widths if b != 16)]
    damage = {form: t.expected for form, t in tables.items()}

    single = single_changes(table, changes, seed, others)
    mixed = {m: mixed_plans(table, damage, m, plans, seed) for m in levels}
    planned = {m: _planned(table, damage, m, seed) for m in levels}
    uniform = {b: np.full(table.blocks, b) for b in table.widths if b != others}
    everything = [p.bits for _, p in single] + [p.bits for m in levels for p in mixed[m]]
    everything += [bits for m in levels for bits in planned[m].values()] + list(uniform.values())

    header = {
        "model": {
            n: f["sha256"] for n, f in artifact.manifest["files"].items() if n.endswith((".bin", ".safetensors"))
        },
        "tokens_sha256": hashlib.sha256(windows.astype("<i4").tobytes()).hexdigest(),
        "window": windows.shape[1],
        "reference_bits": others,
    }
    header["model"].pop("calibration/tables.safetensors", None)
    with Divergence(artifact, windows) as divergence:
        kl = Measurements(divergence.measure, header, measurements)
        try:
            for done, bits in enumerate(everything):
                kl(bits)
                progress("measuring plans", done + 1, len(everything))
        finally:
            kl.close()

    # By name alone: results should not tell where files lie.
    names = np.array([Path(document.name).name for document in documents])[owners]
    domains = {str(name): names == name for name in dict.fromkeys(names)}
    result = {
        "settings": {
            **header,
            "windows": len(windows),
            "tokens": int(windows.size),
            "texts": list(domains),
            "seed": seed,
            "versions": versions(),
        },
        "uniform": {str(b): float(kl(bits).mean()) for b, bits in uniform.items()},
        "changes": _judged(tables, [p for _, p in single], kl, seed) | {"others_bits": others},
        "mixed": {_level(m): _judged(tables, mixed[m], kl, seed) for m in levels},
        "planned": {_level(m): _compared(planned[m], kl, domains, seed) for m in levels},
    }
    return result | verdict(result, list(tables))


def verdict(result: dict, forms: Sequence[str]) -> dict:
    """Median Spearman over the mixed sets, super-additivity, and the form to use: ``{"median_spearman", ...}``.

    ``best`` is the form whose own plans lose least on held-out text, by the geometric mean over the byte levels.
    """
    mixed = result["mixed"].values()
    medians = {}
    for form in (*forms, BYTES):
        found = [s["forms"][form]["spearman"] for s in mixed]
        medians[form] = None if not found or None in found else float(np.median(found))
    losses = {f: float(np.exp(np.mean([np.log(p[f]["kl"]) for p in result["planned"].values()]))) for f in forms}
    single = {f: result["changes"]["forms"][f]["slope_origin"] for f in forms}
    kappa = {
        level: {f: s["forms"][f]["slope_origin"] / single[f] for f in forms if single[f]}
        for level, s in result["mixed"].items()
    }
    return {
        "median_spearman": medians,
        "planned_kl": losses,
        "super_additivity": kappa,
        "best": min(losses, key=lambda form: losses[form]) if losses else forms[0],
    }


def _level(mean_bits: float) -> str:
    return f"{mean_bits:g}"


def _planned(table: BlockTable, damage: Mapping[str, np.ndarray], mean_bits: float, seed: int) -> dict[str, np.ndarray]:
    """Plans of equal pages: the planner's for each form, and one that gives every block nearly the same width."""
    pages, rng = target_pages(table, mean_bits), np.random.default_rng([seed, 1])
    even = table.params[:, None] * 4.0 ** -np.array(table.widths)
    return {form: greedy_plan(table, d, pages, rng) for form, d in {**damage, "even": even}.items()}


def _judged(tables: Mapping[str, BlockTable], plans: Sequence[SampledPlan], kl: Measurements, seed: int) -> dict:
    """Agreement of every predictor on a set of plans, and the set itself."""
    samples = np.array([kl(p.bits) for p in plans])
    measured = samples.mean(1)
    table = next(iter(tables.values()))
    predicted = {form: np.array([t.total_damage(p.bits) for p in plans]) for form, t in tables.items()}
    pages = np.array([table.total_pages(p.bits) for p in plans])
    predicted[BYTES] = (table.total_pages(table.widths[-1]) - pages).astype(float)
    return {
        "measured": {"least": measured.min(), "median": float(np.median(measured)), "most": measured.max()},
        "pages": [int(pages.min()), int(pages.max())],
        "spearman_ceiling": reliability(samples, seed),
        "forms": {form: agreement(p, measured, seed) for form, p in predicted.items()},
        "gain_over_paper": {
            form: spearman_gain(p, predicted["paper"], measured, seed)
            for form, p in predicted.items()
            if "paper" in predicted and form not in ("paper", BYTES)
        },
        "entries": [
            {"plan": p.recipe, "kl": float(m), **{form: float(v[i]) for form, v in predicted.items()}}
            for i, (p, m) in enumerate(zip(plans, measured, strict=True))
        ],
    }


def _compared(plans: Mapping[str, np.ndarray], kl: Measurements, domains: Mapping[str, np.ndarray], seed: int) -> dict:
    """Held-out KL of the plan of each form, and its paired difference from the even plan's, windows resampled."""
    even = kl(plans["even"])

    def one(bits: np.ndarray) -> dict:
        samples = kl(bits)
        excess = samples - even
        return {
            "kl": float(samples.mean()),
            "ratio_to_even": float(samples.mean() / even.mean()),
            "ratio_95": list(bootstrap(lambda i: 1 + excess[i].mean(1) / even[i].mean(1), len(even), seed)),
            "by_text": {name: float(samples[mask].mean()) for name, mask in domains.items()},
        }

    return {form: one(bits) for form, bits in plans.items()}
