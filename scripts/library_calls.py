"""The quantisers that own the formats, on the data that measure ``enjoyln quantize``.

    python scripts/library_calls.py openai/whisper-tiny.en --audio speech
    python scripts/library_calls.py sentence-transformers/all-MiniLM-L6-v2 --text lines.txt \\
        --format openvino

Each call of onnxruntime or NNCF rounds the programs of the model as it is, and each call of torchao
or llm-compressor the model itself. AutoRound and GPTQModel write checkpoints as well: their calls
are among torchao's where they are installed. The table shows the mean KL divergence of the logits,
or relative error of the outputs, on held-out data: on the same inputs and in the same programs as
the table of ``scripts/real_models.py``.
"""

from __future__ import annotations

import argparse
import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.data_files import read_user_data
from enjoyln_cli.comparison.run import run
from enjoyln_cli.comparison.simulated_rounding import path_of_head
from enjoyln_cli.onnx_export.cached_run import load_programs
from enjoyln_cli.onnx_export.programs import Programs, save
from enjoyln_cli.onnx_export.runtimes import in_openvino
from enjoyln_cli.quantisation.candidates import rotation_plan
from enjoyln_cli.quantisation.measure import Compute, differences, exact_halves
from enjoyln_cli.quantisation.workshop import Workshop, load_result
from enjoyln_cli.quantisers import openvino_programs
from enjoyln_cli.quantisers.onnxruntime_quantiser import quantizer_in_groups
from enjoyln_cli.quantisers.schemes import FORMATS, ONNX, OPENVINO, SCHEMES, TORCHAO
from enjoyln_cli.rewrite.opened_model import open_model

Write = Callable[[Path], Compute | None]
"""Writes a result into a folder, and returns it if it is not loaded from there."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each call, and print a row for it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--audio", type=Path)
    parser.add_argument("--image", type=Path)
    parser.add_argument("--format", choices=tuple(FORMATS), default=ONNX)
    parser.add_argument("--inputs", type=int, default=8, help="in each half of the data")
    parser.add_argument("--calls", nargs="*", help="parts of the names of calls (default: all)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    images = [options.image] if options.image else []
    data = read_user_data(text=options.text, images=images, audio=options.audio)
    opened = open_model(options.model)
    plan, _ = rotation_plan(opened, ignored)
    original = opened.as_class(plan.model_class) if plan else opened
    model = original.load(torch.float32)
    with TemporaryDirectory() as name:
        folder = Path(name)
        outputs = plan.outputs if plan else ()
        chosen_by, held_out = exact_halves(
            model, opened, data, options.inputs, outputs, folder, ignored, ignored
        )
        batches = [example.batch for example in chosen_by.examples]
        if FORMATS[options.format].is_checkpoint:
            found = checkpoint_calls(options.format, model, batches, options.model)
        else:
            work = Workshop(folder, options.format, SCHEMES["w8a16"], {}, original)
            work.trace(model, chosen_by.examples, ignored)
            assert work.traced is not None
            found = calls(options.format, work.traced.programs(model, None), batches, folder)
        print("| call | cost | error | size |\n|---|---:|---:|---:|")
        for call, write in found.items():
            if options.calls and not any(part in call for part in options.calls):
                continue
            place = folder / call.replace(" ", "_")
            made = write(place)
            loaded = made or load_result(place, options.format, original.cls, "")
            lost = differences(loaded, held_out)
            files = (file for file in place.rglob("*") if file.is_file())
            size = sum(file.stat().st_size for file in files if file.suffix != ".json")
            row = (call, f"{lost.cost:.3g}", f"{lost.error:.3g}", f"{size / 1e6:.1f} MB")
            print("| " + " | ".join(row) + " |", flush=True)


def ignored(*_: Any) -> None:
    """Listens to events and progress, and prints nothing."""


def calls(
    format_name: str, programs: Programs, batches: Sequence[Batch], folder: Path
) -> Mapping[str, Write]:
    """The calls of the library that owns a format, by their names."""
    floats = folder / "floats"
    if format_name == OPENVINO:
        return {
            name: partial(by_nncf, programs, batches, call) for name, call in nncf_calls().items()
        }
    save(programs, floats)
    given = openvino_programs.calls_of(load_programs(floats, threads=1), batches)
    return {
        name: partial(by_onnxruntime, floats, call)
        for name, call in onnxruntime_calls(given).items()
    }


def by_onnxruntime(floats: Path, call: Callable[[Path, Path], None], place: Path) -> None:
    """Let ``call`` read each program of a folder, and write it to another."""
    shutil.copytree(floats, place)
    for file in place.rglob("*.onnx"):
        file.unlink()
        call(floats / file.relative_to(place), file)


def onnxruntime_calls(
    given: Mapping[str, Sequence[Batch]],
) -> Mapping[str, Callable[[Path, Path], None]]:
    """Calls of onnxruntime's quantisers, from one file to another.

    ``given`` are the inputs of each program, for fixed scales.
    """
    in_groups = quantizer_in_groups()  # first, since it keeps the log of other libraries off
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic, quantize_static

    def nbits(source: Path, target: Path, **options: Any) -> None:
        quantizer = in_groups(onnx.load(source), block_size=32, **options)
        quantizer.process()
        quantizer.model.save_model_to_file(str(target), False)

    def static(source: Path, target: Path, **options: Any) -> None:
        rows = iter([{n: v.numpy() for n, v in batch.items()} for batch in given[source.stem]])
        reader = SimpleNamespace(get_next=lambda: next(rows, None))
        quantize_static(source, target, reader, **options)

    products = ["MatMul", "Gemm"]
    best: dict[str, Any] = {"per_channel": True, "op_types_to_quantize": products}
    best["extra_options"] = {"OpTypesToExcludeOutputQuantization": products}
    return {
        "quantize_dynamic": quantize_dynamic,
        "quantize_dynamic per_channel": partial(quantize_dynamic, per_channel=True),
        "quantize_static": static,
        "quantize_static per_channel": partial(static, per_channel=True),
        "quantize_static products without results": partial(static, **best),
        "quantize_static 16 bits": partial(static, **best, activation_type=QuantType.QUInt16),
        "MatMulNBitsQuantizer 8 bits": partial(nbits, bits=8, is_symmetric=True),
        "MatMulNBitsQuantizer 4 bits": partial(nbits, bits=4, is_symmetric=True),
        "MatMulNBitsQuantizer 4 bits asymmetric": partial(nbits, bits=4, is_symmetric=False),
    }


def checkpoint_calls(
    format_name: str, model: Any, batches: Sequence[Batch], source: str
) -> Mapping[str, Write]:
    """The calls of torchao or of llm-compressor, which quantise a model in place, and of others."""
    others: dict[str, Write] = {}
    if format_name == TORCHAO:
        from torchao import quantization as ao

        groups, in_4_bits = ao.PerGroup(128), torch.int4
        both, alone = ao.Int8DynamicActivationIntxWeightConfig, ao.IntxWeightOnlyConfig
        configs = {
            "w8a8": ao.Int8DynamicActivationInt8WeightConfig(),
            "w8a16": ao.Int8WeightOnlyConfig(),
            "w4a8": both(in_4_bits, groups),
            "w4a16": alone(in_4_bits, groups),
        }
        found = {
            f"quantize_ {name}": partial(ao.quantize_, config=one) for name, one in configs.items()
        }
        if find_spec("auto_round"):
            found["AutoRound 4 bits"] = partial(by_auto_round, source, batches)
        if find_spec("gptqmodel"):
            others["GPTQModel 4 bits"] = partial(by_gptqmodel, source, batches)
    else:
        from llmcompressor import oneshot
        from llmcompressor.modifiers.gptq import GPTQModifier
        from llmcompressor.modifiers.quantization import QuantizationModifier

        common: dict[str, Any] = {"targets": "Linear", "ignore": [*path_of_head(model)]}
        data = {"dataset": DataLoader(batches, batch_size=None), "pipeline": "basic"}
        found = {
            f"oneshot {name}": partial(oneshot, recipe=QuantizationModifier(scheme=name, **common))
            for name in ("W8A8", "W8A16", "W4A16")
        }
        recipe = GPTQModifier(scheme="W4A16", **common)
        found["oneshot W4A16 GPTQModifier"] = partial(oneshot, recipe=recipe, **data)
    return {name: partial(in_place, model, call) for name, call in found.items()} | others


def by_auto_round(source: str, batches: Sequence[Batch], model: Any) -> None:
    """Round ``model`` in place to asymmetric integers in groups of 32, as AutoRound does.

    It takes texts of one length: they end with the shortest.
    """
    from auto_round import AutoRound

    shortest = min(batch["input_ids"].shape[1] for batch in batches)
    texts = [{name: x[0, :shortest] for name, x in batch.items()} for batch in batches]
    data = DataLoader(texts, batch_size=len(texts))
    sizes = {"seqlen": shortest, "nsamples": len(texts), "batch_size": min(8, len(texts))}
    scheme = {"bits": 4, "group_size": 32, "sym": False, "device_map": "cpu", "amp": False}
    AutoRound(
        model, AutoTokenizer.from_pretrained(source), dataset=data, **scheme, **sizes
    ).quantize()


def by_gptqmodel(source: str, batches: Sequence[Batch], place: Path) -> Compute:
    """Write the model in asymmetric integers in groups of 32, and run it, by GPTQModel."""
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    config = QuantizeConfig(bits=4, group_size=32, sym=False, device="cpu")
    made = GPTQModel.load(source, config)
    texts = [batch["input_ids"][0].tolist() for batch in batches]
    made.quantize([{"input_ids": text, "attention_mask": [1] * len(text)} for text in texts])
    made.save(str(place))
    loaded = GPTQModel.load(str(place), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)
    return lambda batch: {n: x.float() for n, x in run(loaded.model, [batch])[0].items()}


def in_place(model: Any, call: Callable[[Any], Any], place: Path) -> Compute:
    """Quantise a copy of ``model`` by ``call``, and write its weights."""
    made = copy.deepcopy(model)
    call(made)
    place.mkdir()
    torch.save(made.state_dict(), place / "weights")
    return lambda batch: {name: value.float() for name, value in run(made, [batch])[0].items()}


def by_nncf(
    programs: Programs, batches: Sequence[Batch], call: Callable[[Any, Any], Any], place: Path
) -> None:
    """Write the programs, quantised by a ``call`` that takes a model and calibration data."""
    import nncf

    models = openvino_programs.converted(programs)
    given = openvino_programs.calls_of(
        {name: in_openvino(model, 1) for name, model in models.items()}, batches
    )
    made = {
        name: call(model, nncf.Dataset([{k: v.numpy() for k, v in x.items()} for x in given[name]]))
        for name, model in models.items()
    }
    openvino_programs.save(made, place)


def nncf_calls() -> Mapping[str, Callable[[Any, Any], Any]]:
    """Calls of NNCF, with the calibration data where they take them."""
    import nncf

    def compressed(model: Any, data: Any, **options: Any) -> Any:
        return nncf.compress_weights(
            model, dataset=data if options.get("gptq") else None, **options
        )

    in_4_bits = {"mode": nncf.CompressWeightsMode.INT4_ASYM, "group_size": 32}
    return {
        "compress_weights": compressed,
        "compress_weights INT4_ASYM": partial(compressed, **in_4_bits),
        "compress_weights INT4_ASYM gptq": partial(compressed, **in_4_bits, gptq=True),
        "quantize": nncf.quantize,
        "quantize TRANSFORMER": partial(nncf.quantize, model_type=nncf.ModelType.TRANSFORMER),
    }


if __name__ == "__main__":
    main()
