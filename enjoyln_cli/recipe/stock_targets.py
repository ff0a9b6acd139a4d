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
class StockTarget:
    """A class, and the stock class with RMSNorm that computes the same; see the YAML file."""

    name: str
    source: str
    target: str
    eps: str
    options: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    require: Mapping[str, Any] = field(default_factory=dict)
    same: tuple[str, ...]
    square: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    copied: Mapping[str, str] = field(default_factory=dict)
    products: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    quotients: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    per_layer: Mapping[str, Any] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    ones: tuple[str, ...] = ()
    added: Mapping[str, float] = field(default_factory=dict)
    omitted: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StockTargets:
    """All that are known."""

    targets: tuple[StockTarget, ...]
    none: Mapping[str, str]
    """Classes without a target, and why."""


@cache
def stock_targets() -> StockTargets:
    """The targets in ``templates/stock_rms_norm.yaml``."""
    file = resources.files("enjoyln_cli").joinpath("templates", "stock_rms_norm.yaml")
    return schema.read(StockTargets, load(file.read_text("utf-8")))


def target_for(source: str, name: str) -> StockTarget:
    """The target for the class ``source`` that has this ``name``, or is the class of this name.

    Raises ``UnsupportedModel`` if ``source`` has no such target.
    """
    known = [each for each in stock_targets().targets if each.source == source]
    for target in known:
        if name in (target.name, target.target):
            return target
    others = ", ".join(target.name for target in known)
    why = stock_targets().none.get(source, "no target is known")
    more = f"it can be stored as {others}" if others else why
    raise UnsupportedModel(f"{source} cannot be stored as {name}: {more}")
