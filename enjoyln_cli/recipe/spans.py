"""Write the axes of one model so that they fit every size of its family.

A size becomes the name of the config attribute with that value, the quotient of two attributes
(``hidden_size // num_attention_heads``), or a small multiple of these (``2 * hidden_size``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan import schema
from enjoyln_cli.plan.axis import Axis

WIDTHS = ("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim")
"""Preferred among attributes of the same value; the others follow in alphabetical order."""

_SIZE = re.compile(r"(?:([1-9]\d{0,5}) \* )?([A-Za-z_][\w.]*)(?: // ([A-Za-z_][\w.]*))?")
_MULTIPLES = range(2, 9)


def _checked_size(value: Any) -> Any:
    number = type(value) is int and 0 <= value < 2**40
    if not number and not (isinstance(value, str) and _SIZE.fullmatch(value)):
        known = "a number, a config attribute, one // another, or 2 * one of these"
        raise ValueError(f"{schema.quote(value)} is not a size; write {known}")
    return value


Size = Annotated[Any, schema.checked(_checked_size)]
"""A number, or the config attributes that give it."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """An ``Axis`` for every size of a family. See ``Axis`` for the fields.

    Without ``outer``, there are as many groups as fit. Without ``size``, there is one group over
    the whole dimension.
    """

    dim: Annotated[int, schema.number(-8, 7)]
    start: Size = 0
    outer: Size | None = None
    size: Size | None = None
    inner: Annotated[int, schema.number(1)] = 1
    step: Size = 0


def symbolic(axis: Axis, extent: int | None, config: Mapping[str, Any]) -> Span:
    """The span of an axis; the dimension has ``extent`` elements (``None`` if not known)."""
    if axis == Axis(axis.dim, 0, 1, extent or 0, 1):
        return Span(dim=axis.dim)
    heads = axis.outer > 1 or axis.inner > 1
    whole = axis.outer == _groups(axis.start, axis.size * axis.inner, axis.step, extent)
    whole = whole and (extent in (None, axis.stop) or axis.step > 0)
    return Span(
        dim=axis.dim,
        start=name_size(axis.start, config, heads=heads, multiples=True),
        outer=None if whole else name_size(axis.outer, config, counts=True),
        size=name_size(axis.size, config, heads=heads),
        inner=axis.inner,
        step=name_size(axis.step, config, heads=heads, multiples=True),
    )


def concrete(span: Span, extent: int | None, config: Mapping[str, Any]) -> Axis:
    """The axis that a span describes. Raises ``RecipeError`` if the sizes do not fit."""
    start, inner, step = size_value(span.start, config), span.inner, size_value(span.step, config)
    if span.size is not None:
        size = size_value(span.size, config)
    else:
        size = 0 if extent is None else (extent - start) // inner
    block = size * inner
    whole = span.outer is None
    outer = _groups(start, block, step, extent) if whole else size_value(span.outer, config)
    found = Axis(span.dim, start, outer, size, inner, step if outer > 1 else 0)
    rest = whole and not step and extent is not None and found.stop != extent
    outside = (extent is not None and found.stop > extent) or 0 < step <= block
    if block < 1 or outer < 1 or rest or outside:
        where = "a value of unknown size" if extent is None else f"{extent} elements"
        held = Span(**{field.name: getattr(span, field.name) for field in fields(Span)})
        shown = ", ".join(f"{key} {value}" for key, value in schema.plain(held).items())
        raise RecipeError(f"an axis with {shown} does not fit {where}")
    return found


def in_numbers(span: Span, extent: int | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a span that says the same without names of config attributes.

    A span over the whole of a dimension of unknown size stays as it is.
    """
    if extent is None and span.size is None:
        return {}
    axis = concrete(span, extent, config)
    outer = axis.outer if axis.outer > 1 else None
    return vars(axis) | {"outer": outer}


def _groups(start: int, block: int, step: int, extent: int | None) -> int:
    """How many groups fit; one if the size of the dimension is not known."""
    if extent is None or block < 1:
        return 1
    return (extent - start - block) // (step or block) + 1


def numbers_of(config: Mapping[str, Any], prefix: str = "") -> dict[str, int]:
    """The integers above 1 of a config by name; those of nested configs have dotted names."""
    found: dict[str, int] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            found |= numbers_of(value, f"{prefix}{name}.")
        elif type(value) is int and value > 1:
            found[prefix + str(name)] = value
    return found


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
        one = name_size(number // times, config, heads=heads) if number % times == 0 else 0
        if isinstance(one, str) and (one in WIDTHS or "head" in one):
            return f"{times} * {one}"
    return number


def _rank(name: str) -> tuple[int, int, str]:
    last = name.rpartition(".")[2]
    return WIDTHS.index(last) if last in WIDTHS else len(WIDTHS), name.count("."), name


def size_value(size: Any, config: Mapping[str, Any]) -> int:
    """The number that a size stands for. Raises ``RecipeError`` without its config attributes."""
    if isinstance(size, int):
        return size
    match = _SIZE.fullmatch(size)
    assert match
    times, *names = match.groups()
    values = numbers_of(config)
    for name in filter(None, names):
        if name not in values:
            raise RecipeError(f"{size} needs the config attribute {name} with a number above 1")
    return int(times or 1) * values[names[0]] // values.get(names[1], 1)
