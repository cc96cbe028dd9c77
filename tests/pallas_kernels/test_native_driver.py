"""The C++ kernels under AddressSanitizer and UBSan, in a program of their own without Python and XLA."""

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "pallas_kernels" / "native"
COMPILER = shutil.which("g++") or shutil.which("clang++")
# Driver: sources that it runs, and what it prints at the end.
DRIVERS = {
    "native_driver": (("portable", "avx2", "avx512", "avx512_bf16"), "portable checked"),
    "kmeans_driver": (("kmeans",), "kmeans checked"),
}


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("driver", DRIVERS)
def test_no_stray_access_and_no_undefined_behaviour(driver, tmp_path):
    # Without vectorization a loop that runs too far does so an element at a time.
    sources, last = DRIVERS[driver]
    command = [
        COMPILER, "-std=c++17", "-O1", "-g1", "-w", "-pthread", "-ffp-contract=off",
        "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{NATIVE}",
        str(Path(__file__).with_name(f"{driver}.cc")), *(str(NATIVE / f"{name}.cc") for name in sources),
        "-o", str(tmp_path / "driver"),
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr[-3000:]
    done = subprocess.run([str(tmp_path / "driver")], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and last in done.stdout, (done.stdout + done.stderr)[-3000:]
