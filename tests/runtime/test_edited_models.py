"""A folded model that is edited computes what its stock class with the same edit computes."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eight_models import AddsNumbers, far, given, pair, replace_dropout, run, source
from live_models import computes_rms, install
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from enjoyln_cli import optimize, refold
from enjoyln_cli.errors import EnjoyLNError, NotCentred
from enjoyln_cli.runtime.modules import Folded


def writers(model: Any) -> list[tuple[str, Any]]:
    """The linear layers and convolutions whose weights were centred."""
    names = [one["parameter"] for one in model.config.enjoyln["plan"]["centred_weights"]]
    owners = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}
    found = [(path, m) for path, m in model.named_modules() if path in owners]
    return [(path, m) for path, m in found if not isinstance(m, nn.Embedding | nn.LayerNorm)]


def blocks(model: Any) -> nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 2)


def add_bias(model: Any) -> bool:
    """Add a bias to a centred layer that had none."""
    bare = [module for _, module in writers(model) if module.bias is None]
    for module in bare[-1:]:
        module.bias = nn.Parameter(torch.arange(16.0).double())
    return bool(bare)


def append_block(model: Any) -> bool:
    """Append a block with weights that are not centred."""
    block = copy.deepcopy(blocks(source(model.config.model_type))[1])
    inner = getattr(model.config, "text_config", model.config)
    for name in ("num_hidden_layers", "encoder_layers"):
        if hasattr(inner, name):
            setattr(inner, name, 3)
    blocks(model).append(block)
    for module in block.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = 2
    return True


def remove_block(model: Any) -> bool:
    del blocks(model)[0]
    return True


def replace_forward(model: Any) -> bool:
    """Replace ``forward`` on the instance of a centred layer."""
    _, module = [one for one in writers(model) if not isinstance(one[1], nn.Conv2d)][-1]
    call = type(module).forward
    module.forward = lambda x: call(module, x) + torch.arange(16.0).double()
    return True


def add_hook(model: Any) -> bool:
    """Add a hook that changes the mean of a dropout's output, or of a centred layer's."""
    between = [m for m in model.modules() if isinstance(m, nn.Dropout)]
    target = between[0] if between else writers(model)[-1][1]
    target.register_forward_hook(lambda m, args, out: out + torch.ones_like(out).cumsum(-1))
    return True


def add_hook_before_norm(model: Any) -> bool:
    norm = [m for m in model.modules() if isinstance(m, nn.LayerNorm)][-1]
    norm.register_forward_pre_hook(lambda m, args: (args[0] + torch.arange(16.0) ** 2,))
    return True


def add_hook_to_model(model: Any) -> bool:
    """Add a hook to the model that replaces its inputs after they were looked at."""
    embedded = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(5)).double() + 3

    def replace(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "input_ids": None, "inputs_embeds": embedded}

    model.register_forward_pre_hook(replace, with_kwargs=True)
    return True


def train_dropouts(model: Any) -> bool:
    """Put only dropout modules into training mode, as in Monte-Carlo dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.4
            module.train()
    return any(isinstance(m, nn.Dropout) for m in model.modules())


def train_blocks(model: Any) -> bool:
    """Put blocks into training mode whose dropout is a function call."""
    for block in blocks(model):
        block.training = True
        block.dropout = 0.4 if isinstance(getattr(block, "dropout", None), float) else None
    return model.config.model_type in ("opt", "whisper")


def difference(model: Any, stock: Any, name: str) -> float:
    outputs = []
    for one in (model, stock):
        torch.manual_seed(7)
        outputs.append(run(one, given(name)))
    return far(*outputs)


PAIRS = [
    (add_bias, "opt"), (append_block, "gpt2"), (remove_block, "bert"), (add_hook, "vit"),
    (add_hook_before_norm, "clip"), (add_hook_to_model, "gpt2"), (replace_dropout, "bloom"),
    (train_dropouts, "phi"), (train_blocks, "whisper"),
]  # fmt: skip
"""Every edit and every kind of model."""


@pytest.mark.parametrize(("edit", "name"), PAIRS)
def test_an_edited_model_computes_what_the_stock_class_does(
    eight: Path, edit: Callable[[Any], bool], name: str
) -> None:
    """An edit after the model's first call."""
    model, stock = pair(name, eight)
    assert difference(model, stock, name) < 1e-9 and computes_rms(model, **given(name))
    assert edit(model) and edit(stock)
    with pytest.warns(UserWarning, match="computing LayerNorm: "):
        assert difference(model, stock, name) < 1e-9
    assert not computes_rms(model, **given(name))


def test_a_hook_of_every_module(eight: Path) -> None:
    model, stock = pair("phi", eight)

    def shift(module: Any, args: Any) -> Any:
        return (args[0] + torch.arange(16.0),) if isinstance(module, nn.LayerNorm) else None

    handle = register_module_forward_pre_hook(shift)
    try:
        with pytest.warns(UserWarning, match="every module: has a forward hook"):
            assert difference(model, stock, "phi") < 1e-9
    finally:
        handle.remove()
    assert computes_rms(model, **given("phi"))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_know_how_the_model_was_built(eight: Path, copied: Any) -> None:
    model, stock = pair("gpt2", eight)
    append_block(model), append_block(stock)
    other = copied(model)
    with pytest.warns(UserWarning, match=r"h\.2: .* was not there"):
        assert difference(other, stock, "gpt2") < 1e-9


@pytest.mark.parametrize(
    ("edit", "name"),
    [(add_bias, "opt"), (append_block, "phi"), (replace_forward, "bert"), (add_hook, "bert")],
)
def test_an_edit_before_the_model_is_optimized(
    eight: Path, edit: Callable[[Any], bool], name: str
) -> None:
    _, model = pair(name, eight)
    _, stock = pair(name, eight)
    assert edit(model) and edit(stock)
    try:
        optimize(model)
    except EnjoyLNError:
        assert not any(isinstance(m, Folded) for m in model.modules())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert difference(model, stock, name) < 1e-9


def test_an_undone_edit_computes_rms_norm_again(eight: Path) -> None:
    model, stock = pair("bert", eight)
    assert computes_rms(model, **given("bert"))
    layer = model.encoder.layer[0].output
    kept, layer.dropout = layer.dropout, AddsNumbers().eval()
    with pytest.warns(
        UserWarning, match=r"layer\.0\.output\.dropout: was a Dropout and is now a AddsNumbers"
    ):
        run(model, given("bert"))
    layer.dropout = kept
    assert computes_rms(model, **given("bert")) and difference(model, stock, "bert") < 1e-9


@pytest.mark.parametrize("name", ["clip", "whisper"])
def test_training_that_changes_no_centred_weight_leaves_rms_norm(eight: Path, name: str) -> None:
    """One call of the whole model checks the weights for the models inside it too."""
    model, _ = pair(name, eight)
    norms = [module for module in model.modules() if isinstance(module, Folded)]
    model.train().eval()
    assert all(norm.shifted for norm in norms)
    run(model, given(name))
    assert not any(norm.shifted for norm in norms)


def test_a_hook_after_a_norm_with_a_weight(eight: Path) -> None:
    """No converted norm depends on what such a norm returns."""
    model, stock = pair("gpt2", eight)
    for one in (model, stock):
        norm = next(m for m in one.modules() if isinstance(m, nn.LayerNorm))
        norm.register_forward_hook(lambda m, args, out: out + torch.arange(16.0))
    assert computes_rms(model, **given("gpt2")) and difference(model, stock, "gpt2") < 1e-9


@pytest.mark.parametrize("layer", ["q_proj", "fc2"])
def test_a_lora_adapter_means_layer_norm_until_refold(eight: Path, layer: str) -> None:
    """Both on a layer that reads the stream and on a centred layer."""
    peft = pytest.importorskip("peft")
    model, stock = pair("phi", eight)
    assert computes_rms(model, **given("phi"))
    for one in (model, stock):
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules=[layer], r=2, init_lora_weights=False)
        peft.inject_adapter_in_model(config, one).double().eval()
    with pytest.warns(UserWarning, match=rf"{layer}: has an adapter .* call enjoyln_cli.refold"):
        assert difference(model, stock, "phi") < 1e-9
    assert not computes_rms(model, **given("phi"))
    refold(model)
    assert computes_rms(model, **given("phi")) and difference(model, stock, "phi") < 1e-9
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.1
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert computes_rms(model, **given("phi")) == (layer == "q_proj")
    assert bool(said) == (layer == "fc2")


@pytest.mark.parametrize("way", ["merged", "unloaded"])
def test_an_adapter_that_is_merged_without_a_call(eight: Path, way: str) -> None:
    """PEFT writes to ``weight.data``, unnoticed by torch, and puts the layers back."""
    peft = pytest.importorskip("peft")
    (model, stock), norms = pair("phi", eight), []
    for one in (model, stock):
        one.double()
        difference(one, one, "phi")
        config = peft.LoraConfig(target_modules=["fc2"], r=2, init_lora_weights=False)
        torch.manual_seed(1)
        tuned = peft.get_peft_model(one, config).double().eval()
        norms.append(tuned.merge_and_unload() if way == "merged" else tuned.unload())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert difference(*norms, "phi") < 1e-9
    assert computes_rms(model, **given("phi")) == (way == "unloaded")


def test_refold_leaves_an_edited_model_alone(eight: Path) -> None:
    """Behind a hook that multiplies, centring a weight would change the function."""
    model, stock = pair("phi", eight)
    scale = torch.rand(16).double() + 0.5
    for one in (model, stock):
        torch.manual_seed(1)
        with torch.no_grad():
            one.model.layers[0].mlp.fc2.weight += 0.1
        one.model.layers[0].mlp.fc2.register_forward_hook(lambda m, args, out: out * scale)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NotCentred, match="fc2: has a forward hook"):
        refold(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.warns(UserWarning, match="computing LayerNorm"):
        assert difference(model, stock, "phi") < 1e-9


def test_the_structure_of_a_custom_module_is_checked(eight: Path) -> None:
    """After ``install`` alone the weights are not checked, but the structure is."""
    net = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.5), nn.LayerNorm(16)).double().eval()
    with torch.no_grad():
        net[0].weight -= net[0].weight.mean(0)
        net[0].bias -= net[0].bias.mean()
    stock, x = copy.deepcopy(net), torch.randn(3, 5).double()
    install(net, ["2"], [])
    for one in (net, stock):
        one[1] = AddsNumbers().eval()
    with pytest.warns(UserWarning, match="1: was a Dropout and is now a AddsNumbers"):
        assert torch.allclose(net(x), stock(x), rtol=1e-12)


class Beside(nn.Module):
    """An adapter as in PEFT: contains the layer and changes its output."""

    def __init__(self, base_layer: nn.Module, way: str) -> None:
        super().__init__()
        self.base_layer, self.way = base_layer, way
        torch.manual_seed(4)
        self.down, self.up = torch.randn(24, 2).double(), torch.randn(2, 16).double()
        self.size = nn.Parameter(1 + 0.5 * torch.rand(16).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base_layer(x)
        if self.way == "scales":  # like IA3
            return y * self.size
        y = y + x @ self.down @ self.up
        if self.way == "adds":  # like LoRA
            return y
        weight = self.base_layer.weight + (self.down @ self.up).T  # like DoRA
        return y * self.size / weight.norm(dim=1)


@pytest.mark.parametrize("way", ["adds", "scales", "divides"])
def test_an_adapter_of_another_library(eight: Path, way: str) -> None:
    model, stock = pair("phi", eight)
    assert computes_rms(model, **given("phi"))
    for one in (model, stock):
        mlp = one.model.layers[0].mlp
        mlp.fc2 = Beside(mlp.fc2, way).eval()
    with pytest.warns(UserWarning, match=r"fc2: has an adapter \(.*Beside\) whose output may"):
        assert difference(model, stock, "phi") < 1e-9
    with pytest.raises(NotCentred, match="fc2"):
        refold(model)
