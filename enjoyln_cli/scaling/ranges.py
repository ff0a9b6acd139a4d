"""How large the numbers are that norms square and sum, and by which power of two they fit float16.

An engine that takes a norm apart, or sums in float16, overflows where a square or the sum of a row
is above 65504: a single value of 256 is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from enjoyln_cli.comparison.batches import Batch, complete_batch
from enjoyln_cli.models.load import silent
from enjoyln_cli.models.norm_modules import first_input

FLOAT16_MAX = torch.finfo(torch.float16).max
TOKENS = 32
"""How many tokens are generated for each row of an encoder with its decoder."""
MARGIN = 4.0
"""How many times larger than on the calibration data a square or a sum may be."""


@dataclass
class NormRange:
    """The largest numbers that one norm meets on calibration data."""

    squares: float = 0.0
    """The largest sum of the squares of a row."""
    total: float = 0.0
    """The largest absolute value of the sum of a row."""
    variance: float = math.inf
    """The smallest variance of a row."""

    def include(self, x: torch.Tensor) -> None:
        """Take account of an input of shape ``(..., features)``."""
        x = x.detach().double()
        self.squares = max(self.squares, float(x.square().sum(-1).max()))
        self.total = max(self.total, float(x.sum(-1).abs().max()))
        self.variance = min(self.variance, float(x.var(-1, unbiased=False).min()))

    @property
    def overflows(self) -> bool:
        """Whether a square, or the sum of a row or of its squares, is beyond float16."""
        return max(self.squares, self.total) > FLOAT16_MAX

    @property
    def shift(self) -> int:
        """The smallest ``k >= 0`` with which ``2^-k x`` stays in float16, with the margin."""
        by_squares = math.log2(max(MARGIN * self.squares / FLOAT16_MAX, 1.0)) / 2
        by_total = math.log2(max(MARGIN * self.total / FLOAT16_MAX, 1.0))
        return math.ceil(max(by_squares, by_total))


def norm_ranges(model: Any, norms: Iterable[str], batches: Iterable[Batch]) -> dict[str, NormRange]:
    """What each of the ``norms``, given by their paths, meets while ``model`` runs ``batches``.

    A norm that no batch reaches is left out.
    """
    found: dict[str, NormRange] = {}

    def look(path: str, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        found.setdefault(path, NormRange()).include(args[0] if args else kwargs[name])

    handles = []
    for path in norms:
        module = model.get_submodule(path)
        hook = partial(look, path, first_input(type(module).forward))
        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        with torch.no_grad(), silent():
            for batch in batches:
                run_batch(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def shifts_of(ranges: Mapping[str, NormRange]) -> dict[str, int]:
    """The power of two for each norm that overflows."""
    return {norm: found.shift for norm, found in ranges.items() if found.overflows}


def run_batch(model: Any, batch: Batch) -> None:
    """Run the model; an encoder with its decoder generates ``TOKENS`` tokens for each row."""
    if model.config.is_encoder_decoder and model.can_generate():
        model.generate(**batch, max_new_tokens=TOKENS, do_sample=False, num_beams=1)
    else:
        model(**complete_batch(model, batch, torch.float32))
