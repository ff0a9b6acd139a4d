"""The smallest checks of a recipe's values.

Each returns its value, or raises ``RecipeError`` with the key (``at``), what arrived there and what
belongs there, in one line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.recipe.templates import is_size, problem_with
from enjoyln_cli.text import did_you_mean

Value = TypeVar("Value")


def mapping(
    value: Any, at: str, required: Sequence[str], optional: Sequence[str] = ()
) -> Mapping[str, Any]:
    """A mapping with all of the required keys and none that is unknown."""
    known = (*required, *optional)
    if not isinstance(value, Mapping):
        raise RecipeError(f"{at}: {_kind(value)} where a mapping with {_or(known)} belongs")
    for key in value:
        if key not in known:
            hint = did_you_mean(str(key), known, 1) or f"known are {_or(known)}"
            raise RecipeError(f"{at}: unknown key {shown(key)}; {hint}")
    for key in required:
        if key not in value:
            raise RecipeError(f"{at}: the key {key} is missing; add it")
    return value


def entries(value: Any, at: str, of: Callable[[str, Any, str], Value]) -> dict[str, Value]:
    """A mapping whose keys are text; ``of`` checks key and value."""
    if not isinstance(value, Mapping):
        raise RecipeError(f"{at}: {_kind(value)} where a mapping of names belongs")
    for key in value:
        text(key, at)
    return {key: of(key, item, f"{at}.{key:.120}") for key, item in value.items()}


def items(value: Any, at: str, of: Callable[[Any, str], Value]) -> tuple[Value, ...]:
    """A list; ``of`` checks each item."""
    if not isinstance(value, list):
        raise RecipeError(f"{at}: {_kind(value)} where a list belongs; write [...]")
    return tuple(of(item, f"{at}[{index}]") for index, item in enumerate(value))


def text(value: Any, at: str) -> str:
    """One line of at most 1000 printable characters."""
    if not isinstance(value, str) or len(value) > 1000 or not value.isprintable():
        raise RecipeError(f"{at}: {shown(value)} where one line of text belongs")
    return value


def word(value: Any, at: str) -> str:
    """A class or an argument: letters, digits, ``_`` and ``-``."""
    if not isinstance(value, str) or not re.fullmatch(r"[\w-]{1,200}", value, re.ASCII):
        raise RecipeError(f"{at}: {shown(value)} is not a name of letters, digits, _ and -")
    return value


def name(value: Any, at: str) -> str:
    """A dotted name that may hold for every layer: ``h.{i}.ln_1``."""
    problem = problem_with(value)
    if problem:
        raise RecipeError(f"{at}: {problem}")
    return str(value)


def near_name(value: Any, at: str) -> str:
    """A name that may lie one layer away from another: ``h.{i-1}.ln_2``."""
    problem = problem_with(value, near=True)
    if problem:
        raise RecipeError(f"{at}: {problem}")
    return str(value)


def number(value: Any, at: str, lowest: int, highest: int = 2**40) -> int:
    """A whole number in a range."""
    if type(value) is not int or not lowest <= value <= highest:
        raise RecipeError(f"{at}: {shown(value)} where a number from {lowest} to {highest} belongs")
    return value


def size(value: Any, at: str) -> int | str:
    """A positive number, or the config attributes that give one."""
    if isinstance(value, str) and is_size(value):
        return value
    if type(value) is int and 0 < value < 2**40:
        return value
    raise RecipeError(
        f"{at}: {shown(value)} is no size; write a number, a config attribute, or one // another"
    )


def plain(name: str, value: Any, at: str) -> Any:
    """A number, a truth value, text, or nothing."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return text(value, at)


def shown(value: Any) -> str:
    """The start of any value."""
    try:
        return repr(value)[:60]
    except ValueError:
        return "a number of thousands of digits"


def _kind(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return "nothing" if value is None else shown(value)


def _or(names: Sequence[str]) -> str:
    return ", ".join(names)


def one_line(error: Exception) -> str:
    """An exception's text without its line breaks."""
    return " ".join(str(error).split())[:200]
