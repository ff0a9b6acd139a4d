"""The marker: the ``enjoyln`` entry in the ``config.json`` of a converted checkpoint.

It tells a program that only has the config which norms can compute RMSNorm, for which classes and
inputs, and which parameters have to be centred for that. Its keys are the fields of ``Marker``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from enjoyln_cli.checkpoint.config import MARKER, require_folded
from enjoyln_cli.checkpoint.headers import MAX_ELEMENTS
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.errors import BadCheckpoint, UnprovenCall, UnsupportedModel
from enjoyln_cli.fs.digests import digest_of_data
from enjoyln_cli.plan import schema
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.covered_calls import CoveredCalls
from enjoyln_cli.plan.mean_units import Units
from enjoyln_cli.plan.plan import Centring, Plan
from enjoyln_cli.text import first_line
from enjoyln_cli.version import __version__

VERSION = 1
_NOT_PROVEN = ("source", "revision", "proof", "tool")

Distinct = schema.checked(schema.distinct)
Names = Annotated[tuple[str, ...], Distinct]


@dataclass(frozen=True)
class CentredTensor:
    """A parameter that has zero mean, or whose product with ``scale`` has."""

    parameter: str
    axis: Axis
    """Axis of the parameter in the layout of the class."""
    scale: str | None = None
    """A parameter that multiplies along ``axis.dim``; it is ones since it was fused."""


def _possible(axis: Axis) -> Axis:
    if axis.stop > MAX_ELEMENTS or 0 < axis.step <= axis.size * axis.inner:
        raise ValueError(f"no tensor has {axis}")
    return axis


def _of_parameter(axis: Axis) -> Axis:
    if axis.dim < 0:
        raise ValueError(f"dim is {axis.dim}, but counts from the start")
    return _possible(axis)


def _complete(op: Centring) -> Centring:
    if not op.module:
        raise ValueError("module is empty")
    _possible(op.axis)
    return op


@dataclass(frozen=True)
class CentredGroup:
    """Parameters that have zero mean over the same axis."""

    axis: Annotated[Axis, schema.checked(_of_parameter)]
    parameters: Names


@dataclass(frozen=True)
class FusedNorms:
    """Norms with a parameter that was fused into the layers after them."""

    weight: Names
    """Norms whose weight (or 1 + weight) is ones now."""
    bias: Names
    """Norms whose bias is zeros now."""


@dataclass(frozen=True, kw_only=True)
class Marker:
    """The ``enjoyln`` entry of a converted ``config.json``; paths are paths in ``model_class``."""

    version: Literal[1] = 1
    source: str
    """The original: a Hub id, or an absolute path."""
    revision: str | None
    model_class: str
    classes: Names
    """The classes for which the plan is proven."""
    outputs: Names
    """Fields of the output that stay the same; empty: all of them."""
    rmsnorm: Names
    """Folded norms: their inputs have zero mean."""
    layernorm: Names
    """Norms that stay LayerNorm."""
    centering: Annotated[tuple[Annotated[Centring, schema.checked(_complete)], ...], Distinct]
    """Explicit centring operations."""
    centered: Annotated[tuple[CentredGroup, ...], Distinct]
    """Parameters with zero mean."""
    scales: Mapping[str, str]
    """The vector that was fused into a parameter: their product has zero mean."""
    units: Annotated[tuple[Units, ...], Distinct]
    """Hidden units of MLPs that subtract a mean."""
    baked: Names
    """Norm weights that are one number each, since the norm was baked into an embedding table."""
    fused: FusedNorms
    untied: Mapping[str, str]
    """Parameters that were tied to another, and are stored and loaded as two."""
    entry_inputs: Names
    """Inputs of ``forward`` that have to be centred."""
    unproven: Names
    """Inputs with which the folded norms have to compute LayerNorm."""
    covered: CoveredCalls | None
    """The proven calls; ``None``: all calls without an input of ``unproven``."""
    rotated: bool = False
    """Whether orthogonal matrices have been rotated values; the stored plan says which."""
    nonfinite: bool = False
    """Whether the user allowed NaN and infinity in weights."""
    proof: str = ""
    """SHA-256 of the entry without source, revision, proof and tool."""
    tool: str

    @property
    def centred(self) -> tuple[CentredTensor, ...]:
        """The centred parameters, one by one."""
        return tuple(
            CentredTensor(name, group.axis, self.scales.get(name))
            for group in self.centered
            for name in group.parameters
        )


IN_MEMORY = Source("", Path(), None)
"""The source of a model that has no checkpoint."""


def marker(plan: Plan, source: Source, nonfinite: bool = False) -> dict[str, Any]:
    """The ``enjoyln`` entry for ``config.json``: the fields of ``Marker``."""
    fields = marker_of_plan(plan, source, nonfinite)
    entry = {"version": fields.version, **schema.plain(fields)}
    return {**entry, "proof": proof_of(entry)}


def marker_of_plan(plan: Plan, source: Source = IN_MEMORY, nonfinite: bool = False) -> Marker:
    """The marker of a model that was folded by ``plan``; its ``proof`` is left empty."""
    local = Path(source.model).expanduser()
    return Marker(
        source=str(local.resolve()) if source.model and local.is_dir() else source.model,
        revision=source.revision,
        model_class=plan.model_class,
        classes=plan.classes,
        outputs=plan.outputs,
        rmsnorm=tuple(verdict.norm for verdict in plan.folded),
        layernorm=tuple(verdict.norm for verdict in plan.kept),
        centering=tuple(replace(op, reason="") for op in plan.ops),
        centered=_by_axis(plan),
        scales={w.parameter: w.scale.parameter for w in plan.edited_tensors if w.scale},
        units=tuple(
            Units(
                mlp.first.parameter,
                mlp.bias.parameter if mlp.bias else None,
                mlp.second.parameter,
                mlp.second.dim,
                mlp.size,
            )
            for mlp in plan.widened
            if mlp.subtracts
        ),
        baked=tuple(norm.weight.parameter for norm in plan.baked.values()),
        fused=FusedNorms(
            tuple(fusion.norm for fusion in plan.fused if fusion.weight),
            tuple(fusion.norm for fusion in plan.fused if fusion.bias),
        ),
        untied={copy.parameter: copy.source for copy in plan.untied},
        entry_inputs=plan.entry_inputs,
        unproven=plan.unproven,
        covered=plan.covered,
        rotated=bool(plan.rotated),
        nonfinite=nonfinite,
        tool=f"enjoyln {__version__}",
    )


def _by_axis(plan: Plan) -> tuple[CentredGroup, ...]:
    """The centred parameters, grouped by axis: most parameters of a model share one."""
    groups: dict[Axis, dict[str, None]] = {}
    for writer in plan.writers:
        groups.setdefault(writer.module_axis or writer.axis, {})[writer.parameter] = None
    return tuple(CentredGroup(axis, tuple(names)) for axis, names in groups.items())


def proof_of(entry: Mapping[str, Any]) -> str:
    """The SHA-256 of the proven part of an entry, for its field ``proof``."""
    proven = {key: value for key, value in entry.items() if key not in _NOT_PROVEN}
    return digest_of_data(proven)


def read_marker(config: Mapping[str, Any], model: str = "the model") -> Marker:
    """The marker in a parsed ``config.json``; ``model`` is a name for messages.

    Raises ``BadCheckpoint`` if there is none, it is malformed, or its proven part was edited.
    """
    require_folded(config, model)
    entry = config[MARKER]
    version = entry.get("version")
    if type(version) is not int or version != VERSION:
        raise BadCheckpoint(
            f"the enjoyln entry of config.json has version {version!r:.40}, but this program reads "
            f"{VERSION}; upgrade enjoyln or convert the source again"
        )
    try:
        parsed = schema.read(Marker, entry)
    except ValueError as error:
        raise BadCheckpoint(
            f"the enjoyln entry of config.json is malformed: {error}; convert the source again"
        ) from None
    if parsed.proof != proof_of(entry):
        raise BadCheckpoint(
            "the enjoyln entry of config.json was edited after the fold, so its proof is invalid; "
            "convert the source again (--recipe lets you choose which norms are converted)"
        )
    return parsed


@contextmanager
def blame_marker(model: str) -> Iterator[None]:
    """Blame the marker if a model that is set up according to it fails inside the block.

    Converts errors that a wrong marker can cause, for example a centring that does not fit its
    module, to ``BadCheckpoint``. ``model`` is a name for the message.
    """
    try:
        yield
    except (torch.OutOfMemoryError, UnprovenCall):
        raise
    except (
        RuntimeError,
        IndexError,
        ValueError,
        TypeError,
        AttributeError,
        UnsupportedModel,
    ) as error:
        first = first_line(error)
        raise BadCheckpoint(
            f"{model} does not run with the norms and centrings that the enjoyln entry of its "
            f"config.json names ({type(error).__name__}: {first}); convert the source again"
        ) from error
