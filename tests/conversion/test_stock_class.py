"""A folded model as another stock class: the same function, or the entry that has no place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from commands import good, refused
from tiny_models import live

from enjoyln_cli.checkpoint.open_options import OPENED_PLAINLY
from enjoyln_cli.conversion.stock_class import StockResult, fold_as
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.classes import class_named
from enjoyln_cli.plan.fold_options import FOLD_DEFAULTS, WRITE_DEFAULTS
from enjoyln_cli.recipe.stock_forms import form_for, stock_forms

TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
OLMO = ("OlmoForCausalLM", T.OlmoConfig, {})
COHERE = ("Cohere2ForCausalLM", T.Cohere2Config, {"sliding_window": 8})
STABLE = ("StableLmForCausalLM", T.StableLmConfig, {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}})  # fmt: skip


def stored(kind: Any, folder: Path, *, without_biases: bool = False, **more: Any) -> Path:
    name, config, settings = kind
    model = live(name, config(architectures=[name], **{**TEXT, **settings, **more})).float()
    for path, parameter in model.named_parameters():
        if without_biases and path.endswith("norm.bias"):
            parameter.data.zero_()
    model.save_pretrained(folder)
    return folder


def made(source: Path, out: Path, name: str) -> StockResult:
    return fold_as(source, out, name, OPENED_PLAINLY, FOLD_DEFAULTS, WRITE_DEFAULTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "target"), [(OLMO, "llama"), (COHERE, "cohere2_moe"), (STABLE, "llama")]
)
def test_the_target_computes_the_same(kind: Any, target: str, tmp_path: Path) -> None:
    """A StableLM can be stored only if its norms have no bias but zeros."""
    source = stored(kind, tmp_path / "model", without_biases=kind is STABLE)
    result = made(source, tmp_path / "out", target)
    assert result.error < 1e-6 and result.norms == (3 if kind is COHERE else 5)
    ids = torch.arange(3, 40)[None]
    loaded = T.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64).eval()
    original = T.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64).eval()
    assert type(loaded).__name__ == form_for(kind[0], target).target
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-5)
        said = [one.generate(ids, max_new_tokens=8, do_sample=False) for one in (loaded, original)]
    assert torch.equal(*said)
    assert not any("LayerNorm" in type(m).__name__ for m in loaded.modules())
    assert "enjoyln" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert kind[0] in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_what_has_no_place_in_the_target_is_named(tmp_path: Path) -> None:
    clipped = stored(OLMO, tmp_path / "clipped", clip_qkv=8.0)
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM has no clip_qkv: it is 8.0"):
        made(clipped, tmp_path / "out", "llama")
    other = stored(OLMO, tmp_path / "other", final_softcap=3.0)
    with pytest.raises(UnsupportedModel, match="has final_softcap in its config"):
        made(other, tmp_path / "out", "llama")
    with pytest.raises(UnsupportedModel, match="stored as mistral: it can be stored as llama"):
        made(stored(OLMO, tmp_path / "olmo"), tmp_path / "out", "mistral")
    biased = stored(STABLE, tmp_path / "stable")
    with pytest.raises(UnsupportedModel, match="no place for model.layers.0.* is not zero"):
        made(biased, tmp_path / "out", "llama")
    assert not (tmp_path / "out").exists()


def test_a_class_without_a_target_says_why() -> None:
    with pytest.raises(UnsupportedModel, match="as llama: no class with RMSNorm has its parallel"):
        form_for("PhiForCausalLM", "llama")
    with pytest.raises(UnsupportedModel, match="no target is known"):
        form_for("BertModel", "llama")


@pytest.mark.parametrize("form", stock_forms().forms, ids=lambda form: form.source)
def test_a_form_names_entries_that_exist(form: Any) -> None:
    source, target = (class_named(name).config_class for name in (form.source, form.target))
    before, after = source().to_dict(), target().to_dict()
    assert {*form.require, *form.copied.values()} <= before.keys()
    assert {*form.copied, *form.given, *form.per_layer} <= after.keys()
    assert {*form.same} <= {*before, *after}


@pytest.mark.slow
def test_the_command_stores_it(tmp_path: Path) -> None:
    source = stored(OLMO, tmp_path / "model")
    said = good("fold", source, "-o", tmp_path / "out", "--as", "llama")
    assert "stored as LlamaForCausalLM: 5 norms compute RMSNorm" in said
    said = refused("fold", source, "-o", tmp_path / "x", "--as", "llama", "--resume", status=2)
    assert "--resume has no effect with --as" in said
