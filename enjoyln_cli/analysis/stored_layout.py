"""Where the mean of a parameter lies on disk, when the class holds it in another layout.

transformers builds some parameters from other stored tensors: it stacks experts, splits or joins
projections, exchanges dimensions. Each conversion is run on tensors without data and recorded as a
graph of aten ops, so that the pull-back table answers here too: which stored tensors, centred over
which axes, make up the centred parameter, and does any other parameter see that? No conversion is
known here by its name.
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

from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.proof.flow import Absorbed, consumers, origin, outcomes
from enjoyln_cli.proof.pullback import Opaque

Stored = tuple[tuple[str, Axis], ...]


@dataclass(frozen=True, eq=False)
class Conversion:
    """Stored tensors that together become one or several parameters."""

    sources: dict[str, tuple[int, ...]]
    """The stored tensors by name, with their shapes."""
    targets: tuple[str, ...]
    run: Callable[..., tuple[torch.Tensor, ...]]
    """From the sources, in order, to the targets, in order."""

    def stored(self, parameter: str, axis: Axis) -> Stored | Opaque:
        """The stored tensors, each with its axis, whose centring is that of ``parameter``.

        Every op of the graph commutes with centring (``f(P x) = P f(x)``), and no other target
        changes.
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
        """The nodes of the sources and of the targets."""
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
    """What ``converter`` (of transformers) makes of the ``sources`` for the parameter ``first``.

    ``sources`` maps stored names, in the order of loading, to the pattern that each matches and to
    its shape; ``state`` is the state dict of ``model``. ``None`` where the conversion fails, as
    where tensors are missing, or does not give what the model holds.
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
    except Exception:  # an op of transformers, which raises what it likes
        return None
    if any(name not in state or state[name].shape != t.shape for name, t in made.items()):
        return None
    return Conversion(shapes, tuple(made), lambda *tensors: tuple(convert(*tensors).values()))


def _empty(shapes: Any) -> Iterator[torch.Tensor]:
    return (torch.empty(shape, device="meta") for shape in shapes)


def _sources(node: Node, axis: Axis) -> list[tuple[Node, Axis]] | Opaque:
    """The pull-back through every op, down to the stored tensors."""
    if node.op == "placeholder":
        return [(node, axis)]
    found: list[tuple[Node, Axis]] = []
    pairs = origin(node, axis)
    for operand, below in () if isinstance(pairs, Opaque) else pairs:
        deeper = _sources(operand, below)
        if isinstance(deeper, Opaque):
            return deeper
        found += deeper
    return pairs if isinstance(pairs, Opaque) else found


def _only_seen_by(node: Node, axis: Axis, own: tuple[Node, Axis]) -> bool:
    """Whether a shift of the value changes one target alone, and that by a shift over its axis."""
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
