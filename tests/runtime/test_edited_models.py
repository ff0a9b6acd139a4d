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
from live_models import computed_rms
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from enjoyln_cli import optimize
from enjoyln_cli.errors import EnjoyLNError, UnsupportedModel
from enjoyln_cli.runtime.modules import Folded


def writers(model: Any) -> list[tuple[str, Any]]:
    """The linear layers and convolutions whose weights were centred."""
    names = [name for one in model.config.enjoyln["centered"] for name in one["parameters"]]
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


def computes_rms(model: Any, name: str) -> bool:
    (computes,) = set(computed_rms(model, lambda: run(model, given(name))))
    return computes


PAIRS = [
    (add_bias, "opt"), (append_block, "gpt2"), (remove_block, "bert"), (add_hook, "vit"),
    (add_hook_before_norm, "clip"), (add_hook_to_model, "gpt2"), (replace_dropout, "bloom"),
    (train_dropouts, "phi"), (train_blocks, "whisper"),
]  # fmt: skip
"""Every edit and every kind of model."""


@pytest.mark.parametrize(("edit", "name"), PAIRS)
def test_an_edited_model_computes_what_the_edited_stock_model_does(
    eight: Path, edit: Callable[[Any], bool], name: str
) -> None:
    """An edit after the model's first call."""
    model, stock = pair(name, eight)
    assert difference(model, stock, name) < 1e-9 and computes_rms(model, name)
    assert edit(model) and edit(stock)
    with pytest.warns(UserWarning, match="computing LayerNorm: "):
        assert difference(model, stock, name) < 1e-9
    assert not computes_rms(model, name)


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
    assert computes_rms(model, "phi")


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
    assert computes_rms(model, "bert")
    layer = model.encoder.layer[0].output
    kept, layer.dropout = layer.dropout, AddsNumbers().eval()
    with pytest.warns(
        UserWarning, match=r"layer\.0\.output\.dropout: was a Dropout and is now a AddsNumbers"
    ):
        run(model, given("bert"))
    layer.dropout = kept
    assert computes_rms(model, "bert") and difference(model, stock, "bert") < 1e-9


@pytest.mark.parametrize("name", ["clip", "whisper"])
def test_training_that_changes_no_centred_weight_leaves_rms_norm(eight: Path, name: str) -> None:
    """One call of the whole model checks the weights for the models inside it too."""
    model, _ = pair(name, eight)
    norms = [module for module in model.modules() if isinstance(module, Folded)]
    model.train().eval()
    assert all(norm.shifted for norm in norms)
    run(model, given(name))
    assert not any(norm.shifted for norm in norms)


def test_layers_that_only_read_may_change(eight: Path) -> None:
    """Adapters on layers that read the stream are allowed, and hooks after a norm with a weight."""
    for name, path in (("gpt2", "transformer.h.0.attn.c_attn"), ("phi", "model.layers.0.mlp.fc1")):
        model, stock = pair(name, eight)
        for one in (model, stock):
            above, _, last = path.rpartition(".")
            inner = one.get_submodule(path)
            torch.manual_seed(1)
            added = nn.Linear(
                16, one.get_submodule(above)._modules[last](torch.ones(1, 16).double()).shape[-1]
            )
            setattr(one.get_submodule(above), last, Adapter(inner, added.double()))
            norm = next(m for m in one.modules() if isinstance(m, nn.LayerNorm))
            norm.register_forward_hook(lambda m, args, out: out + torch.arange(16.0))
        assert computes_rms(model, name) and difference(model, stock, name) < 1e-9


class Adapter(nn.Module):
    def __init__(self, inner: nn.Module, added: nn.Module) -> None:
        super().__init__()
        self.inner, self.added = inner, added

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.added(x)


def test_the_structure_of_a_custom_module_is_checked(eight: Path) -> None:
    """After ``install`` alone the weights are not checked, but the structure is."""
    from enjoyln_cli.runtime.install import install

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
    """An adapter like those of PEFT: contains the layer and changes its output."""

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
def test_an_adapter_of_the_original(eight: Path, way: str) -> None:
    """An adapter that adds computes the same on the centred layer; one that multiplies does not."""
    model, stock = pair("phi", eight)
    original = source("phi")
    assert computes_rms(model, "phi")
    for one in (model, stock, original):
        mlp = one.model.layers[0].mlp
        mlp.fc2 = Beside(mlp.fc2, way).eval()
    if way == "adds":
        with pytest.warns(UserWarning, match=r"fc2: has an adapter \(.*Beside\) whose output may"):
            assert difference(model, original, "phi") < 1e-9
        return
    assert difference(stock, original, "phi") > 1e-2
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match=r"fc2: its adapter \(Beside\) multiplies"):
            run(model, given("phi"))
    model.train()
    run(model, given("phi"))
