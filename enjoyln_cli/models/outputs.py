"""Names for the tensors that a model returns.

``logits`` is a field, ``vision_model_output.last_hidden_state`` a field of a nested output,
``hidden_states.3`` and ``3`` are elements of tuples, ``output`` is a tensor returned alone. The
functions here match patterns with fields, and tell which fields must always stay the same.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, ValuesView
from collections.abc import Set as AbstractSet
from fnmatch import fnmatchcase
from itertools import accumulate, chain
from typing import Any

import torch

from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.models.classes import nested_configs
from enjoyln_cli.plan.cache_argument import NAMES as CACHES
from enjoyln_cli.text import did_you_mean

ALONE = "output"
STATES = "hidden_states"


_CONTAINERS = (list, tuple, deque, AbstractSet, ValuesView)
"""Types whose elements are searched; a dict's keys and items are sets (``AbstractSet``)."""


def as_names(outputs: str | Iterable[str]) -> tuple[str, ...]:
    """``outputs`` as a tuple; a string is one name."""
    return (outputs,) if isinstance(outputs, str) else tuple(outputs)


def config_returning(config: Any, outputs: Iterable[str]) -> Any:
    """``config``, or a copy with ``output_hidden_states`` if ``outputs`` names hidden states."""
    if not any(STATES in pattern for pattern in outputs):
        return config
    config = copy.deepcopy(config)
    for _, part in nested_configs(config):
        part.output_hidden_states = True
    return config


def by_field(value: Any) -> dict[str, list[torch.Tensor]]:
    """Every tensor that a model returned, by field, also in caches and nested outputs.

    A tensor that is returned twice appears under both names.
    """
    found: dict[str, list[torch.Tensor]] = {}
    for path, tensor in _walk(value, (), (), {}):
        found.setdefault(".".join(path) or ALONE, []).append(tensor)
    return found


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor that a model returned, also in caches and nested outputs."""
    return [tensor for tensors in by_field(value).values() for tensor in tensors]


def _walk(
    value: Any, path: tuple[str, ...], around: tuple[int, ...], opened: dict[int, Any]
) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The tensors with their paths. An object with attributes may refer to many others, so it is
    visited only once; ``opened`` holds the visited objects."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if id(value) in around or value is None or isinstance(value, (str, int, float, type)):
        return
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        parts = chain(value.items(), enumerate(key for key in value if not isinstance(key, str)))
    elif isinstance(value, _CONTAINERS):
        parts = enumerate(value)
    elif id(value) in opened:
        return
    else:
        opened[id(value)] = value
        parts = instance_attributes(value).items()
    for key, part in parts:
        yield from _walk(part, (*path, str(key)), (*around, id(value)), opened)


def instance_attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, also attributes that its class keeps in slots."""
    slots = (vars(base).get("__slots__", ()) for base in type(value).__mro__)
    names = chain.from_iterable((one,) if isinstance(one, str) else one for one in slots)
    held = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return held | getattr(value, "__dict__", {})


def is_fed_back(field: str, accepted: Collection[str]) -> bool:
    """Whether a later call may take the field as input: a cache, or an argument of ``forward``."""
    return any(part in CACHES or part in accepted for part in field.split("."))


def is_in_cache(field: str) -> bool:
    """Whether a field is part of a returned cache."""
    return not {*CACHES}.isdisjoint(field.split("."))


def match_names(patterns: Iterable[str], fields: Iterable[str]) -> frozenset[str]:
    """The fields that match a pattern: a name, possibly with wildcards, of the field or a parent.

    ``vision_model_output`` matches all its fields, ``*.pooler_output`` this field of every output.
    """
    return frozenset(f for f in fields if any(_names(pattern, f) for pattern in patterns))


def _names(pattern: str, field: str) -> bool:
    holders = accumulate(field.split("."), "{}.{}".format)
    return any(fnmatchcase(holder, pattern) for holder in holders)


def require_named(patterns: Iterable[str], fields: Collection[str], model_class: str) -> None:
    """Raise ``EnjoyLNError`` for the first pattern that matches none of the fields."""
    for pattern in patterns:
        if not match_names((pattern,), fields):
            known = sorted(field for field in fields if not is_in_cache(field))
            hint = did_you_mean(pattern, known) or f"it has {', '.join(known)}"
            raise EnjoyLNError(f"no output of {model_class} is called {pattern}; {hint}")
