"""The orthogonal matrices that a rotation group is rotated by, and their fast products.

Every matrix is ``Q = K S``. ``K`` spreads each feature over all of them, and does not depend on the
seed: a Kronecker product of ``J / 2 - I`` of order 4 (``J`` is all ones), of the Hadamard matrix of
order 2, and of one circulant of odd or small order whose eigenvalues are ``exp(i pi u k^2 / 2m)``.
``S`` differs with the seed: a permutation if ``Q 1 = 1`` has to hold, otherwise random signs.

``Q 1 = 1`` is what a rotation group with a LayerNorm needs: then ``Q`` commutes with centring, and
``LayerNorm(Q x) = Q LayerNorm(x)`` for a LayerNorm without weight and bias. The matrices of order 4
and the circulant fix ``1``; the matrix of order 2 is left out then. No entry of ``K`` is above
``1.45 / sqrt(d)`` for the sizes of usual models, and ``1.75 / sqrt(d)`` for large primes;
``1 / sqrt(d)`` is the least possible.

A product with a vector takes ``O(d log d)`` operations.

Where the last feature is to be left out, ``H Q`` takes the place of a ``Q`` with ``Q 1 = 1``: the
reflection ``H = I - v v' / (1 - 1/sqrt(d))`` with ``v = 1/sqrt(d) - e`` exchanges ``1/sqrt(d)``
with the last axis ``e``, so the last of the new features is the sum of the old by ``sqrt(d)``.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from enjoyln_cli.plan.axis import Axis, blocks

DENSE = 256
"""A circulant up to this order is multiplied as a matrix, a larger one by a Fourier transform."""
TAIL = 32
"""Small matrices are joined up to this order: one product of this size is faster than several."""
NO_FLATTER = 1.01
"""A circulant this flat ends the search: its largest entry is this times the least possible."""


@dataclass(frozen=True)
class GivenMatrix:
    """A matrix that the user gave, made exactly orthogonal."""

    digest: str
    """SHA-256 of the values: two are equal if their digests are."""
    values: torch.Tensor = field(compare=False, repr=False)
    """float64, of shape ``(size, size)``."""


@dataclass(frozen=True)
class Rotation:
    """The matrix ``Q`` of one rotation group."""

    size: int
    seed: int
    label: str
    """Differs between the rotation groups of a model, so that each gets a matrix of its own."""
    fixes_ones: bool
    """Whether ``Q 1 = 1``."""
    given: GivenMatrix | None = None
    """The matrix, if it is not made from the seed."""
    mean_last: bool = False
    """Whether the last feature becomes ``1' x / sqrt(size)``, instead of ``Q 1 = 1``."""


def rotate(x: torch.Tensor, axis: Axis, rotation: Rotation) -> torch.Tensor:
    """``Q x`` for each group of ``axis``; other elements stay as they are.

    ``x`` is float64, of any shape; of any dtype if the matrix is given. The result is a new tensor.
    """
    if not axis.step and axis.length == x.shape[axis.dim]:
        return _rotated(x, axis, rotation)
    out = x.clone()
    for block in blocks(axis):
        place = (block.dim, block.start, block.length)
        out.narrow(*place).copy_(_rotated(x.narrow(*place), block, rotation))
    return out


def _rotated(x: torch.Tensor, axis: Axis, rotation: Rotation) -> torch.Tensor:
    """``Q x`` for the groups of an axis that covers its dimension."""
    before, after = math.prod(x.shape[: axis.dim]), math.prod(x.shape[axis.dim + 1 :])
    groups = x.reshape(before * axis.outer, axis.size, axis.inner * after)
    return product(groups, rotation).reshape(x.shape)


def product(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """``Q`` times the vectors along dimension 1 of ``x``.

    ``x`` is float64, of shape (n, size, m). The result is a new tensor, not always contiguous.
    """
    if rotation.mean_last:
        x = product(x, replace(rotation, mean_last=False))
        root = math.sqrt(rotation.size)
        last = x[:, -1:] - x.sum(1, keepdim=True) / root
        x = x + last / (root - 1)
        x[:, -1:] -= last * (root / (root - 1))
        return x
    if rotation.given is not None:
        dense = rotation.given.values
        return (x.squeeze(2) @ dense.T).unsqueeze(2) if x.shape[2] == 1 else dense @ x
    many, size, width = x.shape
    if width == 1 and many > 1:  # long runs of elements that are computed alike are fastest
        return product(x.transpose(0, 2).contiguous(), rotation).transpose(0, 2)
    if rotation.fixes_ones:
        x = x.index_select(1, _permutation(rotation))
    else:
        x = (x * _signs(rotation).unsqueeze(1)).contiguous()
    fours, tail, rest = _factors(size, rotation.fixes_ones)
    for level in range(fours):
        rows = x.view(many * 4**level, 4, size // 4 ** (level + 1) * width)
        torch.sub(rows.sum(1, keepdim=True).mul_(0.5), rows, out=rows)
    if tail is not None:
        rows = x.view(many * size // (len(tail) * rest), len(tail), rest * width)
        x = tail @ rows
    if rest > 1:
        rows = x.view(many * size // rest, rest, width)
        rotated = torch.fft.rfft(rows, dim=1) * _eigenvalues(rest).unsqueeze(1)
        x = torch.fft.irfft(rotated, rest, 1).contiguous()
    return x.view(many, size, width)


def matrix(rotation: Rotation) -> torch.Tensor:
    """``Q`` as a float64 tensor of shape ``(size, size)``."""
    return product(torch.eye(rotation.size, dtype=torch.float64).unsqueeze(0), rotation)[0]


@lru_cache(maxsize=32)
def _factors(size: int, fixes_ones: bool) -> tuple[int, torch.Tensor | None, int]:
    """``K`` as a Kronecker product: how many matrices of order 4, a matrix, and a circulant.

    The matrix joins the small factors. The circulant is given by its order. A small circulant is a
    part of the matrix, and the order is 1.
    """
    fours, two, rest = _orders(size, fixes_ones)
    tail = torch.ones(1, 1, dtype=torch.float64)
    if two:
        tail = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)
    if 1 < rest <= DENSE:
        column = torch.fft.irfft(_eigenvalues(rest), n=rest)
        at = torch.arange(rest)
        tail = torch.kron(tail, column[(at.unsqueeze(1) - at) % rest])
        rest = 1
    four = torch.full((4, 4), 0.5, dtype=torch.float64) - torch.eye(4, dtype=torch.float64)
    while fours and 1 < len(tail) <= TAIL // 4:
        fours, tail = fours - 1, torch.kron(four, tail)
    return fours, tail if len(tail) > 1 else None, rest


def _orders(size: int, fixes_ones: bool) -> tuple[int, bool, int]:
    """How many matrices of order 4, whether a matrix of order 2, and the circulant's order.

    With ``Q 1 = 1``, an even circulant takes a factor of 4 with it: of order 2 there are only the
    identity and the exchange.
    """
    fours = 0
    while size % 4 == 0:
        size, fours = size // 4, fours + 1
    if size % 2 == 0 and not fixes_ones:
        return fours, True, size // 2
    if size == 2 and fours:
        return fours - 1, False, 8
    return fours, False, size


@lru_cache(maxsize=16)
def _eigenvalues(order: int) -> torch.Tensor:
    """The first half of the circulant's eigenvalues, for the flattest of several chirps.

    Their absolute value is 1, so the circulant is orthogonal; the first is 1, so it fixes the
    vector of ones; ``irfft`` adds the conjugates of the others, so it is real.
    """
    k = torch.arange(order // 2 + 1, dtype=torch.int64)
    best, flattest = torch.ones(len(k), dtype=torch.complex128), math.inf
    for rate in range(1, min(4 * order, 512)):
        # the angle is reduced in whole numbers, so that large orders lose no digits
        angle = (rate * k * k % (4 * order)).double() * (math.pi / (2 * order))
        chirp = torch.polar(torch.ones_like(angle), angle)
        if order % 2 == 0:
            chirp[-1] = 1.0 if chirp[-1].real >= 0 else -1.0
        largest = float(torch.fft.irfft(chirp, n=order).abs().max()) * math.sqrt(order)
        if largest < flattest - 1e-9:
            best, flattest = chirp, largest
        if flattest < NO_FLATTER:
            break
    return best


def _random_bytes(rotation: Rotation, many: int) -> bytes:
    """Bytes that depend on the seed and label alone, on every machine and in every version."""
    return hashlib.shake_256(f"{rotation.seed} {rotation.label}".encode()).digest(many)


@lru_cache(maxsize=64)
def _permutation(rotation: Rotation) -> torch.Tensor:
    keys = _random_bytes(rotation, 8 * rotation.size)
    order = sorted(range(rotation.size), key=lambda i: (keys[8 * i : 8 * i + 8], i))
    return torch.tensor(order)


@lru_cache(maxsize=64)
def _signs(rotation: Rotation) -> torch.Tensor:
    bits = torch.frombuffer(bytearray(_random_bytes(rotation, rotation.size)), dtype=torch.uint8)
    return 1.0 - 2.0 * (bits & 1).double()
