"""Products of exported models: an added product stays in float32, and biases join integers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from commands import ignore
from live_models import CHECKPOINTS
from tiny_models import WHISPER, live
from transformers import AutoModelForCausalLM, WhisperConfig

from enjoyln_cli.onnx_export.cached_run import load_programs, whole_rows
from enjoyln_cli.onnx_export.programs import programs_of, save
from enjoyln_cli.quantisation.candidates import candidates, rotation_plan
from enjoyln_cli.quantisers.schemes import SCHEMES
from enjoyln_cli.quantisers.static_ranges import ranges_of
from enjoyln_cli.quantisers.traced_programs import TracedPrograms, quantised
from enjoyln_cli.rewrite.opened_model import open_model


@pytest.mark.slow
def test_the_product_in_an_onnx_file_stays_in_float32(tmp_path: Path) -> None:
    name = "WhisperForConditionalGeneration"
    live(name, WhisperConfig(**WHISPER)).float().save_pretrained(tmp_path / "model")
    opened = open_model(str(tmp_path / "model"))
    plan, _ = rotation_plan(opened, lambda *_: None, online_rotations=True)
    assert plan is not None
    original, *_, rotated, added = candidates(plan, (0,), rounds_untied_heads=True)
    names = ["rotated, seed 0", "rotated with a product, seed 0"]
    assert [rotated.name, added.name] == names
    torch.manual_seed(2)
    batch = {
        "input_features": torch.randn(2, 8, 40),
        "decoder_input_ids": torch.randint(3, 37, (2, 9)),
    }
    outputs = []
    for candidate in (original, rotated, added):
        model = opened.as_class(name).load(torch.float32, candidate.plan)
        with torch.no_grad():
            outputs.append(model(**batch).logits)
    exact, *others = outputs

    def error(logits: torch.Tensor) -> float:
        return float((logits - exact).norm() / exact.norm())

    assert max(map(error, others)) < 1e-5
    static, traced, keys = SCHEMES["w8a8-static"], TracedPrograms([batch], batch, ignore), []
    for candidate in (original, rotated, added):
        model = opened.as_class(name).load(torch.float32, candidate.plan)
        programs = traced.programs(model, candidate.plan)
        small = quantised(programs, static, ranges_of(programs, [batch]), {})
        keys.append(len(traced.traced))
    assert keys == [1, 1, 2]  # only the product has another structure
    save(small, tmp_path / "out", static.suffix)
    compute = whole_rows(load_programs(tmp_path / "out", static.suffix))
    assert 1e-4 < error(compute(batch)["logits"]) < 0.3
    graph = onnx.load(tmp_path / "out" / "onnx" / "encoder_model_int8.onnx").graph
    stored = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    read = (stored.get(node.input[1]) for node in graph.node if node.op_type == "MatMul")
    (matrix,) = [one for one in read if one is not None]
    assert np.allclose(matrix @ matrix.T, np.eye(24), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("has_large_bias", [False, True])
def test_a_bias_is_added_to_the_sums_of_integers(has_large_bias: bool, tmp_path: Path) -> None:
    """GPT-2 multiplies matrices; a bias beyond 32 bits at the scale of its output stays a float."""
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "gpt2").eval()
    layer = model.transformer.h[1].mlp.c_fc
    with torch.no_grad():
        if has_large_bias:
            layer.weight[:, 3] *= 1e-9
            layer.bias[3] = 2.5
        ids = torch.arange(3, 63).view(3, 20)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        exact = model(**batch).logits
    programs, scheme = programs_of(model, torch.float32), SCHEMES["w8a8-static"]
    small = quantised(programs, scheme, ranges_of(programs, [batch]), {})
    (file,) = save(small, tmp_path, scheme.suffix)
    logits = whole_rows(load_programs(tmp_path, scheme.suffix))(batch)["logits"]
    assert 0 < float((logits - exact).norm() / exact.norm()) < 0.05
    stored = {one.name for one in onnx.load(file).graph.initializer}
    floats = {name for name in stored if name.endswith(("c_attn.bias", "c_proj.bias", "c_fc.bias"))}
    assert floats == ({"transformer.h.1.mlp.c_fc.bias"} if has_large_bias else set())
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    onnxruntime.InferenceSession(file, options)
    kinds = [node.op_type for node in onnx.load(tmp_path / "loaded.onnx").graph.node]
    assert kinds.count("QGemm") == 12 - has_large_bias
