"""Is a folded model faster than its original as ONNX? Norms alone, and whole models.

    OMP_NUM_THREADS=1 python scripts/bench_onnx.py --norms --model gpt2:GPT2LMHeadModel:128

A norm alone is a graph of one ``LayerNormalization``, one ``RMSNormalization``, or the latter and
an ``Add`` for the bias. A whole model has random weights and the default config of its type, with
``--layers`` layers. It is exported three times: the original, folded, and folded with its biases
merged (``fold --merge bias``, with ``--untie`` if a head is tied). What is compared takes turns in
one process, in onnxruntime and in OpenVINO, each with one thread. Times are medians. A ratio is the
original's time divided by the folded one's, so more is better; it is the median of the ratios
within each round. Needs onnx, onnxscript, onnxruntime and openvino.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from bench_kernels import keep_pages

from enjoyln_cli import export, fold
from enjoyln_cli.onnx_export.call import batch_of, call_to_export
from enjoyln_cli.onnx_export.graph import OPSET, program_of, save
from enjoyln_cli.plan.plan import Options

ROWS = (1, 128, 512)
WIDTHS = (768, 1024)
NORMS = ("LayerNormalization", "RMSNormalization", "RMSNormalization and Add")
MODELS = ("original", "folded", "biases merged")
EPS = 1e-5
Arrays = dict[str, np.ndarray]
Run = Callable[[], Any]


def in_onnxruntime(file: Path, inputs: Arrays) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, inputs)


def in_openvino(file: Path, inputs: Arrays) -> Run:
    import openvino

    core = openvino.Core()
    how = {"INFERENCE_NUM_THREADS": "1", "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(core.read_model(file), "CPU", how).create_infer_request()
    return lambda: request.infer(inputs)


PROGRAMS: dict[str, Callable[[Path, Arrays], Run]] = {
    "onnxruntime": in_onnxruntime,
    "openvino": in_openvino,
}


def norm(kind: str, rows: int, width: int, file: Path) -> Arrays:
    """Write one norm of ``width`` features, and return an input of ``rows`` rows with zero mean."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    weight, bias = random.standard_normal((2, width), dtype=np.float32)
    operator, _, add = kind.partition(" and ")
    affine = ["weight", "bias"] if operator == "LayerNormalization" else ["weight"]
    out = "normed" if add else "y"
    nodes = [helper.make_node(operator, ["x", *affine], [out], axis=-1, epsilon=EPS)]
    nodes += [helper.make_node(add, [out, "bias"], ["y"])] if add else []
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", width]) for name in "xy"
    )
    stored = [
        numpy_helper.from_array(weight, "weight"),
        *([numpy_helper.from_array(bias, "bias")] if add or len(affine) > 1 else []),
    ]
    graph = helper.make_graph(nodes, "norm", [x], [y], stored)
    opsets = [helper.make_opsetid("", OPSET)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), file)
    values = random.standard_normal((rows, width), dtype=np.float32)
    return {"x": values - values.mean(-1, keepdims=True)}


def turns(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call; what is compared takes turns, and every second round runs backwards."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in (*runs.values(), *runs.values()):  # warm up
        run()
    for number in range(rounds):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            begin = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - begin)
    return times


def row(title: str, program: str, times: dict[str, list[float]], unit: float) -> str:
    """A line of the table: the median of each, and the ratios of the first to the others."""
    first, *others = times
    cells = [f"{unit * statistics.median(seconds):.1f}" for seconds in times.values()]
    cells += [
        f"{statistics.median(a / b for a, b in zip(times[first], times[other], strict=True)):.3f}"
        for other in others
    ]
    return f"| {title} | {program} | {' | '.join(cells)} |"


def head(kinds: tuple[str, ...], what: str, unit: str) -> str:
    names = [f"{kind}, {unit}" for kind in kinds] + [f"ratio, {kind}" for kind in kinds[1:]]
    return f"| {what} | program | {' | '.join(names)} |\n|---|---|{'---:|' * len(names)}"


def bench_norms(folder: Path, rounds: int) -> None:
    print(head(NORMS, "rows x features", "µs"))
    for rows in ROWS:
        for width in WIDTHS:
            for program, load in PROGRAMS.items():
                runs = {}
                for kind in NORMS:
                    inputs = norm(kind, rows, width, folder / "norm.onnx")
                    runs[kind] = load(folder / "norm.onnx", inputs)
                print(row(f"{rows} x {width}", program, turns(runs, rounds), 1e6), flush=True)


def files_of(kind: str, class_name: str, layers: int, folder: Path) -> tuple[Any, dict[str, Path]]:
    """The original with random weights, and the exported files of ``MODELS``."""
    config = transformers.CONFIG_MAPPING[kind](num_hidden_layers=layers)
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.add_(0.001)
    model.save_pretrained(folder / "model")
    call = call_to_export(model, (), torch.float32)
    save(program_of(model, call), folder / "original.onnx")
    tied = model.get_output_embeddings() is not None and config.tie_word_embeddings
    options = {"folded": Options(), "biases merged": Options(merge="bias", untie=tied)}
    files = {"original": folder / "original.onnx"}
    for name, some in options.items():
        fold(folder / "model", folder / name, options=some, verify=False)
        files[name] = folder / f"{name}.onnx"
        export(folder / name, files[name], verify=False, on_event=lambda level, text: None)
    return model, files


def bench_model(asked: str, layers: int, rounds: int, folder: Path) -> None:
    kind, class_name, *lengths = asked.split(":")
    model, files = files_of(kind, class_name, layers, folder)
    for tokens in map(int, lengths or ["0"]):
        batch = batch_of(model, 1, tokens or 1, torch.float32)
        inputs = {name: value.numpy() for name, value in batch.items()}
        title = f"{kind}, {f'{tokens} tokens' if tokens else 'one image'}"
        for program, load in PROGRAMS.items():
            runs = {name: load(file, inputs) for name, file in files.items()}
            print(row(title, program, turns(runs, rounds), 1e3), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--norms", action="store_true", help="time norms alone")
    parser.add_argument(
        "--model", action="append", default=[], metavar="TYPE:CLASS[:TOKENS...]", help="time this"
    )
    parser.add_argument("--layers", type=int, default=12, help="layers of a model (default: 12)")
    parser.add_argument("--rounds", type=int, default=31, help="rounds for a model (default: 31)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    keep_pages()
    names = ("torch", "onnxscript", "onnxruntime", "openvino")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    print(f"{date.today()}, {versions}, {platform.machine()}, one thread, load {os.getloadavg()}\n")
    with tempfile.TemporaryDirectory() as name:
        if options.norms:
            bench_norms(Path(name), 20 * options.rounds)
            print()
        if options.model:
            print(head(MODELS, "model", "ms"))
        for number, asked in enumerate(options.model):
            place = Path(name, str(number))
            place.mkdir()
            bench_model(asked, options.layers, options.rounds, place)


if __name__ == "__main__":
    main()
