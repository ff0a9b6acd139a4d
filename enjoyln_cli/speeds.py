"""What measured times say of a fold: is it faster, and by how much of what can be gained?

With medians over the turns, of the columns of ``variants``::

    norm tax       (original - bare) / original        what norms cost at all
    speed-up       original / folded
    tax recovered  (original - folded) / (original - bare)
    break-even     fold seconds / (original - folded)  runs until the fold has paid for itself

A difference counts where the quartiles of the ratio within a turn lie on one side of 1; elsewhere
there is no gain here, no break-even, and where the tax itself is lost in the noise no share of it;
nor is there one where the folded model is the slower one.
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
    speedup_spread: Quartiles
    """Of original / folded within a turn."""
    tax_spread: Quartiles
    """Of original / bare within a turn."""
    peak_bytes: Mapping[str, int] | None = None
    """Column to what one run takes at most beside what lay there before; on a GPU alone."""

    @property
    def case(self) -> str:
        """``8 x 512 tokens, prefill, eager``."""
        return f"{self.size}, {self.phase}, {self.mode}"

    @property
    def speedup(self) -> float:
        return self.ms["original"].median / self.ms["folded"].median

    @property
    def norm_tax(self) -> float:
        return 1 - self.ms["bare"].median / self.ms["original"].median

    @property
    def taxed(self) -> bool:
        """Whether norms cost more than the spread."""
        return self.norm_tax > 0 and self.tax_spread.low > 1

    @property
    def recovered(self) -> float | None:
        """The share of the norm tax that is saved.

        ``None`` where the tax is within the spread, and where the folded model takes longer: by how
        much is no share of a tax that may be as small as one likes.
        """
        gained = self.ms["original"].median - self.ms["folded"].median
        tax = self.ms["original"].median - self.ms["bare"].median
        return gained / tax if self.taxed and gained >= 0 else None

    @property
    def verdict(self) -> str:
        """``faster``, ``slower``, or ``no gain here`` where the difference is within the spread."""
        if self.speedup_spread.low > 1 and self.speedup > 1:
            return "faster"
        return "slower" if self.speedup_spread.high < 1 and self.speedup < 1 else NO_GAIN

    def throughput(self, column: str) -> float:
        """Items per second."""
        return 1e3 * self.items / self.ms[column].median

    def break_even(self, fold_seconds: float | None) -> float | None:
        """Runs until a fold has paid for itself; ``None`` where nothing is gained."""
        gained = (self.ms["original"].median - self.ms["folded"].median) / 1e3
        return fold_seconds / gained if fold_seconds and self.verdict == "faster" else None

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
            "speedup": self.speedup,
            "speedup_quartiles": self.speedup_spread.rounded(6),
            "norm_tax": self.norm_tax,
            "tax_quartiles": self.tax_spread.rounded(6),
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
