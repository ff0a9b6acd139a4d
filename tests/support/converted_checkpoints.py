"""The checkpoints of the tests, converted and as they are: calls, and what their results are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from live_models import CHECKPOINTS, computes_rms
from rounding import as_exact, in_float64

from enjoyln_cli import refold


def original(name: str, cls: Any = None, **kwargs: Any) -> Any:
    config = transformers.AutoConfig.from_pretrained(CHECKPOINTS / name)
    cls = cls or getattr(transformers, config.architectures[0])
    return cls.from_pretrained(CHECKPOINTS / name, **kwargs).eval()


def inputs(name: str) -> dict[str, torch.Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    return {"input_ids": torch.randint(3, 500, (2, 9))}


def run(model: Any, given: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        output = model(**given)
    return output.logits if "logits" in output else output.last_hidden_state


def same(model: Any, other: Any, given: dict[str, Any], stored: Any = None) -> bool:
    """Whether both compute the same, up to a few times what rounding costs ``other``."""
    exact = run(in_float64(other), in_float64(given))
    return as_exact(run(model, given), run(other, given), exact, stored)


def shift_writers(model: Any) -> None:
    """Change every weight a little, as training would."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * parameter.std() * (torch.randn_like(parameter) + 1)


def falls_back_until_refolded(model: Any, stock: Any, given: Any, words: str) -> None:
    """Norms compute LayerNorm, with a warning that matches ``words``, and then RMSNorm again."""
    with pytest.warns(UserWarning, match=words):
        assert same(model, stock, given)
    assert not computes_rms(model, **given)
    assert computes_rms(refold(model), **given) and same(model, stock, given)
