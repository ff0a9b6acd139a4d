"""Parameters of folded norms that change nothing: weights of one, biases of zero, after a merge.

They stay in the model under their names. As long as they hold these values nobody has to read them:

    weightless      y = x / sqrt(mean(x^2) + eps) + bias
    biasless        y = weight * x / sqrt(mean(x^2) + eps)

A norm is told so when its model is looked at (see ``weight_watch``), at the first call and after
each change of these parameters, never by a config alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch._subclasses import FakeTensor

from enjoyln_cli.models.norm_modules import PLAIN
from enjoyln_cli.runtime.modules import Folded


@dataclass(frozen=True)
class Neutral:
    """A parameter of a norm that may change nothing."""

    norm: str
    name: str
    """That of the parameter in the norm."""
    flag: str
    """The norm's attribute that says whether it changes nothing: ``weightless`` or ``biasless``."""
    value: float
    """What all its elements are if it changes nothing."""

    @property
    def path(self) -> str:
        return f"{self.norm}.{self.name}"


def neutral_parameters(
    model: nn.Module, weightless: Iterable[str], biasless: Iterable[str]
) -> tuple[Neutral, ...]:
    """Those of the norms at the paths ``weightless`` and ``biasless`` of ``model``."""
    found = [
        Neutral(path, norm.weight_name, "weightless", norm.unit)
        for path, norm in _folded(model, weightless)
    ]
    found += [
        Neutral(path, norm.bias_name, "biasless", 0.0) for path, norm in _folded(model, biasless)
    ]
    return tuple(found)


def _folded(model: nn.Module, paths: Iterable[str]) -> Iterator[tuple[str, Folded]]:
    for path in paths:
        norm = model.get_submodule(path)
        if isinstance(norm, Folded):
            yield path, norm


def set_flags(model: nn.Module, parameters: Iterable[Neutral], known: bool = True) -> list[Any]:
    """Tells each norm which of its ``parameters`` change nothing; none where that is not ``known``.

    Returns what was told, as facts for a ``Snapshot``.
    """
    facts = []
    for one in parameters:
        norm = model.get_submodule(one.norm)
        if isinstance(norm, Folded):
            own = vars(norm)
            own[one.flag] = known and _all_are(norm._parameters.get(one.name), one.value)  # type: ignore
            facts.append((own, one.flag, own[one.flag]))
    return facts


def _all_are(tensor: Any, value: float) -> bool:
    """Whether all elements are ``value``, and torch would count a change of them."""
    if type(tensor) not in PLAIN or isinstance(tensor, FakeTensor):
        return False
    if tensor.is_meta or tensor.is_inference() or not tensor.is_floating_point():
        return False
    return bool((tensor.detach() == value).all())
