"""Which config attribute sets the number of hidden units of an MLP, and nothing else.

It is found by trial. Each integer of the config that equals the number of hidden units is raised
by itself, and every class is built again on the meta device. It qualifies if only weights
of MLPs that can grow have grown, by the right number of units, and the same ops run as before.
Stock transformers then loads the wider checkpoint and computes the same function.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import nn

from enjoyln_cli.analysis.same_ops import same_but_for_sizes
from enjoyln_cli.calls.calls import Call
from enjoyln_cli.checkpoint.config import set_entry
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.classes import build
from enjoyln_cli.plan.edited_tensors import GrownParameter
from enjoyln_cli.plan.mean_units import UNITS, Widening
from enjoyln_cli.proof.widening import Mlp, Resize, Resizing
from enjoyln_cli.trace.trace import Naming

Built = tuple[nn.Module, Naming]
"""A model of one class, and the mapping from its names to the plan's names."""


def resize_search(
    models: Sequence[Built], calls: Mapping[str, Call], groups: Mapping[str, str], multiple: int
) -> Resizing:
    """A function that searches the config of ``models`` for attributes that set MLP sizes.

    New sizes are multiples of ``multiple``. ``calls`` has one call of each class, by class name.
    ``groups`` maps any parameter name of the plan to the first of its tied names.
    """
    config: Any = getattr(models[0][0], "config", {})

    def resizes(wanted: tuple[Mlp, ...], able: tuple[Mlp, ...]) -> tuple[Resize, ...]:
        found: list[Resize] = []
        for size in dict.fromkeys(mlp.size for mlp in wanted):
            to = next_multiple(size, multiple)
            for name in [name for name, value in _numbers(config) if value == size]:
                left = {mlp for mlp in wanted if mlp.size == size}
                left -= {mlp for resize in found for mlp in resize.mlps}
                changed = _changed(config, name, to)
                mlps = _grown(models, calls, changed, groups, able, size, to)
                if left.intersection(mlps):
                    found.append(Resize(name, size, to, mlps))
        return tuple(found)

    return resizes


def widenings_for(
    used: set[Mlp], resizes: Iterable[Resize], stored: Mapping[str, Sequence[str]]
) -> tuple[Widening, ...]:
    """The edits of all MLPs that share a config attribute with an MLP in ``used``.

    ``stored`` maps each parameter to the names of its stored tensors.
    """
    return tuple(
        _widening(mlp, resize, stored, subtracts=mlp in used)
        for resize in resizes
        if used.intersection(resize.mlps)
        for mlp in resize.mlps
    )


def _widening(
    mlp: Mlp, resize: Resize, stored: Mapping[str, Sequence[str]], subtracts: bool
) -> Widening:
    parts = {name: GrownParameter(name, stored[name][0], dim) for name, dim in mlp.parts.items()}
    return Widening(
        first=parts[mlp.first],
        bias=parts[mlp.bias] if mlp.bias else None,
        second=parts[mlp.second],
        size=resize.size,
        to=resize.to,
        features=mlp.features,
        attribute=resize.attribute,
        subtracts=subtracts,
    )


def next_multiple(size: int, multiple: int) -> int:
    """The smallest multiple with room for ``size`` units and for units that subtract the mean."""
    return -(-(size + UNITS) // multiple) * multiple


def _grown(
    models: Iterable[Built],
    calls: Mapping[str, Call],
    config: Any,
    groups: Mapping[str, str],
    able: tuple[Mlp, ...],
    size: int,
    to: int,
) -> tuple[Mlp, ...]:
    """The MLPs that grow under the changed ``config``; empty if anything else changes."""
    dims = {name: (mlp, dim) for mlp in able for name, dim in mlp.parts.items()}
    changed: set[str] = set()
    for model, naming in models:
        try:
            grown = build(type(model), config)
        except UnsupportedModel:
            return ()
        old, new = _shapes(model), _shapes(grown)
        if old.keys() != new.keys():
            return ()
        for name in (name for name in old if old[name] != new[name]):
            name, shapes = groups.get(naming(name), ""), (old[name], new[name])
            if name not in dims or shapes[1] != _with(shapes[0], dims[name][1], size, to):
                return ()
            changed.add(name)
        call = calls.get(type(model).__name__)
        if old != new and not (call and same_but_for_sizes(model, grown, call, size, to)):
            return ()
    mlps = tuple(mlp for mlp in able if changed.intersection(mlp.parts))
    return mlps if all(changed.issuperset(mlp.parts) for mlp in mlps) else ()


def _with(shape: tuple[int, ...], dim: int, size: int, to: int) -> tuple[int, ...]:
    grown = to if shape[dim] == size else -1
    return (*shape[:dim], grown, *shape[dim + 1 :])


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    held = chain(model.named_parameters(remove_duplicate=False), model.named_buffers())
    return {name: tuple(tensor.shape) for name, tensor in held}


def _numbers(config: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """The integers of a config by name; integers of nested configs have dotted names."""
    values = config if isinstance(config, Mapping) else vars(config)
    for name, value in values.items():
        if type(value) is int:
            yield f"{prefix}{name}", value
        elif hasattr(value, "to_dict") or (isinstance(value, Mapping) and isinstance(name, str)):
            yield from _numbers(value, f"{prefix}{name}.")


def _changed(config: Any, name: str, value: int) -> Any:
    """A copy of ``config`` with one entry changed."""
    changed = copy.deepcopy(config)
    set_entry(changed, name, value)
    return changed
