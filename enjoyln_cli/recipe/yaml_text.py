"""The YAML of recipes: small and plain, without anchors or other hidden features."""

from __future__ import annotations

from collections import Counter
from typing import Any

import yaml

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.text import first_line

MAX_CHARS = 1_000_000
"""Limit of a recipe's characters. Recipes of real models have a few thousand."""
MAX_DEPTH = 12
"""Limit of the nesting levels. A recipe has five."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The safe loader, in C if available: without it, a megabyte takes half a minute."""


_READ_AS_TEXT = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:merge")


class _Loader(_LOADER):  # type: ignore[misc, valid-type]
    """Reads a date as text, since JSON has none, and ``<<`` as a key; refuses repeated keys."""

    yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in forms if tag not in _READ_AS_TEXT]
        for first, forms in _LOADER.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) < len(keys):
            line, key = node.start_mark.line + 1, Counter(keys).most_common(1)[0][0]
            raise RecipeError(f"line {line}: the key {key!r:.80} occurs twice; remove one")
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Plain YAML without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump(data: Any) -> str:
    """The YAML text of ``data``; what holds no other mapping or list stands on one line."""
    options: dict[str, Any] = {"sort_keys": False, "width": 100, "allow_unicode": True}
    return str(yaml.dump(data, Dumper=_Dumper, default_flow_style=None, **options))


def dump_inline(data: Any) -> str:
    """The YAML text of plain data on one line of any length."""
    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True}
    text = yaml.dump(data, Dumper=_Dumper, default_flow_style=True, width=10**6, **options)
    return str(text).removesuffix("\n").removesuffix("\n...")


def load(text: str) -> Any:
    """Parse YAML. Raises ``RecipeError`` if it is not plain YAML within the limits."""
    if len(text) > MAX_CHARS:
        raise RecipeError(f"longer than {MAX_CHARS} characters, the limit for a recipe")
    try:
        _require_plain(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise RecipeError(f"{line}not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"not YAML: {one_line(error)}") from None


def one_line(error: Exception) -> str:
    """An exception's text without its line breaks."""
    return first_line(" ".join(str(error).split()))


def _require_plain(text: str) -> None:
    """Raise ``RecipeError`` for anchors, whose values may not fit in memory, and deep nesting."""
    depth = 0
    event: Any
    for event in yaml.parse(text, Loader=_Loader):
        line = f"line {event.start_mark.line + 1}"
        if getattr(event, "anchor", None):
            raise RecipeError(f"{line}: anchors and aliases are not allowed; write the value out")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise RecipeError(f"{line}: nested more than {MAX_DEPTH} levels deep")
