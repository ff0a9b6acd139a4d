"""Rebuild the plan of a fold from the recipe that it wrote and its result's tensor shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.covered_calls import OTHER_CALLS, CoveredCalls
from enjoyln_cli.plan.plan import (
    Basis,
    Centring,
    Merge,
    Plan,
    Setting,
    TurnedTensor,
    UnmergedNorm,
    Verdict,
    Widening,
    Writer,
    size_settings,
)
from enjoyln_cli.recipe.expand import expand
from enjoyln_cli.recipe.model import (
    KEPT_BY_RECIPE,
    CentredTensor,
    Recipe,
    TurnedBasis,
    prefix_errors,
    sizes_by_name,
    suggest,
)
from enjoyln_cli.recipe.templates import Span, concrete, texts_in

Shapes = Mapping[str, Sequence[int]]


def to_plan(recipe: Recipe, shapes: Shapes, *, config: Any = None) -> Plan:
    """The plan of a fold, from the recipe that was written beside its result.

    ``shapes`` maps the names of the stored tensors to their shapes. The verdicts have no ``needs``
    and no ``path``. Raises ``RecipeError`` if the recipe has no record, or names tensors that are
    not stored.
    """
    with prefix_errors(recipe.where):
        return _plan(recipe, shapes, sizes_by_name(recipe, config))


def _plan(recipe: Recipe, shapes: Shapes, sizes: Mapping[str, Any]) -> Plan:
    if recipe.record is None or len(recipe.variants) != 1:
        raise RecipeError("has no record of one fold; pass the recipe written beside the result")
    variant = recipe.variants[0]
    found = expand(variant, recipe.record.layers)
    _require_stored((*found.widened.values(), *found.merged.values(), *variant.untied), shapes)
    widened = tuple(_widening(one, shapes) for one in found.widened.values())
    lines = [line for lines in found.writers.values() for line in lines]
    shapes = {**shapes, **dict(_narrower(widened, shapes))}
    merged = tuple(one for one in found.merged.values() if isinstance(one, Merge))
    for one in merged:
        _require_fit(one, shapes)
    return Plan(
        model_type=recipe.model_type,
        model_class=variant.model_class,
        classes=variant.classes,
        norms=tuple(map(_verdict, found.norms.values())),
        writers=tuple(_writer(line, shapes, sizes) for line in lines),
        ops=tuple(
            Centring(op.module, op.place, _axis(op.module, op.axis, None, sizes), op.reason)
            for op in found.ops.values()
        ),
        entry_inputs=variant.entry_inputs,
        unproven=variant.unproven,
        other_norms=tuple(recipe.record.other_norms.items()),
        outputs=variant.outputs,
        widened=widened,
        merged=merged,
        bases=tuple(_basis(one, shapes, sizes) for one in found.bases.values()),
        seed=int(recipe.options.get("seed", 0)),
        unmerged=tuple(one for one in found.merged.values() if isinstance(one, UnmergedNorm)),
        untied=tuple(replace(one, shape=_shape(one.stored, shapes)) for one in variant.untied),
        settings=(*size_settings(widened), *(Setting(n, v) for n, v in variant.settings.items())),
        covered=CoveredCalls(variant.calls) if OTHER_CALLS in variant.unproven else None,
    )


def _verdict(line: Verdict) -> Verdict:
    kept_silently = line.status == "kept" and not line.reason
    return replace(line, reason=KEPT_BY_RECIPE) if kept_silently else line


def _writer(line: CentredTensor, shapes: Shapes, sizes: Mapping[str, Any]) -> Writer:
    _require_stored(line, shapes)
    tensor, axis, shape = line.tensor, line.axis, _shape(line.tensor, shapes)
    if axis is None or not 0 <= axis.dim < len(shape):
        raise RecipeError(f"{tensor} has shape {shape}, so no dimension {axis and axis.dim}")
    over = _axis(tensor, axis, shape[axis.dim], sizes)
    held = _axis(line.parameter, line.held, None, sizes) if line.held else None
    return Writer(line.parameter, tensor, over, shape, held, line.scale)


def _basis(line: TurnedBasis, shapes: Shapes, sizes: Mapping[str, Any]) -> Basis:
    size = concrete(Span(0, line.size), None, sizes).size
    writers = (_writer(one, shapes, sizes) for one in line.tensors)
    tensors = tuple(TurnedTensor(**vars(one)) for one in writers)
    for one in tensors:
        if one.axis.size != size:
            raise RecipeError(f"{one.tensor}: {line.parameter} turns {size} features at a time")
    return Basis(line.parameter, line.kind, size, line.fixes_ones, tensors, line.norms, line.inputs)


def _axis(name: str, axis: Span, extent: int | None, sizes: Mapping[str, Any]) -> Axis:
    with prefix_errors(name):
        return concrete(axis, extent, sizes)


def _widening(line: Widening, shapes: Shapes) -> Widening:
    for part in line.parts:
        shape = shapes[part.tensor]
        if len(shape) <= part.dim or shape[part.dim] != line.to:
            raise RecipeError(
                f"{part.tensor} has shape {list(shape)}, but the recipe needs {line.to} elements "
                f"along dimension {part.dim}; the recipe belongs to another result"
            )
    return replace(line, features=_shape(line.second.tensor, shapes)[1 - line.second.dim])


def _narrower(widened: Iterable[Widening], shapes: Shapes) -> Iterator[tuple[str, Sequence[int]]]:
    """The shapes that the tensors of widened MLPs had before."""
    for one in widened:
        for part in one.parts:
            shape = list(_shape(part.tensor, shapes))
            shape[part.dim] = one.size
            yield part.tensor, tuple(shape)


def _require_fit(one: Merge, shapes: Shapes) -> None:
    """Raise ``RecipeError`` unless a merged norm fits the weights and biases of its readers."""
    size = _shape(one.weight or one.bias, shapes)
    for reader in one.readers:
        matrix = _shape(reader.weight.tensor, shapes)
        bias = _shape(reader.bias.tensor, shapes) if reader.bias else None
        fits = reader.dim < len(matrix) and size == (matrix[reader.dim],)
        others = matrix[: reader.dim] + matrix[reader.dim + 1 :]
        if not fits or bias not in (None, others):
            raise RecipeError(
                f"{one.norm} of shape {list(size)} is not read along dimension {reader.dim} "
                f"of {reader.weight.tensor}, of shape {list(matrix)}"
                + (f", with a bias of shape {list(bias)}" if bias is not None else "")
            )


def _require_stored(edits: object, shapes: Shapes) -> None:
    fields = ("tensor", "stored", "weight", "bias")
    for name in (text for field, text in texts_in(edits) if field in fields and text):
        if name not in shapes:
            raise RecipeError(f"no stored tensor is named {name}; {suggest(name, shapes)}")


def _shape(tensor: str, shapes: Shapes) -> tuple[int, ...]:
    return tuple(int(size) for size in shapes[tensor])
