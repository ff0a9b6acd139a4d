"""Converted checkpoints that run RMSNorm, and the conditions under which they do not."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from eight_models import given, pair
from live_models import CHECKPOINTS, FOLDED, computed_rms, folded_norms, moved
from rounding import IDENTITY, as_exact, in_float64, relative
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    GPT2Model,
    ViTModel,
    pipeline,
)

from enjoyln_cli import EnjoyLNConfig, Options, fold, from_pretrained, optimize, refold
from enjoyln_cli.checkpoint.marker import proof_of
from enjoyln_cli.errors import BadCheckpoint, ModelNotFound, NotCentred, UnsupportedModel
from enjoyln_cli.runtime.call_guards import input_means
from enjoyln_cli.runtime.loading import plan_of
from enjoyln_cli.runtime.modules import Folded

CAUSAL = ("gpt2", "opt", "bloom", "phi")


@pytest.fixture(autouse=True)
def no_unexpected_fallback() -> Iterator[None]:
    """Fail on a warning that a model computes LayerNorm, unless the test expects it."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="computing LayerNorm")
        yield


def original(name: str, cls: Any = None, **kwargs: Any) -> Any:
    config = transformers.AutoConfig.from_pretrained(CHECKPOINTS / name)
    cls = cls or getattr(transformers, config.architectures[0])
    return cls.from_pretrained(CHECKPOINTS / name, **kwargs).eval()


def inputs(name: str, length: int = 9) -> dict[str, torch.Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    return {"input_ids": torch.randint(3, 500, (2, length))}


def run(model: Any, given: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        output = model(**given)
    return output.logits if "logits" in output else output.last_hidden_state


def same(model: Any, other: Any, given: dict[str, Any], stored: Any = None) -> bool:
    """Whether both compute the same, up to a few times what rounding costs ``other``."""
    exact = run(in_float64(other), in_float64(given))
    return as_exact(run(model, given), run(other, given), exact, stored)


def computes_rms(model: Any, given: dict[str, Any]) -> bool:
    """Whether the norms computed RMSNorm in this call; asserts that all or none of them did."""
    (computes,) = set(computed_rms(model, lambda: run(model, given)))
    return computes


def shift_a_writer(model: Any) -> str:
    """Change every weight a little, as training would; returns a name that the error contains."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * parameter.std() * (torch.randn_like(parameter) + 1)
    return "c_proj"


def falls_back_until_refolded(model: Any, stock: Any, given: Any, words: str) -> None:
    """Norms compute LayerNorm, with a warning that matches ``words``, and then RMSNorm again."""
    with pytest.warns(UserWarning, match=words):
        assert same(model, stock, given)
    assert not computes_rms(model, given)
    assert computes_rms(refold(model), given) and same(model, stock, given)


# Loading.


@pytest.mark.parametrize("name", FOLDED)
def test_a_result_is_loaded_as_what_it_was_saved_as(outs: dict[str, Path], name: str) -> None:
    model, given = from_pretrained(outs[name]), inputs(name)
    stock = type(original(name))
    assert isinstance(model, stock) and str(type(model)) == str(stock)
    assert len(folded_norms(model)) == len(plan_of(model).folded) > 0
    assert computes_rms(model, given)
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
    assert computes_rms(model, given)
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
    assert computes_rms(model, inputs("opt"))


@pytest.mark.one_case
@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_any_dtype_of_any_result(tmp_path: Path, stored: str) -> None:
    fold(CHECKPOINTS / "opt", tmp_path / "out", dtype=stored, verify=False)
    given = inputs("opt")
    for loaded in ("float64", "float32", "float16", "bfloat16"):
        model = from_pretrained(tmp_path / "out", dtype=loaded)
        assert computes_rms(model, given)
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
    assert isinstance(model, base) and computes_rms(model, inputs(name))
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
    assert computes_rms(model, given) and same(model, original("gpt2"), given)


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
    assert computes_rms(model, given) and same(model, source, given)
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
    assert computes_rms(model, given)
    assert same(model, original("bloom"), given)
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert not getattr(model, "is_quantized", False) and not hasattr(model, "hf_quantizer")
    assert model.half().dtype == torch.float16
    assert computes_rms(from_pretrained(tmp_path), given)


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
    assert computes_rms(from_pretrained(tmp_path / "saved"), given)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_check_their_own_weights(outs: dict[str, Path], copied: Any) -> None:
    model, given = from_pretrained(outs["gpt2"]), inputs("gpt2")
    other = copied(model)
    assert computes_rms(other, given) and torch.equal(run(other, given), run(model, given))
    shift_a_writer(other)
    with pytest.warns(UserWarning, match="computing LayerNorm"):
        run(other, given)
    assert not computes_rms(other, given) and computes_rms(model, given)


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", torch.float16), ("vit", torch.bfloat16)])
def test_casts_leave_it_centred(outs: dict[str, Path], name: str, dtype: torch.dtype) -> None:
    model = from_pretrained(outs[name])
    given = inputs(name)
    run(model, given)
    model.to(dtype)
    if name == "vit":
        given["pixel_values"] = given["pixel_values"].to(dtype)
    assert computes_rms(model, given)
    model.float()
    given = inputs(name)
    assert computes_rms(model, given)
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
        assert computes_rms(model, given)
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
        assert computes_rms(model, given)
    assert same(model, original("phi"), given)


def test_other_weights_that_accelerate_loads_into_an_empty_model(
    outs: dict[str, Path], tmp_path: Path
) -> None:
    stock = AutoModelForCausalLM.from_pretrained(outs["phi"])
    shift_a_writer(stock)
    stock.save_pretrained(tmp_path / "moved")
    model = loaded_by_accelerate(tmp_path / "moved", tmp_path / "disk", "disk")
    with pytest.raises(NotCentred, match="its mean is"):
        optimize(model)
    assert not folded_norms(model)


# Changes of the weights.


@pytest.mark.parametrize("name", ["gpt2", "phi"])
def test_a_fine_tuned_result_is_refused_until_it_is_refolded(
    outs: dict[str, Path], tmp_path: Path, name: str
) -> None:
    given = inputs(name)
    load = AutoModelForCausalLM.from_pretrained
    tuned = load(outs[name])
    shift_a_writer(tuned)
    tuned.save_pretrained(tmp_path / "tuned")
    with pytest.raises(NotCentred, match=r"\w\.\w+: its mean is .*refold"):
        from_pretrained(tmp_path / "tuned")
    other = load(tmp_path / "tuned")
    assert refold(other) is other
    assert computes_rms(other, given)
    assert same(other, tuned, given)
    other.save_pretrained(tmp_path / "refolded")
    again = from_pretrained(tmp_path / "refolded")
    assert computes_rms(again, given) and same(again, tuned, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_and_then_evaluating(outs: dict[str, Path], dtype: torch.dtype) -> None:
    model, given = from_pretrained(outs["gpt2"], dtype=dtype), inputs("gpt2")
    assert not computes_rms(model.train(), given)
    steps = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(5):
        model(**given, labels=given["input_ids"]).loss.backward()
        steps.step()
        steps.zero_grad()
    model.eval()
    stock = AutoModelForCausalLM.from_pretrained(outs["gpt2"], dtype=dtype)
    stock.load_state_dict(model.state_dict())
    falls_back_until_refolded(model, stock, given, "computing LayerNorm: .*refold")


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("part", ["", "transformer"])
def test_an_update_that_leaves_no_trace_is_seen(
    outs: dict[str, Path], trains: bool, part: str
) -> None:
    """By the first call, as of an adapter that is merged right after loading, and after training.

    Of the whole model, and of its base model.
    """
    model = from_pretrained(outs["gpt2"])
    model.train(trains)
    model.transformer.h[1].mlp.c_proj.weight.data.add_(0.1)
    model.eval()
    with pytest.warns(UserWarning, match=r"h\.1\.mlp\.c_proj\.weight: its mean is"):
        run(model.get_submodule(part), inputs("gpt2"))


@pytest.mark.parametrize("assign", [False, True])
def test_other_weights_loaded_into_it(outs: dict[str, Path], assign: bool) -> None:
    model, given = from_pretrained(outs["gpt2"]), inputs("gpt2")
    run(model, given)
    stock = original("gpt2")
    model.load_state_dict(stock.state_dict(), assign=assign)
    falls_back_until_refolded(model, stock, given, "computing LayerNorm")


@pytest.mark.parametrize("name, folds", [("gpt2", True), ("phi", False)])
def test_new_embedding_rows(outs: dict[str, Path], name: str, folds: bool) -> None:
    """GPT-2 centres rows at run time. Phi's rows are centred in the weights; new rows are not."""
    model, stock = (
        load(outs[name]) for load in (from_pretrained, AutoModelForCausalLM.from_pretrained)
    )
    for one in (model, stock):
        torch.manual_seed(3)
        one.resize_token_embeddings(517, mean_resizing=False)
        with torch.no_grad():
            one.get_input_embeddings().weight[509:] += 0.3
    given = {"input_ids": torch.tensor([[5, 510, 7, 516]])}
    if folds:
        assert computes_rms(model, given) and same(model, stock, given)
        assert computes_rms(refold(model), given) and same(model, stock, given)
    else:
        falls_back_until_refolded(model, stock, given, r"embed_tokens\.weight: its mean is")


def test_an_embedding_that_loses_its_centring(outs: dict[str, Path]) -> None:
    model, given = from_pretrained(outs["gpt2"]), inputs("gpt2")
    plain = nn.Embedding(509, 96)
    plain.weight = model.transformer.wte.weight
    model.set_input_embeddings(plain)
    falls_back_until_refolded(model, original("gpt2"), given, r"transformer\.wte: its added mean")


class Quantised(nn.Linear):
    """A layer as in bitsandbytes: another class, int8 values and a scale for each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.bias = linear.bias
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale, persistent=False)
        values = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(values, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * self.scale, self.bias)


def quantise(model: Any) -> Any:
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and "lm_head" not in path:
            above, _, name = path.rpartition(".")
            setattr(model.get_submodule(above), name, Quantised(module))
    return model


def test_linears_that_are_quantised_after_loading(outs: dict[str, Path]) -> None:
    """Rounding to int8 leaves means in the weights, which LayerNorm removes."""
    given = inputs("phi")
    stock = quantise(AutoModelForCausalLM.from_pretrained(outs["phi"]))
    model = quantise(from_pretrained(outs["phi"]))
    with pytest.warns(UserWarning, match=r"\.q_proj: is quantised \(int8\), so"):
        assert same(model, stock, given)
    assert not computes_rms(model, given)
    with pytest.raises(NotCentred, match=r"q_proj: is quantised \(int8\), so its output"):
        optimize(stock)
    with pytest.raises(NotCentred, match=r"q_proj: is quantised \(int8\), so its output"):
        refold(model)


def test_a_block_that_the_config_adds_is_refused(outs: dict[str, Path]) -> None:
    layers = transformers.AutoConfig.from_pretrained(outs["gpt2"]).n_layer
    model = AutoModelForCausalLM.from_pretrained(outs["gpt2"], n_layer=layers + 1).eval()
    with pytest.raises(NotCentred, match="was not there when the model was converted"):
        optimize(model)
    assert not folded_norms(model)


def test_a_layer_whose_weight_is_gone_is_refused_first(
    outs: dict[str, Path],
) -> None:
    class Linear(nn.Module):
        """Hides the weight, as the layers of ``torch.ao.quantization.quantize_dynamic`` do."""

        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.hidden = [inner.weight.detach(), inner.bias]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, *self.hidden)

    model = AutoModelForCausalLM.from_pretrained(outs["phi"])
    model.model.layers[0].mlp.fc2 = Linear(model.model.layers[0].mlp.fc2)
    with pytest.raises(NotCentred, match=r"has no '\S+fc2.weight'.*the layer was replaced"):
        optimize(model)
    assert type(model.model.final_layernorm) is nn.LayerNorm


@pytest.mark.slow
def test_weights_that_are_split_over_processes(outs: dict[str, Path]) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    model, given = from_pretrained(outs["phi"]), inputs("phi")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        fully_shard(model, mesh=mesh)
        with pytest.warns(
            UserWarning, match=r"computing LayerNorm: .*was a Phi\w+ and is now a FSDP"
        ):
            assert same(model, original("phi"), given)
        with pytest.raises(UnsupportedModel, match="not for FSDPPhiForCausalLM"):
            refold(model)
        split = AutoModelForCausalLM.from_pretrained(outs["phi"])
        weight = distribute_tensor(split.model.layers[0].mlp.fc2.weight.detach(), mesh)
        split.model.layers[0].mlp.fc2.weight = nn.Parameter(weight)
        with pytest.raises(NotCentred, match=r"fc2\.weight: is split over processes"):
            optimize(split)
    finally:
        dist.destroy_process_group()


# Inputs that were never centred, or never proven.


@pytest.mark.parametrize("name", ["gpt2", "phi"])
def test_a_prefix_of_soft_prompts(outs: dict[str, Path], name: str) -> None:
    """Prompt tuning: learned rows before the embedded tokens."""
    ids = inputs(name)["input_ids"]
    prefix = torch.randn(1, 4, 1) + torch.randn(1, 4, original(name).config.hidden_size)
    found = []
    for model in (original(name), from_pretrained(outs[name])):
        model = model.double()
        with torch.no_grad():
            # rows of the weight: the embedding module would return them centred
            rows = nn.functional.embedding(ids, original(name).get_input_embeddings().weight)
            given = torch.cat([prefix.expand(2, -1, -1), rows], 1).double()
            found.append(model(inputs_embeds=given).logits)
            found.append(
                model.generate(
                    inputs_embeds=given, max_new_tokens=5, do_sample=False, pad_token_id=0
                )
            )
    assert computes_rms(model, {"inputs_embeds": given})
    assert as_exact(found[2], found[0], found[0], torch.float32)
    assert torch.equal(found[3], found[1])


def test_masked_patches_make_a_vit_compute_layer_norm(tmp_path: Path) -> None:
    """The mask token is stored, but no trace reads it: the traced class is built without it."""
    config = transformers.AutoConfig.from_pretrained(CHECKPOINTS / "vit")
    source = ViTModel(config, use_mask_token=True)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape) + 0.1)
    source.eval().save_pretrained(tmp_path / "source")
    fold(tmp_path / "source", tmp_path / "out", verify=False)
    model = from_pretrained(tmp_path / "out", use_mask_token=True)
    given = inputs("vit")
    masked = {**given, "bool_masked_pos": torch.rand(2, 16) < 0.5}
    assert not computes_rms(model, masked) and computes_rms(model, given)
    assert same(model, source, masked)
    with input_means(model) as means:
        run(model, masked)
    assert max(means.values()) > 0.01


def test_inputs_that_only_an_unproven_base_model_takes(outs: dict[str, Path]) -> None:
    model = from_pretrained(outs["vit"])
    model.vit.embeddings.mask_token = nn.Parameter(torch.randn(1, 1, 64) + 1)
    optimize(model)
    masked = {**inputs("vit"), "bool_masked_pos": torch.rand(2, 16) < 0.5}
    assert not computes_rms(model.vit, masked)
    assert computes_rms(model, inputs("vit"))


# Encoders, which `generate` calls directly.

PEGASUS = {
    "vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 40,
}  # fmt: skip


@pytest.fixture(scope="module")
def pegasus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model with an encoder and a decoder, and the directory of its converted checkpoint."""
    source = moved(
        transformers.PegasusForConditionalGeneration(transformers.PegasusConfig(**PEGASUS))
    ).float()
    folder = tmp_path_factory.mktemp("pegasus")
    source.save_pretrained(folder / "source")
    fold(folder / "source", folder / "out", verify=False)
    return source, folder / "out"


def generated(model: Any, **given: Any) -> torch.Tensor:
    """The logits of six steps of greedy generation."""
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        found = transformers.GenerationMixin.generate(
            model, **given, **settings, return_dict_in_generate=True, output_logits=True
        )
    return torch.stack(found.logits)


def encoder_computes_rms(model: Any, **given: Any) -> bool:
    return computes_rms(model.get_encoder(), given)


@pytest.mark.slow
def test_generate_with_embeddings_for_the_encoder(pegasus: tuple[Any, Path]) -> None:
    source, out = pegasus
    model = copy.deepcopy(from_pretrained(out))
    assert plan_of(model).entry_inputs == ("inputs_embeds",)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :2] = 0
    for heard in (
        {"input_ids": torch.randint(5, 90, (2, 7))},
        {"inputs_embeds": torch.randn(2, 7, 32) + 3},
        {"inputs_embeds": torch.randn(2, 7, 32) + 3, "attention_mask": mask},
    ):
        exact = generated(in_float64(source), **in_float64(heard))
        assert as_exact(generated(model, **heard), generated(source, **heard), exact)
    assert encoder_computes_rms(model, inputs_embeds=torch.randn(2, 7, 32))


def test_an_unproven_input_of_the_encoder_alone(eight: Path) -> None:
    model, stock = pair("whisper", eight)
    assert "attention_mask" in plan_of(model).unproven
    sound = {"input_features": given("whisper")["input_features"]}
    masked = {**sound, "attention_mask": torch.ones(2, 18, dtype=torch.long)}
    assert not encoder_computes_rms(model, **masked)
    assert encoder_computes_rms(model, **sound)
    start = {"decoder_input_ids": torch.full((2, 1), 4)}
    for heard in (sound, masked):
        found, expected = (generated(one, **heard, **start) for one in (model, stock))
        assert relative(found, expected) <= IDENTITY


def test_an_encoder_that_is_called_first_is_looked_at(pegasus: tuple[Any, Path]) -> None:
    model = from_pretrained(pegasus[1])
    given = {"inputs_embeds": torch.randn(2, 7, 32)}
    assert encoder_computes_rms(model, **given)
    with torch.no_grad():
        model.model.encoder.layers[0].fc2.weight += 0.1
    with pytest.warns(UserWarning, match="computing LayerNorm: .*fc2"):
        assert not encoder_computes_rms(model, **given)
