"""Any exception from a live module's code, or from torch while it is traced, becomes a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from folding_live import VOCAB, D, ids
from torch import nn

from enjoyln_cli import EnjoyLNError, analyze


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(VOCAB, D), nn.LayerNorm(D)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.norm(self.emb(tokens))


class Lazily(Plain):
    def forward(self, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        yield self.norm(self.emb(tokens))


class Later(Plain):
    def forward(self, tokens: torch.Tensor) -> Any:
        y = self.norm(self.emb(tokens))
        return {"y": y, "mean": [lambda: self.emb(tokens).mean()]}


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.LazyLinear(D), nn.LayerNorm(D)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.norm(self.linear(tokens.float()))


@pytest.mark.parametrize("kind", [Lazily, Later, Lazy])
def test_a_module_that_cannot_be_analysed_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(EnjoyLNError, match=kind.__name__):
        analyze(kind().eval(), ids())


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda: torch.jit.script(Plain()), (ids(),)),
        (lambda: torch.jit.trace(Plain(), (ids(),)), (ids(),)),
        (Plain, ()),
        (lambda: nn.ModuleList([nn.LayerNorm(D)]), (ids(),)),
    ],
    ids=["script", "trace", "without inputs", "without a forward"],
)
def test_compiled_modules_and_modules_without_inputs_are_refused(make: Any, given: Any) -> None:
    with pytest.raises(EnjoyLNError):
        analyze(make().eval(), *given)
