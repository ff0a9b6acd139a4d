"""The argument of ``forward`` that takes the cache, under the name of any transformers release.

transformers 5.24 renamed ``past_key_values`` to ``cache``, in arguments and in outputs, and accepts
the old name as well. Plans, markers and recipes say ``past_key_values``, so a checkpoint that was
folded with any release means the same with another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping
from typing import Any

CACHE = "past_key_values"
"""The name of the argument and of the output in plans, markers and recipes."""
NAMES = (CACHE, "cache")
"""The names of both in the releases of transformers."""


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The argument that takes a cache from the call before, or ``None`` if there is none."""
    accepted = inspect.signature(forward).parameters
    return next((name for name in NAMES if name in accepted), None)


def in_plans(name: str) -> str:
    """The name of an argument of transformers' own classes in plans."""
    return CACHE if name in NAMES else name


def spellings(name: str) -> tuple[str, ...]:
    """The names of the argument ``name`` in the releases of transformers."""
    return NAMES if name in NAMES else (name,)


def is_same_argument(accepted: Container[str]) -> bool:
    """Whether both names mean the same argument, for a ``forward`` with these arguments.

    Code outside of transformers may use both names for different things.
    """
    return sum(name in accepted for name in NAMES) == 1


def returned_cache(result: Any) -> Any:
    """The cache in what a model returned; ``None`` if it returned none."""
    if isinstance(result, Mapping):  # also for transformers' outputs, where attributes may warn
        outputs = dict(result.items())
        return next((outputs[name] for name in NAMES if outputs.get(name) is not None), None)
    values = (getattr(result, name, None) for name in NAMES)
    return next((value for value in values if value is not None), None)
