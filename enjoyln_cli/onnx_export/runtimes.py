"""Run an ONNX file on the CPU: in onnxruntime, and in OpenVINO if it is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.comparison.batches import Batch

Run = Callable[[Batch], dict[str, torch.Tensor]]
"""Computes the outputs, by name, of one batch of inputs. Other inputs are left out."""


def session_options(threads: int = 0) -> Any:
    """The options of a session that logs nothing; 0 leaves the threads to onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    return options


def in_onnxruntime(file: Path) -> Run:
    """The file as a function that onnxruntime computes."""
    import onnxruntime

    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(file, session_options(), providers=providers)
    inputs = [one.name for one in session.get_inputs()]
    names = [one.name for one in session.get_outputs()]

    def run(batch: Batch) -> dict[str, torch.Tensor]:
        found = session.run(names, {name: batch[name].numpy() for name in inputs})
        return {name: torch.from_numpy(value) for name, value in zip(names, found, strict=True)}

    return run


def in_openvino(file: Path) -> Run:
    """The file as a function that OpenVINO computes, in float32 or the dtype of the file."""
    import openvino

    core = openvino.Core()
    exact = {"INFERENCE_PRECISION_HINT": "f32"}  # by default, some CPUs compute in bfloat16
    model = core.compile_model(core.read_model(file), "CPU", exact)
    inputs = {name for one in model.inputs for name in one.names}

    def run(batch: Batch) -> dict[str, torch.Tensor]:
        found = model({name: value.numpy() for name, value in batch.items() if name in inputs})
        return {  # an output may have names besides its own
            name: torch.from_numpy(found[at].copy())
            for at, one in enumerate(model.outputs)
            for name in one.names
        }

    return run


RUNTIMES: dict[str, Callable[[Path], Run]] = {
    "onnxruntime": in_onnxruntime,
    "openvino": in_openvino,
}


def installed() -> list[str]:
    """The runtimes of ``RUNTIMES`` that are installed."""
    return [name for name in RUNTIMES if find_spec(name) is not None]
