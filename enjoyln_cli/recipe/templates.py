"""Write the names of one model so that they fit every size of its family.

A layer number in a dotted name becomes a placeholder: ``h.3.ln_1`` is written ``h.{i}.ln_1`` and
stands for every layer (a second number becomes ``{j}``, and so on). A text that a line mentions may
name the layer before or after it: ``h.{i-1}.ln_2``. ``join_layers`` writes one line for all layers
that agree, and a line for each that differs.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

KEEP = "keep"
"""The line of a name that stays as it is."""
LETTERS = "ijkl"
"""Letters of placeholders, outermost layer first. A fifth number in a name stays a number."""

_PLACEHOLDER = re.compile(r"\{[ijkl]\}")

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


def relative(name: str, to: str, layers: Mapping[str, int]) -> str:
    """``name`` with layer numbers relative to ``to``: ``{i}``, ``{i-1}`` or ``{i+1}``.

    Relative to itself, ``h.3.ln_1`` is ``h.{i}.ln_1``. Numbers that differ by more than 1 stay as
    they are.
    """
    words, others = name.split("."), to.split(".")
    for depth, at in enumerate(_levels(others, layers)):
        if at >= len(words) or name.split(".")[:at] != others[:at] or not _is_number(words[at]):
            break
        step = int(words[at]) - int(others[at])
        if abs(step) < 2:
            words[at] = f"{{{LETTERS[depth]}{f'{step:+d}' if step else ''}}}"
    return ".".join(words)


def names_of(template: str, layers: Mapping[str, int]) -> Iterator[str]:
    """Every name that a template stands for."""
    match = _PLACEHOLDER.search(template)
    if match is None:
        yield template
        return
    prefix = template[: match.start()].rstrip(".")
    for number in range(layers.get(prefix, 0)):
        filled = template[: match.start()] + str(number) + template[match.end() :]
        yield from names_of(filled, layers)


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

    Without ``gaps``, lines are joined only if every layer has a line. With ``gaps``, half of the
    layers need a line, and the others get ``keep``.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, data in lines.items():
        groups.setdefault(relative(name, name, layers), {})[name] = data
    joined: dict[str, Any] = {}
    for template, members in groups.items():
        missing = [name for name in names_of(template, layers) if name not in members]
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
