"""A live module with weights on which nothing passes by luck, folded and compared with itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.models.outputs import tensors_in
from enjoyln_cli.runtime.install import fold_in_memory

D, VOCAB = 8, 11


@dataclass(frozen=True)
class Outcome:
    """What became of a model: its norms by name, and how far its outputs moved."""

    folded: frozenset[str] = frozenset()
    reasons: tuple[str, ...] = ()
    """Why the others stay, or why the model was refused."""
    error: float = 0.0
    refused: bool = False

    @property
    def said(self) -> str:
        return "; ".join(self.reasons)


class Computing(nn.Module):
    """A model of the given parts that computes a function of itself and of its inputs."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """In float64 and eval mode; gains away from 1, biases away from 0, weights with a mean."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.copy_(0.7 * noise + 0.4)
    return model


def ids(rows: int = 2, tokens: int = 5, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def floats(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def fold_in_place(model: nn.Module, *given: Any, others: Any = None) -> Outcome:
    """Fold what is proven for calls with ``given``, and compare calls with ``others``.

    What the calls return is compared, and what ``model.seen()`` tells after them if there is such.
    """
    calls = [(ids(2, 5, 7),), (ids(3, 5, 8),)] if others is None else others
    before = _results(model, calls)
    _forget(model)
    try:
        plan = analyze_module(model, *given).plan
    except EnjoyLNError as error:
        assert _distance(before, _results(model, calls)) == 0, "the analysis changed the model"
        return Outcome(reasons=(str(error),), refused=True)
    assert _distance(before, _results(model, calls)) == 0, "the analysis changed the model"
    plan = replace(plan, covered=None, unproven=())  # the calls are to test the proof itself
    fold_in_memory(model, plan)
    reasons = tuple(f"{v.norm}: {v.reason} {v.culprit}" for v in plan.kept)
    error = _distance(before, _results(model, calls))
    return Outcome(frozenset(v.norm for v in plan.folded), reasons, error)


def error(folded: nn.Module, model: nn.Module, *given: Any, **named: Any) -> float:
    """The largest distance of any output of a call from the model's, relative to its norm."""
    with torch.no_grad():
        return _distance(_opened(model(*given, **named)), _opened(folded(*given, **named)))


def _results(model: nn.Module, calls: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _forget(model)
    with torch.no_grad():
        for call in calls:
            found += [t.clone() for t in _opened(model(*call))]
            if hasattr(model, "seen"):
                found += [t.clone() for t in _opened(model.seen())]
    return found


def _forget(model: Any) -> None:
    if hasattr(model, "forget"):
        model.forget()


def _opened(value: Any) -> list[torch.Tensor]:
    slots = [getattr(value, name) for name in getattr(type(value), "__slots__", ())]
    return tensors_in(slots or value)


def _distance(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    assert len(before) == len(after) > 0
    gaps = [
        float((a - b).norm() / b.norm().clamp_min(1e-300))
        for a, b in zip(after, before, strict=True)
    ]
    return max(gaps)
