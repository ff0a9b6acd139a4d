"""Which LayerNorms fold, by which edits, and why the others stay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.covered_calls import CoveredCalls

Status = Literal["static", "centred", "kept"]
Place = Literal["output", "input"]


@dataclass(frozen=True)
class Options:
    """What a user allows a plan to change besides centring. Each is exact; none is the default."""

    widen_mlp: bool = False
    """Hidden units may be added to an MLP, which subtract the mean of its residual input."""
    widen_to: int = 8
    """The widened size is a multiple of this."""
    merge: Literal["bias", "affine"] | None = None
    """What of a folded norm may move into the linears that read it."""
    untie: bool = False
    """Tied parameters may become several, each with its own copy of the values."""

    def __post_init__(self) -> None:
        """Raises ``EnjoyLNError`` for what is no such option."""
        if self.merge not in (None, "bias", "affine"):
            raise EnjoyLNError(f"merge is {self.merge!r}, but must be None, 'bias' or 'affine'")
        if self.widen_to < 1:
            raise EnjoyLNError(f"widen_to is {self.widen_to}, but must be at least 1")


PLAIN = Options()


@dataclass(frozen=True)
class Scale:
    """A vector that is merged into the parameters of a layer before it, and becomes ones."""

    parameter: str
    """Name in the model class of the plan, e.g. ``encoder.layer.0.lambda_1``."""
    tensor: str
    """Name of the stored tensor, the only one of this parameter."""


@dataclass(frozen=True)
class Writer:
    """A parameter whose values are centred: ``W <- P W`` over ``axis``, or ``P diag(scale) W``."""

    parameter: str
    """Name in the model class of the plan, e.g. ``transformer.h.0.attn.c_proj.weight``."""
    tensor: str
    """Name of the stored tensor; a parameter stored under several names has a writer for each."""
    axis: Axis
    """Over the stored tensor: ``Axis(1, 0, 1, d, 1)`` for a Conv1D weight."""
    shape: tuple[int, ...]
    """Of the stored tensor."""
    held: Axis | None = None
    """Over the parameter, where the class holds it in another layout than it is stored in."""
    scale: Scale | None = None
    """Multiplied in before, along ``axis.dim``; merged into all of its writers or into none."""


@dataclass(frozen=True)
class Centring:
    """An explicit centring operation, carried by a module and acting on each of its calls."""

    module: str
    place: Place
    axis: Axis
    """Over the module's output (or first input); ``axis.dim`` counts from the end: -1."""
    reason: str
    """Why the value cannot be centred in the weights."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of one LayerNorm module."""

    norm: str
    """Path of the module in the model class of the plan, e.g. ``transformer.h.0.ln_1``."""
    status: Status
    """``static``: folded in the weights alone; ``centred``: folded with the help of ``ops``."""
    ops: tuple[str, ...] = ()
    """Modules of the explicit centrings that this norm's zero mean rests on."""
    needs: tuple[str, ...] = ()
    """Parameters of the writers (``Writer.parameter``) that this norm's zero mean rests on."""
    mlps: tuple[str, ...] = ()
    """MLPs (``Widening.second.parameter``) that subtract a mean for it."""
    reason: str = ""
    """For a kept norm: the obstacle, in words that norms with the same obstacle share."""
    culprit: str = ""
    """For a kept norm: the module path or tensor that forbids it."""
    path: tuple[str, ...] = ()
    """For a kept norm: module paths and ops from the norm's input up to the culprit."""


@dataclass(frozen=True)
class GrownParameter:
    """A parameter with an entry for each hidden unit, which gets more of them at its end."""

    parameter: str
    """Name in the model class of the plan, e.g. ``encoder.layer.0.output.dense.weight``."""
    tensor: str
    """Name of the stored tensor, the only one of this parameter."""
    dim: int
    """The dimension of hidden units."""


@dataclass(frozen=True)
class Widening:
    """An MLP that gets more hidden units: those of ``units``, and then units of zeros."""

    first: GrownParameter
    """The weight of the layer that computes the hidden units."""
    bias: GrownParameter | None
    """Of that layer."""
    second: GrownParameter
    """The weight of the layer that reads them."""
    size: int
    """How many hidden units there were, which is the index of the first new one."""
    to: int
    """How many there are."""
    features: int
    """Of what the MLP reads and writes."""
    attribute: str
    """The config's count of hidden units, with dots where it is nested; see ``Plan.settings``."""
    subtracts: bool
    """Whether the new units subtract the mean of what is read; otherwise all of them are zeros."""

    @property
    def parts(self) -> tuple[GrownParameter, ...]:
        """All parameters that grow."""
        return tuple(part for part in (self.first, self.bias, self.second) if part)


@dataclass(frozen=True)
class NamedParameter:
    """A parameter that is one stored tensor of its own layout."""

    parameter: str
    """Name in the model class of the plan."""
    tensor: str
    """Name of the stored tensor."""


@dataclass(frozen=True)
class Reader:
    """A linear layer that reads a norm: ``W <- W diag(g)``, ``b <- b + W v``."""

    weight: NamedParameter
    dim: int
    """Of the inputs in the weight: 0 for a Conv1D."""
    bias: NamedParameter | None = None
    """Where the norm adds something that moves."""


@dataclass(frozen=True)
class Merge:
    """A folded norm of which something moves into all that reads it, each a linear layer."""

    norm: str
    """Its parameters are ``norm.weight`` and ``norm.bias`` in the model class."""
    weight: str
    """Name of the stored tensor that it multiplies by; empty where that stays."""
    bias: str
    """Name of the stored tensor that it adds, and that becomes zeros; empty where it has none."""
    readers: tuple[Reader, ...]
    offset: float = 0.0
    """1 where the class multiplies by ``1 + weight``: the weight then becomes zeros, else ones."""

    @property
    def names(self) -> tuple[NamedParameter, ...]:
        """All parameters that change."""
        own = (("weight", self.weight), ("bias", self.bias))
        found = [NamedParameter(f"{self.norm}.{name}", tensor) for name, tensor in own if tensor]
        for reader in self.readers:
            found += [reader.weight] if self.weight else []
            found += [reader.bias] if reader.bias else []
        return tuple(found)


@dataclass(frozen=True)
class UnmergedNorm:
    """A folded norm that keeps what was to move into its readers."""

    norm: str
    reason: str
    """In words that norms with the same obstacle share."""
    culprit: str = ""
    """The module path or parameter that forbids it."""


@dataclass(frozen=True)
class UntiedParameter:
    """A parameter that gets its own copy of the values that it shared with another."""

    parameter: str
    """Name in the model class of the plan, e.g. ``lm_head.weight``."""
    tensor: str
    """Name that its own tensor is stored under."""
    source: str
    """The parameter that it was tied to."""
    stored: str
    """Name of the stored tensor that it becomes a copy of; ``tensor`` if it is stored already."""
    shape: tuple[int, ...]
    """Of both."""


@dataclass(frozen=True)
class Setting:
    """An entry of ``config.json`` that a plan changes, so that the result loads as it is stored."""

    name: str
    """With dots where it lies in a nested config: ``text_config.tie_word_embeddings``."""
    value: bool | int


def size_settings(widened: Iterable[Widening]) -> tuple[Setting, ...]:
    """The entries that wider MLPs change."""
    return tuple(dict.fromkeys(Setting(one.attribute, one.to) for one in widened))


@dataclass(frozen=True)
class Plan:
    """The proven edits for one model. Everything is named as in ``model_class``."""

    model_type: str
    model_class: str
    classes: tuple[str, ...]
    """Classes for which the plan is proven, ``model_class`` among them."""
    norms: tuple[Verdict, ...]
    writers: tuple[Writer, ...]
    ops: tuple[Centring, ...]
    entry_inputs: tuple[str, ...] = ()
    """Inputs of ``forward`` (``inputs_embeds``) that a folded model has to centre on entry."""
    unproven: tuple[str, ...] = ()
    """Optional inputs and parameters that no trace has read."""
    other_norms: tuple[tuple[str, int], ...] = ()
    """Classes of modules that are RMSNorm already, with how often each occurs."""
    outputs: tuple[str, ...] = ()
    """Fields of the output, or patterns of them, that stay the same; empty for all that there are.
    What a later call may be given, as a cache is, stays in any case."""
    by_example: tuple[str, ...] = ()
    """The calls whose shapes depend on values, so that they are proven for inputs of this kind."""
    widened: tuple[Widening, ...] = ()
    merged: tuple[Merge, ...] = ()
    unmerged: tuple[UnmergedNorm, ...] = ()
    untied: tuple[UntiedParameter, ...] = ()
    settings: tuple[Setting, ...] = ()
    covered: CoveredCalls | None = None
    """The calls that are proven; ``None`` for transformers' classes: all without ``unproven``."""

    @property
    def folded(self) -> tuple[Verdict, ...]:
        """The norms that become RMSNorm."""
        return tuple(v for v in self.norms if v.status != "kept")

    @property
    def kept(self) -> tuple[Verdict, ...]:
        """The norms that stay LayerNorm."""
        return tuple(v for v in self.norms if v.status == "kept")
