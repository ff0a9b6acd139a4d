"""What can be timed. Nothing is imported here, so that ``enjoyln --help`` stays instant."""

MODES = ("eager", "fused", "compile", "cudagraphs")
GRID_ROWS = (1, 8)
GRID_LENGTHS = (128, 512, 1024)
"""Tokens of each row."""
