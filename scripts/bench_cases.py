"""What ``bench.py`` measures: published configurations, models with random weights, ONNX graphs."""

from __future__ import annotations

import ctypes
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import enjoyln_cli

Settings = dict[str, Any]
OPT_125M = {
    "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "word_embed_proj_dim": 768,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, Settings]] = {
    "gpt2": ("gpt2", "GPT2LMHeadModel", {}),
    "bert": ("bert", "BertModel", {}),
    "opt-125m": ("opt", "OPTForCausalLM", OPT_125M),
    "bloom-560m": ("bloom", "BloomForCausalLM", {
        "hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880}),
    "vit": ("vit", "ViTForImageClassification", {}),
    "minilm": ("bert", "BertModel", {
        "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
        "intermediate_size": 1536}),
    "tiny": ("gpt2", "GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
}  # fmt: skip
"""From a name to the model type, the class and the settings that differ from its defaults."""
REPORTS: dict[str, tuple[str, str, Settings]] = {
    **{f"gpt2-{n}-layers": ("gpt2", "GPT2LMHeadModel", {"n_layer": n}) for n in (12, 24, 48, 96)},
    "bert": ("bert", "BertForMaskedLM", {}),
    "vit": ("vit", "ViTForImageClassification", {}),
    "whisper": ("whisper", "WhisperForConditionalGeneration", {}),
    "opt-66b": ("opt", "OPTForCausalLM", {
        "num_hidden_layers": 64, "hidden_size": 9216, "num_attention_heads": 72, "ffn_dim": 36864,
        "word_embed_proj_dim": 9216}),
    "bloom-176b": ("bloom", "BloomForCausalLM", {
        "hidden_size": 14336, "n_layer": 70, "n_head": 112, "vocab_size": 250880}),
}  # fmt: skip
"""Models of which the analysis is timed; the first four show how it grows with the layers."""
Arrays = dict[str, np.ndarray]
Graphs = tuple[str, dict[str, Path], Arrays]
"""A title, files whose times are compared, and inputs for all of them."""


def random_model(
    model_type: str, model_class: str, settings: Settings, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """A model in evaluation mode with random weights, biases and norms."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**settings)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) if parameter.ndim == 1 else 0.001)
    return model.to(dtype)


def benchmarked(
    kind: tuple[str, str, Settings],
    folder: Path,
    asked: enjoyln_cli.BenchOptions,
    dtype: str,
    device: str,
) -> dict[str, Any]:
    """Fold a model with random weights, and return what ``enjoyln_bench.json`` would hold.

    ``fold_seconds`` is the time to fold, with reading and writing. ``folder`` is a new directory,
    which is removed afterwards.
    """
    try:
        random_model(*kind, getattr(torch, dtype)).save_pretrained(folder / "original")
        begin = time.perf_counter()
        enjoyln_cli.fold(folder / "original", folder / "folded", verify=False)
        fold_seconds = time.perf_counter() - begin
        result = enjoyln_cli.bench(
            folder / "folded", asked=asked, dtype=dtype, device=device, write=False
        )
        return {"fold_seconds": fold_seconds, **result.to_json()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def keep_pages() -> None:
    """Tell the C library to keep freed memory; otherwise large results sometimes need new pages."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            library.mallopt(option, 1 << 25)


# ONNX.


def in_onnxruntime(file: Path, inputs: Arrays) -> Callable[[], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, inputs)


def in_openvino(file: Path, inputs: Arrays) -> Callable[[], Any]:
    import openvino

    core = openvino.Core()
    how = {"INFERENCE_NUM_THREADS": "1", "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(core.read_model(file), "CPU", how).create_infer_request()
    return lambda: request.infer(inputs)


PROGRAMS = {"onnxruntime": in_onnxruntime, "openvino": in_openvino}


def norm_graphs(folder: Path, rows: Iterable[int], widths: Iterable[int]) -> Iterator[Graphs]:
    """One norm: ``LayerNormalization``, ``RMSNormalization``, and the latter with an ``Add``."""
    for count in rows:
        for width in widths:
            files, random = {}, np.random.default_rng(0)
            for kind in ("LayerNormalization", "RMSNormalization", "RMSNormalization and Add"):
                files[kind] = folder / f"{kind} {count} {width}.onnx"
                _write_norm(kind, width, files[kind])
            x = random.standard_normal((count, width), dtype=np.float32)
            yield f"{count} x {width}", files, {"x": x - x.mean(-1, keepdims=True)}


def _write_norm(kind: str, width: int, file: Path) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    from enjoyln_cli.onnx_export.graph import OPSET

    random = np.random.default_rng(1)
    operator, _, add = kind.partition(" and ")
    affine = ["weight", "bias"] if operator == "LayerNormalization" else ["weight"]
    normed = "normed" if add else "y"
    nodes = [helper.make_node(operator, ["x", *affine], [normed], axis=-1, epsilon=1e-5)]
    nodes += [helper.make_node(add, [normed, "bias"], ["y"])] if add else []
    stored = [
        numpy_helper.from_array(random.standard_normal(width, dtype=np.float32), name)
        for name in dict.fromkeys([*affine, *(["bias"] if add else [])])
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", width]) for n in "xy")
    graph = helper.make_graph(nodes, "norm", [x], [y], stored)
    opsets = [helper.make_opsetid("", OPSET)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), file)


def model_graphs(folder: Path, names: Iterable[str], tokens: int) -> Iterator[Graphs]:
    """Models of ``MODELS``: the original, folded, and folded with its biases merged."""
    from enjoyln_cli.onnx_export.call import batch_of, call_to_export
    from enjoyln_cli.onnx_export.graph import program_of, save

    for name in names:
        model, place = random_model(*MODELS[name], torch.float32), folder / name
        model.save_pretrained(place / "model")
        files = {"original": place / "original.onnx"}
        save(program_of(model, call_to_export(model, (), torch.float32)), files["original"])
        tied = model.get_output_embeddings() is not None and model.config.tie_word_embeddings
        merged = enjoyln_cli.Options(merge="bias", untie=tied)
        for what, options in (("folded", enjoyln_cli.Options()), ("biases merged", merged)):
            files[what] = place / f"{what}.onnx"
            enjoyln_cli.fold(place / "model", place / what, options=options, verify=False)
            enjoyln_cli.export(place / what, files[what], verify=False)
        batch = batch_of(model, 1, tokens, torch.float32)
        yield name, files, {key: value.numpy() for key, value in batch.items()}
