"""How well a model quantises with some matrices, by simulated rounding on the user's data.

Matrices are chosen on the calibration data, the first half of the user's data. The chosen matrices
are measured on the held-out data, the second half, beside the original.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from enjoyln_cli.clock import Progress, no_progress
from enjoyln_cli.comparison.data_files import UserData
from enjoyln_cli.comparison.run import run
from enjoyln_cli.comparison.simulated_rounding import Scheme, simulated
from enjoyln_cli.conversion.fold import FoldJob
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.events import Event
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.quantisation.candidates import ORIGINAL
from enjoyln_cli.quantisation.measure import (
    Differences,
    ExactOutputs,
    clearly_cheaper,
    differences,
    exact_halves,
)
from enjoyln_cli.quantisers.schemes import SIMULATED
from enjoyln_cli.text import counted, first_line, number

INPUTS_IN_A_HALF = 32
CPU = torch.device("cpu")
DEVICES = ("cpu", "cuda", "mps")
"""The types of device that models can run on."""


@dataclass(frozen=True)
class Trials:
    """Where rotations of one model are tried."""

    job: FoldJob
    scheme: str
    device: torch.device
    """Where models run. Inputs, and the outputs of the original, are kept on the CPU."""
    calibration: ExactOutputs
    """The calibration data, and what the original computes for them."""
    held_out: ExactOutputs

    @property
    def rounding(self) -> Scheme:
        """The rounding that is simulated."""
        named = SIMULATED[self.scheme]
        return Scheme(named.weight_bits, named.input_bits, per_token=not named.is_static)

    def load(self, plan: Plan | None) -> Any:
        """The model in float32, rotated by ``plan``; without a plan, the original."""
        return _load(self.job, plan, self.device)

    def measure(self, plan: Plan | None, data: ExactOutputs) -> Differences:
        """Run the rounded model, rotated by the plan."""
        model = self.load(plan)
        with simulated(model, self.rounding):
            return differences(lambda batch: run(model, [batch])[0], data)

    def choice(
        self,
        chosen: str,
        plan: Plan,
        calibration: Mapping[str, Differences],
        held_out: Mapping[str, Differences],
    ) -> MatrixChoice:
        """The choice, with the measures on calibration data and on held-out data."""
        names = self.calibration.names
        inputs = (len(self.calibration.examples), len(self.held_out.examples))
        return MatrixChoice(plan, self.scheme, names, chosen, calibration, held_out, inputs)


@dataclass(frozen=True)
class MatrixChoice:
    """The chosen matrices, and the costs of all that were compared.

    The names are ``original``, ``seed 3`` and ``learned``.
    """

    plan: Plan
    """The plan with these matrices."""
    scheme: str
    outputs: tuple[str, ...]
    chosen: str
    calibration: Mapping[str, Differences]
    """On the calibration data."""
    held_out: Mapping[str, Differences]
    inputs: tuple[int, int]
    """The numbers of calibration inputs and held-out inputs."""

    def to_json(self) -> dict[str, Any]:
        """All fields but the plan as plain values, and the comparison as text."""
        found = {name: value for name, value in vars(self).items() if name != "plan"}
        for data in ("calibration", "held_out"):
            found[data] = {name: asdict(each) for name, each in found[data].items()}
        return found | {"summary": self.lines()}

    def lines(self) -> list[str]:
        """The comparison as text."""
        has_kl = self.held_out[ORIGINAL].kl is not None
        what = "KL divergence" if has_kl else f"error of {', '.join(self.outputs)}"
        costs = {name: each.cost for name, each in self.calibration.items()}
        before = f"original {number(costs.pop(ORIGINAL))}"
        if len(costs) > 2:
            spread = f"best {number(costs[self.chosen])} ({self.chosen}), median "
            spread += f"{number(median(costs.values()))}, worst {number(max(costs.values()))}"
            tried = f"{len(costs)} seeds: {spread}"
        else:
            tried = ", ".join(f"{name} {number(cost)}" for name, cost in costs.items())
        after = {name: each.cost for name, each in self.held_out.items()}
        text = ", ".join(f"{name} {number(cost)}" for name, cost in after.items())
        (helps,) = clearly_cheaper([self.held_out[self.chosen]], self.held_out[ORIGINAL])
        verdict = "" if helps else "; not clearly better than the original"
        first, second = (counted(many, "input") for many in self.inputs)
        return [
            f"simulated {self.scheme}, {what} against the exact model",
            f"  calibration data, {first}: {tried}; {before}",
            f"  held-out data, {second}: {text}{verdict}",
        ]


@contextmanager
def trials(
    job: FoldJob,
    data: UserData,
    scheme: str,
    inputs: int | None,
    event: Event,
    device: torch.device = CPU,
    on_progress: Progress = no_progress,
) -> Iterator[Trials]:
    """Run the original on the data, on at most ``inputs`` inputs.

    ``scheme`` is a name of ``schemes.SIMULATED``. The models run on ``device``.

    Raises ``UnsupportedModel`` if there are too few, or if the model cannot run on them.
    """
    event("stage", "running the original on the data")
    model = _load(job, None, device)
    most = INPUTS_IN_A_HALF if inputs is None else inputs // 2
    with TemporaryDirectory() as folder:
        halves = exact_halves(
            model,
            job.opened,
            data,
            most,
            job.plan.outputs,
            Path(folder),
            event,
            on_progress,
        )
        del model
        yield Trials(job, scheme, device, *halves)


def _load(job: FoldJob, plan: Plan | None, device: torch.device) -> Any:
    return job.opened.as_class(job.plan.model_class).load(torch.float32, plan).to(device)


def device_named(name: str | None) -> torch.device:
    """The device of that name, by default a GPU if any.

    Raises ``UnsupportedModel`` if it cannot be used.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in DEVICES:
        raise UnsupportedModel(f"--device {name} is not supported; use {', '.join(DEVICES)}")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = first_line(error).split(". ")[0]
        raise UnsupportedModel(f"--device {name} is not available: {first}") from error
    return device
