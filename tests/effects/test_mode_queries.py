"""A model whose own code queries global modes is refused; torch and transformers may do so."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import pytest
import torch
from torch import is_grad_enabled as imported
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import is_torchdynamo_compiling

from enjoyln_cli import analyze
from enjoyln_cli.errors import TraceFailed

D = 8
Choice = Callable[[torch.Tensor], bool]

QUESTIONS: dict[str, Choice] = {
    "torch.is_grad_enabled": lambda h: torch.is_grad_enabled(),
    "torch.is_inference_mode_enabled": lambda h: torch.is_inference_mode_enabled(),
    "torch.is_autocast_enabled": lambda h: torch.is_autocast_enabled("cpu"),
    "torch.get_default_dtype": lambda h: torch.get_default_dtype() is torch.float16,
    "torch.get_num_threads": lambda h: torch.get_num_threads() > 1000,
    "torch.are_deterministic_algorithms_enabled": lambda h: (
        torch.are_deterministic_algorithms_enabled()
    ),
    "torch.compiler.is_compiling": lambda h: not torch.compiler.is_compiling(),
    "torch.compiler.is_exporting": lambda h: not torch.compiler.is_exporting(),
    "transformers.utils.is_torchdynamo_compiling": lambda h: not is_torchdynamo_compiling(),
    "requires_grad of a tensor": lambda h: h.requires_grad,
    "grad_fn of a tensor": lambda h: h.grad_fn is not None,
    "is_leaf of a tensor": lambda h: not h.is_leaf,
    "is_inference of a tensor": lambda h: h.is_inference(),
    "data_ptr of a tensor": lambda h: h.data_ptr() % 3 == 1,
}
HIDDEN: dict[str, Choice] = {
    "imported by name": lambda h: imported(),
    "in a partial": functools.partial(lambda ask, h: ask(), torch.is_grad_enabled),
    "in a default": lambda h, ask=torch.is_grad_enabled: ask(),  # type: ignore[misc]
    "by getattr": lambda h: bool(getattr(torch, "is_" + "grad_enabled")()),
}
HARMLESS: dict[str, Choice] = {
    "nothing": lambda h: False,
    "its shape": lambda h: h.shape[-1] > D,
    "a parameter": lambda h: False if nn.Linear(1, 1).weight.requires_grad else h.ndim > 9,
    "torch asks": lambda h: bool(nn.MultiheadAttention(4, 2).eval()(*[h[:, :4]] * 3)[0].ndim > 9),
}


class Net(nn.Module):
    """A stream that branches on ``choice``, and a norm."""

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(5, D), nn.LayerNorm(D), nn.Linear(D, 3)
        self.choice = choice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        return self.head(self.norm(torch.tanh(h) if self.choice(h) else h))


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_model_that_queries_a_mode_is_refused(name: str) -> None:
    with pytest.raises(TraceFailed, match=f"its code reads {name}, which may differ"):
        analyze(Net(QUESTIONS[name]).eval(), torch.randn(2, 5))


@pytest.mark.parametrize("how", HIDDEN)
def test_it_does_not_matter_how_the_code_refers_to_the_function(how: str) -> None:
    with pytest.raises(TraceFailed, match="its code reads torch"):
        analyze(Net(HIDDEN[how]).eval(), torch.randn(2, 5))


@pytest.mark.one_case
@pytest.mark.parametrize("how", HARMLESS)
def test_code_may_query_what_is_the_same_in_every_call(how: str) -> None:
    assert len(analyze(Net(HARMLESS[how]).eval(), torch.randn(2, 5)).plan.folded) == 1


def test_a_query_in_a_recorded_run_counts() -> None:
    """Models that cannot be exported are recorded; queries are noticed there, too."""

    class Recorded(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = x[x.sum(-1) > -1e9]
            return super().forward(found)

    model = Recorded(QUESTIONS["torch.is_grad_enabled"]).eval()
    with pytest.raises(TraceFailed, match=r"its code reads torch\.is_grad_enabled"):
        analyze(model, torch.randn(2, 5))


@pytest.mark.slow
def test_a_hook_on_a_stock_model_may_not_query_modes() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11)).eval()
    assert len(analyze(model).plan.folded) == 3

    def change(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor] | None:
        return (args[0].tanh(),) if torch.is_grad_enabled() else None

    model.transformer.h[0].mlp.register_forward_pre_hook(change)
    with pytest.raises(TraceFailed, match=r"its code reads torch\.is_grad_enabled"):
        analyze(model)


def test_another_profiler_stays_active() -> None:
    calls: list[str] = []

    def watch(frame: object, event: str, argument: object) -> None:
        calls.append(event)

    sys.setprofile(watch)
    try:
        analyze(Net(HARMLESS["nothing"]).eval(), torch.randn(2, 5))
        assert sys.getprofile() is watch
    finally:
        sys.setprofile(None)
