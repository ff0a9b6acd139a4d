"""A folded model as another stock class: the same function, or the entry that has no place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from commands import good, refused
from live_models import CHECKPOINTS
from tiny_models import live

from enjoyln_cli.conversion.edit_like import edit_like
from enjoyln_cli.conversion.fold import convert
from enjoyln_cli.errors import AlreadyFolded, EnjoyLNError, UnsupportedModel
from enjoyln_cli.models.classes import class_named
from enjoyln_cli.publish import push
from enjoyln_cli.publish.push_options import PushOptions
from enjoyln_cli.recipe.stock_targets import stock_targets, target_for
from enjoyln_cli.rewrite.directory import FoldResult
from enjoyln_cli.verification.verify import verify

TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
IMAGE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
WHOLE = {"rope_parameters": ROTARY}
OLMO = ("OlmoForCausalLM", T.OlmoConfig, TEXT)
COHERE2 = ("Cohere2ForCausalLM", T.Cohere2Config, {
    **TEXT, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
})  # fmt: skip
COHERE = ("CohereForCausalLM", T.CohereConfig, TEXT)
STABLE = ("StableLmForCausalLM", T.StableLmConfig, TEXT | WHOLE)
STARCODER = ("Starcoder2ForCausalLM", T.Starcoder2Config, TEXT)
NEMOTRON = ("NemotronForCausalLM", T.NemotronConfig, TEXT | WHOLE)
VIT = ("ViTModel", T.ViTConfig, {**IMAGE, "intermediate_size": 48})
OF_33: dict[str, Any] = {"hidden_size": 33, "head_dim": 8}
OF_36: dict[str, Any] = {"hidden_size": 36, "num_attention_heads": 1, "num_key_value_heads": 1}
DINO = ("Dinov2Model", T.Dinov2Config, {**IMAGE, "mlp_ratio": 2})


def stored(kind: Any, folder: Path, *, zeros: str = "", **more: Any) -> Path:
    """A model in ``folder``; biases whose name ends with ``zeros`` are zero."""
    name, config, settings = kind
    model = live(name, config(architectures=[name], **{**settings, **more})).float()
    for path, parameter in model.named_parameters():
        if zeros and path.endswith(zeros):
            parameter.data.zero_()
    model.save_pretrained(folder)
    return folder


def made(source: Path, out: Path, name: str, **more: Any) -> FoldResult:
    return convert(source, out, stored_as=name, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "target", "zeros"),
    [
        (OLMO, "llama", ""),
        (COHERE2, "cohere2_moe", ""),
        (COHERE, "cohere2_moe", ""),
        (STABLE, "llama", "norm.bias"),
        (STARCODER, "arcee", "model.norm.bias"),
        (NEMOTRON, "arcee", "norm.bias"),
        (VIT, "internvl_vision", ""),
        (DINO, "internvl_vision", ""),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value or "all",
)
def test_the_target_computes_the_same(kind: Any, target: str, zeros: str, tmp_path: Path) -> None:
    """Biases that norms leave can be stored only where layers after them have biases."""
    source, out = stored(kind, tmp_path / "model", zeros=zeros), tmp_path / "out"
    result = made(source, out, target)
    assert result.verification and result.verification.identity_error < 1e-6
    loaded = T.AutoModel.from_pretrained(out, dtype=torch.float64).eval()
    original = T.AutoModel.from_pretrained(source, dtype=torch.float64).eval()
    images = kind in (VIT, DINO)
    inputs = torch.rand(2, 3, 32, 32).double() if images else torch.arange(3, 40)[None]
    with torch.no_grad():
        got, want = loaded(inputs), original(inputs)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    left = [n for n, m in loaded.named_modules() if "LayerNorm" in type(m).__name__]
    assert left == (["layernorm"] if images else [])
    entry = json.loads((out / "config.json").read_text())["enjoyln"]
    assert entry["stored_from"] == kind[0] and not entry["plan"].get("norms")
    assert f"stored by `enjoyln` as a `{target_for(kind[0], target).target}`" in _card(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "target", "zeros", "sizes"),
    [
        (OLMO, "llama", "", OF_33),
        (COHERE2, "cohere2_moe", "", {**OF_33, "layer_norm_eps": 0.1}),
        (COHERE, "cohere2_moe", "", {**OF_36, "num_attention_heads": 2}),
        (STABLE, "llama", "norm.bias", OF_36),
        (STARCODER, "arcee", "model.norm.bias", OF_36),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_the_target_has_a_feature_less(
    kind: Any, target: str, zeros: str, sizes: Any, tmp_path: Path
) -> None:
    """Heads keep their size; the weights of norms, and an eps that counts, have a factor."""
    source, out = stored(kind, tmp_path / "model", zeros=zeros, **sizes), tmp_path / "out"
    result = made(source, out, target, compress=True)
    assert result.verification and result.verification.identity_error < 1e-6
    loaded = T.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64).eval()
    original = T.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        got, want = loaded(ids).logits, original(ids).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert loaded.get_input_embeddings().weight.shape == (99, sizes["hidden_size"] - 1)
    assert verify(out).passed and "--compress" in _card(out)


@pytest.mark.slow
def test_a_stream_that_needs_all_features_stays(tmp_path: Path) -> None:
    def refusal(kind: Any, name: str, message: str, **more: Any) -> None:
        source = stored(kind, tmp_path / message[:12], zeros="norm.bias", **more)
        with pytest.raises(UnsupportedModel, match=message):
            made(source, tmp_path / "out", name, compress=True, verify=False)

    refusal(OLMO, "llama", "of 31 features: .*not a multiple of the number of attention heads")
    refusal(OLMO, "llama", "added operation; --untie", **OF_33, tie_word_embeddings=True)
    refusal(NEMOTRON, "arcee", "norm whose weight or bias is not a parameter", **OF_33)
    refusal(VIT, "internvl_vision", "needs all of its features: .*layernorm", hidden_size=36)
    with pytest.raises(EnjoyLNError, match="pass stored_as"):
        convert(tmp_path, tmp_path / "out", compress=True)
    said = refused("fold", tmp_path, "-o", tmp_path / "out", "--compress", status=2)
    assert "--compress needs --as" in said and not (tmp_path / "out").exists()


def _card(out: Path) -> str:
    return (out / "README.md").read_text().replace("\n", " ")


@pytest.mark.slow
def test_a_result_is_verified_and_pushed_as_any_other(tmp_path: Path) -> None:
    """In bfloat16, whose rounding is no error of the fold."""
    source, out = stored(OLMO, tmp_path / "model"), tmp_path / "out"
    made(source, out, "llama", dtype="bfloat16")
    checked = verify(out)
    assert checked.passed and checked.compute_dtype == "bfloat16"
    assert checked.identity_error < 1e-6 < checked.storage_error
    upload = push.prepare(out, "me/x", PushOptions())
    assert not upload.forced and "LlamaForCausalLM.from_pretrained" in str(upload.card)
    with pytest.raises(AlreadyFolded):
        convert(out, tmp_path / "again")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    changed = verify(out, accept=("config.json",))
    assert any("config.json differs" in failure for failure in changed.failures)


@pytest.mark.slow
def test_what_has_no_place_in_the_target_is_named(tmp_path: Path) -> None:
    def refusal(kind: Any, name: str, message: str, **more: Any) -> None:
        folder = tmp_path / message[:12].replace(" ", "_").replace("*", "")
        source = stored(kind, folder, **more)
        with pytest.raises(UnsupportedModel, match=message):
            made(source, tmp_path / "out", name, verify=False)

    refusal(OLMO, "llama", "cannot compute clip_qkv = 8.0 of Olmo", clip_qkv=8.0)
    refusal(OLMO, "llama", "has final_softcap in its config", final_softcap=3.0)
    for given in ({"resume": True}, {"jobs": 2}):
        with pytest.raises(UnsupportedModel, match="without resume and jobs"):
            made(tmp_path, tmp_path / "out", "llama", **given)
    refusal(OLMO, "mistral", "stored as mistral: it can be stored as llama")
    refusal(COHERE, "cohere2_moe", "cannot compute use_qk_norm = True", use_qk_norm=True)
    refusal(STABLE, "llama", "no place for model.layers.0.* is not zero")
    refusal(STARCODER, "arcee", "no place for model.norm.bias of Star.* is not zero")
    refusal(NEMOTRON, "arcee", "no place for model.layers.0.* of Nemo.* is not zero")
    half = {"rope_parameters": {**ROTARY, "partial_rotary_factor": 0.5}}
    refusal(NEMOTRON, "arcee", "partial_rotary_factor = 0.5 of Nemotron.*, only 1.0", **half)
    refusal(VIT, "internvl_vision", "has extra in its config", extra=1)
    refusal(DINO, "internvl_vision", "compute use_swiglu_ffn = True", use_swiglu_ffn=True)
    refusal(VIT, "internvl_vision", "takes the 4 x 2 positions of ViT", image_size=[32, 16])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_adapter_follows_if_names_stay(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapter(source: Path, layers: list[str]) -> Path:
        base = T.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
        lora = peft.LoraConfig(target_modules=layers, r=3, init_lora_weights=False)
        peft.get_peft_model(base, lora).save_pretrained(source / "adapter")
        return source / "adapter"

    def logits(base: Path, adapter: Path) -> torch.Tensor:
        model = T.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
        with torch.no_grad():
            adapted: Any = peft.PeftModel.from_pretrained(model, adapter).eval()
            return adapted(input_ids=torch.arange(3, 40)[None]).logits  # type: ignore[no-any-return]

    olmo, out = stored(OLMO, tmp_path / "olmo"), tmp_path / "llama"
    made(olmo, out, "llama", verify=False)
    lora = adapter(olmo, ["q_proj", "o_proj", "down_proj"])
    edit_like(lora, out, tmp_path / "edited")
    before, after = logits(olmo, lora), logits(out, tmp_path / "edited")
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(out, lora), before, rtol=1e-2, atol=1e-2)
    coder = stored(STARCODER, tmp_path / "coder", zeros="model.norm.bias")
    made(coder, tmp_path / "arcee", "arcee", verify=False)
    made(stored(OLMO, tmp_path / "olmo33", **OF_33), tmp_path / "less", "llama", compress=True)
    with pytest.raises(UnsupportedModel, match="has one feature less than its original"):
        edit_like(lora, tmp_path / "less", tmp_path / "x")
    with pytest.raises(UnsupportedModel, match="other names than the layers of Starcoder2"):
        edit_like(adapter(coder, ["c_fc"]), tmp_path / "arcee", tmp_path / "x")


def test_a_class_without_a_target_says_why() -> None:
    with pytest.raises(UnsupportedModel, match="as llama: no class with RMSNorm has its parallel"):
        target_for("PhiForCausalLM", "llama")
    with pytest.raises(UnsupportedModel, match="distillation token"):
        target_for("DeiTModel", "internvl_vision")
    with pytest.raises(UnsupportedModel, match="no target is known"):
        target_for("BertModel", "llama")


@pytest.mark.parametrize("target", stock_targets().targets, ids=lambda target: target.source)
def test_a_target_names_entries_that_exist(target: Any) -> None:
    source, other = (class_named(name).config_class for name in (target.source, target.target))
    before, after = source().to_dict(), other().to_dict()
    computed = [*target.products.values(), *target.quotients.values()]
    factors = {name for names in computed for name in names}
    required = {name.partition(".")[0] for name in target.require}
    assert {*required, *target.copied.values(), *target.unused, *factors} <= before.keys()
    assert {*target.copied, *target.given, *target.per_layer} <= after.keys()
    assert {*target.products, *target.quotients} <= after.keys()
    assert {*target.same} <= {*before, *after}


@pytest.mark.slow
def test_the_command_stores_it(tmp_path: Path) -> None:
    source = stored(OLMO, tmp_path / "model")
    assert "as llama stores OlmoForCausalLM as LlamaForCausalLM" in good("report", source)
    assert "OPTForCausalLM as another class: no class" in good("report", CHECKPOINTS / "opt")
    assert "would convert 5 of 5" in good("fold", source, "--as", "llama", "--dry-run")
    said = good("fold", source, "-o", tmp_path / "out", "--as", "llama")
    assert "transformers.LlamaForCausalLM.from_pretrained" in said and "converted 5 of 5" in said
    assert "same outputs up to float32 rounding" in good("verify", tmp_path / "out")
    said = refused("fold", source, "-o", tmp_path / "x", "--as", "llama", "--resume", status=2)
    assert "--resume has no effect with --as" in said
