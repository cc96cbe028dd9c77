"""A slice of the soak: the script itself, on the bundled model, for half a minute."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_slice_of_the_soak_passes_every_check(tmp_path):
    out = tmp_path / "soak.json"
    options = ["--minutes", "0.5", "--context", "256", "--longest", "200", "--out", str(out)]
    command = [sys.executable, "-m", "experiments.soak.run", *options]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert all(result["checks"].values()) and result["finished"] > 0
