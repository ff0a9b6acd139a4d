"""How far chance reaches in the ratio of two rounding errors: never too little, and no further than
a wrong result needs."""

from __future__ import annotations

import math

import pytest
import torch

from enjoyln_cli.comparison.metrics import (
    COARSE,
    GROSS,
    Distance,
    Ratio,
    distances,
    ratios,
    relative,
    worst,
)

SIZE = 1e-6
Errors = dict[str, Distance]


def errors(exact: torch.Tensor, noise: torch.Tensor, times: float = 1.0) -> Errors:
    return distances([{"y": exact + times * SIZE * noise}], [{"y": exact}])


def one_ratio(measured: Errors, own: Errors) -> Ratio:
    return ratios(measured, own, torch.float32)["y"]


def draws(kind: str, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two errors of the same size, with an exact output; each row is one input."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if kind == "one number":
        return normal(rows, 1), normal(rows, 1)
    head = normal(3, 50)
    if kind == "logits of one hidden vector":
        return normal(rows, 3) @ head, normal(rows, 3) @ head
    if kind == "shared by all inputs":
        return tuple(normal(1, 50) + 0.1 * normal(rows, 50) for _ in range(2))  # type: ignore[return-value]
    if kind == "of very different size":
        sizes = normal(rows, 1).exp()
        return sizes * normal(rows, 50), sizes * normal(rows, 50)
    assert kind == "of another size in each run"
    return tuple(normal(rows, 50) * (normal(rows, 1) / 2).exp() for _ in range(2))  # type: ignore[return-value]


KINDS = [
    "one number",
    "logits of one hidden vector",
    "shared by all inputs",
    "of very different size",
    "of another size in each run",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_chance_explains_ratios_of_errors_of_the_same_size(kind: str, rows: int) -> None:
    exact = torch.ones(rows, 1 if kind == "one number" else 50, dtype=torch.float64)
    above = 0
    for seed in range(100):
        measured, own = draws(kind, rows, seed)
        found = one_ratio(errors(exact, measured), errors(exact, own))
        assert found.least <= 1, seed
        above += found.value > 1.25
    assert above or rows > 3, "the ratio alone is above the usual limit"


@pytest.mark.parametrize(
    ("shape", "times"),
    [((16, 32, 500), 1.6), ((4, 32, 500), 4.0), ((128, 10), 1.9), ((128, 1), 6.0), ((1, 9), 5e3)],
    ids=str,
)
def test_a_larger_error_is_not_taken_for_chance(shape: tuple[int, ...], times: float) -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        exact, measured, own = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
        found = one_ratio(errors(exact, measured, times), errors(exact, own))
        assert found.least > 1.25, (seed, found)


def test_more_inputs_leave_less_to_chance() -> None:
    noise = torch.randn(2, 128, 40, generator=torch.Generator().manual_seed(0)).double()
    exact = torch.ones(128, 40, dtype=torch.float64)
    chances = [
        one_ratio(errors(exact[:n], noise[0, :n]), errors(exact[:n], noise[1, :n])).chance
        for n in (1, 2, 4, 8, 16, 32, 64, 128)
    ]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] == GROSS and chances[-1] < 1.2 < COARSE < chances[1]


def test_long_rows_and_rows_of_several_lengths() -> None:
    """A long row is cut into parts for its size, and every so many entries stand for its error."""
    generator = torch.Generator().manual_seed(0)
    exact = [
        {"y": torch.randn(2, length, 5000, generator=generator).double()} for length in (3, 900)
    ]
    got = [{"y": batch["y"] * (1 + SIZE)} for batch in exact]
    (found,) = distances(got, exact).values()
    assert found.relative == pytest.approx(SIZE, rel=1e-6)
    assert found.squares.shape == (4,) and found.errors.shape[0] == 4
    assert found.times(3.0).relative == pytest.approx(3 * SIZE, rel=1e-6)


def test_incomparable_outputs_are_no_chance() -> None:
    exact = torch.ones(4, 3, dtype=torch.float64)
    wrong = distances([{"y": exact * math.nan}], [{"y": exact}])
    own = errors(exact, torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    assert one_ratio(wrong, own).least == math.inf
    both = {"x": own["y"], "y": wrong["y"]}
    assert worst(ratios(both, both, torch.float32)).least == math.inf


def test_relative_errors_are_pooled_and_respect_infinities() -> None:
    exact = [{"a": torch.tensor([[3.0, 4.0], [math.inf, math.nan]])}, {"a": torch.zeros(1, 2)}]
    got = [{"a": torch.tensor([[3.0, 4.5], [math.inf, math.nan]])}, {"a": torch.zeros(1, 2)}]
    assert relative(distances(got, exact)) == {"a": pytest.approx(0.1)}
    got[0]["a"][1, 0] = -math.inf
    assert relative(distances(got, exact)) == {"a": math.inf}
    assert relative(distances([{}, {}], exact)) == {"a": math.inf}


def one_error(size: float, rows: int = 4) -> dict[str, Distance]:
    exact = torch.ones(rows, 3, dtype=torch.float64)
    return distances([{"a": exact * (1 + size)}], [{"a": exact}])


def test_ratio_has_a_floor() -> None:
    (found,) = ratios(one_error(3e-7), one_error(2e-7), torch.float32).values()
    assert found.value == pytest.approx(1.5)
    (found,) = ratios(one_error(1e-9), one_error(0.0), torch.float32).values()
    assert found.value < 0.02
    (found,) = ratios(one_error(math.nan), one_error(1.0), torch.float32).values()
    assert found.least == math.inf
