"""One call of a model without a cache, as one ONNX file."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.clock import Clock
from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.data_files import UserData
from enjoyln_cli.comparison.pace import Pace
from enjoyln_cli.comparison.sampling import Runner, choose
from enjoyln_cli.onnx_export.call import ExportedCall, Positional, batches_of_other_sizes
from enjoyln_cli.onnx_export.check import outputs_of
from enjoyln_cli.onnx_export.form import ExportForm
from enjoyln_cli.onnx_export.onnx_program import program_of, save
from enjoyln_cli.onnx_export.runtimes import RUNTIMES

ONLY = "model"
"""The name of the program."""


def whole_call(
    call: ExportedCall,
    dtype: torch.dtype,
    unproven: Sequence[str],
    folder: Path,
    seed: int,
) -> ExportForm:
    """One ``call`` without a cache as one file.

    ``folder`` is the directory of the result, ``unproven`` are the inputs that its proof does not
    cover. The programs are checked on ``seed``ed inputs, and on inputs of several sizes.
    """

    def batches(original: Any) -> list[Batch]:
        pace = Pace(Clock(time.perf_counter, math.inf))
        one = partial(outputs_of, original, call)
        runner = Runner(original, folder, dtype, unproven, False, one)
        seeded = choose(runner, UserData(), seed, pace).batches
        of_call = [batch for batch in seeded if batch.keys() == call.batch.keys()]
        return [*of_call, *batches_of_other_sizes(original, call, dtype)]

    return ExportForm(
        call=call,
        traced={ONLY: lambda traced: Positional(traced, call)(*call.batch.values())},
        export=lambda exported, opset: program_of(exported, call, opset),
        graphs=lambda program: {ONLY: program.model.graph},
        save=save,
        batches=batches,
        load=lambda runtime, file: RUNTIMES[runtime](file),
    )
