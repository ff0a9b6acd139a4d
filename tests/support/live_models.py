"""Modules with weights on which nothing passes by luck."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from enjoyln_cli.plan.covered_calls import CoveredCalls
from enjoyln_cli.plan.plan import MeanSubtraction, NormFusion, Plan, Verdict
from enjoyln_cli.runtime.install import install as install_plan
from enjoyln_cli.runtime.modules import Folded
from enjoyln_cli.runtime.scope import FoldedModelState

ROOT = Path(__file__).parents[2]
CHECKPOINTS = ROOT / "tests" / "checkpoints"
FOLDED = ("gpt2", "opt", "bloom", "phi", "vit")
"""The checkpoints in which anything folds."""


def moved(model: nn.Module, seed: int | None = 0) -> Any:
    """In float64 and eval mode, with every parameter off its initial value.

    If ``seed`` is ``None``, torch's generator goes on from where it is.
    """
    if seed is not None:
        torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.double().eval().parameters():
            start = 1.0 if parameter.dim() == 1 else 0.1
            parameter.copy_(start + 0.3 * torch.randn_like(parameter))
    return model


def shaken(model: nn.Module, size: float = 0.1) -> Any:
    """In eval mode, with random numbers of about this ``size`` added to every parameter."""
    with torch.no_grad():
        for parameter in model.eval().parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return model


def install(
    model: Any,
    norms: Iterable[str],
    ops: Iterable[MeanSubtraction] = (),
    entry_inputs: Iterable[str] = (),
    unproven: Iterable[str] = (),
    fused: bool = False,
    covered: CoveredCalls | None = None,
) -> Any:
    """``runtime.install.install`` of a plan with these parts."""
    plan = Plan(
        model_type="",
        model_class="",
        classes=(),
        norms=tuple(Verdict(norm, "in_weights") for norm in norms),
        centred_weights=(),
        subtractions=tuple(ops),
        entry_inputs=tuple(entry_inputs),
        unproven=tuple(unproven),
        fused=(NormFusion("norm", "norm.weight"),) if fused else (),
        covered=covered,
    )
    return install_plan(model, plan)


def folded_norms(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Folded)]


def computed_rms(model: nn.Module, call: Callable[[], Any]) -> list[bool]:
    """For each call of a folded norm of the model in ``call``, whether it computed RMSNorm."""
    seen: list[bool] = []
    hooks = [
        norm.register_forward_hook(lambda n, *_: seen.append(not (n.training or n.shifted)))
        for norm in folded_norms(model)
    ]
    call()
    for hook in hooks:
        hook.remove()
    return seen


def computes_rms(model: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """Whether the folded norms computed RMSNorm in this call; asserts that all or none did."""
    with torch.no_grad():
        found = {*computed_rms(model, lambda: model(*args, **kwargs))}
    assert len(found) < 2
    return found == {True}


def literally() -> AbstractContextManager[Any]:
    """In the block, folded norms compute RMSNorm even where LayerNorm is as good.

    So an input with a mean shows.
    """
    return mock.patch.object(FoldedModelState, "literal", True)
