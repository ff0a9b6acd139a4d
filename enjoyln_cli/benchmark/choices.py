"""The choices of ``bench``. This module imports nothing, so ``enjoyln --help`` stays instant."""

MODES = ("eager", "compile")
GRID_ROWS = (1, 8)
GRID_LENGTHS = (128, 512, 1024)
"""Tokens of each row."""
SECONDS = 120.0
"""Default time for a run."""
