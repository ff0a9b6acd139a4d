"""Write the names of one model so that they fit every size of its family.

A layer number in a dotted name becomes a placeholder: ``h.3.ln_1`` is written ``h.{i}.ln_1`` and
stands for every layer (a second number becomes ``{j}``, and so on). If several lines match a name,
the one with the fewest placeholders wins. A name that a line mentions may be one layer away:
``h.{i-1}.ln_2``.

The edits of a plan are dataclasses. ``rename_in`` changes the names in any of them. It is used both
to put placeholders into an edit and to fill in layer numbers again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

LETTERS = "ijkl"
"""Letters of placeholders, outermost layer first. A fifth number in a name stays a number."""

_PLACEHOLDER = re.compile(r"\{([ijkl])([+-]1)?\}")

NAMES = frozenset({"norm", "norms", "module", "parameter", "tensor", "weight", "bias", "divided"})
"""Fields of a plan's edits that hold the name of an edited module, parameter or tensor."""

Value = TypeVar("Value")


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


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and (word == "0" or word[0] != "0") and len(word) < 7
