"""Read the frozen dataclasses of a plan from plain data, as in JSON and YAML, and write them.

The fields of a dataclass are the keys of its file, and their types say what is valid there.
pydantic refuses unknown keys, missing keys, and values of another type (``1`` is not true).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_type_hints

from pydantic import AfterValidator, GetPydanticSchema, TypeAdapter, ValidationError
from pydantic_core import from_json
from pydantic_core import to_json as dump_json
from pydantic_core.core_schema import none_schema

from enjoyln_cli.text import did_you_mean

Instance = TypeVar("Instance")

SAME_AS = {"tensor": "parameter", "stored": "source"}
"""Fields that are left out in a file if they are equal to another field, and that field."""

_KINDS = {
    "dataclass_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "string_type": "text",
    "int_type": "a whole number",
    "bool_type": "true or false",
}
"""pydantic's errors about types, and the type that it wants."""


def read(kind: type[Instance], data: Any) -> Instance:
    """An instance of the dataclass ``kind`` from plain data.

    Raises ``ValueError`` in one line: the place in ``data``, the value found there, and what is
    valid.
    """
    try:
        text = json.dumps(data)
    except ValueError:
        raise ValueError("it has a number of thousands of digits") from None
    except (TypeError, RecursionError) as error:
        raise ValueError(f"it has a value that JSON does not have: {error}") from None
    try:
        adapter = _adapter(kind)  # type: ignore[arg-type]
        value: Instance = adapter.validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        where, problem = _problem(kind, _most_helpful(error))
        place = _place(where)
        raise ValueError(f"{place}: {problem}" if place else problem) from None
    return value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def plain(value: Any, without: Collection[str] = ()) -> Any:
    """The plain data of a dataclass: ``read`` gives the same dataclass again.

    Fields are left out if they have their default value, if they are not compared, or if their name
    is in ``without``.
    """
    if is_dataclass(value):
        return {
            field.name: plain(getattr(value, field.name), without)
            for field in fields(value)
            if field.compare and field.name not in without and not _is_default(value, field)
        }
    if isinstance(value, Mapping):
        return {key: plain(item, without) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item, without) for item in value]
    return value


def to_json(value: Any) -> Any:
    """The plain data of any dataclass, with all its fields, for a program that reads JSON.

    Paths become text, and numbers that JSON does not have become ``None``.
    """
    return from_json(dump_json(value, inf_nan_mode="null"))


def _is_default(value: Any, field: Any) -> bool:
    entry = getattr(value, field.name)
    default = field.default if field.default_factory is MISSING else field.default_factory()
    if default is not MISSING and field.name in SAME_AS:
        default = getattr(value, SAME_AS[field.name])
    return bool(type(entry) is type(default) and entry == default)


def checked(check: Callable[[Any], Any]) -> Any:
    """A mark for ``Annotated``: ``check`` returns the value or raises ``ValueError``."""
    return AfterValidator(check)


NOT_STORED = GetPydanticSchema(lambda _kind, _handler: none_schema())
"""A mark for ``Annotated``: the value is in no file."""


def distinct(values: Sequence[Hashable]) -> Sequence[Hashable]:
    """``values``, if none is repeated. Raises ``ValueError``."""
    if len(set(values)) < len(values):
        again = Counter(values).most_common(1)[0][0]
        raise ValueError(f"{quote(again)} is repeated; write it once")
    return values


def quote(value: Any) -> str:
    """The first 60 characters of a value's ``repr``."""
    return repr(value)[:60]


# Messages.


def _most_helpful(error: ValidationError) -> Any:
    """The first error; if it is a missing key beside an unknown key, the unknown key."""
    errors = error.errors(include_url=False)
    beside = [other for other in errors if other["loc"][:-1] == errors[0]["loc"][:-1]]
    return min(beside, key=lambda other: other["type"] != "unexpected_keyword_argument")


def _problem(kind: Any, error: Any) -> tuple[Sequence[int | str], str]:
    """The place of one of pydantic's errors, and what is wrong there."""
    where, value, why = error["loc"], error["input"], error["type"]
    if why == "missing":
        return where[:-1], f"the key {where[-1]} is missing"
    if why == "unexpected_keyword_argument":
        known = _keys_of(kind, where[:-1])
        listed = f"known keys: {', '.join(known)}" if known else "remove it"
        hint = did_you_mean(str(where[-1]), known, 1) or listed
        return where[:-1], f"unknown key {quote(where[-1])}; {hint}"
    if why == "value_error":
        return where, str(error["ctx"]["error"])
    if why in _KINDS:
        keys = ", ".join(_keys_of(kind, where)) if why == "dataclass_type" else ""
        return where, f"{_shown(value)} instead of {_KINDS[why]}{f' with {keys}' if keys else ''}"
    if why == "literal_error":
        return where, f"{_shown(value)} instead of {error['ctx']['expected']}"
    return where, f"{_shown(value)}: {error['msg']}"


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return "nothing" if value is None else quote(value)


def _place(where: Sequence[int | str]) -> str:
    """A place in the data as a path: ``classes[0].name``."""
    path = ""
    for step in where:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step != "[key]":  # pydantic's name for a key itself
            name = step if step.isprintable() else quote(step)
            path += f".{name:.120}" if path else f"{name:.120}"
    return path


def _keys_of(kind: Any, where: Sequence[int | str]) -> list[str]:
    """The fields of the dataclass at a place; none if it is in a list or a mapping."""
    for step in where:
        kind = get_type_hints(kind).get(str(step)) if is_dataclass(kind) else None
    return [field.name for field in fields(kind)] if is_dataclass(kind) else []


# Plain data of two sides.

ABSENT: Any = object()
"""Stands for an entry that one of the mappings lacks."""


def differences(
    left: Mapping[str, Any], right: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """The path of each entry that differs, and its value on both sides.

    A mapping is compared entry by entry, also with a side that lacks it.
    """
    for key in dict.fromkeys((*left, *right)):
        pair = left.get(key, ABSENT), right.get(key, ABSENT)
        inner = [value for value in pair if value is not ABSENT]
        if any(inner) and all(isinstance(value, Mapping) for value in inner):
            here, there = ({} if value is ABSENT else value for value in pair)
            yield from differences(here, there, (*path, key))
        elif pair[0] != pair[1]:
            yield (*path, key), *pair
