"""Write a recipe as YAML text; ``read`` documents the format."""

from __future__ import annotations

from typing import Any

from enjoyln_cli.plan import schema
from enjoyln_cli.recipe.model import Recipe
from enjoyln_cli.recipe.read import KEYED, SHORT_FORMS
from enjoyln_cli.recipe.yaml_text import Inline, Row, dump

DERIVED = frozenset({"needs", "mlps", "path", "shape"})
"""Fields of a plan that the next proof finds again."""

_LINES = 4
"""The level of the lines of a section: ``variants``, one of them, the section, a line."""

_HEAD = """\
# The LayerNorms of {model_type} that become RMSNorm, and the edits that keep the function the same.
# {{i}} stands for every layer; a line with the number of a layer overrides it.
# fold: in the weights alone; fold_with: with the named mean subtractions; keep: stays LayerNorm.
# To leave a norm as it is, write keep for it and pass this file with --recipe.
"""


def dump_recipe(recipe: Recipe) -> str:
    """The canonical text: the same recipe always gives the same bytes."""
    data = schema.plain(recipe, {*DERIVED, "where"})
    return _HEAD.format(model_type=recipe.model_type) + dump(_layout(_in_short(data)))


def _in_short(data: Any, field: str = "") -> Any:
    """The data with mappings for the lists of ``KEYED``, and with short forms."""
    if isinstance(data, dict):
        return {key: _in_short(item, key) for key, item in data.items()}
    if not isinstance(data, list):
        return data
    key = KEYED.get(field)
    if key is None or not all(isinstance(item, dict) for item in data):
        return [_in_short(item) for item in data]
    lines: dict[str, list[Any]] = {}
    for item in data:
        rest = {name: value for name, value in item.items() if name != key}
        lines.setdefault(item[key], []).append(_short_line(field, _in_short(rest)))
    return {name: found[0] if len(found) == 1 else found for name, found in lines.items()}


def _short_line(field: str, line: dict[str, Any]) -> Any:
    for word, full in SHORT_FORMS.get(field, {}).items():
        if line == full:
            return word
    if "ops" in line and field == "norms":
        return {"fold_with": line["ops"]}
    if "reason" in line and field in ("norms", "merge"):
        culprit = {"culprit": line["culprit"]} if "culprit" in line else {}
        return {"keep": line["reason"], **culprit}
    return line


def _layout(data: Any, level: int = 0, field: str = "") -> Any:
    """The data with those mappings and lists marked that stand on one line.

    A line of a section stands on one line, unless it gives a reason or has lines of its own.
    """
    depth = _depth(data)
    listed = isinstance(data, list) and (depth > 1 or any(len(str(item)) > 50 for item in data))
    explained = isinstance(data, dict) and not data.keys().isdisjoint({"keep", "reason"})
    section = isinstance(data, dict) and field in KEYED
    if level and not (listed or explained or section) and depth <= (1 if level < _LINES else 2):
        return _on_one_line(data)
    if isinstance(data, dict):
        return {key: _layout(item, level + 1, key) for key, item in data.items()}
    return [_layout(item, level + 1) for item in data]


def _on_one_line(data: Any) -> Any:
    if isinstance(data, dict):
        return Inline({key: _on_one_line(item) for key, item in data.items()})
    return Row([_on_one_line(item) for item in data]) if isinstance(data, list) else data


def _depth(data: Any) -> int:
    """How many mappings and lists are inside each other."""
    inside = data.values() if isinstance(data, dict) else data
    return 1 + max(map(_depth, inside), default=0) if isinstance(data, (dict, list)) else 0
