"""Brings compiled kernels along in a wheel that is built where a compiler is; see ``build.py``.

Neither torch nor anything else is needed for that, and nothing here can make an installation fail:
without the libraries the kernels are compiled on first use. ``ENJOYLN_PREBUILT=1`` asks for the
library of the CPU kernels, which makes the wheel one of this platform; otherwise it stays pure
Python.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path(__file__).parent / "enjoyln_cli" / "kernels"
WANTED = os.environ.get("ENJOYLN_PREBUILT", "") not in ("", "0")


def builder() -> Any:
    """``build.py`` by itself: importing the package would import torch."""
    spec = importlib.util.spec_from_file_location("enjoyln_build", KERNELS / "build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class WithLibraries(build_py):
    def run(self) -> None:
        super().run()
        if not WANTED:
            return
        folder = Path(self.build_lib) / "enjoyln_cli" / "kernels" / "lib"
        try:
            build = builder()
            folder.mkdir(parents=True, exist_ok=True)
            target = build.cpu()
            build.compile_to(target, build.compiler(), folder / target.name)
        except Exception as error:  # an installation must not fail for want of a kernel
            print(f"enjoyln: no compiled kernels in this wheel: {error}")


class OfThisPlatform(bdist_wheel):
    """The libraries are of one platform, but of no Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return ("py3", "none", platform)


class WithMore(Distribution):
    def has_ext_modules(self) -> bool:
        return WANTED


setup(distclass=WithMore, cmdclass={"build_py": WithLibraries, "bdist_wheel": OfThisPlatform})
