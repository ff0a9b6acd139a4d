"""A GPU that is simulated: its kernels, their faults and their times are handed in.

Run as a program, it starts several processes together: see ``main``.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    """Choose for one kind of norm in several processes, on a GPU whose times differ between them.

    Each prints what was chosen, and whether it measured. They are forks of this process, so that
    all begin together; each holds one end of a pipe, and begins when the other end is closed.
    """
    begin, opened = os.pipe()
    for seed in range(int(sys.argv[1])):
        if os.fork() == 0:
            os.close(opened)
            os.read(begin, 1)
            device = SimulatedGpu(noise=0.9, seed=seed)
            found = tuning.choose(device, (Norms("float32", "float32", True, False, 8),))
            taken = [(one.rows, one.added, one.taken, dict(one.microseconds)) for one in found]
            line = json.dumps({"measured": device.measured > 0, "taken": taken})
            os.write(sys.stdout.fileno(), f"{line}\n".encode())
            os._exit(0)
    os.close(opened)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
