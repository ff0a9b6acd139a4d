"""The distance between the outputs of two runs, and the ratio of two rounding errors.

The distance over an output is ``||a - b|| / ||b||``. ``verification`` compares the folded model's
distance from the exact function with the original's. Both are rounding errors, so their ratio is
partly chance: with few inputs it can be 3 for an exact fold. How far chance reaches follows from
the number ``D`` of independent errors. Their sum of squares is then like a sum of ``D`` squared
normal variables, and Chernoff's bound says that the ratio of two such sums is above

    x    with a probability of at most    ((1 + x)^2 / 4x)^(-D / 2)

Entries are no independent errors. All logits of a classifier come from one hidden vector, and
inputs may share an error. ``D`` is estimated from the errors themselves, with an input as unit:

    D = 1 / (q (1 / n + r^2)),    n = (sum |e_i|^2)^2 / sum |e_i|^4

where ``e_i`` is the error of input ``i`` over all entries of the output, ``q`` is the mean squared
cosine of the angle between the errors of two inputs (one over the independent entries of an input),
``r`` is the mean of ``e_i . e_j`` over the mean of ``|e_i|^2`` (what all inputs share), and ``n``
is the number of inputs that matter. Two runs are compared with the mean of both ``1 / D``. By
chance, each run may also be much worse on inputs of its own: the spread of the inputs' shares is
added to ``1 / D``. With one input nothing of this can be estimated: ``D`` is 1, and only a gross
error (``GROSS``) is no chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

AT_ONCE = 1 << 22
"""Number of entries that are converted to float64 at a time."""
MIN_ERROR_EPS = 0.5
"""Smallest rounding error that is expected of a result, in units of the eps of its dtype."""
CHANCE = 1e-6
"""Probability with which an exact result may be taken for a wrong result."""
GROSS = 1000.0
"""Chance never makes a ratio more than this many times larger: the original's rounding error counts
as at least half an eps, however small it is by chance."""
SAMPLED = 1024
"""Entries of an input whose errors are kept, to compare the errors of different inputs."""
COARSE = 4.0
"""If chance alone can make a ratio this many times larger, there are too few inputs to judge it."""


@dataclass(frozen=True)
class Distance:
    """The distance between two runs ``a`` and ``b``, for one output; a row is one input."""

    squares: torch.Tensor
    """``||a_i - b_i||^2`` for each row, float64, shape ``(rows,)``."""
    sizes: torch.Tensor
    """``||b_i||^2`` for each row, float64, shape ``(rows,)``."""
    errors: torch.Tensor
    """``a_i - b_i`` at up to ``SAMPLED`` evenly spaced entries, float64, ``(rows, entries)``."""
    comparable: bool
    """Whether the shapes are equal, and no entry is finite in only one of the two."""

    @property
    def relative(self) -> float:
        """``||a - b|| / ||b||``; infinite if ``a`` and ``b`` cannot be compared."""
        if not self.comparable:
            return math.inf
        difference, size = float(self.squares.sum()), float(self.sizes.sum())
        return math.sqrt(difference / size) if size else math.sqrt(difference)

    @property
    def independent_errors(self) -> float:
        """The number ``D`` of independent errors; 1 for one row.

        One pair of errors with cosine 1 is counted in addition, so that a few rows whose errors are
        orthogonal by chance do not count as many.
        """
        squares = self.squares[self.squares > 0]
        errors = self.errors[self.squares > 0]
        if len(squares) < 2:
            return 1.0
        rows, pairs = len(squares), len(squares) * (len(squares) - 1) / 2
        directions = F.normalize(errors, eps=1e-300)
        cosines = directions @ directions.T
        alike = (1 + float(cosines.square().sum() - cosines.diagonal().square().sum()) / 2) / (
            1 + pairs
        )
        own = float(errors.square().sum())
        shared = (float(errors.sum(0).square().sum()) - own) / ((rows - 1) * own) if own else 1.0
        matter = float(squares.sum() ** 2 / squares.square().sum())
        return 1 / (alike * (1 / matter + max(shared, 0.0) ** 2))

    def times(self, factor: float) -> Distance:
        """This distance multiplied by ``factor``."""
        return replace(self, squares=self.squares * factor**2, errors=self.errors * factor)


@dataclass(frozen=True)
class Ratio:
    """The error of a result divided by the original's own rounding error, for one output."""

    value: float
    chance: float
    """By chance, ``value`` is at most this many times the true ratio (see ``CHANCE``)."""

    @property
    def least(self) -> float:
        """The smallest true ratio that chance does not rule out."""
        return self.value / self.chance

    @property
    def is_coarse(self) -> bool:
        """Whether there are too few inputs to judge it."""
        return self.chance > COARSE


def distances(
    got: Iterable[Mapping[str, torch.Tensor]], exact: Iterable[Mapping[str, torch.Tensor]]
) -> dict[str, Distance]:
    """The distance of every output, over all batches.

    Entries that are the same infinity, or NaN, in both runs count as equal. An entry that is finite
    in only one run makes the output incomparable.
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
    """The distances of several batches, joined into one distance for each output."""
    pooled = {}
    for name in dict.fromkeys(name for batch in batches for name in batch):
        parts = [batch[name] for batch in batches if name in batch]
        width = max(part.errors.shape[1] for part in parts)
        pooled[name] = Distance(
            torch.cat([part.squares for part in parts]),
            torch.cat([part.sizes for part in parts]),
            torch.cat([F.pad(part.errors, (0, width - part.errors.shape[1])) for part in parts]),
            all(part.comparable for part in parts),
        )
    return pooled


def _incomparable() -> Distance:
    none = torch.zeros(1, dtype=torch.float64)
    return Distance(none, none, none[:, None], False)


def _distance(a: torch.Tensor, b: torch.Tensor) -> Distance:
    if a.shape != b.shape:
        return _incomparable()
    a, b = (value.reshape(len(value), value[:1].numel()) for value in (a, b))
    rows, width = b.shape
    squares, sizes = torch.zeros(2, rows, dtype=torch.float64)
    at_once = max(1, AT_ONCE // max(width, 1))
    for first in range(0, rows, at_once):
        part = slice(first, first + at_once)
        for x, y in zip(a[part].split(AT_ONCE, 1), b[part].split(AT_ONCE, 1), strict=True):
            x, y = x.double(), y.double()
            difference, size = (x - y).square().sum(1), y.square().sum(1)
            if not math.isfinite(float(difference.sum() + size.sum())):
                finite = x.isfinite() & y.isfinite()
                if not (finite | (x == y) | (x.isnan() & y.isnan())).all():
                    return _incomparable()
                difference = torch.where(finite, x - y, 0.0).square().sum(1)
                size = torch.where(finite, y, 0.0).square().sum(1)
            squares[part] += difference
            sizes[part] += size
    step = math.ceil(width / SAMPLED) or 1
    errors = a[:, ::step].double() - b[:, ::step].double()
    return Distance(squares, sizes, errors.nan_to_num(0.0, 0.0, 0.0), True)


def relative(measured: Mapping[str, Distance]) -> dict[str, float]:
    """The relative distance over all rows, for each output."""
    return {name: distance.relative for name, distance in measured.items()}


def largest(errors: Mapping[str, float]) -> float:
    """The error of the worst output; 0 if there are none."""
    return max(errors.values(), default=0.0)


def ratios(
    measured: Mapping[str, Distance], own: Mapping[str, Distance], dtype: torch.dtype
) -> dict[str, Ratio]:
    """The ratio of two rounding errors in ``dtype``, for each output.

    ``own`` are the original's errors. They count as at least half the eps of ``dtype``.
    """
    floor = MIN_ERROR_EPS * torch.finfo(dtype).eps
    found = {}
    for name, original in own.items():
        value = measured[name].relative / max(original.relative, floor)
        value = math.inf if math.isnan(value) else value  # neither can be compared
        found[name] = Ratio(value, chance_of(measured[name], original))
    return found


def chance_of(measured: Distance, own: Distance) -> float:
    """How many times the true ratio of two errors its measured value may be by chance."""
    if not (measured.comparable and own.comparable):
        return 1.0
    dependence = (1 / measured.independent_errors + 1 / own.independent_errors) / 2
    rows = len(own.squares)
    if rows > 1 and rows == len(measured.squares):
        shares = [each.squares / (each.squares.sum() or 1.0) for each in (measured, own)]
        spread = float((shares[0] - shares[1]).square().sum())
        dependence += spread / 4 * rows / (rows - 1)
    bound = math.exp(2 * dependence * math.log(1 / CHANCE))  # (1 + x)^2 / 4x
    return min(math.exp(math.acosh(2 * bound - 1) / 2), GROSS)  # the square root of x


def worst(found: Mapping[str, Ratio]) -> Ratio:
    """The ratio that is the furthest above what chance allows; 0 if there are no outputs."""
    return max(found.values(), key=lambda ratio: ratio.least, default=Ratio(0.0, 1.0))
