"""What stands in the place of a linear layer: a LoRA adapter, a quantised layer, or anything else?

A LoRA adapter adds ``B A x`` times a number. So if each column of ``B`` has zero mean, the
adapter's output has zero mean, and the layer counts as without the adapter. ``added_weights``
recognises an adapter by its class. With anything else in place of a layer, norms compute LayerNorm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from enjoyln_cli.text import dtype_name


def added_weights(layer: nn.Module, kind: type | None = None) -> tuple[str, ...] | None:
    """The parameters ``B`` (and biases) of a LoRA adapter around a linear layer, relative to it.

    Their first dimension is the outputs'. ``None`` if ``layer`` is no such adapter: if its class is
    another, it uses a variant that does more than add (DoRA), hooks or another ``forward`` could
    change a result, or the layer inside is not of class ``kind``.
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
        is_lora = added_weights(module) is not None
        how = "call enjoyln_cli.refold, which centres it"
        how = how if is_lora else "merge it (merge_and_unload) and call enjoyln_cli.refold"
        return (
            f"{path}: has an adapter ({cls.__module__}.{cls.__name__}) whose output may have a "
            f"mean; {how}, or keep LayerNorm"
        )
    if kind.__module__.startswith("peft."):
        return f"{path}: has no adapter any more; call enjoyln_cli.refold, or keep LayerNorm"
    was, now = kind.__name__, cls.__name__
    if was == now:
        was, now = f"{kind.__module__}.{was}", f"{cls.__module__}.{now}"
    return (
        f"{path}: was a {was} and is now a {now}, so its output may have a "
        "mean; convert the model as it is now, or keep LayerNorm"
    )
