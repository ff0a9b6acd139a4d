"""Whether the code that torch's Inductor writes compiles here."""

from __future__ import annotations

import os

WORKS = os.environ.get("ATEN_CPU_CAPABILITY") != "default"
"""With this setting, Inductor of torch 2.13 uses vectors (``at::vec``) that it does not declare."""
