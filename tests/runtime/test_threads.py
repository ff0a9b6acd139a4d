"""Threads that share a folded model: the inputs of one call do not affect another call."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from eight_models import far, given, pair, run
from live_models import install, moved
from torch import nn

from enjoyln_cli.plan.axis import feature_axis
from enjoyln_cli.plan.plan import MeanSubtraction
from enjoyln_cli.runtime.scope import thread


@pytest.fixture(autouse=True)
def threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Stream(nn.Module):
    """A model with an entry input, an explicit centring and an unproven input."""

    def __init__(self, in_parts: bool = False) -> None:
        super().__init__()
        self.between = torch._dynamo.graph_break if in_parts else lambda: None
        self.rows, self.more = nn.Embedding(20, 8), nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.rows.weight

    def forward(
        self, ids: Any = None, embeds: Any = None, more: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.rows(ids) if embeds is None else embeds
        self.between()
        x = x if more is None else x + self.more(more)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x))
            self.between()
        return self.head(self.norms[3](x))


def streams(in_parts: bool = False) -> tuple[Any, Any]:
    """A folded model and the original, which are compiled as a whole or in parts."""
    stock = moved(Stream(in_parts))
    with torch.no_grad():
        for layer in stock.layers:
            layer.weight -= layer.weight.mean(0)
            layer.bias -= layer.bias.mean()
    model = copy.deepcopy(stock)
    op = MeanSubtraction("rows", "output", feature_axis((1, 1, 8)), "tied")
    install(model, [f"norms.{i}" for i in range(4)], [op], ["embeds"], ["more"])
    return model, stock


def kinds_of_calls(model: Any) -> list[Callable[[], torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids, more = (torch.randint(0, 20, (2, 4), generator=generator) for _ in range(2))
    embeds = torch.randn(2, 4, 8, generator=generator).double() + 3
    return [
        lambda: model(ids),
        lambda: model(ids, more=more),
        lambda: model(embeds=embeds, more=more),
        lambda: model(embeds=embeds),
        lambda: model.norms[1](embeds),
        lambda: model.rows(ids),
        lambda: copy.deepcopy(model)(ids, more=more),
    ]


def wrong_calls(rounds: int, workers: int, calls: list[Any], expected: list[Any]) -> int:
    """The number of wrong results in ``workers`` threads, each beginning with another call."""
    start = threading.Barrier(workers)

    def work(first: int) -> int:
        start.wait()
        wrong = 0
        with torch.no_grad():
            for i in range(first, first + rounds):
                which = i % len(calls)
                wrong += far(calls[which](), expected[which]) > 1e-9
        assert thread.running.guard is None and thread.running.proven is None
        return wrong

    with ThreadPoolExecutor(workers) as pool:
        return sum(pool.map(work, range(workers)))


def test_calls_with_and_without_an_unproven_input() -> None:
    model, stock = streams()
    with torch.no_grad():
        expected = [call() for call in kinds_of_calls(stock)]
    assert wrong_calls(60, 4, kinds_of_calls(model), expected) == 0


@pytest.mark.parametrize("name", ["whisper", "opt"])
def test_a_model_and_its_parts(eight: Path, name: str) -> None:
    """Calls of the whole model, of its encoder or decoder, and of a block, in several threads."""
    model, stock = pair(name, eight)
    x = torch.randn(2, 5, 16).double() + 3
    inputs = given(name)
    if name == "whisper":
        heard = {"input_features": inputs["input_features"]}
        parts = [
            lambda one: run(one.get_encoder(), heard),
            lambda one: run(one, {**inputs, "attention_mask": torch.ones(2, 18)}),
            lambda one: one.model.encoder.layers[1](x, None),
        ]
    else:
        parts = [
            lambda one: run(one.get_decoder(), {"inputs_embeds": x}),
            lambda one: one.model.decoder.layers[1](x),
            lambda one: one.get_input_embeddings()(inputs["input_ids"]),
        ]
    parts.append(lambda one: run(one, inputs))
    calls = [lambda part=part: part(model) for part in parts]
    with torch.no_grad():
        expected = [part(stock) for part in parts]
    assert wrong_calls(20, 3, calls, expected) == 0


def test_a_call_that_is_compiled_in_parts() -> None:
    """Compiled code reads the state of its own thread, also while others run or compile."""
    torch._dynamo.reset()
    model, stock = streams(in_parts=True)
    with torch.no_grad():
        expected = [call() for call in kinds_of_calls(stock)][:4]
        compiled: Any = torch.compile(model, backend="eager")
        for _ in range(2):
            for call, output in zip(kinds_of_calls(compiled), expected, strict=False):
                assert far(call(), output) < 1e-9
    both = [*kinds_of_calls(compiled)[:4], *kinds_of_calls(model)[:4]]
    assert wrong_calls(24, 2, both, [*expected, *expected]) == 0


def test_blocks_that_are_compiled_by_themselves() -> None:
    torch._dynamo.reset()
    model, stock = streams()
    x = torch.randn(2, 4, 8).double() + 3
    with torch.no_grad():
        expected = [call() for call in kinds_of_calls(stock)][:4]
        for norm in model.norms:
            norm.compile(backend="eager", fullgraph=True)
        model.rows.compile(backend="eager", fullgraph=True)
        for _ in range(2):
            for call, output in zip(kinds_of_calls(model), expected, strict=False):
                assert far(call(), output) < 1e-9
            assert far(model.norms[1](x), stock.norms[1](x)) < 1e-9
            assert far(model.rows(torch.arange(4)), stock.rows(torch.arange(4))) < 1e-9
