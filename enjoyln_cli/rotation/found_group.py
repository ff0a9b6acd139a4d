"""A rotation group that was found: values that rotate together, and what writes and reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from enjoyln_cli.graph.nodes import aten, op_name, packet, readers_of
from enjoyln_cli.proof.flow import Value
from enjoyln_cli.proof.min_cut import Parameter
from enjoyln_cli.rotation.tensor_uses import TensorUses


@dataclass(frozen=True)
class NormGain:
    """The weight of a norm, which multiplies features that are to be rotated."""

    module: str
    """Path of the norm module."""
    weight: str
    """The first of the weight's tied names."""
    bias: str | None
    offset: float
    """1 if the norm multiplies by ``1 + weight``."""


@dataclass(frozen=True)
class LayerObstacle:
    """What keeps a rotation group from being rotated, or a norm from being fused."""

    reason: str
    culprit: str
    """The module path or parameter."""


@dataclass(eq=False, kw_only=True)
class FoundGroup:
    """One rotation group: what has to be rotated, and the first obstacle if any."""

    size: int
    carries_values: bool
    """Whether it was found at the values of an attention, and not at the input of a norm."""
    parameters: dict[Parameter, TensorUses] = field(default_factory=dict)
    """What has to be rotated, and whether it writes or reads the rotation group."""
    gains: dict[NormGain, dict[tuple[int, Node], None]] = field(default_factory=dict)
    """For each norm with a weight: the ops that multiply by it, with the index of the trace."""
    fused: dict[Node, None] = field(default_factory=dict)
    """Ops that become the identity, since weights do the same (see ``Flow.identities``)."""
    fixes_ones: bool = False
    inputs: dict[str, None] = field(default_factory=dict)
    """Optional inputs of the model that have to be rotated, such as ``inputs_embeds``."""
    outputs: dict[str, None] = field(default_factory=dict)
    """Output fields that change with the rotation group."""
    obstacle: LayerObstacle | None = None
    values: set[Value] = field(default_factory=set)
    """All values that are rotated."""
    online_rotation: str = ""
    """Path of the block whose first input is multiplied by the matrix; empty if no op is needed."""


def writers_in(group: FoundGroup) -> list[Parameter]:
    """The parameters that write a rotation group, without the biases of its norms."""
    biases = {gain.bias for gain in group.gains}
    return [p for p, uses in group.parameters.items() if uses.writes and p.name not in biases]


def other_reader(
    parameter: str, group: FoundGroup, gain: NormGain, nodes: Sequence[tuple[int, Node]]
) -> str:
    """The op besides the products of ``gain`` that reads one of its parameters; empty if none does.

    ``nodes`` are the parameter's nodes in all traces.
    """
    products = {node for _, node in group.gains[gain]}
    waiting = [node for _, node in nodes]
    while waiting:
        for reader in readers_of(waiting.pop()):
            if reader in products or reader.meta.get("unread"):
                continue
            plus_one = packet(reader) is aten.add and 1 in reader.args and parameter == gain.weight
            if packet(reader) not in (aten.to, aten._to_copy, aten.alias) and not plus_one:
                return op_name(reader)
            waiting.append(reader)
    return ""
