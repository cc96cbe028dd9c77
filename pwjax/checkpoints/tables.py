"""New calibration tables for an artifact that exists."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save as safetensors_bytes

from pwjax.checkpoints import manifest as manifests
from pwjax.errors import ArtifactError


def write_tables(path: str | os.PathLike, tables: Mapping[str, np.ndarray], summary: Mapping) -> None:
    """Replace the tables and the calibration summary of the artifact at ``path``; the manifest's hashes follow.

    Of the old summary only what concerns the codes stays (``quantizer``, ``lut_choice``, ``report``). Both files are
    written whole beside their places before either is renamed, so the old ones stay whatever fails before; after a kill
    between the two renames :meth:`Artifact.open` does the second. ArtifactError where they cannot be written.
    """
    path = Path(path)
    finish_write(path)
    manifest, _, _ = manifests.read(path)
    data = safetensors_bytes(dict(tables))
    old = manifest["calibration"]
    kept = {name: old[name] for name in ("quantizer", "lut_choice", "report") if name in old}
    manifest["calibration"] = {**summary, **kept}
    manifest["files"][manifests.TABLES] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    contents = {manifests.TABLES: data, manifests.NAME: manifests.sealed(manifest)}
    try:
        for name, content in contents.items():
            with open(_aside(path, name), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        os.replace(_aside(path, manifests.TABLES), path / manifests.TABLES)
    except OSError as error:
        # The manifest's first: without new tables beside it, it would count as the rest of a write.
        for name in reversed(contents):
            _aside(path, name).unlink(missing_ok=True)
        raise ArtifactError(f"cannot write the tables of {path}: {error.strerror or error}") from error
    finish_write(path)


def finish_write(path: Path) -> None:
    """Put the new manifest in place where the new tables are already; nothing where no write was killed."""
    if _aside(path, manifests.NAME).exists() and not _aside(path, manifests.TABLES).exists():
        try:
            os.replace(_aside(path, manifests.NAME), path / manifests.NAME)
        except OSError as error:
            raise ArtifactError(f"cannot write the manifest of {path}: {error.strerror or error}") from error


def _aside(path: Path, name: str) -> Path:
    return path / f"{name}.new"
