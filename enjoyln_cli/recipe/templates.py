"""Write the names and sizes of one model so that they fit every size of its family.

A layer number in a dotted name becomes a placeholder: ``h.3.ln_1`` is written ``h.{i}.ln_1`` and
stands for every layer (a second number becomes ``{j}``, and so on). If several lines match a name,
the one with the fewest placeholders wins. A name that a line mentions may be one layer away:
``h.{i-1}.ln_2``.

A size becomes the name of the config attribute with that value, or the quotient of two attributes
(``hidden_size // num_attention_heads``). A whole dimension needs no size.

The edits of a plan are dataclasses. ``rename_in`` changes the names in any of them. It is used both
to put placeholders into an edit and to fill in layer numbers again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan.axis import Axis

LETTERS = "ijkl"
"""Letters of placeholders, outermost layer first. A fifth number in a name stays a number."""

WIDTHS = ("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim")
"""Preferred among attributes of the same value; the others follow in alphabetical order."""

_PLACEHOLDER = re.compile(r"\{([ijkl])([+-]1)?\}")
_PART = re.compile(r"([1-9]\d{0,5}) of ([1-9]\d{0,5})")
_SIZE = re.compile(r"[A-Za-z_][\w.]*( // [A-Za-z_][\w.]*)?")

NAMES = frozenset({"norm", "norms", "module", "parameter", "tensor", "weight", "bias", "divided"})
"""Fields of a plan's edits that hold the name of an edited module, parameter or tensor."""

Number = int | str
"""A number, or a config attribute or quotient of two attributes that gives it."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Span:
    """An ``Axis`` for every size of a family. See ``Axis`` for the fields.

    * ``size``: if missing, there is one group over all of ``length``.
    * ``length``: if missing, the axis extends to the end of the dimension.
    * ``part``: ``"k of n"``, the k-th of n equal parts, instead of start and length.
    * ``step``: distance between the starts of two groups; 0 if each begins where the last one ends.
    """

    dim: int
    size: Number | None = None
    inner: int = 1
    start: int = 0
    length: Number | None = None
    part: str | None = None
    step: int = 0


# Layers and names. ``{"h": 3}`` means that there are h.0, h.1 and h.2.


def layers_of(names: Iterable[str]) -> dict[str, int]:
    """Every prefix that is followed by the numbers 0, 1, 2 ..., to how many there are."""
    seen: dict[str, set[int]] = {}
    for name in names:
        words = name.split(".")
        for at, word in enumerate(words):
            if _is_number(word):
                seen.setdefault(".".join(words[:at]), set()).add(int(word))
    return {prefix: len(numbers) for prefix, numbers in seen.items() if max(numbers) < len(numbers)}


def to_template(name: str, layers: Mapping[str, int]) -> tuple[str, dict[str, int]]:
    """``h.3.ln_1`` -> ``("h.{i}.ln_1", {"i": 3})``."""
    words = name.split(".")
    numbers: dict[str, int] = {}
    for at in _levels(words, layers):
        letter = LETTERS[len(numbers)]
        numbers[letter] = int(words[at])
        words[at] = f"{{{letter}}}"
    return ".".join(words), numbers


def relative(name: str, to: str, layers: Mapping[str, int]) -> str:
    """``name`` with layer numbers relative to ``to``: ``{i}``, ``{i-1}`` or ``{i+1}``.

    Numbers that differ by more than 1 stay as they are.
    """
    words, others = name.split("."), to.split(".")
    for depth, at in enumerate(_levels(others, layers)):
        if at >= len(words) or name.split(".")[:at] != others[:at] or not _is_number(words[at]):
            break
        step = int(words[at]) - int(others[at])
        if abs(step) < 2:
            words[at] = f"{{{LETTERS[depth]}{f'{step:+d}' if step else ''}}}"
    return ".".join(words)


def relative_text(text: str, to: str, layers: Mapping[str, int]) -> str:
    """Apply ``relative`` to every dotted name in a sentence."""
    return re.sub(r"[\w-]+(\.[\w-]+)+", lambda match: relative(match[0], to, layers), text)


def fill(text: str, numbers: Mapping[str, int]) -> str:
    """Fill in the placeholders of ``text``; a placeholder without a number stays."""

    def number(match: re.Match[str]) -> str:
        letter, step = match.groups()
        return str(numbers[letter] + int(step or 0)) if letter in numbers else match.group()

    return _PLACEHOLDER.sub(number, text)


def placeholders(name: str) -> int:
    """The number of placeholders in a name."""
    return len(_PLACEHOLDER.findall(name))


def expand_name(template: str, layers: Mapping[str, int]) -> Iterator[tuple[str, dict[str, int]]]:
    """Every name that a template stands for, with the numbers of its placeholders."""
    match = _PLACEHOLDER.search(template)
    if match is None:
        yield template, {}
        return
    prefix = template[: match.start()].rstrip(".")
    for number in range(layers.get(prefix, 0)):
        rest = template[: match.start()] + str(number) + template[match.end() :]
        for name, numbers in expand_name(rest, layers):
            yield name, {match[1]: number} | numbers


# Edits: dataclasses of strings, numbers, tuples and further dataclasses.


def texts_in(value: object, field: str = "") -> Iterator[tuple[str, str]]:
    """Every string in an edit, as ``(name of its field, string)``."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, tuple):
        for item in value:
            yield from texts_in(item, field)
    elif is_dataclass(value):
        for part in fields(value):
            yield from texts_in(getattr(value, part.name), part.name)


def names_in(value: object) -> Iterator[str]:
    """Every name of a module, parameter or tensor that an edit changes or reads."""
    return (text for field, text in texts_in(value) if field in NAMES and text)


def rename_in(value: Value, rename: Callable[[str, str], str], field: str = "") -> Value:
    """The edit with every nonempty string replaced by ``rename(field, text)``."""
    found: Any = value
    if isinstance(value, str):
        found = rename(field, value)
    elif isinstance(value, tuple):
        found = tuple(rename_in(item, rename, field) for item in value)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = vars(value).items()
        new = {key: rename_in(part, rename, key) for key, part in parts if part}
        found = type(value)(**(vars(value) | new))
    return found  # type: ignore[no-any-return]


def problem_with(name: object, *, near: bool = False) -> str | None:
    """What is wrong with a name, if anything; ``near`` allows ``{i-1}`` and ``{i+1}``."""
    if not isinstance(name, str):
        return f"a name must be text, but this is of type {type(name).__name__}"
    if not 0 < len(name) <= 400:
        return f"a name has 1 to 400 characters, but this has {len(name)}"
    seen: list[str] = []
    for word in name.split("."):
        match = _PLACEHOLDER.fullmatch(word)
        if match and (near or not match[2]):
            seen.append(match[1])
        elif not re.fullmatch(r"[\w-]+", word, re.ASCII):
            return f"{name!r:.80} is not a dotted name with {{i}} for layer numbers"
    if len(seen) > len(set(seen)) and not near:
        return f"{name!r:.80} has the same placeholder twice"
    return None


def _levels(words: Sequence[str], layers: Mapping[str, int]) -> list[int]:
    """The positions of the words of a name that are layer numbers."""
    places = (at for at, word in enumerate(words) if _is_number(word))
    return [at for at in places if ".".join(words[:at]) in layers][: len(LETTERS)]


# Sizes.


def symbolic(axis: Axis, extent: int | None, config: Mapping[str, Any]) -> Span:
    """The span of an axis; the dimension has ``extent`` elements (``None`` if not known)."""
    if axis.step:
        to_end = extent is not None and axis.stop + axis.step > extent
        length = None if to_end else _named(axis.length, config, False)
        per_head = _named(axis.size, config, True)
        return Span(axis.dim, per_head, axis.inner, axis.start, length, step=axis.step)
    grouped = axis.outer > 1 or axis.inner > 1
    size = _named(axis.size, config, grouped) if grouped or extent is None else None
    if extent is None:
        length = _named(axis.length, config, False) if grouped else None
        return Span(axis.dim, size, axis.inner, axis.start, length)
    if axis.length == extent:
        return Span(axis.dim, size, axis.inner)
    if extent % axis.length == 0 and axis.start % axis.length == 0:
        part = f"{axis.start // axis.length + 1} of {extent // axis.length}"
        return Span(axis.dim, size, axis.inner, part=part)
    return Span(axis.dim, size, axis.inner, axis.start, _named(axis.length, config, False))


def concrete(span: Span, extent: int | None, config: Mapping[str, Any]) -> Axis:
    """The axis that a span describes. Raises ``RecipeError`` if the sizes do not fit."""
    size = None if span.size is None else _value(span.size, config)
    start, length = span.start, None if span.length is None else _value(span.length, config)
    if extent is not None and span.part is not None:
        number, parts = parse_part(span.part)
        length = extent // parts if extent % parts == 0 else -1
        start = (number - 1) * length
    elif length is None and span.step and extent is not None and size is not None:
        block = size * span.inner
        length = ((extent - start - block) // span.step + 1) * block
    elif length is None:
        length = extent - start if extent is not None else (size or -1) * span.inner
    size = length // span.inner if size is None else size
    block = size * span.inner
    found = Axis(span.dim, start, length // max(block, 1), size, span.inner, span.step)
    outside = (extent is not None and found.stop > extent) or 0 < span.step <= block
    if block < 1 or length < 1 or length % block or start < 0 or outside:
        where = "a value of unknown size" if extent is None else f"{extent} elements"
        raise RecipeError(f"an axis with {_shown(span)} does not fit {where}")
    return found if found.outer > 1 else replace(found, step=0)


def parse_part(part: str) -> tuple[int, int]:
    """``"3 of 4"`` -> ``(3, 4)``. Raises ``RecipeError``."""
    match = _PART.fullmatch(part)
    if not match or int(match[1]) > int(match[2]):
        raise RecipeError(f"a part must read like '1 of 3', but this is {part!r:.40}")
    return int(match[1]), int(match[2])


def is_size(text: str) -> bool:
    """Whether text is a config attribute name, or two with ``//`` in between."""
    return _SIZE.fullmatch(text) is not None


def attributes(span: Span) -> list[str]:
    """The config attributes that a span refers to."""
    texts = [text for text in (span.size, span.length) if isinstance(text, str)]
    return [name for text in texts for name in text.split(" // ")]


def numbers_of(config: Mapping[str, Any], prefix: str = "") -> dict[str, int]:
    """The integers above 1 of a config by name; those of nested configs have dotted names."""
    found: dict[str, int] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            found |= numbers_of(value, f"{prefix}{name}.")
        elif type(value) is int and value > 1:
            found[prefix + str(name)] = value
    return found


def _named(number: int, config: Mapping[str, Any], heads: bool) -> Number:
    """The config attribute or quotient that gives ``number``; ``number`` itself if none does."""
    values = numbers_of(config)
    names = sorted(values, key=_rank)
    equal = [name for name in names if values[name] == number]
    if heads:
        direct = [name for name in equal if "head" in name and ("dim" in name or "size" in name)]
        counts = [name for name in sorted(values) if "head" in name and name not in direct]
        shares = [
            f"{name} // {count}"
            for name in names
            for count in counts
            if "head" not in name and values[name] == number * values[count]
        ]
        equal = direct + shares + equal
    return equal[0] if equal else number


def _rank(name: str) -> tuple[int, int, str]:
    last = name.rpartition(".")[2]
    return WIDTHS.index(last) if last in WIDTHS else len(WIDTHS), name.count("."), name


def _value(number: Number, config: Mapping[str, Any]) -> int:
    if isinstance(number, int):
        return number
    values = numbers_of(config)
    names = number.split(" // ")
    for name in names:
        if name not in values:
            raise RecipeError(f"{number} needs the config attribute {name} with a number above 1")
    if len(names) == 2:
        return values[names[0]] // values[names[1]]
    return values[names[0]]


def _shown(span: Span) -> str:
    return ", ".join(f"{key} {value}" for key, value in axis_data(span).items())


def axis_data(span: Span) -> dict[str, Any]:
    """The fields of a span that differ from their defaults, and ``dim``."""
    fields: dict[str, Any] = {"dim": span.dim}
    fields |= {} if span.part is None else {"part": span.part}
    fields |= {"start": span.start} if span.start else {}
    fields |= {} if span.length is None else {"length": span.length}
    fields |= {} if span.size is None else {"size": span.size}
    fields |= {"inner": span.inner} if span.inner != 1 else {}
    return fields | ({"step": span.step} if span.step else {})


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and (word == "0" or word[0] != "0") and len(word) < 7
