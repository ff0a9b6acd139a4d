"""A GPU that is simulated: its kernels, their faults and their times are handed in.

Run as a program, it is one of several processes that start together: see ``main``.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.kernels import choices, gpu, tuning
from enjoyln_cli.kernels.choices import KERNEL, LAYER_NORM, LIGER, RMS_NORM, SEPARATE, Norms
from enjoyln_cli.kernels.tuning import EPS, Compute

SPEEDS = {LAYER_NORM: 10e-6, RMS_NORM: 10e-6, KERNEL: 10e-6, LIGER: 10e-6, SEPARATE: 12e-6}


def kernel(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
    """What this project's kernel computes."""
    return torch.ops.enjoyln.rms_norm(x, weight, bias, EPS)


def fused(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
    return torch.ops.enjoyln.add_rms_norm(x, residual, weight, bias, EPS)


@dataclass
class SimulatedGpu:
    """Computes on the CPU, and says that each call took what ``speeds`` says, with ``noise``."""

    speeds: Mapping[str, float] = field(default_factory=lambda: dict(SPEEDS))
    """Seconds of each candidate."""
    noise: float = 0.0
    """How much a time may differ, as a share of it, to both sides."""
    seed: int = 0
    replaced: Mapping[str, Compute | str] = field(default_factory=dict)
    """Candidates that compute something else, or are missing for a reason."""
    adds: Compute | str = fused
    step: float = 0.0
    """Seconds that one look at the clock takes."""
    name: str = "a GPU"
    measured: int = 0
    """How often times were taken."""

    index = 0
    place = torch.device("cpu")

    def __post_init__(self) -> None:
        self._random, self._now = random.Random(self.seed), 0.0

    def key(self) -> choices.Key:
        return {"gpu": self.name, "torch": torch.__version__}

    def clock(self) -> float:
        self._now += self.step
        return self._now

    def candidates(self, norms: Norms) -> dict[str, Compute | str]:
        known: dict[str, Compute | str] = {
            LAYER_NORM: gpu.layer_norm,
            RMS_NORM: gpu.rms_norm,
            KERNEL: kernel,
            LIGER: "it is not installed",
        }
        return known | dict(self.replaced)

    def fused(self, norms: Norms) -> Compute | str:
        return self.adds

    def seconds(self, calls: Mapping[str, Callable[[], Any]]) -> Mapping[str, Sequence[float]]:
        self.measured += 1
        return {
            name: [self.speeds[name] * self._random.uniform(1 - self.noise, 1 + self.noise)
                   for _ in range(gpu.TURNS)]
            for name in calls
        }  # fmt: skip


def main() -> None:
    """Choose for one kind of norm, on a GPU whose times differ from process to process.

    Prints what was chosen, and whether this process measured. It begins when the file that is
    given exists, so that all processes begin together.
    """
    start, seed = Path(sys.argv[1]), int(sys.argv[2])
    device = SimulatedGpu(noise=0.9, seed=seed)
    while not start.exists():
        pass
    found = tuning.choose(device, (Norms("float32", "float32", True, False, 8),))
    taken = [(one.rows, one.added, one.taken, dict(one.microseconds)) for one in found]
    print(json.dumps({"measured": device.measured > 0, "taken": taken}))


if __name__ == "__main__":
    main()
