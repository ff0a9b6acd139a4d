"""Modules with weights on which nothing passes by luck."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).parents[2]
CHECKPOINTS = ROOT / "tests" / "checkpoints"
FOLDED = ("gpt2", "opt", "bloom", "phi", "vit")
"""The checkpoints in which anything folds."""


def moved(model: nn.Module) -> nn.Module:
    """In float64 and eval mode, with every parameter off its initial value."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.double().eval().parameters():
            start = 1.0 if parameter.dim() == 1 else 0.1
            parameter.copy_(start + 0.3 * torch.randn_like(parameter))
    return model
