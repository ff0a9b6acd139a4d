"""What measured times are made to say: medians, intervals, verdicts and tables."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from enjoyln_cli.benchmark.speedups import Bench, Row, median_interval
from enjoyln_cli.cli.console import write_bench

FASTER = (1.2, 1.21, 1.23, 1.24, 1.25, 1.26, 1.27, 1.28, 1.3)
"""Original / folded in nine rounds: the 95 % interval of the median is 1.21 to 1.28."""
COST = (0.22, 0.23, 0.24, 0.245, 0.25, 0.255, 0.26, 0.265, 0.27)
NOISE = (0.9, 0.95, 1.0, 1.1, 1.25, 1.26, 1.27, 1.28, 1.3)
SLOWER = (0.8, 0.81, 0.85, 0.88, 0.9, 0.91, 0.92, 0.95, 1.1)
NO_COST = (-0.1, -0.02, 0.0, 0.05, 0.1, 0.12, 0.15, 0.2, 0.3)


def row(
    faster: Sequence[float] = FASTER, cost: Sequence[float] = COST, before: float = 0.02, **new: Any
) -> Row:
    """A case whose rounds have these original / folded, and these shares of norms."""
    made = Row(
        size="2 x 512 tokens",
        batch_size=2,
        seq_len=512,
        phase="prefill",
        mode="eager",
        times={
            "original": [before] * len(faster),
            "folded": [before / ratio for ratio in faster],
            "torch_rms_norm": [1.05 * before] * len(faster),
            "no_norm": [before * (1 - share) for share in cost[: len(faster)]],
        },
    )
    return replace(made, **new)


def test_the_interval_of_a_median_needs_six_values() -> None:
    """At 95 %: the known table of ranks for small samples."""
    for count, rank in {6: 1, 8: 1, 9: 2, 11: 2, 12: 3, 15: 4, 20: 6, 25: 8}.items():
        values = [float(number) for number in range(1, count + 1)]
        found = median_interval([*reversed(values)])
        assert found == (values[rank - 1], values[-rank]), count
    for count in range(6):
        assert median_interval([1.0] * count) is None


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    """Of a skewed distribution, as times are."""
    drawn = torch.empty(2000, 11, dtype=torch.float64)
    drawn.exponential_(generator=torch.Generator().manual_seed(0))
    held = 0
    for values in drawn.tolist():
        low, high = median_interval(values) or (0.0, 0.0)
        held += low <= math.log(2) <= high
    assert 0.94 < held / 2000 < 1 and held < 2000


def test_a_row_says_what_its_times_say() -> None:
    found = row().to_json()
    assert found["case"] == "2 x 512 tokens, prefill, eager" and found["rounds"] == 9
    assert found["speedup"] == pytest.approx(1.25) and found["verdict"] == "faster"
    assert found["speedup_interval"] == pytest.approx([1.21, 1.28])
    assert found["norm_cost"] == pytest.approx(0.25)
    assert found["norm_cost_interval"] == pytest.approx([0.23, 0.265])
    assert found["saved_share"] == pytest.approx(0.8) and found["reason"] == ""
    assert list(found["models"]) == ["original", "folded", "torch_rms_norm", "no_norm"]
    folded = found["models"]["folded"]
    assert folded["median_ms"] == pytest.approx(16)
    assert folded["times_as_fast"] == found["speedup"]
    assert folded["times_as_fast_interval"] == found["speedup_interval"]
    assert found["models"]["original"]["times_as_fast_interval"] == [1, 1]
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("faster", "cost", "verdict", "reason"),
    [
        (FASTER, COST, "faster", ""),
        (NOISE, COST, "no gain here", ""),
        (SLOWER, NO_COST, "slower", ""),
        (FASTER, NO_COST, "no gain here", "noise, as the norm cost is too small to measure"),
        (
            FASTER,
            [0.19 / 0.25 * share for share in COST],
            "no gain here",
            "more than norms cost, so the measurement is not consistent",
        ),
        ([1.25] * 6, [0.25] * 6, "faster", ""),
        ([0.8] * 5, [0.25] * 5, "no gain here", "5 rounds are too few to tell"),
    ],
)
def test_a_gain_is_claimed_where_the_interval_and_the_norm_cost_allow_it(
    faster: Sequence[float], cost: Sequence[float], verdict: str, reason: str
) -> None:
    found = row(faster, cost)
    assert (found.verdict, found.reason) == (verdict, reason)
    assert (found.saved_share is not None) == (verdict == "faster")
    assert found.saved_share is None or 0 < found.saved_share <= 1


def test_what_is_told_lies_within_its_interval() -> None:
    """A clock that slows down in the middle sets the medians of the times apart from the rounds.

    So a median is that of the ratios within a round.
    """
    original = [1.0, 1.0, 1.0, 1.0, 2.0, 2.2, 2.4, 2.4, 2.4]
    folded = [0.8, 0.85, 0.9, 0.93, 0.95, 2.0, 2.2, 2.2, 2.2]
    times = {"original": original, "folded": folded, "torch_rms_norm": original}
    found = row(times=times | {"no_norm": [0.7 * value for value in original]}).to_json()
    medians = {name: one["median_ms"] for name, one in found["models"].items()}
    outside = medians["original"] / medians["folded"]
    low, high = found["speedup_interval"]
    assert outside > high, "as it was made"
    assert low <= found["speedup"] <= high


def test_the_lines_below_say_what_the_times_do(capsys: pytest.CaptureFixture[str]) -> None:
    less = [0.6 * share for share in COST]
    rows = (
        row(),
        row(NOISE, phase="decode", before=1.6),
        row(SLOWER, seq_len=None),
        row(cost=NO_COST),
        row(cost=less),
        row(FASTER[:4]),
    )
    found = Bench(rows, ("one thing",), "m", "M", "bfloat16", "cpu", 9, 1.0, 20.0)
    write_bench(found)
    lines = capsys.readouterr().out.splitlines()
    table, lines = "\n".join(lines[:-8]), lines[-8:]
    for head in ("case", "original", "folded", "torch's RMSNorm", "no norm"):
        assert head in table
    for shown in row().to_json()["models"].values():
        text = f"{shown['times_as_fast']:.3f}x"
        assert text in table or text == "1.000x", "the medians of the lines below"
    assert lines[:6] == [
        "2 x 512 tokens, prefill, eager: faster, 1.250 times as fast (1.210 to 1.280); norms cost "
        "25.0%, of which 80% is saved",
        "2 x 512 tokens, decode, eager: no gain here, 1.250 times as fast (0.950 to 1.280); norms "
        "cost 25.0%",
        "2 x 512 tokens, prefill, eager: slower, 0.900 times as fast (0.810 to 0.950); norms cost "
        "25.0%",
        "2 x 512 tokens, prefill, eager: no gain here, 1.250 times as fast (1.210 to 1.280): "
        "noise, as the norm cost is too small to measure",
        "2 x 512 tokens, prefill, eager: no gain here, 1.250 times as fast (1.210 to 1.280): more "
        "than norms cost, so the measurement is not consistent; norms cost 15.0%",
        "2 x 512 tokens, prefill, eager: no gain here, 1.220 times as fast: 4 rounds are too few "
        "to tell",
    ]
    assert lines[6].startswith("bfloat16 on ") and lines[7] == "left out: one thing"
