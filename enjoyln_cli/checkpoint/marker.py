"""The marker: the ``enjoyln`` entry in the ``config.json`` of a converted checkpoint.

It tells a program that only has the config which norms can compute RMSNorm, for which classes and
inputs, and which parameters have to be centred for that::

    {"version": 1,
     "source": "gpt2",                 what was converted: a Hub id, or an absolute path
     "revision": "607a30d..." | null,
     "model_class": "GPT2LMHeadModel", whose module paths the lists below use
     "classes": [...],                 the classes for which the plan is proven
     "outputs": [...],                 fields of the output that stay the same; empty: all of them
     "rmsnorm": [...],                 folded norms: their inputs have zero mean
     "layernorm": [...],               norms that stay LayerNorm
     "centering": [{"module": ..., "place": "output" | "input",
                    "axis": [dim, start, outer, size, inner]}],
                                       explicit centring operations; the axis has a sixth number,
                                       the step, if its groups are not adjacent
     "centered": [{"axis": [...], "parameters": [...]}],
                                       parameters with zero mean over the axis
     "scales": {parameter: vector},    the vector was merged into the parameter: their product has
                                       zero mean
     "rotated": {"seed": 0, "bases": [{"name": weight, "kind": "stream" | "values", "size": 768,
                                       "fixes_ones": true}]},
                                       values that an orthogonal matrix has turned (optional)
     "units": [{"first": weight, "bias": bias | null, "second": weight,
                "dim": of hidden units in the second weight, "start": first index}],
                                       hidden units of MLPs that subtract a mean
     "merged": {"weight": [...], "bias": [...]},
                                       norms whose weight (or 1 + weight) is ones, or whose bias is
                                       zeros, since it was merged into the layers that read the norm
     "untied": {parameter: parameter}, parameters that were tied, and are stored and loaded as two
     "entry_inputs": [...],            inputs of forward that have to be centred
     "unproven": [...],                inputs with which the folded norms have to compute LayerNorm
     "calls": null | {                 null: every call without an input of "unproven" is proven
        "proven": ["Net(x=float[a, b, 16]) if b <= 64 else refused", ...],
                                       only calls of these forms are (see ``plan.call_text``)
        "attributes": {"Net": {"flag": false}}},
                                       by class: values of attributes that forward may read
     "nonfinite": true,                only if the user allowed NaN and infinity in weights
     "trained": true,                  only if the weights were trained after the fold: "source" is
                                       where training began, and the function to keep is that of
                                       these weights with LayerNorm
     "proof": "5d41402abc...",         SHA-256 of the entry without source, revision, proof and tool
     "tool": "enjoyln 0.1.0"}
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.checkpoint.config import MARKER, require_folded
from enjoyln_cli.checkpoint.headers import MAX_ELEMENTS
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.errors import BadCheckpoint, UnprovenCall, UnsupportedModel
from enjoyln_cli.plan import call_text
from enjoyln_cli.plan.axis import Axis, as_numbers
from enjoyln_cli.plan.covered_calls import PLAIN_TYPES, CoveredCalls, Plain
from enjoyln_cli.plan.mean_units import Units
from enjoyln_cli.plan.plan import Centring, Place, Plan
from enjoyln_cli.text import first_line
from enjoyln_cli.version import __version__

VERSION = 1
MAX_DIMS = 8
"""Maximum dimensions of a tensor that is centred."""
_NOT_PROVEN = ("source", "revision", "proof", "tool")


@dataclass(frozen=True)
class CentredTensor:
    """A parameter that has zero mean, or whose product with ``scale`` has."""

    parameter: str
    axis: Axis
    """Axis of the parameter in the layout of the class."""
    scale: str | None = None
    """A parameter that multiplies along ``axis.dim``; it is ones since it was merged."""


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
    outputs: tuple[str, ...]
    centred: tuple[CentredTensor, ...]
    units: tuple[Units, ...]
    weightless: tuple[str, ...]
    """Norms whose weight was merged into the layers after them, and is ones now."""
    biasless: tuple[str, ...]
    """Norms whose bias was merged into the layers after them, and is zeros now."""
    untied: tuple[tuple[str, str], ...]
    """Pairs of parameters that are tied in the original, and separate in the result."""
    nonfinite: bool = False
    """Whether the user allowed NaN and infinity in weights."""
    trained: bool = False
    """Whether the weights were trained after the fold, so that no other checkpoint has them."""
    covered: CoveredCalls | None = None
    """The proven calls; ``None``: all calls without an input of ``unproven``."""


def marker(
    plan: Plan, source: Source, nonfinite: bool = False, trained: bool = False
) -> dict[str, Any]:
    """The ``enjoyln`` entry for ``config.json``, as described in this module's docstring."""
    local = Path(source.model).expanduser()
    entry = {
        "version": VERSION,
        "source": str(local.resolve()) if source.model and local.is_dir() else source.model,
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
        "scales": {w.parameter: w.scale.parameter for w in plan.edited_tensors if w.scale},
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
    if plan.turned:
        facts = ("name", "kind", "size", "fixes_ones")
        bases = [{name: getattr(basis, name) for name in facts} for basis in plan.turned]
        entry["rotated"] = {"seed": plan.seed, "bases": bases}
    if nonfinite:
        entry["nonfinite"] = True
    if trained:
        entry["trained"] = True
    return {**entry, "proof": proof_of(entry), "tool": f"enjoyln {__version__}"}


def _calls(covered: CoveredCalls | None) -> dict[str, Any] | None:
    if covered is None:
        return None
    attributes: dict[str, dict[str, Plain]] = {}
    for owner, name, value in covered.attributes:
        attributes.setdefault(owner, {})[name] = value
    return {"proven": [call_text.to_text(one) for one in covered.forms], "attributes": attributes}


def _by_axis(plan: Plan) -> list[dict[str, Any]]:
    """The centred parameters, grouped by axis: most parameters of a model share one."""
    groups: dict[Axis, dict[str, None]] = {}
    for writer in plan.writers:
        groups.setdefault(writer.held or writer.axis, {})[writer.parameter] = None
    return [{"axis": as_numbers(axis), "parameters": list(names)} for axis, names in groups.items()]


def proof_of(entry: Mapping[str, Any]) -> str:
    """The SHA-256 of the proven part of an entry, for its field ``proof``."""
    proven = {key: value for key, value in entry.items() if key not in _NOT_PROVEN}
    text = json.dumps(proven, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


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
        outputs=_texts(entry, "outputs"),
        centred=_centred(entry),
        units=tuple(_units(one) for one in _list(entry, "units")),
        weightless=_texts(_merged(entry), "weight"),
        biasless=_texts(_merged(entry), "bias"),
        untied=tuple(_names(entry, "untied").items()),
        nonfinite=entry.get("nonfinite") is True,
        trained=entry.get("trained") is True,
        covered=_covered(entry),
    )
    if _text(entry, "proof") != proof_of(entry):
        raise BadCheckpoint(
            "the enjoyln entry of config.json was edited after the fold, so its proof is invalid; "
            "convert the source again (--recipe lets you choose which norms are converted)"
        )
    return found


@contextmanager
def blame_marker(what: str) -> Iterator[None]:
    """Blame the marker if a model that is set up according to it fails inside the block.

    Converts errors that a wrong marker can cause, for example a centring that does not fit its
    module, to ``BadCheckpoint``. ``what`` names the model in the message.
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


def _covered(entry: dict[str, Any]) -> CoveredCalls | None:
    calls = entry.get("calls", ())
    if calls is None:
        return None
    by_owner = calls.get("attributes") if isinstance(calls, dict) else None
    if not isinstance(by_owner, dict) or not all(isinstance(v, dict) for v in by_owner.values()):
        raise _malformed("calls", calls)
    found = tuple((o, name, v) for o, values in by_owner.items() for name, v in values.items())
    if not all(type(value) in PLAIN_TYPES for _, _, value in found):
        raise _malformed("attributes", by_owner)
    try:
        return CoveredCalls(tuple(map(call_text.from_text, _texts(calls, "proven"))), found)
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
    if not counted or abs(axis.dim) > MAX_DIMS or axis.stop > MAX_ELEMENTS:
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
    """A list in which nothing is repeated, except for the numbers of an axis."""
    values = entry.get(key)
    if not isinstance(values, list):
        raise _malformed(key, values)
    shown = [repr(value) for value in values if type(value) is not int]
    if len(set(shown)) < len(shown):
        repeated = Counter(shown).most_common(1)[0][0]
        raise _malformed(key, f"{repeated:.40} is repeated")
    return values


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
