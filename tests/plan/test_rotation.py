"""The matrices that turn a basis."""

from __future__ import annotations

import hashlib
import math

import numpy
import pytest
import torch

from enjoyln_cli.plan.axis import Axis, centre
from enjoyln_cli.plan.rotation import Rotation, matrix, product, rotate

SIZES = (1, 2, 3, 4, 7, 8, 10, 24, 48, 64, 77, 96, 128, 257, 300)


def of(size: int, fixes_ones: bool = True, seed: int = 0, label: str = "stream") -> Rotation:
    return Rotation(size, seed, label, fixes_ones)


@pytest.mark.parametrize("fixes_ones", [True, False], ids=["fixes ones", "any"])
@pytest.mark.parametrize("size", SIZES)
def test_every_matrix_is_orthogonal(size: int, fixes_ones: bool) -> None:
    exact = matrix(of(size, fixes_ones)).numpy().astype(numpy.longdouble)
    gram = exact @ exact.T
    assert float(abs(gram - numpy.eye(size)).max()) <= 1e-14
    if fixes_ones:
        assert float(abs(exact.sum(1) - 1).max()) <= 1e-14


@pytest.mark.parametrize("fixes_ones", [True, False], ids=["fixes ones", "any"])
def test_every_feature_is_spread_over_all(fixes_ones: bool) -> None:
    for size in (s for s in SIZES if s > 2):
        largest = matrix(of(size, fixes_ones)).abs().max() * math.sqrt(size)
        assert largest <= 1.75, size
    for size in (16, 64, 256):  # a Hadamard matrix: every entry is as small as can be
        entries = matrix(of(size, fixes_ones)).abs() * math.sqrt(size)
        torch.testing.assert_close(entries, torch.ones_like(entries))


def test_centring_and_layer_norm_pass_a_matrix_on_that_fixes_ones() -> None:
    x = torch.randn(5, 48, dtype=torch.float64) + 3
    whole = Axis(1, 0, 1, 48, 1)
    normed = torch.layer_norm(x, [48])
    for fixes_ones in (True, False):
        turned = rotate(x, whole, of(48, fixes_ones))
        same = torch.allclose(
            torch.layer_norm(turned, [48]), rotate(normed, whole, of(48, fixes_ones))
        )
        both = torch.allclose(
            centre(turned, whole), rotate(centre(x, whole), whole, of(48, fixes_ones))
        )
        assert same == both == fixes_ones


def test_a_product_is_that_of_the_matrix() -> None:
    for size in SIZES:
        x = torch.randn(3, size, 2, dtype=torch.float64)
        torch.testing.assert_close(product(x, of(size)), matrix(of(size)) @ x)


@pytest.mark.parametrize(
    "axis",
    [
        Axis(0, 0, 1, 24, 1), Axis(1, 0, 1, 24, 1), Axis(1, 6, 2, 6, 1), Axis(0, 0, 4, 6, 1),
        Axis(1, 0, 1, 6, 4), Axis(1, 2, 3, 4, 1, 8),
    ],
)  # fmt: skip
def test_each_group_of_an_axis_is_turned(axis: Axis) -> None:
    x, rotation = torch.randn(24, 24, dtype=torch.float64), of(axis.size)
    turned, q = rotate(x, axis, rotation), matrix(rotation)
    expected, step = x.clone().movedim(axis.dim, 0), axis.step or axis.size * axis.inner
    for outer in range(axis.outer):
        for inner in range(axis.inner):
            at = axis.start + outer * step + inner + axis.inner * torch.arange(axis.size)
            expected[at] = q @ expected[at]
    torch.testing.assert_close(turned, expected.movedim(0, axis.dim))


def test_the_seed_and_the_label_choose_the_matrix() -> None:
    for fixes_ones in (True, False):
        first = matrix(of(24, fixes_ones))
        assert torch.equal(first, matrix(of(24, fixes_ones)))
        assert not torch.allclose(first, matrix(of(24, fixes_ones, seed=1)))
        assert not torch.allclose(first, matrix(of(24, fixes_ones, label="values")))


def test_the_matrix_of_a_power_of_four_by_hand() -> None:
    """``(J / 2 - I) x (J / 2 - I)``, after the random part: the same on every machine."""
    four = torch.full((4, 4), 0.5, dtype=torch.float64) - torch.eye(4)
    bits = hashlib.shake_256(b"5 h.0").digest(16)
    signs = torch.tensor([1.0 - 2.0 * (byte & 1) for byte in bits], dtype=torch.float64)
    found = matrix(of(16, fixes_ones=False, seed=5, label="h.0"))
    torch.testing.assert_close(found, torch.kron(four, four) * signs)
    keys = hashlib.shake_256(b"5 h.0").digest(8 * 16)
    order = sorted(range(16), key=lambda i: keys[8 * i : 8 * i + 8])
    found = matrix(of(16, seed=5, label="h.0"))
    torch.testing.assert_close(found[:, order], torch.kron(four, four))
