"""Keep the random numbers of torch, Python and NumPy as they were before a trace."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Draws:
    """The states of the random numbers of Python and of NumPy when a block began."""

    def __init__(self) -> None:
        self._numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
        self._states = self._now()

    def _now(self) -> tuple[Any, Any]:
        return random.getstate(), self._numpy.get_state() if self._numpy else None

    @property
    def by_python(self) -> bool:
        """Whether a number was drawn from one of them, which no trace shows."""
        return pickle.dumps(self._now()) != pickle.dumps(self._states)

    def put_back(self) -> None:
        random.setstate(self._states[0])
        if self._numpy:
            self._numpy.set_state(self._states[1])


@contextmanager
def same_random_state() -> Iterator[Draws]:
    """Afterwards, the random states of torch (CPU), Python and NumPy are as before the block."""
    draws = Draws()
    with torch.random.fork_rng(devices=[]):
        try:
            yield draws
        finally:
            draws.put_back()
