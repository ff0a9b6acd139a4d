"""Does an ONNX file compute the original's function, as closely as the original does?

The reference is the original in float64, as in ``verification``. The file is run on inputs of
several sizes, some with padding, and its error is compared with the rounding error of the original
in the dtype of the file: in torch, or in the same program. The bounds are those of
``verification.verify``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.metrics import (
    COARSE,
    Distance,
    distances,
    largest,
    ratios,
    relative,
    worst,
)
from enjoyln_cli.comparison.run import run
from enjoyln_cli.comparison.sampling import length
from enjoyln_cli.errors import EnjoyLNError, UnsupportedModel
from enjoyln_cli.onnx_export.call import MASK, ExportedCall
from enjoyln_cli.onnx_export.form import ExportForm
from enjoyln_cli.text import dtype_name, first_line

Outputs = dict[str, torch.Tensor]
PROGRAM_RATIO = 16.0
"""A program's rounding error of the original may be this many times that of torch.

Functions such as tanh are less accurate in some programs. ALBERT's error is 3.5 times that of torch
in both."""


@dataclass(frozen=True)
class RuntimeCheck:
    """What running the file in one program showed. Errors are relative, of the worst output."""

    runtime: str
    """``onnxruntime`` or ``openvino``, with its version."""
    error: float
    original_error: float
    """The original's own rounding error in the dtype of the file."""
    original_ran_in: str
    """``torch``, or the program itself if that rounds more than torch."""
    ratio: float
    """Their ratio for the worst output."""
    chance: float
    """By chance, ``ratio`` may be this many times the true ratio (see ``comparison.metrics``)."""
    rows: int
    """Number of inputs that were run."""
    dtype: str
    failure: str
    """Why the file does not pass; empty if it does."""

    @property
    def summary(self) -> str:
        """The result, for a file that passes."""
        if self.chance > COARSE:
            return f"same outputs (error {self.error:.1e}), too few to judge their rounding"
        error = f"error {self.ratio:.2f} x the original's own"
        where = "" if self.original_ran_in == "torch" else f" in {self.original_ran_in}"
        return f"same outputs up to {self.dtype} rounding ({error}{where})"


@dataclass(frozen=True)
class Reference:
    """Inputs, the exact outputs, and the distances of the original's own outputs from them."""

    batches: list[Batch]
    exact: list[Outputs]
    own: dict[str, Distance]


def reference_of(
    load: Callable[[torch.dtype], Any], form: ExportForm, dtype: torch.dtype
) -> Reference:
    """Run the original on the inputs of ``form``, in float64 and in ``dtype``.

    ``load`` loads it in a dtype. Raises ``UnsupportedModel`` if the original does not run in
    float64.
    """
    call = form.call
    try:
        model = load(torch.float64)
        batches = form.batches(model)
        exact = [outputs_of(model, call, batch) for batch in batches]
    except (EnjoyLNError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # any error of the model's code
        raise UnsupportedModel(
            f"the original does not run in float64 ({first_line(error)}), so there is no exact "
            "result to compare with; --no-verify exports it unverified"
        ) from error
    del model
    rounded = load(dtype)
    own = (outputs_of(rounded, call, batch) for batch in batches)
    return Reference(batches, exact, distances(own, exact))


def outputs_of(model: Any, call: ExportedCall, batch: Batch) -> Outputs:
    """The outputs of ``call`` that a model returns for one batch."""
    return _compared(run(model, [batch])[0], batch, call)


def _compared(found: Outputs, batch: Batch, call: ExportedCall) -> Outputs:
    """The exported outputs, with zeros where a row is padded on the left.

    A padded query there has nothing to attend to, and programs differ in what they return for it.
    """
    chosen = {name: found[name] for name in call.outputs}
    mask = batch.get(MASK)
    if mask is None or bool(mask[:, :1].all()):
        return chosen
    return {
        name: value.masked_fill(_padding(mask, value), 0.0) if _per_token(mask, value) else value
        for name, value in chosen.items()
    }


def _per_token(mask: torch.Tensor, value: torch.Tensor) -> bool:
    return value.shape[:2] == mask.shape


def _padding(mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return (mask == 0).reshape(*mask.shape, *[1] * (value.ndim - 2))


def check_in(
    runtime: str,
    file: Path,
    original: Callable[[], Path],
    form: ExportForm,
    reference: Reference,
    dtype: torch.dtype,
    max_ratio: float,
) -> RuntimeCheck:
    """Run what was written to ``file`` in ``runtime`` and compare with the exact outputs.

    If it is further from them than torch's rounding allows, the program itself may round more than
    torch. Then ``original`` writes the original as an ONNX file, and its error in the same program
    is the measure. Raises what the program raises if it cannot run a file.
    """

    def measured(file: Path) -> dict[str, Distance]:
        compute = form.load(runtime, file)
        computed = (_compared(compute(batch), batch, form.call) for batch in reference.batches)
        return distances(computed, reference.exact)

    def judge(found: dict[str, Distance], own: dict[str, Distance], limit: float) -> RuntimeCheck:
        checked = _judge(found, own, dtype, limit)
        rows = sum(map(length, reference.batches))
        return replace(checked, runtime=f"{runtime} {version(runtime)}", rows=rows)

    found = measured(file)
    checked = judge(found, reference.own, max_ratio)
    if not checked.failure:
        return checked
    own = measured(original())
    if judge(own, reference.own, PROGRAM_RATIO).failure:
        return checked
    return replace(judge(found, own, max_ratio), original_ran_in=runtime)


def _judge(
    found: dict[str, Distance], own: dict[str, Distance], dtype: torch.dtype, max_ratio: float
) -> RuntimeCheck:
    """Compare the distances of the file's outputs with those of the original's ``own`` outputs."""
    ratio = worst(ratios(found, own, dtype))
    failure = ""
    if not math.isfinite(largest(relative(own))):
        failure = "the original itself overflows in this dtype; export another with --dtype"
    elif not ratio.least <= max_ratio:
        limits = f"limit {max_ratio:g} x, with chance {max_ratio * ratio.chance:.3g} x"
        failure = f"error {ratio.value:.2f} x the original's own ({limits})"
    return RuntimeCheck(
        runtime="",
        error=largest(relative(found)),
        original_error=largest(relative(own)),
        original_ran_in="torch",
        ratio=ratio.value,
        chance=ratio.chance,
        rows=0,
        dtype=dtype_name(dtype),
        failure=failure,
    )
