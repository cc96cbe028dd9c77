"""A quantized model on disk: opened with every cheap check, verified to the last byte on request."""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from pallas_kernels.bitplanes import read_block
from pallas_kernels.pages import Geometry
from planner.kinds import TextKinds
from planner.residual import MomentsReference, ResidualHeads
from planner.tables import BlockTable
from pwjax.checkpoints import manifest as manifests
from pwjax.checkpoints.lazy import LayerStack
from pwjax.checkpoints.source import ParamSource
from pwjax.checkpoints.tables import finish_write
from pwjax.checkpoints.tree import EXPERTS, dense_shapes, name_all, param_shapes, shape_problems, unflatten
from pwjax.config import ModelConfig
from pwjax.errors import ArtifactError
from pwjax.memory.host_store import HostStore, crc_file, page_file

# Damage tables that are means over the tokens routed to an expert.
CONDITIONAL = ("output", "directional")


class Artifact:
    """An artifact directory, made by ``pwjax.quantize``; open it with :meth:`open`.

    ``path``, ``config`` (ModelConfig), ``geometry`` (Geometry), ``manifest`` (dict).
    """

    def __init__(self, path: Path, config: ModelConfig, geometry: Geometry, manifest: dict):
        self.path, self.config, self.geometry, self.manifest = path, config, geometry, manifest

    @classmethod
    def open(cls, path: str | os.PathLike) -> "Artifact":
        """Open ``path``; check manifest, file sizes, sha256 of small files, and names, types and shapes of all tensors.

        Raises ArtifactError that names everything missing, extra, changed or misshapen. Pages and the tensors that are
        not paged are checked when they are read, or all by :meth:`verify`.
        """
        path = Path(path)
        finish_write(path)
        manifest, config, geometry = manifests.read(path)
        artifact = cls(path, config, geometry, manifest)
        checked_later = (manifests.DENSE, f"{manifests.PAGES}/")
        problems = artifact._file_problems()
        if not problems:
            problems = artifact._changed(n for n in manifest["files"] if not n.startswith(checked_later))
        if not problems:
            problems = artifact._tensor_problems()
        if problems:
            raise ArtifactError(f"the quantized model at {path} is not whole: {name_all(problems)}")
        return artifact

    @property
    def tokenizer_path(self) -> Path | None:
        """The artifact's ``tokenizer.json``, or None where it was made without one."""
        path = self.path / "tokenizer.json"
        return path if path.exists() else None

    def table(self, kind: str | None = None, preferred: str | None = None) -> BlockTable:
        """What the planner works from; ``kind`` names a damage table, None the one that calibration found best.

        ``preferred`` is taken in its place where the artifact has it. The table of the paper carries the paper's prompt
        residual, all others the best that calibration left. ArtifactError where the artifact has no table of that name.
        """
        facts = self.manifest["calibration"]
        kinds = facts["damage"]
        kind = kind or (preferred if preferred in kinds else facts.get("default", kinds[0]))
        if kind not in kinds:
            raise ArtifactError(f"{self.path} has no damage table {kind!r}; it has {', '.join(kinds)}")
        tables = self.calibration_tables()
        geometry, per_matrix = self.geometry, self.config.blocks // 2
        pages = [[geometry.block_pages(m, b) for b in geometry.all_bits] for m in (0, 1)]
        try:
            return BlockTable(
                layers=self.config.num_layers,
                experts=self.config.num_experts,
                widths=geometry.all_bits,
                damage=tables[f"damage/{kind}"],
                pages=np.tile(np.array(pages, np.int64), (per_matrix, 1)),
                params=np.tile([geometry.shape(m).params for m in (0, 1)], per_matrix),
                routing_mass=tables["routing_mass"],
                routing_rate=tables.get("routing_rate", tables["routing_mass"] * self.config.top_k),
                conditional=kind.partition("@")[0] in CONDITIONAL,
                floors=tables.get("floors"),
                heads=_heads(tables, kind),
                kinds=_kinds(tables, kind),
            )
        except (ValueError, KeyError) as error:
            raise ArtifactError(f"{self.path / manifests.TABLES} cannot be used: {error}") from error

    def dense_params(self) -> dict:
        """Everything that is not paged: nested dictionary of bfloat16 arrays; ArtifactError if the file has changed."""
        self._check_dense()
        try:
            return unflatten(load_file(self.path / manifests.DENSE))
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"cannot read {self.path / manifests.DENSE}: {error}") from error

    def source(self, bits: int = 16, dtype: DTypeLike = ml_dtypes.bfloat16) -> ParamSource:
        """All parameters with experts at ``bits`` (16: the original ones), read one layer at a time.

        Experts below 16 bits are exact in float32, and rounded where ``dtype`` is bfloat16. ArtifactError where the
        model has no such bits or ``dense.safetensors`` has changed.
        """
        if bits not in self.geometry.all_bits:
            raise ArtifactError(
                f"{self.path} has no {bits} bits; choose from {', '.join(map(str, self.geometry.all_bits))}"
            )
        self._check_dense()
        flat: dict[str, np.ndarray | LayerStack] = {}
        for name, shape in param_shapes(self.config).items():
            if name in EXPERTS:
                read = partial(self._expert_layer, EXPERTS.index(name), bits, dtype)
                flat[name] = LayerStack(shape, read, dtype)
            elif name.startswith("layers/"):
                flat[name] = LayerStack(shape, partial(self._dense_tensor, name))
            else:
                flat[name] = self._dense_tensor(name)
        return ParamSource(self.config, flat, dtype)

    def host_store(self) -> HostStore:
        """A store over the page files; close it after use."""
        return HostStore(self.path / manifests.PAGES, self.geometry, self.config.num_layers, self.config.num_experts)

    def expert_params(self, bits: int) -> dict:
        """Dequantized routed experts at ``bits`` for the dense form: ``{"gate_up", "down"}`` float32[L, E, out, in]."""
        layers, experts = self.config.num_layers, self.config.num_experts
        names = ("gate_up", "down")
        out = {
            name: np.empty((layers, experts, self.geometry.shape(m).rows, self.geometry.shape(m).cols), np.float32)
            for m, name in enumerate(names)
        }
        with self.host_store() as store:
            for layer in range(layers):
                for expert in range(experts):
                    for m, name in enumerate(names):
                        out[name][layer, expert] = self.read_block(store, layer, expert, m, bits)
        return out

    def read_block(self, store: HostStore, layer: int, expert: int, matrix: int, bits: int) -> np.ndarray:
        """Weights float32[out, in] of one block at ``bits``."""
        first = self.geometry.host_block_start(expert, matrix)
        pages = store.read(layer, range(first, first + self.geometry.host_block_pages(matrix)))
        return read_block(pages, self.geometry, matrix, bits)

    def verify(self, progress: Callable[[str], None] = lambda _name: None) -> list[str]:
        """Read every byte; returns what is wrong, one sentence each, empty when all is well.

        ``progress`` is called with each file's name before it is read. Corrupted pages are named.
        """
        problems = self._file_problems()
        for name in self.manifest["files"]:
            if any(problem.startswith(f"{name} ") for problem in problems):
                continue
            progress(name)
            problems += self._changed([name])
        page_files = {f"{manifests.PAGES}/{f(i)}" for i in range(self.config.num_layers) for f in (page_file, crc_file)}
        if not any(problem.split(" ")[0] in page_files and "sha256" not in problem for problem in problems):
            with self.host_store() as store:
                for layer in range(self.config.num_layers):
                    bad = store.check(layer)
                    if bad:
                        name = f"{manifests.PAGES}/{page_file(layer)}"
                        shown = ", ".join(map(str, bad[:8])) + (", …" if len(bad) > 8 else "")
                        problems.append(f"{name} has {len(bad)} corrupted pages: {shown}")
        return problems

    def _changed(self, names: Iterable[str]) -> list[str]:
        """A sentence for each file whose sha256 is not the manifest's; ArtifactError if one cannot be read."""
        problems = []
        for name in names:
            try:
                same = manifests.file_sha256(self.path / name) == self.manifest["files"][name]["sha256"]
            except OSError as error:
                raise ArtifactError(f"cannot read {self.path / name}: {error}") from error
            if not same:
                problems.append(f"{name} has another sha256 than the manifest says")
        return problems

    def _check_dense(self) -> None:
        """ArtifactError unless ``dense.safetensors`` has the manifest's sha256."""
        if self._changed([manifests.DENSE]):
            raise ArtifactError(f"{self.path / manifests.DENSE} is corrupted: its sha256 is not the manifest's")

    def _dense_tensor(self, name: str, index: int | None = None) -> np.ndarray:
        """One tensor that is not paged, or one layer of it."""
        try:
            # Opened anew: a mapping that stays open would count all that was read as this process's.
            with safe_open(self.path / manifests.DENSE, "numpy") as file:
                return file.get_tensor(name) if index is None else file.get_slice(name)[index]
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"cannot read {self.path / manifests.DENSE}: {error}") from error

    def _expert_layer(self, matrix: int, bits: int, dtype: DTypeLike, layer: int) -> np.ndarray:
        """One matrix of all routed experts of a layer at ``bits``: [E, out, in]."""
        with self.host_store() as store:
            blocks = (self.read_block(store, layer, e, matrix, bits) for e in range(self.config.num_experts))
            return np.stack([block.astype(dtype) for block in blocks])

    def calibration_tables(self) -> dict[str, np.ndarray]:
        """Every array that calibration left, by its name in ``calibration/tables.safetensors``."""
        try:
            return load_file(self.path / manifests.TABLES)
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"cannot read {self.path / manifests.TABLES}: {error}") from error

    def _file_problems(self) -> list[str]:
        """Files that are missing, of another size, or in ``pages/`` without belonging there."""
        problems = []
        files = self.manifest["files"]
        needed = [manifests.DENSE, manifests.TABLES]
        for layer in range(self.config.num_layers):
            needed += [f"{manifests.PAGES}/{page_file(layer)}", f"{manifests.PAGES}/{crc_file(layer)}"]
        problems += [f"{name} is not in the manifest" for name in needed if name not in files]
        for name, facts in files.items():
            path = self.path / name
            if Path(name).is_absolute() or ".." in Path(name).parts:
                problems.append(f"{name} lies outside of the directory")
            elif not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size != facts["bytes"]:
                problems.append(f"{name} has {path.stat().st_size} bytes instead of {facts['bytes']}")
        page_dir = self.path / manifests.PAGES
        strays = sorted(p.name for p in page_dir.iterdir()) if page_dir.is_dir() else []
        problems += [
            f"{manifests.PAGES}/{name} does not belong there" for name in strays if f"pages/{name}" not in files
        ]
        return problems

    def _tensor_problems(self) -> list[str]:
        """Tensors whose name, type or shape is not what the model needs."""
        problems = []
        for file, dtype in ((manifests.DENSE, "BF16"), (manifests.TABLES, "F64")):
            name = Path(file).name
            try:
                found = _header(self.path / file)
            except (OSError, SafetensorError) as error:
                problems.append(f"{name} cannot be read: {error}")
                continue
            if file == manifests.DENSE:
                wanted = dense_shapes(self.config)
            else:
                wanted = self._table_shapes(found)
                found = {tensor: facts for tensor, facts in found.items() if tensor in wanted}
            shapes = {tensor: shape for tensor, (shape, _) in found.items()}
            problems += [f"{name}: {problem}" for problem in shape_problems(shapes, wanted)]
            wrong = {tensor: got for tensor, (_, got) in found.items() if tensor in wanted and got != dtype}
            problems += [f"{name}: {tensor} is {got} instead of {dtype}" for tensor, got in wrong.items()]
        return problems

    def _table_shapes(self, found: dict[str, tuple]) -> dict[str, tuple[int, ...]]:
        """Tables that must be there; what calibration keeps text by text is there as a whole or not at all."""
        layers, experts = self.config.num_layers, self.config.num_experts
        blocks, widths = self.config.blocks, len(self.geometry.all_bits)
        kinds = self.manifest["calibration"]["damage"]
        shapes = {f"damage/{kind}": (blocks, widths) for kind in kinds} | {"routing_mass": (layers, experts)}
        texts = [shape for tensor, (shape, _) in found.items() if tensor.startswith("texts/")]
        if texts:
            count = next(iter(texts[0]), 0)
            shapes |= {f"texts/damage/{kind}": (count, blocks, widths) for kind in CONDITIONAL if kind in kinds}
            shapes["texts/routing_rate"] = count, layers, experts
            if "residual/moments/mean" in found:
                shapes["residual/moments/text_mean"] = count, blocks, widths - 1
        return shapes


def _kinds(tables: dict[str, np.ndarray], kind: str) -> TextKinds | None:
    """Damage ``kind`` in each of calibration's texts, None where it kept but one."""
    name = f"texts/damage/{kind}"
    return TextKinds(tables[name], tables["texts/routing_rate"]) if name in tables else None


def _heads(tables: dict[str, np.ndarray], kind: str) -> ResidualHeads | None:
    """The prompt residual of ``residual/*`` for a damage table, None where calibration has none.

    The paper's heads are fitted to deviations from all text, so they are not for a table that knows its texts apart.
    """
    prefix, reference = "residual", None
    if kind != "paper" and "residual/moments/weights" in tables:
        prefix = "residual/moments"
        names = ("energy_gate_up", "energy_down", "mean")
        reference = MomentsReference(
            *(tables[f"{prefix}/{name}"] for name in names), tables.get(f"{prefix}/text_mean")
        )
    elif f"texts/damage/{kind}" in tables:
        return None
    if f"{prefix}/weights" not in tables:
        return None
    heads = (tables[f"{prefix}/{name}"] for name in ("weights", "confidence", "low", "high"))
    return ResidualHeads(*heads, reference=reference)


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of every tensor of a safetensors file."""
    with safe_open(path, "numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}
        return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
