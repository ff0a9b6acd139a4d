"""What every kind of step promises: its parts, its bounds, its shape and its action on factors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from edit_cases import IN, NEW, OUT, ROWS, tensors

from enjoyln_cli.edits.baked_rows import BakingStep, EncodeRows, FillLevel, NormRows
from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.linear_steps import (
    AddProduct,
    CentreAxis,
    LayerScale,
    RotateAxis,
    Scale,
    TimesPower,
)
from enjoyln_cli.edits.new_values import Append, Fill
from enjoyln_cli.edits.step import Step
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.orthogonal_matrices import Rotation
from enjoyln_cli.rewrite.edit_pieces import divide

NORM = ("w", "g", "v", 1e-5)
EXAMPLES: list[tuple[str, Step]] = [
    ("w", Scale("g", 1)),
    ("w", Scale("h", 1, 1.0, outer=2)),
    ("w", Scale("g", 1, outputs=(3, 20))),
    ("v", Scale("g", 0, divides=True)),
    ("e", LayerScale("s", 1)),
    ("b", AddProduct("w", 1, "v")),
    ("b", AddProduct("t", 0, "h", inner=2, outputs=(5, 30))),
    ("w", CentreAxis(OUT)),
    ("e", CentreAxis(Axis(2, 2, 2, 6, 2))),
    ("w", RotateAxis(OUT, Rotation(ROWS, 0, "w", fixes_ones=True))),
    ("t", RotateAxis(Axis(1, 4, 3, 8, 1, 11), Rotation(8, 2, "t", fixes_ones=False))),
    ("w", NormRows(*NORM)),
    ("w", EncodeRows(*NORM)),
    ("g", FillLevel(*NORM)),
    ("e", Append(1, NEW)),
    ("w", Append(1, NEW)),
    ("v", Fill(0.5)),
    ("w", TimesPower(-3)),
    ("v", TimesPower(2, 1.0)),
]
NAMES = [f"{type(step).__name__} {number}" for number, (_, step) in enumerate(EXAMPLES)]
each = pytest.mark.parametrize(("name", "step"), EXAMPLES, ids=NAMES)


def kinds(base: type[Step] = Step) -> Iterator[type[Step]]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_every_kind_has_an_example() -> None:
    assert {*kinds()} - {BakingStep} == {type(step) for _, step in EXAMPLES}
    assert len({kind.order for kind in kinds() if hasattr(kind, "order")}) == 10


def of(name: str, step: Step) -> tuple[torch.Tensor, Edit]:
    """A tensor for a step, and the edit that is this step alone, loaded."""
    held = tensors(torch.float64)
    edit = Edit((step,)).loaded(held.__getitem__).sized(held.__getitem__)
    return held[name], edit


@each
def test_the_shape_is_known_before(name: str, step: Step) -> None:
    x, edit = of(name, step)
    shapes = {name: tuple(x.shape) for name, x in tensors(torch.float64).items()}
    edit.require_fit(name, shapes)
    before = x.clone()
    assert tuple(edit.apply(x).shape) == edit.shape(shapes[name])
    assert torch.equal(x, before)
    torch.testing.assert_close(edit.apply(x.clone(), in_place=True), edit.apply(x))


@each
def test_parts_are_edited_alone(name: str, step: Step) -> None:
    x, edit = of(name, step)
    if edit.append:
        assert edit.without_append.steps == ()
        return
    whole = edit.apply(x)
    for dim, first, count in divide(edit, tuple(x.shape), 40):
        part = edit.part(dim, first, count).apply(x.narrow(dim, first, count))
        torch.testing.assert_close(part, whole.narrow(dim, first, count), rtol=0, atol=1e-14)


@each
def test_the_bounds_hold(name: str, step: Step) -> None:
    x, edit = of(name, step)
    result = edit.apply(x)
    assert float(result.abs().max()) <= edit.largest(float(x.abs().max())) * (1 + 1e-15)
    if not edit.append and not isinstance(step, Fill):  # what is filled in has no rounding
        assert (result.abs() <= edit.bound(x) * (1 + 1e-12)).all()


@each
def test_what_it_computes_is_what_changes(name: str, step: Step) -> None:
    x, edit = of(name, step)
    if edit.append:
        return
    result = edit.apply(x)
    for part in (part for one in edit.steps for part in one.computed(result)):
        part.fill_(torch.nan)
    kept = ~result.isnan()
    assert torch.equal(result[kept], x[kept])


@each
def test_a_factor_is_edited_alike(name: str, step: Step) -> None:
    """Of ``W = B A``, rows of ``B`` are edited as rows of ``W``, or columns of ``A`` as columns."""
    if name not in ("w", "t") or step.needs[:1] == ("w",) or getattr(step, "outputs", None):
        return
    generator = torch.Generator().manual_seed(1)
    shape = (ROWS, IN) if name == "w" else (IN, ROWS)
    b, a = (torch.randn(s, generator=generator).double() for s in ((shape[0], 4), (4, shape[1])))
    _, edit = of(name, step)
    read = tensors(torch.float64).__getitem__
    rows, columns = (edit.along(dim, dim).loaded(read) for dim in (0, 1))
    found = rows.apply(b) @ columns.apply(a)
    exact = edit.without_append.apply(b @ a)
    if edit.append:  # a factor adds nothing to new slices
        exact = torch.cat([exact, torch.zeros_like(found[:, exact.shape[1] :])], 1)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)


def test_steps_are_sorted_and_each_is_there_once() -> None:
    scale, centre, rotation = EXAMPLES[0][1], EXAMPLES[7][1], EXAMPLES[9][1]
    edit = Edit((rotation, centre)).adding(scale, centre)
    assert edit.steps == (scale, centre, rotation)
    assert edit.needs == ("g",) and edit.mixed_dims == {0}
    assert not edit.is_linear_map and Edit((rotation, centre)).is_linear_map
    assert Edit((CentreAxis(Axis(1, 0, 1, IN, 1)),)).mixed_dims == {1}
