"""Algorithm 1 of Enjoy-LN as printed, for comparison. It is unsound and never used to convert.

It marks the output of every general linear layer and every LN as ``centered`` (line 17). Scalar
factors keep the mark, and a sum has it if all its terms have it (line 7). The algorithm does not
check whether an LN's weight and bias give its output a mean, or who else reads the weights.
"""

from __future__ import annotations

from torch.fx import Node

from enjoyln_cli.graph.nodes import SPLITS, aten, is_part, packet, shape_of
from enjoyln_cli.proof.rules import VIEWS
from enjoyln_cli.trace.trace import Trace

_LINEAR = {
    aten.linear, aten.addmm, aten.mm, aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution,
    aten.embedding, aten.layer_norm,
}  # fmt: skip
_SCALAR = {
    aten.clone, aten.contiguous, aten.dropout, aten.to, aten._to_copy, aten.neg, aten.alias,
    aten.transpose, aten.permute, aten.expand, aten.slice, aten.select, *VIEWS,
}  # fmt: skip


def algorithm_1(trace: Trace) -> tuple[str, ...]:
    """Paths of the LNs that the printed algorithm calls foldable."""
    centred: dict[Node, bool] = {}
    foldable: dict[str, bool] = {}
    for node in trace.graph.nodes:
        terms = [a for a in node.all_input_nodes if shape_of(a) or is_part(a)]
        marks = [centred.get(t, t in trace.parameters) for t in terms]
        if packet(node) is aten.layer_norm:
            path = trace.module_of(node)
            foldable[path] = foldable.get(path, True) and marks[0]
        if packet(node) in _LINEAR:
            centred[node] = True
        elif packet(node) in (aten.add, aten.sub, aten.cat):
            centred[node] = bool(marks) and all(marks)
        elif packet(node) in _SCALAR | SPLITS or is_part(node):
            centred[node] = bool(marks) and marks[0]
        elif packet(node) in (aten.mul, aten.div):
            centred[node] = len(terms) == 1 and marks[0]
    return tuple(path for path, folds in foldable.items() if folds)
