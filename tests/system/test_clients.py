"""transformers.js, as npm installs it, computes what transformers computes from our directories."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_models import CHECKPOINTS, ROOT, shaken
from tiny_models import BERT, GPT2, VIT, WHISPER
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from vision_language import first_row, small
from widening_cases import BART

from enjoyln_cli import export, fold
from enjoyln_cli.onnx_export import programs
from enjoyln_cli.onnx_export.image_parts import as_read
from enjoyln_cli.onnx_export.programs import programs_of, save
from enjoyln_cli.plan.fold_options import Options

pytestmark = pytest.mark.slow

PACKAGE = "@huggingface/transformers@4.3.1"
NEW = 12
"""Tokens to generate."""
MARIAN = {
    **BART,
    "pad_token_id": 36,
    "eos_token_id": 0,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 36,
}
Client = Callable[[Path, dict[str, Any]], Any]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def transformers_js(tmp_path_factory: pytest.TempPathFactory) -> Client:
    """Computes a request to a directory in float32 with transformers.js, in node."""
    place = tmp_path_factory.mktemp("transformers_js")
    install = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", PACKAGE]
    subprocess.run(install, cwd=place, check=True, capture_output=True)
    script = shutil.copy(ROOT / "tests" / "support" / "transformers_js.mjs", place)

    def compute(folder: Path, request: dict[str, Any]) -> Any:
        run = subprocess.run(
            ["node", script, folder, "fp32"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout.splitlines()[-1])

    return compute


def written(model: Any, folder: Path) -> Any:
    """The model with random weights, after its programs and configs were written to ``folder``."""
    model = shaken(model, 0.3)
    save(programs_of(model, torch.float32), folder)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.eos_token_id = None
        model.generation_config.save_pretrained(folder)
    return model


def tensors(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Inputs as JSON."""
    return {
        name: {
            "type": {torch.float32: "float32", torch.bool: "bool"}.get(value.dtype, "int64"),
            "data": value.flatten().tolist(),
            "dims": list(value.shape),
        }
        for name, value in inputs.items()
    }


def values(found: Any) -> Any:
    return np.array(found["data"]).reshape(found["dims"])


def tokens(rows: int, count: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(5, 35, (rows, count))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("largest", [programs.LARGEST, 1000])
def test_an_exported_gpt2_writes_the_same_text(
    largest: int, transformers_js: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large weights are a file of their own."""
    monkeypatch.setattr(programs, "LARGEST", largest)
    fold(CHECKPOINTS / "gpt2", tmp_path / "out", verify=False, options=Options(merge="bias"))
    found = export(tmp_path / "out", tmp_path / "onnx", verify=False)
    assert len(found.files) == (2 if largest == 1000 else 1)
    text, options = "You may copy and", {"max_new_tokens": NEW, "do_sample": False}
    request = {"task": "text-generation", "text": text, "options": options}
    (made,) = transformers_js(tmp_path / "onnx", request)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "gpt2")
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "gpt2")
    ids = model.generate(**tokenizer(text, return_tensors="pt"), **options)
    assert made["generated_text"] == tokenizer.decode(ids[0])
    assert len(made["generated_text"]) > len(text)


def test_a_decoder_generates_padded_rows(transformers_js: Client, tmp_path: Path) -> None:
    model = written(GPT2LMHeadModel(GPT2Config(**GPT2)), tmp_path / "gpt2")
    inputs = tokens(6, 7)
    for row in range(6):
        inputs["attention_mask"][row, :row] = 0
    options = {"max_new_tokens": NEW, "do_sample": False}
    request = {"class": "AutoModelForCausalLM", "inputs": tensors(inputs), "options": options}
    found = values(transformers_js(tmp_path / "gpt2", request))
    expected = model.generate(**inputs, **options)
    np.testing.assert_array_equal(found, expected.numpy())
    assert len({tuple(row[7:]) for row in found.tolist()}) > 2


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_models_of_one_call(kind: str, transformers_js: Client, tmp_path: Path) -> None:
    if kind == "bert":
        model = written(BertModel(BertConfig(**BERT)), tmp_path / kind)
        inputs = {**tokens(3, 9), "token_type_ids": torch.zeros(3, 9, dtype=torch.int64)}
        request = {"class": "AutoModel", "output": "last_hidden_state"}
    else:
        model = written(ViTForImageClassification(ViTConfig(**VIT)), tmp_path / kind)
        inputs = {"pixel_values": torch.randn(3, 3, 15, 15)}
        request = {"class": "AutoModelForImageClassification", "output": "logits"}
    found = transformers_js(tmp_path / kind, {**request, "inputs": tensors(inputs)})
    with torch.no_grad():
        expected = model(**inputs)[request["output"]].numpy()
    np.testing.assert_allclose(values(found), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["whisper", "marian"])
def test_an_encoder_with_its_decoder(kind: str, transformers_js: Client, tmp_path: Path) -> None:
    if kind == "whisper":
        model = written(WhisperForConditionalGeneration(WhisperConfig(**WHISPER)), tmp_path / kind)
        inputs = {"input_features": torch.randn(1, 8, 40)}
        given, name = {"inputs": inputs["input_features"]}, "AutoModelForSpeechSeq2Seq"
        start = [1, 3]
    else:
        model = written(MarianMTModel(MarianConfig(**MARIAN)), tmp_path / kind)
        given = inputs = tokens(1, 7)
        name, start = "AutoModelForSeq2SeqLM", [36]
    expected = torch.tensor([start])
    for _ in range(NEW):
        with torch.no_grad():
            logits = model(**inputs, decoder_input_ids=expected).logits[:, -1:]
        logits[..., [*expected[0], model.config.eos_token_id]] = -torch.inf  # no token twice
        expected = torch.cat([expected, logits.argmax(-1)], 1)
    options = {
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "do_sample": False,
        "decoder_input_ids": [start],
        "no_repeat_ngram_size": 1,
    }
    request = {"class": name, "inputs": tensors(given), "options": options}
    found = values(transformers_js(tmp_path / kind, request))
    np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.parametrize("kind", ["SmolVLM"])
def test_a_model_of_pictures_and_text(kind: str, transformers_js: Client, tmp_path: Path) -> None:
    model = small(kind)
    save(programs_of(model, torch.float32), tmp_path / kind)
    model.config.save_pretrained(tmp_path / kind)
    model.generation_config.save_pretrained(tmp_path / kind)
    inputs, options = first_row(kind), {"max_new_tokens": NEW, "do_sample": False}
    given = {n: as_read(n, v) for n, v in inputs.items() if n.startswith(("pixel", "image"))}
    given |= {name: inputs[name] for name in ("input_ids", "attention_mask")}
    request = {"class": "AutoModelForImageTextToText", "inputs": tensors(given), "options": options}
    found = values(transformers_js(tmp_path / kind, request))
    np.testing.assert_array_equal(found, model.generate(**inputs, **options).numpy())
    assert len(set(found[0, -NEW:])) > 2
