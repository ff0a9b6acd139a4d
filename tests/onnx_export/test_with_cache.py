"""A model that generates is exported with its cache, and generates the same tokens from it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from commands import refused
from live_models import CHECKPOINTS
from stored_files import shallow
from tiny_models import TOKENS, WHISPER, live
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    WhisperConfig,
)
from transformers.exporters import ExportedModel

from enjoyln_cli import export, fold
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.onnx_export.cached_generation import generation_of, is_cache, with_a_cache
from enjoyln_cli.onnx_export.call import call_to_export
from enjoyln_cli.onnx_export.check import check_in, reference_of
from enjoyln_cli.onnx_export.export import Exported
from enjoyln_cli.onnx_export.runtimes import RUNTIMES
from enjoyln_cli.plan.plan import Options

Outs = dict[str, Path]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("opt", {"rotate": True, "untie": True, "fold": False}),
    "phi": ("phi", {"merge": "affine"}),
}
"""For each case: a checkpoint, of which two layers are left, and how it is converted."""
NEW = 12
"""Tokens to generate."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """Converts the checkpoint of a case and exports it with its cache, once."""
    folder = tmp_path_factory.mktemp("with_cache")
    made: dict[str, Exported] = {}

    def one(case: str) -> Exported:
        name, options = CASES[case]
        if case not in made:
            source, out = shallow(name, folder / f"source of {case}"), folder / case
            fold(source, out, verify=False, options=Options(**options))
            made[case] = export(out, folder / f"{case}-onnx", with_cache=True)
        return made[case]

    return one


def padded_prompts(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of 1 to 9 tokens, padded on the left, and their mask."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 500, (count, 9), generator=generator)
    lengths = torch.randint(1, 10, (count, 1), generator=generator)
    mask = (torch.arange(9) >= 9 - lengths).long()
    return ids, mask


def generate(folder: Path, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The greedy tokens of a decoder, computed by onnxruntime alone."""
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    inputs = {one.name: one.shape for one in session.get_inputs()}
    names = [one.name for one in session.get_outputs()]
    cache = {
        name: np.zeros((len(ids), shape[1], 0, shape[3]), np.float32)
        for name, shape in inputs.items()
        if is_cache(name)
    }
    new = ids
    for _ in range(NEW):
        positions = np.maximum(mask.cumsum(1) - 1, 0)[:, -new.shape[1] :]
        feed = {"input_ids": new, "attention_mask": mask, "position_ids": positions, **cache}
        found = session.run(names, {name: feed[name] for name in inputs})
        outputs = dict(zip(names, found, strict=True))
        new = outputs["logits"][:, -1:].argmax(-1)
        ids = np.concatenate([ids, new], 1)
        mask = np.concatenate([mask, np.ones_like(new)], 1)
        cache = {n.replace("output", "input", 1): v for n, v in outputs.items() if is_cache(n)}
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(
    case: str, exported: Callable[[str], Exported]
) -> None:
    found = exported(case)
    source = Path(found.file).parent / f"source of {case}"
    model = AutoModelForCausalLM.from_pretrained(source).float().eval()
    ids, mask = padded_prompts(20)
    model.generation_config.eos_token_id = None
    expected = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW)
    assert len({tuple(row[9:].tolist()) for row in expected}) > 5
    np.testing.assert_array_equal(
        generate(Path(found.file), ids.numpy(), mask.numpy()), expected.numpy()
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_each_folded_norm_is_one_node_and_both_programs_agree(
    case: str, exported: Callable[[str], Exported]
) -> None:
    found = exported(case)
    model = onnx.load(Path(found.file) / "model.onnx")
    marker = json.loads((Path(found.file).parent / case / "config.json").read_text())["enjoyln"]
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("RMSNormalization") == len(marker["rmsnorm"])
    assert kinds.count("LayerNormalization") == len(marker["layernorm"])
    assert found.opset == (20 if case == "opt" else 23)
    assert not any(node.metadata_props for node in model.graph.node)
    assert [check.runtime.split()[0] for check in found.checks] == [*RUNTIMES]
    for check in found.checks:
        assert not check.failure and 0 < check.ratio < 4 and check.chance <= 2


@pytest.mark.slow
def test_axes_have_names_and_the_files_that_users_need_lie_beside(
    exported: Callable[[str], Exported],
) -> None:
    found = exported("phi")
    new, heads = ["batch", "sequence"], [4, "past_sequence", 16]
    assert found.inputs["input_ids"] == found.inputs["position_ids"] == new
    assert found.inputs["attention_mask"] == ["batch", "total_sequence"]
    assert found.inputs["input.cache.layers.1.values"] == ["batch", *heads]
    assert found.outputs[:2] == ("logits", "output.cache.layers.0.keys")
    files = set(os.listdir(found.file))
    assert {"model.onnx", "model.onnx.data", "export.json"} <= files
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= files
    assert not {"README.md", "enjoyln_recipe.yaml", "model.safetensors"} & files
    assert "enjoyln" not in json.loads((Path(found.file) / "config.json").read_text())
    sizes = [(Path(found.file) / name).stat().st_size for name in ("model.onnx", "model.onnx.data")]
    assert found.data_file is None and found.bytes_written >= sum(sizes)


@pytest.mark.slow
def test_transformers_reads_the_directory(exported: Callable[[str], Exported]) -> None:
    model = ExportedModel.from_pretrained(exported("phi").file)
    assert list(model.components) == ["model"] and model.config.model_type == "phi"
    assert model.generation_config is not None


@pytest.mark.slow
def test_another_function_does_not_pass(exported: Callable[[str], Exported]) -> None:
    """The cache keeps the values that differ."""
    found = exported("phi")
    file = Path(found.file)

    def other(dtype: torch.dtype) -> Any:
        model = AutoModelForCausalLM.from_pretrained(file.parent / "source of phi", dtype=dtype)
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.bias += 0.01
        return model.eval()

    model = other(torch.float32)
    form = with_a_cache(model, call_to_export(model, (), torch.float32), torch.float32, 0)
    reference = reference_of(other, form, torch.float32)
    check = check_in("onnxruntime", file, lambda: file, form, reference, torch.float32, 1.25)
    assert "x the original's own (limit 1.25 x" in check.failure


@pytest.mark.slow
def test_an_encoder_and_its_decoder_are_two_programs(tmp_path: Path) -> None:
    model = live("WhisperForConditionalGeneration", WhisperConfig(**WHISPER)).float()
    model.save_pretrained(tmp_path / "in")
    fold(tmp_path / "in", tmp_path / "out", verify=False, options=Options(untie=True))
    found = export(tmp_path / "out", tmp_path / "onnx", with_cache=True)
    assert len(found.checks) == len(RUNTIMES) and found.nodes["RMSNormalization"] > 0
    folder = tmp_path / "onnx"
    assert {"prefill.onnx", "decode.onnx"} <= set(os.listdir(folder))
    torch.manual_seed(1)
    inputs = {"input_features": torch.randn(20, 8, 40)}
    start = torch.randint(5, 37, (20, 2))
    expected, exact = start, []
    with torch.no_grad():
        for _ in range(NEW):
            logits = model(**inputs, decoder_input_ids=expected).logits
            exact.append(logits[:, -1].numpy())
            expected = torch.cat([expected, logits[:, -1:].argmax(-1)], 1)
    got = new = start.numpy()
    known = {name: value.numpy() for name, value in inputs.items()}
    cache: dict[str, np.ndarray] = {}
    for step in range(NEW):
        name = "decode" if cache else "prefill"
        session = onnxruntime.InferenceSession(folder / f"{name}.onnx")
        feed = {**known, "decoder_input_ids": new, **cache}
        names = [one.name for one in session.get_outputs()]
        values = session.run(names, {one.name: feed[one.name] for one in session.get_inputs()})
        outputs = dict(zip(names, values, strict=True))
        cache |= {
            f"input.{n.removeprefix('output.')}": v for n, v in outputs.items() if is_cache(n)
        }
        if name == "prefill":
            known["encoder_outputs.last_hidden_state"] = outputs["encoder_last_hidden_state"]
        np.testing.assert_allclose(outputs["logits"][:, -1], exact[step], rtol=1e-3, atol=1e-4)
        new = outputs["logits"][:, -1:].argmax(-1)
        got = np.concatenate([got, new], 1)
    np.testing.assert_array_equal(got, expected.numpy())
    assert np.ptp(exact[-1], 0).max() > 0.01


def test_a_model_without_a_cache_is_refused(outs: Outs, tmp_path: Path) -> None:
    line = refused("export", outs["vit"], "-o", tmp_path / "onnx", "--with-cache")
    assert "ViTForImageClassification does not generate text, so it has no cache" in line
    assert "without --with-cache" in line
    with pytest.raises(UnsupportedModel, match="GPT2Model does not generate text"):
        export(outs["gpt2"], tmp_path / "onnx", model_class="GPT2Model", with_cache=True)
    assert os.listdir(tmp_path) == []


def test_a_cache_of_other_states_is_refused() -> None:
    """A decoder with a sliding window keeps the size of the window in its cache."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 33}
    sizes = {"hidden_size": 24, "num_hidden_layers": 4, "sliding_window": 8, **heads}
    model = live("Cohere2ForCausalLM", Cohere2Config(**TOKENS, **sizes)).float()
    with pytest.raises(UnsupportedModel, match=r"which holds cache\.layers\.\S+, besides keys"):
        generation_of(model, torch.float32)


def test_a_directory_that_exists_is_kept(outs: Outs, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    line = refused("export", outs["gpt2"], "-o", tmp_path / "mine", "--with-cache")
    assert "mine exists; choose another directory" in line


def test_a_cache_is_padded_and_of_several_tokens_where_it_is_traced() -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "gpt2").float().eval()
    generation = generation_of(model, torch.float32)
    (call,) = generation.calls.values()
    assert call["input_ids"].shape == (2, 2) and call["attention_mask"].shape == (2, 9)
    assert call["attention_mask"].min() == 0 and "forward" not in vars(model)
