"""The matrices that rotate a rotation group."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy
import pytest
import torch

from enjoyln_cli.plan import orthogonal_matrices as rotation_module
from enjoyln_cli.plan.axis import Axis, centre
from enjoyln_cli.plan.orthogonal_matrices import GivenMatrix, Rotation, matrix, product, rotate

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


def test_the_mean_becomes_the_last_feature() -> None:
    for size in (s for s in SIZES if s > 1):
        q = replace(of(size), mean_last=True)
        exact = matrix(q).numpy().astype(numpy.longdouble)
        assert float(abs(exact @ exact.T - numpy.eye(size)).max()) <= 1e-14, size
        wanted = numpy.ones(size) / math.sqrt(size)
        assert float(abs(exact[-1] - wanted).max()) <= 1e-14, size
        assert float(abs(exact[:-1].sum(1)).max()) <= 1e-13, size


@pytest.mark.parametrize("fixes_ones", [True, False], ids=["fixes ones", "any"])
def test_every_feature_is_spread_over_all(fixes_ones: bool) -> None:
    for size in (s for s in SIZES if s > 2):
        largest = matrix(of(size, fixes_ones)).abs().max() * math.sqrt(size)
        assert largest <= 1.75, size
    for size in (16, 64, 256):  # a Hadamard matrix: every entry is as small as can be
        entries = matrix(of(size, fixes_ones)).abs() * math.sqrt(size)
        torch.testing.assert_close(entries, torch.ones_like(entries))


def test_centring_and_norms_pass_a_matrix_that_fixes_ones() -> None:
    x = torch.randn(5, 48, dtype=torch.float64) + 3
    whole = Axis(1, 0, 1, 48, 1)
    normed = torch.layer_norm(x, [48])
    for fixes_ones in (True, False):
        rotated = rotate(x, whole, of(48, fixes_ones))
        same = torch.allclose(
            torch.layer_norm(rotated, [48]), rotate(normed, whole, of(48, fixes_ones))
        )
        both = torch.allclose(
            centre(rotated, whole), rotate(centre(x, whole), whole, of(48, fixes_ones))
        )
        assert same == both == fixes_ones


def test_a_product_is_that_of_the_matrix() -> None:
    for size in SIZES:
        x = torch.randn(3, size, 2, dtype=torch.float64)
        torch.testing.assert_close(product(x, of(size)), matrix(of(size)) @ x)


LARGE_SIZES = (5120, 6656, 11008, 13824, 14784, 16384, 18944, 22016, 25600, 29568, 53248)
"""Widths and inner widths of published models."""


@pytest.fixture
def any_circulant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the first circulant instead of a flat circulant, since the search takes time."""
    caches = (rotation_module._eigenvalues, rotation_module._factors)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(rotation_module, "NO_FLATTER", math.inf)
    yield
    for cache in caches:
        cache.cache_clear()


def check_products(size: int, fixes_ones: bool) -> None:
    """The same product whatever the shape is; it keeps lengths, angles, and ones if asked."""
    rotation = of(size, fixes_ones)
    x = torch.randn(3, size, 1, dtype=torch.float64)
    x[2] = 1
    rotated = product(x, rotation)
    before, after = (v.squeeze(2) @ v.squeeze(2).T for v in (x, rotated))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-13 * size)
    if fixes_ones:
        torch.testing.assert_close(rotated[2], x[2], rtol=0, atol=1e-13)
    along_columns = product(x.permute(2, 1, 0), rotation).permute(2, 1, 0)
    torch.testing.assert_close(along_columns, rotated, rtol=0, atol=1e-13)
    wide = product(x[:2].expand(2, size, 3), rotation)
    torch.testing.assert_close(wide, rotated[:2].expand(2, size, 3), rtol=0, atol=1e-13)


@pytest.mark.parametrize("fixes_ones", [True, False], ids=["fixes ones", "any"])
def test_the_size_may_be_any_number(fixes_ones: bool, any_circulant: None) -> None:
    """Sizes with every kind of factors; 257 is the first circulant that is not a dense matrix."""
    for size in (*range(1, 40), 256, 257, 514, 771, 1028, 1036, 1542, 2056, 4112, 4113, 4626):
        check_products(size, fixes_ones)


@pytest.mark.slow
@pytest.mark.parametrize("fixes_ones", [True, False], ids=["fixes ones", "any"])
def test_sizes_up_to_1000_and_sizes_of_models(fixes_ones: bool, any_circulant: None) -> None:
    for size in (*range(40, 1001, 7), *LARGE_SIZES):
        check_products(size, fixes_ones)


def test_a_size_with_a_large_prime_factor_is_spread_over_all() -> None:
    for size, fixes_ones in ((514, False), (1028, True), (1036, False), (2056, True)):
        largest = matrix(of(size, fixes_ones)).abs().max() * math.sqrt(size)
        assert largest <= 1.75, size


each_axis = pytest.mark.parametrize(
    "axis",
    [
        Axis(0, 0, 1, 24, 1), Axis(1, 0, 1, 24, 1), Axis(1, 6, 2, 6, 1), Axis(0, 0, 4, 6, 1),
        Axis(1, 0, 1, 6, 4), Axis(1, 2, 3, 4, 1, 8),
    ],
)  # fmt: skip


def groups_of(axis: Axis) -> Iterator[torch.Tensor]:
    """The places of the features of each group along the axis."""
    step = axis.step or axis.size * axis.inner
    for outer in range(axis.outer):
        for inner in range(axis.inner):
            yield axis.start + outer * step + inner + axis.inner * torch.arange(axis.size)


@each_axis
def test_each_group_of_an_axis_is_rotated(axis: Axis) -> None:
    x, rotation = torch.randn(24, 24, dtype=torch.float64), of(axis.size)
    rotated, q = rotate(x, axis, rotation), matrix(rotation)
    expected = x.clone().movedim(axis.dim, 0)
    for at in groups_of(axis):
        expected[at] = q @ expected[at]
    torch.testing.assert_close(rotated, expected.movedim(0, axis.dim))


@each_axis
def test_a_given_matrix_has_a_gradient(axis: Axis) -> None:
    x, upstream = torch.randn(2, 24, 24, dtype=torch.float64)
    q = matrix(of(axis.size)).requires_grad_()
    rotation = replace(of(axis.size), given=GivenMatrix("", q))
    (gradient,) = torch.autograd.grad(rotate(x, axis, rotation), q, upstream)
    rows, above = (each.movedim(axis.dim, 0) for each in (x, upstream))
    expected = [above[at] @ rows[at].T for at in groups_of(axis)]
    torch.testing.assert_close(gradient, torch.stack(expected).sum(0))


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
