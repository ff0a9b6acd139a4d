"""A candidate with an added product computes the function, and the product stays in float32."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest
import torch
from tiny_models import WHISPER, live
from transformers import WhisperConfig

from enjoyln_cli.checkpoint.reader import open_subject
from enjoyln_cli.onnx_export import transformers_exporter
from enjoyln_cli.quantisation import exported
from enjoyln_cli.quantisation.candidates import FloatModel, candidates, rotation_plan
from enjoyln_cli.quantisation.schemes import ONNX, SCHEMES


@pytest.mark.slow
def test_the_product_in_an_onnx_file_stays_in_float32(tmp_path: Path) -> None:
    name = "WhisperForConditionalGeneration"
    live(name, WhisperConfig(**WHISPER)).float().save_pretrained(tmp_path / "model")
    subject = open_subject(str(tmp_path / "model"))
    plan = rotation_plan(subject, lambda *_: None, products=True)
    assert plan is not None
    forms = {form.name: form for form in candidates(plan, (0,))}
    assert list(forms)[-2:] == ["rotated, seed 0", "rotated with a product, seed 0"]
    torch.manual_seed(2)
    batch = {
        "input_features": torch.randn(2, 8, 40),
        "decoder_input_ids": torch.randint(3, 37, (2, 9)),
    }
    outputs, kinds = {}, {}
    for form in ("original", *list(forms)[-2:]):
        model = FloatModel(subject, name).load(forms[form])
        with torch.no_grad():
            outputs[form] = model(**batch).logits
        if form == "original":
            continue
        made = exported.exported(model, batch, ONNX)
        scheme = SCHEMES["w8a8-static"]
        small = exported.quantised(made, ONNX, scheme, batch, [batch], (), True)
        transformers_exporter.save(small, tmp_path / form, model.config)
        graph = onnx.load(tmp_path / form / "model.onnx").graph
        kinds[form] = Counter(node.op_type for node in graph.node)
        computed = exported.load(tmp_path / form, ONNX)(batch)["logits"]
        error = (computed - outputs["original"]).norm() / outputs["original"].norm()
        assert 1e-4 < float(error) < 0.3
    for form in kinds:
        error = (outputs[form] - outputs["original"]).norm() / outputs["original"].norm()
        assert float(error) < 1e-5
    without, added = kinds.values()
    assert added["MatMul"] == without["MatMul"] + 1
    assert added["QuantizeLinear"] == without["QuantizeLinear"]
