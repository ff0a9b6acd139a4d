"""Write the sizes of one model's axes so that they fit every size of its family.

A size becomes the name of the config attribute with that value, the quotient of two attributes
(``hidden_size // num_attention_heads``), or a small multiple of these (``2 * hidden_size``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan import schema
from enjoyln_cli.plan.axis import Axis

WIDTHS = ("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim")
"""Preferred among attributes of the same value; the others follow in alphabetical order."""
SIZES = ("start", "outer", "size", "step")
"""The fields of an axis that a recipe can give by name."""

_SIZE = re.compile(r"(?:([1-9]\d{0,5}) \* )?([A-Za-z_][\w.]*)(?: // ([A-Za-z_][\w.]*))?")
_MULTIPLES = range(2, 9)


def named_axis(axis: Axis, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an axis with named sizes, without those that say nothing."""
    heads = axis.outer > 1 or axis.inner > 1
    named = {
        "dim": axis.dim,
        "start": name_size(axis.start, config, heads=heads, multiples=True),
        "outer": name_size(axis.outer, config, counts=True),
        "size": name_size(axis.size, config, heads=heads),
        "inner": axis.inner,
        "step": name_size(axis.step, config, heads=heads, multiples=True),
    }
    usual = {"start": 0, "outer": 1, "inner": 1, "step": 0}
    return {key: value for key, value in named.items() if value != usual.get(key)}


def in_numbers(line: Any, config: Mapping[str, Any]) -> Any:
    """The data of a line with the numbers of its sizes. Raises ``RecipeError`` (``size_value``)."""
    if isinstance(line, list):
        return [in_numbers(part, config) for part in line]
    if not isinstance(line, Mapping):
        return line
    return {
        key: size_value(value, config) if key in SIZES and isinstance(value, str) else value
        for key, value in line.items()
    }


def size_value(size: str, config: Mapping[str, Any]) -> int:
    """The number that a size stands for. Raises ``RecipeError`` without its config attributes."""
    match = _SIZE.fullmatch(size)
    if not match:
        known = "a number, a config attribute, one // another, or 2 * one of these"
        raise RecipeError(f"{schema.quote(size)} is not a size; write {known}")
    times, *names = match.groups()
    values = numbers_of(config)
    for name in filter(None, names):
        if name not in values:
            raise RecipeError(f"{size} needs the config attribute {name} with a number above 1")
    return int(times or 1) * values[names[0]] // values.get(names[1], 1)


def numbers_of(config: Mapping[str, Any], prefix: str = "") -> dict[str, int]:
    """The integers above 1 of a config by name; those of nested configs have dotted names."""
    numbers: dict[str, int] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            numbers |= numbers_of(value, f"{prefix}{name}.")
        elif type(value) is int and value > 1:
            numbers[prefix + str(name)] = value
    return numbers


def name_size(
    number: int,
    config: Mapping[str, Any],
    *,
    heads: bool = False,
    counts: bool = False,
    multiples: bool = False,
) -> int | str:
    """The config attributes that give ``number``; ``number`` itself if none do.

    ``heads`` prefers sizes of heads, ``counts`` numbers of heads, and ``multiples`` also takes
    multiples of a width or of a head's size.
    """
    values = numbers_of(config)
    names = sorted(values, key=_rank)
    equal = [name for name in names if values[name] == number]
    if counts:
        equal.sort(key=lambda name: "head" not in name)
    if heads:
        direct = [name for name in equal if "head" in name and ("dim" in name or "size" in name)]
        divisors = [name for name in sorted(values) if "head" in name and name not in direct]
        shares = [
            f"{name} // {count}"
            for name in names
            for count in divisors
            if "head" not in name and values[name] == number * values[count]
        ]
        equal = direct + shares + equal
    if equal:
        return equal[0]
    for times in _MULTIPLES if multiples and number else ():
        unit = name_size(number // times, config, heads=heads) if number % times == 0 else 0
        if isinstance(unit, str) and (unit in WIDTHS or "head" in unit):
            return f"{times} * {unit}"
    return number


def _rank(name: str) -> tuple[int, int, str]:
    last = name.rpartition(".")[2]
    return WIDTHS.index(last) if last in WIDTHS else len(WIDTHS), name.count("."), name
