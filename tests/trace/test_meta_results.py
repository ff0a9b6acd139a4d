"""Cached results of operations on the meta device equal the results that torch computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from random import Random
from typing import Any

import pytest
import torch
from random_ops import FAMILIES
from torch import nn
from torch.utils import _pytree as pytree

from enjoyln_cli.trace import meta_results
from enjoyln_cli.trace.recorder import record
from enjoyln_cli.trace.steps import Steps, quiet

aten = torch.ops.aten
HOLD_VALUES = {
    "bags_of_embeddings", "choices", "embeddings", "expert_products", "fillings",
    "fillings_by_tensors", "gathers", "indices", "rows_repeated", "scatters_of_rows", "zeros",
}  # fmt: skip
"""Families whose functions contain tensors with values, or name a device, so that most of their
calls are not cached."""


class Called(nn.Module):
    """A function of its inputs, as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, device="meta"))
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def argument_spec(value: Any, operands: list[torch.Tensor]) -> list[Any]:
    """A description of tensors without values, and of the memory they share with operands."""
    found: list[Any] = [type(value)]
    for x in pytree.tree_leaves(value):
        shares = [x.untyped_storage()._cdata == o.untyped_storage()._cdata for o in operands]
        same = [x is operand for operand in operands]
        found.append((tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, shares, same))
    return found


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    meta_results._results.clear()
    yield
    meta_results._results.clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_results_equal_torchs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def judged(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal compared
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        expected = argument_spec(func(*args, **kwargs), operands)
        compute(func, args, kwargs)
        again = compute(func, args, kwargs)
        assert argument_spec(again, operands) == expected
        compared += 1
        return again

    compute = meta_results.compute
    monkeypatch.setattr(meta_results, "compute", judged)
    for seed in range(12):
        function, inputs = FAMILIES[family](Random(f"{family} {seed}"))
        model = Called(function)
        inputs = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), inputs)
        try:
            with quiet():
                record(Steps(model, {}, None), ((inputs, {}),))
        except AssertionError:
            raise
        except Exception:  # torch takes no such operands, or a value is read
            continue
    assert compared or family in HOLD_VALUES


def plain(x: torch.Tensor) -> Any:
    return meta_results.compute(aten.mul.Tensor, (x, x), {})


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients": torch.enable_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("around", AROUND)
def test_a_mode_around_an_operation_is_not_bypassed(around: str) -> None:
    with torch.no_grad():
        x = torch.empty(3, device="meta")
        plain(x)
        known = dict(meta_results._results)
        assert known
        with AROUND[around]():
            expected = aten.mul.Tensor(x, x)
            found = plain(x)
            assert found.shape == expected.shape
            assert found.is_inference() == expected.is_inference()
            plain(torch.empty(4, device="meta"))
        assert meta_results._results == known


def test_a_transform_around_an_operation_is_not_bypassed() -> None:
    with torch.no_grad():
        result = torch.func.vmap(plain)(torch.empty(2, 3, device="meta"))
    assert result.shape == (2, 3)
    assert not meta_results._results


def test_a_cached_result_depends_on_the_default_dtype() -> None:
    whole = torch.empty(3, dtype=torch.int64, device="meta")
    found = []
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            try:
                found.append(meta_results.compute(aten.div.Tensor, (whole, 2), {}).dtype)
            finally:
                torch.set_default_dtype(torch.float32)
    assert found == [torch.float32, torch.float64, torch.float32]


def test_values_and_other_libraries_are_never_cached() -> None:
    with torch.library._scoped_library("enjoyln_meta_results", "DEF") as library, torch.no_grad():
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        op = torch.ops.enjoyln_meta_results.twice.default
        meta_results.compute(op, (torch.empty(3, device="meta"),), {})
        x = torch.tensor([1.0, 2.0])
        assert plain(x).tolist() == [1.0, 4.0]
        assert (plain(3 * x)).tolist() == [9.0, 36.0]
    assert not meta_results._results


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_results, "MAX_RESULTS", 5)
    with torch.no_grad():
        for size in range(1, 30):
            assert plain(torch.empty(size, device="meta")).shape == (size,)
            assert len(meta_results._results) <= 5
