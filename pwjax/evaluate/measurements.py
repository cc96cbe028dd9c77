"""Measured divergences on disk, a line a plan, so that a truth check that was stopped goes on where it was.

A line depends on the plan alone (the header binds the file to model, text and program shapes), so plans may be asked
for in any order and by any later version of the sampling.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pwjax.errors import UsageError

DIGITS = "0123456789abcdefg"


def plan_key(bits: np.ndarray) -> str:
    """A plan as one character a block: its bits as a digit of base 17."""
    return "".join(DIGITS[b] for b in np.asarray(bits).reshape(-1))


class Measurements:
    """``plan -> float64[windows]`` through ``measure``, each plan measured once; kept at ``path`` (None: nowhere).

    ``header``: JSON-ready; a file that was begun under another one is refused with UsageError.
    """

    def __init__(self, measure: Callable[[np.ndarray], np.ndarray], header: dict, path: Path | None = None):
        self._measure, self._file, self._known = measure, None, {}
        if path is None:
            return
        *lines, torn = path.read_bytes().split(b"\n") if path.exists() else [b""]
        try:
            whole = [json.loads(line) for line in lines]
        except ValueError as error:
            raise UsageError(f"{path} is damaged, or holds no measurements ({error}); delete the file") from None
        if whole and whole[0] != header:
            differs = sorted(k for k in {*whole[0], *header} if whole[0].get(k) != header.get(k))
            raise UsageError(
                f"{path} holds measurements of another run ({', '.join(differs)} differ); "
                "give the arguments of that run, or delete the file"
            )
        self._known = {line["plan"]: np.array(line["kl"]) for line in whole[1:]}
        if torn:
            # Half a line is what a killed run may leave at the end: it is cut off and measured again.
            os.truncate(path, path.stat().st_size - len(torn))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", encoding="utf-8")
        if not whole:
            self._write(header)

    def __contains__(self, bits: np.ndarray) -> bool:
        return plan_key(bits) in self._known

    def __call__(self, bits: np.ndarray) -> np.ndarray:
        """Mean KL of a token of each window, float64[windows]."""
        key = plan_key(bits)
        if key not in self._known:
            self._known[key] = self._measure(bits)
            if self._file:
                self._write({"plan": key, "kl": self._known[key].tolist()})
        return self._known[key]

    def close(self) -> None:
        """Close the file; harmless when done twice."""
        if self._file:
            self._file.close()
            self._file = None

    def _write(self, record: dict) -> None:
        assert self._file is not None
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
