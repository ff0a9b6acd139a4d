"""Does an adapter (LoRA, DoRA, IA3) on a centred linear layer still compute the same function?

Centring the weight subtracts one number from all output features of a token, and the next norm
ignores it. An adapter that adds to the output (LoRA) does not change this. An adapter that
multiplies the output (DoRA, IA3, orthogonal ones) turns that number into different ones, which
LayerNorm does not remove. If such an adapter was trained on the original model, its results on the
converted model are wrong, in the stock class too.

A LoRA adapter adds ``B A x`` times a number. So its output has zero mean if each column of ``B``
has, and then the layer is as good as without the adapter. ``added_weights`` recognises such an
adapter by its class.

For any other, the check is numerical, on a copy of the layer. It adds to the weight what centring
would remove, one random row for all outputs. Each row of the output may change by one number only.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.text import dtype_name

TOLERANCE = 1e-3
"""Allowed spread of the changes within one row, relative to the largest change (for rounding)."""


def added_weights(layer: nn.Module, kind: type | None = None) -> tuple[str, ...] | None:
    """The parameters ``B`` (and biases) of a LoRA adapter around a linear layer, relative to it.

    Their first dimension is that of the outputs. ``None`` if ``layer`` is no such adapter: if its
    class is another, it uses a variant that does more than add (DoRA), hooks or another ``forward``
    could change a result, or the layer inside is not of class ``kind``.
    """
    cls = type(layer)
    if (cls.__module__, cls.__name__) != ("peft.tuners.lora.layer", "Linear"):
        return None
    lora: Any = layer
    variants = [*getattr(lora, "lora_variant", ()), *lora.lora_magnitude_vector]
    modules = [layer, *lora.lora_B.children()]
    edited = any("forward" in vars(module) or module._forward_hooks for module in modules)
    plain = all(type(module) is nn.Linear for module in modules[1:])
    if variants or edited or not plain or kind not in (None, type(lora.base_layer)):
        return None
    return tuple(f"lora_B.{name}" for name, _ in lora.lora_B.named_parameters())


def quantisation_of(tensor: Any) -> str:
    """The quantised dtype or tensor class of a weight (for example ``int8``); empty if unquantised.

    bitsandbytes stores another dtype. torchao has tensor classes of its own. They are recognised
    by their module, since unquantised tensors may have a subclass too (FakeTensor, DTensor).
    """
    if type(tensor).__module__.startswith("torchao."):
        return type(tensor).__name__
    dtype = getattr(tensor, "dtype", torch.float32)
    unquantised = dtype.is_floating_point and dtype.itemsize > 1
    return "" if unquantised else dtype_name(dtype)


def quantised_message(path: str, kind: str) -> str:
    """The message for a centred layer that is quantised."""
    return (
        f"{path}: is quantised ({kind}), so its output no longer has zero mean; load the model "
        "without quantisation for RMSNorm, or load it with transformers alone and keep LayerNorm"
    )


def replaced_message(path: str, module: nn.Module, kind: type) -> str:
    """The message for ``module``, which has replaced a layer of class ``kind``."""
    cls = type(module)
    quantised = next((what for p in module.parameters() if (what := quantisation_of(p))), "")
    if quantised:
        return quantised_message(path, quantised)
    if any(type(inner) is kind for inner in module.modules()):
        how = "call enjoyln_cli.refold, which centres it"
        if added_weights(module) is None:
            how = "merge it (merge_and_unload) and call enjoyln_cli.refold"
        return (
            f"{path}: has an adapter ({cls.__module__}.{cls.__name__}) whose output may have a "
            f"mean; {how}, or keep LayerNorm"
        )
    was, now = kind.__name__, cls.__name__
    if was == now:
        was, now = f"{kind.__module__}.{was}", f"{cls.__module__}.{now}"
    return (
        f"{path}: was a {was} and is now a {now}, so its output may have a "
        "mean; convert the model as it is now, or keep LayerNorm"
    )


def require_additive_adapter(path: str, layer: nn.Module, kind: type, dim: int) -> None:
    """Raises ``UnsupportedModel`` if the adapter ``layer`` around a ``kind`` does not only add.

    ``dim`` is the output dimension of the weight inside. Layers that contain no ``kind`` are not
    checked.
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
            "weights were centred. If the adapter was trained on the original model, its results "
            "are wrong here, and in the stock transformers class too: merge it into the original "
            "model and convert the result. If it was trained on this model, merge it here"
        )
