"""The distance between the outputs of two runs, over all positions and at each position.

A position is one vector along the last dimension of an output: a token, an image's logits, a row of
pixels. The distance over a whole output is ``||a - b|| / ||b||``. It depends little on single
entries, so a large error at one position may not show in it. Therefore the distance at each
position ``p`` is measured too: ``||a_p - b_p|| / max(||b_p||, m)``, where ``m`` is the median of
the ``||b_p||``. The median keeps positions with very small outputs from dominating.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

AT_ONCE = 1 << 22
"""Number of entries that are converted to float64 at a time."""
MIN_ERROR_EPS = 0.5
"""Smallest rounding error that is expected of a result, in units of the eps of its dtype."""
POSITION_RATIO = 4.0
"""Largest allowed ratio of the folded model's worst position to the original's worst position.
Among 18 correct folds, in three dtypes and with five seeds each, the largest ratio was 2.2 (1.7 for
the storage error)."""
USUAL_RATIO = 1.25
"""The default of ``max_ratio``."""
FEWEST_ENTRIES = 128
"""Fewest entries of an output for which the ratio of two rounding errors is meaningful. A ratio of
root mean squares over n entries has a standard error of about 1 / sqrt(n): with 128 entries, 1.25
is nearly three standard errors from 1. ``sampling.MOST_ROWS`` inputs with one entry each are 128
entries."""


@dataclass(frozen=True)
class Distance:
    """The distance between two runs ``a`` and ``b``, for one output."""

    squares: torch.Tensor
    """``||a_p - b_p||^2`` for each position, float64, shape ``(positions,)``."""
    sizes: torch.Tensor
    """``||b_p||^2`` for each position, float64, shape ``(positions,)``."""
    comparable: bool
    """Whether the shapes are equal, and no entry is finite in only one of the two."""
    entries: int = 0
    """Number of compared entries."""

    @property
    def is_sparse(self) -> bool:
        """Whether there are too few entries for the ratio of two rounding errors."""
        return self.comparable and 0 < self.entries < FEWEST_ENTRIES

    @property
    def relative(self) -> float:
        """``||a - b|| / ||b||``; infinite if ``a`` and ``b`` cannot be compared."""
        if not self.comparable:
            return math.inf
        difference, size = float(self.squares.sum()), float(self.sizes.sum())
        return math.sqrt(difference / size) if size else math.sqrt(difference)

    @property
    def positions(self) -> torch.Tensor:
        """The relative distance at each position, float64, shape ``(positions,)``."""
        if not self.comparable:
            return torch.full((1,), math.inf, dtype=torch.float64)
        sizes = self.sizes
        least = float(sizes.median()) or float(sizes.mean()) or 1.0
        return (self.squares / sizes.clamp(min=least)).sqrt()

    def times(self, factor: float) -> Distance:
        """This distance multiplied by ``factor``."""
        return replace(self, squares=self.squares * factor**2)


@dataclass(frozen=True)
class WorstPosition:
    """The errors at the position, of all outputs, that is furthest from the exact function."""

    error: float
    original: float
    """The original's own rounding error: at its own worst position (``worst_position``), or at the
    same position (``worst_stored``)."""
    ratio: float
    """The largest ratio of ``error`` to ``original`` among the outputs."""


def distances(
    got: Sequence[Mapping[str, torch.Tensor]], exact: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, Distance]:
    """The distance of every output, over all batches.

    Entries that are the same infinity, or NaN, in both runs count as equal. An entry that is finite
    in only one of them makes the output incomparable.
    """
    return pool_distances([distances_of(a, b) for a, b in zip(got, exact, strict=True)])


def distances_of(
    got: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]
) -> dict[str, Distance]:
    """The distance of every output of one batch."""
    if set(got) != set(exact):
        return {name: _incomparable() for name in exact}
    return {name: _distance(got[name], value) for name, value in exact.items()}


def pool_distances(batches: Sequence[Mapping[str, Distance]]) -> dict[str, Distance]:
    """The distances of several batches joined into one, for each output."""
    found = {}
    for name in dict.fromkeys(name for batch in batches for name in batch):
        parts = [batch[name] for batch in batches if name in batch]
        found[name] = Distance(
            torch.cat([part.squares for part in parts]),
            torch.cat([part.sizes for part in parts]),
            all(part.comparable for part in parts),
            sum(part.entries for part in parts),
        )
    return found


def _incomparable() -> Distance:
    return Distance(torch.zeros(1), torch.zeros(1), False)


def _distance(a: torch.Tensor, b: torch.Tensor) -> Distance:
    if a.shape != b.shape:
        return _incomparable()
    width = b.shape[-1] if b.ndim > 1 else 1
    if not b.numel():
        return Distance(torch.zeros(0), torch.zeros(0), True)
    rows = max(1, AT_ONCE // width)
    squares, sizes = [], []
    for x, y in zip(
        a.reshape(-1, width).split(rows), b.reshape(-1, width).split(rows), strict=True
    ):
        x, y = x.double(), y.double()
        difference, size = (x - y).square().sum(-1), y.square().sum(-1)
        if not math.isfinite(float(difference.sum() + size.sum())):
            finite = x.isfinite() & y.isfinite()
            if not (finite | (x == y) | (x.isnan() & y.isnan())).all():
                return _incomparable()
            difference = torch.where(finite, x - y, 0.0).square().sum(-1)
            size = torch.where(finite, y, 0.0).square().sum(-1)
        squares.append(difference)
        sizes.append(size)
    return Distance(torch.cat(squares), torch.cat(sizes), True, b.numel())


def relative(found: Mapping[str, Distance]) -> dict[str, float]:
    """The relative distance over all positions, for each output."""
    return {name: distance.relative for name, distance in found.items()}


def largest(errors: Mapping[str, float]) -> float:
    """The error of the worst output; 0 if there are none."""
    return max(errors.values(), default=0.0)


def ratio(errors: Mapping[str, float], own: Mapping[str, float], dtype: torch.dtype) -> float:
    """The largest ``errors / own`` among the outputs; ``own`` is at least half the dtype's eps."""
    floor = MIN_ERROR_EPS * torch.finfo(dtype).eps
    ratios = [errors[name] / max(own[name], floor) for name in own]
    return max((math.inf if math.isnan(value) else value for value in ratios), default=0.0)


def worst_position(
    found: Mapping[str, Distance], own: Mapping[str, Distance], dtype: torch.dtype
) -> WorstPosition:
    """The worst position of ``found``, compared with the worst position of the original's ``own``.

    These can be two positions: the position with the largest rounding error differs between runs.
    """
    worst = {name: _largest(distance.positions) for name, distance in found.items()}
    before = {name: _largest(distance.positions) for name, distance in own.items()}
    return WorstPosition(
        max(worst.values(), default=0.0),
        max(before.values(), default=0.0),
        ratio(worst, before, dtype),
    )


def worst_stored(
    stored: Mapping[str, Distance], own: Mapping[str, Distance], dtype: torch.dtype
) -> WorstPosition:
    """The position with the largest ratio of storage error to the original's rounding error.

    The storage error is the same in every run, so it is compared with the original's rounding error
    at the same position. Since that may be small by chance, its root mean square over all positions
    is used if it is larger.
    """
    found = WorstPosition(0.0, 0.0, 0.0)
    for name, distance in stored.items():
        errors, before = distance.positions, own[name].positions
        usual = float(before.square().mean().sqrt()) if before.numel() else 0.0
        floor = max(usual, MIN_ERROR_EPS * torch.finfo(dtype).eps)
        if errors.shape != before.shape:
            return WorstPosition(math.inf, usual, math.inf)
        ratios = (errors / before.clamp(min=floor)).nan_to_num(math.inf)
        if ratios.numel() and float(ratios.max()) > found.ratio:
            at = int(ratios.argmax())
            found = WorstPosition(
                float(errors[at]), max(float(before[at]), floor), float(ratios[at])
            )
    return found


def position_bound(max_ratio: float) -> float:
    """The limit for the ratio of worst positions; ``max_ratio`` is that over all positions."""
    return POSITION_RATIO * max(max_ratio / USUAL_RATIO, 1.0)


def gross_bound(max_ratio: float, entries: int) -> float:
    """The limit for the ratio of an output with few ``entries``, which only finds gross errors.

    The fewer entries there are, the larger the ratio of two rounding errors can be by chance.
    """
    return position_bound(max_ratio) * FEWEST_ENTRIES / entries


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0
