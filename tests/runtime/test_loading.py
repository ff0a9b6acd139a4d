"""Converted checkpoints that run RMSNorm, and the conditions under which they do not."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from converted_checkpoints import (
    falls_back_until_refolded,
    inputs,
    original,
    run,
    same,
    shift_writers,
)
from live_models import CHECKPOINTS, FOLDED, computes_rms, folded_norms, moved
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    GPT2Model,
    pipeline,
)

from enjoyln_cli import EnjoyLNConfig, Options, fold, from_pretrained, optimize, refold
from enjoyln_cli.checkpoint.marker import proof_of
from enjoyln_cli.errors import BadCheckpoint, ModelNotFound, NotCentred, UnsupportedModel
from enjoyln_cli.runtime.loading import plan_of
from enjoyln_cli.runtime.modules import Folded

CAUSAL = ("gpt2", "opt", "bloom", "phi")


pytestmark = [
    pytest.mark.filterwarnings("error:computing LayerNorm"),
    pytest.mark.usefixtures("seeded"),
]


# Loading.


@pytest.mark.parametrize("name", FOLDED)
def test_a_result_is_loaded_as_what_it_was_saved_as(outs: dict[str, Path], name: str) -> None:
    model, given = from_pretrained(outs[name]), inputs(name)
    stock = type(original(name))
    assert isinstance(model, stock) and str(type(model)) == str(stock)
    assert len(folded_norms(model)) == len(plan_of(model).folded) > 0
    assert computes_rms(model, **given)
    assert same(model, original(name), given)
    assert not any(isinstance(m, Folded) for m in original(name).modules())


@pytest.mark.parametrize(
    "name, auto",
    [
        ("gpt2", GPT2Model),
        ("opt", AutoModel),
        ("vit", AutoModelForImageClassification),
    ],
)
def test_auto_classes_and_model_classes(outs: dict[str, Path], name: str, auto: Any) -> None:
    model, given = from_pretrained(outs[name], auto), inputs(name)
    assert computes_rms(model, **given)
    assert same(model, original(name, auto), given)


def test_arguments_and_loading_info_go_through(outs: dict[str, Path]) -> None:
    model, info = from_pretrained(
        str(outs["opt"]),
        dtype=torch.bfloat16,
        output_loading_info=True,
        attn_implementation="eager",
    )
    assert model.dtype == torch.bfloat16 and not info["missing_keys"]
    assert model.config._attn_implementation == "eager"
    assert computes_rms(model, **inputs("opt"))


@pytest.mark.one_case
@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_any_dtype_of_any_result(tmp_path: Path, stored: str) -> None:
    fold(CHECKPOINTS / "opt", tmp_path / "out", dtype=stored, verify=False)
    given = inputs("opt")
    for loaded in ("float64", "float32", "float16", "bfloat16"):
        model = from_pretrained(tmp_path / "out", dtype=loaded)
        assert computes_rms(model, **given)
        assert same(model, original("opt", dtype=loaded), given, getattr(torch, stored))


def test_a_class_that_is_not_proven_is_refused_by_name(outs: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModel, match="not for GPT2ForSequenceClassification"):
        from_pretrained(outs["gpt2"], AutoModelForSequenceClassification)
    with pytest.raises(UnsupportedModel, match="not for ViTModel.*--model-class ViTModel"):
        optimize(AutoModel.from_pretrained(outs["vit"]))


def test_an_unproven_saved_class_is_refused_before_loading(
    outs: dict[str, Path], tmp_path: Path
) -> None:
    out = shutil.copytree(outs["gpt2"], tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    config["architectures"] = ["GPT2ForTokenClassification"]
    (out / "config.json").write_text(json.dumps(config))
    (out / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="not for GPT2ForTokenClassification"):
        from_pretrained(out)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_the_only_class_that_is_proven_is_loaded(tmp_path: Path, name: str) -> None:
    """The checkpoint was saved as a class with a head, and folded for the class without it."""
    base = type(original(name).base_model)
    options = Options(widen_mlp=name == "bert")
    fold(
        CHECKPOINTS / name,
        tmp_path / "out",
        model_class=base.__name__,
        options=options,
        verify=False,
    )
    model = from_pretrained(tmp_path / "out")
    assert isinstance(model, base) and computes_rms(model, **inputs(name))
    assert same(model, original(name, base), inputs(name))
    with pytest.raises(UnsupportedModel, match=f"is proven for {base.__name__}, and not for"):
        from_pretrained(tmp_path / "out", type(original(name)))


def test_models_without_a_marker_are_refused(outs: dict[str, Path]) -> None:
    with pytest.raises(BadCheckpoint, match="no enjoyln entry"):
        optimize(original("gpt2"))
    with pytest.raises(ModelNotFound, match="there is no directory './none'"):
        from_pretrained("./none")
    with pytest.raises(UnsupportedModel, match="Linear has no transformers config"):
        optimize(nn.Linear(3, 3))


def test_a_marker_that_was_changed_is_refused(outs: dict[str, Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(outs["bloom"])
    for norm in model.config.enjoyln["plan"]["norms"]:
        norm["status"] = "in_weights"
    with pytest.raises(BadCheckpoint, match="edited after the fold"):
        optimize(model)
    assert not folded_norms(model)


def test_a_marker_with_other_weights_is_refused(outs: dict[str, Path]) -> None:
    model = original("gpt2")
    model.config.enjoyln = AutoModelForCausalLM.from_pretrained(outs["gpt2"]).config.enjoyln
    with pytest.raises(NotCentred, match=r"transformer\.\S+: its mean is \d"):
        optimize(model)
    assert not folded_norms(model)


def test_a_marker_for_another_shape_is_refused(outs: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(outs["gpt2"])
    for weight in model.config.enjoyln["plan"]["centred_weights"]:
        weight["axis"]["size"] += 1
    model.config.enjoyln["proof"] = proof_of(model.config.enjoyln)
    with pytest.raises(NotCentred, match="does not fit"):
        optimize(model)


def test_the_transformer_of_a_pipeline(tmp_path: Path) -> None:
    """In a sentence-transformers pipeline, ``modules.json`` names the folder of the transformer."""
    kind = "sentence_transformers.models.Transformer"
    listed = [{"idx": 0, "name": "0", "path": "0_Transformer", "type": kind}]
    shutil.copytree(CHECKPOINTS / "gpt2", tmp_path / "source" / "0_Transformer")
    (tmp_path / "source" / "modules.json").write_text(json.dumps(listed))
    fold(tmp_path / "source", tmp_path / "out", verify=False)
    model, given = from_pretrained(tmp_path / "out"), inputs("gpt2")
    assert computes_rms(model, **given) and same(model, original("gpt2"), given)


def layer_scaled() -> Any:
    config = transformers.Dinov2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, image_size=32, patch_size=8
    )
    return moved(transformers.Dinov2Model(config)).float()


def test_a_scale_that_was_fused(tmp_path: Path) -> None:
    """The scale is all ones after the fold; if it is trained, scale times weight has a mean."""
    source, given = layer_scaled(), inputs("vit")
    source.save_pretrained(tmp_path / "source")
    fold(tmp_path / "source", tmp_path / "out", verify=False)
    model = from_pretrained(tmp_path / "out")
    assert any(weight.scale for weight in plan_of(model).centred_weights)
    assert computes_rms(model, **given) and same(model, source, given)
    with torch.no_grad():
        model.encoder.layer[1].layer_scale1.lambda1.mul_(torch.rand(24) + 0.5)
    stock = transformers.Dinov2Model.from_pretrained(tmp_path / "out")
    stock.load_state_dict(model.state_dict())
    falls_back_until_refolded(model, stock, given, "its mean is")


# Through transformers alone.


def test_a_quantization_config_does_the_same_and_leaves_nothing(
    outs: dict[str, Path], tmp_path: Path
) -> None:
    load, given = AutoModelForCausalLM.from_pretrained, inputs("bloom")
    model = load(outs["bloom"], quantization_config=EnjoyLNConfig())
    assert computes_rms(model, **given)
    assert same(model, original("bloom"), given)
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert not getattr(model, "is_quantized", False) and not hasattr(model, "hf_quantizer")
    assert model.half().dtype == torch.float16
    assert computes_rms(from_pretrained(tmp_path), **given)


def test_a_quantization_config_refuses_as_optimize_does(outs: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModel, match="not for GPT2ForSequenceClassification"):
        AutoModelForSequenceClassification.from_pretrained(
            outs["gpt2"], quantization_config=EnjoyLNConfig()
        )
    with pytest.raises(BadCheckpoint, match="no enjoyln entry"):
        original("gpt2", quantization_config=EnjoyLNConfig())


def test_a_pipeline_with_a_quantization_config(outs: dict[str, Path]) -> None:
    given = {"max_new_tokens": 6, "do_sample": False}
    found = [
        pipeline("text-generation", str(folder), model_kwargs=extra)
        for folder, extra in (
            (CHECKPOINTS / "gpt2", {}),
            (outs["gpt2"], {"quantization_config": EnjoyLNConfig()}),
        )
    ]
    assert len(folded_norms(found[1].model)) == 7
    assert found[0]("Once upon a", **given) == found[1]("Once upon a", **given)


# Usual operations on a model.


GENERATED = [
    {"do_sample": False},
    {"do_sample": True, "top_k": 20},
    {"num_beams": 3, "do_sample": False},
    {"do_sample": False, "cache_implementation": "static"},
    {"do_sample": False, "use_cache": False},
]
"""The first runs for every model, the others for GPT-2: they are settings of one loop."""


@pytest.mark.parametrize(
    ("name", "settings"),
    [(name, GENERATED[0]) for name in CAUSAL] + [("gpt2", one) for one in GENERATED[1:]],
    ids=str,
)
def test_generate(outs: dict[str, Path], name: str, settings: dict[str, Any]) -> None:
    ids = inputs(name)["input_ids"]
    found = []
    for model in (original(name).double(), from_pretrained(outs[name], dtype=torch.float64)):
        if settings.get("cache_implementation") and not model._can_compile_fullgraph:
            pytest.skip(f"{type(model).__name__} has no static cache")
        torch.manual_seed(1)
        found.append(
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=8,
                pad_token_id=0,
                **settings,
            )
        )
    assert torch.equal(*found)
    assert not any(norm.shifted for norm in folded_norms(model))


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_saved_models_are_stock(outs: dict[str, Path], tmp_path: Path, name: str) -> None:
    model, given = from_pretrained(outs[name]), inputs(name)
    model.save_pretrained(tmp_path / "saved")
    stock = type(model).from_pretrained(tmp_path / "saved")
    assert not folded_norms(stock) and stock.config.architectures == [type(model).__name__]
    assert same(stock, original(name), given)
    assert computes_rms(from_pretrained(tmp_path / "saved"), **given)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_check_their_own_weights(outs: dict[str, Path], copied: Any) -> None:
    model, given = from_pretrained(outs["gpt2"]), inputs("gpt2")
    other = copied(model)
    assert computes_rms(other, **given) and torch.equal(run(other, given), run(model, given))
    shift_writers(other)
    with pytest.warns(UserWarning, match="computing LayerNorm"):
        run(other, given)
    assert not computes_rms(other, **given) and computes_rms(model, **given)


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", torch.float16), ("vit", torch.bfloat16)])
def test_casts_leave_it_centred(outs: dict[str, Path], name: str, dtype: torch.dtype) -> None:
    model = from_pretrained(outs[name])
    given = inputs(name)
    run(model, given)
    model.to(dtype)
    if name == "vit":
        given["pixel_values"] = given["pixel_values"].to(dtype)
    assert computes_rms(model, **given)
    model.float()
    given = inputs(name)
    assert computes_rms(model, **given)
    assert same(model, original(name), given, dtype)


def places(model: Any, blocks: str) -> dict[str, Any]:
    """A ``device_map`` with all blocks but the first on the disk."""
    prefix, parts = model.base_model_prefix, [name for name, _ in model.base_model.named_children()]
    found: dict[str, Any] = {f"{prefix}.{part}": "cpu" for part in parts if part != blocks}
    layers = range(len(getattr(model.base_model, blocks)))
    found |= {f"{prefix}.{blocks}.{i}": "disk" if i else "cpu" for i in layers}
    return {**found, "lm_head": "cpu"}


@pytest.mark.parametrize("by", ["enjoyln", "transformers"])
def test_offloaded_weights(outs: dict[str, Path], tmp_path: Path, by: str) -> None:
    given, stock = inputs("gpt2"), original("gpt2")
    options: dict[str, Any] = {"device_map": places(stock, "h"), "offload_folder": tmp_path}
    if by == "enjoyln":
        model = from_pretrained(outs["gpt2"], **options)
    else:
        load = AutoModelForCausalLM.from_pretrained
        model = load(outs["gpt2"], quantization_config=EnjoyLNConfig(), **options)
    assert any(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(UnsupportedModel, match="offloaded"):
        refold(model)
    for _ in range(2):
        assert computes_rms(model, **given)
    assert same(model, stock, given)


def loaded_by_accelerate(folder: Path, disk: Path, where: str) -> Any:
    """Phi, loaded into an empty model, in memory or with blocks that are offloaded."""
    from accelerate import cpu_offload, init_empty_weights, load_checkpoint_and_dispatch

    with init_empty_weights():
        model = transformers.PhiForCausalLM(transformers.AutoConfig.from_pretrained(folder)).eval()
    model.tie_weights()
    devices = places(model, "layers") if where == "disk" else {"": "cpu"}
    load_checkpoint_and_dispatch(model, folder, device_map=devices, offload_folder=disk)
    model = cpu_offload(model, torch.device("cpu")) if where == "offload" else model
    assert where == "cpu" or any(parameter.is_meta for parameter in model.parameters())
    return model


@pytest.mark.parametrize("where", ["cpu", "offload", "disk"])
def test_weights_that_accelerate_loads_into_an_empty_model(
    outs: dict[str, Path], tmp_path: Path, where: str
) -> None:
    model = optimize(loaded_by_accelerate(outs["phi"], tmp_path, where))
    given = inputs("phi")
    for _ in range(2):
        assert computes_rms(model, **given)
    assert same(model, original("phi"), given)


def test_other_weights_that_accelerate_loads_into_an_empty_model(
    outs: dict[str, Path], tmp_path: Path
) -> None:
    stock = AutoModelForCausalLM.from_pretrained(outs["phi"])
    shift_writers(stock)
    stock.save_pretrained(tmp_path / "moved")
    model = loaded_by_accelerate(tmp_path / "moved", tmp_path / "disk", "disk")
    with pytest.raises(NotCentred, match="its mean is"):
        optimize(model)
    assert not folded_norms(model)
