"""Write the names of one model so that they fit every size of its family.

A layer number in a dotted name becomes a placeholder: ``h.3.ln_1`` is written ``h.{i}.ln_1`` and
stands for every layer (a second number becomes ``{j}``, and so on). A text that a line mentions may
name the layer before or after it: ``h.{i-1}.ln_2``.

The lines of a recipe map names to plain data. ``join_layers`` writes one line for all layers that
agree, and ``expand`` writes one line for each name again. If several lines match a name, the one
with the fewest placeholders wins.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from enjoyln_cli.errors import RecipeError

KEEP = "keep"
"""The line of a name that stays as it is."""
MAX_NAMES = 300_000
"""Limit of the names that the lines of a section expand to."""
LETTERS = "ijkl"
"""Letters of placeholders, outermost layer first. A fifth number in a name stays a number."""

_PLACEHOLDER = re.compile(r"\{([ijkl])([+-]1)?\}")

Lines = Mapping[str, Any]
"""A section of a recipe: the plain data of the edit of each name."""


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


def to_template(name: str, layers: Mapping[str, int]) -> str:
    """``h.3.ln_1`` -> ``h.{i}.ln_1``."""
    return relative(name, name, layers)


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


def fill(text: str, numbers: Mapping[str, int]) -> str:
    """Fill in the placeholders of ``text``; a placeholder without a number stays."""

    def number(match: re.Match[str]) -> str:
        letter, step = match.groups()
        return str(numbers[letter] + int(step or 0)) if letter in numbers else match.group()

    return _PLACEHOLDER.sub(number, text)


def names_of(template: str, layers: Mapping[str, int]) -> Iterator[tuple[str, dict[str, int]]]:
    """Every name that a template stands for, with the numbers of its placeholders."""
    match = _PLACEHOLDER.search(template)
    if match is None:
        yield template, {}
        return
    prefix = template[: match.start()].rstrip(".")
    for number in range(layers.get(prefix, 0)):
        filled = template[: match.start()] + str(number) + template[match.end() :]
        for name, numbers in names_of(filled, layers):
            yield name, {match[1]: number} | numbers


def require_name(name: str) -> str:
    """``name``, if it is a dotted name with placeholders. Raises ``ValueError``."""
    if not 0 < len(name) <= 400:
        raise ValueError(f"a name has 1 to 400 characters, but this has {len(name)}")
    letters = []
    for word in name.split("."):
        match = _PLACEHOLDER.fullmatch(word)
        if match and not match[2]:
            letters.append(match[1])
        elif not re.fullmatch(r"[\w-]+", word, re.ASCII):
            raise ValueError(f"{name!r:.80} is not a dotted name with {{i}} for layer numbers")
    if len(letters) > len(set(letters)):
        raise ValueError(f"{name!r:.80} has the same placeholder twice")
    return name


def _levels(words: Sequence[str], layers: Mapping[str, int]) -> list[int]:
    """The positions of the words of a name that are layer numbers."""
    places = (at for at, word in enumerate(words) if _is_number(word))
    return [at for at in places if ".".join(words[:at]) in layers][: len(LETTERS)]


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and (word == "0" or word[0] != "0") and len(word) < 7


# Lines.


def map_texts(data: Any, change: Callable[[str], str]) -> Any:
    """Plain data with every text changed; keys stay."""
    if isinstance(data, str):
        return change(data)
    if isinstance(data, Mapping):
        return {key: map_texts(item, change) for key, item in data.items()}
    return [map_texts(item, change) for item in data] if isinstance(data, (list, tuple)) else data


def join_layers(lines: Lines, layers: Mapping[str, int], *, gaps: bool) -> dict[str, Any]:
    """One line for the layers that agree, followed by a line for each that differs.

    With ``gaps``, there may be fewer layers without such a line than with one; those get ``keep``.
    Otherwise lines are joined only if every layer has one.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, data in lines.items():
        groups.setdefault(to_template(name, layers), {})[name] = data
    joined: dict[str, Any] = {}
    for template, members in groups.items():
        missing = [name for name, _ in names_of(template, layers) if name not in members]
        if missing and not (gaps and len(missing) <= len(members)):
            joined |= members
            continue
        forms = {name: _general_forms(name, data, layers) for name, data in members.items()}
        counts = Counter(form for some in forms.values() for form in some)
        last_first = (form for name in reversed(forms) for form in forms[name])
        common = max(last_first, key=counts.__getitem__)
        joined[template] = json.loads(common)
        joined |= {name: members[name] for name, some in forms.items() if common not in some}
        joined |= dict.fromkeys(missing, KEEP)
    return joined


def _general_forms(name: str, data: Any, layers: Mapping[str, int]) -> tuple[str, ...]:
    """``data`` as JSON, with and without placeholders in the names that its texts mention."""

    def near(text: str) -> str:
        return re.sub(r"[\w-]+(\.[\w-]+)+", lambda match: relative(match[0], name, layers), text)

    return tuple(dict.fromkeys((json.dumps(map_texts(data, near)), json.dumps(data))))


def expand(lines: Lines, layers: Mapping[str, int]) -> dict[str, Any]:
    """The lines with every one repeated for each layer that it stands for.

    Raises ``RecipeError`` if a line matches no name, or if two lines name the same.
    """
    deciding: dict[str, tuple[dict[str, int], Any]] = {}
    total = 0
    for template, data in lines.items():
        before = total
        for name, numbers in names_of(template, layers):
            total += 1 + len(str(data)) // 50
            if total > MAX_NAMES:
                raise RecipeError(f"stands for more than {MAX_NAMES} names; remove some lines")
            fewest = len(deciding[name][0]) if name in deciding else len(LETTERS) + 1
            if len(numbers) == fewest:
                raise RecipeError(f"two lines name {name}; remove one of them")
            if len(numbers) < fewest:
                deciding[name] = numbers, data
        if total == before:
            raise RecipeError(f"{template} matches nothing; the model has no such layers")
    return {
        name: map_texts(data, partial(fill, numbers=numbers)) if numbers else data
        for name, (numbers, data) in deciding.items()
    }
