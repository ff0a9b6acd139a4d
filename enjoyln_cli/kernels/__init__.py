"""Fast kernels for the norms of a folded model; see ``norms`` for what computes which norm."""

from enjoyln_cli.kernels.gpu import Norms, prepare, why_not_measured
from enjoyln_cli.kernels.norms import (
    layer_norm_will_do,
    literally,
    rms_norm,
    torch_fuses,
    trained_rms_norm,
)

__all__ = [
    "Norms",
    "layer_norm_will_do",
    "literally",
    "prepare",
    "rms_norm",
    "torch_fuses",
    "trained_rms_norm",
    "why_not_measured",
]
