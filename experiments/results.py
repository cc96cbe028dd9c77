"""Write the tables of documents from the JSON of the runs, so that no number in them is typed by hand.

    python -m experiments.results [--check]

A document says where a table belongs, and everything up to the end mark is written anew::

    <!-- table experiments/throughput/bursts.json bursts -->
    <!-- end -->

The name is that of a table which the run itself has put into its JSON, or of one that is made here of older results.
`--check` writes nothing and fails where a document is out of date. Seconds.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from experiments.tables import interval, markdown

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"(<!-- table (\S+) (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def _forms(report: dict) -> list[str]:
    """Predictors, the one that knows only bytes last."""
    return sorted(report["truth"]["median_spearman"], key=lambda form: form == "bytes only")


def truth_plans(report: dict) -> str:
    """Rank agreement within mixed plans of equal pages, and what each form's own plans lose."""
    truth = report["truth"]
    levels = list(truth["mixed"])

    def cell(form: str, level: str) -> str:
        found = truth["mixed"][level]["forms"][form]
        if found["spearman"] is None:
            return "none: equal bytes"
        low, high = found["spearman_95"]
        return f"{found['spearman']:.3f} [{low:.3f}, {high:.3f}]"

    head = ["predictor", *(f"Spearman, plans of {level} bits" for level in levels), "KL of its own plans"]
    return markdown(head, [
        [form, *(cell(form, level) for level in levels),
         f"{truth['planned_kl'][form]:.5f}" if form in truth["planned_kl"] else ""]
        for form in _forms(report)
    ])  # fmt: skip


def truth_changes(report: dict) -> str:
    """Agreement over changes of one block."""
    return markdown(
        ["predictor", "Spearman", "measured over predicted"],
        [
            [form, f"{f['spearman']:.3f} [{f['spearman_95'][0]:.3f}, {f['spearman_95'][1]:.3f}]",
             f"{f['slope_origin']:.3g} [{f['slope_origin_95'][0]:.3g}, {f['slope_origin_95'][1]:.3g}]"]
            for form, f in ((form, report["truth"]["changes"]["forms"][form]) for form in _forms(report))
        ],
    )  # fmt: skip


def truth_own_plans(report: dict) -> str:
    """KL of the planner's plans over that of all blocks at nearly one width, by level."""
    planned = report["truth"]["planned"]
    ratio = lambda f: f"{f['ratio_to_even']:.3f} [{f['ratio_95'][0]:.3f}, {f['ratio_95'][1]:.3f}]"  # noqa: E731
    forms = [form for form in next(iter(planned.values())) if form != "even"]
    return markdown(
        ["damage", *(f"{level} bits" for level in planned)],
        [[form, *(ratio(row[form]) for row in planned.values())] for form in forms],
    )


def searched(result: dict) -> str:
    """Damage of policies over that of `uniform-dynamic`, on pressure traces."""
    rows = [[f"`{name}`", f"{r['defaults']:.3f}", f"{r['held_out']['defaults']:.3f}", ""]
            for name, r in result["policies"].items()]  # fmt: skip
    rows += [[f"`{name}`", "", "", f"{value:.3f}"] for name, value in result["baselines"].items()]
    return markdown(["policy", "texts for choosing", "held-out mathematics", "all three texts"], rows)


def over_default(result: dict) -> str:
    """Cost over the default's, with two standard errors."""
    return markdown(
        ["value", "cost over the default's"],
        [[name, "1" if low == high else f"{mean:.3f} [{low:.3f}, {high:.3f}]"]
         for name, (mean, low, high) in result["over_default"].items()],
    )  # fmt: skip


def to_optimum(result: dict) -> str:
    """Error of nested codes over the best clustering's, all rows (worst row)."""
    widths = ("2", "3", "4", "5", "6")
    cell = lambda e: f"{e['all_rows']:.3f} ({e['worst_row']:.3f})" if e else ""  # noqa: E731
    return markdown(
        ["data", "codes", *(f"{b} bits" for b in widths)],
        [[r["data"], r["bits"], *(cell(r["error_to_optimum"].get(b)) for b in widths)] for r in result["results"]
         if r["bits"] in ("2-6", "3-6")],
    )  # fmt: skip


def weighted(result: dict) -> str:
    """KL at one width for each thing that clustering can minimize."""
    rows = []
    for r in result["results"]:
        low, high = r["kl_interval"]
        less = ""
        if r["weights"] != "fisher":
            less = interval({"difference": 1e3 * r["minus_fisher"],
                             "interval_95": [1e3 * v for v in r["minus_fisher_interval"]]}, 2)  # fmt: skip
        rows.append([r["bits"], r["weights"], f"{r['kl']:.5f} [{low:.5f}, {high:.5f}]", less])
    return markdown(["bits", "weights", "KL, nats a token", "minus `fisher`, thousandths"], rows)


def over_best(result: dict) -> str:
    """KL over that of the best table, by the text that a table is of and the text that is served."""
    tables = list(next(iter(result["kl"].values())))
    ratio = lambda f: f"{f['over_best']:.2f} [{f['over_best_95'][0]:.2f}, {f['over_best_95'][1]:.2f}]"  # noqa: E731
    return markdown(
        ["text served", *(f"table of {t}" for t in tables)],
        [[name, *(ratio(row[t]) for t in tables)] for name, row in result["kl"].items()],
    )


def carved(result: dict) -> str:
    """Perplexity of the dense model and of the carved one, and how evenly experts are chosen."""
    rows = []
    for text, arms in result["texts"].items():
        for arm, found in sorted(arms.items(), reverse=True):
            rates = found.get("selection_rates")
            rows.append([text, arm, f"{found['perplexity']:.2f} ± {found['standard_error']:.2f}",
                         "{:.2f} to {:.2f}".format(*rates["range"]) if rates else ""])  # fmt: skip
    return markdown(["text", "model", "perplexity", "share of tokens that choose an expert"], rows)


# Tables of results that do not bring their own.
MADE: dict[str, dict[str, Callable[[dict], str]]] = {
    "experiments/damage_truth/report.json": {
        "plans": truth_plans, "changes": truth_changes, "own plans": truth_own_plans
    },
    "experiments/planner_search/results.json": {"policies": searched},
    "experiments/planner_search/prefixes.json": {"prefixes": over_default},
    "experiments/planner_search/marks.json": {"marks": over_default},
    "experiments/quantizer_quality/results.json": {"optimum": to_optimum},
    "experiments/quantizer_weights/results.json": {"weights": weighted},
    "experiments/domain_tables/results.json": {"domains": over_best},
    "experiments/carve_moe/results.json": {"perplexity": carved},
    "experiments/carve_moe/results_shared_96.json": {"perplexity": carved},
}  # fmt: skip


def table(file: str, name: str) -> str:
    """The table ``name`` of a results file, named from the root of the repository. KeyError where there is none."""
    result = json.loads((ROOT / file).read_text())
    return MADE[file][name](result) if file in MADE else result["tables"][name]


def filled(text: str) -> str:
    """A document with its tables as the results have them now; what is fenced stays."""
    parts = FENCED.split(text)
    parts[::2] = [PLACE.sub(lambda p: f"{p[1]}{table(p[2], p[3])}\n{p[4]}", part) for part in parts[::2]]
    return "".join(parts)


def documents() -> list[Path]:
    """Documents with places for tables."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/**/*.md")]
    return sorted(path for path in found if PLACE.search(path.read_text("utf-8")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a document is out of date")
    args = parser.parse_args()
    stale = []
    for path in documents():
        before = path.read_text("utf-8")
        after = filled(before)
        if after != before:
            stale.append(str(path.relative_to(ROOT)))
            if not args.check:
                path.write_text(after, "utf-8")
    print("\n".join(stale) or "every table is up to date")
    if stale and args.check:
        sys.exit("out of date: run python -m experiments.results")


if __name__ == "__main__":
    main()
