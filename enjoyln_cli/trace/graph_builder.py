"""``GraphBuilder``: the graph of a call while it runs, and the node that each tensor comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from enjoyln_cli.models.norm_modules import PLAIN_TENSORS, first_input, only_input


class NotRecorded(Exception):
    """A call does something that cannot be recorded."""


@dataclass(eq=False)
class GraphBuilder:
    """The growing graph, and the node that each tensor comes from."""

    keeps_shapes: bool = True
    """Whether ``meta["val"]`` of each node has the shapes and dtypes of its result."""
    graph: Graph = field(default_factory=Graph)
    nodes: Any = field(default_factory=WeakTensorKeyDictionary)
    constants: dict[Node, torch.Tensor] = field(default_factory=dict)
    around: Mapping[str, tuple[str, type]] = field(default_factory=dict)
    """The running module calls, outermost first, in the format of ``nn_module_stack``."""
    called_with_more: set[str] = field(default_factory=set)
    """Paths of the modules without children that were called with other arguments than a tensor."""
    _first: Node | None = None
    """The first operation."""

    def placeholder(self, value: Any) -> Node:
        """A node for a value from outside, inserted before the first operation."""
        if self._first is None:
            node = self.graph.placeholder("given")
        else:
            with self.graph.inserting_before(self._first):
                node = self.graph.placeholder("given")
        if isinstance(value, torch.Tensor):
            self.give(value, node)
            value = _shape_alone(value) if self.keeps_shapes else None
        node.meta["val"] = value
        return node

    def give(self, tensor: torch.Tensor, node: Node) -> None:
        """Note that ``tensor`` comes from ``node``."""
        self.nodes[tensor] = node

    def follow_module_calls(self, root: nn.Module) -> None:
        """Let ``around`` list the modules of ``root`` whose ``forward`` runs, from now on."""
        for path, module in root.named_modules():
            vars(module)["forward"] = self._followed(path, module)

    def _followed(self, path: str, module: nn.Module) -> Callable[..., Any]:
        inner, cls, numbers = module.forward, type(module), count()
        leaf = not any(module.children())

        @wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            name = first_input(cls.forward) if leaf and kwargs else ""
            if leaf and only_input(args, kwargs, name) is None:
                self.called_with_more.add(path)
            outside = self.around
            self.around = {**outside, f"{path}@{next(numbers)}": (path, cls)}
            try:
                return inner(*args, **kwargs)
            finally:
                self.around = outside

        return forward

    def node_of(self, tensor: torch.Tensor) -> Node:
        """The node that a tensor comes from; a tensor of unknown origin is a constant."""
        known: Node | None = self.nodes.get(tensor)
        if known is not None:
            return known
        node = self.placeholder(tensor)
        self.constants[node] = tensor
        return node

    def called(self, target: Any, args: Any, kwargs: Any, value: Any) -> Node:
        node = self.graph.create_node("call_function", target, args, kwargs, _name_of(target))
        self._first = self._first or node
        node.meta["nn_module_stack"] = self.around
        if not self.keeps_shapes:
            return node
        if isinstance(value, torch.Tensor):
            node.meta["val"] = _shape_alone(value)
        else:
            node.meta["val"] = pytree.tree_map_only(torch.Tensor, _shape_alone, value)
        return node


@cache
def _name_of(target: Any) -> str:
    """What the nodes of an op are called, before they are numbered."""
    return Graph()._target_to_str(target)


def _shape_alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides and dtype, without values."""
    if type(tensor) not in PLAIN_TENSORS or tensor.layout != torch.strided:
        return tensor.detach().clone()
    shape, strides = tensor.shape, tensor.stride()
    with torch._C._DisableTorchDispatch():  # it belongs to the graph, and not to the call
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
