"""What is written of a model: one call without a cache, or the calls that generate with one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.onnx_export.call import ExportedCall
from enjoyln_cli.onnx_export.runtimes import Run


@dataclass(frozen=True)
class ExportForm:
    """How a model is traced, written and run."""

    call: ExportedCall
    """The call that the programs compute; they are compared by its outputs."""
    traced: Mapping[str, Callable[[nn.Module], object]]
    """For each program, the call that is traced, as a function of the model."""
    export: Callable[[nn.Module, int], Any]
    """The programs of a model, in an opset."""
    graphs: Callable[[Any], Mapping[str, Any]]
    """The ``onnx_ir.Graph`` of each of the programs."""
    save: Callable[[Any, Path], None]
    """Writes the programs to a file, or to a directory."""
    batches: Callable[[Any], list[Batch]]
    """Inputs to check the programs on; they are tried on the model that is passed."""
    load: Callable[[str, Path], Run]
    """Runs what was written, in one of ``RUNTIMES``, as the call does."""
