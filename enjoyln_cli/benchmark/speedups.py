"""What measured times say about a fold: is it faster, and how much of the norm cost does it save?

Every ratio compares two models within one round, in which each model of ``baselines`` runs once.
The result is the median over the rounds, so it does not matter if the CPU slows down between them::

    times as fast   original / other
    norm cost       (original - no_norm) / original      share of the time that norms cost
    saved           (original - folded) / original       1 - 1 / times as fast
    saved share     saved / norm cost                    the part of the norm cost that is saved

A gain is claimed if all of these hold: the 95 % interval of "times as fast" lies above 1, the
interval of the norm cost lies above 0, and no more is saved than norms cost. If the last one fails,
the measurement contradicts itself, since only norms were changed. Without a gain there is no saved
share. A loss is claimed if the interval of "times as fast" lies below 1.

The interval of the median of such ratios needs no assumption about their distribution: of ``n``
sorted values, the true median lies between the ``k``-th smallest and the ``k``-th largest with a
probability of ``1 - 2 P(B < k)``, where B is the number of heads in ``n`` coin flips.
``median_interval`` takes the largest ``k`` for which that is at least 95 %. Fewer than six rounds
have no such ``k``; then neither a gain nor a loss is claimed.
"""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

from enjoyln_cli.kernels.environment import kernels_on
from enjoyln_cli.plan import schema
from enjoyln_cli.text import counted
from enjoyln_cli.version import versions

NO_GAIN = "no gain here"
"""The verdict if a difference cannot be distinguished from noise."""
DOUBT = 0.05
"""Probability that the true median lies outside of its interval."""


class Estimate(NamedTuple):
    """The median of the values of all rounds."""

    median: float
    interval: tuple[float, float] | None
    """The 95 % interval of the median; ``None`` for fewer than six rounds."""


def estimate(values: Sequence[float]) -> Estimate:
    """The median of at least one value."""
    return Estimate(statistics.median(values), median_interval(values))


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The interval that has the true median with at least 95 %; ``None`` for too few values."""
    count, below, beyond = len(values), 0, 0.0
    while True:
        beyond += math.comb(count, below) / 2**count
        if 2 * beyond > DOUBT:
            break
        below += 1
    ordered = sorted(values)
    return (ordered[below - 1], ordered[count - below]) if below else None


@dataclass(frozen=True)
class Row:
    """One case: one size, phase and mode."""

    size: str
    batch_size: int
    seq_len: int | None
    phase: str
    mode: str
    times: Mapping[str, Sequence[float]]
    """From each model to the seconds of a run in each round; in decode, of one token per row."""

    @property
    def case(self) -> str:
        """``8 x 512 tokens, prefill, eager``."""
        return f"{self.size}, {self.phase}, {self.mode}"

    def median_ms(self, model: str) -> float:
        """The milliseconds of one run of a model."""
        return 1e3 * statistics.median(self.times[model])

    def _ratios(self, model: str) -> list[float]:
        return [a / b for a, b in zip(self.times["original"], self.times[model], strict=True)]

    def faster(self, model: str) -> Estimate:
        """Original / ``model`` within a round: how many times as fast the model is."""
        return estimate(self._ratios(model))

    @property
    def speedup(self) -> Estimate:
        """How many times as fast the folded model is."""
        return self.faster("folded")

    @property
    def norm_cost(self) -> Estimate:
        """(Original - no_norm) / original within a round: the share of the time that norms cost."""
        return estimate([1 - 1 / ratio for ratio in self._ratios("no_norm")])

    @property
    def cost_is_measurable(self) -> bool:
        """Whether the norm cost can be distinguished from noise."""
        interval = self.norm_cost.interval
        return interval is not None and interval[0] > 0

    @property
    def saved_share(self) -> float | None:
        """The share of the norm cost that is saved; ``None`` if no gain is claimed."""
        return self._saved if self.verdict == "faster" else None

    @property
    def _saved(self) -> float:
        return (1 - 1 / self.speedup.median) / self.norm_cost.median

    @property
    def verdict(self) -> str:
        """``faster``, ``slower``, or ``no gain here`` if neither can be claimed."""
        interval = self.speedup.interval
        if interval is not None and interval[1] < 1:
            return "slower"
        gains = interval is not None and interval[0] > 1
        return "faster" if gains and not self.reason else NO_GAIN

    @property
    def reason(self) -> str:
        """Why no gain is claimed; empty if the interval itself shows none."""
        interval = self.speedup.interval
        if interval is None:
            return f"{len(self.times['original'])} rounds are too few to tell"
        if interval[0] <= 1:
            return ""
        if not self.cost_is_measurable:
            return "noise, as the norm cost is too small to measure"
        return "more than norms cost, so the measurement is not consistent" * (self._saved > 1)

    def to_json(self) -> dict[str, Any]:
        """The row as plain values; docs/commands/bench.md explains the keys."""
        faster = {name: self.faster(name) for name in self.times}
        models = {
            name: {
                "median_ms": self.median_ms(name),
                "times_as_fast": ratio.median,
                "times_as_fast_interval": ratio.interval,
            }
            for name, ratio in faster.items()
        }
        row = {
            "case": self.case,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "phase": self.phase,
            "mode": self.mode,
            "rounds": len(self.times["original"]),
            "models": models,
            "speedup": self.speedup.median,
            "speedup_interval": self.speedup.interval,
            "norm_cost": self.norm_cost.median,
            "norm_cost_interval": self.norm_cost.interval,
            "saved_share": self.saved_share,
            "verdict": self.verdict,
            "reason": self.reason,
        }
        return schema.to_json(row)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Bench:
    """The result of ``bench``."""

    rows: tuple[Row, ...]
    left_out: tuple[str, ...]
    """A sentence for each case that was requested or possible, and was not measured."""
    source: str
    model_class: str
    dtype: str
    device: str
    repeats: int
    load_seconds: float
    """Time to load the original."""
    seconds: float
    """Time of the whole run."""

    @property
    def hardware(self) -> str:
        """The name of the GPU, or the name of the CPU and the number of threads."""
        if self.device.startswith("cuda"):
            return torch.cuda.get_device_name(self.device)
        info, name = Path("/proc/cpuinfo"), platform.processor() or platform.machine()
        if info.is_file():
            lines = (line.partition(":") for line in info.read_text().splitlines())
            name = next((v.strip() for key, _, v in lines if key.strip() == "model name"), name)
        text = f"{name}, {counted(torch.get_num_threads(), 'thread')}"
        return f"{text}, {self.device}" if self.device.startswith("mps") else text

    def to_json(self) -> dict[str, Any]:
        """The result, versions and hardware as plain values, with the keys of bench.md."""
        about = {
            "date": date.today().isoformat(),
            "hardware": self.hardware,
            "threads": torch.get_num_threads(),
            "kernels": kernels_on(torch.device(self.device).type),
            "versions": versions("torch", "transformers") | {"python": platform.python_version()},
        }
        rows = [row.to_json() for row in self.rows]
        return schema.to_json({**about, **vars(self), "rows": rows})  # type: ignore[no-any-return]
