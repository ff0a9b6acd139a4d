"""A candidate with an added product computes the function, and the product stays in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from commands import ignore
from tiny_models import WHISPER, live
from transformers import WhisperConfig

from enjoyln_cli.onnx_export.cached_run import load_programs, whole_rows
from enjoyln_cli.onnx_export.programs import save
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
