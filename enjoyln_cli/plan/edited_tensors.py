"""The stored tensors that a plan edits, and the parameters that they hold, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.option_field import InRange

MOST_POWERS = 126
"""The largest power of two that a tensor is multiplied by, which every dtype but float16 holds."""


@dataclass(frozen=True)
class NamedParameter:
    """A parameter that is stored once, in the layout that the class uses."""

    parameter: str
    """Name in the model class of the plan."""
    tensor: str = ""
    """Name of the stored tensor; by default ``parameter``."""

    def __post_init__(self) -> None:
        """Set the default of ``tensor``."""
        object.__setattr__(self, "tensor", self.tensor or self.parameter)


@dataclass(frozen=True)
class BakedNorm:
    """The norm behind an embedding table that takes its place: see ``edits.baked_rows``."""

    weight: NamedParameter
    """The norm's weight, which becomes one number."""
    bias: NamedParameter
    """The norm's bias, which becomes zeros."""
    eps: float

    def __post_init__(self) -> None:
        """Raise ``ValueError`` without a positive ``eps``, which scales the rows."""
        if not self.eps > 0:
            raise ValueError(f"eps is {self.eps}, but must be above 0")


@dataclass(frozen=True)
class EditedTensor:
    """A stored tensor that holds a parameter, or a part of it, and the axis of an edit."""

    parameter: str
    """Name in the model class of the plan, e.g. ``transformer.h.0.attn.c_proj.weight``."""
    axis: Axis
    """Axis of the stored tensor: ``Axis(1, 0, 1, d, 1)`` for a Conv1D weight."""
    shape: tuple[int, ...] = ()
    """Shape of the stored tensor; empty where only the parameter matters."""
    tensor: str = ""
    """Name of the stored tensor, by default ``parameter``; a parameter stored under several names
    has an entry for each."""
    module_axis: Axis | None = None
    """Axis of the parameter, if the class uses another layout than the file."""
    scale: NamedParameter | None = None
    """A vector (LayerScale) that is fused in along ``axis.dim`` first, into all writers of a layer
    or none, and then set to ones."""
    baked: BakedNorm | None = None
    """The norm that is baked into this table: ``axis`` is the last axis of the norm's result."""

    def __post_init__(self) -> None:
        """Set the default of ``tensor``."""
        object.__setattr__(self, "tensor", self.tensor or self.parameter)


@dataclass(frozen=True)
class CentredWeight(EditedTensor):
    """A parameter whose values are centred: ``W <- P W`` over ``axis``, or ``P diag(scale) W``."""


@dataclass(frozen=True)
class RotatedTensor(EditedTensor):
    """A stored tensor that is multiplied by the matrix of a group: ``W <- Q W`` over ``axis``.

    Tensors that write the group are rotated over their outputs, tensors that read it over their
    inputs. For an orthogonal ``Q`` both are the same product. Every group of the axis is rotated by
    the same matrix.
    """

    writes: bool = True
    """Whether the features are computed from it."""
    reads: bool = False
    """Whether it is multiplied by the features. A tied tensor may do both."""


@dataclass(frozen=True)
class GrownParameter(NamedParameter):
    """A parameter of a widened MLP; entries for the new hidden units are appended to it."""

    dim: Annotated[int, InRange(0, 1)] = 0
    """The dimension of hidden units."""


@dataclass(frozen=True)
class ScaledTensor(NamedParameter):
    """A stored tensor that is multiplied by a power of two: ``2^power (offset + W) - offset``."""

    power: Annotated[int, InRange(-MOST_POWERS, MOST_POWERS)] = 0
    offset: float = 0.0
    """A number that the class adds to the weight before it multiplies by it."""


@dataclass(frozen=True)
class ScaledEps:
    """The eps of a norm whose input is held at another scale."""

    norm: str
    """Path of the module."""
    eps: float
    """The norm's eps before."""
    power: Annotated[int, InRange(-2 * MOST_POWERS, 2 * MOST_POWERS)]
    """It is multiplied by ``2^power``, wherever that can be stored."""

    @property
    def value(self) -> float:
        """The norm's eps after."""
        return self.eps * 2.0**self.power


@dataclass(frozen=True)
class StreamScale:
    """A residual stream that is held at ``2^-shift`` of its scale: ``scaling.scaled_streams``."""

    name: str
    """Its first parameter."""
    shift: Annotated[int, InRange(0, MOST_POWERS)]
    tensors: tuple[ScaledTensor, ...] = ()
    norms: tuple[ScaledEps, ...] = ()
