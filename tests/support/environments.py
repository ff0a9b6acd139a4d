"""New virtual environments that have some other versions of packages."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def environment_beside(folder: Path) -> Path:
    """Make an environment that sees this environment's packages, and return its interpreter."""
    venv.create(folder)
    paths = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", "venv", paths))
    present = [path for path in sys.path if path.endswith("site-packages")]
    (own / "present.pth").write_text("\n".join(present))
    return folder / "bin" / "python"


def install(python: Path, *packages: str) -> None:
    """Install packages as a user would; raises ``CalledProcessError`` if that fails."""
    subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
