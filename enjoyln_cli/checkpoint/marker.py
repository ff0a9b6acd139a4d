"""The ``enjoyln`` entry of a converted ``config.json``: what a loaded model tells about its fold.

It decides what a program needs to know that has the config alone: which norms can compute RMSNorm,
for which classes and inputs, and on which centred parameters that rests. Version 4 is::

    {"version": 4,
     "source": "gpt2",                 what was converted: a Hub id, or an absolute path
     "revision": "607a30d..." | null,
     "model_class": "GPT2LMHeadModel", whose module paths the lists below use
     "classes": [...],                 the classes for which the plan is proven
     "outputs": [...],                 fields of the output that stay the same; empty: all of them
     "rmsnorm": [...],                 norms that see zero-mean inputs
     "layernorm": [...],               norms that stay as they are
     "centering": [{"module": ..., "place": "output" | "input",
                    "axis": [dim, start, outer, size, inner]}],
                                       and a step, where the groups do not begin side by side
     "centered": [{"axis": [...], "parameters": [...]}],
                                       parameters with zero mean over the axis
     "scales": {parameter: vector},    merged into a parameter: their product is what has zero mean
     "units": [{"first": weight, "bias": bias | null, "second": weight,
                "dim": of hidden units in the second weight, "start": the first of them}],
                                       those of MLPs that subtract a mean, and so write one
     "merged": {"weight": [...], "bias": [...]},
                                       norms whose weight is ones (or 1 + weight is), or bias zeros,
                                       since it moved into what reads them: RMSNorm without
     "untied": {parameter: parameter}, what was tied, and is stored and loaded as two
     "entry_inputs": [...],            inputs of forward that have to be centred
     "unproven": [...],                inputs with which the folded norms have to compute LayerNorm
     "calls": null | {                 null: every call without an input of "unproven" is proven
        "proven": ["Net(x=float[a, b, 16]) if b <= 64 else refused", ...],
                                       those of these forms alone are (see ``plan.call_text``)
        "attributes": {"Net": {"flag": false}}},
                                       what forward may read besides, by class
     "nonfinite": true,                only where its user lets weights hold NaN and infinity
     "proof": "5d41402abc...",         SHA-256 of all that is proven: not of source and tool
     "tool": "enjoyln 0.1.0"}

Version 3 has no ``calls``, version 2 no ``units``, ``merged`` and ``untied`` either. Version 1 has
no ``centered``, ``scales`` and ``proof``: nobody can tell whether the weights of such a result are
still centred, so it is read, and not run as RMSNorm without asking for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli import __version__
from enjoyln_cli.checkpoint.config import MARKER
from enjoyln_cli.checkpoint.headers import MAX_ELEMENTS
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.errors import BadCheckpoint, UnprovenCall, UnsupportedModel
from enjoyln_cli.plan import call_text
from enjoyln_cli.plan.axis import Axis, as_numbers
from enjoyln_cli.plan.covered_calls import PLAIN_TYPES, CoveredCalls, Plain
from enjoyln_cli.plan.mean_units import Units
from enjoyln_cli.plan.plan import Centring, Place, Plan
from enjoyln_cli.text import first_line

VERSION = 4
READABLE = (1, 2, 3, 4)
MOST_DIMS = 8
"""Of a tensor that is centred."""
_NOT_PROVEN = ("source", "revision", "proof", "tool")


@dataclass(frozen=True)
class CentredTensor:
    """A parameter whose values have zero mean, times ``scale`` where there is one."""

    parameter: str
    axis: Axis
    """Over the parameter as the class holds it."""
    scale: str | None = None
    """A parameter along ``axis.dim``, of ones since it was merged."""


@dataclass(frozen=True)
class Marker:
    """The ``enjoyln`` entry of a converted ``config.json``; paths are those of ``model_class``."""

    source: str
    revision: str | None
    model_class: str
    classes: tuple[str, ...]
    rmsnorm: tuple[str, ...]
    layernorm: tuple[str, ...]
    centering: tuple[Centring, ...]
    entry_inputs: tuple[str, ...]
    unproven: tuple[str, ...]
    tool: str
    outputs: tuple[str, ...] = ()
    centred: tuple[CentredTensor, ...] | None = None
    """``None`` for a result of version 1, which does not say."""
    units: tuple[Units, ...] = ()
    weightless: tuple[str, ...] = ()
    """Norms that multiply by ones."""
    biasless: tuple[str, ...] = ()
    """Norms that add zeros."""
    untied: tuple[tuple[str, str], ...] = ()
    """Parameters that have to be two, and would be one in the original."""
    nonfinite: bool = False
    """Whether the user has said that weights may hold NaN and infinity."""
    covered: CoveredCalls | None = None
    """The calls that are proven; ``None``: those without an input of ``unproven``."""


def marker(plan: Plan, source: Source, nonfinite: bool = False) -> dict[str, Any]:
    """The ``enjoyln`` entry for ``config.json``, as drawn in this module's docstring."""
    local = Path(source.model).expanduser()
    entry = {
        "version": VERSION,
        "source": str(local.resolve()) if local.is_dir() else source.model,
        "revision": source.revision,
        "model_class": plan.model_class,
        "classes": list(plan.classes),
        "outputs": list(plan.outputs),
        "rmsnorm": [verdict.norm for verdict in plan.folded],
        "layernorm": [verdict.norm for verdict in plan.kept],
        "centering": [
            {"module": op.module, "place": op.place, "axis": as_numbers(op.axis)} for op in plan.ops
        ],
        "centered": _by_axis(plan),
        "scales": {w.parameter: w.scale.parameter for w in plan.writers if w.scale},
        "units": [
            {
                "first": one.first.parameter,
                "bias": one.bias.parameter if one.bias else None,
                "second": one.second.parameter,
                "dim": one.second.dim,
                "start": one.size,
            }
            for one in plan.widened
            if one.subtracts
        ],
        "merged": {
            "weight": [one.norm for one in plan.merged if one.weight],
            "bias": [one.norm for one in plan.merged if one.bias],
        },
        "untied": {one.parameter: one.source for one in plan.untied},
        "entry_inputs": list(plan.entry_inputs),
        "unproven": list(plan.unproven),
        "calls": _calls(plan.covered),
    }
    if nonfinite:
        entry["nonfinite"] = True
    return {**entry, "proof": proof_of(entry), "tool": f"enjoyln {__version__}"}


def _calls(covered: CoveredCalls | None) -> dict[str, Any] | None:
    if covered is None:
        return None
    attributes: dict[str, dict[str, Plain]] = {}
    for owner, name, value in covered.attributes:
        attributes.setdefault(owner, {})[name] = value
    return {"proven": [call_text.to_text(one) for one in covered.forms], "attributes": attributes}


def _by_axis(plan: Plan) -> list[dict[str, Any]]:
    """One entry for each axis: most parameters of a model share theirs."""
    groups: dict[Axis, dict[str, None]] = {}
    for writer in plan.writers:
        groups.setdefault(writer.held or writer.axis, {})[writer.parameter] = None
    return [{"axis": as_numbers(axis), "parameters": list(names)} for axis, names in groups.items()]


def proof_of(entry: Mapping[str, Any]) -> str:
    """The digest of an entry's proven part, as its ``proof`` has it."""
    proven = {key: value for key, value in entry.items() if key not in _NOT_PROVEN}
    text = json.dumps(proven, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_marker(config: Mapping[str, Any], model: str = "the model") -> Marker:
    """The marker in the ``config.json`` of the converted checkpoint ``model``, a name to show.

    Raises ``BadCheckpoint`` where there is none, where it does not have the shape drawn above, and
    where somebody has changed what is proven.
    """
    entry = config.get(MARKER)
    if not isinstance(entry, dict):
        raise BadCheckpoint(
            f"{model} was not folded: its config.json has no enjoyln entry; run `enjoyln fold`"
        )
    version = entry.get("version")
    if type(version) is not int or version not in READABLE:
        raise BadCheckpoint(
            f"the enjoyln entry of config.json has version {version!r}, this program reads "
            f"{' and '.join(map(str, READABLE))}; upgrade enjoyln"
        )
    found = Marker(
        source=_text(entry, "source"),
        revision=None if entry.get("revision") is None else _text(entry, "revision"),
        model_class=_text(entry, "model_class"),
        classes=_texts(entry, "classes"),
        rmsnorm=_texts(entry, "rmsnorm"),
        layernorm=_texts(entry, "layernorm"),
        centering=tuple(_centring(op) for op in _list(entry, "centering")),
        entry_inputs=_texts(entry, "entry_inputs"),
        unproven=_texts(entry, "unproven"),
        tool=_text(entry, "tool"),
        outputs=_texts(entry, "outputs") if "outputs" in entry else (),
        centred=_centred(entry) if version > 1 else None,
        units=tuple(_units(one) for one in _list(entry, "units")) if version > 2 else (),
        weightless=_texts(_merged(entry), "weight") if version > 2 else (),
        biasless=_texts(_merged(entry), "bias") if version > 2 else (),
        untied=tuple(_names(entry, "untied").items()) if version > 2 else (),
        nonfinite=entry.get("nonfinite") is True,
        covered=_covered(entry.get("calls")) if version > 3 else None,
    )
    if version > 1 and _text(entry, "proof") != proof_of(entry):
        raise BadCheckpoint(
            "the enjoyln entry of config.json was edited after the fold, so its proof is void; "
            "convert the source again (with --recipe you choose what is converted)"
        )
    return found


@contextmanager
def blame_marker(what: str) -> Iterator[None]:
    """Within it a model runs as a marker says: where it cannot, the marker is not to be believed.

    Raises ``BadCheckpoint`` for what a module makes of a centring that does not fit it.
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
            f"{what} does not run with the norms and centrings that the enjoyln entry of its "
            f"config.json names ({type(error).__name__}: {first}); convert the source again"
        ) from error


def _centred(entry: dict[str, Any]) -> tuple[CentredTensor, ...]:
    scales = _names(entry, "scales")
    found = []
    for group in _list(entry, "centered"):
        if not isinstance(group, dict):
            raise _malformed("centered", group)
        axis = _axis(group)
        if axis.dim < 0:
            raise _malformed("axis", group["axis"])
        found += [
            CentredTensor(name, axis, scales.get(name)) for name in _texts(group, "parameters")
        ]
    return tuple(found)


def _covered(entry: Any) -> CoveredCalls | None:
    if entry is None:
        return None
    by_owner = entry.get("attributes") if isinstance(entry, dict) else None
    if not isinstance(by_owner, dict) or not all(isinstance(v, dict) for v in by_owner.values()):
        raise _malformed("calls", entry)
    found = tuple((o, name, v) for o, values in by_owner.items() for name, v in values.items())
    if not all(type(value) in PLAIN_TYPES for _, _, value in found):
        raise _malformed("attributes", by_owner)
    try:
        return CoveredCalls(tuple(map(call_text.from_text, _texts(entry, "proven"))), found)
    except ValueError as error:
        raise _malformed("calls", str(error)) from error


def _merged(entry: dict[str, Any]) -> dict[str, Any]:
    found = entry.get("merged")
    if not isinstance(found, dict):
        raise _malformed("merged", found)
    return found


def _units(entry: Any) -> Units:
    if not isinstance(entry, dict):
        raise _malformed("units", entry)
    dim, start = entry.get("dim"), entry.get("start")
    if type(dim) is not int or type(start) is not int or dim not in (0, 1) or start < 0:
        raise _malformed("units", entry)
    bias = None if entry.get("bias") is None else _text(entry, "bias")
    return Units(_text(entry, "first"), bias, _text(entry, "second"), dim, start)


def _centring(entry: Any) -> Centring:
    if not isinstance(entry, dict):
        raise _malformed("centering", entry)
    axis = _axis(entry)
    places: dict[str, Place] = {"output": "output", "input": "input"}
    place = _text(entry, "place")
    if place not in places:
        raise _malformed("place", place)
    if not (module := _text(entry, "module")):
        raise _malformed("module", module)
    return Centring(module, places[place], axis, "")


def _axis(entry: dict[str, Any]) -> Axis:
    numbers = _list(entry, "axis")
    if len(numbers) not in (5, 6) or not all(type(number) is int for number in numbers):
        raise _malformed("axis", numbers)
    axis = Axis(*numbers)
    counted = min(axis.outer, axis.size, axis.inner) > 0 and axis.start >= 0
    counted = counted and (not axis.step or axis.step > axis.size * axis.inner)
    if not counted or abs(axis.dim) > MOST_DIMS or axis.stop > MAX_ELEMENTS:
        raise _malformed("axis", numbers)
    return axis


def _names(entry: dict[str, Any], key: str) -> dict[str, str]:
    names = entry.get(key)
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise _malformed(key, names)
    return names


def _text(entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str):
        raise _malformed(key, value)
    return value


def _list(entry: dict[str, Any], key: str) -> list[Any]:
    value = entry.get(key)
    if not isinstance(value, list):
        raise _malformed(key, value)
    return value


def _texts(entry: dict[str, Any], key: str) -> tuple[str, ...]:
    values = _list(entry, key)
    if not all(isinstance(value, str) for value in values):
        raise _malformed(key, values)
    return tuple(values)


def _malformed(key: str, value: Any) -> BadCheckpoint:
    return BadCheckpoint(
        f"the enjoyln entry of config.json is malformed at {key!r}: {value!r:.80}; "
        "convert the source again"
    )
