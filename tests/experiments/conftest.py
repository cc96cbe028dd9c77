"""Experiments are no part of the wheel: they are imported from the clone, behind whatever is installed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
