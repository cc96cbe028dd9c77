"""Texts to score: files, or modules of the Python standard library that the bundled model was not trained on."""

import platform
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pwjax.errors import UsageError

# Held out when the bundled model was trained; there from Python 3.11 to 3.13.
HELDOUT_MODULES = (
    "statistics.py", "json/decoder.py", "json/encoder.py", "email/message.py", "email/header.py",
    "asyncio/locks.py", "asyncio/queues.py",
)  # fmt: skip


class Document(NamedTuple):
    """One text, scored on its own: no window crosses from one to the next."""

    name: str
    text: str


def read_documents(paths: Sequence[str], max_bytes: int | None = None) -> list[Document]:
    """UTF-8 files (``-``: standard input), at most ``max_bytes`` of all together, cut at a character.

    UsageError, with the file's name, for what is missing, no text or empty.
    """
    documents, left = [], max_bytes
    for path in paths:
        if left is not None and left <= 0:
            break
        try:
            data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read the text {path}: {error.strerror}; give a UTF-8 file") from error
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
        if not text.strip():
            raise UsageError(f"{path} holds no text to score")
        if left is not None:
            # The file as a whole is valid, so only a character cut in two at the end is dropped.
            text = data[:left].decode(errors="ignore")
            left -= len(data)
        documents.append(Document(path, text))
    if not documents:
        raise UsageError("no text is left to score; give a file, and --max-bytes of at least 1")
    return documents


def heldout_documents(max_bytes: int | None = None) -> list[Document]:
    """The held-out modules of this Python's standard library, those that are there.

    UsageError where none is, as in installations without sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    found = [name for name in HELDOUT_MODULES if (folder / name).is_file()]
    if not found:
        raise UsageError(
            f"Python {platform.python_version()} comes without the sources of its standard library; give --text FILE"
        )
    documents = read_documents([str(folder / name) for name in found], max_bytes)
    # By name alone: results should not tell where Python is installed.
    return [Document(name, d.text) for name, d in zip(found, documents, strict=False)]
