"""The YAML of recipes: small and plain, without anchors, tags or other hidden features."""

from __future__ import annotations

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


_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class _Loader(_LOADER):  # type: ignore[misc, valid-type]
    """Reads a date as text, since JSON has none."""

    yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in forms if tag != _TIMESTAMP]
        for first, forms in _LOADER.yaml_implicit_resolvers.items()
    }


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
    """Raise ``RecipeError`` for anchors, tags, deep nesting and repeated keys."""
    keys: list[set[str] | None] = []
    at_key: list[bool] = []
    event: Any
    for event in yaml.parse(text, Loader=_Loader):
        line = f"line {event.start_mark.line + 1}"
        if getattr(event, "anchor", None) or isinstance(event, yaml.AliasEvent):
            raise RecipeError(f"{line}: anchors and aliases are not allowed; write the value out")
        if getattr(event, "tag", None):
            raise RecipeError(f"{line}: tags are not allowed; write the value without {event.tag}")
        if isinstance(event, yaml.CollectionEndEvent):
            keys.pop()
            at_key.pop()
            continue
        if isinstance(event, yaml.ScalarEvent) and keys and at_key[-1]:
            seen = keys[-1]
            if seen is not None and event.value in seen:
                raise RecipeError(f"{line}: the key {event.value!r:.80} occurs twice; remove one")
            if event.value == "<<":
                raise RecipeError(f"{line}: merging with << is not allowed; write the keys out")
            if seen is not None:
                seen.add(event.value)
        if keys and isinstance(event, yaml.NodeEvent):
            at_key[-1] = keys[-1] is not None and not at_key[-1]
        if isinstance(event, yaml.CollectionStartEvent):
            is_map = isinstance(event, yaml.MappingStartEvent)
            keys.append(set() if is_map else None)
            at_key.append(is_map)
            if len(keys) > MAX_DEPTH:
                raise RecipeError(f"{line}: nested more than {MAX_DEPTH} levels deep")
