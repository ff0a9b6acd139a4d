"""Three ways to train, one training loop, and how two runs are compared, for ``paper_training.py``.

Random numbers come from torch's global generator, which each run seeds by itself. So two runs with
the same seed have the same initial weights, batches and dropout masks, whichever norms they use,
and can be compared step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from train_tiny import Batch

from enjoyln_cli import analyze
from enjoyln_cli.kernels import formula
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.train import reparametrize

LAYER_NORM, RMS_NORM, CBWC = "LayerNorm", "RMSNorm", "CBWC+RMSNorm"
"""The three that the paper compares: the two norms, and RMSNorm on weights ``V = P W``."""
CONVERTED = "folded, then RMSNorm"
"""Weights are centred once, before the training with RMSNorm."""


class PlainRMSNorm(nn.LayerNorm):
    """An ``nn.LayerNorm`` that does not subtract the mean; weight and bias stay."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return formula.rms_norm(input, self.weight, self.bias, self.eps)


def with_norms(
    model: nn.Module, variant: str, batch: Batch, plan: Any = None, **options: Any
) -> Any:
    """Change a LayerNorm ``model`` in place to one of the variants above. Returns its plan.

    ``batch`` is an example of its input; ``options`` are those of ``reparametrize``. ``plan`` is
    what this returned for another such model, so that it is made only once.
    """
    if variant == CBWC:
        return reparametrize(model, plan, example=batch.get("pixels"), **options)
    if variant == CONVERTED:
        plan = plan or analyze(model).plan
        centre_parameters(model, plan)
        for op in plan.ops:
            model.get_submodule(op.module).register_forward_hook(subtract_mean)
    if variant != LAYER_NORM:
        for module in model.modules():
            if type(module) is nn.LayerNorm:
                module.__class__ = PlainRMSNorm
    return plan


def subtract_mean(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """A forward hook."""
    return output - output.mean(-1, keepdim=True)


def parameters_by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by the names that they have without CBWC; ``W`` of ``V = P W``, not ``V``."""
    return {
        name.replace("parametrizations.", "").removesuffix(".original"): parameter.detach()
        for name, parameter in model.named_parameters()
    }


@torch.no_grad()
def load_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy all parameters, by the names of ``parameters_by_name``."""
    values = parameters_by_name(source)
    for name, parameter in parameters_by_name(target).items():
        parameter.copy_(values[name])


def move_state(
    source: nn.Module,
    optimizer: torch.optim.Optimizer,
    target: nn.Module,
    into: torch.optim.Optimizer,
) -> None:
    """Give ``into``, an optimizer of ``target``, the state that ``optimizer`` has for ``source``.

    CBWC may change the order of a model's parameters, so they are matched by name.
    """
    states = optimizer.state_dict()
    places = {name: place for place, name in enumerate(parameters_by_name(source))}
    order = [places[name] for name in parameters_by_name(target)]
    moved = {new: states["state"][old] for new, old in enumerate(order)}
    into.load_state_dict(into.state_dict() | {"state": moved})


def share_beyond(a: nn.Module, b: nn.Module, bound: float) -> float:
    """The share of all elements of the parameters that differ by more than ``bound``."""
    ours, theirs = parameters_by_name(a), parameters_by_name(b)
    beyond = sum(int(((ours[name] - theirs[name]).abs() > bound).sum()) for name in ours)
    return beyond / sum(parameter.numel() for parameter in ours.values())


def largest_difference(a: nn.Module, b: nn.Module) -> tuple[float, str]:
    """The largest absolute difference of two models' parameters, and which parameter has it."""
    ours, theirs = parameters_by_name(a), parameters_by_name(b)
    if ours.keys() != theirs.keys():
        raise ValueError(f"parameters of one model only: {sorted(ours.keys() ^ theirs.keys())}")
    return max((float((ours[name] - theirs[name]).abs().max()), name) for name in ours)


def outputs(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss in the dtype of the weights, and the logits.

    transformers computes losses in float32 at most, so the logits alone are taken from its models.
    """
    if "pixels" in batch:
        logits = model(batch["pixels"])
    else:
        logits = model(input_ids=batch["input_ids"]).logits
    if logits.dim() == 2:
        return F.cross_entropy(logits, batch["labels"]), logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:]), logits


# Training.


def constant(step: int, steps: int) -> float:
    return 1.0


def warm_up_and_cosine(step: int, steps: int) -> float:
    """A short warm-up, then half a period of a cosine."""
    return min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * step / steps))


@dataclass(frozen=True)
class Method:
    """How weights are updated."""

    name: str
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer]
    clip: float | None = None
    """Largest norm of all gradients together."""
    schedule: Callable[[int, int], float] = constant
    """From the number of the step and the number of steps to a factor of the learning rate."""


SGD = partial(torch.optim.SGD, lr=0.01)
ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01)
METHODS = (
    Method("SGD", SGD),
    Method("momentum", partial(SGD, momentum=0.9)),
    Method("AdamW", ADAMW),
    Method("Adam, L2 in the gradient", partial(torch.optim.Adam, lr=1e-3, weight_decay=0.01)),
    Method("momentum, clipping", partial(SGD, momentum=0.9), clip=0.5),
    Method("AdamW, schedule", ADAMW, schedule=warm_up_and_cosine),
)
TRANSFORMER = Method(
    "AdamW, clipping, schedule", partial(ADAMW, lr=2e-3), clip=1.0, schedule=warm_up_and_cosine
)


def reverse_rows(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The same batches with their rows in reverse: the same function, with sums rounded anew."""
    for batch in batches:
        yield {name: values.flip(0) for name, values in batch.items()}


def train(
    model: Any,
    batches: Iterator[Batch],
    steps: int,
    method: Method,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    begin: int = 0,
    of: int | None = None,
) -> list[float]:
    """Train in place for ``steps`` steps. Returns the loss of each.

    ``begin`` and ``of`` are the number of the first step and of all steps, if this is a part of a
    longer run; such a run passes its ``optimizer``.
    """
    optimizer = optimizer or method.optimizer(model.parameters())
    rates = [group["lr"] for group in optimizer.param_groups]
    losses = []
    model.train()
    for step in range(begin, begin + steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * method.schedule(step, of or steps)
        optimizer.zero_grad()
        loss = outputs(model, next(batches))[0]
        loss.backward()
        if method.clip:
            nn.utils.clip_grad_norm_(model.parameters(), method.clip)
        optimizer.step()
        losses.append(loss.item())
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return losses


@torch.no_grad()
def score(model: Any, batches: Iterable[Batch]) -> dict[str, float]:
    """Mean loss, and the share of rows whose class is right, over all rows, in eval mode."""
    was_training = model.training
    model.eval()
    loss = right = rows = 0.0
    for batch in batches:
        mean, logits = outputs(model, batch)
        count = len(batch["labels"])
        loss, rows = loss + count * mean.item(), rows + count
        if logits.dim() == 2:
            right += float((logits.argmax(-1) == batch["labels"]).sum())
    model.train(was_training)
    return {"loss": loss / rows} | ({"accuracy": right / rows} if logits.dim() == 2 else {})
