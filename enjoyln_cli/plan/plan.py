"""The plan: which LayerNorms become RMSNorm, by which edits, and why the others do not.

To fold a LayerNorm is to replace it by an RMSNorm. Its input has to have zero mean, which is
achieved by centring parameters, or by an explicit centring operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from enjoyln_cli.plan.axis import Axis, Count
from enjoyln_cli.plan.covered_calls import CoveredCalls
from enjoyln_cli.plan.edited_tensors import (
    BakedNorm,
    CentredWeight,
    EditedTensor,
    NamedParameter,
    RotatedTensor,
    StreamScale,
)
from enjoyln_cli.plan.mean_units import Widening
from enjoyln_cli.plan.option_field import InRange
from enjoyln_cli.plan.orthogonal_matrices import GivenMatrix, Rotation
from enjoyln_cli.plan.schema import NOT_STORED

Status = Literal["in_weights", "with_subtraction", "stays_layernorm"]
Place = Literal["output", "input"]


NOT_ASKED = "no norm was to become RMSNorm"
"""The reason of every norm that stays because ``Options.fold`` is off."""
ASKED_TO_KEEP = "--keep-norms names it"
"""The reason of every norm that ``Options.keep_norms`` matches."""


@dataclass(frozen=True)
class MeanSubtraction:
    """An explicit centring operation, attached to a module and applied in each of its calls."""

    module: str
    place: Place
    axis: Axis
    """Axis of the module's output (or first input); ``axis.dim`` counts from the end, e.g. -1."""
    reason: str = ""
    """Why the value cannot be centred in the weights."""


@dataclass(frozen=True)
class Verdict:
    """Whether one LayerNorm module is folded, and how, or why not."""

    norm: str
    """Path of the module in the model class of the plan, e.g. ``transformer.h.0.ln_1``."""
    status: Status
    """A norm becomes RMSNorm by edits of weights alone (``in_weights``), or also needs mean
    subtractions that are added to the model (``with_subtraction``, at ``subtractions``)."""
    subtractions: tuple[str, ...] = ()
    """Modules with explicit centrings that this norm's zero-mean input depends on."""
    needs: tuple[str, ...] = ()
    """Parameters (``CentredWeight.parameter``) that this norm's zero-mean input depends on."""
    mlps: tuple[str, ...] = ()
    """Widened MLPs (``Widening.second.parameter``) that subtract a mean for this norm."""
    reason: str = ""
    """For a kept norm: the obstacle; norms with the same obstacle have the same text."""
    culprit: str = ""
    """For a kept norm: the module path or tensor that prevents folding."""
    path: tuple[str, ...] = ()
    """For a kept norm: module paths and ops from the norm's input up to the culprit."""


@dataclass(frozen=True)
class NextLinear:
    """A linear layer that reads a norm with weight g and bias v: ``W <- W diag(g)``,
    ``b <- b + W v``."""

    weight: NamedParameter
    dim: Annotated[int, InRange(0, 7)]
    """The dimension of inputs in the stored weight: 0 for a Conv1D."""
    bias: NamedParameter | None = None
    """The bias of the layer, if the norm's bias moves into it."""
    module_dim: Annotated[int, InRange(0, 7)] | None = None
    """The dimension of inputs in the parameter, if the class uses another layout than the file.
    Such a parameter, as a stack of experts, has a reader for each of its stored tensors."""
    outer: Count = 1
    """How often the norm's features follow each other along ``dim``, as with several tokens."""
    inner: Count = 1
    """How many elements belong to one feature each time."""
    outputs: tuple[int, int] | None = None
    """The range of outputs of the weight and the bias that read the norm, without its end, if the
    others read another value, as in the packed weight of a cross attention."""


@dataclass(frozen=True)
class NormFusion:
    """A norm whose weight or bias moves into all of its readers, which are linear layers."""

    norm: str
    """Path of the module; its parameters are ``norm.weight`` and ``norm.bias``."""
    weight: str = ""
    """Name of the norm's stored weight; empty if the weight does not move."""
    bias: str = ""
    """Name of the norm's stored bias, which becomes zeros; empty if there is none."""
    readers: tuple[NextLinear, ...] = ()
    offset: float = 0.0
    """1 if the class multiplies by ``1 + weight``. A moved weight becomes ``1 - offset``."""
    divided: str = ""
    """Name of the norm's stored bias if that stays in the norm, divided by the moved weight:
    ``W (g x + v) = (W diag(g)) (x + v / g)``. No element of ``g`` may be zero."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if nothing moves, or what moves does not fit together."""
        if not self.weight and not self.bias:
            raise ValueError("it has neither weight nor bias, so nothing is fused; write keep")
        if self.divided and (self.bias or not self.weight):
            raise ValueError("divided is a bias that stays while the weight moves; remove bias")
        if self.offset not in (0, 1) or (self.offset and not self.weight):
            raise ValueError("offset is 0, or 1 beside a weight")
        if any(bool(reader.bias) != bool(self.bias) for reader in self.readers):
            raise ValueError("a reader has a bias if and only if the norm's bias is fused")

    @property
    def names(self) -> tuple[NamedParameter, ...]:
        """All parameters that change."""
        stored = (("weight", self.weight), ("bias", self.bias or self.divided))
        names = [NamedParameter(f"{self.norm}.{name}", tensor) for name, tensor in stored if tensor]
        for reader in self.readers:
            names += [reader.weight] if self.weight else []
            names += [reader.bias] if reader.bias else []
        return tuple(names)


RotationKind = Literal["residual", "heads", "values"]
"""A residual stream, heads that are normed one by one, or the values of an attention."""


@dataclass(frozen=True)
class RotationGroup:
    """Values that can only be rotated together.

    It is rotated if it has no ``reason``. See ``rotation.rotation_groups``.
    """

    name: str
    """Its first parameter; a group that stays may have none."""
    kind: RotationKind
    size: int
    """How many features each matrix acts on: all of the stream, or of one head."""
    fixes_ones: bool
    """Whether a LayerNorm is inside, so that the matrix has to fix the vector of ones."""
    tensors: tuple[RotatedTensor, ...] = ()
    norms: tuple[str, ...] = ()
    """The norms inside whose weight has to be fused (see ``NormFusion``)."""
    inputs: tuple[str, ...] = ()
    """Optional inputs of ``forward`` (``inputs_embeds``) that have to be passed rotated."""
    outputs: tuple[str, ...] = ()
    """Output fields (``image_outputs.last_hidden_state``) that change if it is rotated."""
    reason: str = ""
    culprit: str = ""
    """The module path or parameter that prevents the rotation."""
    given: Annotated[GivenMatrix | None, NOT_STORED] = None
    """The matrix, if the user gave one."""
    online_rotation: Annotated[str, NOT_STORED] = ""
    """Path of the block whose first input is multiplied by the matrix, since nothing linear writes
    this stream. Only a live model or a program can do that; empty if it is not needed."""
    compressed: bool = False
    """Whether the last feature becomes the mean, which is zero, and is left out."""

    @property
    def is_rotated(self) -> bool:
        """Whether it can be rotated."""
        return not self.reason

    @property
    def why_not_compressed(self) -> str:
        """Why no feature can be left out, though the mean is zero; empty if one can."""
        if self.reason:
            where = self.culprit or self.name
            return f"{self.name} needs all of its features: {self.reason} (at {where})"
        for tensor in self.tensors:
            axis = tensor.module_axis or tensor.axis
            if axis.outer != 1 or axis.length != self.size or tensor.reads and tensor.writes:
                return f"{tensor.parameter} holds features of the stream beside others, or twice"
        return ""

    def rotation(self, seed: int) -> Rotation:
        """The matrix that the user gave, or the matrix for ``seed``."""
        matrix = (self.size, seed, self.name, self.fixes_ones, self.given)
        return Rotation(*matrix, mean_last=self.compressed)


@dataclass(frozen=True)
class UnfusedNorm:
    """A norm whose weight and bias cannot be fused into its readers."""

    norm: str
    reason: str
    """The obstacle; norms with the same obstacle have the same text."""
    culprit: str = ""
    """The module path or parameter that prevents the fusion."""


@dataclass(frozen=True)
class UntiedParameter:
    """A tied parameter that gets its own copy of the values."""

    parameter: str
    """Name in the model class of the plan, e.g. ``lm_head.weight``."""
    tensor: str = ""
    """Name that the copy is stored under; by default ``parameter``."""
    source: str = ""
    """The parameter that it was tied to."""
    stored: str = ""
    """Name of the stored tensor to copy; equal to ``tensor`` if a copy is stored already. By
    default ``source``."""
    shape: tuple[int, ...] = ()
    """The shape of both tensors."""

    def __post_init__(self) -> None:
        """Set the defaults. Raise ``ValueError`` without a ``source``."""
        if not self.source:
            raise ValueError("the key source is missing")
        object.__setattr__(self, "tensor", self.tensor or self.parameter)
        object.__setattr__(self, "stored", self.stored or self.source)


@dataclass(frozen=True)
class Setting:
    """An entry of ``config.json`` that has to change for the result to load."""

    name: str
    """A nested entry is named with dots: ``text_config.tie_word_embeddings``."""
    value: bool | int | float


def size_settings(widened: Iterable[Widening]) -> tuple[Setting, ...]:
    """The config entries that change because of wider MLPs."""
    return tuple(dict.fromkeys(Setting(mlp.attribute, mlp.to) for mlp in widened))


@dataclass(frozen=True)
class Plan:
    """The proven edits for one model. Modules and parameters are named as in ``model_class``."""

    model_type: str
    model_class: str
    classes: tuple[str, ...]
    """Classes for which the plan is proven, ``model_class`` among them."""
    norms: tuple[Verdict, ...]
    centred_weights: tuple[CentredWeight, ...]
    subtractions: tuple[MeanSubtraction, ...]
    entry_inputs: tuple[str, ...] = ()
    """Inputs of ``forward`` (``inputs_embeds``) that a folded model has to centre on entry."""
    unproven: tuple[str, ...] = ()
    """Optional inputs and parameters that no trace covers."""
    other_norms: tuple[tuple[str, int], ...] = ()
    """Classes of modules that are already RMSNorm, with the number of modules of each."""
    outputs: tuple[str, ...] = ()
    """Output fields, or patterns, that have to stay the same; empty means all fields.
    Outputs that a later call may take as inputs, such as a cache, always stay the same."""
    by_example: tuple[str, ...] = ()
    """Calls whose operations depend on values of the inputs; they are proven for inputs like the
    examples only."""
    widened: tuple[Widening, ...] = ()
    fused: tuple[NormFusion, ...] = ()
    unfused: tuple[UnfusedNorm, ...] = ()
    rotation_groups: tuple[RotationGroup, ...] = ()
    """With ``Options.rotate``: what is rotated, and what stays and why."""
    seed: int = 0
    """Chooses the matrices of ``rotation_groups``."""
    scaled: tuple[StreamScale, ...] = ()
    """Streams that are held at another scale, so that float16 does not overflow."""
    untied: tuple[UntiedParameter, ...] = ()
    settings: tuple[Setting, ...] = ()
    covered: CoveredCalls | None = None
    """The proven calls; ``None`` (transformers' own classes): all calls without an ``unproven``
    input."""
    training: bool = False
    """Whether the plan is proven for training mode, too."""
    dropout_rates: tuple[tuple[str, float], ...] = ()
    """The rates of dropout with which it is proven for training mode, by path and attribute."""
    compositions: Annotated[tuple[Mapping[str, Mapping[str, object]], ...], NOT_STORED] = field(
        default=(), compare=False, repr=False
    )
    """What the modules of the analysed model were, and what its calls made of them, if they replace
    some (see ``calls.composition``); empty for a plan that was read from a file."""

    @property
    def folded(self) -> tuple[Verdict, ...]:
        """The norms that become RMSNorm."""
        return tuple(v for v in self.norms if v.status != "stays_layernorm")

    @property
    def rotated(self) -> tuple[RotationGroup, ...]:
        """The rotation groups that are rotated."""
        return tuple(group for group in self.rotation_groups if group.is_rotated)

    @property
    def changes_weights(self) -> bool:
        """Whether a checkpoint can be written by it that differs from the original."""
        return bool(self.folded or self.rotated or self.scaled)

    @property
    def edited_tensors(self) -> tuple[EditedTensor, ...]:
        """The centred tensors, then the rotated tensors; a tensor may be in both."""
        return (
            *self.centred_weights,
            *(tensor for group in self.rotated for tensor in group.tensors),
        )

    @property
    def baked(self) -> Mapping[str, BakedNorm]:
        """The norms that are baked into embedding tables, by the name of the table's parameter."""
        return {table.parameter: table.baked for table in self.edited_tensors if table.baked}

    @property
    def kept(self) -> tuple[Verdict, ...]:
        """The norms that stay LayerNorm."""
        return tuple(v for v in self.norms if v.status == "stays_layernorm")
