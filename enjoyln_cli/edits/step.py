"""``Step``: one change of a tensor, and what files, memory, adapters and verification ask of it.

A new kind of step is one class, with an example in ``tests/edits/test_steps.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

ReadTensor = Callable[[str], torch.Tensor]
"""Returns a tensor by its name, as it is before all edits."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """By default a step needs no other tensor, and computes each element from itself."""

    order: ClassVar[int]
    """The steps of an edit apply in this order."""
    is_linear_map: ClassVar[bool] = False
    """Whether it multiplies by a matrix that depends on no other tensor."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The other tensors whose values it uses."""
        return ()

    @property
    def mixed_dims(self) -> tuple[int, ...]:
        """The dimensions along which it computes an element from several, or appends some."""
        return ()

    @property
    def front(self) -> int | None:
        """The dimension that has to come first in memory for the step to be fast, if any."""
        return None

    @property
    def terms(self) -> int:
        """How many numbers it adds to each element, besides numbers along the mixed dimensions."""
        return 0

    def loaded(self, read: ReadTensor) -> Self:
        """The step with the values that it uses, in float64."""
        return self

    def sized(self, read: ReadTensor) -> Self:
        """The loaded step with what ``bound`` needs besides."""
        return self

    def unusable(self, read: ReadTensor) -> str:
        """The tensor from which a loaded step takes what is not finite, and why; or nothing."""
        return ""

    def fitted(self, name: str, shape: Shape, shapes: Mapping[str, Shape]) -> Shape:
        """The shape of the tensor ``name`` of ``shape`` after the step.

        Raises ``ValueError`` if the step does not fit it, or the tensors that it needs, which have
        these ``shapes``.
        """
        return self.shape(shape)

    def shape(self, shape: Shape) -> Shape:
        """The shape of a tensor of ``shape`` after the step."""
        return shape

    def unit(self, shape: Shape) -> Mapping[int, int]:
        """How many slices belong together, in dimensions that cannot be cut anywhere."""
        return {}

    def part(self, dim: int, first: int, count: int) -> tuple[Self, ...]:
        """The loaded step for ``count`` slices along ``dim``; empty if it does not concern them."""
        return (self,)

    def along(self, dim: int, to: int) -> Step | None:
        """The part of it that acts along ``dim``, as a step along ``to``.

        It is for a factor of the tensor: of ``W = B A``, ``B`` has the rows and ``A`` the columns.
        """
        return None

    def apply(self, x: torch.Tensor, in_place: bool = False) -> torch.Tensor:
        """The float64 tensor after the loaded step; with ``in_place``, ``x`` may change."""
        raise NotImplementedError

    def computed(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of the result ``x`` that the step computes."""
        return (x,)

    def bound(self, size: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """How large the terms are that each element of the result is a sum of.

        ``size`` bounds the elements before the step, and ``x`` is the tensor before all steps. A
        step that mixes a dimension leaves the norm along it as it is.
        """
        return size

    def largest(self, largest: float) -> float:
        """A bound for absolute values after the step, if values before are at most ``largest``."""
        return largest
