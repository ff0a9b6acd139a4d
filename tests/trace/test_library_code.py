"""Code as libraries write it: it asks for torch's modes, devices and addresses, and is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from folding_live import Computing, floats, fold_in_place, randomised
from torch import nn

from enjoyln_cli import analyze
from enjoyln_cli.errors import TraceFailed

WIDTH = 14
Step = Callable[[torch.Tensor], torch.Tensor]


def in_autocast(h: torch.Tensor) -> torch.Tensor:
    with torch.autocast(device_type=h.device.type, enabled=False):
        return h * 2


def cast_as_autocast(h: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled(h.device.type):
        return h.to(torch.get_autocast_dtype(h.device.type))
    return h


def checked_for_export(h: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_exporting():  # as timm does for images of other sizes
        torch._check(h.shape[1] < 1000)
    return h


STEPS: dict[str, Step] = {
    "autocast is off": in_autocast,
    "the dtype of autocast": cast_as_autocast,
    "a check for exporters": checked_for_export,
    "compiling": lambda h: h if torch.compiler.is_compiling() else h.clone(),
    "gradients": lambda h: h.clone() if torch.is_grad_enabled() and h.requires_grad else h,
    "default dtype": lambda h: h if torch.get_default_dtype().is_floating_point else h.clone(),
    "alignment": lambda h: h if h.is_meta or h.data_ptr() % 16 == 0 else h.clone(),
    "a kernel of CUDA": lambda h: h.contiguous() if h.is_cuda else h,
}


def net(step: Step) -> Computing:
    """Takes a step of ``STEPS`` on the stream in front of its norm."""
    parts = {"embed": nn.Linear(5, WIDTH), "norm": nn.LayerNorm(WIDTH), "head": nn.Linear(WIDTH, 3)}
    return Computing(lambda m, x: m.head(m.norm(step(m.embed(x)))), **parts)


@pytest.mark.parametrize("step", STEPS)
def test_a_mode_or_a_device_may_choose_how_to_compute(step: str) -> None:
    bare = net(STEPS[step]).double().to("meta").eval()
    plan = analyze(bare, floats(2, 7, 5).to("meta")).plan
    assert [verdict.status for verdict in plan.norms] == ["in_weights"]
    model = randomised(net(STEPS[step]))
    found = fold_in_place(model, floats(2, 7, 5), others=[(floats(3, 4, 5),)])
    assert found.folded == {"norm"} and found.error < 1e-12


def test_torchs_functions_are_as_before() -> None:
    before = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.autocast.__init__
    analyze(net(in_autocast).eval(), torch.randn(2, 7, 5))
    assert before == (torch.is_autocast_enabled, torch.get_autocast_dtype, torch.autocast.__init__)
    with pytest.raises(RuntimeError):
        torch.is_autocast_enabled("meta")


class Stream(nn.Module):
    """An encoder or a decoder of torch behind a layer that writes its stream."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        layer, stack = (getattr(nn, f"Transformer{kind}{part}") for part in ("Layer", ""))
        settings = {} if kind == "Decoder" else {"enable_nested_tensor": False}
        one = layer(WIDTH, 2, 32, batch_first=True, norm_first=True)
        self.stack = stack(one, 2, nn.LayerNorm(WIDTH), **settings)
        self.embed = nn.Linear(5, WIDTH)

    def forward(self, x: torch.Tensor, *mask: Any) -> Any:
        return self.stack(self.embed(x), *mask)


MASKS = {
    "causal": nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64),
    "boolean": torch.ones(7, 7, dtype=torch.bool).tril(2).logical_not(),
    "a band": torch.full((7, 7), -torch.inf, dtype=torch.float64).triu(3),
}


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_a_transformer_encoder_takes_a_mask(mask: str) -> None:
    """Torch compares the mask with a causal mask if ``is_causal`` is not given."""
    inputs = floats(2, 7, 5), MASKS[mask]
    found = fold_in_place(randomised(Stream("Encoder")), *inputs, others=[inputs])
    assert len(found.folded) == 5 and found.error < 1e-12 and not found.reasons


@pytest.mark.slow
def test_a_transformer_decoder_takes_a_mask() -> None:
    inputs = floats(2, 7, 5), floats(2, 7, WIDTH), MASKS["causal"]
    found = fold_in_place(randomised(Stream("Decoder")), *inputs, others=[inputs])
    assert len(found.folded) == 7 and found.error < 1e-12 and not found.reasons


def branch(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.write(x)
    z = torch.cond(x.sum() > 0, lambda y: m.norm(y.exp()), lambda y: y.sin(), (x,))
    return m.norm(y) + z


def loop(m: Any, x: torch.Tensor) -> torch.Tensor:
    begin = torch.zeros((), dtype=torch.int64), x
    z = torch.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 1.5), begin)[1]
    return m.norm(m.write(x)) + z


@pytest.mark.parametrize("run", [branch, loop])
def test_a_model_with_a_higher_order_operator_is_refused(run: Any) -> None:
    model = Computing(run, write=nn.Linear(WIDTH, WIDTH), norm=nn.LayerNorm(WIDTH))
    with pytest.raises(TraceFailed, match=f"{run.__name__}, line .* control flow operator"):
        analyze(randomised(model), floats(2, 5, WIDTH))
