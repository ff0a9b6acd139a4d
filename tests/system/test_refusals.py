"""Any exception from a live module's code, or from torch while it is traced, becomes a refusal."""

from __future__ import annotations

import subprocess
import sys
import threading
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


class Array(Plain):
    def forward(self, tokens: torch.Tensor) -> Any:
        return self.norm(self.emb(tokens)).detach().numpy()


class Locked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, tokens: torch.Tensor) -> Any:
        with self.lock:
            return self.norm(self.emb(tokens[:, : int((tokens >= 0).sum(-1).max())]))


class Branching(Plain):
    def forward(self, tokens: torch.Tensor) -> Any:
        h = self.emb(tokens)
        return self.norm(h if h.sum() > 0 else h.tanh())


class NoConfig(Plain):
    def __getattr__(self, name: str) -> Any:
        if name == "config":
            raise ValueError("there is no config")
        return super().__getattr__(name)


class OtherMemory(Plain):
    def forward(self, tokens: torch.Tensor) -> Any:
        h = self.emb(tokens)
        h.data = h.tanh()
        return self.norm(h)


class NoSecond(Plain):
    """Holds objects that cannot be compared, printed, or converted to a bool."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = [Odd(), {"odd": Odd()}]


class Odd:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("cannot be compared")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise RuntimeError("has no text")

    def __bool__(self) -> bool:
        raise RuntimeError("is neither true nor false")


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.LazyLinear(D), nn.LayerNorm(D)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.norm(self.linear(tokens.float()))


REFUSED = [Lazily, Later, Array, Locked, Branching, NoConfig, OtherMemory, Lazy]


@pytest.mark.parametrize("kind", REFUSED)
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


def test_objects_that_cannot_be_looked_at_do_not_matter() -> None:
    assert len(analyze(NoSecond(), ids()).plan.folded) == 1


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
