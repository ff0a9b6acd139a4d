"""Which stored tensors to centre if the class holds a parameter in another layout than the file.

transformers builds some parameters from other stored tensors: it stacks experts, splits or joins
projections, transposes dimensions. This module runs each conversion on meta tensors and records it
as a graph of aten ops. The pull-back table then says which stored tensors have to be centred over
which axes, and whether that would change any other parameter. No conversion is known by its name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from enjoyln_cli.graph.nodes import op_name
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.proof.flow import Absorbed, consumers, origin, outcomes
from enjoyln_cli.proof.pullback import Opaque, commutes_with_every_matrix

Stored = tuple[tuple[str, Axis], ...]


@dataclass(frozen=True, eq=False)
class Conversion:
    """Stored tensors that together become one or several parameters."""

    sources: dict[str, tuple[int, ...]]
    """The stored tensors by name, with their shapes."""
    targets: tuple[str, ...]
    run: Callable[..., tuple[torch.Tensor, ...]]
    """Computes the targets from the sources, both in order."""

    def stored(self, parameter: str, axis: Axis) -> Stored | Opaque:
        """The stored tensors to centre, each with its axis, so that ``parameter`` is centred.

        This is exact: every op of the graph commutes with centring (``f(P x) = P f(x)``), and no
        other target changes. Otherwise the result is ``Opaque`` with the reason. The ops of a
        layout commute with every matrix, so the same tensors are rotated to rotate the parameter.
        """
        placeholders, results = self._graph
        own = results[self.targets.index(parameter)]
        found = _sources(own, axis)
        if isinstance(found, Opaque):
            return Opaque(f"it is stored in another layout: {found.reason}")
        names = dict(zip(placeholders, self.sources, strict=True))
        for node, below in found:
            if not _only_seen_by(node, below, (own, axis)):
                return Opaque(f"it is stored in {names[node]}, together with other weights")
        return tuple((names[node], below) for node, below in dict.fromkeys(found))

    @cached_property
    def _graph(self) -> tuple[list[Node], Sequence[Node]]:
        """The graph's nodes of the sources, and the nodes of the targets."""
        with torch.no_grad():
            module = make_fx(self.run, pre_dispatch=True)(*_empty(self.sources.values()))
        nodes = list(module.graph.nodes)
        results: Any = nodes[-1].args[0]
        return [node for node in nodes if node.op == "placeholder"], results


def conversion(
    converter: Any,
    first: str,
    sources: dict[str, tuple[str, tuple[int, ...]]],
    model: Any,
    state: Mapping[str, torch.Tensor],
) -> Conversion | None:
    """The conversion of ``sources`` by a ``converter`` of transformers; ``first`` is its target.

    ``sources`` maps stored names, in the order of loading, to the pattern that each matches and to
    its shape. ``state`` is the state dict of ``model``. Returns ``None`` if the conversion fails
    (for example for missing tensors), or if its results do not have the shapes in ``state``.
    """

    def convert(*tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(converter)
        for (name, (pattern, _)), tensor in zip(sources.items(), tensors, strict=True):
            own.add_tensor(first, name, pattern, tensor)
        found = own.convert(first, model=model, config=model.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in found.items()}

    shapes = {name: shape for name, (_, shape) in sources.items()}
    try:
        made = convert(*_empty(shapes.values()))
    except Exception:  # a conversion may raise anything
        return None
    if any(name not in state or state[name].shape != t.shape for name, t in made.items()):
        return None
    return Conversion(shapes, tuple(made), lambda *tensors: tuple(convert(*tensors).values()))


def _empty(shapes: Any) -> Iterator[torch.Tensor]:
    return (torch.empty(shape, device="meta") for shape in shapes)


def _sources(node: Node, axis: Axis) -> list[tuple[Node, Axis]] | Opaque:
    """Follow the pull-back through every op, back to the stored tensors."""
    if node.op == "placeholder":
        return [(node, axis)]
    if node.op == "call_function" and not commutes_with_every_matrix(node, axis):
        return Opaque(f"{op_name(node)} in it does not commute with a matrix")
    found: list[tuple[Node, Axis]] = []
    pairs = origin(node, axis)
    for operand, below in () if isinstance(pairs, Opaque) else pairs:
        deeper = _sources(operand, below)
        if isinstance(deeper, Opaque):
            return deeper
        found += deeper
    return pairs if isinstance(pairs, Opaque) else found


def _only_seen_by(node: Node, axis: Axis, own: tuple[Node, Axis]) -> bool:
    """Whether a shift of the value only shifts the target ``own[0]`` along its axis ``own[1]``."""
    for consumer in consumers(node):
        if consumer.op == "output":
            if (node, axis) != own:
                return False
            continue
        for reader, _, found in outcomes(consumer, node, axis):
            if isinstance(found, Absorbed):
                continue
            if isinstance(found, Opaque) or not _only_seen_by(reader, found, own):
                return False
    return True
