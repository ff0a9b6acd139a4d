"""The marker: the ``enjoyln`` entry in the ``config.json`` of a converted checkpoint.

A program that has only the config reads there which norms can compute RMSNorm, for which classes
and inputs, and which parameters have to be centred: the plan, without what only files need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from enjoyln_cli.checkpoint.config import MARKER, require_folded
from enjoyln_cli.checkpoint.headers import MAX_ELEMENTS
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.errors import BadCheckpoint, UnprovenCall, UnsupportedModel
from enjoyln_cli.fs.digests import digest_of_data
from enjoyln_cli.plan import schema
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.text import first_line
from enjoyln_cli.version import __version__

VERSION = 1
_NOT_PROVEN = ("source", "revision", "proof", "tool")
_NOT_LIVE = {"needs", "mlps", "path", "reason", "culprit", "readers", "given", "tensor", "stored"}
"""Fields that a live model does not need: names in files, and what explains a plan."""


@dataclass(frozen=True, kw_only=True)
class Marker:
    """The ``enjoyln`` entry of a converted ``config.json``."""

    version: Literal[1] = 1
    source: str
    """The original: a Hub id, or an absolute path."""
    revision: str | None
    plan: Plan
    """The part of the plan that a live model needs (see ``live_part``)."""
    stored_from: str = ""
    """The class of the original if the folded model is stored as another class (``fold --as``)."""
    nonfinite: bool = False
    """Whether the user allowed NaN and infinity in weights."""
    proof: str = ""
    """SHA-256 of the entry without source, revision, proof and tool."""
    tool: str


def marker(
    plan: Plan, source: Source, nonfinite: bool = False, stored_from: str = ""
) -> dict[str, Any]:
    """The ``enjoyln`` entry for ``config.json``: the fields of ``Marker``."""
    local = Path(source.model).expanduser()
    entry = {
        "version": VERSION,
        "source": str(local.resolve()) if source.model and local.is_dir() else source.model,
        "revision": source.revision,
        "plan": schema.plain(live_part(plan), _NOT_LIVE),
        **({"stored_from": stored_from} if stored_from else {}),
        **({"nonfinite": True} if nonfinite else {}),
        "tool": f"enjoyln {__version__}",
    }
    return {**entry, "proof": proof_of(entry)}


def live_part(plan: Plan) -> Plan:
    """The plan with the layouts of a model in memory, and without what only files need."""
    weights = (
        replace(w, tensor="", shape=(), axis=w.module_axis or w.axis, module_axis=None)
        for w in plan.centred_weights
    )
    return replace(
        plan,
        centred_weights=tuple(dict.fromkeys(weights)),
        unfused=(),
        rotation_groups=tuple(
            replace(group, tensors=tuple(t for t in group.tensors if t.baked))
            for group in plan.rotated
        ),
        scaled=tuple(replace(stream, tensors=(), norms=()) for stream in plan.scaled),
        untied=tuple(replace(copy, shape=()) for copy in plan.untied),
        settings=(),
        other_norms=(),
        by_example=(),
    )


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
        _require_possible(parsed.plan)
    except ValueError as error:
        raise BadCheckpoint(
            f"the enjoyln entry of config.json is malformed: {error}; convert the source again"
        ) from None
    if parsed.proof != proof_of(entry):
        raise BadCheckpoint(
            "the enjoyln entry of config.json was edited after the fold, so its proof is invalid; "
            "convert the source again (--keep-norms chooses which norms stay)"
        )
    return parsed


def _require_possible(plan: Plan) -> None:
    """Raise ``ValueError`` for an entry that no fold writes, or that is there twice."""
    for field in fields(plan):
        if isinstance(entries := getattr(plan, field.name), tuple):
            try:
                schema.distinct(entries)
            except ValueError as error:
                raise ValueError(f"plan.{field.name}: {error}") from None
    if any(not op.module for op in plan.subtractions):
        raise ValueError("plan.subtractions: module is empty")
    if any(weight.axis.dim < 0 for weight in plan.centred_weights):
        raise ValueError("plan.centred_weights: dim counts from the start")
    axes = [op.axis for op in plan.subtractions] + [one.axis for one in plan.centred_weights]
    for axis in axes:
        if axis.stop > MAX_ELEMENTS or 0 < axis.step <= axis.size * axis.inner:
            raise ValueError(f"plan: no tensor has {axis}")


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
