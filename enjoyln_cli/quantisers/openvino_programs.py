"""OpenVINO programs in the layout of optimum-intel, which OpenVINO GenAI loads.

They are converted from the ONNX programs of a model, quantised by NNCF, and then get their state: a
decoder keeps its cache between calls. For each row, its input ``beam_idx`` says which row's cache
of the call before it continues. The keys and values of a cross attention are
computed in the first call after ``reset_state``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.events import Event
from enjoyln_cli.onnx_export import programs as onnx_programs
from enjoyln_cli.onnx_export.cached_calls import ENCODER, MERGED, MODEL
from enjoyln_cli.onnx_export.cached_run import is_cached, whole_rows
from enjoyln_cli.onnx_export.call import IDS
from enjoyln_cli.onnx_export.cross_cache import PRESENT
from enjoyln_cli.onnx_export.exporting import quiet
from enjoyln_cli.onnx_export.onnx_program import module_of
from enjoyln_cli.onnx_export.programs import Programs
from enjoyln_cli.onnx_export.runtimes import BEAMS, LoadedProgram, in_openvino
from enjoyln_cli.plan.cache_argument import CACHE
from enjoyln_cli.quantisers.gptq import RoundedWeight
from enjoyln_cli.quantisers.schemes import FLOAT_BITS, QuantisationScheme, bits_at
from enjoyln_cli.text import first_line

FILES = {
    MODEL: "openvino_model",
    ENCODER: "openvino_encoder_model",
    MERGED: "openvino_decoder_model",
}
"""The stem of the file of each program."""
GROUP = 32
"""Weights of 4 bits share a scale in groups of this many; a weight whose width is no multiple of it
gets 8 bits."""
NO_SMOOTHING = -1


def converted(programs: Programs) -> dict[str, Any]:
    """Each ONNX program as an ``openvino.Model`` in float32 with the same inputs and outputs."""
    import openvino
    from openvino._offline_transformations import apply_moc_transformations

    found = {}
    with TemporaryDirectory() as folder:
        onnx_programs.save(programs, Path(folder))
        for name in programs.models:
            file = Path(folder) / onnx_programs.FOLDER / f"{name}.onnx"
            model = openvino.Core().read_model(file)
            apply_moc_transformations(model, cf=False)
            found[name] = model
    return found


def quantised(
    programs: Programs,
    scheme: QuantisationScheme,
    calibration: Sequence[Batch],
    bits: Mapping[str, int],
    rounded: Mapping[str, RoundedWeight],
    is_rotated: bool,
) -> dict[str, Any]:
    """The ONNX programs as OpenVINO's, quantised; ``is_rotated`` says whether streams are rotated.

    ``calibration`` are inputs of the model, for a static scheme. ``bits`` has paths of layers, or
    patterns: 8 beside weights of 4 bits, or ``FLOAT_BITS``, which stay in float32. ``rounded`` has
    weights in groups of ``GROUP`` that are rounded already, by the paths of layers.
    """
    models = converted(programs)
    calls: Mapping[str, Sequence[Batch]] = {}
    if scheme.is_static:
        threads = torch.get_num_threads()
        loaded = {name: in_openvino(model, threads) for name, model in models.items()}
        calls = calls_of(loaded, calibration)
    made = {}
    for name, model in models.items():
        readers = _readers(model, programs.models[name])
        for path, weight in rounded.items():
            _store(weight, readers.get(path, ()))
        named = {count: _names_with(count, readers, bits) for count in (FLOAT_BITS, 8)}
        made[name] = _by_nncf(
            model, scheme, calls.get(name, ()), named[FLOAT_BITS], named[8], is_rotated
        )
    return made


def _by_nncf(
    program: Any,
    scheme: QuantisationScheme,
    calibration: Sequence[Batch],
    in_float: Sequence[str],
    in_8_bits: Sequence[str],
    is_rotated: bool,
) -> Any:
    """An ``openvino.Model``, its weights in float32 quantised; it is changed in place.

    ``calibration`` are inputs of the program, for a static scheme. ``in_float`` and ``in_8_bits``
    are the names of products whose weights stay in float32, or get 8 bits where others get 4.
    SmoothQuant is off for a model that ``is_rotated``: it scales single features, which undoes what
    a rotation has gained.
    """
    import nncf

    nncf.set_log_level("ERROR")
    floats = nncf.IgnoredScope(names=[*in_float])
    with quiet():
        if scheme.is_static:
            samples = [
                {name: batch[name].numpy() for value in program.inputs for name in value.names}
                for batch in calibration
            ]
            smoothing = {"smooth_quant_alpha": NO_SMOOTHING} if is_rotated else {}
            return nncf.quantize(
                program,
                model_type=nncf.ModelType.TRANSFORMER,
                advanced_parameters=nncf.AdvancedQuantizationParameters(**smoothing),
                ignored_scope=floats,
                calibration_dataset=nncf.Dataset(samples),
                subset_size=len(samples),
            )
        modes = nncf.CompressWeightsMode
        if scheme.weight_bits == 4:
            adjusts = nncf.GroupSizeFallbackMode.ADJUST
            program = nncf.compress_weights(
                program,
                mode=modes.INT4_ASYM,
                group_size=GROUP,
                advanced_parameters=nncf.AdvancedCompressionParameters(
                    group_size_fallback_mode=adjusts
                ),
                ignored_scope=nncf.IgnoredScope(names=[*in_float, *in_8_bits]),
            )
        return nncf.compress_weights(program, mode=modes.INT8_ASYM, ignored_scope=floats)


def calls_of(
    programs: Mapping[str, LoadedProgram], batches: Sequence[Batch]
) -> dict[str, list[Batch]]:
    """The inputs that each program gets if the programs compute ``batches`` in order."""
    found: dict[str, list[Batch]] = {name: [] for name in programs}

    def noting(name: str, program: LoadedProgram) -> LoadedProgram:
        def noted(batch: Batch) -> Batch:
            found[name].append({one: batch[one] for one in program.inputs})
            return program.run(batch)

        return replace(program, run=noted)

    compute = whole_rows({name: noting(name, one) for name, one in programs.items()})
    for batch in batches:
        compute(batch)
    return found


def _readers(model: Any, program: Any) -> dict[str, list[Any]]:
    """The products and embeddings of ``model``, by the paths of the modules that compute them.

    ``program`` is the ONNX program that it was converted from.
    """
    modules = {
        value.name: module_of(node).removeprefix("model.")
        for node in program.graph.all_nodes()
        for value in node.outputs
    }
    found: dict[str, list[Any]] = {}
    for node in model.get_ops():
        if node.get_type_name() in ("MatMul", "Gather"):
            paths = {modules[name] for name in node.output(0).names if name in modules}
            for path in paths:
                found.setdefault(path, []).append(node)
    return found


def _names_with(
    count: int, readers: Mapping[str, Sequence[Any]], bits: Mapping[str, int]
) -> list[str]:
    """The names of the products and embeddings that get so many bits by ``bits``."""
    paths = (path for path in readers if bits_at(path, bits, 0) == count)
    return [node.get_friendly_name() for path in paths for node in readers[path]]


def _store(weight: RoundedWeight, products: Sequence[Any]) -> None:
    """Let products read a weight of 4 bits.

    They get the nodes that NNCF writes for it, which OpenVINO computes as a part of the product.
    """
    from openvino import Type, opset13

    rows, groups = weight.scales.shape
    integers = weight.integers.reshape(rows, groups, weight.group).numpy()
    zeros, scales = weight.zero_points[..., None].numpy(), weight.scales[..., None].half().numpy()
    for node in products:
        parts = [opset13.constant(part, dtype=Type.u4) for part in (integers, zeros)]
        shifted = opset13.subtract(*(opset13.convert(part, Type.f16) for part in parts))
        scaled = opset13.multiply(shifted, opset13.constant(scales, dtype=Type.f16))
        matrix = opset13.convert(opset13.reshape(scaled, [rows, -1], False), Type.f32)
        if not node.get_attributes()["transpose_b"]:
            matrix = opset13.transpose(matrix, [1, 0])
        node.input(1).replace_source_output(matrix.output(0))


def save(models: Mapping[str, Any], folder: Path) -> None:
    """Write each program, which gets its state, to ``folder``."""
    import openvino

    folder.mkdir(parents=True, exist_ok=True)
    for name, model in models.items():
        if any(is_cached(one) for value in model.inputs for one in value.names):
            _add_state(model)
        openvino.save_model(model, folder / f"{FILES[name]}.xml", compress_to_fp16=False)


def _add_state(model: Any) -> None:
    """Let a decoder keep its cache, as variables, in place of its cached inputs and outputs."""
    from openvino import Type, opset13
    from openvino._offline_transformations import apply_make_stateful_transformation
    from openvino.op import assign, read_value
    from openvino.op.util import Variable, VariableInfo

    ids = model.input(IDS)
    beams = opset13.parameter([ids.partial_shape[0]], Type.i32, name=BEAMS)
    beams.output(0).tensor.add_names({BEAMS})
    model.add_parameters([beams])
    past = {n for one in model.inputs for n in one.names if is_cached(n)}
    for name in past:
        value = model.input(name)
        readers = value.get_target_inputs()
        rows = opset13.gather(value, beams, opset13.constant(0))
        for reader in readers:
            reader.replace_source_output(rows.output(0))
    model.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(model, {n: n.replace(CACHE, PRESENT, 1) for n in past})
    batch = opset13.gather(opset13.shape_of(ids), opset13.constant([0]), opset13.constant(0))
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":  # at first, each cache is empty
            value = node.output(0)
            sizes = [opset13.constant([one.min_length]) for one in value.partial_shape[1:]]
            shape = opset13.concat([batch, *sizes], 0)
            zero = opset13.constant(0.0, value.element_type)
            node.set_arguments([opset13.broadcast(zero, shape)])
    for value in [one for one in model.outputs if any(map(is_cached, one.names))]:
        source = value.get_node().input_value(0)  # keys or values of a cross attention
        model.remove_result(value.get_node())
        readers = source.get_target_inputs()
        info = VariableInfo()
        info.variable_id = next(filter(is_cached, value.names))
        info.data_shape, info.data_type = source.partial_shape, source.element_type
        variable = Variable(info)
        kept = read_value(source, variable)
        for reader in readers:
            reader.replace_source_output(kept.output(0))
        model.add_sinks([assign(kept, variable)])
    model.validate_nodes_and_infer_types()


def load_programs(folder: Path, threads: int = 0) -> dict[str, LoadedProgram]:
    """The programs in ``folder``, loaded in OpenVINO; 0 leaves the number of threads to it."""
    files = {name: folder / f"{stem}.xml" for name, stem in FILES.items()}
    return {name: in_openvino(file, threads) for name, file in files.items() if file.exists()}


def write_tokenizer(folder: Path, event: Event) -> None:
    """Write the tokenizer in ``folder``, if any, as the programs that OpenVINO loads.

    A tokenizer that cannot be converted gives a warning.
    """
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    if not (folder / "tokenizer_config.json").is_file():
        return
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            both = convert_tokenizer(tokenizer, with_detokenizer=True)
    except (MemoryError, UnsupportedModel):
        raise
    except Exception as error:  # tokenizers are of many kinds, and so are the errors
        event("warning", f"no openvino_tokenizer.xml: {first_line(error)}")
        return
    for name, model in zip(("tokenizer", "detokenizer"), both, strict=True):
        openvino.save_model(model, folder / f"openvino_{name}.xml")
