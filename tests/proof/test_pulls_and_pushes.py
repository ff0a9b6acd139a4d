"""Single ops: where a zero mean comes from, and who sees a shift."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captured_ops import captured, values
from random_calls import axes
from rounding import as_exact
from torch.fx import Graph

from enjoyln_cli.graph.nodes import packet, reads_no_values, shape_of
from enjoyln_cli.plan.axis import Axis, centre
from enjoyln_cli.proof.flow import Absorbed, _hides_values, push
from enjoyln_cli.proof.pullback import WRITTEN, Opaque, pull
from enjoyln_cli.proof.views import through_view

aten = torch.ops.aten
X, IMAGE = values(2, 5, 12), values(2, 6, 4, 4)
OFFSETS = torch.tensor([2, 2, 5], dtype=torch.int32)


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
