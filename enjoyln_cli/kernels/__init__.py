"""What computes the norms of a folded model, on which device; see ``norms``."""

from enjoyln_cli.kernels.gpu import Norms, prepare
from enjoyln_cli.kernels.norms import rms_norm

__all__ = ["Norms", "prepare", "rms_norm"]
