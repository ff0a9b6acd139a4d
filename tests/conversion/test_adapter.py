"""A LoRA adapter goes on working when its base model is folded, or is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import enjoyln, good, refused
from rounding import relative
from safetensors.torch import load_file, save_file
from stored_files import stored_plan
from tiny_models import BERT, GPT2, PHI, live

from enjoyln_cli import Options, fold, from_pretrained, refold
from enjoyln_cli.conversion.edit_like import edit_like
from enjoyln_cli.errors import (
    BadCheckpoint,
    EnjoyLNError,
    ModelNotFound,
    UnsupportedModel,
)
from enjoyln_cli.runtime.modules import Folded

peft = pytest.importorskip("peft")
CONFIGS: dict[str, Callable[[], tuple[str, Any]]] = {
    "gpt2": lambda: ("GPT2LMHeadModel", transformers.GPT2Config(**GPT2)),
    "phi": lambda: ("PhiForCausalLM", transformers.PhiConfig(**PHI)),
    "bert": lambda: ("BertModel", transformers.BertConfig(**BERT)),
}
IDS = torch.randint(3, 37, (2, 7), generator=torch.Generator().manual_seed(1))


def adapted(base: Any, **more: Any) -> Any:
    """``base`` with an adapter on every linear layer of its blocks, in float64."""
    layers = {
        "gpt2": ["c_attn", "c_proj", "c_fc"],
        "phi": ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"],
        "bert": ["query", "value", "dense"],
    }
    kind = base.config.model_type
    torch.manual_seed(2)
    given = {"target_modules": layers[kind], "r": 3, "use_rslora": True, "lora_alpha": 5}
    if kind == "gpt2":
        given["fan_in_fan_out"] = True
    lora = peft.LoraConfig(**{**given, "init_lora_weights": False, **more})
    model = peft.get_peft_model(base, lora).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter) + 0.05)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models, an adapter for each, and results of Phi: rotated, folded, and fused."""
    folder = tmp_path_factory.mktemp("adapters")
    for name, config in CONFIGS.items():
        live(*config()).save_pretrained(folder / name)
        adapted(load(folder / name)).save_pretrained(folder / f"{name} adapter")
    ways = {
        "rotated": Options(fold=False, rotate=True, seed=2),
        "folded": Options(),
        "fused": Options(merge="affine"),
    }
    for way, options in ways.items():
        fold(folder / "phi", folder / way, options=options, verify=False)
    return {path.name: path for path in folder.iterdir()}


def load(folder: Path) -> Any:
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float64).eval()


def first_output(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS)[0]


def fold_both(base: Path, adapter: Path, into: Path, **options: Any) -> tuple[Path, Path]:
    """Fold ``base``, and edit ``adapter`` for the result: the directories of both."""
    out, edited = into / "out", into / "edited"
    fold(base, out, verify=False, force=True, **options)
    edit_like(adapter, out, edited)
    return out, edited


WAYS = [
    ("phi", {"merge": "bias"}),
    ("gpt2", {"merge": "affine", "untie": True}),
    ("bert", {"widen_mlp": True}),
]


@pytest.mark.one_case
@pytest.mark.parametrize(("name", "options"), WAYS, ids=lambda value: str(value))
def test_an_adapter_does_the_same_on_the_folded_base(
    name: str, options: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    exact = first_output(
        peft.PeftModel.from_pretrained(load(folders[name]), folders[f"{name} adapter"]).eval()
    )
    ways = Options(**options)
    out, edited = fold_both(folders[name], folders[f"{name} adapter"], tmp_path, options=ways)

    model = from_pretrained(out, dtype=torch.float64)
    own = first_output(model)
    tuned = peft.PeftModel.from_pretrained(model, edited).eval()
    assert relative(first_output(tuned), exact) < 1e-12
    norms = [norm for norm in model.modules() if isinstance(norm, Folded)]
    assert norms and all(norm.shifted for norm in norms)  # an adapter is a change
    if name != "bert":  # hidden units that subtract a mean have to be without an adapter
        refold(tuned)
        assert relative(first_output(tuned), exact) < 1e-12
        assert not any(norm.shifted for norm in norms)
    assert relative(own, exact) > 1e-2

    stock = peft.PeftModel.from_pretrained(load(out), edited).eval()
    assert relative(first_output(stock), exact) < 1e-12
    settings = json.loads((edited / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(out)
    assert settings["lora_bias"] is ("merge" in options)
    if "merge" in options:  # as it was before the fold, it is wrong
        plain = peft.PeftModel.from_pretrained(load(out), folders[f"{name} adapter"]).eval()
        assert relative(first_output(plain), exact) > 1e-3


def test_an_adapter_with_biases_and_whole_modules(folders: dict[str, Path], tmp_path: Path) -> None:
    """Its own biases are centred or shifted, and a layer that it saves whole is centred."""
    given = {"lora_bias": True, "target_modules": ["q_proj", "dense"]}
    model = adapted(load(folders["phi"]), **given, modules_to_save=["fc1", "fc2"])
    model.save_pretrained(tmp_path / "adapter")
    fusing = Options(merge="bias")
    with pytest.raises(UnsupportedModel, match=r"mlp.fc1.bias: the adapter has its own values"):
        fold_both(folders["phi"], tmp_path / "adapter", tmp_path, options=fusing)
    out, edited = fold_both(folders["phi"], tmp_path / "adapter", tmp_path)
    tuned = peft.PeftModel.from_pretrained(load(out), edited).eval()
    assert relative(first_output(tuned), first_output(model)) < 1e-12
    saved = load_file(edited / "adapter_model.safetensors")
    weight = saved["base_model.model.model.layers.0.mlp.fc2.weight"]
    assert float(weight.mean(0).abs().max() / weight.abs().max()) < 1e-15


@pytest.mark.slow
def test_an_adapter_on_an_untied_head(folders: dict[str, Path], tmp_path: Path) -> None:
    """Part of a norm's affine moves into the head, which gets its own weights."""
    model = adapted(load(folders["gpt2"]), target_modules=["lm_head", "c_attn"])
    model.save_pretrained(tmp_path / "adapter")  # PEFT also saves the base weight of the head
    how: Any = {"model_class": "GPT2LMHeadModel", "options": Options(merge="affine", untie=True)}
    with pytest.raises(UnsupportedModel, match="lm_head.weight: the adapter has its own values"):
        fold_both(folders["gpt2"], tmp_path / "adapter", tmp_path, **how)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    out, edited = fold_both(folders["gpt2"], tmp_path / "adapter", tmp_path, **how)
    assert any(
        reader.weight.parameter == "lm_head.weight"
        for norm in stored_plan(out).fused
        for reader in norm.readers
    )
    tuned = peft.PeftModel.from_pretrained(from_pretrained(out), edited).eval()
    assert relative(first_output(tuned), first_output(model)) < 1e-12


def test_the_adapter_keeps_its_dtype(folders: dict[str, Path], tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(folders["phi adapter"], short)
    tensors = load_file(short / "adapter_model.safetensors")
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(halves, short / "adapter_model.safetensors")
    _, edited = fold_both(folders["phi"], short, tmp_path)
    written = load_file(edited / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    changed = {name for name, tensor in written.items() if not torch.equal(tensor, halves[name])}
    assert changed and all("lora_B" in n and ("dense" in n or "fc2" in n) for n in changed)


SETTINGS = [
    ({"peft_type": "IA3"}, "only LoRA and prompts"),
    ({"use_dora": True}, "use_dora is True"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ({"target_parameters": ["x"]}, "target_parameters"),
    ({"a_later_setting": 3}, "a_later_setting is 3"),
    ({"init_lora_weights": "pissa"}, "changes the base model"),
]


@pytest.mark.parametrize(("setting", "text"), SETTINGS, ids=lambda value: str(value))
def test_what_does_more_than_add_is_refused(
    setting: dict[str, Any], text: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(folders["phi adapter"], folder)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **setting}))
    with pytest.raises(UnsupportedModel, match=text):
        edit_like(folder, folders["folded"], tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_adapters_that_do_not_fit_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    def refused(folder: Path, error: type[EnjoyLNError], text: str) -> None:
        with pytest.raises(error, match=text):
            edit_like(folder, folders["folded"], tmp_path / "new")

    refused(folders["gpt2 adapter"], BadCheckpoint, "transformer.h.0.*PhiForCausalLM lacks it")
    folder = tmp_path / "adapter"
    shutil.copytree(folders["phi adapter"], folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(key for key in tensors if "fc2.lora_B" in key)
    save_file({**tensors, name: tensors[name][1:].clone()}, folder / "adapter_model.safetensors")
    refused(folder, BadCheckpoint, r"fc2: the adapter has shapes .* do not fit a weight of")
    (folder / "adapter_model.safetensors").write_bytes(b"12345678{")
    refused(folder, BadCheckpoint, "cannot be read")
    (folder / "adapter_model.safetensors").unlink()
    refused(folder, ModelNotFound, "save the adapter as safetensors")
    whole = adapted(load(folders["phi"]), target_modules=["embed_tokens"])
    whole.save_pretrained(tmp_path / "whole")
    refused(tmp_path / "whole", UnsupportedModel, "embed_tokens: the fold edits this layer")


@pytest.mark.parametrize("way", ["rotated", "folded", "fused"])
def test_an_adapter_is_edited_like_its_base(
    way: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    exact = first_output(
        peft.PeftModel.from_pretrained(load(folders["phi"]), folders["phi adapter"]).eval()
    )
    command = "rotate" if way == "rotated" else "fold"
    good(command, folders["phi adapter"], "--like", folders[way], "-o", tmp_path / "new")
    tuned = peft.PeftModel.from_pretrained(load(folders[way]), tmp_path / "new").eval()
    assert relative(first_output(tuned), exact) < 1e-12
    settings = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(folders[way])


@pytest.mark.parametrize("way", ["rotated", "folded"])
def test_a_prompt_is_edited_like_rows_of_the_table(
    way: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    torch.manual_seed(5)
    model = peft.get_peft_model(load(folders["phi"]), prompt).double().eval()
    with torch.no_grad():
        for name, vectors in model.named_parameters():
            if "prompt" in name:
                vectors.copy_(0.5 + torch.randn_like(vectors))
    model.save_pretrained(tmp_path / "prompt")
    good("rotate", tmp_path / "prompt", "--like", folders[way], "-o", tmp_path / "new")
    tuned = peft.PeftModel.from_pretrained(load(folders[way]), tmp_path / "new").double().eval()
    rounding = torch.finfo(torch.float32).eps  # PEFT stores prompts in float32
    assert relative(first_output(tuned), first_output(model)) < rounding
    if way == "rotated":  # as it was trained, it is wrong
        before = peft.PeftModel.from_pretrained(load(folders[way]), tmp_path / "prompt")
        assert relative(first_output(before.double().eval()), first_output(model)) > 1e-3


def test_what_is_no_adapter_of_this_result_is_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    def said(adapter: Path, like: Path) -> str:
        return refused("rotate", adapter, "--like", like, "-o", tmp_path / "new")

    assert "was not folded" in said(folders["phi adapter"], folders["phi"])
    assert "no adapter_config.json" in said(folders["phi"], folders["rotated"])
    assert "the adapter changes it" in said(folders["gpt2 adapter"], folders["rotated"])
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    peft.get_peft_model(load(folders["phi"]), prefix).save_pretrained(tmp_path / "prefix")
    assert "not PREFIX_TUNING" in said(tmp_path / "prefix", folders["rotated"])
    assert not (tmp_path / "new").exists()
    found = enjoyln("rotate", folders["phi adapter"], "--like", folders["rotated"])
    assert found.exit_code == 2 and "Missing option '-o'" in found.output
