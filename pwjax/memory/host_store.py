"""Pages on the host: read from the artifact's files into fresh memory, every page checked against its checksum.

Files are read with ``pread`` and never mapped: a device may alias mapped memory, and a truncated file would kill the
process instead of raising. One store serves any number of threads.
"""

import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pallas_kernels.pages import Geometry
from pwjax.errors import ArtifactError

# Largest single read; longer runs of pages are read in pieces (Linux stops at 2 GiB anyway).
MAX_READ_BYTES = 64 << 20


def page_file(layer: int) -> str:
    """Name of the page file of a layer."""
    return f"layer_{layer:03d}.bin"


def crc_file(layer: int) -> str:
    """Name of the checksum file of a layer."""
    return f"layer_{layer:03d}.crc32"


class HostStore:
    """All pages of a model's blocks, as files: ``layer_XXX.bin`` and one crc32 a page in ``layer_XXX.crc32``.

    Opening checks that every file is there and has its size. Raises ArtifactError that names file and page.
    """

    def __init__(self, page_dir: str | os.PathLike, geometry: Geometry, layers: int, experts: int):
        self.path = Path(page_dir)
        self.geometry, self.layers, self.experts = geometry, layers, experts
        self.layer_pages = geometry.host_layer_pages(experts)
        self._files: list[int] = []
        self._crcs: list[np.ndarray] = []
        try:
            for layer in range(layers):
                self._files.append(self._open(layer))
                self._crcs.append(self._read_crcs(layer))
        except BaseException:
            self.close()
            raise

    def read(self, layer: int, pages: Sequence[int]) -> np.ndarray:
        """Fresh ``uint32[n, page_words]`` with the pages of a layer, in the order asked for.

        Neighbours in ``pages`` that are neighbours in the file come with one read. ArtifactError for a page that is
        cut short or fails its checksum; IndexError for one that the layer does not have.
        """
        wanted = np.asarray(pages, np.int64).reshape(-1)
        strange = wanted[(wanted < 0) | (wanted >= self.layer_pages)]
        if strange.size:
            raise IndexError(f"layer {layer} has pages 0..{self.layer_pages - 1}, asked for {strange[0]}")
        words = np.empty((wanted.size, self.geometry.page_words), "<u4")
        starts = np.flatnonzero(np.diff(wanted, prepend=-2) != 1)
        for first, last in zip(starts, np.append(starts, wanted.size)[1:], strict=True):
            self._read_run(layer, int(wanted[first]), words[first:last])
        for row, page in enumerate(wanted):
            if zlib.crc32(words[row]) != int(self._crcs[layer][page]):
                raise ArtifactError(
                    f"page {page} of {self.path / page_file(layer)} is corrupted (its checksum differs); "
                    "copy the artifact again or quantize anew"
                )
        return words.astype(np.uint32, copy=False)

    def check(self, layer: int) -> list[int]:
        """Pages of a layer whose checksum differs (all from the first that is cut short)."""
        bad = []
        for page in range(self.layer_pages):
            try:
                self.read(layer, [page])
            except ArtifactError:
                bad.append(page)
        return bad

    def close(self) -> None:
        """Close all files; the store cannot be used afterwards."""
        while self._files:
            os.close(self._files.pop())

    def __enter__(self) -> "HostStore":
        return self

    def __exit__(self, *_exc) -> None:
        self.close()

    def _read_run(self, layer: int, page: int, out: np.ndarray) -> None:
        """Fill ``out`` uint32[n, page_words] with consecutive pages from ``page`` on."""
        if not self._files:
            raise ArtifactError(f"the page store {self.path} is closed")
        target = out.data.cast("B")
        offset, done = page * self.geometry.page_bytes, 0
        while done < len(target):
            piece = target[done : done + MAX_READ_BYTES]
            try:
                got = os.preadv(self._files[layer], [piece], offset + done)
            except OSError as error:
                raise ArtifactError(f"cannot read {self.path / page_file(layer)}: {error.strerror}") from error
            if not got:
                short = page + done // self.geometry.page_bytes
                raise ArtifactError(
                    f"{self.path / page_file(layer)} is truncated: page {short} of {self.layer_pages} is not whole"
                )
            done += got

    def _open(self, layer: int) -> int:
        path = self.path / page_file(layer)
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ArtifactError(f"cannot open the page file {path}: {error.strerror}") from error
        size, need = os.fstat(file).st_size, self.layer_pages * self.geometry.page_bytes
        if size != need:
            os.close(file)
            what = "truncated" if size < need else "too long"
            raise ArtifactError(f"{path} is {what}: {size} bytes, {need} expected")
        return file

    def _read_crcs(self, layer: int) -> np.ndarray:
        path = self.path / crc_file(layer)
        try:
            crcs = np.fromfile(path, "<u4")
        except OSError as error:
            raise ArtifactError(f"cannot read the checksums {path}: {error.strerror}") from error
        if crcs.size != self.layer_pages:
            raise ArtifactError(f"{path} has {crcs.size} checksums, {self.layer_pages} expected")
        return crcs
