"""Example inputs for the calls that a proof covers, from their forms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice, permutations, product
from typing import Any

import torch
from torch import nn

from enjoyln_cli.calls.call_text import to_text
from enjoyln_cli.calls.calls import Call
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.classes import dtype_of
from enjoyln_cli.plan.covered_calls import (
    CallForm,
    Constant,
    CoveredCalls,
    Form,
    Items,
    Length,
    Size,
    TensorForm,
    named_sizes,
)
from enjoyln_cli.plan.size_conditions import holds

_SIZES = (3, 2, 5, 4, 7, 6, 8, 9, 16, 32, 64, 1)
"""Sizes to try for each name, the most telling first."""
_MAX_TRIALS = 20_000


def covered_examples(model: nn.Module, covered: CoveredCalls) -> list[tuple[CallForm, Call]]:
    """Each covered form of ``model`` with a call like it, without those that take a cache.

    Tensors are zeros. Raises ``UnsupportedModel`` if there is no such form, or if no sizes can be
    found for one.
    """
    forms = covered.calls_of(model).forms
    examples = [
        (form, _call(model, form))
        for form in forms
        if not any(_has_object(argument) for _, argument in form.arguments)
    ]
    if not examples:
        raise UnsupportedModel(
            f"{type(model).__name__}: the plan covers no call of it with tensors alone"
        )
    return examples


def _has_object(form: Form) -> bool:
    """Whether an argument is or holds an object of transformers, such as a cache."""
    if not isinstance(form, Items):
        return False
    return form.kind not in ("list", "tuple", "dict") or any(map(_has_object, form.values))


def _call(model: nn.Module, form: CallForm) -> Call:
    sizes = next(_sizes_of(form), None)
    if sizes is None:
        raise UnsupportedModel(f"no example inputs could be found for the call {to_text(form)}")
    made = {name: _value(argument, sizes, dtype_of(model)) for name, argument in form.arguments}
    args = tuple(value for name, value in made.items() if name.startswith("*"))
    kwargs = {name: value for name, value in made.items() if not name.startswith("*")}
    return Call(to_text(form), ((args, kwargs),))


def _sizes_of(form: CallForm) -> Iterator[dict[str, int]]:
    """Sizes that meet the conditions of a form, by name; different ones first."""
    names = sorted(named_sizes(form.arguments))
    trials = chain(permutations(_SIZES, len(names)), product(_SIZES, repeat=len(names)))
    for trial in islice(trials, _MAX_TRIALS):
        sizes = dict(zip(names, trial, strict=True))
        if all(holds(condition, sizes) for condition in form.conditions):
            yield sizes


def _value(form: Form, sizes: Mapping[str, int], dtype: torch.dtype) -> Any:
    if isinstance(form, Constant):
        return form.value
    if isinstance(form, Length):
        return _size(form.size, sizes)
    if isinstance(form, TensorForm):
        kinds = {"float": dtype, "int": torch.int64, "bool": torch.bool}
        shape = [_size(size, sizes) for size in form.sizes]
        return torch.zeros(shape, dtype=kinds.get(form.kind, torch.complex64))
    inside = [_value(value, sizes, dtype) for value in form.values]
    if form.kind == "dict":
        return dict(zip(form.keys, inside, strict=True))
    return tuple(inside) if form.kind == "tuple" else inside


def _size(size: Size, sizes: Mapping[str, int]) -> int:
    return sizes[size] if isinstance(size, str) else size
