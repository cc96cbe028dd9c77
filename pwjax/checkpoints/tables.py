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
    written whole beside their places before either is renamed. ArtifactError where they cannot be written.
    """
    path = Path(path)
    manifest, _, _ = manifests.read(path)
    data = safetensors_bytes(dict(tables))
    old = manifest["calibration"]
    kept = {name: old[name] for name in ("quantizer", "lut_choice", "report") if name in old}
    manifest["calibration"] = {**summary, **kept}
    manifest["files"][manifests.TABLES] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    contents = {manifests.TABLES: data, manifests.NAME: manifests.dumps(manifest)}
    try:
        for name, content in contents.items():
            with open(path / f"{name}.new", "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for name in contents:
            os.replace(path / f"{name}.new", path / name)
    except OSError as error:
        for name in contents:
            (path / f"{name}.new").unlink(missing_ok=True)
        raise ArtifactError(f"cannot write the tables of {path}: {error.strerror or error}") from error
