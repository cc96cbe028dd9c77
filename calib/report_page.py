"""The readable page of a calibration report: Markdown, with two pictures where matplotlib is there.

A report is the JSON-ready dictionary of ``pwjax.calibration_report``; parts that were left out are None.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.pages import MATRICES

DAMAGE_PICTURE, TRUTH_PICTURE = "damage.png", "truth.png"


def page(report: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """Markdown of a report; ``pictures`` file names by DAMAGE_PICTURE and TRUTH_PICTURE, those that were drawn."""
    parts = [f"# Calibration of {report['model']}", _summary(report), _damage(report, pictures), _decisive(report)]
    parts.append(_few_tokens(report))
    if report["truth"] is None:
        parts.append("## Truth check\n\nNot run. A table nobody checked is not calibration: run it without --no-truth.")
    else:
        parts.append(_truth(report["truth"], pictures))
        parts.append(_domains(report["truth"]))
    if report["residual"] is not None:
        parts.append(_residual(report["residual"]))
    return "\n\n".join(parts) + "\n"


def _summary(report: Mapping[str, Any]) -> str:
    facts = report["calibration"]
    lines = [f"- damage forms: {', '.join(report['forms'])}; the planner uses **{report['default']}**"]
    if facts.get("tokens"):
        lines.append(f"- calibrated on {facts['tokens']:,} tokens")
    if report["super_additivity"]:
        lines.append(
            f"- super-additivity {report['super_additivity']:.3f}: what damage costs among blocks of few bits, over "
            "what it costs among blocks of many"
        )
    lines += [f"- note: {text}" for text in report["warnings"]]
    return "\n".join(lines)


def _damage(report: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    widths = [str(b) for b in report["widths"] if b != 16]
    rows = [[r["layer"], r["matrix"], *(f"{r['damage'][b]:.3g}" for b in widths)] for r in report["layers"]]
    head = [
        "## Damage layer by layer",
        f"Expected damage a served token ({report['default']}) of all experts of a layer at one width.",
        _picture(pictures, DAMAGE_PICTURE),
        table(["layer", "matrix", *(f"{b} bits" for b in widths)], rows),
    ]
    return "\n\n".join(filter(None, head))


def _decisive(report: Mapping[str, Any]) -> str:
    rows = [
        [d["block"], f"{d['damage']:.3g}", f"{d['share']:.1%}", f"{d['floor']} bits"]
        for d in report["decisive"]["blocks"]
    ]
    return "\n\n".join(
        [
            "## Blocks that decide",
            f"At {report['widths'][0]} bits, {report['decisive']['half']} of {report['blocks']} blocks carry half of "
            "the damage. The heaviest, with their share of it and the floor that the model carries:",
            table(["block", "damage", "share", "floor"], rows),
        ]
    )


def _few_tokens(report: Mapping[str, Any]) -> str:
    rows = [[e["layer"], e["expert"], e["tokens"]] for e in report["few_tokens"]]
    if not rows:
        return "## Experts with few tokens\n\nNone."
    text = "Their damage leans on the mean of their layer, with a margin; more text, or other text, helps."
    return f"## Experts with few tokens\n\n{text}\n\n" + table(["layer", "expert", "tokens"], rows)


def _truth(truth: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    settings, changes = truth["settings"], truth["changes"]
    parts = [
        "## Truth check",
        f"Mean KL divergence a token from {settings['reference_bits']} bits, measured on {settings['tokens']:,} "
        f"held-out tokens ({', '.join(settings['texts'])}), against the predicted sum of damages. Brackets are 95 % "
        "bootstrap intervals. The slope is of measured over predicted, through the origin. The ceiling is what a "
        "perfect predictor could reach in spite of the noise of so few tokens.",
        _picture(pictures, TRUTH_PICTURE),
        f"### {changes['forms'][next(iter(changes['forms']))]['count']} changes of one block",
        f"All other blocks at {changes['others_bits']} bits; measured {_range(changes)}, "
        f"ceiling {number(changes['spearman_ceiling'])}.",
        _agreements(changes["forms"]),
    ]
    for level, mixed in truth["mixed"].items():
        count = mixed["forms"][next(iter(mixed["forms"]))]["count"]
        parts += [
            f"### {count} plans of equal pages, {level} bits on average",
            f"Measured {_range(mixed)}, pages {mixed['pages'][0]}-{mixed['pages'][1]}, "
            f"ceiling {number(mixed['spearman_ceiling'])}.",
            _agreements(mixed["forms"]),
        ]
    medians = truth["median_spearman"]
    rows = [
        [form, number(medians[form]), number(truth["planned_kl"].get(form)),
         *(number(truth["super_additivity"][level].get(form)) for level in truth["mixed"])]
        for form in medians
    ]  # fmt: skip
    parts += [
        "### Which form",
        f"**{truth['best']}**: its own plans lose least (geometric mean of their KL over the byte levels). The last "
        "columns are slopes at a byte level over the slope of single changes: above 1, damages add up to more than "
        "their sum.",
        table(["form", "median Spearman", "KL of its plans", *(f"slope ratio, {m}" for m in truth["mixed"])], rows),
    ]
    return "\n\n".join(filter(None, parts))


def _domains(truth: Mapping[str, Any]) -> str:
    parts = ["## Text by text", "KL of plans of equal pages; `even` gives all blocks nearly the same width."]
    for level, plans in truth["planned"].items():
        texts = list(next(iter(plans.values()))["by_text"])
        rows = [
            [form, f"{p['kl']:.5f}", f"{p['ratio_to_even']:.3f} {interval(p['ratio_95'])}",
             *(f"{p['by_text'][t]:.5f}" for t in texts)]
            for form, p in plans.items()
        ]  # fmt: skip
        parts.append(f"### {level} bits on average\n\n" + table(["plan", "KL", "of even", *texts], rows))
    return "\n\n".join(parts)


def _residual(residual: Mapping[str, Any]) -> str:
    parts = [
        "## Prompt residual",
        f"Fitted on {residual['fitted']} sequences, judged on {residual['held_out']} others. The error of a sequence "
        "is sum |predicted - measured| / sum measured over blocks and transitions; on and off are paired.",
    ]
    rows = []
    for form, found in residual["forms"].items():
        verdict = found["verdict"]
        change = f"{number(verdict['change'])} {interval(verdict['change_95'])}"
        rows.append([form, number(verdict["off"]), number(verdict["on"]), change, "on" if found["used"] else "off"])
    parts.append(table(["form", "error off", "error on", "change", "in force"], rows))
    for form, found in residual["forms"].items():
        heads = [[h["matrix"], h["transition"], number(h["r2"]), number(h["confidence"])] for h in found["heads"]]
        parts.append(f"### Heads of {form}\n\n" + table(["matrix", "bits", "held-out R²", "confidence"], heads))
    parts += [f"- {text}" for text in residual["notes"]]
    return "\n\n".join(parts)


def _agreements(forms: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        [form, f"{number(a['spearman'])} {interval(a['spearman_95'])}",
         f"{number(a['slope_origin'])} {interval(a['slope_origin_95'])}",
         f"{number(a['r2'])} {interval(a['r2_95'])}", number(a["slope"]), number(a["intercept"])]
        for form, a in forms.items()
    ]  # fmt: skip
    return table(["predictor", "Spearman", "slope", "R²", "slope with intercept", "intercept"], rows)


def _range(part: Mapping[str, Any]) -> str:
    measured = part["measured"]
    return f"{measured['least']:.2g} to {measured['most']:.2g}, median {measured['median']:.2g}"


def _picture(pictures: Mapping[str, str], name: str) -> str:
    return f"![{name.removesuffix('.png')}]({pictures[name]})" if name in pictures else ""


def number(value: float | None) -> str:
    """Three digits; a dash for what could not be computed."""
    return "-" if value is None else f"{value:.3g}" if abs(value) < 1e-2 or abs(value) >= 1e4 else f"{value:.3f}"


def interval(bounds: Sequence[float] | None) -> str:
    """``[low, high]``, empty where there is none."""
    return "" if bounds is None else f"[{number(bounds[0])}, {number(bounds[1])}]"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def draw(report: Mapping[str, Any], folder: Path, stem: str) -> dict[str, str]:
    """Draw the pictures as ``folder/stem.NAME`` and return their file names for :func:`page`.

    ImportError where matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def save(figure: Figure, name: str) -> None:
        FigureCanvasAgg(figure)
        figure.savefig(folder / f"{stem}.{name}", dpi=110, metadata={"Software": None})
        names[name] = f"{stem}.{name}"

    names: dict[str, str] = {}
    widths = [b for b in report["widths"] if b != 16]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axis, matrix in zip(figure.subplots(1, 2, sharey=True), MATRICES, strict=True):
        for row in (r for r in report["layers"] if r["matrix"] == matrix):
            axis.semilogy(widths, [row["damage"][str(b)] for b in widths], marker=".", label=f"layer {row['layer']}")
        axis.set(title=matrix, xlabel="bits", xticks=widths)
    figure.axes[0].set_ylabel(f"damage a served token ({report['default']})")
    if len(report["layers"]) <= 24:
        figure.axes[1].legend(fontsize="small", ncols=2)
    save(figure, DAMAGE_PICTURE)
    if report["truth"] is not None:
        sets = {"changes of one block": report["truth"]["changes"]["entries"]}
        sets |= {f"plans, {level} bits": part["entries"] for level, part in report["truth"]["mixed"].items()}
        figure = Figure(figsize=(3.4 * len(sets), 3.6), layout="constrained")
        for axis, (title, entries) in zip(figure.subplots(1, len(sets), squeeze=False)[0], sets.items(), strict=True):
            for form in report["forms"]:
                axis.loglog([e[form] for e in entries], [e["kl"] for e in entries], ".", ms=4, label=form, alpha=0.7)
            ends = [f(e["kl"] for e in entries) for f in (min, max)]
            axis.plot(ends, ends, color="gray", lw=0.8)
            axis.set(title=title, xlabel="predicted")
            axis.minorticks_off()
        figure.axes[0].set_ylabel("measured KL")
        figure.axes[0].legend(fontsize="small")
        save(figure, TRUTH_PICTURE)
    return names
