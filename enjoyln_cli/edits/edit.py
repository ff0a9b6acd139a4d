"""``Edit``: the steps by which a plan changes one tensor.

All steps are computed in float64, with one rounding at the end. ``planned_edits`` derives the edits
from a plan, and ``rewrite.edit_pieces`` applies them to a tensor of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from enjoyln_cli.edits.new_values import Append
from enjoyln_cli.edits.step import ReadTensor, Shape, Step


@dataclass(frozen=True)
class Edit:
    """How one tensor changes. Steps that mix a dimension come last."""

    steps: tuple[Step, ...] = ()
    """Sorted by their ``order``."""
    source: str = ""
    """The tensor that the edit starts from; empty for the stored tensor of the same name."""

    def __post_init__(self) -> None:
        """Sort the steps."""
        object.__setattr__(self, "steps", tuple(sorted(self.steps, key=lambda step: step.order)))

    @property
    def needs(self) -> tuple[str, ...]:
        """The other tensors whose values the edit uses."""
        return tuple(name for step in self.steps for name in step.needs)

    @property
    def mixed_dims(self) -> frozenset[int]:
        """The dimensions along which the edit computes an element from several, or appends some."""
        return frozenset(dim for step in self.steps for dim in step.mixed_dims)

    @property
    def is_linear_map(self) -> bool:
        """Whether all steps multiply by matrices that depend on no other tensor."""
        return all(step.is_linear_map for step in self.steps)

    @property
    def append(self) -> Append | None:
        """The last step, if it appends slices."""
        last = self.steps[-1] if self.steps else None
        return last if isinstance(last, Append) else None

    @property
    def without_append(self) -> Edit:
        """The edit of the slices that the tensor has already."""
        return self if self.append is None else replace(self, steps=self.steps[:-1])

    def adding(self, *steps: Step) -> Edit:
        """The edit with further steps, each of them once."""
        return replace(self, steps=tuple(dict.fromkeys((*self.steps, *steps))))

    def only(self, keep: Callable[[Step], bool]) -> Edit:
        """The edit with the steps for which ``keep`` is true."""
        return replace(self, steps=tuple(filter(keep, self.steps)))

    def shape(self, shape: Shape) -> Shape:
        """The shape that a tensor of ``shape`` has after the edit."""
        for step in self.steps:
            shape = step.shape(shape)
        return shape

    def require_fit(self, name: str, shapes: Mapping[str, Shape]) -> None:
        """Raise ``ValueError`` unless the edit fits the tensor ``name`` and finds its tensors.

        ``shapes`` are the shapes of all tensors before the edits.
        """
        source = self.source or name
        for needed in (source, *self.needs):
            if needed not in shapes:
                what = "" if needed == name else f" for {name}"
                raise ValueError(f"{needed}: there is no such tensor, but the plan needs it{what}")
        shape = shapes[source]
        for step in self.steps:
            shape = step.fitted(name, shape, shapes)

    def loaded(self, read: ReadTensor) -> Edit:
        """The edit with the values that it uses; ``read`` returns other tensors by name."""
        return replace(self, steps=tuple(step.loaded(read) for step in self.steps))

    def sized(self, read: ReadTensor) -> Edit:
        """The loaded edit with what ``bound`` needs besides."""
        return replace(self, steps=tuple(step.sized(read) for step in self.steps))

    def along(self, dim: int, to: int) -> Edit:
        """The part of it that acts along ``dim``, as an edit along ``to``."""
        steps = (step.along(dim, to) for step in self.steps)
        return Edit(tuple(step for step in steps if step is not None))

    def part(self, dim: int, first: int, count: int) -> Edit:
        """The loaded edit of ``count`` slices along ``dim``."""
        parts = (part for step in self.steps for part in step.part(dim, first, count))
        return replace(self, steps=tuple(parts))

    def apply(self, x: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
        """The float64 tensor ``x`` after the loaded edit, in float64.

        With ``in_place``, ``x`` may change, and the result is not always contiguous.
        """
        for step in self.steps:
            x = step.apply(x, in_place)
        return x if in_place else x.contiguous()

    def bound(self, x: torch.Tensor) -> torch.Tensor:
        """How large the terms are that each element of the result is a sum of.

        Of a loaded and sized edit. Centring and rotating leave the norm along an axis as it is, so
        the norm along all dimensions that are mixed bounds what each of their elements is made of.
        """
        size = x.abs()
        for step in self.steps:
            size = step.bound(size, x)
        size = torch.where(size.isfinite(), size, 0.0)
        if self.mixed_dims:
            size = size.norm(dim=tuple(self.mixed_dims), keepdim=True).expand(x.shape)
        return size

    def largest(self, largest: float) -> float:
        """A bound for the result of the loaded edit, for elements up to ``largest``."""
        for step in self.steps:
            largest = step.largest(largest)
        return largest
