"""Lets tests import what they share in this folder by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
