"""Compiles the RMSNorm kernels for CPUs when the package is installed, if there is a compiler.

The kernels are a plain library without headers of torch or Python, so one wheel serves every
version of both. An installation without a compiler succeeds: folded norms then compute torch's
LayerNorm.
"""

from __future__ import annotations

import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FLAGS = ["-std=c++17", "-O2", "-g0", "-w", "-fvisibility=hidden"]
FLAGS += ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]

KERNELS = Extension(
    "enjoyln_cli.kernels.librms_norm",
    ["enjoyln_cli/kernels/rms_norm.cpp"],
    language="c++",
    extra_compile_args=FLAGS if sys.platform != "win32" else ["/std:c++17"],
    optional=True,
)


class PlainLibrary(build_ext):
    """Builds a library for ctypes: its name has no version of Python, and it exports no module."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


class OfAnyPython(bdist_wheel):
    """A wheel of this platform, for every version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(ext_modules=[KERNELS], cmdclass={"build_ext": PlainLibrary, "bdist_wheel": OfAnyPython})
