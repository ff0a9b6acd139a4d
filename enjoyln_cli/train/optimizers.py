"""Does an optimizer let the mean of a weight change what is learned?

The mean over the outputs of a centred weight is free: the loss does not depend on it. What is
learned stays the same if a step is ``W <- c W - f(gradients)`` with a number ``c`` and any ``f``,
because ``P`` commutes with it. An optimizer that puts the weight itself through something else
(Adam's division, a norm of the weight) sees its mean.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

COUPLED = ("Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop")
"""Optimizers of torch that add weight decay to the gradient, and then divide by its size."""
RELATIVE = ("adafactor", "lamb", "lars", "prodigy", "dadapt")
"""Parts of the names of optimizers whose step depends on the size of weights."""


def why_mean_matters(optimizer: Any, centred: Iterable[torch.Tensor]) -> str:
    """Why the mean of ``centred`` weights changes what ``optimizer`` learns; empty if it does not.

    Knows the optimizers of torch, and others by their names.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    name = type(optimizer).__name__
    if any(fragment in name.lower() for fragment in RELATIVE):
        return f"the steps of {name} depend on the size of weights"
    kinds = tuple(getattr(torch.optim, kind) for kind in COUPLED)
    ids = {id(tensor) for tensor in centred}
    for group in optimizer.param_groups if isinstance(optimizer, kinds) else ():
        mixes = group.get("weight_decay", 0) and not group.get("decoupled_weight_decay", False)
        if mixes and any(id(parameter) in ids for parameter in group["params"]):
            return f"{name} adds its weight decay to the gradient"
    return ""


def warn_of_dependence(optimizer: Any, centred: Iterable[torch.Tensor]) -> None:
    """Warn if centring weights changes what ``optimizer`` learns."""
    if reason := why_mean_matters(optimizer, centred):
        warnings.warn(
            f"{reason}, so training with centred weights is not the same as training without: "
            "decouple the weight decay (AdamW), or accept a slightly different run",
            stacklevel=3,
        )
