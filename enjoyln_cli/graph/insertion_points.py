"""Find the values of a graph that a centring operation of a live model can act on.

An operation can act on the output of a leaf module, or on the first input of any module with
children inside the model. Of these, blocks (in a ``ModuleList`` or ``Sequential``) are preferred.
The proof is about a value in a graph, while the folded model changes an input or output of
``forward``. Both use ``change_input`` and ``change_output``, so that they refer to the same value.
While a graph is captured, that value is marked in it. A module has no such place if in any of its
calls the value is not a floating-point tensor.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

from enjoyln_cli.graph.nodes import packet
from enjoyln_cli.models.classes import base_path
from enjoyln_cli.models.norm_modules import (
    first_input,
    foreign_hooks,
    forward_hooks,
    has_replaced_forward,
)

Where = Literal["output", "input", "entry"]
InsertionPoint = tuple[str, Where]
"""The path of a module, and which of its values: its output or an input."""
Change = Callable[[torch.Tensor], torch.Tensor]

MARK = "enjoyln_place"
aten = torch.ops.aten


def change_input(
    change: Change, first: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
    """``args`` and ``kwargs`` with the first input changed; ``None`` if it is no float tensor."""
    if args:
        return ((change(args[0]), *args[1:]), kwargs) if _is_real(args[0]) else None
    if not _is_real(kwargs.get(first)):
        return None
    return args, {**kwargs, first: change(kwargs[first])}


def change_output(change: Change, output: Any) -> Any:
    """``output`` changed: a float tensor, or the first of a tuple; ``None`` for anything else."""
    if _is_real(output):
        return change(output)
    if type(output) is tuple and output and _is_real(output[0]):
        return (change(output[0]), *output[1:])
    return None


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@dataclass
class InsertionPoints:
    """Marks the places of a model while its graph is captured."""

    unusable_points: set[InsertionPoint] = field(default_factory=set)
    """Places that cannot be used, since some call has another kind of value there."""
    _calls: int = 0

    def mark(self, path: str, where: Where, value: torch.Tensor) -> torch.Tensor:
        """Give ``value`` its own node in the captured graph, with its place as metadata."""
        mode: Any = get_proxy_mode()
        if mode is None:
            return value
        self._calls += 1
        marked: torch.Tensor = mode.marked(value, {MARK: (path, where, self._calls)})
        return marked


def mark_insertion_points(model: nn.Module) -> InsertionPoints:
    """Mark the places of ``model``, a copy made for a trace, in graphs from now on."""
    places = InsertionPoints()
    for path, module in model.named_modules():
        leaf = not any(module.children())
        if has_replaced_forward(module) or foreign_hooks(forward_hooks(module)):
            places.unusable_points.add((path, "output"))
        inside = leaf or path not in ("", base_path(model))
        if inside and inspect.isfunction(type(module).forward):
            module.__dict__["forward"] = _marking(places, path, module, leaf)
    return places


def blocks(model: nn.Module) -> list[str]:
    """The paths of modules with children in a ``ModuleList`` or ``Sequential``."""
    items = {
        block
        for module in model.modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        for block in module
        if block is not None and any(block.children())
    }
    return [path for path, module in model.named_modules() if module in items]


def _marking(
    places: InsertionPoints, path: str, module: nn.Module, leaf: bool
) -> Callable[..., Any]:
    inner, first = module.forward, first_input(type(module).forward)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not leaf:
            found = change_input(lambda x: places.mark(path, "input", x), first, args, kwargs)
            if found is None:
                places.unusable_points.add((path, "input"))
                return inner(*args, **kwargs)
            return inner(*found[0], **found[1])
        output = inner(*args, **kwargs)
        value = output[0] if type(output) is tuple and output else output
        through = _is_among(value, (*args, *kwargs.values()))
        changed = None
        if not through:
            changed = change_output(lambda x: places.mark(path, "output", x), output)
        if changed is None:
            places.unusable_points.add((path, "output"))
            return output
        return changed

    return forward


def _is_among(value: Any, given: Sequence[Any]) -> bool:
    """Whether ``given`` contains a value, itself or nested in its elements."""
    several = [one for one in given if not isinstance(one, torch.Tensor)]
    return any(value is one for one in (*given, *pytree.tree_leaves(several)))


def settle(graph: Graph) -> None:
    """Move the mark of an output from its own node to the value itself, if it has no other reader.

    A cast to the same dtype does not get the mark, since a decomposition may remove that cast.
    """
    for node in list(graph.nodes):
        if _mark(node) is None or _mark(node)[1] != "output":
            continue
        value = node.args[0]
        returned = any(user.op == "output" for user in node.users)
        if returned or value.op != "call_function" or len(value.users) > 1 or _mark(value):
            continue
        if packet(value) is aten.to and _dtype(value) == _dtype(value.args[0]):
            continue
        value.meta["custom"] = {**value.meta.get("custom", {}), MARK: _mark(node)}
        node.replace_all_uses_with(value)
        graph.erase_node(node)


def insertion_points_of(graph: Graph) -> dict[Node, InsertionPoint]:
    """The marked values and their places, without calls whose mark is on several nodes."""
    return {nodes[0]: mark[:2] for mark, nodes in _by_mark(graph).items() if len(nodes) == 1}


def ambiguous_points(graph: Graph) -> set[InsertionPoint]:
    """The places for which the mark of some call is on several nodes."""
    return {mark[:2] for mark, nodes in _by_mark(graph).items() if len(nodes) > 1}


def _by_mark(graph: Graph) -> dict[Any, list[Node]]:
    found: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        mark = _mark(node)
        if mark is not None and isinstance(node.meta.get("val"), torch.Tensor):
            found.setdefault(mark, []).append(node)
    return found


def _dtype(node: Any) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)


def _mark(node: Node) -> Any:
    return node.meta.get("custom", {}).get(MARK)
