"""In-place writes: replace writes that nothing else can see, and mark values that others change.

After an in-place write, a node of the graph no longer stands for one value: a reader after the
write gets other numbers than a reader before. Ignoring this gave an error of 15.8 %. So the proof
never follows values that are marked as written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node

from enjoyln_cli.graph.nodes import DROPOUTS, argument, packet

aten = torch.ops.aten


def mutating_ops(graph: Graph) -> list[Node]:
    """The nodes that write to one of their operands."""
    harmless = {torch.ops.aten.detach_.default}
    return [
        node
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and node.target not in harmless
    ]


_FRESH = {
    aten.add, aten.addmm, aten.baddbmm, aten.bmm, aten.cat, aten.conv1d, aten.conv2d, aten.div,
    aten.embedding, aten.gelu, aten.layer_norm, aten.linear, aten.log_softmax, aten.matmul,
    aten.mm, aten.mul, aten.pad, aten.scaled_dot_product_attention, aten.softmax, aten.sub,
}  # fmt: skip
"""Ops whose result never shares memory with an operand, although the schemas of some do not say."""

_PUTS = {
    aten.copy, aten.fill, aten.index_add, aten.index_copy, aten.index_put, aten.masked_fill,
    aten.masked_scatter, aten.scatter, aten.scatter_add, aten.zero,
}  # fmt: skip
"""Ops that return a tensor with other values in some places; each also has an in-place form."""
_SCATTERS: dict[Any, Any] = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
}
"""For an op that selects a part of a tensor, the op that returns the tensor with another part."""
_COPIES = {aten.copy_, aten.index_add_, aten.index_copy_, aten.index_put_, aten.scatter_}
"""In-place ops that copy values, so that what they write does not share memory with the source."""


def replace_private_writes(graph: Graph) -> None:
    """Replace ``x.add_(y)`` by ``x.add(y)`` if nothing else sees the memory of ``x`` afterwards.

    That holds if ``x`` has its own memory, or shares it only with a value that nothing but ``x``
    reads, and if all other readers of the memory come before the write. (Nodes that read ``x``
    after the write refer to its result.) A write to a part of such a value, ``x[:, 1:] = y``,
    becomes an op that returns the whole with another part.
    """
    writes = mutating_ops(graph)
    if writes:
        _drop_idle_dropout(graph)
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in writes:
        plain = _plain(node.target)
        written: Any = node.args[0] if node.args else None
        if plain is None or not isinstance(written, Node):
            continue
        if not all(_is_done(user, written, position, node) for user in written.users):
            continue
        if _owns_memory(written):
            node.target = plain
        elif written.target in _SCATTERS and _is_private_part(written, node, position):
            node.target = plain
            _put_back(written, node, position)


@cache
def _plain(target: Any) -> Any:
    """The op that returns in new memory what ``target`` writes to its first argument.

    ``None`` if there is none, or if ``target`` may do anything else.
    """
    packet_of = getattr(aten, target.overloadpacket.__name__.removesuffix("_"), None)
    plain = getattr(packet_of, target._overloadname, None)
    if plain is None or plain is target or not _returns_new(plain):
        return None
    written = [a.name for a in target._schema.arguments if a.alias_info and a.alias_info.is_write]
    known = torch.Tag.pointwise in plain.tags or packet_of in _FRESH | _PUTS
    return plain if known and written == [target._schema.arguments[0].name] else None


def _takes_no_memory(user: Node, value: Node) -> bool:
    """Whether the result of ``user`` shares no memory with ``value``, its operand."""
    copies = packet(user) in _COPIES and user.args[0] is not value
    return _is_fresh(user) or copies


def _is_done(user: Node, value: Node, position: Mapping[Node, int], write: Node) -> bool:
    """Whether a reader of ``value`` comes before a write, and all readers of its memory do."""
    if user is write:
        return True
    if position[user] > position[write]:
        return False
    return _takes_no_memory(user, value) or (
        user.target in _SCATTERS and all(_is_done(u, user, position, write) for u in user.users)
    )


def _is_private_part(part: Node, write: Node, position: Mapping[Node, int]) -> bool:
    """Whether only later readers of the whole, and readers of ``write``, see a write to a part."""
    whole: Any = part.args[0]
    before = [u for u in whole.users if u is not part and position[u] < position[write]]
    return (
        all(_is_done(user, whole, position, write) for user in before)
        and all(_takes_no_memory(user, write) for user in write.users)
        and _owns_memory(whole)
    )


def _put_back(part: Node, new: Node, position: dict[Node, int]) -> None:
    """Let all later readers of a tensor read it with ``new`` in place of ``part``."""
    graph = part.graph
    whole: Any = part.args[0]
    later = [user for user in whole.users if position[user] > position[new]]
    with graph.inserting_after(new):
        arguments = (whole, new, *part.args[1:])
        changed = graph.call_function(_SCATTERS[part.target], arguments, dict(part.kwargs))
    changed.meta |= {"val": whole.meta["val"], "nn_module_stack": new.meta["nn_module_stack"]}
    position[changed] = position[new]
    for user in later:
        user.replace_input_with(whole, changed)


def _owns_memory(node: Node) -> bool:
    """Whether nothing else reads the memory of a value: it is new, or a new value's only view."""
    while not _is_fresh(node):
        operands = node.all_input_nodes
        target = node.target
        is_op = isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable
        if not is_op or len(operands) != 1 or set(operands[0].users) != {node}:
            return False
        (node,) = operands
    return True


def _drop_idle_dropout(graph: Graph) -> None:
    """Remove dropout in eval mode, which returns its input tensor itself."""
    for node in list(graph.nodes):
        idle = packet(node) in DROPOUTS and argument(node, 2, "train") is False
        if idle and all(user.op != "output" for user in node.users):
            node.replace_all_uses_with(argument(node, 0, "input"))
            graph.erase_node(node)


_SCALINGS: dict[Any, Any] = {
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.mul_.Scalar: aten.mul.Scalar,
    aten.div_.Tensor: aten.div.Tensor,
    aten.div_.Scalar: aten.div.Scalar,
}
"""Products and quotients in place, without rounding to integers."""


def replace_scalings(graph: Graph, parameters: Iterable[Node]) -> list[Node]:
    """Replace ``w.mul_(2)`` by ``w.mul(2)``, and return the parameters that were multiplied so.

    A parameter that a call only multiplies or divides by numbers, as RWKV does at its first call,
    can still be centred: (P W) / c = P (W / c), so after any number of calls it is the original's
    present value, centred. None of ``parameters`` may share its memory with another tensor. A
    parameter that is written in another way, or of which there are views, is left as it is.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    scaled = []
    for parameter in parameters:
        value, writes = parameter, []
        while write := next((user for user in value.users if _is_scaling(user, value)), None):
            writes.append(write)
            before = [user for user in value.users if user is not write]
            if not all(_is_fresh(user) and position[user] < position[write] for user in before):
                break
            value = write
        readers = [user for user in value.users if user.op != "output"]
        if writes and value is writes[-1] and all(map(_is_fresh, readers)):
            for write in writes:
                write.target = _SCALINGS[write.target]
            scaled.append(parameter)
    return scaled


def _is_scaling(node: Node, written: Node) -> bool:
    """Whether the node multiplies or divides ``written`` by a number, in place."""
    return (
        node.target in _SCALINGS
        and node.args[0] is written
        and type(node.args[1]) in (int, float)
        and not node.kwargs
    )


def _is_fresh(node: Node) -> bool:
    """Whether the result of the op has new memory."""
    return isinstance(node.target, torch._ops.OpOverload) and _returns_new(node.target)


@cache
def _returns_new(target: Any) -> bool:
    """Whether an op writes nothing, and returns new memory.

    The schema tells, except for composite ops and for views with "unsafe" in their name.
    """
    if target._schema.is_mutable:
        return False
    if target.overloadpacket in _FRESH:
        return True
    composed = torch._C._dispatch_has_kernel_for_dispatch_key(
        target.name(), "CompositeImplicitAutograd"
    )
    shares = any(result.alias_info is not None for result in target._schema.returns)
    return not composed and not shares and "unsafe" not in target.name()


def mark_written(graph: Graph, together: Sequence[Node] = ()) -> None:
    """Set ``meta["written"]`` on every value that may share memory with a value written in place.

    The nodes in ``together`` may share memory with each other from the start.
    """
    for node in _written(graph, together):
        node.meta["written"] = True


def _written(graph: Graph, together: Sequence[Node] = ()) -> list[Node]:
    """The values that may share memory with a value that is written in place.

    The result of an op is assumed to share memory with all its operands, unless it is fresh, or the
    op is known to copy.
    """
    group: dict[Node, Node] = {}

    def first(node: Node) -> Node:
        while group.get(node, node) is not node:
            node = group[node]
        return node

    for node in together[1:]:
        group[first(node)] = first(together[0])
    for node in graph.nodes:
        if node.op == "call_function" and not _is_fresh(node):
            for operand in _shared(node):
                group[first(operand)] = first(node)
    written = {first(node) for node in mutating_ops(graph)}
    return [node for node in graph.nodes if first(node) in written]


def _shared(node: Node) -> Sequence[Node]:
    """The operands that a result, which is not fresh, may share its memory with."""
    copied_to = node.args[0] if packet(node) in _COPIES and _plain(node.target) else None
    return [copied_to] if isinstance(copied_to, Node) else node.all_input_nodes
