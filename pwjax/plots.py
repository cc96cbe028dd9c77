"""Pictures of a run; they need matplotlib (the ``plot`` extra)."""

from pathlib import Path

from pwjax.errors import PWJaxError
from pwjax.run_summary import SERIES, RunSummary


def plot_run(summary: RunSummary, folder: str | Path) -> list[Path]:
    """Write ``timeline.png`` and ``bits.png`` into ``folder``, made if it is missing; returns their paths.

    PWJaxError where matplotlib is not installed or the folder cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PWJaxError('pictures need matplotlib: pip install "pwjax[plot]"') from error
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / "timeline.png", folder / "bits.png"]
        _timeline(Figure((8, 5), layout="constrained"), summary).savefig(paths[0], dpi=120)
        _bits(Figure((8, 6), layout="constrained"), summary).savefig(paths[1], dpi=120)
    except OSError as error:
        raise PWJaxError(f"cannot write pictures to {folder}: {error.strerror}") from error
    return paths


def _timeline(figure, summary: RunSummary):
    above, below = figure.subplots(2, sharex=True)
    above.step(summary.boundary, summary.series["mean_bits"], where="post")
    above.set_ylabel("mean bits a weight")
    for name in ("weights_pages", "kv_pages", "free_pages"):
        below.step(summary.boundary, summary.series[name], where="post", label=SERIES[name])
    below.set(xlabel="boundary", ylabel="pages")
    below.legend()
    return figure


def _bits(figure, summary: RunSummary):
    axes = figure.subplots(2)
    most = max(2, *summary.header["bits"], *summary.bits.tolist())
    for axis, title, bits in zip(axes, ("at the end", "lowest"), (summary.bits, summary.lowest), strict=True):
        image = axis.imshow(summary.heat(bits), aspect="auto", vmin=2, vmax=most, cmap="viridis")
        axis.set(title=f"mean bits of an expert, {title}", xlabel="expert", ylabel="layer")
        figure.colorbar(image, ax=axis)
    return figure
