"""Calibration of a model: what its weights are worth, and what running a block at fewer bits costs.

Joins ``calib``, which knows no model, to ours. The model is run three times over token windows, each time forward and
backward, layer by layer: as it is (importance of weights, routing), and with all experts at each operating point
(damage of a block at every width while the others are at 6, or at 4 bits). Results are kept in a folder layer by layer,
so interrupted work goes on where it was.

For a model that is quantized already, :func:`calibrate` does all of it from the artifact's own 16-bit pages,
:func:`pwjax.checkpoints.tables.write_tables` puts the new tables in its place, and :func:`discard` then drops the work.
``Calibrated.sequences`` has what a prompt residual is fitted to: damage and input norms of every block in every single
window.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from calib import damage
from calib.anyprecision import dequantize
from calib.blocks import FORMS, Importance, Measured, importance, measure, second_moments
from calib.refine import shrunk
from calib.residual import residual
from calib.sensitivity import column_weights, paper_damage, unrouted_importance
from calib.stream import Routing, Stream, save_array
from calib.text import choose, kinds
from pallas_kernels.pages import MATRICES
from pwjax.calibration_needs import needs
from pwjax.calibration_text import SEQUENCE_LENGTH, TOKENS, CalibrationText, Text, calibration_text
from pwjax.checkpoints import manifest as manifests
from pwjax.checkpoints.artifact import Artifact
from pwjax.checkpoints.lazy import bf16
from pwjax.checkpoints.source import ParamSource
from pwjax.checkpoints.tree import EXPERTS
from pwjax.errors import ArtifactError, UsageError
from pwjax.progress import Progress, silent
from pwjax.streamed import CodedExperts, StreamedDecoder

# Part of what interrupted work is bound to: raise it when the same inputs would give other tables.
ALGORITHM = "streamed/4"

# The damage form whose plans lose least on held-out text (`pwjax calibrate` prints all of them), and the bits of all
# other blocks while a block's damage is measured.
DEFAULT_FORM = "directional"
POINTS = (6, 4)

Pair = tuple[np.ndarray, np.ndarray]
Paper = Callable[[int, int, Pair, Importance], np.ndarray]


class Calibrated(NamedTuple):
    """``tables`` by name for ``calibration/tables.safetensors``, ``summary`` for the manifest, ``sequences``: for each
    operating point a ``Measured`` whose arrays have leading axes [L, E], and what became of the prompt ``residual``."""

    tables: dict[str, np.ndarray]
    summary: dict
    sequences: dict[int, Measured]
    residual: dict


class Calibration:
    """The passes over one model and text, resumable in ``folder``; see the module."""

    def __init__(self, source: ParamSource, text: CalibrationText, folder: Path, progress: Progress = silent):
        self.source, self.text, self.folder, self.progress = source, text, folder, progress
        self.config = source.config
        # Asked for block by block, layer after layer.
        self._original = lru_cache(8)(partial(self._layer, "original"))
        self._columns = lru_cache(4)(self._column_weights)

    def run_original(self, paper: Paper | None = None, refine: bool = False) -> None:
        """Run the model as it is. UsageError where the loss is not finite.

        Squared gradients of weights are kept, or given to ``paper(layer, expert, exact, importance)`` which makes of
        them the damage float64[2, B] of an expert's blocks. ``refine`` keeps the inputs' second moments too.
        """
        folder = self.folder / "original"
        if (folder / "done").exists():
            return
        stream = self._stream(self.source, self.text.windows.tokens, folder / "stream", "the model")
        routing = stream.forward()
        chosen = choose(self.text.windows, routing.count)
        _save(folder / "routing.npz", chosen=chosen, **routing._asdict())
        for trace in self._backward(stream, chosen):
            tokens = np.bincount(trace.experts.reshape(-1), minlength=self.config.num_experts)
            found: dict[str, list] = {"means": [], "gate_up": [], "down": [], "paper": []}
            for expert, exact in self._experts(trace.layer):
                squares = importance(stream.model.functions, trace, expert, *exact)
                found["means"].append([float(h.mean(dtype=np.float64)) for h in squares[:2]])
                for name, moments in zip(MATRICES, squares.moments, strict=True):
                    found[name].append(moments)
                if paper is not None:
                    found["paper"].append(paper(trace.layer, expert, exact, squares))
                    continue
                for matrix in (0, 1):
                    bits = squares[matrix].astype(ml_dtypes.bfloat16).view(np.uint16)
                    save_array(self._block_path("squares", trace.layer, expert, matrix), bits)
                if refine and tokens[expert] >= damage.FEW_TOKENS:
                    both = second_moments(stream.model.functions, trace, expert, exact[0])
                    for matrix, moment in enumerate(both):
                        save_array(self._block_path("moment", trace.layer, expert, matrix), moment)
            _save(folder / f"layer_{trace.layer:03d}.npz", fisher=trace.fisher, tokens=tokens, **found)
        save_array(folder / "losses.npy", stream.losses())
        _finish(folder)

    def run_point(self, bits: int, experts: CodedExperts) -> None:
        """Measure the damage of every block while all others run at ``bits``."""
        folder = self.folder / f"point_{bits}"
        if (folder / "done").exists():
            return
        windows = self.text.windows.tokens[self.chosen]
        stream = self._stream(experts.at(self.source, bits), windows, folder / "stream", f"{bits} bits")
        stream.forward()
        for trace in self._backward(stream, np.arange(len(windows))):
            found = [
                measure(stream.model.functions, trace, expert, exact, *_ladder(experts, trace.layer, expert, bits))
                for expert, exact in self._experts(trace.layer)
            ]
            merged = Measured(*map(np.stack, zip(*found, strict=True)))
            _save(folder / f"layer_{trace.layer:03d}.npz", **merged._asdict())
        _finish(folder)

    def squares(self, layer: int, expert: int, matrix: int) -> np.ndarray:
        """Squared gradients float32[out, in] of one block; of an expert that no token chose, what is least."""
        means = self._original("means", layer)[:, matrix]
        if means[expert] == 0:
            shape = manifests.block_shapes(self.config)[matrix]
            return np.full(shape, unrouted_importance(means)[expert], np.float32)
        bits = np.load(self._block_path("squares", layer, expert, matrix))
        return bits.view(ml_dtypes.bfloat16).astype(np.float32)

    def weights(self, layer: int, expert: int, matrix: int) -> np.ndarray:
        """What a weight in each column of one block counts for its codes, float32[in]."""
        return self._columns(layer, matrix)[expert]

    def second_moment(self, layer: int, expert: int, matrix: int) -> np.ndarray | None:
        """Second moment float64[in, in] of one block's gated inputs, shrunk; None below FEW_TOKENS, or if not kept."""
        path = self._block_path("moment", layer, expert, matrix)
        return shrunk(np.load(path), self._original("tokens", layer)[expert]) if path.exists() else None

    @property
    def paper(self) -> np.ndarray:
        """What ``paper`` of :meth:`run_original` made: float64[L, E, 2, B]."""
        return self._layers("original", "paper")

    @property
    def means(self) -> np.ndarray:
        """Mean importance float64[L, E, 2] of every block."""
        return self._layers("original", "means")

    @property
    def chosen(self) -> np.ndarray:
        """Numbers of the windows that are used, of all candidates."""
        return np.load(self.folder / "original" / "routing.npz")["chosen"]

    @property
    def routing(self) -> Routing:
        """What the router of the model did in every candidate window."""
        stored = np.load(self.folder / "original" / "routing.npz")
        return Routing(*(stored[name] for name in Routing._fields))

    def finish(self, paper: np.ndarray, widths: tuple[int, ...], points: Sequence[int], fallback: bool) -> Calibrated:
        """Tables and summary from all passes; ``paper`` float64[n, B] sums of importance times squared error."""
        routing, config = self.routing, self.config
        tokens = self.text.windows.tokens
        rate = routing.count.sum(0) / tokens.size
        mass = routing.mass.sum(0)
        sequences = {b: Measured(*(self._layers(f"point_{b}", name) for name in Measured._fields)) for b in points}
        of_form: dict[str, dict[int, np.ndarray]] = {
            form: {
                b: damage.conditional_table(m.tokens, m.total[:, :, f], m.square[:, :, f])
                for b, m in sequences.items()
            }
            for f, form in enumerate(FORMS)
        }
        found = {form: np.mean(list(at.values()), axis=0) for form, at in of_form.items()}
        found["paper"] = paper / 2
        for form, at in of_form.items():
            found |= {f"{form}@{b}": table for b, table in at.items()}
        expected = {b: damage.served(t, rate) for b, t in of_form[DEFAULT_FORM].items()}
        seen = sequences[points[0]].tokens
        floors = damage.floors(damage.served(found[DEFAULT_FORM], rate), widths, seen)
        count = np.maximum(routing.count.sum(0), 1)
        tables = {f"damage/{form}": _with_16(table, fallback) for form, table in found.items()}
        tables |= {
            "routing_mass": mass / mass.sum(1, keepdims=True),
            "routing_rate": rate,
            "tokens": seen,
            "floors": floors,
            "gate_moments": np.stack([mass / count, routing.square.sum(0) / count], -1),
            "fisher": self._layers("original", "fisher"),
        }
        tables |= {f"moments/{n}": self._layers("original", n).astype(np.float32) / tokens.shape[1] / len(self.chosen)
                   for n in MATRICES}  # fmt: skip
        kind = kinds(self.text.windows.quota, tokens.shape[1])
        texts = np.repeat(kind, self.text.windows.quota)
        if texts.max() > 0:
            for f, form in enumerate(FORMS):
                at = [damage.text_tables(m.counts, m.by_sequence[:, :, :, f], texts, of_form[form][b])
                      for b, m in sequences.items()]  # fmt: skip
                tables[f"texts/damage/{form}"] = _with_16(np.mean(at, axis=0), fallback)
            candidates = kind[self.text.windows.source]
            tables["texts/routing_rate"] = np.stack(
                [routing.count[candidates == text].mean(0) / tokens.shape[1] for text in range(texts.max() + 1)]
            )
        ladder = (*widths, 16) if fallback else widths
        # Of the form that plans are made with: heads that explain another one are too sure of themselves.
        arrays, judged = residual(sequences[points[0]], texts, ladder, DEFAULT_FORM, self.text.seed)
        tables |= arrays
        rare = damage.few_tokens(seen)
        names = [f"layer {at // 2 // config.num_experts} expert {at // 2 % config.num_experts} {MATRICES[at % 2]}"
                 for at in range(config.blocks)]  # fmt: skip
        raised = {str(b): [names[i] for i in np.flatnonzero(floors == b)] for b in widths[1:] if (floors == b).any()}
        summary = {
            **self.text.facts(),
            "damage": [DEFAULT_FORM, *(form for form in found if form != DEFAULT_FORM)],
            "default": DEFAULT_FORM,
            "points": list(points),
            "scale": "nats; output, directional: a routed token (times routing_rate: served); paper: a served one",
            "importance": "squared gradients of the summed loss of drawn tokens, summed over windows, a token",
            "routing_mass": "share of the router weight on the candidate windows",
            "super_additivity": damage.super_additivity(expected),
            "mean_loss": float(np.load(self.folder / "original" / "losses.npy").mean()),
            "few_tokens": rare,
            "unrouted": [names[i] for i in np.flatnonzero(self.means.reshape(-1) == 0)],
            "floors": raised,
            "residual": {"damage": DEFAULT_FORM, "point": points[0], "form": judged["best"]},
            "warnings": _warnings(rare, seen),
        }
        return Calibrated(tables, summary, sequences, judged)

    def _experts(self, layer: int) -> Iterator[tuple[int, Pair]]:
        """Number and both matrices float32[out, in] of each expert, of bfloat16 as the artifact keeps them.

        Read again for the experts, when the layer has left the device: never both.
        """
        weights = [bf16(self.source.flat[name][layer]) for name in EXPERTS]
        for expert in range(self.config.num_experts):
            yield expert, (weights[0][expert].astype(np.float32), weights[1][expert].astype(np.float32))

    def _stream(self, source: ParamSource, windows: np.ndarray, folder: Path, name: str) -> Stream:
        told = lambda stage, done, total: self.progress(f"calibrating at {name}, {stage}", done, total)  # noqa: E731
        return Stream(StreamedDecoder(source), windows, folder, self.text.seed, told)

    def _backward(self, stream: Stream, chosen: np.ndarray):
        try:
            yield from stream.backward(chosen)
        except ValueError as error:
            raise UsageError(f"calibration failed: {error}") from error

    def _block_path(self, what: str, layer: int, expert: int, matrix: int) -> Path:
        return self.folder / "original" / f"{what}_{layer:03d}_{expert:03d}_{MATRICES[matrix]}.npy"

    def _column_weights(self, layer: int, matrix: int) -> np.ndarray:
        """:meth:`weights` of all experts of a layer, float32[E, in]."""
        moments, tokens = (self._original(name, layer) for name in (MATRICES[matrix], "tokens"))
        return column_weights(moments, tokens).astype(np.float32)

    def _layer(self, folder: str, name: str, layer: int) -> np.ndarray:
        """An array of one layer's file."""
        return np.load(self.folder / folder / f"layer_{layer:03d}.npz")[name]

    def _layers(self, folder: str, name: str) -> np.ndarray:
        """An array of every layer's file, stacked."""
        return np.stack([self._layer(folder, name, layer) for layer in range(self.config.num_layers)])


def operating_points(widths: tuple[int, ...]) -> tuple[int, ...]:
    """Bits of the other blocks at which damage is measured: 6 and 4 where there are such widths, else the widest."""
    return tuple(b for b in POINTS if b in widths) or widths[-1:]


def calibrate(
    path: str | os.PathLike,
    text: Text,
    *,
    tokenizer: Any = None,
    tokens: int = TOKENS,
    sequence_length: int = SEQUENCE_LENGTH,
    weights: Sequence[float] | None = None,
    seed: int = 0,
    progress: Progress = silent,
    note: Callable[[str], None] = lambda text: None,
) -> Calibrated:
    """Calibrate the quantized model at ``path`` anew, from its own 16-bit pages and codes; it is not changed.

    ``text``, ``tokenizer`` (None: the artifact's own) and the rest as in
    :func:`pwjax.calibration_text.calibration_text`. ``note`` is told beforehand how much memory and disk it takes at
    most. The work is kept in a directory beside the artifact until :func:`discard`, so that it goes on after any kill
    when called with the same arguments. ArtifactError where the artifact has no 16-bit pages.
    """
    artifact = Artifact.open(path)
    geometry, config = artifact.geometry, artifact.config
    if not geometry.fallback:
        raise ArtifactError(f"{path} has no 16-bit pages to compare with: calibrate it while quantizing, or keep them")
    made = calibration_text(text, config, tokenizer or artifact.tokenizer_path, tokens, sequence_length, weights, seed)
    folder = _folder(path)
    note(needs(config, made, geometry.widths, importance=False))
    _bind(folder, artifact, made)
    points = operating_points(geometry.widths)
    with CodedExperts(artifact.path / manifests.PAGES, geometry, config) as experts:
        calibration = Calibration(artifact.source(16), made, folder, progress)

        def paper(layer: int, expert: int, exact: Pair, squares: Importance) -> np.ndarray:
            blocks = (experts.block(layer, expert, matrix) for matrix in (0, 1))
            return np.stack([paper_damage(*each, geometry.widths) for each in zip(exact, squares[:2], blocks)])  # noqa: B905

        calibration.run_original(paper)
        for bits in points:
            calibration.run_point(bits, experts)
        table = _fill_unrouted(calibration, experts)
    return calibration.finish(table, geometry.widths, points, geometry.fallback)


def discard(path: str | os.PathLike) -> None:
    """Drop what :func:`calibrate` keeps beside ``path``: for when its tables are where they belong."""
    shutil.rmtree(_folder(path), ignore_errors=True)


def _folder(path: str | os.PathLike) -> Path:
    return Path(path).absolute().with_name(Path(path).name + ".calibrating")


def _fill_unrouted(calibration: Calibration, experts: CodedExperts) -> np.ndarray:
    """The paper's table float64[n, B] with experts that no token chose at the least importance of their layer."""
    table, means = calibration.paper, calibration.means
    for layer, expert, matrix in zip(*np.nonzero(means == 0), strict=True):
        least = unrouted_importance(means[layer, :, matrix])[expert]
        exact = calibration.source.flat[EXPERTS[matrix]][layer][expert].astype(np.float32)
        block = experts.block(layer, expert, matrix)
        table[layer, expert, matrix] = least * paper_damage(exact, None, block, experts.geometry.widths)
    return table.reshape(-1, table.shape[-1])


def _ladder(experts: CodedExperts, layer: int, expert: int, bits: int) -> tuple[Pair, Pair]:
    """Both matrices of an expert at ``bits``, and at every width along a leading axis."""
    widths = experts.geometry.widths
    ladder = []
    for matrix in (0, 1):
        block, shape = experts.block(layer, expert, matrix), experts.geometry.shape(matrix)
        ladder.append(np.empty((len(widths), shape.rows, shape.cols), np.float32))
        for row, b in zip(ladder[-1], widths, strict=True):
            row[:] = dequantize(block, b)
    at = widths.index(bits)
    return (ladder[0][at], ladder[1][at]), (ladder[0], ladder[1])


def _with_16(table: np.ndarray, fallback: bool) -> np.ndarray:
    """A table [..., B] with a last column of zeros for 16 bits, where there are."""
    return np.concatenate([table, np.zeros((*table.shape[:-1], 1))], axis=-1) if fallback else table


def _warnings(rare: list[dict], tokens: np.ndarray) -> list[str]:
    """Sentences on what the text could not tell."""
    never = int((tokens == 0).sum())
    told = []
    if rare:
        told.append(
            f"{len(rare)} of {tokens.size} experts saw fewer than {damage.FEW_TOKENS} tokens, {never} of them none: "
            "their damage is drawn to their layer's mean; more text, or other text, would tell"
        )
    return told


def _bind(folder: Path, artifact: Artifact, text: CalibrationText) -> None:
    """Tie the folder of a calibration to its inputs; work for other inputs is thrown away."""
    pages = {name: facts["sha256"] for name, facts in artifact.manifest["files"].items() if name != manifests.TABLES}
    facts = {"pages": pages, "text": text.facts(), "algorithm": ALGORITHM}
    key = hashlib.sha256(manifests.dumps(facts)).hexdigest()
    file = folder / "key"
    if not file.exists() or file.read_text() != key:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        file.write_text(key)


def _finish(folder: Path) -> None:
    """Mark a pass as done and drop what it spilled."""
    (folder / "done").touch()
    shutil.rmtree(folder / "stream")


def _save(path: Path, **arrays) -> None:
    """``np.savez``, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        np.savez(file, **arrays)
    os.replace(temporary, path)
