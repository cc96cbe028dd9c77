"""Writing an artifact: layer by layer into a temporary sibling, resumable, renamed when whole.

``OUT.partial/artifact`` becomes OUT by one rename; ``OUT.partial/state`` remembers the finished layers. The state
carries a key, a hash of everything the bytes depend on, so a run with other inputs or settings never mixes in.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save as safetensors_bytes

from pallas_kernels.pages import Geometry
from pwjax.checkpoints import manifest as manifests
from pwjax.checkpoints.lazy import LayerStack
from pwjax.checkpoints.safetensors_file import write_tensors
from pwjax.config import ModelConfig
from pwjax.errors import ArtifactError
from pwjax.memory.host_store import crc_file, page_file
from pwjax.units import format_bytes

# Room for the manifest, the tables and the file system's own bookkeeping.
_SLACK_BYTES = 4 << 20


class LayerFile:
    """One open page file: pages are appended, hashed and checksummed as they come.

    ``record`` is JSON-able and comes back from :meth:`ArtifactWriter.records` when a run resumes.
    """

    def __init__(self, file):
        self.record: dict = {}
        self.crcs: list[int] = []
        self.bytes = 0
        self._file, self._sha = file, hashlib.sha256()

    def add(self, pages: np.ndarray) -> None:
        """Append ``pages`` uint32[n, page_words]."""
        pages = np.ascontiguousarray(pages, "<u4")
        self.crcs.extend(zlib.crc32(page) for page in pages)
        self._sha.update(pages.data)
        self._file.write(pages)
        self.bytes += pages.nbytes

    @property
    def sha256(self) -> str:
        """Hex sum of all pages so far."""
        return self._sha.hexdigest()


class ArtifactWriter:
    """Writes the artifact ``out``; use as a context manager so that the lock on the partial directory is released.

    ``key`` identifies inputs and settings. Raises ArtifactError where ``out`` is taken, another run writes it, or a
    partial directory belongs to other inputs. Call :meth:`begin` before the first layer. ``scratch`` is a directory
    for the caller's own intermediate files; it lives as long as the partial directory.
    """

    def __init__(self, out: str | os.PathLike, config: ModelConfig, key: str):
        self.out = Path(out)
        self.partial = self.out.with_name(self.out.name + ".partial")
        self.body, self.state = self.partial / "artifact", self.partial / "state"
        self.scratch = self.partial / "scratch"
        self.config = config
        self.layer_bytes = 0
        refuse_taken(self.out)
        with self.disk("the partial directory"):
            for folder in (self.body / manifests.PAGES, self.body / "calibration", self.state, self.scratch):
                folder.mkdir(parents=True, exist_ok=True)
        self._lock: int | None = self._take_lock()
        try:
            self._bind(key)
        except BaseException:
            os.close(self._lock)
            raise

    def begin(self, geometry: Geometry, more_bytes: int = 0) -> None:
        """Fix the geometry; ArtifactError where the missing layers and ``more_bytes`` do not fit on the disk."""
        self.geometry = geometry
        self.layer_bytes = geometry.host_layer_pages(self.config.num_experts) * geometry.page_bytes
        self.reserve((self.config.num_layers - len(self.records())) * self.layer_bytes + more_bytes)

    def reserve(self, more_bytes: int) -> None:
        """ArtifactError where the disk has less than ``more_bytes`` free."""
        need, free = more_bytes + _SLACK_BYTES, shutil.disk_usage(self.partial).free
        if need > free:
            raise ArtifactError(
                f"not enough disk space at {self.out.absolute().parent}: {format_bytes(need)} are needed, "
                f"{format_bytes(free)} are free; free some or choose another place"
            )

    def records(self) -> dict[int, dict]:
        """Records of the finished layers."""
        return {
            layer: json.loads(self._record(layer).read_text())["record"]
            for layer in range(self.config.num_layers)
            if self._finished(layer)
        }

    @contextlib.contextmanager
    def layer(self, layer: int) -> Iterator[LayerFile]:
        """Write the pages of one layer; it counts as finished once the block ends without an error."""
        path = self.body / manifests.PAGES / page_file(layer)
        with self.disk(path.name):
            with open(path, "wb") as file:
                out = LayerFile(file)
                yield out
                if out.bytes != self.layer_bytes:
                    raise ValueError(f"layer {layer} needs {self.layer_bytes} bytes of pages, got {out.bytes}")
                _sync(file)
            crcs = np.array(out.crcs, "<u4").tobytes()
            _write(path.with_name(crc_file(layer)), crcs)
            files = {
                page_file(layer): {"bytes": out.bytes, "sha256": out.sha256},
                crc_file(layer): {"bytes": len(crcs), "sha256": hashlib.sha256(crcs).hexdigest()},
            }
            # Last, and whole or not at all: this is what makes the layer finished.
            _write(self._record(layer), manifests.dumps({"files": files, "record": out.record}))

    def finish(
        self,
        dense: Mapping[str, np.ndarray | LayerStack],
        tables: Mapping[str, np.ndarray],
        calibration: dict,
        extra_files: Mapping[str, bytes],
        more: dict | None = None,
    ) -> Path:
        """Write everything else and rename; returns the artifact's path.

        ``dense`` tensors by flat name, written as bfloat16 (a stack one layer at a time), ``tables`` those of
        ``calibration/``, ``extra_files`` the tokenizer and the like by file name, ``more`` further manifest entries.
        """
        missing = [layer for layer in range(self.config.num_layers) if not self._finished(layer)]
        if missing:
            raise ValueError(f"layers {missing} are not written yet")
        files: dict[str, dict] = {}
        for layer in range(self.config.num_layers):
            stored = json.loads(self._record(layer).read_text())["files"]
            files |= {f"{manifests.PAGES}/{name}": facts for name, facts in stored.items()}
        contents = {manifests.TABLES: safetensors_bytes(dict(tables)), **extra_files}
        with self.disk("the artifact"):
            files[manifests.DENSE] = self._write_dense(dense)
            for name, data in contents.items():
                _write(self.body / name, data)
                files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            described = manifests.describe(self.config, self.geometry)
            full = {**described, **(more or {}), "calibration": calibration, "files": files}
            _write(self.body / manifests.NAME, manifests.sealed(full))
            for folder in (self.body / manifests.PAGES, self.body / "calibration", self.body):
                _sync_folder(folder)
            os.rename(self.body, self.out)
            _sync_folder(self.out.absolute().parent)
        shutil.rmtree(self.partial, ignore_errors=True)
        self.close()
        return self.out

    def _write_dense(self, dense: Mapping[str, np.ndarray | LayerStack]) -> dict:
        """Write what is not paged; returns its size and sha256."""
        path = self.body / manifests.DENSE
        write_tensors(path, {name: value.shape for name, value in dense.items()}, dense.items())
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        return {"bytes": path.stat().st_size, "sha256": manifests.file_sha256(path)}

    @contextlib.contextmanager
    def disk(self, what: str) -> Iterator[None]:
        """Turn operating system errors into a sentence; the partial directory stays."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ArtifactError(
                    f"the disk is full while writing {what}; finished layers are kept in {self.partial}: "
                    "free space and run the same command again"
                ) from error
            raise ArtifactError(f"cannot write {what} in {self.partial}: {error.strerror or error}") from error

    def close(self) -> None:
        """Release the lock; finished layers and scratch files stay for the next run, an idle directory goes."""
        if self._lock is None:
            return
        if self.partial.exists() and not self._kept():
            shutil.rmtree(self.partial, ignore_errors=True)
        os.close(self._lock)
        self._lock = None

    def __enter__(self) -> "ArtifactWriter":
        return self

    def __exit__(self, *_exc) -> None:
        self.close()

    def _record(self, layer: int) -> Path:
        return self.state / f"layer_{layer:03d}.json"

    def _finished(self, layer: int) -> bool:
        path = self.body / manifests.PAGES / page_file(layer)
        return self._record(layer).exists() and path.exists() and path.stat().st_size == self.layer_bytes

    def _kept(self) -> bool:
        """Whether there is work that another run could go on from."""
        return any(self.scratch.iterdir()) or any(p.name != "key" for p in self.state.iterdir())

    def _take_lock(self) -> int:
        lock = os.open(self.partial, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise ArtifactError(
                f"another run is writing {self.partial}; wait for it or choose another output"
            ) from None
        return lock

    def _bind(self, key: str) -> None:
        """Tie the partial directory to ``key``; refuse one that holds work for another."""
        file = self.state / "key"
        old = file.read_text() if file.exists() else None
        if old == key:
            return
        if self._kept():
            raise ArtifactError(
                f"{self.partial} holds a conversion of another model, text or settings; "
                "run with the same ones to resume it, remove it, or choose another output"
            )
        with self.disk("the partial directory"):
            _write(file, key.encode())


def refuse_taken(out: Path) -> None:
    """ArtifactError where ``out`` exists and is not an empty directory."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ArtifactError(f"{out} already exists and is not an empty directory; remove it or choose another output")


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        _sync(file)
    os.replace(temporary, path)


def _sync(file) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Make renames in a directory last through a power cut."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
