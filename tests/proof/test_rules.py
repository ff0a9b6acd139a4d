"""What rules refuse, and why.

``test_any_operands.py`` tests that accepted ops keep what the rules say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captured_ops import captured, values
from torch.fx import Node

from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.proof.pullback import Opaque, pull

aten = torch.ops.aten


X = values(2, 5, 12)
MASK = torch.tensor([[True], [False], [True], [True], [False]])
INDEX = torch.tensor([[0, 3], [1, 1]])
ROWS = torch.tensor([[True, False, True, False, False], [False, True, False, False, True]])
PICKED = torch.tensor([[[3], [0], [1]], [[1], [4], [1]]])
IMAGE = values(2, 6, 4, 4)


def sources(node: Node, axis: Axis) -> list[tuple[Node, Axis]] | Opaque:
    """Pull back through every op down to the placeholders."""
    if node.op == "placeholder":
        return [(node, axis)]
    pairs = pull(node, axis)
    if isinstance(pairs, Opaque):
        return pairs
    result = []
    for operand, below in pairs:
        deeper = sources(operand, below)
        if isinstance(deeper, Opaque):
            return deeper
        result += deeper
    return result


REFUSED: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], Axis, str]] = {
    "a cast to integers": (lambda x: x.to(torch.int32), (X,), Axis(2, 0, 1, 12, 1), "cast"),
    "dropout in training": (
        lambda x: aten.dropout(x, 0.5, True), (X,), Axis(2, 0, 1, 12, 1), "dropout",
    ),
    "a constant added": (lambda x: x + 1.0, (X,), Axis(2, 0, 1, 12, 1), "constant"),
    "a broadcast addend": (
        lambda x, y: x + y, (X, values(2, 5, 1)), Axis(2, 0, 1, 12, 1), "the same for all",
    ),
    "two varying factors": (lambda x: x * x, (X,), Axis(2, 0, 1, 12, 1), "product"),
    "a varying divisor": (lambda x, y: x / y, (X, values(12)), Axis(2, 0, 1, 12, 1), "division"),
    "a varying choice": (
        lambda x, y: torch.where(MASK, x, y), (X, X), Axis(1, 0, 1, 5, 1), "choice",
    ),
    "a fill that is not zero": (
        lambda x: x.masked_fill(MASK, -1.0), (X,), Axis(2, 0, 1, 12, 1), "mask",
    ),
    "features side by side": (
        lambda x, y: torch.cat((x, y), -1), (X, X), Axis(2, 0, 1, 24, 1), "concatenation",
    ),
    "a grouped convolution": (
        lambda x, w: F.conv1d(x, w, groups=2), (values(2, 4, 7), values(6, 2, 3)),
        Axis(1, 0, 1, 6, 1), "grouped",
    ),
    "two factors that carry the letter": (
        lambda x, y: torch.einsum("btd,btd->btd", x, y), (X, X), Axis(2, 0, 1, 12, 1), "factors",
    ),
    "a letter that is summed over": (
        lambda x, y: torch.einsum("btd,bsd->bts", x, y), (X, X), Axis(0, 0, 1, 2, 1), "factors",
    ),
    "a diagonal": (
        lambda x: torch.einsum("ii->i", x), (values(6, 6),), Axis(0, 0, 1, 6, 1), "factors",
    ),
    "an equation without a result": (
        lambda x, y: torch.einsum("td,ds", x, y), (values(5, 12), values(12, 6)),
        Axis(0, 0, 1, 6, 1), "equation",
    ),
    "a mask of features": (
        lambda x: x[ROWS.T], (values(5, 2, 12),), Axis(0, 0, 1, 4, 1), "index along the features",
    ),
    "features picked by two indices": (
        lambda x: x[torch.tensor([0, 1]), :, torch.tensor([3, 4])], (X,),
        Axis(1, 0, 1, 5, 1), "index along the features",
    ),
    "features that are put in": (
        lambda x, y: aten.index_put(x, [None, None, INDEX[0]], y), (X, values(2)),
        Axis(2, 0, 1, 12, 1), "index along the features",
    ),
    "tokens put in by a mask": (
        lambda x, y: aten.index_put(x, [ROWS], y), (X, values(4, 12)),
        Axis(1, 0, 1, 5, 1), "index along the features",
    ),
    "one number for all features": (
        lambda x, y: aten.index_put(x, [INDEX[0] % 2], y), (X, values(2, 5, 1)),
        Axis(2, 0, 1, 12, 1), "a single value",
    ),
    "features added to some": (
        lambda x, y: x.index_add(-1, INDEX[0], y), (X, values(2, 5, 2)),
        Axis(2, 0, 1, 12, 1), "index_add along the features",
    ),
    "an index of its own for every feature": (
        lambda x, i: x.gather(1, i), (X, PICKED.expand(2, 3, 12) * 1),
        Axis(2, 0, 1, 12, 1), "index",
    ),
    "elements repeated one by one": (
        lambda x: aten.repeat_interleave.self_int(x, 3, 2), (X,), Axis(2, 0, 1, 36, 1), "repeated",
    ),
    "windows along the features": (
        lambda x: x.unfold(2, 4, 2), (X,), Axis(3, 0, 1, 4, 1), "windows along the features",
    ),
    "every other feature": (
        lambda x: x[..., ::2], (X,), Axis(2, 0, 1, 6, 1), "a strided slice of the features",
    ),
    "one feature": (lambda x: x + x, (X,), Axis(2, 0, 1, 1, 1), "a single element"),
    "a copy of another shape": (
        lambda x, y: aten.copy(x, y), (X, values(12)), Axis(2, 0, 1, 12, 1), "another shape",
    ),
    "a mask of its own for every feature": (
        lambda x, y: x.masked_scatter(y > 0, y), (X, X), Axis(2, 0, 1, 12, 1), "mask",
    ),
    "rows of another length": (
        lambda x, y: x.masked_scatter(MASK.expand(2, 5, 12), y), (X, values(12, 6)),
        Axis(2, 0, 1, 12, 1), "rows",
    ),
    "pooled features": (
        lambda x: aten.avg_pool2d(x, [2, 2]), (IMAGE,), Axis(3, 0, 1, 2, 1), "avg_pool2d",
    ),
    "an affine norm": (
        lambda x, w: F.layer_norm(x, (12,), w), (X, values(12)), Axis(2, 0, 1, 12, 1), "LayerNorm",
    ),
    "tokens of a linear layer": (
        lambda x, w: F.linear(x, w), (X, values(6, 12)), Axis(1, 0, 1, 5, 1), "tokens",
    ),
    "a bias of its own for every token": (
        lambda x, w, b: F.linear(x, w, b), (values(6, 4), values(6, 4), values(6, 6)),
        Axis(1, 0, 1, 6, 1), "vector",
    ),
    "a padding of features": (
        lambda x: aten.pad(x, [1, 1], "replicate"), (values(2, 6, 5),),
        Axis(2, 0, 1, 7, 1), "padding along the features",
    ),
    "a padding of tokens by a number": (
        lambda x: aten.pad(x, [0, 0, 1, 1], "constant", 1.0), (X,),
        Axis(2, 0, 1, 12, 1), "a nonzero number",
    ),
    "a reshape that splits groups": (
        lambda x, y: aten.reshape_as(x, y), (X, values(2, 60)), Axis(1, 0, 1, 60, 1), "with other",
    ),
    "ends that are mixed by feature": (
        lambda x, y, w: torch.lerp(x, y, w), (X, X, values(12)),
        Axis(2, 0, 1, 12, 1), "a weight between two values",
    ),
    "one end that has no features": (
        lambda x, y: torch.lerp(x, y, 0.3), (X, values(5, 1)), Axis(2, 0, 1, 12, 1), "the same",
    ),
    "a number in some rows": (
        lambda x: x.scatter(1, PICKED.expand(2, 3, 12), 0.5), (X,), Axis(2, 0, 1, 12, 1), "numbers",
    ),
    "some features replaced": (
        lambda x, y: torch.slice_scatter(x, y, 2, 3, 7), (X, values(2, 5, 4)),
        Axis(2, 0, 1, 12, 1), "a part of the features",
    ),
    "groups that lie across two parts": (
        lambda x, y: torch.cat((x, y), -1), (X, values(2, 5, 6)), Axis(2, 0, 2, 9, 1), "mixes",
    ),
    "elements taken of all": (
        lambda x: torch.take_along_dim(x, INDEX), (X,), Axis(0, 0, 1, 4, 1), "all elements",
    ),
    "the maximum of several rows": (
        lambda w: aten.embedding_bag(w, INDEX.view(-1), torch.tensor([0, 2]), False, 2)[0] + 0,
        (values(5, 12),), Axis(1, 0, 1, 12, 1), "maximum",
    ),
    "interpolated features": (
        lambda x: aten.upsample_linear1d(x, [7], False), (values(2, 6, 4),),
        Axis(2, 0, 1, 7, 1), "upsample_linear1d",
    ),
    "the bits as another floating dtype": (
        lambda x: x.view(torch.bfloat16), (X.half(),), Axis(2, 0, 1, 12, 1), "bits",
    ),
    "a rounded division": (
        lambda x: torch.div(x, 3.0, rounding_mode="floor"), (X,), Axis(2, 0, 1, 12, 1), "rounded",
    ),
    "an expanded feature": (
        lambda x: x.expand(2, 5, 12), (values(2, 5, 1),), Axis(2, 0, 1, 12, 1), "repeated",
    ),
    "features side by side again": (
        lambda x: x.repeat(1, 1, 2), (X,), Axis(2, 0, 1, 24, 1), "repeated",
    ),
    "a repetition in front": (
        lambda x: x.repeat(3, 1, 1), (values(3, 12),), Axis(0, 0, 1, 3, 1), "repeated",
    ),
    "groups with gaps that lie across two parts": (
        lambda x, y: torch.cat((x, y), -1), (X, X), Axis(2, 0, 4, 3, 1, 6), "mixes",
    ),
    "a row that is put in for several": (
        lambda x, y: aten.index_put(x, [INDEX[0]], y), (values(6, 6, 6), values(6)),
        Axis(1, 0, 1, 6, 1), "a single value",
    ),
    "one token that is gathered for all": (
        lambda x, i: x.gather(1, i.expand(2, 5, 12)), (X, PICKED[:, :1]),
        Axis(1, 0, 1, 5, 1), "not the same",
    ),
    "some features that are gathered": (
        lambda x, i: x.gather(1, i.expand(2, 3, 8)), (X, PICKED), Axis(2, 0, 1, 8, 1), "a part",
    ),
    "tokens that are added to one token": (
        lambda x, i, y: x.scatter_add(1, i.expand(2, 5, 12), y), (X, PICKED[:, :1], X + 1),
        Axis(1, 0, 1, 5, 1), "not the same",
    ),
    "rows that multiply other rows": (
        lambda x, i, y: x.scatter(1, i.expand(2, 3, 12), y, reduce="multiply"),
        (X, PICKED, values(2, 3, 12)), Axis(2, 0, 1, 12, 1), "single features",
    ),
    "a linear layer with a vector": (
        lambda x, w: F.linear(x, w), (values(5, 12), values(12)), Axis(0, 0, 1, 5, 1), "a matrix",
    ),
    "a product with a vector": (
        lambda x, v: x @ v, (X, values(12)), Axis(1, 0, 1, 5, 1), "the ranks",
    ),
    "a term that is added to all features": (
        torch.addmm, (values(5, 1), values(5, 12), values(12, 6)), Axis(1, 0, 1, 6, 1), "added",
    ),
    "a batched product of groups": (
        lambda x, w: torch._grouped_mm(x, w), (values(2, 4, 8).float(), values(2, 8, 16).float()),
        Axis(1, 0, 1, 4, 1), "another dimension",
    ),
    "a transposed convolution in groups": (
        lambda x, w: F.conv_transpose1d(x, w, groups=2), (values(2, 4, 7), values(4, 3, 3)),
        Axis(1, 0, 1, 6, 1), "grouped",
    ),
    "a convolution that may be transposed, and is": (
        lambda x, w: aten.convolution(x, w, None, [1], [0], [1], True, [0], 1),
        (values(2, 4, 7), values(4, 4, 3)), Axis(1, 0, 1, 4, 1), "along the features",
    ),
    "tokens that a LayerNorm keeps apart": (
        lambda x: F.layer_norm(x, (12,)), (X,), Axis(1, 0, 1, 5, 1), "other elements",
    ),
    "a row that is repeated by a mask": (
        lambda x, y: x.masked_scatter(MASK.expand(2, 5, 12), y), (values(12), X),
        Axis(2, 0, 1, 12, 1), "shapes for which",
    ),
    "elements repeated in one row": (
        lambda x: aten.repeat_interleave.self_int(x, 3), (values(12),),
        Axis(0, 0, 1, 36, 1), "repeated",
    ),
    "an op without a rule": (lambda x: torch.tanh(x), (X,), Axis(2, 0, 1, 12, 1), "tanh"),
    "a view that splits groups": (
        lambda x: x.view(2, 5, 3, 4).transpose(2, 3).reshape(2, 5, 12), (X,),
        Axis(2, 0, 1, 12, 1), "other dimensions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str) -> None:
    function, inputs, axis, reason = REFUSED[name]
    node, _ = captured(function, *inputs)
    found = sources(node, axis)
    assert isinstance(found, Opaque)
    assert reason in found.reason
