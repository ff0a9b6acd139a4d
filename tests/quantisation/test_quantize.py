"""``enjoyln quantize`` from end to end, and what it refuses."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from commands import GPT2, enjoyln, good, refused
from large_features import with_large_features
from live_models import CHECKPOINTS, ROOT, shaken
from rounding import relative
from safetensors.torch import load_file, save_file
from sentence_encoder import sentence_encoder
from stored_files import shallow
from tiny_models import WHISPER
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from vision_language import pictures, vision_language_model

from enjoyln_cli.checkpoint.result_files import PRECISIONS_FILE
from enjoyln_cli.cli.console import write_quantised
from enjoyln_cli.comparison.data_files import UserData, read_user_data
from enjoyln_cli.comparison.run import run
from enjoyln_cli.comparison.simulated_rounding import path_of_head
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.onnx_export.cached_run import load_programs, whole_rows
from enjoyln_cli.onnx_export.programs import programs_of, save
from enjoyln_cli.onnx_export.runtimes import IN_16_BITS
from enjoyln_cli.quantisation.examples import split
from enjoyln_cli.quantisation.load_onnx import load_onnx
from enjoyln_cli.quantisation.measure import Differences
from enjoyln_cli.quantisation.quantised import Compared, Quantised
from enjoyln_cli.quantisation.quantize import quantize, require_layers
from enjoyln_cli.quantisers.integer_products import reads_integers
from enjoyln_cli.quantisers.schemes import SCHEMES
from enjoyln_cli.quantisers.speed import Speed
from enjoyln_cli.quantisers.static_ranges import ranges_of
from enjoyln_cli.quantisers.traced_programs import quantised
from enjoyln_cli.text import number

LICENCE = ROOT / "LICENSE"
SOME = ("--rotations", 1, "--inputs", 4)


def with_outliers(folder: Path) -> Path:
    """Two layers of GPT-2, three features large in each norm: the same function, rounded worse."""
    shallow("gpt2", folder)
    weights = load_file(folder / "model.safetensors")
    for layer in range(2):
        for norm, reader in (("ln_1", "attn.c_attn"), ("ln_2", "mlp.c_fc")):
            at = f"transformer.h.{layer}"
            for name in ("weight", "bias"):
                weights[f"{at}.{norm}.{name}"][[5, 31, 77]] *= 20.0
            weights[f"{at}.{reader}.weight"][[5, 31, 77]] /= 20.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def logits_of(out: Path, ids: torch.Tensor) -> np.ndarray[Any, Any]:
    """What onnxruntime computes, with nothing of this package or of transformers."""
    session = onnxruntime.InferenceSession(out / "onnx" / "model_quantized.onnx")
    feed = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    feed["position_ids"] = torch.arange(ids.shape[1]).expand(ids.shape)
    for one in session.get_inputs():
        if one.name not in feed:  # the cache
            feed[one.name] = torch.zeros(len(ids), one.shape[1], 0, one.shape[3])
    names = [one.name for one in session.get_inputs()]
    (logits,) = session.run(["logits"], {name: feed[name].numpy() for name in names})
    return np.asarray(logits)


@pytest.mark.slow
def test_a_model_with_outliers_is_rotated_and_rounds_better(tmp_path: Path) -> None:
    model, out = with_outliers(tmp_path / "model"), tmp_path / "out"
    result = enjoyln("quantize", model, "-o", out, "--text", LICENCE, *SOME)
    measured = json.loads((out / PRECISIONS_FILE).read_text())["w8a8"]["held_out"]["error"]
    shown, told = result.stdout, result.stderr.splitlines()
    assert "wrote w8a8 as onnx" in shown and "rotated, seed 0" in shown
    assert "quantising: original" in told
    assert any(re.fullmatch(r"quantising: values only( \(about .+ left\))?", line) for line in told)
    found = json.loads((out / PRECISIONS_FILE).read_text())["w8a8"]
    check = json.loads(good("verify", out, "--text", LICENCE, "--json"))
    again = check["precisions"]["w8a8"]
    assert check["passed"] and again["same_inputs"] and again["inputs"] == 4
    assert again["generated"] == found["generated"] and found["generated"]["inputs"] == 4
    assert again["differences"]["kl"] == pytest.approx(found["held_out"]["kl"], rel=0.01)
    other = tmp_path / "other.txt"
    other.write_text(Path(pytest.__file__).read_text() + Path(json.__file__).read_text())
    more = json.loads(good("verify", out, "--text", other, "--json"))["precisions"]["w8a8"]
    assert more["passed"] and not more["same_inputs"] and more["inputs"] == 8
    assert more["differences"]["error"] != again["differences"]["error"]
    config = (model / "config.json").read_text()
    code = {"auto_map": {"AutoModel": "never_loaded.Model"}}
    (model / "config.json").write_text(json.dumps(json.loads(config) | code))
    assert "pass --trust-remote-code" in refused("verify", out, "--text", LICENCE)
    good("verify", out, "--text", LICENCE, "--trust-remote-code")
    (model / "config.json").write_text(config)
    accept = ("--text", LICENCE, "-q", "--accept", PRECISIONS_FILE)
    for changed in ({"max_error": 0.001}, {"held_out": {"error": 0.9 * measured}}):
        (out / PRECISIONS_FILE).write_text(json.dumps({"w8a8": {**found, **changed}}))
        shown = refused("verify", out, "--text", LICENCE, "-q")
        assert f"{PRECISIONS_FILE} has changed since it was written" in shown
        limit = changed.get("max_error", 0.99 * measured)
        assert f"above the limit of {number(limit)}: error" in refused("verify", out, *accept)
    (out / PRECISIONS_FILE).write_text(json.dumps({"w8a8": found}, indent=2) + "\n")
    good("verify", out, "--text", LICENCE)
    assert "your data are needed" in refused("verify", out, status=2)
    assert found["chosen"] == "rotated, seed 0"
    assert found["held_out"]["kl"] < 0.5 * found["plain"]["kl"]
    assert found["held_out"]["error"] < 0.7 * found["plain"]["error"]
    assert found["size"] < 0.4 * found["float_size"]
    assert found["perplexity"] == pytest.approx(found["held_out"]["perplexity"], rel=0.02)

    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer(LICENCE.read_text()[:4000], return_tensors="pt").input_ids[:, :120].view(2, 60)
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(model)(ids).logits.numpy()
    error = np.linalg.norm(logits_of(out, ids) - exact) / np.linalg.norm(exact)
    assert 0 < error < 2 * found["held_out"]["error"]  # another text
    nodes = Counter(
        node.op_type for node in onnx.load(out / "onnx" / "model_quantized.onnx").graph.node
    )
    assert nodes["MatMulInteger"] == 4 * 2 + 1  # the untied head, too


@pytest.mark.slow
def test_norms_that_are_not_rotated_are_smoothed(tmp_path: Path) -> None:
    model, out = with_outliers(tmp_path / "model"), tmp_path / "out"
    events: list[str] = []
    data = read_user_data(text=LICENCE)
    result = quantize(
        model, out, data, rotations=0, inputs=4, on_event=lambda _, text: events.append(text)
    )
    assert result.chosen.endswith(", smoothed")
    assert result.held_out.kl < 0.5 * result.plain.kl
    assert result.held_out.error < 0.7 * result.plain.error
    assert sum(text.count(", smoothed") for text in events if "quantising" in text) == 1


IDS = torch.arange(3, 63).view(3, 20)
BATCH = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


@pytest.fixture(scope="module")
def phi() -> tuple[Any, Any]:
    """A model, and its program in float32."""
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "phi").eval()
    return model, programs_of(model, torch.float32)


ROUNDED = ("MatMulInteger", "4 bits", "8 bits", "as numbers")


def kind_of(node: Any) -> str:
    """The operator, or how many bits a weight in groups has, or that integers are numbers again."""
    if node.op_type in ("MatMul", "Gemm") and reads_integers(node):
        return "as numbers"
    bits = node.attributes.get("bits")
    return f"{bits.as_int()} bits" if bits and node.op_type == "MatMulNBits" else str(node.op_type)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "keep", "products"),
    [
        ("w8a8", ("*.mlp.*",), {"MatMulInteger": 17}),
        ("w8a8-g32", ("*.mlp.*",), {"8 bits": 17}),
        ("w8a8-static", (), {}),
        ("w8a16-static", (), {}),
        ("w4a16-static", ("*.mlp.*",), {}),
        ("w4a8", (), {"4 bits": 24, "8 bits": 1}),  # the head has 8 bits
        ("w4a16", ("*.self_attn.*",), {"4 bits": 8, "as numbers": 17}),
        ("w8a16", ("*.self_attn.*",), {"as numbers": 9}),
    ],
)
def test_every_scheme_is_what_onnxruntime_runs(
    scheme: str,
    keep: tuple[str, ...],
    products: dict[str, int],
    phi: tuple[Any, Any],
    tmp_path: Path,
) -> None:
    (model, made), rounding = phi, SCHEMES[scheme]
    bits = dict.fromkeys(keep, rounding.bits_to_keep("onnx"))
    if rounding.weight_bits == 4:
        bits |= dict.fromkeys(path_of_head(model), 8)
    (file,) = save(quantised(made, rounding, ranges_of(made, [BATCH]), bits), tmp_path)
    written = onnx_ir.load(file)
    assert (IN_16_BITS in written.metadata_props) == ("a16-static" in scheme)
    kinds = Counter(map(kind_of, written.graph))
    assert {kind: n for kind, n in kinds.items() if kind.startswith(ROUNDED)} == products
    assert products or kinds["DequantizeLinear"] >= 25 and kinds["QuantizeLinear"] >= 13
    with torch.no_grad():
        exact = model(**BATCH).logits
    logits = whole_rows(load_programs(tmp_path))(BATCH)["logits"]
    error = (logits - exact).norm() / exact.norm()
    assert 0 < float(error) < rounding.max_error


@pytest.mark.slow
def test_fixed_scales_serve_a_decoder_with_a_cache(tmp_path: Path) -> None:
    """Keys and values of cross attentions are computed in a branch, which shows no ranges."""
    torch.manual_seed(0)
    model = shaken(WhisperForConditionalGeneration(WhisperConfig(**WHISPER)), 0.1)
    batches = [
        {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": torch.randint(3, 37, (2, n))}
        for n in (9, 4)
    ]
    programs = programs_of(model, torch.float32)
    for scheme in [SCHEMES[n] for n in ("w8a8-static", "w8a16-static", "w4a16-static")]:
        small = quantised(programs, scheme, ranges_of(programs, batches), {})
        save(small, tmp_path, scheme.suffix)
        compute = whole_rows(load_programs(tmp_path, scheme.suffix))
        for batch in batches:
            with torch.no_grad():
                exact = model(**batch).logits
            error = float((compute(batch)["logits"] - exact).norm() / exact.norm())
            assert 0 < error < scheme.max_error, scheme.suffix
        nodes = small.models["decoder_model_merged"].graph.all_nodes()
        assert sum(node.op_type == "QuantizeLinear" for node in nodes) >= 8


def test_a_path_to_keep_that_no_layer_has_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    require_layers(model, ["0"])
    with pytest.raises(UnsupportedModel, match=r"--keep \*.fc: no layer has such a path"):
        require_layers(model, ["0", "*.fc"])
    told: list[tuple[str, str]] = []
    data = UserData(tokens=((1, 2, 3),) * 8)
    with pytest.raises(UnsupportedModel, match="--keep nope: no layer"):
        quantize(GPT2, tmp_path / "out", data, keep=("nope",), on_event=lambda *e: told.append(e))
    assert not told  # before the model is analysed


LOGITS = {"logits": {"KL divergence": 0.01, "top-1 agreement": 0.9, "error": 0.02}}
STATES = {"last_hidden_state": {"error": 0.02}}
COSINES = {"sentence_embedding": {"lowest cosine": 0.99987, "error": 0.02}}
BOXES = {**LOGITS, "pred_boxes": {"mean overlap of boxes": 0.7, "error": 0.27}}


@pytest.mark.parametrize(
    ("outputs", "shown", "hidden"),
    [
        (LOGITS, ["KL divergence", "top-1 agreement", "error"], ["logits:"]),
        (STATES, ["error"], ["KL divergence", "top-1 agreement"]),
        (COSINES, ["lowest cosine", "0.99987"], []),
        (BOXES, ["logits: KL divergence", "pred_boxes: mean overlap of boxes", "0.27"], []),
    ],
)
def test_the_tables_have_the_measures_of_each_output(
    outputs: dict[str, dict[str, float]],
    shown: list[str],
    hidden: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured = Differences(0.02, None, None, None, (), outputs)
    write_quantised(a_result(measured))
    printed = capsys.readouterr().out
    assert printed.count("0.02") >= 3 and "10.0 kB" in printed
    assert all(text in printed for text in shown)
    assert not any(text in printed for text in hidden)


@pytest.mark.parametrize(
    ("milliseconds", "size", "said"),
    [
        (5.0, 10_000, "w8a8 in onnx: a call takes 0.5 of float32's time, 0.25 of its size"),
        (12.0, 10_000, "w8a8 in onnx: slower than float32 (a call takes 1.2 times as long), 0.25"),
        (5.0, 60_000, "w8a8 in onnx: a call takes 0.5 of float32's time, no smaller than float32"),
        (None, 10_000, "w8a8 in onnx: 0.25 of its size"),
    ],
)
def test_the_first_line_says_what_is_slower_or_larger(
    milliseconds: float | None, size: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = Differences(0.02, None, None, None, (), LOGITS)
    times = (Speed(milliseconds), Speed(10.0)) if milliseconds else (None, None)
    timed = replace(a_result(measured), speed=times[0], float_speed=times[1], size=size)
    write_quantised(timed)
    assert capsys.readouterr().out.startswith(said)
    assert ("on this processor" in replace(timed, target="qnn").summary) == bool(milliseconds)


def a_result(measured: Differences) -> Quantised:
    """A result with these differences; nothing else than what is shown of it is set."""
    values: dict[str, Any] = dict.fromkeys(field.name for field in fields(Quantised))
    values |= dict.fromkeys(("kept", "finer", "scaled_norms", "chosen_by", "measured_on"), ())
    values |= {"source": "model", "model_class": "BertModel", "format": "onnx", "scheme": "w8a8"}
    values |= {"outputs": tuple(measured.outputs), "held_out": measured, "plain": measured}
    values |= {"chosen": "original", "candidates": (Compared("original", measured, 10_000),)}
    values |= {"inputs": 4, "size": 10_000, "float_size": 40_000, "threads": 1, "max_error": 0.1}
    return Quantised(**values | {"out": "out", "suffix": "_quantized", "seconds": 1.0})


def test_what_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text("A licence is short.")
    assert "pass --text, --image" in refused("quantize", GPT2, "-o", out, status=2)
    tokens = tmp_path / "ids.jsonl"
    tokens.write_text("[1, 2, 3]\n[4, 'a']\n")
    both = refused("quantize", GPT2, "-o", out, "--text", text, "--tokens", tokens, status=2)
    assert "--text and --tokens cannot be combined" in both
    line = refused("quantize", GPT2, "-o", out, "--tokens", tokens)
    assert "ids.jsonl, line 2: not a JSON list of token ids" in line
    (tmp_path / "none").mkdir()
    assert "contains no images" in refused(
        "quantize", GPT2, "-o", out, "--image", tmp_path / "none"
    )
    (tmp_path / PRECISIONS_FILE).write_text("{}")
    line = refused("quantize", tmp_path, "-o", tmp_path.parent / "other", "--text", text)
    assert "pass its original" in line
    assert not out.exists()


@pytest.mark.slow
def test_too_little_data_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(LICENCE.read_text()[:800])
    line = refused("quantize", GPT2, "-o", tmp_path / "out", "--text", text)
    assert "too little data" in line and "8 are needed" in line


@pytest.mark.slow
def test_sentence_embeddings_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    model, out = sentence_encoder(tmp_path / "model"), tmp_path / "out"
    shown = good("quantize", model, "-o", out, "--text", LICENCE, *SOME)
    assert all(name in shown for name in ("mean cosine", "nearest neighbours kept"))
    found = json.loads((out / PRECISIONS_FILE).read_text())["w8a8"]
    assert found["outputs"] == ["sentence_embedding"]
    assert 1e-4 < found["held_out"]["error"] < 0.1
    again = json.loads(good("verify", out, "--text", LICENCE, "--json"))
    assert again["passed"]
    assert 1e-4 < again["precisions"]["w8a8"]["differences"]["error"] < 0.1


@pytest.mark.slow
def test_a_vision_language_model_is_quantised_with_pictures(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    model, out, text = tmp_path / "model", tmp_path / "out", tmp_path / "text.txt"
    original = vision_language_model(model)
    images = pictures(tmp_path / "images")
    text.write_text("".join(f"What does line {at} say ?\n" for at in range(8)))
    options = ("--rotations", 0, "--inputs", 4)
    shown = refused("quantize", model, "-o", out, "--text", text, *options)
    assert "also takes pixel_values" in shown and "pass --image as well" in shown
    good("quantize", model, "-o", out, "--text", text, "--image", images, *options)
    parts = ("decoder_model_merged", "embed_tokens", "vision_encoder")
    files = [f"{part}_quantized.onnx" for part in parts]
    assert sorted(os.listdir(out / "onnx")) == files
    (example, *_), _ = split(original, model, read_user_data(text=text, images=[images]), 4, False)
    exact = run(original, [example.batch])[0]["logits"]
    loaded = load_onnx(out)
    logits = loaded(**example.batch).logits
    assert 0 < relative(logits, exact) < 0.05
    pixels = torch.zeros_like(example.batch["pixel_values"])
    assert relative(loaded(**{**example.batch, "pixel_values": pixels}).logits, logits) > 0.05
    record = json.loads((out / PRECISIONS_FILE).read_text())["w8a8"]
    assert record["speed"]["what"] == "generating 32 tokens"
    assert "the inputs that it was measured on" in good(
        "verify", out, "--text", text, "--image", images
    )


@pytest.mark.slow
def test_norms_that_overflow_read_a_smaller_scale(tmp_path: Path) -> None:
    model, tokens = with_large_features("PhiForCausalLM", tmp_path / "model"), tmp_path / "tokens"
    tokens.write_text("".join(f"[3, 5, {at}, 11, 13, 2]\n" for at in range(4, 12)))
    options = ("--tokens", tokens, "--inputs", 4, "--rotations", 0, "--max-error", 10)
    programs = {}
    for name, more in (("plain", ()), ("safe", ("--fp16-safe",))):
        good("quantize", model, "-o", tmp_path / name, *options, *more)
        record = json.loads((tmp_path / name / PRECISIONS_FILE).read_text())["w8a8"]
        assert len(record["scaled_norms"]) == (3 if more else 0)
        programs[name] = onnx.load(tmp_path / name / "onnx" / "model_quantized.onnx").graph.node
    eps = {
        name: sorted(a.f for node in nodes for a in node.attribute if a.name == "epsilon")
        for name, nodes in programs.items()
    }
    assert [large / small for large, small in zip(eps["plain"], eps["safe"], strict=True)] == [
        pytest.approx(64, rel=1e-5)
    ] * 3
    said = refused("quantize", model, "-o", tmp_path / "x", *options, "--fp16-safe", "--format",
                   "torchao", "--scheme", "w8a8")  # fmt: skip
    assert "--fp16-safe works for onnx, not for torchao" in said
