"""What measured times say about a fold: is it faster, and how much of the norm cost does it save?

Every ratio compares two models within one round, in which each model of ``baselines`` runs once.
The result is the median over the rounds, so it does not matter if the CPU slows down between them::

    times as fast   original / other
    norm cost       (original - no_norm) / original      share of the time that norms cost
    saved           (original - folded) / original       1 - 1 / times as fast
    saved share     saved / norm cost                    the part of the norm cost that is saved
    break-even      fold seconds / (original * saved)    runs until the fold has saved its own time

A gain is claimed if all of these hold: the 95 % interval of "times as fast" lies above 1, the
interval of the norm cost lies above 0, and no more is saved than norms cost. If the last one fails,
the measurement contradicts itself, since only norms were changed. Without a gain there is neither a
saved share nor a break-even. A loss is claimed if the interval of "times as fast" lies below 1.
Fewer than six rounds have no such interval; then neither is claimed.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.benchmark.timing import (
    NO_GAIN,
    WARM_UP,
    Quartiles,
    median_interval,
    quartiles,
    ratios,
)
from enjoyln_cli.kernels.environment import kernels_on
from enjoyln_cli.version import __version__

VERSION = 1
"""Version of ``enjoyln_bench.json``."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Row:
    """One case: one size, phase and mode."""

    size: str
    batch_size: int
    seq_len: int | None
    phase: str
    mode: str
    items: int
    """Tokens of one run, or rows if the inputs have no length to choose."""
    times: Mapping[str, Sequence[float]]
    """From each model to the seconds of a run in each round; in decode, of one token per row."""
    peak_bytes: Mapping[str, int] | None = None
    """From each model to the peak of the memory that a run adds; on a GPU only."""
    decode_steps: int | None = None
    """Tokens in one run of decode; ``times`` has the mean over them."""

    @property
    def case(self) -> str:
        """``8 x 512 tokens, prefill, eager``."""
        return f"{self.size}, {self.phase}, {self.mode}"

    @property
    def rounds(self) -> int:
        """How many rounds were measured."""
        return len(self.times["original"])

    @property
    def ms(self) -> dict[str, Quartiles]:
        """From each model to the milliseconds of one run."""
        return {name: quartiles(values).times(1e3) for name, values in self.times.items()}

    def faster(self, model: str) -> Quartiles:
        """Original / ``model`` within a round: how many times as fast the model is."""
        return quartiles(ratios(self.times, "original", model))

    def faster_interval(self, model: str) -> Interval | None:
        """The 95 % interval of the median of ``faster``; ``None`` for fewer than six rounds."""
        return median_interval(ratios(self.times, "original", model))

    @property
    def speedup(self) -> Quartiles:
        """How many times as fast the folded model is."""
        return self.faster("folded")

    @property
    def speedup_interval(self) -> Interval | None:
        """The 95 % interval of ``speedup.median``."""
        return self.faster_interval("folded")

    @property
    def norm_cost(self) -> Quartiles:
        """(Original - no_norm) / original within a round: the share of the time that norms cost."""
        return quartiles(_shares(ratios(self.times, "original", "no_norm")))

    @property
    def norm_cost_interval(self) -> Interval | None:
        """The 95 % interval of ``norm_cost.median``."""
        return median_interval(_shares(ratios(self.times, "original", "no_norm")))

    @property
    def cost_is_measurable(self) -> bool:
        """Whether the norm cost can be distinguished from noise."""
        found = self.norm_cost_interval
        return found is not None and found[0] > 0

    @property
    def saved(self) -> float:
        """The share of the original's time that folding saves, if the speed-up is not noise."""
        return 1 - 1 / self.speedup.median

    @property
    def seems_faster(self) -> bool:
        """Whether the interval of the speed-up lies above 1. A gain needs more; see ``verdict``."""
        found = self.speedup_interval
        return found is not None and found[0] > 1

    @property
    def is_consistent(self) -> bool:
        """Whether the folded model saves no more than norms cost, if both are measurable."""
        measurable = self.seems_faster and self.cost_is_measurable
        return not measurable or self.saved <= self.norm_cost.median

    @property
    def verdict(self) -> str:
        """``faster``, ``slower``, or ``no gain here`` if neither can be claimed."""
        found = self.speedup_interval
        if found is not None and found[1] < 1:
            return "slower"
        possible = self.cost_is_measurable and self.is_consistent
        return "faster" if self.seems_faster and possible else NO_GAIN

    @property
    def reason(self) -> str:
        """Why no gain is claimed; empty if the interval itself shows none."""
        if self.speedup_interval is None:
            return f"{self.rounds} rounds are too few to tell"
        if not self.is_consistent:
            return "more than norms cost, so the measurement is not consistent"
        if self.seems_faster and not self.cost_is_measurable:
            return "noise, as the norm cost is too small to measure"
        return ""

    @property
    def recovered(self) -> float | None:
        """The share of the norm cost that is saved; ``None`` if no gain is claimed."""
        return self.saved / self.norm_cost.median if self.verdict == "faster" else None

    def throughput(self, model: str) -> float:
        """Items per second: from the original's median time, multiplied by ``faster(model)``."""
        return 1e3 * self.items / self.ms["original"].median * self.faster(model).median

    def break_even(self, fold_seconds: float | None) -> float | None:
        """Runs until a fold has saved its own time; ``None`` if no gain is claimed."""
        if not fold_seconds or self.verdict != "faster":
            return None
        return 1e3 * fold_seconds / (self.ms["original"].median * self.saved)

    def to_json(self, fold_seconds: float | None = None) -> dict[str, Any]:
        """The row as plain values; docs/commands/bench.md explains the keys."""
        return {
            "case": self.case,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "phase": self.phase,
            "mode": self.mode,
            "rounds": self.rounds,
            "decode_steps": self.decode_steps,
            "models": {name: self._model_json(name) for name in self.times},
            "speedup": self.speedup.median,
            "speedup_interval": _listed(self.speedup_interval),
            "norm_cost": self.norm_cost.median,
            "norm_cost_interval": _listed(self.norm_cost_interval),
            "saved_share": self.recovered,
            "verdict": self.verdict,
            "reason": self.reason,
            "break_even_runs": self.break_even(fold_seconds),
        }

    def _model_json(self, name: str) -> dict[str, Any]:
        spread = self.ms[name]
        return {
            "median_ms": spread.median,
            "quartiles_ms": spread.rounded(6),
            "times_as_fast": self.faster(name).median,
            "times_as_fast_interval": _listed(self.faster_interval(name)),
            "items_per_second": self.throughput(name),
            "peak_bytes": None if self.peak_bytes is None else self.peak_bytes[name],
        }


def _shares(faster: Sequence[float]) -> list[float]:
    return [1 - 1 / ratio for ratio in faster]


def _listed(found: Interval | None) -> list[float] | None:
    return None if found is None else list(found)


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
    fold_seconds: float | None
    """Time to find the plan and to centre the weights in memory, without writing."""
    load_seconds: float | None
    """Time to load the original."""
    weight_bytes: Mapping[str, int]
    """Memory of the weights, before (``original``) and after (``folded``)."""
    seconds: float | None = None
    """Time of the whole run."""
    warnings: tuple[str, ...] = ()
    """Warnings of the run, such as other programs that use the cores."""

    @property
    def hardware(self) -> str:
        return hardware(torch.device(self.device))

    def to_json(self) -> dict[str, Any]:
        """The content of ``enjoyln_bench.json``: the result, versions and hardware."""
        import transformers

        return {
            "version": VERSION,
            "date": date.today().isoformat(),
            "hardware": self.hardware,
            "device": self.device,
            "threads": torch.get_num_threads(),
            "kernels": kernels_on(torch.device(self.device).type),
            "versions": {
                "enjoyln": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "source": self.source,
            "model_class": self.model_class,
            "dtype": self.dtype,
            "warm_up": WARM_UP,
            "repeats": self.repeats,
            "seconds": self.seconds,
            "fold_seconds": self.fold_seconds,
            "load_seconds": self.load_seconds,
            "weight_bytes": dict(self.weight_bytes),
            "rows": [row.to_json(self.fold_seconds) for row in self.rows],
            "left_out": list(self.left_out),
            "warnings": list(self.warnings),
        }


def hardware(device: torch.device) -> str:
    """The name of the GPU, or the name of the CPU and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        name = next((v.strip() for key, _, v in lines if key.strip() == "model name"), name)
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' * (threads > 1)}" + f", {device}" * (device.type == "mps")
