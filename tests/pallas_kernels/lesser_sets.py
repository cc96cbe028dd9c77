"""Tests of a file again, on an instruction set that this processor would not choose."""

import os
import subprocess
import sys

import pytest

from pallas_kernels import native


def run_again(file: str, chosen: str, instructions: str) -> None:
    """Run the tests ``chosen`` (as of ``-k``) of ``file`` in a process whose kernels use ``instructions``."""
    if instructions == native.instruction_set():
        pytest.skip("that is what the other tests run on")
    if os.environ.get("PWJAX_NATIVE_ISA"):
        pytest.skip("this is such a run")
    # -P: the folder that tests start in may hold the sources, without the library that an installed package has.
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-rs", file, "-k", chosen]
    env = {**os.environ, "PWJAX_NATIVE_ISA": instructions}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    if instructions != "portable" and "names an instruction set" in done.stdout:
        pytest.skip(f"this processor has no {instructions}")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout, done.stdout[-3000:]
