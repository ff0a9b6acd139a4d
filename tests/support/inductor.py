"""Whether the code that torch's Inductor writes compiles here, and where it is kept."""

from __future__ import annotations

import os
import tempfile

import torch

WORKS = os.environ.get("ATEN_CPU_CAPABILITY") != "default"
"""With this setting, Inductor of torch 2.13 uses vectors (``at::vec``) that it does not declare."""


def keep_apart() -> None:
    """Keep compiled files in a folder for this CPU's instructions and this number of threads.

    The names of compiled files do not tell them apart, so wrong files would be loaded.
    """
    kind = f"{torch.backends.cpu.get_cpu_capability()}-{torch.get_num_threads()}".replace(" ", "_")
    folder = f"{tempfile.gettempdir()}/enjoyln-tests-inductor-{kind}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
