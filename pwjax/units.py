"""Byte counts as people write them: ``10GiB``, ``1.5 GB``, ``512MiB``, ``4096``."""

import re
from fractions import Fraction

from pwjax.errors import UsageError

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}
_FORM = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)", re.IGNORECASE)


def parse_bytes(value: str | int) -> int:
    """Bytes of ``"10GiB"`` (1024s), ``"10GB"`` (1000s), or a plain number; UsageError for anything else or for 0."""
    if isinstance(value, int) and not isinstance(value, bool):
        count = Fraction(value)
    else:
        match = _FORM.fullmatch(str(value).strip())
        unit = match[2].lower() if match else None
        if match and unit in ("k", "m", "g", "t"):
            number, letter = match[1], unit.upper()
            raise UsageError(f"{value!r} could mean two sizes; write {number}{letter}iB or {number}{letter}B")
        if match is None or unit not in _UNITS:
            allowed = "a number of bytes, or one with KiB, MiB, GiB, TiB, KB, MB, GB or TB"
            raise UsageError(f"{value!r} is not a size; write {allowed}")
        count = Fraction(match[1]) * _UNITS[unit]
    if count < 1:
        raise UsageError(f"a size must be at least 1 byte, got {value!r}")
    return int(count)


def format_bytes(count: int | float) -> str:
    """``count`` bytes for people, in binary units: ``"9.31 GiB"``, ``"768 B"``."""
    size, sign = abs(count), "-" if count < 0 else ""
    if size < 1024:
        return f"{sign}{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        # 1023.996 MiB would print as 1024.00 MiB.
        if size < 1023.995 or unit == "TiB":
            break
    return f"{sign}{size:.2f} {unit}"
