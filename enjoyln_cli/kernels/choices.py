"""What computes each kind of norm on a GPU: the measured choices, in memory and in the cache.

The cache has one file for each kind of GPU, driver, torch, Liger and source of the kernels. A file
that is damaged, or that was written for something else, counts as empty.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT = 1
Key = Mapping[str, str]
"""What times depend on: ``gpu``, ``capability``, ``driver``, ``torch``, ``liger``, ``sources``."""

KERNEL, LAYER_NORM, RMS_NORM, LIGER = "kernel", "layer_norm", "rms_norm", "liger"
"""What may compute a norm: this project's kernel, torch's two functions, or Liger's kernel."""
SEPARATE = "separate"
"""Of a norm of a sum: the addition, and then what was chosen for the norm."""


@dataclass(frozen=True)
class Norms:
    """A kind of norm: all that its speed depends on, besides the number of rows."""

    dtype: str
    """Of the rows, such as ``bfloat16``."""
    parameters: str
    """The dtype of weight and bias; that of the rows if there are none."""
    weight: bool
    bias: bool
    width: int
    """Elements of a row."""


@dataclass(frozen=True)
class Choice:
    """What is used for one kind of norm and number of rows, and why."""

    norms: Norms
    rows: int
    added: bool
    """Whether the norm is that of a sum, which is kept."""
    taken: str
    microseconds: Mapping[str, float]
    """The median time of each candidate that was measured."""
    left_out: Mapping[str, str]
    """Why other candidates were not measured."""


def file_name(key: Key) -> str:
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    return f"choices-{digest[:16]}.json"


def read(path: Path, key: Key) -> tuple[Choice, ...]:
    """The choices in the file ``path``; none if it is missing, damaged, or for another ``key``."""
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT or found["key"] != dict(key):
            return ()
        return tuple(_choice(entry) for entry in found["choices"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return ()


def _choice(entry: dict[str, Any]) -> Choice:
    """Raises ``TypeError`` or ``ValueError`` if the entry is not what ``write`` writes."""
    norms, times = Norms(**entry["norms"]), entry["microseconds"]
    choice = Choice(**{**entry, "norms": norms})
    wanted = {"rows": int, "added": bool, "taken": str, "microseconds": dict, "left_out": dict}
    fields = {"dtype": str, "parameters": str, "weight": bool, "bias": bool, "width": int}
    for holder, types in ((choice, wanted), (norms, fields)):
        for name, kind in types.items():
            if type(getattr(holder, name)) is not kind:
                raise TypeError(f"{name} is no {kind.__name__}")
    if (times and choice.taken not in times) or not all(0 < t < math.inf for t in times.values()):
        raise ValueError("the times do not belong to this choice")
    if choice.rows < 1:
        raise ValueError("there is no norm of no rows")
    return choice


def write(path: Path, key: Key, choices: Sequence[Choice]) -> None:
    """Replace the file ``path`` in one step. Raises ``OSError``."""
    content = {"format": FORMAT, "key": dict(key), "choices": [asdict(one) for one in choices]}
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix="choices-", suffix=".part", delete=False
    ) as file:
        try:
            json.dump(content, file, indent=1)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


_used: dict[tuple[torch.device, Norms], tuple[tuple[int, str], ...]] = {}
"""For each GPU and kind of norm: the largest number of rows, and what computes up to that."""


def bounds(rows: Sequence[int]) -> list[int]:
    """The largest number of rows that each measured number, in ascending order, stands for."""
    between = [math.isqrt(a * b) for a, b in zip(rows, rows[1:], strict=False)]
    return [*between, 2**31 - 1]


def use(place: torch.device, norms: Norms, taken: Mapping[int, str]) -> None:
    """Compute ``norms`` at ``place`` with what was ``taken`` for each number of rows."""
    rows = sorted(taken)
    _used[place, norms] = tuple(zip(bounds(rows), (taken[n] for n in rows), strict=True))


def forget() -> None:
    """Use no choice on any GPU."""
    _used.clear()


def taken_for(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> str | None:
    """What was chosen for a norm of ``x``, or ``None`` without a choice."""
    if not _used:
        return None
    rows = str(x.dtype).removeprefix("torch.")
    given = weight if weight is not None else bias
    parameters = rows if given is None else str(given.dtype).removeprefix("torch.")
    norms = Norms(rows, parameters, weight is not None, bias is not None, x.shape[-1])
    for most, taken in _used.get((x.device, norms), ()):
        if x.numel() // x.shape[-1] <= most:
            return taken
    return None
