"""A model that generates is exported with its cache, and generates the same tokens from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from commands import refused
from live_models import shaken
from stored_files import shallow
from tiny_models import BERT, GPT2, TOKENS, VIT, WHISPER
from widening_cases import BART

from enjoyln_cli import export, fold
from enjoyln_cli.checkpoint.marker import read_marker
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.onnx_export.export import Exported
from enjoyln_cli.onnx_export.programs import programs_of, save
from enjoyln_cli.onnx_export.runtimes import RUNTIMES
from enjoyln_cli.plan.fold_options import Options

Outs = dict[str, Path]
LLAMA = {**BERT, "num_attention_heads": 4, "hidden_size": 32, "num_key_value_heads": 2}
FALCON = {**TOKENS, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
XGLM = {**TOKENS, "d_model": 24, "num_layers": 2, "attention_heads": 4, "ffn_dim": 33}
T5 = {**TOKENS, "d_model": 24, "d_kv": 6, "d_ff": 33, "num_layers": 2, "num_heads": 4}
MARIAN = {**BART, "pad_token_id": 36, "eos_token_id": 0, "forced_eos_token_id": 0}
TROCR = {
    **TOKENS, "d_model": 24, "decoder_layers": 2, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 33, "cross_attention_hidden_size": VIT["hidden_size"],
}  # fmt: skip
NO_EXPERTS = {"encoder_sparse_step": 0, "decoder_sparse_step": 0}
FSMT = {**BART, "src_vocab_size": 37, "tgt_vocab_size": 37, "langs": ["en", "de"]}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", {**GPT2, "use_cache": False}),
    "OPT": (
        "OPTForCausalLM",
        {**BERT, "hidden_size": 24, "ffn_dim": 33, "word_embed_proj_dim": 24},
    ),
    "BLOOM": ("BloomForCausalLM", {**TOKENS, "n_layer": 2, "n_head": 4, "hidden_size": 24}),
    "Falcon, rotary": ("FalconForCausalLM", {**FALCON, "parallel_attn": False}),
    "Falcon, ALiBi": ("FalconForCausalLM", {**FALCON, "alibi": True}),
    "Llama": ("LlamaForCausalLM", LLAMA),
    "XGLM": ("XGLMForCausalLM", XGLM),
    "RoBERTa": ("RobertaForCausalLM", {**BERT, "is_decoder": True}),
    "Mistral, a window of 4": ("MistralForCausalLM", {**LLAMA, "sliding_window": 4}),
}
ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Whisper": ("WhisperForConditionalGeneration", WHISPER),
    "BART": ("BartForConditionalGeneration", BART),
    "Marian": ("MarianMTModel", MARIAN),
    "M2M100": ("M2M100ForConditionalGeneration", BART),
    "NLLB-MoE": ("NllbMoeForConditionalGeneration", {**BART, **NO_EXPERTS}),
    "T5": ("T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
}
NEW = 12
"""Tokens to generate."""

Feed = dict[str, np.ndarray[Any, Any]]


def small(model_class: str, config: dict[str, Any]) -> Any:
    """The class in float32 with no weight at its initial value."""
    torch.manual_seed(0)
    cls = getattr(transformers, model_class)
    return shaken(cls(cls.config_class(**config)), 0.3)


def trocr() -> Any:
    """A vision encoder with a pooler, and a decoder of its own width."""
    torch.manual_seed(0)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**VIT), transformers.TrOCRConfig(**TROCR)
    )
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    return shaken(transformers.VisionEncoderDecoderModel(config), 0.3)


def written(model: Any, folder: Path) -> dict[str, onnxruntime.InferenceSession]:
    """The programs of a model in onnxruntime, by the stems of their files."""
    files = save(programs_of(model, torch.float32), folder)
    return {file.stem: onnxruntime.InferenceSession(file) for file in files}


def read(session: onnxruntime.InferenceSession, known: Feed, rows: int) -> tuple[Any, Feed]:
    """The logits of one call, and the inputs of the next; an unknown cache is empty."""
    inputs = {one.name: one.shape for one in session.get_inputs()}
    known = {
        name: np.zeros((rows, shape[1], 0, shape[3]), np.float32)
        for name, shape in inputs.items()
        if name.startswith("past_key_values.")
    } | known
    names = [one.name for one in session.get_outputs()]
    found = dict(zip(names, session.run(names, {n: known[n] for n in inputs}), strict=True))
    cache = {n.replace("present", "past_key_values"): v for n, v in found.items() if v.size}
    return found["logits"], {**known, **cache}


def generate(session: onnxruntime.InferenceSession, ids: Any, mask: Any) -> Any:
    """The greedy tokens of a decoder, computed by onnxruntime alone."""
    known: Feed = {}
    new = ids
    for _ in range(NEW):
        positions = np.maximum(mask.cumsum(1) - 1, 0)[:, -new.shape[1] :]
        told = {"input_ids": new, "attention_mask": mask, "position_ids": positions}
        logits, known = read(session, {**known, **told}, len(ids))
        new = logits[:, -1:].argmax(-1)
        ids = np.concatenate([ids, new], 1)
        mask = np.concatenate([mask, np.ones_like(new)], 1)
    return ids


def padded_prompts(count: int, below: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of 1 to 9 tokens, padded on the left, and their mask."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, below, (count, 9), generator=generator)
    lengths = torch.randint(1, 10, (count, 1), generator=generator)
    return ids, (torch.arange(9) >= 9 - lengths).long()


def require_same_tokens(model: Any, session: onnxruntime.InferenceSession, below: int) -> None:
    """A decoder generates in onnxruntime what transformers generates."""
    ids, mask = padded_prompts(20, below)
    model.generation_config.eos_token_id = None
    expected = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW)
    assert len({tuple(row[9:].tolist()) for row in expected}) > 5
    np.testing.assert_array_equal(generate(session, ids.numpy(), mask.numpy()), expected.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_generates_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    model = small(*DECODERS[name])
    (session,) = written(model, tmp_path).values()
    require_same_tokens(model, session, 37)
    takes_positions = "position_ids" in {one.name for one in session.get_inputs()}
    assert takes_positions is (name not in ("OPT", "BLOOM", "Falcon, ALiBi"))


def encoder_inputs(model: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn(8, 8, 40)}
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(8, 3, 15, 15)}
    mask = torch.ones(8, 7, dtype=torch.int64)
    mask[5:, 4:] = 0
    return {"input_ids": torch.randint(5, 35, (8, 7)), "attention_mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ENCODER_DECODERS, "TrOCR"])
def test_an_encoder_and_its_decoder_generate_the_same_tokens(name: str, tmp_path: Path) -> None:
    model = trocr() if name == "TrOCR" else small(*ENCODER_DECODERS[name])
    sessions = written(model, tmp_path)
    assert list(sessions) == ["encoder_model", "decoder_model_merged"]
    inputs = encoder_inputs(model)
    feed = {name: value.numpy() for name, value in inputs.items()}
    encoder = sessions["encoder_model"]
    (states,) = encoder.run(None, {one.name: feed[one.name] for one in encoder.get_inputs()})
    known: Feed = {"encoder_hidden_states": states}
    if "attention_mask" in feed:
        known["encoder_attention_mask"] = feed["attention_mask"]
    expected = start = torch.randint(5, 35, (8, 2))
    got = new = start.numpy()
    for _ in range(NEW):
        with torch.no_grad():
            exact = model(**inputs, decoder_input_ids=expected).logits[:, -1:]
        logits, known = read(sessions["decoder_model_merged"], {**known, "input_ids": new}, 8)
        np.testing.assert_allclose(logits[:, -1:], exact, rtol=1e-3, atol=1e-3)
        new = logits[:, -1:].argmax(-1)
        got = np.concatenate([got, new], 1)
        expected = torch.cat([expected, exact.argmax(-1)], 1)
    np.testing.assert_array_equal(got, expected.numpy())
    assert len({tuple(row) for row in got[:, 2:].tolist()}) > 1


@pytest.mark.slow
def test_cross_attention_is_cached_and_no_weight_is_stored_twice(tmp_path: Path) -> None:
    model = small(*ENCODER_DECODERS["BART"])
    sessions = written(model, tmp_path)
    rng = np.random.default_rng(0)
    known: Feed = {
        "input_ids": np.full((2, 3), 7),
        "encoder_attention_mask": np.ones((2, 6), np.int64),
        "encoder_hidden_states": rng.standard_normal((2, 6, 21), np.float32),
    }
    decoder = sessions["decoder_model_merged"]
    parts = ["decoder.key", "decoder.value", "encoder.key", "encoder.value"]
    names = [f"{layer}.{part}" for layer in range(2) for part in parts]
    inputs = [one.name for one in decoder.get_inputs() if "encoder_" not in one.name]
    assert inputs == ["input_ids", *(f"past_key_values.{name}" for name in names)]
    outputs = [one.name for one in decoder.get_outputs()]
    assert outputs == ["logits", *(f"present.{name}" for name in names)]
    logits, after = read(decoder, known, 2)
    name = "past_key_values.0.encoder.key"
    assert after[name].shape == (2, 3, 6, 7)
    empty = {n: v[:, :, :0] for n, v in after.items() if ".decoder." in n}
    other = {"encoder_hidden_states": -known["encoder_hidden_states"]}
    again, kept = read(decoder, {**after, **empty, **other}, 2)
    assert kept[name] is after[name]  # returned once
    np.testing.assert_allclose(again, logits, rtol=1e-5, atol=1e-5)
    changed, _ = read(decoder, {**known, **other}, 2)
    assert abs(changed - logits).max() > 0.01
    graph = onnx.load(tmp_path / "onnx" / "decoder_model_merged.onnx").graph
    choices = [node for node in graph.node if node.op_type == "If"]
    branches = [one.g for node in choices for one in node.attribute]
    assert len(choices) == 1 + 2 and not any(branch.initializer for branch in branches)
    sizes = [len(one.raw_data) for one in graph.initializer]
    parameters = {
        value.data_ptr(): value.numel()
        for name, value in model.named_parameters()
        if "encoder." not in name.removeprefix("model.").removeprefix("decoder.")
    }
    assert sum(sizes) < 4 * sum(parameters.values()) + 10_000


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A converted Phi of two layers, exported."""
    folder = tmp_path_factory.mktemp("phi")
    source = shallow("phi", folder / "source")
    fold(source, folder / "out", verify=False, options=Options(merge="affine"))
    return export(folder / "out", folder / "onnx")


@pytest.mark.slow
def test_a_converted_decoder_is_checked_and_generates(phi: Exported) -> None:
    folder = Path(phi.folder)
    model = onnx.load(folder / "onnx" / "model.onnx")
    plan = read_marker(json.loads((folder.parent / "out" / "config.json").read_text())).plan
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("RMSNormalization") == len(plan.folded)
    assert not any(node.metadata_props for node in model.graph.node)
    assert [check.runtime.split()[0] for check in phi.checks] == [*RUNTIMES]
    for check in phi.checks:
        assert not check.failure and 0 < check.ratio < 4 and check.chance <= 2
        assert check.same_tokens == check.generated == 32
    original = transformers.PhiForCausalLM.from_pretrained(folder.parent / "source").float().eval()
    session = onnxruntime.InferenceSession(folder / "onnx" / "model.onnx")
    require_same_tokens(original, session, 500)


@pytest.mark.slow
def test_names_and_files_are_as_clients_read_them(phi: Exported) -> None:
    (program,) = phi.programs.values()
    new = ["batch_size", "sequence_length"]
    assert program.inputs["input_ids"] == program.inputs["position_ids"] == new
    assert program.inputs["attention_mask"] == ["batch_size", "total_sequence_length"]
    past = ["batch_size", 4, "past_sequence_length", 16]
    assert program.inputs["past_key_values.1.value"] == past
    assert program.outputs[:2] == ("logits", "present.0.key")
    assert phi.files == ("onnx/model.onnx",)
    folder = Path(phi.folder)
    files = set(os.listdir(folder))
    assert {"onnx", "config.json", "generation_config.json", "tokenizer.json"} <= files
    assert {"README.md", "enjoyln_precisions.json", "enjoyln_verify.json"} <= files
    assert not {"enjoyln_recipe.yaml", "model.safetensors"} & files
    assert "enjoyln" not in json.loads((folder / "config.json").read_text())
    assert phi.bytes_written == (folder / "onnx" / "model.onnx").stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Whisper", "M2M100"])
def test_a_converted_encoder_and_decoder_are_checked(name: str, tmp_path: Path) -> None:
    """M2M100 counts positions by the tokens that are no padding."""
    small(*ENCODER_DECODERS[name]).save_pretrained(tmp_path / "in")
    fold(tmp_path / "in", tmp_path / "out", verify=False, options=Options())
    found = export(tmp_path / "out", tmp_path / "onnx")
    assert found.files == ("onnx/encoder_model.onnx", "onnx/decoder_model_merged.onnx")
    assert len(found.checks) == len(RUNTIMES)
    assert all(program.nodes["RMSNormalization"] > 0 for program in found.programs.values())


def test_a_cache_of_other_states_is_refused() -> None:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_n_groups": 1, "attn_layer_indices": [1]}
    model = small("BambaForCausalLM", {**TOKENS, **sizes, **mamba, "num_key_value_heads": 2})
    with pytest.raises(UnsupportedModel, match="its cache holds other states"):
        programs_of(model, torch.float32)


def test_a_model_that_differs_with_a_cache_is_refused() -> None:
    """With a cache, FSMT has no mask: it expects one token in each call."""
    with pytest.raises(UnsupportedModel, match="FSMT.* other logits with a cache than without"):
        programs_of(small("FSMTForConditionalGeneration", FSMT), torch.float32)


def test_a_model_that_keeps_no_cache_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="keeps no cache, since its config has is_decoder"):
        programs_of(small("BertLMHeadModel", BERT), torch.float32)


def test_a_directory_that_exists_is_kept(outs: Outs, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    line = refused("export", outs["gpt2"], "-o", tmp_path / "mine")
    assert "mine exists; choose another directory" in line
