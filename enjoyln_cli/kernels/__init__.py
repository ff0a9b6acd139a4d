"""Fast kernels for the norms of a folded model; see ``norms`` for what computes which norm."""

from enjoyln_cli.kernels.gpu import Norms, prepare
from enjoyln_cli.kernels.norms import rms_norm

__all__ = ["Norms", "prepare", "rms_norm"]
