"""How far two runs of a model are apart, over all positions and at each of them.

A position is a vector along the last dimension of an output: a token, an image's logits, a row of
pixels. Over an output the distance is ``||a - b|| / ||b||``, a root mean square that does not hang
on single entries. So a rare position can be far off and not show in it. There the distance is
``||a_p - b_p|| / max(||b_p||, m)`` with ``m`` the median of the ``||b_p||``: a position where the
model says almost nothing is held against an ordinary one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

AT_ONCE = 1 << 22
"""Entries that are held in float64 at once."""
ROUNDED_AT_LEAST = 0.5
"""No result in a dtype is nearer to the exact one than about half its eps."""
POSITIONS = 4.0
"""Times the original's worst position that a folded model's may be. Of 18 right folds, in three
dtypes and with five seeds each, it was 2.2 times at most, and what storing costs 1.7 times."""
USUAL_RATIO = 1.25
FEWEST_ENTRIES = 128
"""Entries of an output that the ratio of two rounding errors rests on, at least. A ratio of root
mean squares over n entries is known to about 1 / sqrt(n): from 128 on, 1.25 is nearly three
standard errors from 1. One entry of each of ``runs.MOST_ROWS`` inputs is as many."""


@dataclass(frozen=True)
class Distance:
    """Two runs of one output."""

    squares: torch.Tensor
    """``||a_p - b_p||^2`` of each position, float64."""
    sizes: torch.Tensor
    """``||b_p||^2`` of each position."""
    comparable: bool
    """Whether the shapes are the same, and no entry is finite in one of the two alone."""
    entries: int = 0
    """Numbers that were compared."""

    @property
    def is_sparse(self) -> bool:
        """Whether it rests on too few entries for the ratio of two rounding errors."""
        return self.comparable and 0 < self.entries < FEWEST_ENTRIES

    @property
    def relative(self) -> float:
        """``||a - b|| / ||b||``; infinite where they cannot be compared."""
        if not self.comparable:
            return math.inf
        difference, size = float(self.squares.sum()), float(self.sizes.sum())
        return math.sqrt(difference / size) if size else math.sqrt(difference)

    @property
    def positions(self) -> torch.Tensor:
        """The relative distance at each position."""
        if not self.comparable:
            return torch.full((1,), math.inf, dtype=torch.float64)
        sizes = self.sizes
        least = float(sizes.median()) or float(sizes.mean()) or 1.0
        return (self.squares / sizes.clamp(min=least)).sqrt()

    def times(self, factor: float) -> Distance:
        """The distance of runs that are so many times as far apart."""
        return replace(self, squares=self.squares * factor**2)


@dataclass(frozen=True)
class WorstPosition:
    """The position of any output that is furthest from the exact function."""

    error: float
    original: float
    """The original's own error, where that is at its worst."""
    ratio: float
    """``error / original``, for the output where that is largest."""


def distances(
    got: Sequence[Mapping[str, torch.Tensor]], exact: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, Distance]:
    """The distance of every output, over all batches.

    Entries that are the same infinity or NaN in both count as equal; one that is finite in one
    alone makes the output incomparable.
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
    """The distances of several batches as one, by output."""
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
    """The distance over all positions, by output."""
    return {name: distance.relative for name, distance in found.items()}


def largest(errors: Mapping[str, float]) -> float:
    """That of the worst output."""
    return max(errors.values(), default=0.0)


def ratio(errors: Mapping[str, float], own: Mapping[str, float], dtype: torch.dtype) -> float:
    """Worst output of ``errors / own``; no own error counts less than half the dtype's eps."""
    floor = ROUNDED_AT_LEAST * torch.finfo(dtype).eps
    ratios = [errors[name] / max(own[name], floor) for name in own]
    return max((math.inf if math.isnan(value) else value for value in ratios), default=0.0)


def worst_position(
    found: Mapping[str, Distance], own: Mapping[str, Distance], dtype: torch.dtype
) -> WorstPosition:
    """The worst position of ``found`` beside the worst one of the original's ``own`` rounding.

    They need not be the same: where rounding falls hardest differs from run to run.
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
    """The position where rounding the stored weights costs most beside the original's rounding.

    What storing costs is the same in every run, so it is held against what the original's rounding
    is at that very position; or, as that may be small by luck, its root mean square if larger.
    """
    found = WorstPosition(0.0, 0.0, 0.0)
    for name, distance in stored.items():
        errors, before = distance.positions, own[name].positions
        usual = float(before.square().mean().sqrt()) if before.numel() else 0.0
        floor = max(usual, ROUNDED_AT_LEAST * torch.finfo(dtype).eps)
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
    """What the ratio of the worst positions may be, where ``max_ratio`` holds over all of them."""
    return POSITIONS * max(max_ratio / USUAL_RATIO, 1.0)


def gross_bound(max_ratio: float, entries: int) -> float:
    """How far an output may be whose ``entries`` are too few for a ratio: what is no chance.

    The fewer they are, the further apart two roundings can be by chance.
    """
    return position_bound(max_ratio) * FEWEST_ENTRIES / entries


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0
