"""What a prediction of a tensor misses, in few bytes: which elements, and what they really are.

Adding a mean back to what was rounded misses some elements, most of them by one step from one
number to the next. So a block of corrections is three runs of bytes:

* ``gaps``: how many elements lie between one that was missed and the one before; 255 stands for
  255 elements, and goes on;
* ``steps``: for each, how many representable numbers the original lies above the prediction, from
  -127 to 127;
* ``exact``: the element itself, bit for bit, where ``steps`` holds -128 because it is farther off.

Any element can be far off (and any prediction wrong), NaN and signed zeros among them: nothing is
compared as a number, only as bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from enjoyln_cli.errors import BadCheckpoint

Ints = NDArray[np.signedinteger]

_FAR = -128
_ON = 255
_BLOCK = 1 << 19
"""Elements compared at once: few enough for the caches."""
_INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Corrections:
    """The three runs, of one block of elements."""

    gaps: NDArray[np.uint8]
    steps: NDArray[np.int8]
    exact: Ints
    """In integers as wide as the elements."""

    @property
    def nbytes(self) -> int:
        return self.gaps.nbytes + self.steps.nbytes + self.exact.nbytes


def corrections(original: torch.Tensor, predicted: torch.Tensor) -> Corrections:
    """What makes ``predicted`` the same bits as ``original``: flat, of one floating dtype."""
    right, guess = _bits(original), _bits(predicted)
    missed = _different(right, guess)
    found = right[missed]
    off = _ordered(found) - _ordered(guess[missed])
    near = (off > _FAR) & (off < -_FAR)
    steps = np.where(near, off, _FAR).astype(np.int8)
    return Corrections(_gaps(missed), steps, found[~near])


def correct(predicted: torch.Tensor, found: Corrections) -> None:
    """``predicted`` becomes the original, in place.

    Raises ``BadCheckpoint`` for runs that do not fit each other or the block.
    """
    bits = _bits(predicted)
    missed = _positions(found.gaps)
    far = found.steps == _FAR
    outside = missed.size and missed[-1] >= bits.size
    if missed.size != found.steps.size or far.sum() != found.exact.size or outside:
        raise BadCheckpoint("corrections that do not fit their block")
    right = _ordered(_ordered(bits[missed]) + found.steps.astype(bits.dtype))
    right[far] = found.exact
    bits[missed] = right


def _different(a: Ints, b: Ints) -> NDArray[np.intp]:
    """Where ``a`` and ``b`` differ: first by eights, since a search is slow that is hit often."""
    found = [np.empty(0, dtype=np.intp)]
    unlike = np.empty(min(a.size + 7, _BLOCK) // 8 * 8, dtype=bool)
    eights = unlike.view(np.uint64)
    for at in range(0, a.size, _BLOCK):
        some = min(_BLOCK, a.size - at)
        np.not_equal(a[at : at + some], b[at : at + some], out=unlike[:some])
        unlike[some:] = False
        hit = np.flatnonzero(eights != 0)
        within = np.flatnonzero(eights[hit].view(bool))
        found.append((hit[within >> 3] << 3) + (within & 7) + at)
    return np.concatenate(found)


def _bits(x: torch.Tensor) -> Ints:
    bits: Ints = x.view(_INTS[x.dtype.itemsize]).numpy()
    return bits


def _ordered(bits: Ints) -> Ints:
    """Sign and magnitude as an integer that grows with the number; its own inverse."""
    largest = np.iinfo(bits.dtype).max
    ordered: Ints = bits ^ ((bits >> (8 * bits.itemsize - 1)) & largest)
    return ordered


def _gaps(positions: NDArray[np.intp]) -> NDArray[np.uint8]:
    between = np.diff(positions, prepend=-1) - 1
    if not between.size or between.max() < _ON:
        return between.astype(np.uint8)
    whole, rest = np.divmod(between, _ON)
    last = np.cumsum(whole + 1) - 1
    gaps = np.full(last[-1] + 1, _ON, dtype=np.uint8)
    gaps[last] = rest
    return gaps


def _positions(gaps: NDArray[np.uint8]) -> NDArray[np.intp]:
    passed = np.cumsum(gaps, dtype=np.intp)[gaps != _ON]
    positions: NDArray[np.intp] = passed + np.arange(passed.size)
    return positions
