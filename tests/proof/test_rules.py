"""What rules refuse, and why; which shifts are absorbed, passed on or seen.

``test_any_operands.py`` tests that accepted ops keep what the rules say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers its grouped product)
from random_ops import axes
from rounding import as_exact
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from enjoyln_cli.graph.nodes import packet, reads_no_values, shape_of
from enjoyln_cli.plan.axis import Axis, centre
from enjoyln_cli.proof.flow import Absorbed, _hides_values, push
from enjoyln_cli.proof.pullback import WRITTEN, Opaque, pull
from enjoyln_cli.proof.views import through_view

aten = torch.ops.aten


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64) + 0.5


X = values(2, 5, 12)
MASK = torch.tensor([[True], [False], [True], [True], [False]])
INDEX = torch.tensor([[0, 3], [1, 1]])
ROWS = torch.tensor([[True, False, True, False, False], [False, True, False, False, True]])
PICKED = torch.tensor([[[3], [0], [1]], [[1], [4], [1]]])
IMAGE = values(2, 6, 4, 4)
OFFSETS = torch.tensor([2, 2, 5], dtype=torch.int32)


def captured(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Node, list[Node]]:
    """The node that computes the result, and the placeholders; composite ops stay whole."""
    graph = make_fx(function, pre_dispatch=True)(*inputs).graph
    result = next(node for node in graph.nodes if node.op == "output").args[0]
    return result, [node for node in graph.nodes if node.op == "placeholder"]


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


def test_a_grouped_product_keeps_columns_in_single_precision() -> None:
    x, w = values(5, 8).float(), values(3, 8, 12).float()
    node, (_, weight) = captured(lambda x, w: torch._grouped_mm(x, w, OFFSETS), x, w)
    assert pull(node, Axis(1, 0, 1, 12, 1)) == ((weight, Axis(2, 0, 1, 12, 1)),)
    assert isinstance(pull(node, Axis(0, 0, 1, 5, 1)), Opaque)
    whole = Axis(1, 0, 1, 12, 1)
    result = torch._grouped_mm(x, centre(w, Axis(2, 0, 1, 12, 1)), OFFSETS)
    expected = centre(torch._grouped_mm(x, w, OFFSETS), whole)
    parts = zip(OFFSETS.diff(prepend=OFFSETS.new_zeros(1)), w.double(), strict=True)
    rows = x.double().split([int(size) for size, _ in parts])
    exact = torch.cat([rows @ one for rows, one in zip(rows, w.double(), strict=True)])
    assert as_exact(result, expected, centre(exact, whole))


def test_the_number_of_rows_depends_on_the_index_alone() -> None:
    graph = Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    rows = graph.call_function(aten.index.Tensor, (x, [mask]))
    graph.call_function(aten.sym_size.int, (rows, 0))
    assert reads_no_values(rows, x) and not reads_no_values(rows, mask)
    graph.call_function(aten.neg.default, (rows,))
    assert not reads_no_values(rows, x)


def test_a_copy_reads_only_the_shape_of_what_it_replaces() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    copy, same = (graph.call_function(aten.copy.default, (x, z)) for z in (y, x))
    assert reads_no_values(copy, x) and not reads_no_values(copy, y)
    assert not reads_no_values(same, x)


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


def pushed(function: Callable[..., Any], axis: Axis, *inputs: torch.Tensor) -> Any:
    """How the last op passes on a shift of the first input."""
    node, placeholders = captured(function, *inputs)
    return push(node, placeholders[0], axis)


def test_a_shift_is_absorbed_passed_or_seen() -> None:
    last = Axis(2, 0, 1, 12, 1)
    assert isinstance(pushed(lambda x: F.layer_norm(x, (12,)), last, X), Absorbed)
    assert isinstance(pushed(lambda x: F.layer_norm(x, (12,)), Axis(2, 0, 2, 6, 1), X), Opaque)
    groups, rows = Axis(1, 0, 3, 4, 1), values(5, 12)
    assert isinstance(pushed(lambda x: F.group_norm(x, 3), groups, rows), Absorbed)
    assert isinstance(pushed(lambda x: F.group_norm(x, 3), Axis(1, 0, 1, 12, 1), rows), Opaque)
    channels = Axis(1, 0, 1, 6, 1)
    assert isinstance(pushed(lambda x: F.group_norm(x, 1), channels, IMAGE), Opaque)
    assert isinstance(pushed(lambda x: x.softmax(-1), last, X), Absorbed)
    assert isinstance(pushed(lambda x: x.softmax(1), last, X), Opaque)
    assert isinstance(pushed(lambda x: x.softmax(-1), Axis(2, 0, 2, 6, 1), X), Opaque)
    assert isinstance(pushed(lambda x: x.softmax(-1), Axis(2, 0, 1, 6, 1), X), Opaque)
    scale, row = Axis(0, 0, 1, 12, 1), values(12)
    assert isinstance(pushed(lambda w, x: F.layer_norm(x, (12,), w), scale, row, X), Opaque)
    assert isinstance(pushed(lambda x: F.layer_norm(x, (12,), x), scale, row), Opaque)
    assert isinstance(pushed(lambda w, x: F.group_norm(x, 1, w), scale, row, X[0]), Opaque)
    assert isinstance(pushed(lambda x: x.mean(-1), last, X), Opaque)
    assert isinstance(pushed(lambda x: x[..., :4], Axis(2, 6, 1, 6, 1), X), Absorbed)
    assert pushed(lambda x: x[..., 6:], Axis(2, 6, 1, 6, 1), X) == Axis(2, 0, 1, 6, 1)
    assert pushed(lambda x: x.transpose(1, 2), last, X) == Axis(1, 0, 1, 12, 1)
    assert pushed(lambda x: x + x, last, X) == last
    assert isinstance(pushed(lambda x: x * x, last, X), Opaque)
    product = lambda x: torch.einsum("abc,abc->a", x, x)  # noqa: E731
    assert isinstance(pushed(product, Axis(0, 0, 1, 2, 1), X), Opaque)
    square = values(2, 3, 4, 4)
    attend = F.scaled_dot_product_attention
    rows = Axis(3, 0, 1, 4, 1)
    assert isinstance(pushed(lambda v, q: attend(q, v, v), rows, square, square + 1), Opaque)
    assert pushed(lambda v, q: attend(q, q, v), rows, square, square + 1) == rows


def test_a_spread_does_not_see_a_shift_of_all_that_it_is_over() -> None:
    last, ops = Axis(2, 0, 1, 12, 1), (torch.var, torch.std)
    for op in ops:
        assert isinstance(pushed(lambda x: op(x, -1), last, X), Absorbed)  # noqa: B023
        assert isinstance(pushed(lambda x: op(x, -1), Axis(2, 0, 2, 6, 1), X), Opaque)  # noqa: B023
        assert isinstance(pushed(lambda x: op(x, (1, 2)), last, X), Opaque)  # noqa: B023
        assert isinstance(pushed(lambda x: op(x), last, X), Opaque)  # noqa: B023
        assert isinstance(pushed(lambda x: op(x, 1), last, X), Opaque)  # noqa: B023


def test_values_of_fewer_dimensions_keep_their_features() -> None:
    attend, x = F.scaled_dot_product_attention, values(2, 3, 5, 4)
    v = values(5, 6)
    node, placeholders = captured(lambda x, v: attend(x, x, v), x, v)
    assert pull(node, Axis(3, 0, 1, 6, 1)) == ((placeholders[1], Axis(1, 0, 1, 6, 1)),)


def test_a_mask_of_more_dimensions_broadcasts_what_it_fills() -> None:
    x, mask = values(6, 6), torch.tensor([True, False]).view(2, 1, 1)
    node, placeholders = captured(lambda x, mask: x.masked_fill(mask, 0), x, mask)
    for dim in (1, 2):
        assert pull(node, Axis(dim, 0, 1, 6, 1)) == ((placeholders[0], Axis(dim - 1, 0, 1, 6, 1)),)


def test_features_behind_indices_apart_keep_their_place() -> None:
    picked = lambda x: x[torch.tensor([0, 1]), :, torch.tensor([3, 4])]  # noqa: E731
    node, (x,) = captured(picked, values(2, 5, 6, 12))
    assert shape_of(node) == (2, 5, 12)
    assert pull(node, Axis(2, 0, 1, 12, 1)) == ((x, Axis(3, 0, 1, 12, 1)),)
    assert isinstance(pull(node, Axis(1, 0, 1, 5, 1)), Opaque)


def test_an_equation_for_other_ranks_is_no_ground_for_a_rule() -> None:
    node, _ = captured(lambda x, w: torch.einsum("btd,ds->bts", x, w), X, values(12, 6))
    assert not isinstance(pull(node, Axis(2, 0, 1, 6, 1)), Opaque)
    for equation in ("btxd,ds->bts", "btd->bts", "btd,ds->bs", "td,ds->bts"):
        node.args = (equation, node.args[1])
        assert isinstance(pull(node, Axis(2, 0, 1, 6, 1)), Opaque), equation


def test_an_empty_tensor_adds_nothing_to_a_concatenation() -> None:
    """Caches begin with an empty tensor of shape ``(0,)``."""
    join = lambda x, e: torch.cat((e, x), 1)  # noqa: E731
    node, (x, empty) = captured(join, X, values(0))
    assert pull(node, Axis(2, 0, 1, 12, 1)) == ((x, Axis(2, 0, 1, 12, 1)),)
    assert pull(node, Axis(1, 0, 1, 5, 1)) == ((x, Axis(1, 0, 1, 5, 1)),)
    assert push(node, x, Axis(2, 0, 1, 12, 1)) == Axis(2, 0, 1, 12, 1)


def test_padding_by_nothing_is_no_padding() -> None:
    last = Axis(2, 0, 1, 12, 1)
    assert pushed(lambda x: aten.pad(x, [0, 0, 1, 2]), last, X) == last
    assert isinstance(pushed(lambda x: aten.pad(x, [0, 1, 1, 2]), last, X), Opaque)


def test_an_axis_through_a_view_covers_the_same_groups() -> None:
    shapes = [(2, 12), (24,), (2, 3, 4), (6, 4), (2, 2, 6), (4, 6), (1, 24), (2, 12, 1), (3, 2, 4)]
    carried = 0
    for shape in shapes:
        x = torch.arange(24).reshape(shape)
        for into in shapes:
            for axis in axes(shape):
                found = through_view(axis, shape, into)
                if found is None:
                    continue
                carried += 1
                assert groups(x, axis) == groups(x.reshape(into), found), (shape, into, axis)
    assert carried > 100


def groups(x: torch.Tensor, axis: Axis) -> set[frozenset[int]]:
    """The sets of elements over which the axis takes its means."""
    moved, span = x.movedim(axis.dim, -1), axis.size * axis.inner
    step = axis.step or span
    return {
        frozenset(row.tolist())
        for block in range(axis.start, axis.start + axis.outer * step, step)
        for first in range(block, block + axis.inner)
        for row in moved[..., first : block + span : axis.inner].reshape(-1, axis.size)
    }


def test_arguments_that_tracing_never_names_give_no_rule() -> None:
    node, _ = captured(lambda x: x.sum(1), X)
    assert not isinstance(pull(node, Axis(1, 0, 1, 12, 1)), Opaque)
    node.args, node.kwargs = node.args[:1], {"dim": [1]}
    assert isinstance(pull(node, Axis(1, 0, 1, 12, 1)), Opaque)
    node.args, node.kwargs = (), {}
    assert isinstance(pull(node, Axis(1, 0, 1, 12, 1)), Opaque)
    node, (x,) = captured(lambda x: x.sum(1, keepdim=True), X)
    assert pull(node, Axis(2, 0, 1, 12, 1)) == ((x, Axis(2, 0, 1, 12, 1)),)
    node.args, node.kwargs = node.args[:2], {"keepdim": True}
    assert isinstance(pull(node, Axis(2, 0, 1, 12, 1)), Opaque)


def test_a_bias_of_a_grouped_product_is_refused() -> None:
    x, w = values(5, 8).float(), values(3, 8, 12).float()
    node, (_, weight) = captured(lambda x, w: torch._grouped_mm(x, w, OFFSETS), x, w)
    node.args = (*node.args[:3], weight)
    found = pull(node, Axis(1, 0, 1, 12, 1))
    assert isinstance(found, Opaque) and "bias" in found.reason


def test_a_general_convolution_is_a_linear_layer() -> None:
    call = lambda x, w: aten.convolution(x, w, None, [1], [0], [1], False, [0], 1)  # noqa: E731
    node, (_, weight) = captured(call, values(2, 4, 7), values(6, 4, 3))
    assert pull(node, Axis(1, 0, 1, 6, 1)) == ((weight, Axis(0, 0, 1, 6, 1)),)


def test_what_no_op_computes_has_a_mean_of_its_own() -> None:
    last = Axis(2, 0, 1, 12, 1)
    node, (x,) = captured(lambda x: x + x, X)
    (output,) = node.users
    found = pull(x, last)
    assert isinstance(found, Opaque) and "an input or a constant" in found.reason
    for reader, reason in ((output, "the model returns it"), (x, "placeholder reads it")):
        seen = push(reader, node, last)
        assert isinstance(seen, Opaque) and seen.reason == reason


def test_memory_that_is_written_proves_nothing() -> None:
    last = Axis(2, 0, 1, 12, 1)
    node, (x,) = captured(lambda x: F.layer_norm(x, (12,)), X)
    assert pull(node, last) == () and isinstance(push(node, x, last), Absorbed)
    node.meta["written"] = True
    for found in (pull(node, last), push(node, x, last)):
        assert isinstance(found, Opaque) and found.reason == WRITTEN


@pytest.mark.parametrize("axis", [Axis(3, 0, 1, 12, 1), Axis(2, 0, 1, 13, 1), Axis(2, 6, 1, 12, 1)])
def test_a_mean_over_elements_that_are_not_there(axis: Axis) -> None:
    node, _ = captured(lambda x: x + x, X)
    assert isinstance(pull(node, axis), Opaque)


def test_a_shape_that_values_decide_is_no_ground_for_a_rule() -> None:
    """Rows are gathered from a tensor whose number of rows a mask decides."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            rows = x[mask]
            torch._check(rows.shape[0] >= 3)
            return rows.gather(0, torch.zeros(3, 1, dtype=torch.int64).expand(3, 12))

    graph = torch.export.export(Model(), (values(5, 12), torch.arange(5) < 4)).graph
    (node,) = (n for n in graph.nodes if packet(n) is aten.gather)
    assert shape_of(node) == (3, 12) and shape_of(node.args[0]) is None
    found = pull(node, Axis(1, 0, 1, 12, 1))
    assert isinstance(found, Opaque) and "depends on values" in found.reason
    norm = graph.call_function(aten.layer_norm.default, (node.args[0], [12]))
    norm.meta["val"] = node.meta["val"]
    assert isinstance(push(norm, node.args[0], Axis(1, 0, 1, 12, 1)), Opaque)


@pytest.mark.parametrize(
    ("op", "result", "hides"),
    [
        (aten.add.Tensor, torch.ones(2, 3), True),
        (aten.add_.Tensor, torch.ones(2, 3), False),  # it writes to its first operand
        (aten.nonzero.default, torch.ones(2, 3), False),  # its shape tells values
        (aten.item.default, 1.5, False),
        (aten.split.Tensor, [torch.ones(1, 3), torch.ones(1, 3)], False),
        (torch.add, torch.ones(2, 3), False),
    ],
)
def test_an_op_hides_values_if_it_only_returns_a_tensor(op: Any, result: Any, hides: bool) -> None:
    graph = Graph()
    node = graph.call_function(op, (graph.placeholder("x"), 1))
    node.meta["val"] = result
    assert _hides_values(node) is hides
