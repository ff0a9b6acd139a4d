"""What a traced call is: a graph, with all that the proof has to know of its nodes and modules.

Names are those of the plan's reference class, whichever class a graph came from.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from enjoyln_cli.calls.calls import Call
from enjoyln_cli.graph.insertion_points import Spot
from enjoyln_cli.graph.nodes import aten, packet

Naming = Callable[[str], str]


@dataclass(frozen=True, eq=False, kw_only=True)
class Trace:
    """One captured graph, functional, with its placeholders named."""

    label: str
    graph: Graph
    parameters: dict[Node, tuple[str, ...]]
    """All names of the parameter behind a placeholder: several where weights are tied."""
    inputs: dict[Node, str]
    naming: Naming
    required: bool
    """Whether every user makes this call; otherwise it only adds optional inputs."""
    leaves: frozenset[str]
    """Paths of the modules without children, whose output can be replaced by class."""
    model_class: str
    returned: dict[Node, tuple[str, ...]]
    """The fields of the class's output that hold a value; a value that goes out in another way than
    by a field, and so has to stay whichever fields a user wants, is not among them."""
    fed_back: frozenset[str]
    """Fields that a later call may be given."""
    call: Call
    unseen: Mapping[str, str] = field(default_factory=dict)
    """Norms that run where the graph does not show it, or in another way than by a call, and why.
    """
    locked: Mapping[str, str] = field(default_factory=dict)
    """Parameters that others see under no name of theirs, or that a call changes, and why."""
    places: Mapping[Node, Spot] = field(default_factory=dict)
    """The values that an operation can act on, with where it stands."""
    lost: frozenset[Spot] = frozenset()
    """Places that act on something else, too, and so cannot be used."""
    hidden: frozenset[str] = frozenset()
    """Modules that a control flow operator may call, whose graph is not this one."""
    by_example: bool = False
    """Whether the graph is that of the example's values, rather than of any."""
    by_values: bool = False
    """Whether Python read such a value, so that others may have another graph."""

    def module_of(self, node: Node) -> str:
        """Path of the innermost module whose forward computed the node."""
        stack = list(node.meta.get("nn_module_stack", {}).values())
        return self.naming(path_in_model(stack[-1][0])) if stack else ""

    def calls_of(self, node: Node) -> tuple[tuple[str, str], ...]:
        """``(call, module path)`` from the outermost module call around the node inwards.

        ``call`` tells several calls of one module apart.
        """
        stack = node.meta.get("nn_module_stack", {})
        return tuple((key, self.naming(path_in_model(path))) for key, (path, _) in stack.items())

    def entering(self, paths: Container[str]) -> Iterator[tuple[str, list[Node]]]:
        """For every call of the modules ``paths``: the values from outside that it computes with.

        The module's own parameters and constants of the model are not among them.
        """
        found: dict[str, tuple[str, dict[Node, None]]] = {}
        for node in self.graph.nodes:
            for call, path in self.calls_of(node):
                if path in paths:
                    values = found.setdefault(call, (path, {}))[1]
                    values.update(dict.fromkeys(self._from_outside(node, call, path)))
        yield from ((path, list(values)) for path, values in found.values())

    def leaving_unreturned(self, paths: Container[str]) -> set[str]:
        """Those of the modules without children out of which more goes than what they return."""
        return {
            path
            for node in self.graph.nodes
            for call, path in self.calls_of(node)
            if path in paths and self.places.get(node) != (path, "output")
            if any(call not in dict(self.calls_of(user)) for user in node.users)
            if not self._is_given(node, call)
        }

    def _is_given(self, node: Node, call: str) -> bool:
        """Whether a value of a call is one from outside: a cast that changes nothing, of that.

        What is not computed, such as a weight, comes from outside wherever it was first read.
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
        """Whether a module brings the value along: as its parameter, or as a constant."""
        names = self.parameters.get(node)
        if names is None:
            given = node.op == "placeholder" and node not in self.inputs
            return given or node.op == "get_attr"
        return any(name.rpartition(".")[0] == path for name in names)


def uncast(node: Node) -> Node:
    """The value behind casts; one that changes nothing hands out the tensor it was given."""
    while packet(node) in (aten.to, aten._to_copy, aten.alias):
        node = node.args[0]  # type: ignore[assignment]
    return node


def path_in_model(path: str) -> str:
    """A path in a model, from that in the module ``Steps`` that runs it and calls it ``model``."""
    return path.removeprefix("model").removeprefix(".")
