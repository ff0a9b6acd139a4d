"""Does an adapter on a centred layer see the mean that its weight has lost?

What an adapter adds (LoRA) is added to a centred weight as well as to the original one: both
outputs differ by the same number in every feature, which a LayerNorm does not see. One that
multiplies (DoRA, IA3, orthogonal ones) and was trained on the original makes something else of that
number, with LayerNorm too, and in the stock class. It is tried on a copy of the layer: to the
weight inside is added what centring takes away, and the output may change by one number for each
row alone.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from enjoyln_cli.errors import UnsupportedModel

TOLERANCE = 1e-3
"""Of the largest change, how far apart those of one row may be: rounding in any dtype."""


def quantisation_of(tensor: Any) -> str:
    """As what a weight is quantised (``int8``, the class of a tensor), or empty if it is not.

    bitsandbytes stores other numbers; torchao a tensor of a class of its own, from whose module
    this is told, since other libraries have such classes too (FakeTensor, DTensor).
    """
    if type(tensor).__module__.startswith("torchao."):
        return type(tensor).__name__
    dtype = getattr(tensor, "dtype", torch.float32)
    known = dtype.is_floating_point and dtype.itemsize > 1
    return "" if known else str(dtype).removeprefix("torch.")


def about_quantised(path: str, kind: str) -> str:
    """What to say of a centred layer that is quantised."""
    return (
        f"{path}: is quantised ({kind}), which gives what it writes a mean again; load the model "
        "without quantisation for RMSNorm, or with transformers alone to go on with LayerNorm"
    )


def about_replaced(path: str, module: nn.Module, kind: type) -> str:
    """What to say of ``module``, which took the place of a ``kind``."""
    cls = type(module)
    found = next((what for p in module.parameters() if (what := quantisation_of(p))), "")
    if found:
        return about_quantised(path, found)
    if any(type(inner) is kind for inner in module.modules()):
        return (
            f"{path}: has an adapter ({cls.__module__}.{cls.__name__}), and what that adds has a "
            "mean; merge it (merge_and_unload) and call enjoyln_cli.refold, or go on with LayerNorm"
        )
    return (
        f"{path}: is a {cls.__name__} now and was a {kind.__name__}, so what it "
        "writes may have a mean; convert the model as it is now, or go on with LayerNorm"
    )


def require_addition(path: str, layer: nn.Module, kind: type, dim: int) -> None:
    """Raises ``UnsupportedModel`` if ``layer``, which took the place of a ``kind``, multiplies.

    ``dim`` of the weight inside are its outputs. Nothing is said of layers that hold no ``kind``.
    """
    if type(layer) is kind or not any(type(m) is kind for m in layer.modules()):
        return
    changed = copy.deepcopy(layer)
    inner: Any = next(m for m in changed.modules() if type(m) is kind)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        weight = inner.weight
        row = torch.randn(weight.shape[1 - dim], generator=generator).to(weight)
        x = torch.randn(3, weight.shape[1 - dim], generator=generator).to(weight)
        before = layer(x)
        weight += row.unsqueeze(dim) * weight.abs().mean()
        change = (changed(x) - before).double()
    size = change.abs().max()
    if (change - change.mean(-1, keepdim=True)).abs().max() > TOLERANCE * size:
        raise UnsupportedModel(
            f"{path}: its adapter ({type(layer).__name__}) multiplies the output of a layer whose "
            "weights were centred. If it was trained on the original model, its results are wrong "
            "here, in the plain transformers class too: merge it into the original, and convert "
            "that. If it was trained on this model, merge it here"
        )
