"""Store the elements that a prediction of a tensor gets wrong, in few bytes.

Adding a mean back after rounding gets some elements wrong, most of them by one representable
number. A block of corrections is three runs of bytes:

* ``gaps``: the number of right elements between a wrong one and the wrong one before; 255 means
  255 elements plus the next number;
* ``steps``: for each wrong element, by how many representable numbers the original is above the
  prediction, from -127 to 127;
* ``exact``: the bits of the elements that are farther off, for which ``steps`` has -128.

Elements are compared by their bits alone, so corrections are exact for any prediction, and for NaN
and signed zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from enjoyln_cli.errors import BadCheckpoint

Ints = NDArray[np.signedinteger]

_FAR = -128
_ON = 255
_INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Corrections:
    """The three runs of one block of elements."""

    gaps: NDArray[np.uint8]
    steps: NDArray[np.int8]
    exact: Ints
    """Their bits, as integers of the elements' width."""

    @property
    def nbytes(self) -> int:
        return self.gaps.nbytes + self.steps.nbytes + self.exact.nbytes


def corrections(original: torch.Tensor, predicted: Iterable[torch.Tensor]) -> Corrections:
    """The corrections that turn ``predicted`` into the bits of ``original``, which is flat.

    ``predicted`` comes in consecutive flat blocks of any floating dtype, and is rounded to the
    dtype of ``original``.
    """
    bits = _bits(original)
    at = since = 0
    gaps = [np.empty(0, dtype=np.uint8)]
    steps = [np.empty(0, dtype=np.int8)]
    exact = [bits[:0]]
    for block in predicted:
        guess = _bits(block.to(original.dtype))
        right = bits[at : at + guess.size]
        missed = _different(right, guess)
        found = right[missed]
        off = _ordered(found) - _ordered(guess[missed])
        step = off.astype(np.int8)
        far = np.flatnonzero((step != off) | (step == _FAR))
        step[far] = _FAR
        gaps.append(_gaps(missed, since))
        steps.append(step)
        exact.append(found[far])
        at += guess.size
        since = guess.size - 1 - int(missed[-1]) if missed.size else since + guess.size
    return Corrections(np.concatenate(gaps), np.concatenate(steps), np.concatenate(exact))


def correct(predicted: torch.Tensor, found: Corrections) -> None:
    """Correct ``predicted`` in place, so that it becomes the original.

    Raises ``BadCheckpoint`` if the runs do not fit each other or the block.
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
    """Where ``a`` and ``b`` differ, searched by groups of eight first, since that is faster."""
    unlike = np.zeros(-(-a.size // 8) * 8, dtype=bool)
    np.not_equal(a, b, out=unlike[: a.size])
    hit = np.flatnonzero(unlike.view(np.uint64) != 0)
    within = np.flatnonzero(unlike.view(np.uint64)[hit].view(bool))
    return (hit[within >> 3] << 3) + (within & 7)


def _bits(x: torch.Tensor) -> Ints:
    bits: Ints = x.view(_INTS[x.dtype.itemsize]).numpy()
    return bits


def _ordered(bits: Ints) -> Ints:
    """Turn the bits of floats into integers that increase with the number; its own inverse."""
    largest = np.iinfo(bits.dtype).max
    ordered: Ints = bits ^ ((bits >> (8 * bits.itemsize - 1)) & largest)
    return ordered


def _gaps(positions: NDArray[np.intp], since: int) -> NDArray[np.uint8]:
    """The gaps between the wrong elements of a block; ``since`` right elements come before it."""
    between = np.diff(positions, prepend=-1 - since) - 1
    long = np.flatnonzero(between >= _ON)
    whole, between[long] = np.divmod(between[long], _ON)
    gaps = between.astype(np.uint8)
    return np.insert(gaps, np.repeat(long, whole), _ON) if long.size else gaps


def _positions(gaps: NDArray[np.uint8]) -> NDArray[np.intp]:
    passed = np.cumsum(gaps, dtype=np.intp)[gaps != _ON]
    positions: NDArray[np.intp] = passed + np.arange(passed.size)
    return positions
