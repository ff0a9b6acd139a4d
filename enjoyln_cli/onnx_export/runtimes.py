"""Run a program on the CPU: in onnxruntime, and in OpenVINO if it is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.comparison.batches import Batch

RunProgram = Callable[[Batch], dict[str, torch.Tensor]]
"""Computes the outputs, by name, of one batch of inputs. Other inputs are left out."""
DTYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "f32": torch.float32,
    "f16": torch.float16,
}
"""The dtypes of keys and values, by their names in onnxruntime and in OpenVINO."""
IN_16_BITS = "inputs_in_16_bits"
"""The metadata of a program whose products have inputs of 16 bits with fixed scales."""
BEAMS = "beam_idx"
"""The input of a program with a state that says which row of the state each row continues."""


@dataclass(frozen=True)
class LoadedProgram:
    """A program that is called with a batch."""

    run: RunProgram
    inputs: Mapping[str, tuple[tuple[int, ...], str]]
    """The shape of each input, 0 for a dynamic size, and the name of its dtype."""
    metadata: Mapping[str, str]
    """What the file says of itself besides."""
    reset: Callable[[], None] | None = None
    """Empties the cache of a program that keeps it between calls."""

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The outputs for one batch."""
        return self.run(batch)

    def empty(self, name: str, rows: int) -> torch.Tensor:
        """An empty cache of ``rows`` rows for the input ``name``."""
        (_, *sizes), dtype = self.inputs[name]
        return torch.zeros(rows, *sizes, dtype=DTYPES[dtype])


def session_options(threads: int = 0, spin: bool = False, in_16_bits: bool = False) -> Any:
    """The options of a session that logs nothing; 0 leaves the threads to onnxruntime.

    By default, its threads keep all cores busy while they wait for work. It then computes a little
    faster, and whatever else runs meanwhile takes longer. With ``spin`` they do so here.

    ``in_16_bits`` is for inputs of products with so many bits and fixed scales. By default,
    onnxruntime rounds them to 8 bits, and computes weights from integers in each call. With
    ``in_16_bits`` it computes what the file says, and weights once, when the program is loaded.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spin)))
    options.add_session_config_entry("session.disable_quant_qdq", str(int(in_16_bits)))
    return options


def in_onnxruntime(file: Path, threads: int = 0, spin: bool = False) -> LoadedProgram:
    """The file as a program that onnxruntime computes."""
    import onnxruntime

    def loaded(in_16_bits: bool = False) -> Any:
        options = session_options(threads, spin, in_16_bits)
        return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    session = loaded()
    metadata = session.get_modelmeta().custom_metadata_map
    if IN_16_BITS in metadata:  # a session's options cannot be changed
        session = loaded(in_16_bits=True)
    inputs = {
        one.name: (tuple(size if isinstance(size, int) else 0 for size in one.shape), one.type)
        for one in session.get_inputs()
    }
    names = [one.name for one in session.get_outputs()]

    def run(batch: Batch) -> dict[str, torch.Tensor]:
        found = session.run(names, {name: batch[name].numpy() for name in inputs})
        return {name: torch.from_numpy(value) for name, value in zip(names, found, strict=True)}

    return LoadedProgram(run, inputs, metadata)


def in_openvino(program: Any, threads: int = 0, spin: bool = False) -> LoadedProgram:
    """A file, or an ``openvino.Model``, as OpenVINO computes it: in float32 or its own dtype.

    ``spin`` is for onnxruntime alone.
    """
    import openvino

    # by default, some CPUs compute in bfloat16, and keep a cache in 8 bits
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    exact |= {"INFERENCE_NUM_THREADS": str(threads)} if threads else {}
    core = openvino.Core()
    read = core.read_model(program) if isinstance(program, Path) else program
    model = core.compile_model(read, "CPU", exact)
    request = model.create_infer_request()
    inputs = {
        name: (
            tuple(size.get_length() if size.is_static else 0 for size in one.partial_shape),
            one.element_type.get_type_name(),
        )
        for one in model.inputs
        for name in one.names
    }

    def run(batch: Batch) -> dict[str, torch.Tensor]:
        rows = len(next(iter(batch.values())))
        given = {BEAMS: torch.arange(rows, dtype=torch.int32), **batch}
        found = request.infer({name: given[name].numpy() for name in inputs})
        return {  # an output may have names besides its own
            name: torch.from_numpy(found[at].copy())
            for at, one in enumerate(model.outputs)
            for name in one.names
        }

    told = read.get_rt_info(["framework"]).astype(dict) if read.has_rt_info(["framework"]) else {}
    metadata = {name: one.astype(str) for name, one in told.items()}
    return LoadedProgram(run, inputs, metadata, request.reset_state if BEAMS in inputs else None)


RUNTIMES: dict[str, Callable[[Path, int, bool], LoadedProgram]] = {
    "onnxruntime": in_onnxruntime,
    "openvino": in_openvino,
}


def installed() -> list[str]:
    """The runtimes of ``RUNTIMES`` that are installed."""
    return [name for name in RUNTIMES if find_spec(name) is not None]
