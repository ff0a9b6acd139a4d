"""Fast kernels for the norms of a folded model; see ``ops`` for what they compute."""

from enjoyln_cli.kernels import native
from enjoyln_cli.kernels.choices import Norms
from enjoyln_cli.kernels.gpu import prepare, why_not_tuned
from enjoyln_cli.kernels.ops import (
    add_layer_norm,
    add_layer_norm_,
    add_layer_norm_over,
    add_rms_norm,
    add_rms_norm_,
    add_rms_norm_over,
    is_layer_norm,
    layer_norm,
    layer_norm_will_do,
    literally,
    rms_norm,
    sum_layer_norm,
    sum_layer_norm_over,
    sum_rms_norm,
    sum_rms_norm_over,
    torch_fuses,
    trained_rms_norm,
)

__all__ = [
    "Norms",
    "add_layer_norm",
    "add_layer_norm_",
    "add_layer_norm_over",
    "add_rms_norm",
    "add_rms_norm_",
    "add_rms_norm_over",
    "is_layer_norm",
    "layer_norm",
    "layer_norm_will_do",
    "literally",
    "native",
    "prepare",
    "rms_norm",
    "sum_layer_norm",
    "sum_layer_norm_over",
    "sum_rms_norm",
    "sum_rms_norm_over",
    "torch_fuses",
    "trained_rms_norm",
    "why_not_tuned",
]
