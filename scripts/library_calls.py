"""The quantisers that own the formats, on the data that measure ``enjoyln quantize``.

    python scripts/library_calls.py openai/whisper-tiny.en --audio speech
    python scripts/library_calls.py sentence-transformers/all-MiniLM-L6-v2 --text lines.txt \\
        --format openvino

Each call of onnxruntime or NNCF rounds the programs of the model as it is. The table shows the
mean KL divergence of the logits, or relative error of the outputs, on held-out data: the same
inputs and programs as those of ``scripts/real_models.py``.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.data_files import read_user_data
from enjoyln_cli.onnx_export.programs import Programs, save
from enjoyln_cli.onnx_export.runtimes import in_openvino
from enjoyln_cli.quantisation.candidates import rotation_plan
from enjoyln_cli.quantisation.measure import differences, exact_halves
from enjoyln_cli.quantisation.workshop import Workshop, load_result
from enjoyln_cli.quantisers import openvino_programs
from enjoyln_cli.quantisers.onnxruntime_quantiser import quantizer_in_groups
from enjoyln_cli.quantisers.schemes import ONNX, OPENVINO, SCHEMES
from enjoyln_cli.rewrite.opened_model import open_model

Write = Callable[[Path], None]
"""Writes a result into a folder."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each call, and print a row for it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--audio", type=Path)
    parser.add_argument("--format", choices=(ONNX, OPENVINO), default=ONNX)
    parser.add_argument("--inputs", type=int, default=8, help="in each half of the data")
    parser.add_argument("--calls", nargs="*", help="parts of the names of calls (default: all)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    opened, data = open_model(options.model), read_user_data(text=options.text, audio=options.audio)
    plan, _ = rotation_plan(opened, ignored)
    original = opened.as_class(plan.model_class) if plan else opened
    model = original.load(torch.float32)
    with TemporaryDirectory() as name:
        folder = Path(name)
        outputs = plan.outputs if plan else ()
        chosen_by, held_out = exact_halves(
            model, opened, data, options.inputs, outputs, folder, ignored, ignored
        )
        work = Workshop(folder, options.format, SCHEMES["w8a16"], {}, original)
        work.trace(model, chosen_by.examples, ignored)
        assert work.traced is not None
        batches = [example.batch for example in chosen_by.examples]
        found = calls(options.format, work.traced.programs(model, None), batches, folder)
        print("| call | cost | error | size |\n|---|---:|---:|---:|")
        for call, write in found.items():
            if options.calls and not any(part in call for part in options.calls):
                continue
            place = folder / call.replace(" ", "_")
            write(place)
            loaded = load_result(place, options.format, original.cls, "")
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
    return {
        name: partial(by_onnxruntime, floats, call) for name, call in onnxruntime_calls().items()
    }


def by_onnxruntime(floats: Path, call: Callable[[Path, Path], None], place: Path) -> None:
    """Let ``call`` read each program of a folder, and write it to another."""
    shutil.copytree(floats, place)
    for file in place.rglob("*.onnx"):
        file.unlink()
        call(floats / file.relative_to(place), file)


def onnxruntime_calls() -> Mapping[str, Callable[[Path, Path], None]]:
    """Calls of onnxruntime's quantisers, from one file to another."""
    in_groups = quantizer_in_groups()  # first, since it keeps the log of other libraries off
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    def nbits(source: Path, target: Path, **options: Any) -> None:
        quantizer = in_groups(onnx.load(source), block_size=32, **options)
        quantizer.process()
        quantizer.model.save_model_to_file(str(target), False)

    return {
        "quantize_dynamic": quantize_dynamic,
        "quantize_dynamic per_channel": partial(quantize_dynamic, per_channel=True),
        "MatMulNBitsQuantizer 8 bits": partial(nbits, bits=8, is_symmetric=True),
        "MatMulNBitsQuantizer 4 bits": partial(nbits, bits=4, is_symmetric=True),
        "MatMulNBitsQuantizer 4 bits asymmetric": partial(nbits, bits=4, is_symmetric=False),
    }


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
