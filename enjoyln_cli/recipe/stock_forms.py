"""Which stock classes compute RMSNorm as a folded model of another class does.

They are data: ``templates/stock_rms_norm.yaml``, whose head explains the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.plan import schema
from enjoyln_cli.recipe.yaml_text import load


@dataclass(frozen=True, kw_only=True)
class StockForm:
    """A class, and the stock class with RMSNorm that computes the same; see the YAML file."""

    name: str
    source: str
    target: str
    options: Mapping[str, Any] = field(default_factory=dict)
    require: Mapping[str, Any] = field(default_factory=dict)
    same: tuple[str, ...]
    copied: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    per_layer: Mapping[str, Any] = field(default_factory=dict)
    ones: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StockForms:
    """All that are known."""

    forms: tuple[StockForm, ...]
    none: Mapping[str, str]
    """Classes without a target, and why."""


@cache
def stock_forms() -> StockForms:
    """The targets in ``templates/stock_rms_norm.yaml``."""
    file = resources.files("enjoyln_cli").joinpath("templates", "stock_rms_norm.yaml")
    return schema.read(StockForms, load(file.read_text("utf-8")))


def form_for(source: str, name: str) -> StockForm:
    """The form with the target ``name``. Raises ``UnsupportedModel`` if ``source`` has none."""
    known = stock_forms()
    for form in known.forms:
        if (form.source, form.name) == (source, name):
            return form
    others = [form.name for form in known.forms if form.source == source]
    why = known.none.get(source, "no target is known")
    more = f"it can be stored as {', '.join(others)}" if others else why
    raise UnsupportedModel(f"{source} cannot be stored as {name}: {more}")
