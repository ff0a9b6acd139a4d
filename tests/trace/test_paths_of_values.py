"""Whether a graph that was recorded with example values holds for all values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from folding_live import Computing, floats, randomised
from support.assertions import asserted
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from transformers import AutoformerConfig

from enjoyln_cli.analysis.analyze import analyze_config, analyze_module
from enjoyln_cli.trace.trace import Trace

WIDTH = 6


def trace_of(code: Any) -> Trace:
    """Of a model with two layers, a norm between them, and ``code`` before the norm."""
    parts = {"own": nn.Linear(5, WIDTH), "norm": nn.LayerNorm(WIDTH), "out": nn.Linear(WIDTH, 3)}
    model = Computing(lambda m, x, ids: m.out(m.norm(code(m.own(x), ids))), **parts)
    ids = torch.tensor([[1, 0, 2, 2], [2, 2, 1, 0], [0, 1, 2, 2]])
    found = analyze_module(randomised(model), floats(3, 4, 5), ids)
    return found.problem.flow.traces[0]


def checked(h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    torch._check_tensor_all(ids >= 0, lambda: "negative")
    return h


def checked_with_a_message(h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    count = (ids == 2).sum()
    text = f"{count} of {ids.numel()}"
    torch._check_tensor_all(count == 6, lambda: text)
    return h


def rows_of_a_mask(h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return h.masked_scatter((ids == 2)[..., None], h[ids == 2].flip(0))


def an_input_that_is_written(h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    ids += 1
    return h[:, ids[0] % 4]


def rows_in_a_transform(h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    mask = torch.vmap(lambda row, value: row[value] > 0, in_dims=(None, 0))(ids[0], ids[1])
    return h * mask[:, None]


def indexed_in_a_transform(h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    with TransformGetItemToIndex():  # as transformers makes its masks
        mask = torch.vmap(lambda place: ids[0][place] > 0)(torch.arange(4))
    return h * mask[:, None]


def fails_while_it_is_exported(h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_exporting():
        raise ValueError("no export")
    return h[:, ids[0]]


def branched(h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return h if ids.max().item() < 3 else h.abs()


def repeated(h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for _ in range(int(ids[0, 0])):
        h = h * 2
    return h


def counted(h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return h if len(h[ids == 2]) == 6 else h.abs()


def with_a_number(h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return h * ids.max().item()


def up_to_a_number(h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.cat((h[:, : ids.max().item()], h[:, :2]), 1)


def tried(h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    try:
        wrong = ids.max().item() > 2
    except Exception:
        wrong = False
    return h.abs() if wrong else h


def tried_branch(h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    highest = ids.max().item()
    try:
        return h.abs() if highest > 2 else h
    except Exception:
        return h


def deeply_copied(h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    torch._check_tensor_all(ids >= 0, lambda: "negative")
    return copy.deepcopy(h)  # which would need the memory of a tensor that has none


@pytest.mark.parametrize(
    "code",
    [
        checked, checked_with_a_message, asserted, rows_of_a_mask, an_input_that_is_written,
        rows_in_a_transform, indexed_in_a_transform, fails_while_it_is_exported,
    ],
)  # fmt: skip
def test_values_that_choose_no_path_are_proven_for_all(code: Any) -> None:
    assert not trace_of(code).by_values


@pytest.mark.parametrize(
    "code",
    [
        branched, repeated, counted, with_a_number, up_to_a_number, tried, tried_branch,
        deeply_copied,
    ],
)  # fmt: skip
def test_values_that_choose_a_path_are_proven_for_the_example(code: Any) -> None:
    assert trace_of(code).by_values


SERIES = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8, "context_length": 12, "prediction_length": 6,
}  # fmt: skip


@pytest.mark.slow
def test_a_time_series_model_is_proven_for_all_values() -> None:
    plan = analyze_config(AutoformerConfig(**SERIES), model_class="AutoformerModel").plan
    folded = {verdict.norm for verdict in plan.folded}
    assert folded == {"encoder.layernorm_embedding", "decoder.layernorm_embedding"}
    assert not plan.by_example
