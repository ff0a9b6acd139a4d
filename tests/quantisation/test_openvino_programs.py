"""OpenVINO's programs keep their cache, and OpenVINO GenAI generates with them."""

from __future__ import annotations

import copy
import importlib
import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import good, ignore
from live_models import CHECKPOINTS, ROOT, shaken
from tiny_models import BERT, GPT2, WHISPER
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from widening_cases import MARIAN

from enjoyln_cli.comparison.simulated_rounding import linear_layers
from enjoyln_cli.onnx_export.cached_run import greedy, whole_rows
from enjoyln_cli.onnx_export.programs import programs_of
from enjoyln_cli.quantisers.openvino_programs import (
    converted,
    load_programs,
    quantised,
    save,
    write_tokenizer,
)
from enjoyln_cli.quantisers.schemes import FLOAT_BITS, SCHEMES, bits_at
from enjoyln_cli.quantisers.sequential_gptq import round_model

pytestmark = pytest.mark.usefixtures("seeded")
LICENCE = ROOT / "LICENSE"
NEW = 12
"""Tokens to generate."""
IDS = torch.arange(3, 33).view(5, 6)
MASK = (torch.arange(6) >= torch.arange(5)[:, None]).long()
BATCH = {"input_ids": IDS, "attention_mask": MASK}


def gpt2() -> Any:
    return shaken(GPT2LMHeadModel(GPT2Config(**GPT2)), 0.3)


def written(model: Any, folder: Path) -> Any:
    """The model, after its programs in float32 and its configs were written to ``folder``."""
    save(converted(programs_of(model, torch.float32, cross_cache=False)), folder)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    return model


def test_a_decoder_keeps_its_cache_between_calls(tmp_path: Path) -> None:
    model = written(gpt2(), tmp_path)
    assert {file.name for file in tmp_path.glob("openvino*")} == {
        "openvino_model.xml",
        "openvino_model.bin",
    }
    programs = load_programs(tmp_path, 1)
    model.generation_config.eos_token_id = None
    expected = model.generate(**BATCH, do_sample=False, max_new_tokens=NEW)[:, 6:]
    assert len({tuple(row) for row in expected.tolist()}) > 2
    for _ in range(2):
        assert torch.equal(torch.cat([*greedy(programs, BATCH, NEW)], 1), expected)


def test_a_row_continues_the_cache_of_the_row_it_names(tmp_path: Path) -> None:
    model, rows = written(gpt2(), tmp_path), torch.tensor([3, 0, 0, 4])
    (program,) = load_programs(tmp_path, 1).values()
    assert program.reset and not any("past" in name for name in program.inputs)
    whole = torch.ones(5, 6, dtype=torch.int64)
    program({"input_ids": IDS, "attention_mask": whole, "position_ids": whole.cumsum(1) - 1})
    new = torch.tensor([[7], [8], [9], [10]])
    told = {
        "input_ids": new,
        "attention_mask": torch.ones(4, 7, dtype=torch.int64),
        "position_ids": torch.full((4, 1), 6),
        "beam_idx": rows.int(),
    }
    with torch.no_grad():
        exact = model(torch.cat([IDS[rows], new], 1)).logits[:, -1:]
    np.testing.assert_allclose(program(told)["logits"], exact, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whisper", "marian"])
def test_a_decoder_computes_its_cross_attention_once(kind: str, tmp_path: Path) -> None:
    if kind == "whisper":
        model = WhisperForConditionalGeneration(WhisperConfig(**WHISPER))
        batches = [{"input_features": torch.randn(3, 8, 40)} for _ in range(2)]
    else:
        model = MarianMTModel(MarianConfig(**MARIAN))
        batches = [BATCH, {name: value[:3, 2:] for name, value in BATCH.items()}]
    written(shaken(model, 0.3), tmp_path)
    compute, tokens = whole_rows(load_programs(tmp_path, 1)), torch.randint(3, 37, (5, 9))
    for batch in batches:  # the state of one batch is forgotten before the next
        rows = len(next(iter(batch.values())))
        batch["decoder_input_ids"] = tokens[:rows]
        with torch.no_grad():
            exact = model(**batch).logits
        np.testing.assert_allclose(compute(batch)["logits"], exact, rtol=1e-3, atol=1e-4)
    decoder = load_programs(tmp_path, 1)["decoder_model_merged"]
    *_, width = decoder.inputs["encoder_hidden_states"][0]
    states, first = torch.randn(2, 5, width), tokens[:2, :1]
    mask = torch.ones(2, 5, dtype=torch.int64)

    def logits(states: torch.Tensor) -> torch.Tensor:
        given = {"input_ids": first, "encoder_hidden_states": states}
        return decoder({**given, "encoder_attention_mask": mask})["logits"]

    logits(states)
    same, other = logits(states), logits(0 * states)
    assert not torch.equal(same, other)  # another token, and the cache is longer
    assert decoder.reset
    decoder.reset()
    logits(states)
    logits(states)
    assert torch.equal(logits(0 * states), other)
    decoder.reset()
    logits(0 * states)
    assert not torch.equal(logits(states), same)


def test_a_model_that_generates_nothing_has_no_state(tmp_path: Path) -> None:
    model = written(shaken(BertModel(BertConfig(**BERT)), 0.3), tmp_path)
    (program,) = load_programs(tmp_path, 1).values()
    assert program.reset is None and "beam_idx" not in program.inputs
    given = {**BATCH, "token_type_ids": torch.zeros_like(IDS)}
    with torch.no_grad():
        exact = model(**given).last_hidden_state
    found = program(given)["last_hidden_state"]
    np.testing.assert_allclose(found, exact, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a8-static", "w8a16", "w4a16"])
def test_nncf_rounds_all_layers_but_layers_to_keep(scheme: str, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    sizes = {"n_embd": 64, "n_head": 4, "n_inner": 72}  # 72 is no multiple of 32
    model = shaken(GPT2LMHeadModel(GPT2Config(**{**GPT2, **sizes})), 0.1)
    programs = programs_of(model, torch.float32, cross_cache=False)
    given = {"input_ids": IDS}
    with torch.no_grad():
        exact = model(**given).logits
    errors, floats = [], []
    stored: list[tuple[str, tuple[int, ...]]] = []
    for bits in ({}, {"*.mlp.*": FLOAT_BITS}):
        made = quantised(programs, SCHEMES[scheme], [given], bits, {}, False)
        save(made, tmp_path)
        logits = whole_rows(load_programs(tmp_path, 1))(given)["logits"]
        errors.append(float((logits - exact).norm() / exact.norm()))
        nodes = openvino.Core().read_model(tmp_path / "openvino_model.xml").get_ops()
        weights = [
            node.input_value(1).get_node()
            for node in nodes
            if node.get_type_name() == "MatMul" and node.get_attributes()["transpose_b"]
        ]
        floats.append(sum(one.get_type_name() == "Constant" for one in weights))
        constants = [node for node in nodes if node.get_type_name() == "Constant"]
        stored += [(one.get_element_type().to_string(), (*one.shape,)) for one in constants]
    assert 0 < errors[1] < errors[0] < 0.3, errors
    if scheme == "w4a16":  # each layer by itself
        assert ("u4", (72, 2, 32)) in stored and ("u8", (64, 72)) in stored, stored
    assert floats == [0, 2 * model.config.n_layer]


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
def test_single_layers_get_8_bits_beside_4(rounding: str, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    sizes = {"n_embd": 64, "n_head": 4, "n_inner": 96, "n_layer": 2}
    model = shaken(GPT2LMHeadModel(GPT2Config(**{**GPT2, **sizes})), 0.1)
    programs = programs_of(model, torch.float32, cross_cache=False)
    given = {"input_ids": IDS}
    with torch.no_grad():
        exact = model(**given).logits
    rounded, errors, stored = {}, [], []
    if rounding == "gptq":
        layers = dict.fromkeys(linear_layers(model), 32)
        by_error = copy.deepcopy(model)
        rounded = round_model(by_error, layers, [given])
        save(quantised(programs, SCHEMES["w4a16"], (), {}, rounded, False), tmp_path)
        found = whole_rows(load_programs(tmp_path, 1))(given)["logits"]
        with torch.no_grad():
            simulated = by_error(**given).logits
        apart = float((found - simulated).norm() / (exact - simulated).norm())
        assert 0 < apart < 0.3  # the embedding has 8 bits
    for bits in ({}, {"*.c_fc": 8}, {"*.c_fc": 8, "transformer.h.1.mlp.c_fc": FLOAT_BITS}):
        in_4_bits = {path: one for path, one in rounded.items() if not bits_at(path, bits, 0)}
        made = quantised(programs, SCHEMES["w4a16"], [given], bits, in_4_bits, False)
        save(made, tmp_path)
        logits = whole_rows(load_programs(tmp_path, 1))(given)["logits"]
        errors.append(float((logits - exact).norm() / exact.norm()))
        nodes = openvino.Core().read_model(tmp_path / "openvino_model.xml").get_ops()
        constants = [node for node in nodes if node.get_type_name() == "Constant"]
        kinds = [(one.get_element_type().to_string(), (*one.shape,)) for one in constants]
        of_c_fc = ("u4", (96, 2, 32)), ("u8", (96, 64)), ("f32", (96, 64))
        stored.append([kinds.count(kind) for kind in of_c_fc])
    assert stored == [[2, 0, 0], [0, 2, 0], [0, 1, 1]], stored
    assert 0 < errors[1] < errors[0] < 0.3, errors


@pytest.mark.slow
def test_quantize_to_openvino_rounds_by_gptq(tmp_path: Path) -> None:
    pytest.importorskip("nncf")
    genai: Any = importlib.import_module("openvino_genai")
    out = tmp_path / "out"
    options = ("--format", "openvino", "--scheme", "w4a16", "--rotations", 0, "--inputs", 8)
    good("quantize", CHECKPOINTS / "gpt2", "-o", out, "--text", LICENCE, *options)
    (record,) = json.loads((out / "enjoyln_precisions.json").read_text()).values()
    costs = {one["name"]: one["differences"]["kl"] for one in record["candidates"]}
    assert record["chosen"].endswith("GPTQ")
    assert record["held_out"]["kl"] < 0.5 * record["plain"]["kl"]
    assert min(costs, key=lambda name: costs[name]) == record["chosen"]
    *nearest, last = costs
    assert "original, GPTQ" in costs and last.removesuffix(", GPTQ") in nearest
    good("verify", out, "--text", LICENCE)
    pipeline = genai.LLMPipeline(out, "CPU")
    text = pipeline.generate("You may copy and", max_new_tokens=NEW, do_sample=False)
    assert len(text) > NEW


PROMPTS = ("You may copy and", "This License", "Copyright")


@pytest.mark.slow
def test_openvino_genai_writes_what_transformers_writes(tmp_path: Path) -> None:
    pytest.importorskip("nncf")
    genai: Any = importlib.import_module("openvino_genai")
    source = CHECKPOINTS / "gpt2"
    model = written(AutoModelForCausalLM.from_pretrained(source).eval(), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, ignore)
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    pipelines = [
        genai.LLMPipeline(tmp_path, "CPU", ATTENTION_BACKEND=backend, **exact)
        for backend in ("PA", "SDPA")
    ]
    options = {"max_new_tokens": NEW, "do_sample": False}
    for beams, text in product((1, 3), PROMPTS):
        ids = tokenizer(text, return_tensors="pt")
        new = model.generate(**ids, **options, num_beams=beams)[0, ids.input_ids.shape[1] :]
        for pipeline in pipelines:
            found = pipeline.generate(text, **options, num_beams=beams, apply_chat_template=False)
            assert found == tokenizer.decode(new, skip_special_tokens=True), text


@pytest.mark.slow
def test_openvino_genai_transcribes_what_transformers_does(tmp_path: Path) -> None:
    """A Whisper with random weights, which reads half a minute and writes English words."""
    pytest.importorskip("nncf")
    genai: Any = importlib.import_module("openvino_genai")
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "gpt2")
    begin, plain = "<|startoftranscript|>", "<|notimestamps|>"
    tokenizer.add_special_tokens({"additional_special_tokens": [begin, plain]})
    start, timeless = tokenizer.convert_tokens_to_ids([begin, plain])
    end = tokenizer.eos_token_id
    tokens = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    sizes = {"vocab_size": len(tokenizer), "max_source_positions": 1500, "num_mel_bins": 80}
    config = {**WHISPER, **tokens, **sizes, "decoder_start_token_id": start}
    model = shaken(WhisperForConditionalGeneration(WhisperConfig(**config)), 0.3)
    for layer in model.model.decoder.layers:  # what was heard decides what is written
        layer.encoder_attn.out_proj.weight.data *= 30
    for name, value in {
        "is_multilingual": False,
        "no_timestamps_token_id": timeless,
        "max_initial_timestamp_index": 0,
        "suppress_tokens": [start, timeless, end],
        "begin_suppress_tokens": [],
        "max_length": 30,
    }.items():
        setattr(model.generation_config, name, value)
    written(model, tmp_path)
    features = WhisperFeatureExtractor(feature_size=80)
    for part in (tokenizer, features):
        part.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, ignore)
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    pipeline = genai.WhisperPipeline(tmp_path, "CPU", **exact)
    texts = set()
    for pitch in (200.0, 1500.0, 4000.0):
        sound = np.sin(np.arange(480_000) * pitch * 2 * np.pi / 16_000).astype(np.float32)
        given = features(sound, sampling_rate=16_000, return_tensors="pt").input_features
        ids = model.generate(given, max_new_tokens=NEW)[0]
        expected = tokenizer.decode(ids, skip_special_tokens=True)
        found = pipeline.generate(sound.tolist(), max_new_tokens=NEW)
        assert found.texts == [expected]
        texts.add(expected)
    assert len(texts) > 1
