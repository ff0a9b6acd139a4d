"""Checkpoints that torchao and llm-compressor quantise: what is rounded, and what stays.

The tests of a library are skipped where it is not installed.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import GPT2, good, refused
from live_models import CHECKPOINTS, ROOT, shaken
from safetensors.torch import load_file, save_file
from tiny_models import BERT
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    SegformerConfig,
    SegformerForImageClassification,
)

from enjoyln_cli.analysis.analyze import analyze_config
from enjoyln_cli.checkpoint.result_files import PRECISIONS_FILE
from enjoyln_cli.comparison.simulated_rounding import linear_layers
from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.quantisation import workshop
from enjoyln_cli.quantisation.candidates import candidates
from enjoyln_cli.quantisation.workshop import load_result
from enjoyln_cli.quantisers.quantised_checkpoints import WeightCount, group_of, write
from enjoyln_cli.quantisers.schemes import FLOAT_BITS, FORMATS, SCHEMES, require_scheme
from enjoyln_cli.quantisers.sequential_gptq import round_model
from enjoyln_cli.rewrite.opened_model import open_model

LICENCE = ROOT / "LICENSE"
LIBRARIES = {"torchao": "torchao", "compressed-tensors": "llmcompressor"}
CASES = [
    (format_name, scheme) for format_name in LIBRARIES for scheme in FORMATS[format_name].schemes
]


def small_opt(width: int = 64, hidden: int = 96) -> Any:
    """An OPT whose parameters are all random, in eval mode."""
    torch.manual_seed(3)
    sizes = {**BERT, "hidden_size": width, "word_embed_proj_dim": width, "ffn_dim": hidden}
    config = OPTConfig(**{**sizes, "num_attention_heads": 4})
    return shaken(OPTForCausalLM(config), 0.05)


def written(model: Any, format_name: str, scheme: str, folder: Path, **changes: Any) -> WeightCount:
    """Quantise a model; ``changes`` are other arguments of ``write``."""
    folder.mkdir()
    arguments: dict[str, Any] = {
        "dtype": torch.float32,
        "bits": {},
        "rounded": {},
        "float_folder": None,
    }
    return write(
        model, format_name, SCHEMES[scheme], folder=folder / "out", **{**arguments, **changes}
    )


@pytest.mark.slow
@pytest.mark.parametrize(("format_name", "scheme"), CASES)
def test_transformers_loads_a_checkpoint_with_rounded_layers(
    format_name: str, scheme: str, tmp_path: Path
) -> None:
    pytest.importorskip(LIBRARIES[format_name])
    model, ids = small_opt(), torch.arange(3, 33)[None]
    layers = [m for m in model.model.modules() if isinstance(m, nn.Linear)]
    count = written(model, format_name, scheme, tmp_path / "work")
    assert count.total - count.in_float == sum(layer.weight.numel() for layer in layers)
    assert count.total == sum(parameter.numel() for parameter in model.parameters())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "work" / "out").eval()
    with torch.no_grad():
        exact = model(ids).logits
        error = float((loaded(ids, use_cache=False).logits - exact).norm() / exact.norm())
    least, most = (1e-3, 0.02) if SCHEMES[scheme].weight_bits == 8 else (0.02, 0.3)
    assert least < error < most
    tensors = load_file(tmp_path / "work" / "out" / "model.safetensors")
    integers = [t for t in tensors.values() if not t.is_floating_point() and t.numel() > 8]
    assert len(integers) >= len(layers)
    assert tensors["model.decoder.embed_tokens.weight"].dtype == torch.float32
    assert AutoConfig.from_pretrained(tmp_path / "work" / "out").use_cache


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format_name", "scheme"),
    [(format_name, name) for format_name, name in CASES if SCHEMES[name].weight_bits == 4],
)
def test_gptq_rounds_a_checkpoint_by_the_error_of_its_outputs(
    format_name: str, scheme: str, tmp_path: Path
) -> None:
    pytest.importorskip(LIBRARIES[format_name])
    model = small_opt(width=192, hidden=72)  # groups of 64, and of a whole row
    rows = torch.randint(3, 37, (17, 1, 30), generator=torch.Generator().manual_seed(1))
    *calibration, held_out = ({"input_ids": ids} for ids in rows)
    by_error = copy.deepcopy(model)
    widths = {path: layer.in_features for path, layer in linear_layers(model).items()}
    groups = {path: group_of(width) or width for path, width in widths.items()}
    integers = round_model(by_error, groups, calibration)
    errors = []
    for rounded in ({}, integers):
        folder = tmp_path / str(len(rounded))
        written(copy.deepcopy(model), format_name, scheme, folder, rounded=rounded)
        loaded = AutoModelForCausalLM.from_pretrained(folder / "out").eval()
        with torch.no_grad():
            exact, simulated, found = (
                one(**held_out, use_cache=False).logits for one in (model, by_error, loaded)
            )
        errors.append(float((found - exact).norm() / exact.norm()))
    assert 0 < errors[1] < 0.8 * errors[0]
    if scheme == "w4a16":  # the checkpoint has these integers
        torch.testing.assert_close(found, simulated, rtol=1e-3, atol=1e-4)


def test_a_class_without_input_embeddings_is_refused_for_torchao(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    sizes = {"hidden_sizes": [16, 32], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    shape = {"depths": [1, 1], "sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2]}
    config = SegformerConfig(num_encoder_blocks=2, decoder_hidden_size=32, **sizes, **shape)
    with pytest.raises(UnsupportedModel, match="SegformerForImageClassification .* --format onnx"):
        written(SegformerForImageClassification(config), "torchao", "w8a8", tmp_path / "work")


def test_the_class_of_a_model_that_cannot_be_analysed() -> None:
    assert open_model(GPT2).stored_class.name == "GPT2LMHeadModel"


@pytest.mark.slow
@pytest.mark.parametrize("format_name", LIBRARIES)
def test_the_rest_has_the_dtype_of_the_original(format_name: str, tmp_path: Path) -> None:
    pytest.importorskip(LIBRARIES[format_name])
    model = small_opt(width=40, hidden=72).bfloat16().float()
    bits = {"*.1.*": FLOAT_BITS, "*.fc2": FLOAT_BITS}
    count = written(model, format_name, "w4a16", tmp_path / "work", dtype=torch.bfloat16, bits=bits)
    assert count.total - count.in_float == 4 * 40 * 40 + 40 * 72
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "work" / "out")
    for name in ("embed_tokens.weight", "layers.1.fc1.weight", "layers.0.fc2.weight"):
        stored = loaded.model.decoder.get_parameter(name)
        assert stored.dtype == torch.bfloat16
        assert torch.equal(stored.float(), model.model.decoder.get_parameter(name))


@pytest.mark.slow
@pytest.mark.parametrize("format_name", LIBRARIES)
def test_a_width_without_groups_decides_for_its_layer_alone(
    format_name: str, tmp_path: Path
) -> None:
    pytest.importorskip(LIBRARIES[format_name])
    model = small_opt(width=192, hidden=72)
    layers = {"q_proj": "self_attn.q_proj", "fc1": "fc1", "fc2": "fc2"}
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            for path in layers.values():
                layer.get_submodule(path).weight[:, 3] += 9.0  # in the first group of each output
    count = written(model, format_name, "w4a16", tmp_path / "work")
    assert count.total - count.in_float == 2 * (4 * 192 * 192 + 2 * 192 * 72)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "work" / "out")
    loaded(torch.arange(3, 33)[None])  # unpacks the weights
    for name, path in layers.items():
        exact = model.model.decoder.layers[1].get_submodule(path)
        stored = loaded.model.decoder.layers[1].get_submodule(path)
        rows = torch.eye(exact.in_features)  # the weight, as the layer computes with it
        with torch.no_grad():
            first, found = (layer(rows) - exact.bias for layer in (exact, stored))
        error = float((found - first)[64:].norm() / first[64:].norm())
        assert error > 0.9 if name == "fc2" else 0.01 < error < 0.2  # 72 is no multiple of 32


@pytest.mark.slow
def test_eight_bits_have_the_groups_of_the_preset(tmp_path: Path) -> None:
    pytest.importorskip("llmcompressor")
    model = small_opt(width=192, hidden=72)
    written(model, "compressed-tensors", "w8a16", tmp_path / "work")
    tensors = load_file(tmp_path / "work" / "out" / "model.safetensors")
    at = "model.decoder.layers.1"
    assert tensors[f"{at}.fc1.weight_scale"].shape == (72, 3)  # groups of 64
    assert tensors[f"{at}.fc2.weight_scale"].shape == (192, 1)  # 72 is no multiple of 32
    scale = tensors[f"{at}.fc1.weight_scale"][:, 0]
    first = model.get_parameter(f"{at}.fc1.weight")[:, :64]
    torch.testing.assert_close(scale, first.abs().amax(1) / 127.5, rtol=1e-3, atol=0)


def with_outliers(folder: Path) -> Path:
    """The small OPT with three large features in each norm: the same function, rounded worse."""
    shutil.copytree(CHECKPOINTS / "opt", folder)
    weights = load_file(folder / "model.safetensors")
    for layer in range(4):
        at = f"model.decoder.layers.{layer}"
        readers = {"self_attn_layer_norm": [f"self_attn.{n}_proj" for n in "qkv"]}
        for norm, layers in {**readers, "final_layer_norm": ["fc1"]}.items():
            for name in ("weight", "bias"):
                weights[f"{at}.{norm}.{name}"][[5, 31, 61]] *= 20.0
            for reader in layers:
                weights[f"{at}.{reader}.weight"][:, [5, 31, 61]] /= 20.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("format_name", LIBRARIES)
def test_a_model_with_outliers_is_rotated_and_verified(format_name: str, tmp_path: Path) -> None:
    pytest.importorskip(LIBRARIES[format_name])
    out, data = tmp_path / "out", ("--text", LICENCE)
    options = ("--format", format_name, "--rotations", 1, "--inputs", 4)
    shown = good("quantize", with_outliers(tmp_path / "model"), "-o", out, *data, *options)
    assert f"wrote w8a8 as {format_name}" in shown and "untied" not in shown
    found = json.loads((out / PRECISIONS_FILE).read_text())["w8a8"]
    assert found["chosen"] == "rotated, seed 0"
    assert found["held_out"]["kl"] < 0.5 * found["plain"]["kl"]
    *_, rotated = found["candidates"]
    table = 2 * 509 * 72  # the embedding and the head, which is a tensor of its own
    assert table < rotated["weights"]["in_float"] < 1.2 * table
    assert f"{rotated['weights']['in_float']:,} of {rotated['weights']['total']:,}" in shown
    assert (found["speed"] is None) == (format_name == "compressed-tensors")
    original = (CHECKPOINTS / "opt" / "tokenizer.json").read_bytes()
    assert (out / "tokenizer.json").read_bytes() == original
    again = json.loads(good("verify", out, *data, "--json"))
    measured = again["precisions"]["w8a8"]
    assert again["passed"] and measured["differences"]["error"] < 2 * found["held_out"]["error"]


@pytest.mark.slow
@pytest.mark.parametrize("format_name", LIBRARIES)
def test_layers_get_more_bits_without_another_gptq(
    format_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(LIBRARIES[format_name])
    options = ("--text", LICENCE, "--format", format_name, "--scheme", "w4a16", "--rotations", 0)
    good("quantize", CHECKPOINTS / "opt", "-o", tmp_path / "first", *options)
    first = json.loads((tmp_path / "first" / PRECISIONS_FILE).read_text())["w4a16"]
    runs: list[Any] = []

    def counted(*arguments: Any) -> Any:
        runs.append(arguments)
        return round_model(*arguments)

    monkeypatch.setattr(workshop, "round_model", counted)
    limit = 0.4 * first["held_out"]["error"]
    good("quantize", CHECKPOINTS / "opt", "-o", tmp_path / "out", *options, "--max-error", limit)
    found = json.loads((tmp_path / "out" / PRECISIONS_FILE).read_text())["w4a16"]
    names = [one["name"] for one in found["candidates"]]
    assert len(runs) == sum(name.endswith("GPTQ") for name in names) < len(names) - 4
    assert found["finer"] and found["held_out"]["error"] <= limit


@pytest.mark.parametrize("format_name", ["onnx", "torchao"])
def test_a_rotation_is_quantised_as_its_stock_class(format_name: str, tmp_path: Path) -> None:
    """The result says nothing of the rotation: it computes what its own source computes."""
    pytest.importorskip({"onnx": "onnxruntime", **LIBRARIES}[format_name])
    rotated, out, data = tmp_path / "rotated", tmp_path / "out", ("--text", LICENCE)
    good("rotate", CHECKPOINTS / "opt", "-o", rotated, "--untie", "--seed", 4, "--no-verify")
    good("quantize", rotated, "-o", out, *data, "--format", format_name, *("--rotations", 0))
    assert "enjoyln" in json.loads((rotated / "config.json").read_text())
    assert "enjoyln" not in json.loads((out / "config.json").read_text())
    found = json.loads((out / PRECISIONS_FILE).read_text())["w8a8"]
    assert found["source"] == str(rotated) and 0 < found["held_out"]["error"] < 0.1
    assert json.loads(good("verify", out, *data, "--json"))["passed"]


def test_a_fold_is_not_quantised(tmp_path: Path) -> None:
    good("fold", CHECKPOINTS / "opt", "-o", tmp_path / "folded", "--no-verify")
    said = refused("quantize", tmp_path / "folded", "-o", tmp_path / "out", "--text", LICENCE)
    assert "is the result of an earlier fold; fold its source" in said


@pytest.mark.parametrize("format_name", LIBRARIES)
def test_a_model_with_no_layer_to_round_is_refused(format_name: str, tmp_path: Path) -> None:
    gpt2 = AutoModelForCausalLM.from_pretrained(GPT2)
    with pytest.raises(UnsupportedModel, match="GPT2LMHeadModel has none .* --format onnx"):
        written(gpt2, format_name, "w8a8", tmp_path / "work")
    assert not list((tmp_path / "work").iterdir())
    with pytest.raises(UnsupportedModel, match="OPTForCausalLM has none"):
        written(small_opt(), format_name, "w8a8", tmp_path / "kept", bits={"model.*": FLOAT_BITS})


def test_a_head_that_is_not_rounded_is_not_untied() -> None:
    options = Options(fold=False, rotate=True, untie=True)
    plan = analyze_config(small_opt().config, model_class="OPTForCausalLM", options=options).plan
    names = [one.name for one in candidates(plan, (0,), rounds_untied_heads=True)]
    assert names == ["original", "untied", "values only", "rotated, seed 0"]
    names.remove("untied")
    assert [one.name for one in candidates(plan, (0,), rounds_untied_heads=False)] == names


def test_a_scheme_or_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModel, match="compressed-tensors cannot store w4a8"):
        require_scheme("w4a8", "compressed-tensors")
    monkeypatch.setattr("enjoyln_cli.onnx_export.requirements.find_spec", lambda name: None)
    with pytest.raises(UnsupportedModel, match="quantising to compressed-tensors .* llmcompressor"):
        require_scheme("w8a8", "compressed-tensors")
    with pytest.raises(UnsupportedModel, match="running compressed-tensors .* compressed_tensors"):
        require_scheme("w8a8", "compressed-tensors", to_run=True)


@pytest.mark.parametrize("format_name", ["torchao", "onnx"])
def test_a_damaged_result_is_refused(format_name: str, tmp_path: Path) -> None:
    small_opt().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"none")
    with pytest.raises(BadCheckpoint, match="cannot be loaded"):
        load_result(tmp_path, format_name, OPTForCausalLM, "")


def test_an_input_with_which_a_result_fails_is_refused(tmp_path: Path) -> None:
    small_opt().save_pretrained(tmp_path)
    compute = load_result(tmp_path, "torchao", OPTForCausalLM, "")
    with pytest.raises(UnsupportedModel, match="torchao cannot run the model on inputs with which"):
        compute({"input_ids": torch.tensor([[10**6]])})
