"""Any exception from a live module's code, or from torch while it is traced, becomes a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from folding_live import VOCAB, D, ids
from torch import nn
from warm_process import run

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


@pytest.mark.parametrize("how", [torch.jit.script, lambda m: torch.jit.trace(m, (ids(),))])
def test_a_compiled_module_is_refused(how: Any) -> None:
    with pytest.raises(EnjoyLNError):
        analyze(how(Plain().eval()), ids())


def test_a_module_without_inputs_or_a_forward_is_refused() -> None:
    for model, given in ((Plain(), ()), (nn.ModuleList([nn.LayerNorm(D)]), (ids(),))):
        with pytest.raises(EnjoyLNError):
            analyze(model, *given)


@pytest.mark.slow
def test_a_folded_model_is_traced_by_jit_before_its_first_call() -> None:
    """The kernel is loaded and tested at its first use. The trace must not contain these steps."""
    code = """if True:
        import sys; sys.path.insert(0, "tests/support")
        import torch
        from torch import nn
        from folding_live import randomised, floats
        from rounding import as_exact, in_float64
        from enjoyln_cli import analyze
        from enjoyln_cli.rewrite.in_memory import centre_parameters
        from enjoyln_cli.runtime.install import install
        model = randomised(nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3))).float()
        x, y = floats(4, 5).float(), floats(7, 5, seed=2).float()
        expected, exact = model(y), in_float64(model)(in_float64(y))
        plan = analyze(model, x).plan
        centre_parameters(model, plan)
        install(model, [v.norm for v in plan.folded], plan.ops)
        with torch.no_grad():
            traced = torch.jit.trace(model, (x,))
        assert as_exact(traced(y), expected, exact)
    """
    status, _, error = run("-c", code)
    assert status == 0, error
