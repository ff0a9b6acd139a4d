"""Layers that cost too much get more bits, until the result is within its limits."""

from __future__ import annotations

import copy
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from commands import good, refused
from live_models import CHECKPOINTS, ROOT, shaken
from stored_files import shallow
from tiny_models import one_layer
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from enjoyln_cli.checkpoint.result_files import PRECISIONS_FILE
from enjoyln_cli.comparison.data_files import read_user_data
from enjoyln_cli.comparison.output_meaning import Kind, Meaning
from enjoyln_cli.comparison.simulated_rounding import linear_layers
from enjoyln_cli.onnx_export.cached_run import load_programs, whole_rows
from enjoyln_cli.onnx_export.programs import programs_of, save
from enjoyln_cli.quantisation import layer_bits
from enjoyln_cli.quantisation.examples import Example
from enjoyln_cli.quantisation.layer_bits import (
    FinerLayer,
    bits_of,
    fewer,
    fewest,
    finer_layers,
    for_all_readers,
    in_words,
)
from enjoyln_cli.quantisation.measure import ExactOutputs
from enjoyln_cli.quantisation.quantised import Quantised
from enjoyln_cli.quantisation.quantize import quantize, require_layers
from enjoyln_cli.quantisers.schemes import FLOAT_BITS, SCHEMES
from enjoyln_cli.quantisers.static_ranges import ranges_of
from enjoyln_cli.quantisers.traced_programs import quantised
from enjoyln_cli.text import number

TEXT = ("--text", ROOT / "LICENSE", "--rotations", 0, "--inputs", 4)
COSTLY = "transformer.h.1.mlp.c_proj"


@pytest.fixture(scope="module")
def exact() -> tuple[Any, ExactOutputs]:
    """A GPT-2 with a layer that rounding hurts, and its outputs."""
    model = copy.deepcopy(AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "gpt2").eval())
    with torch.no_grad():  # one large weight, on a feature that is mostly small, sets the scale
        model.get_submodule(COSTLY).weight[0] *= 200.0
    ids = torch.randint(3, 500, (3, 40), generator=torch.Generator().manual_seed(1))
    examples = [Example({"input_ids": row[None]}) for row in ids]
    with torch.no_grad():
        outputs = [{"logits": model(**example.batch).logits} for example in examples]
    return model, ExactOutputs({"logits": Meaning(Kind.ONE_OF)}, examples, outputs)


def steps_of(exact: tuple[Any, ExactOutputs], scheme: str, *kept: str, **bits: int) -> Any:
    changed = replace(SCHEMES[scheme], **bits)
    return finer_layers(exact[0], "onnx", changed, kept, exact[1], lambda done, total: None)


def test_the_layer_that_rounding_hurts_most_comes_first(exact: tuple[Any, ExactOutputs]) -> None:
    steps = steps_of(exact, "w8a8", weight_bits=3)
    assert steps[0].layer == COSTLY and steps[0].bits == FLOAT_BITS
    assert len(steps) == 12  # the tied head is the thirteenth layer: one stays rounded
    worth = [step.cost / step.size for step in steps]
    assert worth == sorted(worth, reverse=True)
    assert COSTLY not in bits_of(steps_of(exact, "w8a8", "*.h.1.*"))


def test_a_layer_gets_eight_bits_before_it_is_left_in_float(
    exact: tuple[Any, ExactOutputs],
) -> None:
    steps = steps_of(exact, "w4a16")
    (embedding,) = (step for step in steps if step.layer == "transformer.wte")
    assert embedding.bits == FLOAT_BITS and embedding.cost > 0  # it has 8 bits before
    assert len(steps) == 2 * 12 - 1 + 1
    for layer in {*bits_of(steps)} - {embedding.layer}:
        own = [step for step in steps if step.layer == layer]
        assert [step.bits for step in own] in ([8, FLOAT_BITS], [8])
        assert own[0].size * 6 == own[-1].size or len(own) == 1
        assert own[0].cost > own[-1].cost or len(own) == 1


def test_a_layer_whose_result_is_rounded_costs_what_that_costs() -> None:
    """One large feature of a result, which the next norm takes away again, sets its scale."""
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "gpt2").eval()
    layer = "transformer.h.2.mlp.c_proj"
    with torch.no_grad():
        model.get_submodule(layer).bias += 1000.0
    ids = torch.randint(3, 500, (2, 40), generator=torch.Generator().manual_seed(1))
    examples = [Example({"input_ids": row[None]}) for row in ids]
    with torch.no_grad():
        outputs = [{"logits": model(**example.batch).logits} for example in examples]
    exact = ExactOutputs({"logits": Meaning(Kind.ONE_OF)}, examples, outputs)
    found = {
        rounded: {step.layer: step.cost for step in steps_of((model, exact), "w8a8-static", **more)}
        for rounded, more in ((False, {}), (True, {"rounds_results": True}))
    }
    assert max(found[True], key=found[True].__getitem__) == layer
    assert found[True][layer] > 10 * found[False][layer]


def test_an_encoder_runs_again_only_for_its_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = T5Config(vocab_size=40, decoder_start_token_id=0, **sizes)
    model = shaken(T5ForConditionalGeneration(config).eval(), 0.3)
    ids = torch.randint(1, 40, (2, 1, 9), generator=torch.Generator().manual_seed(1))
    examples = [Example({"input_ids": row, "decoder_input_ids": row[:, :5]}) for row in ids]
    with torch.no_grad():
        outputs = [{"logits": model(**example.batch).logits} for example in examples]
    exact = ExactOutputs({"logits": Meaning(Kind.ONE_OF)}, examples, outputs)
    runs: list[int] = []
    model.encoder.block[0].register_forward_hook(lambda *_: runs.append(1))
    steps = steps_of((model, exact), "w4a16")
    inside = [path for path in linear_layers(model) if path.startswith("encoder.")]
    tables = ["shared", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"]
    assert all([step.layer for step in steps].count(table) == 1 for table in tables)
    assert len(inside) == 12
    assert len(runs) == len(examples) * (1 + 2 * len(inside) + len(tables))
    monkeypatch.setattr(layer_bits, "encoded_once", lambda model: nullcontext())
    assert steps == steps_of((model, exact), "w4a16")


@pytest.mark.parametrize("least", [1, 4])
@pytest.mark.parametrize("enough", [1, 2, 3, 5, 8, 11, 13])
def test_the_fewest_are_found(enough: int, least: int) -> None:
    asked: list[int] = []

    def is_enough(count: int) -> bool:
        assert least <= count <= 13
        asked.append(count)
        return count >= enough

    assert fewest(13, is_enough, least) == max(enough, least)
    assert len(asked) == len(set(asked)) <= 8
    asked.clear()
    assert fewer(13, is_enough, least) == max(enough, least)
    assert len(asked) == len(set(asked)) <= (2 if enough > 11 else 7)
    assert fewest(13, lambda count: False, least) is None
    assert fewest(0, is_enough) is None and fewest(3, is_enough, 4) is None


def test_finer_layers_in_words() -> None:
    steps = [FinerLayer(layer, bits, 0.1, 8) for layer, bits in (("a", 8), ("b", 8), ("a", 32))]
    assert bits_of(steps) == {"a": FLOAT_BITS, "b": 8}
    assert in_words(steps) == "1 layer in 8 bits, 1 layer in float"
    assert in_words(steps[:2]) == "2 layers in 8 bits"


def test_all_readers_of_a_weight_get_its_bits() -> None:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24}
    model = BartForConditionalGeneration(BartConfig(vocab_size=40, **sizes, **heads))
    readers = {"model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens"}
    found = for_all_readers(model, {"*.shared": FLOAT_BITS, "*.fc1": 8})
    names = {path for path, bits in found.items() if bits == FLOAT_BITS}
    assert names == {"*.shared", "lm_head", *readers}
    assert {path for path, bits in found.items() if bits == 8} == {
        "*.fc1", "model.encoder.layers.0.fc1", "model.decoder.layers.0.fc1"
    }  # fmt: skip


def record(out: Path) -> dict[str, Any]:
    (found,) = json.loads((out / PRECISIONS_FILE).read_text()).values()
    return dict(found)


def hurt(folder: Path) -> Path:
    """Two layers of GPT-2, with one layer whose rounding costs much."""
    shallow("gpt2", folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        layer = model.get_submodule(COSTLY)
        layer.weight[0] *= 300.0
        layer.weight[1:, 1:] *= 0.5
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format_name", "scheme"),
    [("onnx", "w8a8"), ("onnx", "w4a16-static"), ("openvino", "w4a16"), ("openvino", "w8a16")],
)
def test_a_limit_of_the_error_is_met_by_itself(
    format_name: str, scheme: str, tmp_path: Path
) -> None:
    pytest.importorskip({"onnx": "onnxruntime", "openvino": "nncf"}[format_name])
    model, out = hurt(tmp_path / "model"), tmp_path / "out"
    words = ("--format", format_name, "--scheme", scheme, *TEXT)
    good("quantize", model, "-o", tmp_path / "first", *words, "--max-error", 9)
    first = record(tmp_path / "first")
    assert not first["finer"]
    limit = 0.6 * first["held_out"]["error"]
    said = good("quantize", model, "-o", out, *words, "--max-error", limit)
    found = record(out)
    assert found["held_out"]["error"] <= limit and found["plain"] == first["plain"]
    layers = [step["layer"] for step in found["finer"]]
    assert layers[0] == COSTLY or scheme == "w4a16"  # whose groups spare the other weights
    assert all(layer in said for layer in layers)
    assert f"wrote {scheme} as {format_name}" in said and found["chosen"] in said
    assert re.search(r", \d+ layers? in (float|8 bits)", found["chosen"])
    assert found["size"] > first["size"]
    assert f"`{layers[0]}`" in (out / "README.md").read_text()
    good("verify", out, "--text", ROOT / "LICENSE")


@pytest.mark.slow
def test_the_held_out_data_may_need_more_bits(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    data, said = read_user_data(text=ROOT / "LICENSE"), list[str]()

    def made(name: str, **limits: Any) -> Quantised:
        return quantize(
            CHECKPOINTS / "gpt2",
            tmp_path / name,
            data,
            scheme="w4a16",
            rotations=0,
            inputs=4,
            on_event=lambda kind, text: said.append(text),
            **limits,
        )

    first = made("first")
    errors = {one.name: one.differences.error for one in first.candidates}
    calibration, held_out = errors[first.chosen], first.held_out.error
    assert calibration < held_out, "GPTQ fits weights to the calibration data"
    limit = (calibration + held_out) / 2
    found = made("out", max_error=limit)
    again = f"error {number(held_out)} on the held-out data, {number(calibration)} on the"
    assert any(text.startswith(again) for text in said)
    assert found.finer and found.held_out.error <= limit


@pytest.mark.slow
def test_a_size_is_filled_with_the_layers_that_need_it(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model, words = hurt(tmp_path / "model"), ("--scheme", "w4a16", *TEXT)
    good("quantize", model, "-o", tmp_path / "first", *words)
    first = record(tmp_path / "first")
    spare_units = first["size"] + 40_000
    good("quantize", model, "-o", tmp_path / "out", *words, "--max-size", spare_units)
    found = record(tmp_path / "out")
    assert first["size"] < found["size"] <= spare_units
    assert found["held_out"]["kl"] < first["held_out"]["kl"]
    small = ("--max-size", first["size"] - 20_000)
    said = refused("quantize", model, "-o", tmp_path / "none", *words, *small)
    assert re.search(r"w4a16 takes .* which is more than --max-size .*, so nothing was", said)
    assert said.endswith("written; pass a larger --max-size\n")
    both = ("--max-error", 0.5 * first["held_out"]["error"], "--max-size", first["size"])
    said = refused("quantize", model, "-o", tmp_path / "none", *words, *both)
    assert said.endswith("written; pass a larger --max-error\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "format_name, scheme", [("onnx", "w8a16"), ("onnx", "w4a16"), ("openvino", "w8a16")]
)
def test_a_limit_below_what_embeddings_cost_is_met(
    format_name: str, scheme: str, tmp_path: Path
) -> None:
    pytest.importorskip("nncf" if format_name == "openvino" else "onnxruntime")
    words = ("quantize", CHECKPOINTS / "gpt2", "-o", tmp_path / "out", *TEXT, "--scheme", scheme)
    good(*words, "--format", format_name, "--max-error", 0.001)
    found = record(tmp_path / "out")
    kept = [step["layer"] for step in found["finer"] if step["bits"] == FLOAT_BITS]
    assert "transformer.wte" in kept and 0 < found["held_out"]["error"] <= 0.001


@pytest.mark.slow
def test_a_limit_that_no_bits_reach_is_refused_with_a_number(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = one_layer(tmp_path / "phi")
    said = refused("quantize", model, "-o", tmp_path / "out", *TEXT, "--max-error", 1e-7)
    error = r"error: w8a8 costs too much: error 0\.\d+ of the outputs \(limit 1e-07\), and still"
    assert re.search(rf"{error} [\de.-]+ with \d+ layers in float, so nothing was written", said)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-g32", "w8a16", "w8a16-static"])
@pytest.mark.parametrize("kept", ["transformer.wte", "lm_head"])
def test_an_embedding_and_its_tied_head_can_be_kept(scheme: str, kept: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "gpt2").eval()
    require_layers(model, [kept])
    ids = torch.arange(3, 63).view(3, 20)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    made, rounding, errors = programs_of(model, torch.float32), SCHEMES[scheme], []
    with torch.no_grad():
        exact = model(**batch).logits
    for bits in ({}, {kept: rounding.bits_to_keep("onnx")}):
        small = quantised(made, rounding, ranges_of(made, [batch]), bits)
        (file,) = save(small, tmp_path, rounding.suffix)
        stored = {one.name: one for one in onnx.load(file).graph.initializer}
        assert ("transformer.wte.weight" in stored) == bool(bits)
        logits = whole_rows(load_programs(tmp_path, rounding.suffix))(batch)["logits"]
        errors.append(float((logits - exact).norm() / exact.norm()))
    assert 0 < errors[1] < 0.9 * errors[0]
