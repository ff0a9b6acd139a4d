"""Checks of a recipe's values, from which ``read`` builds the sections of a recipe.

A check takes a value and its place in the file (``variants[0].norms``). It returns the value, or
raises ``RecipeError`` in one line with that place, the value found, and what is valid there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.recipe.templates import is_size, problem_with
from enjoyln_cli.text import did_you_mean

Value = TypeVar("Value")
Check = Callable[[Any, str], Value]
NOTHING: Mapping[str, Check[Any]] = {}


def fields(
    value: Any,
    at: str,
    required: Mapping[str, Check[Any]],
    optional: Mapping[str, Check[Any]] = NOTHING,
) -> dict[str, Any]:
    """The checked values of a mapping that must have all required keys and no unknown one."""
    checks = {**required, **optional}
    known = ", ".join(checks)
    if not isinstance(value, Mapping):
        raise refusal(at, f"{_kind(value)} instead of a mapping with {known}")
    for key in value:
        if key not in checks:
            hint = did_you_mean(str(key), checks, 1) or f"known keys: {known}"
            raise refusal(at, f"unknown key {quote(key)}; {hint}")
    for key in required:
        if key not in value:
            raise refusal(at, f"the key {key} is missing; add it")
    return {
        key: check(value[key], inside(at, key)) for key, check in checks.items() if key in value
    }


def items(check: Check[Value]) -> Check[tuple[Value, ...]]:
    """A check for a list whose items all pass ``check``."""

    def of(value: Any, at: str) -> tuple[Value, ...]:
        if not isinstance(value, list):
            raise refusal(at, f"{_kind(value)} instead of a list; write [...]")
        return tuple(check(item, f"{at}[{index}]") for index, item in enumerate(value))

    return of


def entries(check: Check[Value]) -> Check[dict[str, Value]]:
    """A check for a mapping from text to values that all pass ``check``."""

    def of(value: Any, at: str) -> dict[str, Value]:
        if not isinstance(value, Mapping):
            raise refusal(at, f"{_kind(value)} instead of a mapping of names")
        for key in value:
            text(key, at)
        return {key: check(item, inside(at, key)) for key, item in value.items()}

    return of


def by_name(read: Callable[[str, Any, str], Value]) -> Check[dict[str, Value]]:
    """A check for a mapping from dotted names; ``read`` gets each name, value and place."""

    def of(value: Any, at: str) -> dict[str, Value]:
        found = entries(lambda item, _: item)(value, at)
        places = {key: inside(at, key) for key in found}
        return {key: read(name(key, places[key]), found[key], places[key]) for key in found}

    return of


def text(value: Any, at: str) -> str:
    """One line of at most 1000 printable characters."""
    if not isinstance(value, str) or len(value) > 1000 or not value.isprintable():
        raise refusal(at, f"{quote(value)} instead of one line of text")
    return value


def word(value: Any, at: str) -> str:
    """The name of a class or an argument: letters, digits, ``_`` and ``-``."""
    if not isinstance(value, str) or not re.fullmatch(r"[\w-]{1,200}", value, re.ASCII):
        raise refusal(at, f"{quote(value)} is not a name of letters, digits, _ and -")
    return value


def name(value: Any, at: str) -> str:
    """A dotted name, possibly with placeholders: ``h.{i}.ln_1``."""
    return _without(problem_with(value), value, at)


def near_name(value: Any, at: str) -> str:
    """A dotted name that may also refer to a neighbouring layer: ``h.{i-1}.ln_2``."""
    return _without(problem_with(value, near=True), value, at)


def _without(problem: str | None, value: Any, at: str) -> str:
    if problem:
        raise refusal(at, problem)
    return str(value)


def number(lowest: int, highest: int = 2**40) -> Check[int]:
    """A check for an integer in a range, both ends included."""

    def of(value: Any, at: str) -> int:
        if type(value) is not int or not lowest <= value <= highest:
            raise refusal(at, f"{quote(value)} instead of a number from {lowest} to {highest}")
        return value

    return of


def size(value: Any, at: str) -> int | str:
    """A positive integer, or a config attribute or quotient of two that gives one."""
    if isinstance(value, str) and is_size(value):
        return value
    if type(value) is int and 0 < value < 2**40:
        return value
    known = "a number, a config attribute, or one // another"
    raise refusal(at, f"{quote(value)} is not a size; write {known}")


def plain(value: Any, at: str) -> Any:
    """A number, a boolean, text, or ``None``."""
    return value if value is None or isinstance(value, (bool, int, float)) else text(value, at)


def only_true(value: Any, at: str) -> bool:
    """A flag, which has no other value than true."""
    if value is not True:
        raise refusal(at, f"{quote(value)}; only true is allowed here")
    return True


def refusal(at: str, problem: str) -> RecipeError:
    """An error at a place in the file; an empty place means the whole file."""
    return RecipeError(f"{at}: {problem}" if at else problem)


def inside(at: str, key: str) -> str:
    """The place of a key inside a mapping."""
    return f"{at}.{key:.120}" if at else key


def quote(value: Any) -> str:
    """The first 60 characters of a value's ``repr``."""
    try:
        return repr(value)[:60]
    except ValueError:
        return "a number of thousands of digits"


def _kind(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return "nothing" if value is None else quote(value)
