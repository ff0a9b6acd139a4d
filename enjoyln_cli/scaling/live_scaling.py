"""Hold the streams of a live model at another power of two.

    writers <- 2^-k writers     eps <- 4^-k eps     readers <- 2^k readers

Every number is multiplied by a power of two, which rounds nothing unless the result is too small or
too large for its dtype.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import nn

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.load import values_of
from enjoyln_cli.scaling.scaled_streams import ScaledStream


def scale_stream(model: nn.Module, stream: ScaledStream, shift: int) -> None:
    """Hold ``stream`` at ``2^-shift`` of its scale, in place.

    Raises ``UnsupportedModel`` if a norm has no attribute with its eps, or if a weight would be
    rounded; nothing is changed then.
    """
    tensors = values_of(model)
    factors = {name: _power(e, shift) for name, e in stream.parameters.items()}
    for name, factor in factors.items():
        require_exact(name, tensors[name], factor)
    attributes = {
        norm: eps_attribute(model.get_submodule(norm), norm, eps)
        for norm, (_, eps) in stream.norms.items()
    }
    with torch.no_grad():
        for name, factor in factors.items():
            tensors[name].mul_(factor)
        for name, (exponent, number) in stream.shifted.items():
            wide = _power(exponent, shift) * (number + tensors[name].double()) - number
            tensors[name].copy_(wide)
    for norm, (exponent, eps) in stream.norms.items():
        setattr(model.get_submodule(norm), attributes[norm], eps * _power(exponent, shift))


def eps_attribute(module: nn.Module, path: str, eps: float) -> str:
    """The name of the attribute that holds the ``eps`` of a norm.

    Raises ``UnsupportedModel`` unless there is exactly one.
    """
    names = [name for name, value in vars(module).items() if type(value) is float and value == eps]
    if len(names) != 1:
        raise UnsupportedModel(f"{path} has no attribute of its own for its eps of {eps:g}")
    return names[0]


def require_exact(name: str, weight: torch.Tensor, factor: float) -> None:
    """Raise ``UnsupportedModel`` if ``weight * factor`` is not exact in the dtype of ``weight``.

    Elements so small that they are lost count if they are above a rounding of the largest element.
    """
    scaled = weight.detach().double() * factor
    lost = (scaled.to(weight.dtype).double() - scaled).abs().max()
    largest = scaled.abs().max()
    if not bool(lost <= torch.finfo(weight.dtype).eps / 4 * largest):
        raise UnsupportedModel(
            f"{name} would be rounded at {factor:g} of its scale; convert to float32 first"
        )


def _power(exponent: Fraction, shift: int) -> float:
    """``2^(exponent * shift)``, exactly."""
    power = exponent * shift
    if power.denominator != 1:
        raise UnsupportedModel(f"a weight would be scaled by 2^({power}), no power of two")
    return float(2.0 ** int(power))
