"""Builds the CPU kernels where a C++ compiler is; without one the package installs and computes with XLA alone."""

from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("pallas_kernels/native")


def ffi_headers() -> list[str]:
    """XLA's headers, of the jaxlib that ``[build-system]`` pins: a newer jaxlib loads what is built on older ones."""
    spec = find_spec("jaxlib")
    return [str(Path(spec.submodule_search_locations[0]) / "include")] if spec else []


class PlainLibrary(build_ext):
    """A shared library that ctypes loads: no Python in it, so no Python version in its name."""

    def get_ext_filename(self, name):
        """Path of the library, from the extension's dotted name."""
        return str(Path(*name.split("."))) + ".so"

    def get_export_symbols(self, ext):
        """No module function to export."""
        return []


class AnyPython(bdist_wheel):
    """One wheel a platform, for every Python."""

    def get_tag(self):
        """Platform alone."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "pallas_kernels.native.libpwjax",
            sorted(str(path) for path in NATIVE.glob("*.cc")),
            depends=sorted(str(path) for path in NATIVE.glob("*.h")),
            include_dirs=ffi_headers(),
            # No contraction: vectors and their scalar remainders round alike, and fused products are asked for by name.
            # Nobody looks at exception flags, and only without them do loops with comparisons become vectors.
            extra_compile_args="-std=c++17 -O3 -g0 -ffp-contract=off -fno-trapping-math -w -pthread".split(),
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": PlainLibrary, "bdist_wheel": AnyPython},
)
