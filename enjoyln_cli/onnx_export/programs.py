"""The ONNX programs of a model in the layout of optimum and transformers.js.

A model is traced once. Its programs are kept without weights, so that any model of the same
structure can fill them (``with_weights``): what a quantiser compares differs in its weights alone.

A directory that clients read has ``onnx/STEM SUFFIX.onnx`` for each program:

* ``model``: one call, or for a decoder any number of tokens after the tokens in its cache;
* ``encoder_model`` and ``decoder_model_merged`` for an encoder with its decoder;
* ``vision_encoder``, ``embed_tokens`` and ``decoder_model_merged`` for pictures and text.

See ``cached_calls`` and ``image_parts`` for the names of inputs and outputs, and ``cross_cache``
for the decoder's ``If``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from enjoyln_cli.checkpoint.file_roles import ONNX_WEIGHTS
from enjoyln_cli.comparison.run import encoded_once
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.garbage import no_collections
from enjoyln_cli.models.load import silent
from enjoyln_cli.onnx_export.cached_calls import LOGITS, MODEL, generation_calls
from enjoyln_cli.onnx_export.call import ExportedCall, Positional, ProgramCall, call_to_export
from enjoyln_cli.onnx_export.image_parts import part_calls, reads_pictures
from enjoyln_cli.onnx_export.onnx_program import (
    OPSET,
    OPSET_OF_LAYER_NORMS,
    PARAMETER,
    is_parameter,
    require_rms_norms,
    scale_norms,
    traced_program,
)
from enjoyln_cli.runtime.call_guards import call_guards, input_means
from enjoyln_cli.scaling.float16 import computed_in_parts, scaled_inputs
from enjoyln_cli.text import dtype_name, listed_briefly

FOLDER = "onnx"
TRANSPOSED = ".transposed"
"""What the name of a weight ends with that is stored transposed."""
LARGEST = 1_500_000_000
"""Bytes of weights that are stored in a program's file: protobuf allows 2 GB in all."""


@dataclass(frozen=True)
class Programs:
    """The programs of a model, by the stems of their files."""

    models: Mapping[str, Any]
    """An ``onnx_ir.Model`` for each program, complete with weights.

    Weights of linear layers that nothing else reads are stored transposed, as quantisers expect
    them. An initializer has the name of its parameter, with ``.transposed`` after it if it is. The
    metadata of a node says which module it comes from (``onnx_program.module_of``)."""
    bare: Mapping[str, Any]
    """The same programs without weights: parameters are inputs, tied parameters apart from each
    other."""

    @property
    def opset(self) -> int:
        """The version of the operators."""
        (version,) = {one.graph.opset_imports[""] for one in self.bare.values()}
        return int(version)


def programs_of(
    model: Any,
    dtype: torch.dtype,
    *,
    outputs: Sequence[str] = (),
    opset: int | None = None,
    shifts: Mapping[str, int] | None = None,
    cross_cache: bool = True,
) -> Programs:
    """Trace ``model``, which is in ``dtype`` and in eval mode, and fill the programs with it.

    A model that generates gets its cache. Any other model is one program with the ``outputs`` that
    it returns: names or patterns, by default all. ``opset`` is by default 23 for a model with
    folded norms, each of which becomes one ``RMSNormalization``, and otherwise 20, which every
    quantiser accepts. ``shifts`` are norms whose input is multiplied by ``2^-k`` (see
    ``scale_norms`` and ``scaled_inputs``). Without ``cross_cache``, a decoder returns the keys and
    values of its cross attention in each call, and is not given them. Attention is computed by its
    products from now on.

    Raises ``UnsupportedModel`` if the model cannot be exported, if it generates without a cache of
    keys and values, if a program would take only inputs of the traced sizes, or if a folded norm
    would be exported as LayerNorm.
    """
    with encoded_once(model), torch.no_grad():
        calls = program_calls(model, call_to_export(model, outputs, dtype))
    return programs_of_calls(model, calls, opset=opset, shifts=shifts, cross_cache=cross_cache)


@no_collections()  # a trace makes many objects, of which few are garbage
def programs_of_calls(
    model: Any,
    calls: Mapping[str, ProgramCall],
    *,
    opset: int | None = None,
    shifts: Mapping[str, int] | None = None,
    cross_cache: bool = True,
) -> Programs:
    """Trace these calls of ``model``, by the names of their programs, as ``programs_of`` does."""
    norms = {name: norms_that_run(model, call) for name, call in calls.items()}
    if opset is None:
        opset = OPSET if any(norms.values()) else OPSET_OF_LAYER_NORMS
    if not cross_cache:
        calls = {name: replace(call, cross=()) for name, call in calls.items()}
    in_parts = computed_in_parts(model, shifts or {})
    with separate_parameters(model), scaled_inputs(model, in_parts):
        weights = _weights(model)
        bare = {name: traced_program(call, opset, weights) for name, call in calls.items()}
    for name, program in bare.items():
        require_rms_norms(program.graph, model, norms[name])
    whole = {norm: k for norm, k in (shifts or {}).items() if norm not in in_parts}
    scale_norms([program.graph for program in bare.values()], whole)
    return with_weights(Programs({}, bare), model)


def program_calls(model: Any, call: ExportedCall) -> dict[str, ProgramCall]:
    """The calls that ``programs_of`` traces, by the names of their programs.

    ``call`` is what ``call_to_export`` returns. A model that generates is run to make its cache.
    """
    if not model.can_generate():
        return {MODEL: ProgramCall(Positional(model, call), call.batch, call.outputs, call.axes)}
    if LOGITS not in call.outputs:
        raise UnsupportedModel(
            f"{type(model).__name__} was converted for {', '.join(call.outputs)} alone, and "
            "generating needs its logits; fold without --outputs"
        )
    model.set_attn_implementation("eager")
    is_in_parts = reads_pictures(call.batch) and not model.config.is_encoder_decoder
    calls = part_calls if is_in_parts else generation_calls
    return calls(model, call.batch, call.axes)


def norms_that_run(model: nn.Module, call: Callable[[], object]) -> set[str]:
    """The folded norms of ``model`` that a call runs; nothing is run if there are none."""
    if not call_guards(model):
        return set()
    with torch.no_grad(), silent(), input_means(model) as means:
        call()
    return set(means)


def with_weights(programs: Programs, model: nn.Module) -> Programs:
    """The programs with the weights of another model of the same structure and dtype.

    Tied parameters of ``model`` are stored once in each program. Raises ``UnsupportedModel`` if
    ``model`` lacks a parameter of the programs, or has it in another shape or dtype.
    """
    weights = _weights(model)
    return Programs(
        {name: _filled(bare, weights) for name, bare in programs.bare.items()}, programs.bare
    )


def save(programs: Programs, folder: Path, suffix: str = "") -> list[Path]:
    """Write each program to ``onnx/STEM SUFFIX.onnx`` in ``folder``; returns the files.

    ``suffix`` says the precision: nothing for float32, ``_fp16``, ``_quantized``. Weights above
    ``LARGEST`` bytes go to ``.onnx_data`` beside it. The nodes' metadata is left out: it quotes the
    source code that was traced, with its paths.
    """
    import onnx_ir

    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    files = []
    for name, model in programs.models.items():
        model = model.clone()
        for node in model.graph.all_nodes():
            node.metadata_props.clear()
        for value in model.graph.initializers.values():
            value.metadata_props.clear()
        file = folder / FOLDER / f"{name}{suffix}.onnx"
        data = file.with_suffix(ONNX_WEIGHTS)
        stored = (value.const_value.nbytes for value in model.graph.initializers.values())
        is_large = sum(stored) > LARGEST
        onnx_ir.save(model, file, external_data=data.name if is_large else None)
        files += [file, data] if is_large else [file]
    return files


@contextmanager
def separate_parameters(model: nn.Module) -> Iterator[None]:
    """Keep tied parameters of ``model`` apart inside the block, with equal values."""
    seen: set[int] = set()
    tied = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in seen:
                tied.append((module, name, parameter))
            seen.add(id(parameter))
    try:
        for module, name, parameter in tied:
            copied = parameter.detach().clone()
            module._parameters[name] = nn.Parameter(copied, parameter.requires_grad)
        yield
    finally:
        for module, name, parameter in tied:
            module._parameters[name] = parameter


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and stored buffers of a model, tied tensors under each of their names."""
    found: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    return found


def _filled(bare: Any, weights: Mapping[str, torch.Tensor]) -> Any:
    """A program with ``weights`` in place of the inputs that stand for parameters."""
    from onnx_ir.tensor_adapters import TorchTensor

    program = bare.clone()
    graph = program.graph
    parameters = [value for value in graph.inputs if is_parameter(value)]
    names = [value.name.removeprefix(PARAMETER) for value in parameters]
    missing = [name for name in names if name not in weights]
    if missing:
        raise UnsupportedModel(
            f"the model has no {listed_briefly(missing)}, which its program reads"
        )
    stored: dict[Any, Any] = {}
    for value, name in zip(parameters, names, strict=True):
        graph.inputs.remove(value)
        weight = weights[name].detach()
        _require_same(value, name, weight)
        covered = (weight.data_ptr(), weight.shape, weight.stride())
        if covered in stored:
            value.replace_all_uses_with(stored[covered])
            continue
        stored[covered] = value
        value.name = name
        value.const_value = TorchTensor(weight.cpu(), name)
        graph.register_initializer(value)
    _transpose_weights(graph)
    return program


def _require_same(value: Any, name: str, weight: torch.Tensor) -> None:
    """Raise ``UnsupportedModel`` if a weight has another shape or dtype than its parameter."""
    from onnx_ir.tensor_adapters import to_torch_dtype

    found = (weight.dtype, tuple(weight.shape))
    expected = (to_torch_dtype(value.dtype), tuple(value.shape))
    if found != expected:
        raise UnsupportedModel(
            f"{name} has shape {found[1]} in {dtype_name(found[0])}, but its program reads "
            f"{expected[1]} in {dtype_name(expected[0])}"
        )


def _transpose_weights(graph: Any) -> None:
    """Store each weight transposed that is read by one transposition alone."""
    import onnx_ir
    from onnx_ir.tensor_adapters import TorchTensor

    for node in list(graph.all_nodes()):
        value = node.inputs[0] if node.op_type == "Transpose" else None
        if value is None or value.name not in graph.initializers or len(value.uses()) > 1:
            continue
        order = node.attributes["perm"].as_ints()
        name = f"{value.name}{TRANSPOSED}"
        weight = value.const_value.raw.permute(order).contiguous()
        (result,) = node.outputs
        made = onnx_ir.Value(
            name=name,
            shape=onnx_ir.Shape(weight.shape),
            type=value.type,
            const_value=TorchTensor(weight, name),
        )
        result.replace_all_uses_with(made)
        node.graph.remove(node, safe=True)
        del graph.initializers[value.name]
        graph.register_initializer(made)
