"""``Trace``: the graph of a call, with what the proof has to know about its nodes and modules.

Names belong to the plan's reference class, even if the graph comes from another class.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from enjoyln_cli.calls.calls import Call
from enjoyln_cli.calls.composition import Composition
from enjoyln_cli.graph.insertion_points import InsertionPoint
from enjoyln_cli.graph.nodes import aten, packet

Naming = Callable[[str], str]


@dataclass(frozen=True, eq=False, kw_only=True)
class Trace:
    """One captured functional graph with named placeholders."""

    label: str
    graph: Graph
    parameters: dict[Node, tuple[str, ...]]
    """All names of the parameter or stored buffer that a placeholder stands for: several for a tied
    weight."""
    inputs: dict[Node, str]
    naming: Naming
    """Converts a path in the traced model to the name in the reference class."""
    required: bool
    """Whether the proof needs this call; otherwise it only adds optional inputs."""
    leaves: frozenset[str]
    """Paths of the modules without children, whose output a new class can change."""
    blocks: frozenset[str]
    """Paths of the modules with children in a ``ModuleList`` or ``Sequential``."""
    model_class: str
    returned: dict[Node, tuple[str, ...]]
    """The output fields that hold a value. Values that leave the call without being in a field are
    not included; they must always stay the same."""
    fed_back: frozenset[str]
    """Output fields that a later call may take as inputs."""
    call: Call
    composition_after: Composition | None = None
    """What the model consists of after the call, if the call replaces some of its modules."""
    called_with_more: frozenset[str] = frozenset()
    """Modules without children that a call passes other arguments than one tensor."""
    locked: Mapping[str, str] = field(default_factory=dict)
    """Parameters that must not be edited, with the reason: they are read through other tensors, or
    a call changes them."""
    scaled: frozenset[str] = frozenset()
    """Parameters that a call multiplies by numbers. They may be centred, but not fused."""
    places: Mapping[Node, InsertionPoint] = field(default_factory=dict)
    """The values that an inserted operation can act on, with the place of the operation."""
    unusable_points: frozenset[InsertionPoint] = frozenset()
    """Places that cannot be used, since an operation there would act on other values too."""
    by_values: bool = False
    """Whether Python read an example value, so that other values may lead to another graph."""

    def module_of(self, node: Node) -> str:
        """Path of the innermost module whose forward computed the node."""
        stack = list(node.meta.get("nn_module_stack", {}).values())
        return self.naming(path_in_model(stack[-1][0])) if stack else ""

    def calls_of(self, node: Node) -> tuple[tuple[str, str], ...]:
        """``(call, module path)`` of the module calls around the node, from the outermost inwards.

        ``call`` is a key that differs between several calls of one module.
        """
        stack = node.meta.get("nn_module_stack", {})
        return tuple((key, self.naming(path_in_model(path))) for key, (path, _) in stack.items())

    def entering(self, paths: Container[str]) -> Iterator[tuple[str, list[Node]]]:
        """For every call of the modules ``paths``: the path, and the outside values that it reads.

        The module's own parameters and constants of the model are not included.
        """
        found: dict[str, tuple[str, dict[Node, None]]] = {}
        for node in self.graph.nodes:
            for call, path in self.calls_of(node):
                if path in paths:
                    values = found.setdefault(call, (path, {}))[1]
                    values.update(dict.fromkeys(self._from_outside(node, call, path)))
        yield from ((path, list(values)) for path, values in found.values())

    def leaving_unreturned(self, paths: Container[str]) -> set[str]:
        """The modules among ``paths`` with a value that is read outside without being returned.

        ``paths`` are modules without children.
        """
        return {
            path
            for node in self.graph.nodes
            for call, path in self.calls_of(node)
            if path in paths and self.places.get(node) != (path, "output")
            if any(call not in dict(self.calls_of(user)) for user in node.users)
            if not self._is_given(node, call)
        }

    def _is_given(self, node: Node, call: str) -> bool:
        """Whether a value in a call comes unchanged from outside, possibly through no-op casts.

        A value that is not computed, such as a weight, always comes from outside.
        """
        source = uncast(node)
        dtypes = {getattr(n.meta.get("val"), "dtype", n) for n in (node, source)}
        outside = source.op != "call_function" or call not in dict(self.calls_of(source))
        return len(dtypes) == 1 and outside

    def _from_outside(self, node: Node, call: str, path: str) -> list[Node]:
        return [
            operand
            for operand in node.all_input_nodes
            if isinstance(operand.meta.get("val"), torch.Tensor)
            and (operand in self.parameters or call not in dict(self.calls_of(operand)))
            and not self._held_by(uncast(operand), path)
        ]

    def _held_by(self, node: Node, path: str) -> bool:
        """Whether a value is a parameter of the module at ``path``, or a constant."""
        names = self.parameters.get(node)
        if names is None:
            return node.op == "placeholder" and node not in self.inputs
        return any(name.rpartition(".")[0] == path for name in names)


def uncast(node: Node) -> Node:
    """The value before casts and aliases."""
    while packet(node) in (aten.to, aten._to_copy, aten.alias):
        node = node.args[0]  # type: ignore[assignment]
    return node


def path_in_model(path: str) -> str:
    """The path of a module in the model, from its path in ``Steps`` (prefix ``model.``)."""
    return path.removeprefix("model").removeprefix(".")
