"""The card of a quantised result: its table and its tags, also for a record that was edited."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from enjoyln_cli.publish.quantised_card import loader, loading, rows, state, tags

RECORD: dict[str, Any] = {
    "format": "onnx",
    "model_class": "BertModel",
    "held_out": {"outputs": {"logits": {"KL divergence": 0.01, "error": 0.02}}, "perplexity": 9.5},
    "plain": {"outputs": {"logits": {"KL divergence": 0.03, "error": 0.04}}, "perplexity": 9.75},
    "perplexity": 9.25,
    "inputs": 4,
    "size": 10_000,
    "float_size": 40_000,
    "speed": {"milliseconds": 1.5, "what": "a call"},
    "float_speed": {"milliseconds": 3.0, "what": "a call"},
    "threads": 1,
}


def test_the_table_has_what_was_measured() -> None:
    assert rows(RECORD) == [
        ("KL divergence", "0.01", "0.03", ""),
        ("error", "0.02", "0.04", ""),
        ("perplexity", "9.5", "9.75", "9.25"),
        ("size", "10.0 kB", "", "40.0 kB"),
        ("a call, 1 thread", "1.5 ms", "", "3 ms"),
    ]
    first = {"name": "original", "size": 12_000, "weights": {"in_float": 50, "total": 2000}}
    chosen = {"name": "seed 1", "size": 10_000, "weights": {"in_float": 40, "total": 2000}}
    times = [{"milliseconds": 1.5, "what": "a call", "token_milliseconds": at} for at in (0.2, 0.3)]
    more = {"chosen": "seed 1", "candidates": [first, chosen], "generated": None}
    assert rows(RECORD | more | {"speed": times[0], "float_speed": times[1]})[3:] == [
        ("size", "10.0 kB", "12.0 kB", "40.0 kB"),
        ("weights that are not quantised", "40 of 2,000", "50 of 2,000", ""),
        ("a call, 1 thread", "1.5 ms", "", "1.5 ms"),
        ("one more token", "0.2 ms", "", "0.3 ms"),
    ]
    boxes = {"outputs": {"logits": {"error": 0.02}, "boxes": {"error": 0.5}}, "perplexity": None}
    several = RECORD | {"held_out": boxes, "plain": boxes, "perplexity": None, "speed": None}
    assert [name for name, *_ in rows(several)] == ["logits: error", "boxes: error", "size"]
    outputs = {"outputs": {"sentence_embedding": {"mean cosine": 0.99981}}, "perplexity": None}
    cosines = RECORD | {"held_out": outputs, "plain": outputs, "perplexity": None}
    assert rows(cosines)[0] == ("mean cosine", "0.99981", "0.99981", "")


@pytest.mark.parametrize("key", ["held_out", "plain", "size", "perplexity", "threads"])
def test_an_edited_record_has_no_table(key: str, tmp_path: Path) -> None:
    for record in ({**RECORD, key: "edited"}, {k: v for k, v in RECORD.items() if k != key}):
        (tmp_path / "enjoyln_precisions.json").write_text(json.dumps({"w8a8": record}))
        found = state(tmp_path, "me/model", "it was edited")
        (one,) = found["precisions"]
        assert isinstance(one["rows"], list) and found["complaint"] == "it was edited"


@pytest.mark.parametrize(
    ("form", "folder", "wanted", "loader"),
    [
        ("onnx", "", ["enjoyln", "onnx"], "load_onnx(snapshot_download"),
        ("onnx", "onnx", ["enjoyln", "onnx", "transformers.js"], "load_onnx(snapshot_download"),
        ("openvino", "", ["enjoyln", "openvino"], "compile_model(snapshot_download"),
        ("torchao", "", ["enjoyln", "torchao"], "BertModel.from_pretrained"),
    ],
)
def test_the_hub_filters_by_format(
    form: str, folder: str, wanted: list[str], loader: str, tmp_path: Path
) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / "enjoyln_precisions.json").write_text(
        json.dumps({"w8a8": RECORD | {"format": form}})
    )
    assert tags(tmp_path) == wanted
    assert f'{loader}("me/\\"x")' in state(tmp_path, 'me/"x')["load"]
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "own.Own"}}))
    trusted = ", trust_remote_code=True)" in state(tmp_path, 'me/"x')["load"]
    assert trusted == (form != "openvino")


def test_a_sentence_encoder_loads_in_its_library(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[]")
    found = {"w8a16": RECORD, "w8a8": RECORD | {"suffix": "_quantized"}}
    (tmp_path / "enjoyln_precisions.json").write_text(json.dumps(found))
    options = '{"file_name": "onnx/model_quantized.onnx", "provider": "CPUExecutionProvider"}'
    call = f'sentence_transformers.SentenceTransformer("x", backend="onnx", model_kwargs={options})'
    assert loading(tmp_path, '"x"') == call
    assert state(tmp_path, "x")["load"] == f"import sentence_transformers\n\nmodel = {call}"
    (tmp_path / "modules.json").unlink()
    assert loading(tmp_path, '"x"') == 'enjoyln_cli.load_onnx("x", "quantized")'


@pytest.mark.parametrize(
    ("model_class", "call"),
    [
        ("GPT2LMHeadModel", 'openvino_genai.LLMPipeline("x", "CPU")'),
        ("WhisperForConditionalGeneration", 'openvino_genai.WhisperPipeline("x", "CPU")'),
        ("BertModel", 'openvino.Core().compile_model("x" + "/openvino_model.xml")'),
        ("MarianMTModel", 'openvino.Core().compile_model("x" + "/openvino_decoder_model.xml")'),
    ],
)
def test_openvino_genai_loads_what_it_has_a_pipeline_for(model_class: str, call: str) -> None:
    assert loader("openvino", model_class).format('"x"') == call
