"""What measured times say of a fold: is it faster, and by how much of what can be gained?

Of the times of one turn, in the columns of ``variants``::

    speed-up       original / folded
    norm tax       (original - bare) / original          what norms cost at all
    saved          (original - folded) / original        1 - 1 / speed-up

What is told are medians over the turns, so that a clock that slows down from turn to turn counts
for nothing, and with them::

    tax recovered  saved / norm tax                      the tax that folding saves
    break-even     fold seconds / (original * saved)     runs until the fold has paid for itself

A difference counts where its quartiles lie on one side; elsewhere there is no gain here, no
break-even, and where the tax itself is lost in the noise no share of it; nor is there one where the
folded model is the slower one.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli import __version__, kernels
from enjoyln_cli.timing import NO_GAIN, WARM_UP, Quartiles

VERSION = 1
"""Of what ``enjoyln_bench.json`` holds."""


@dataclass(frozen=True)
class Row:
    """One size, phase and mode."""

    size: str
    batch_size: int
    seq_len: int | None
    phase: str
    mode: str
    items: int
    """Tokens of one run, or rows where the inputs have no length to choose."""
    ms: Mapping[str, Quartiles]
    """Column to the time of one run, of decoding one token of every row."""
    speedup: Quartiles
    """Original / folded within a turn: how many times as fast."""
    norm_tax: Quartiles
    """(Original - bare) / original within a turn: the share of the time that norms cost."""
    peak_bytes: Mapping[str, int] | None = None
    """Column to what one run takes at most beside what lay there before; on a GPU alone."""

    @property
    def case(self) -> str:
        """``8 x 512 tokens, prefill, eager``."""
        return f"{self.size}, {self.phase}, {self.mode}"

    @property
    def saved(self) -> float:
        """The share of the original's time that folding saves."""
        return 1 - 1 / self.speedup.median

    @property
    def taxed(self) -> bool:
        """Whether norms cost more than the spread."""
        return self.norm_tax.low > 0

    @property
    def recovered(self) -> float | None:
        """The share of the norm tax that is saved.

        ``None`` where the tax is within the spread, and where the folded model takes longer: by how
        much is no share of a tax that may be as small as one likes.
        """
        return self.saved / self.norm_tax.median if self.taxed and self.saved >= 0 else None

    @property
    def verdict(self) -> str:
        """``faster``, ``slower``, or ``no gain here`` where the difference is within the spread."""
        if self.speedup.low > 1:
            return "faster"
        return "slower" if self.speedup.high < 1 else NO_GAIN

    def throughput(self, column: str) -> float:
        """Items per second."""
        return 1e3 * self.items / self.ms[column].median

    def break_even(self, fold_seconds: float | None) -> float | None:
        """Runs until a fold has paid for itself; ``None`` where nothing is gained."""
        if not fold_seconds or self.verdict != "faster":
            return None
        return 1e3 * fold_seconds / (self.ms["original"].median * self.saved)

    def to_json(self, fold_seconds: float | None = None) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "case": self.case,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "phase": self.phase,
            "mode": self.mode,
            **{f"{name}_ms": spread.median for name, spread in self.ms.items()},
            "quartiles_ms": {name: spread.rounded(6) for name, spread in self.ms.items()},
            "per_second": {name: self.throughput(name) for name in self.ms},
            "speedup": self.speedup.median,
            "speedup_quartiles": self.speedup.rounded(6),
            "norm_tax": self.norm_tax.median,
            "norm_tax_quartiles": self.norm_tax.rounded(6),
            "tax_recovered": self.recovered,
            "verdict": self.verdict,
            "break_even_runs": self.break_even(fold_seconds),
            "peak_bytes": None if self.peak_bytes is None else dict(self.peak_bytes),
        }


@dataclass(frozen=True)
class Bench:
    """What ``bench`` measured."""

    rows: tuple[Row, ...]
    left_out: tuple[str, ...]
    """What was asked for and not measured, a sentence each."""
    source: str
    model_class: str
    dtype: str
    device: str
    repeats: int
    fold_seconds: float | None
    """To find the plan and to centre the weights in memory; nothing is written."""
    load_seconds: float | None
    """To load the original."""
    weight_bytes: Mapping[str, int]
    """Memory of the weights, before (``original``) and after (``folded``)."""

    @property
    def hardware(self) -> str:
        return hardware(torch.device(self.device))

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values, with versions and hardware: ``enjoyln_bench.json``."""
        import transformers

        return {
            "version": VERSION,
            "date": date.today().isoformat(),
            "hardware": self.hardware,
            "device": self.device,
            "threads": torch.get_num_threads(),
            "kernels": kernels.native.status(torch.device(self.device).type).what,
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
            "fold_seconds": self.fold_seconds,
            "load_seconds": self.load_seconds,
            "weight_bytes": dict(self.weight_bytes),
            "rows": [row.to_json(self.fold_seconds) for row in self.rows],
            "left_out": list(self.left_out),
        }


def hardware(device: torch.device) -> str:
    """The name of the GPU, or of the CPU with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        name = next((v.strip() for key, _, v in lines if key.strip() == "model name"), name)
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' * (threads > 1)}" + f", {device}" * (device.type == "mps")
