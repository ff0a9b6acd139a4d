"""``report --fp16``: what overflows is named, and what a scale mends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from commands import good, refused
from float16_programs import rounded_edges
from large_features import TEXT, with_large_features
from live_models import CHECKPOINTS
from onnxruntime import InferenceSession
from PIL import Image
from tiny_models import live
from transformers import AutoModelForCausalLM

from enjoyln_cli import export
from enjoyln_cli.comparison.data_files import UserData
from enjoyln_cli.rewrite.opened_model import open_model
from enjoyln_cli.scaling.overflows import overflows_of


def overflows(folder: Path, tokens: Path) -> dict[str, list[dict[str, object]]]:
    """The places of each kind that ``enjoyln report --fp16`` prints."""
    printed = json.loads(good("report", folder, "--fp16", "--tokens", tokens, "--json"))
    found: dict[str, list[dict[str, object]]] = {}
    for place in printed["overflows"]:
        found.setdefault(str(place["kind"]), []).append(place)
    return found


@pytest.mark.slow
def test_each_kind_is_found_and_only_norms_are_mended(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("[3, 5, 7, 11, 13, 2]\n")
    source = with_large_features("PhiForCausalLM", tmp_path / "phi")
    found = overflows(source, tokens)
    assert {place["module"] for place in found.pop("norm")} == {
        "model.layers.0.input_layernorm", "model.layers.1.input_layernorm", "model.final_layernorm",
    }  # fmt: skip
    assert not found
    said = good("report", source, "--fp16", "--tokens", tokens)
    assert "overflows in float16 on 1 input: 3 x norm" in said and "--fp16-safe" in said

    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.model.layers[0].mlp.fc1.bias[2] = 60.0  # its cube is above 65504
        model.model.layers[1].mlp.fc1.weight[0] *= 1e5
        model.model.layers[1].mlp.fc2.weight[:, 0] = 1e-7
    model.save_pretrained(source)
    found = overflows(source, tokens)
    assert [place["module"] for place in found["activation"]][:1] == ["model.layers.0.mlp.act"] or (
        "mlp" in str(found["activation"][0]["module"])
    )
    assert "model.layers.1.mlp.fc1" in {place["module"] for place in found["product"]}
    for place in (*found["activation"], *found["product"]):
        assert place["after"] == pytest.approx(place["largest"], rel=1e-3)
    for place in found["norm"]:
        assert float(str(place["after"])) < 65504
    said = good("report", source, "--fp16", "--tokens", tokens)
    assert "mends an activation, so keep in float32: model.layers.0.mlp" in said
    assert "so compute in float32 or bfloat16: model.layers.1.mlp.fc1" in said


@pytest.mark.slow
def test_a_model_in_range_overflows_nowhere(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("[3, 5, 7, 11, 13, 2]\n")
    source = with_large_features("PhiForCausalLM", tmp_path / "phi", large=0.0)
    said = good("report", source, "--fp16", "--tokens", tokens)
    assert "nothing overflows in float16 on 1 input" in said


def test_data_and_the_option_need_each_other(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("[3]\n")
    assert "your data are needed" in refused("report", tmp_path, "--fp16", status=2)
    assert "--fp16" in refused("report", tmp_path, "--tokens", tokens, status=2)
    more = refused("report", tmp_path, tmp_path, "--fp16", "--tokens", tokens, status=2)
    assert "takes one MODEL" in more
    why = refused("report", tmp_path, "--fp16", "--tokens", tokens, "--why", "x", status=2)
    assert "--why has no effect with --fp16" in why


VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
ENGINES: dict[str, tuple[str, Any, str]] = {
    "vit": ("ViTForImageClassification", T.ViTConfig(**VISION), "position_embeddings"),
    "siglip": ("SiglipVisionModel", T.SiglipVisionConfig(**VISION), "position_embedding.weight"),
    "gemma": (
        "Gemma3ForCausalLM", T.Gemma3TextConfig(**TEXT, head_dim=8), "embed_tokens.weight"),
    "t5": (
        "T5ForConditionalGeneration",
        T.T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=99,
            feed_forward_proj="relu", tie_word_embeddings=False, decoder_start_token_id=0),
        "shared.weight",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENGINES)
def test_an_engine_in_float16_is_right_after_the_change(kind: str, tmp_path: Path) -> None:
    """Two features of +-450 in all tokens; every op is rounded, and norms are taken apart."""
    name, config, table = ENGINES[kind]
    model = live(name, config).float()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(table):
                parameter.mul_(0.3)[..., 3] += 450.0
                parameter[..., 5] -= 450.0
    source = tmp_path / "model"
    model.save_pretrained(source)
    data = UserData(tokens=((3, 5, 7, 11, 13, 2),))
    if "pixel" in model.main_input_name:
        shutil.copy(CHECKPOINTS / "vit" / "preprocessor_config.json", source)
        picture = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(picture).save(tmp_path / "picture.png")
        data = UserData(images=(tmp_path / "picture.png",))
    found = overflows_of(open_model(str(source)).as_class(name), data)
    norms = [place for place in found.overflows if place.kind == "norm"]
    assert norms and all(place.is_mended for place in norms)
    assert 1 - found.cosine > 1e-3 > 1e3 * (1 - found.cosine_after)
    if kind == "gemma":  # onnx_export/test_float16_norms.py runs its programs
        return
    inputs = {
        "input_ids": np.array([[3, 5, 7, 11, 13, 2]]),
        "attention_mask": np.ones((1, 6), np.int64),
    }
    inputs["pixel_values"] = np.random.default_rng(0).standard_normal((1, 3, 32, 32), np.float32)
    first, main = model.get_encoder() if kind == "t5" else model, inputs[model.main_input_name]
    with torch.no_grad():
        exact = first.double()(torch.tensor(main if kind == "t5" else main.astype(float)))[0]
    for safe in (False, True):
        out = tmp_path / f"out{safe}"
        export(source, out, verify=False, **({"fp16_data": data} if safe else {}))
        files = sorted((out / "onnx").glob("*.onnx"))  # an encoder stands behind its decoder
        program = rounded_edges(files[-1])
        given = {one.name: inputs[one.name] for one in program.graph.input}
        session = InferenceSession(program.SerializeToString(), providers=["CPUExecutionProvider"])
        got = torch.from_numpy(session.run(None, given)[0]).double()
        cosine = float(torch.cosine_similarity(got.flatten(), exact.flatten(), dim=0))
        assert abs(1 - cosine) < 1e-4 if safe else not cosine > 0.999, safe
