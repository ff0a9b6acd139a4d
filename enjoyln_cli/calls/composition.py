"""What decides what a model computes, apart from the values of its weights.

A plan holds for the modules that were traced: their classes, ``forward``, hooks and
parametrisations, and the weights and layers that they reach as plain attributes. A plan remembers
these, and is refused for a live model in which they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from enjoyln_cli.models.load import values_of
from enjoyln_cli.models.norm_modules import forward_hooks, has_replaced_forward, stock_class
from enjoyln_cli.plan.trusted_code import foreign_hooks

Composition = Mapping[str, Mapping[str, object]]
"""What is known of each module, by its path and the name of the aspect; it can be pickled."""
_INTERNAL = {*vars(nn.Module())}


def composition_of(model: nn.Module) -> Composition:
    """What decides what ``model`` computes; copies of it are equal."""
    names = {id(module): path for path, module in model.named_modules()}
    names |= {id(tensor): name for name, tensor in reversed(values_of(model).items())}
    return {path: dict(_aspects(module, names)) for path, module in model.named_modules()}


def what_changed(then: Composition, model: nn.Module) -> str:
    """The first difference of ``model`` from what it was, in words; empty if there is none."""
    now = composition_of(model)
    for path in dict.fromkeys((*now, *then)):
        before, present = then.get(path), now.get(path)
        if before is None or present is None:
            return f"{path} was {'added' if before is None else 'removed'}"
        for aspect, value in present.items():
            if before[aspect] != value:
                return f"the {aspect} of {path or type(model).__name__} changed"
    return ""


def _aspects(module: nn.Module, names: Mapping[int, str]) -> Iterator[tuple[str, object]]:
    """``names`` are the names of the model's modules and tensors, by their identity."""
    cls: Any = stock_class(type(module))
    own = has_replaced_forward(module) and "_original_forward" not in vars(module)
    hooks = (*module._forward_pre_hooks.values(), *torch_module._global_forward_pre_hooks.values())
    if names[id(module)]:  # what runs after the model itself changes nothing inside
        hooks += forward_hooks(module)
    yield "class", (cls.__module__, cls.__qualname__)
    yield "forward method", _code(module.forward if own else cls.forward)
    yield "hooks", [*map(_code, foreign_hooks(hooks))]
    yield "weights", {n for n, tensor in module._parameters.items() if tensor is not None}
    attributes = ((name, value) for name, value in vars(module).items() if name not in _INTERNAL)
    held = {name: [*_held(value, names, {id(module)})] for name, value in attributes}
    yield "attributes", {name: found for name, found in held.items() if found}


def _code(function: Any) -> object:
    """What a function does, without what it has closed over."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function).__qualname__
    return code.co_qualname, code.co_code, code.co_names


def _held(value: Any, names: Mapping[int, str], above: set[int]) -> Iterator[str]:
    """The names of the model's modules and tensors in a plain ``value``, in order."""
    if isinstance(value, torch.Tensor | nn.Module):
        if id(value) in names:
            yield names[id(value)]
    elif isinstance(value, list | tuple | dict | set) and id(value) not in above:
        parts: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for part in parts:
            yield from _held(part, names, above | {id(value)})
