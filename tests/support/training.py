"""Train two copies of a model, as LayerNorm and with centred weights, and compare them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.train import merge, reparametrize

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3, eps=1e-6, weight_decay=0.1),
    "Adam with coupled L2": lambda p: torch.optim.Adam(p, 1e-3, eps=1e-6, weight_decay=0.1),
}
"""Adam divides a gradient that is all rounding (as of a bias of keys) by ``eps``."""


def language_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """In the dtype of the model; its own loss is rounded to float32."""
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def square_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sub(x.sin().sum()).square().mean()


def train(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    clip: float | None = None,
    seed: int = 0,
) -> list[float]:
    """The losses of one step for each batch, in training mode."""
    torch.manual_seed(seed)
    model.train()
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(value.item())
    return losses


def differences(
    model: nn.Module,
    loss: Loss,
    batches: list[torch.Tensor],
    optimizer: str,
    clip: float | None = None,
    **how: Any,
) -> tuple[float, float, Plan]:
    """How far apart losses and final weights are, relative to the largest loss and weight.

    The weights of the LayerNorm model are centred before they are compared.
    """
    plain, centred = copy.deepcopy(model), copy.deepcopy(model)
    plan = reparametrize(centred, **how)
    one, other = (
        torch.tensor(
            train(m, loss, batches, OPTIMIZERS[optimizer](m.parameters()), clip),
            dtype=torch.float64,
        )
        for m in (plain, centred)
    )
    assert float((one - one.mean()).abs().max()) > 1e-3, "the training changes nothing"
    merge(centred)
    centre_parameters(plain, plan)
    pairs = zip(plain.parameters(), centred.parameters(), strict=True)
    with torch.no_grad():
        apart = max(float((a - b).abs().max()) for a, b in pairs)
        largest = max(float(a.abs().max()) for a in plain.parameters())
    return float((one - other).abs().max() / one.abs().max()), apart / largest, plan
