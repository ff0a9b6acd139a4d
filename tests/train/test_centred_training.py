"""Training with centred weights learns what LayerNorm learns, and is used as RMSNorm."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from live_models import CHECKPOINTS, moved
from safetensors.torch import load_file, save_file
from tiny_models import GPT2, PHI, live
from torch import nn
from training import language_loss

from enjoyln_cli import Options, analyze, fold, from_pretrained, refold, verify
from enjoyln_cli.checkpoint.marker import read_marker
from enjoyln_cli.errors import AlreadyFolded, BadCheckpoint, NotCentred, UnsupportedModel
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.runtime.modules import Folded
from enjoyln_cli.train import keep_centred
from enjoyln_cli.train.trained_fold import plan_in_training

STEPS = 9
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
IDS = torch.randint(3, 37, (4, 9), generator=torch.Generator().manual_seed(1))
Losses = torch.Tensor


@pytest.fixture(autouse=True)
def no_unexpected_fallback() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="computing LayerNorm|.*centred weights")
        yield


def gpt2(**changes: Any) -> Any:
    return live("GPT2LMHeadModel", transformers.GPT2Config(**{**GPT2, **NO_DROPOUT, **changes}))


def phi() -> Any:
    return live("PhiForCausalLM", transformers.PhiConfig(**PHI))


MODELS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "phi": phi}


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: plan_in_training(make()) for name, make in MODELS.items()}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum and weight decay": lambda some: torch.optim.SGD(
        some, lr=1e-2, momentum=0.9, weight_decay=0.1
    ),
    "AdamW": lambda some: torch.optim.AdamW(some, lr=1e-2, weight_decay=0.1),
}


def loss_of(model: Any) -> torch.Tensor:
    return language_loss(model, IDS)


def uses_rms_norm(model: nn.Module) -> bool:
    norms = [module for module in model.modules() if isinstance(module, Folded)]
    return bool(norms) and not any(norm.shifted for norm in norms)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> Losses:
    """Losses in training, and in an evaluation after every third step."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        model.train()
        loss = loss_of(model)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found.append(loss.detach())
        if step % 3 == 0:
            model.eval()
            with torch.no_grad():
                found.append(loss_of(model))
    return torch.stack(found)


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a - b).abs() / b.abs()).max())


def largest_mean(model: Any) -> float:
    """The largest mean of a centred tensor in the state dict, relative to its values."""
    with warnings.catch_warnings():
        state = model.state_dict()
    means = []
    for one in read_marker(model.config.to_dict()).centred or ():
        tensor = state[one.parameter]
        means.append(tensor.mean(one.axis.dim).abs().max() / tensor.abs().max())
    return float(torch.stack(means).max())


@pytest.mark.parametrize(
    ("name", "optimizer"), [("gpt2", "momentum and weight decay"), ("phi", "AdamW")]
)
def test_what_is_learned_is_what_layer_norm_learns(
    name: str, optimizer: str, plans: dict[str, Plan]
) -> None:
    plain, kept = MODELS[name](), MODELS[name]()
    expected = train(plain, OPTIMIZERS[optimizer](plain.parameters()))
    assert float(expected[-1]) < 0.9 * float(expected[0])
    own = OPTIMIZERS[optimizer](kept.parameters())
    keep_centred(kept, own, plan=plans[name])
    assert largest(train(kept, own), expected) < 1e-11
    kept.eval()
    with torch.no_grad():
        assert largest(loss_of(kept), loss_of(plain.eval())) < 1e-11
    assert uses_rms_norm(kept)
    assert [*kept.state_dict()] == [*plain.state_dict()]


def test_the_mean_grows_back_if_nothing_centres_it(plans: dict[str, Plan]) -> None:
    """So the test above would fail if evaluation ran RMSNorm on the weights as they are."""
    model = phi()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    keep_centred(model, optimizer, plan=plans["phi"])
    weight = model.model.layers[0].mlp.fc2.weight
    assert float(weight.detach().mean(0).abs().max()) < 1e-15
    train(model, optimizer, steps=2)
    assert float(weight.detach().mean(0).abs().max()) > 1e-4
    assert largest_mean(model) < 1e-15
    assert float(weight.detach().mean(0).abs().max()) < 1e-15


def test_coupled_weight_decay_sees_the_mean(plans: dict[str, Plan]) -> None:
    plain, kept = phi(), phi()
    rest = {"lr": 1e-2, "weight_decay": 0.1}
    expected = train(plain, torch.optim.Adam(plain.parameters(), **rest))
    optimizer = torch.optim.Adam(kept.parameters(), **rest)
    with pytest.warns(UserWarning, match="Adam adds its weight decay to the gradient"):
        keep_centred(kept, optimizer, plan=plans["phi"])
    assert largest(train(kept, optimizer), expected) > 1e-4


def test_dropout_before_a_norm_sees_the_mean(plans: dict[str, Plan]) -> None:
    """Centring never changes the function, but the noise that dropout makes of a mean."""
    plain, kept = gpt2(resid_pdrop=0.2), gpt2(resid_pdrop=0.2)
    expected = train(plain, OPTIMIZERS["AdamW"](plain.parameters()), steps=3)
    optimizer = OPTIMIZERS["AdamW"](kept.parameters())
    keep_centred(kept, optimizer, plan=plans["gpt2"])
    assert largest(train(kept, optimizer, steps=3), expected) > 1e-3
    copied = gpt2(resid_pdrop=0.2)
    copied.load_state_dict({name: t.clone() for name, t in kept.train().state_dict().items()})
    with torch.no_grad():
        assert largest(loss_of(kept.eval()), loss_of(copied.eval())) < 1e-13


@pytest.mark.slow
def test_a_checkpoint_is_a_folded_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = gpt2().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = keep_centred(model, optimizer)
    before = [id(parameter) for parameter in model.parameters()]
    train(model, optimizer, steps=4)
    model.train().save_pretrained(tmp_path)
    assert [id(parameter) for parameter in model.parameters()] == before

    checked = verify(tmp_path, samples=4)
    assert checked.passed and checked.identity_error < 1e-12
    assert uses_rms_norm_after_a_call(from_pretrained(tmp_path))
    with pytest.raises(BadCheckpoint, match="leave --against out"):
        verify(tmp_path, against=tmp_path)
    with pytest.raises(AlreadyFolded, match="trained as a folded model"):
        fold(tmp_path, tmp_path.parent / "twice")

    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    keep_centred(again)  # nothing changes: training goes on from these very weights
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name

    tensors = load_file(tmp_path / "model.safetensors")
    tensors["transformer.h.1.mlp.c_proj.weight"] += 0.01
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    failed = verify(tmp_path, samples=4)
    assert not failed.passed and "not centred" in failed.summary

    training.remove()
    model.train()
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight.add_(0.01)
    state = model.state_dict()["transformer.h.1.mlp.c_proj.weight"]
    assert float(state.mean(1).abs().min()) > 0.005


def uses_rms_norm_after_a_call(model: Any) -> bool:
    with torch.no_grad():
        model.eval()(input_ids=IDS)
    return uses_rms_norm(model)


def test_weights_that_are_centred_between_forward_and_backward(plans: dict[str, Plan]) -> None:
    """The gradients are those of the loss, as without what reads the weights in between."""
    gradients = []
    for reads in (False, True):
        model = gpt2()
        keep_centred(model, plan=plans["gpt2"])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1
        model.train()
        loss = loss_of(model)
        if reads:
            model.state_dict()
            model.eval()
            assert uses_rms_norm_after_a_call(model)
            model.train()
        loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        assert not reads or largest_mean(model) < 1e-12
    for found, expected in zip(*gradients, strict=True):
        assert float((found - expected).abs().max()) < 1e-12


def test_copies_centre_their_own_weights(plans: dict[str, Plan]) -> None:
    model = phi()
    keep_centred(model, plan=plans["phi"])
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            copied.model.layers[0].mlp.fc2.weight.add_(0.1)
        assert largest_mean(copied) < 1e-15
        with torch.no_grad():
            copied.model.layers[0].mlp.fc2.weight.add_(0.1)
        assert uses_rms_norm_after_a_call(copied)


def test_an_edited_model_is_not_centred(plans: dict[str, Plan]) -> None:
    """A hook may read what centring would change."""
    model = phi()
    training = keep_centred(model, plan=plans["phi"])
    model.model.layers[0].register_forward_hook(lambda module, args, output: output)
    weight = model.model.layers[0].mlp.fc2.weight
    with torch.no_grad():
        weight.add_(0.1)
    with pytest.raises(NotCentred, match="has a forward hook"):
        training.centre()
    with pytest.warns(UserWarning, match="left as they are, not centred: .*forward hook"):
        state = model.state_dict()
    assert float(state["model.layers.0.mlp.fc2.weight"].mean(0).abs().min()) > 0.05
    with pytest.warns(UserWarning, match="computing LayerNorm: .*forward hook"):
        model.eval()(input_ids=IDS)
    assert float(weight.detach().mean(0).abs().min()) > 0.05 and not uses_rms_norm(model)


@pytest.mark.slow
def test_a_folded_model_is_trained_and_keeps_its_source(outs: dict[str, Path]) -> None:
    before = from_pretrained(outs["phi"])
    source = read_marker(before.config.to_dict()).source
    model = transformers.AutoModelForCausalLM.from_pretrained(outs["phi"])
    training = keep_centred(model)
    found = read_marker(model.config.to_dict())
    assert found.trained and found.source == source
    for name, tensor in before.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    with torch.no_grad():
        model.model.layers[0].mlp.fc2.weight.add_(0.1)
    assert uses_rms_norm_after_a_call(refold(model))
    with torch.no_grad():
        model.model.layers[0].mlp.fc2.weight.add_(0.1)
    assert uses_rms_norm_after_a_call(model)  # refold has not ended it
    training.remove()
    with torch.no_grad():
        model.model.layers[0].mlp.fc2.weight.add_(0.1)
    with pytest.warns(UserWarning, match="computing LayerNorm"):
        assert not uses_rms_norm_after_a_call(model)


def test_a_plan_that_does_more_than_centring_is_refused(plans: dict[str, Plan]) -> None:
    config = copy.deepcopy(phi().config)
    config.architectures = ["PhiForCausalLM"]
    merged = analyze(config, options=Options(merge="bias")).plan
    with pytest.raises(UnsupportedModel, match=r"more than centring \(merge\)"):
        keep_centred(phi(), plan=merged)
    keep_centred(phi(), plan=replace(merged, merged=()))


@pytest.mark.slow
def test_hidden_units_that_subtract_a_mean_are_refused(tmp_path: Path) -> None:
    fold(CHECKPOINTS / "bert", tmp_path / "out", options=Options(widen_mlp=True), verify=False)
    model = transformers.AutoModel.from_pretrained(tmp_path / "out")
    with pytest.raises(UnsupportedModel, match="folded with --widen-mlp"):
        keep_centred(model)


class Net(nn.Module):
    def __init__(self, scaled: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8)) if scaled else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(self.norm(y if self.scale is None else y * self.scale))


def own_net(scaled: bool = False) -> tuple[Net, torch.Tensor, Plan]:
    net, x = moved(Net(scaled)), torch.randn(4, 5, dtype=torch.float64)
    return net, x, analyze(net, x).plan


def test_a_module_of_ones_own() -> None:
    net, x, plan = own_net()
    plain = copy.deepcopy(net)
    with pytest.raises(UnsupportedModel, match="pass plan="):
        keep_centred(net)
    losses = []
    for one in (plain, net):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        if one is net:
            keep_centred(one, optimizer, plan=plan)
        for _ in range(5):
            optimizer.zero_grad()
            one.train()(x).square().sum().backward()
            optimizer.step()
        losses.append(one.eval()(x).detach())
    assert largest(*losses) < 1e-12 and uses_rms_norm(net)
    assert float(net.first.weight.detach().mean(0).abs().max()) < 1e-15


def test_a_scale_that_is_trained_is_refused_and_a_frozen_one_is_merged() -> None:
    net, x, plan = own_net(scaled=True)
    assert any(writer.scale for writer in plan.writers)
    before = net(x).detach()
    with pytest.raises(UnsupportedModel, match="scale: is merged .* freeze it"):
        keep_centred(net, plan=plan)
    assert net.scale is not None and torch.equal(net(x), before)
    net.scale.requires_grad_(False)
    keep_centred(net, plan=plan)
    with torch.no_grad():
        net.first.weight.add_(0.3)
        assert largest(net.eval()(x), net.train()(x)) < 1e-12
    assert bool((net.scale == 1).all())


def test_weights_that_others_hold_are_refused(plans: dict[str, Plan]) -> None:
    model = phi()
    model.lm_head.weight.ds_id = 0
    with pytest.raises(UnsupportedModel, match=r"lm_head.weight: is split by DeepSpeed"):
        keep_centred(model, plan=plans["phi"])
    with torch.device("meta"):
        empty = transformers.PhiForCausalLM(transformers.PhiConfig(**PHI))
    with pytest.raises(NotCentred, match="not in memory"):
        keep_centred(empty, plan=plans["phi"])


@pytest.mark.parametrize(
    ("name", "rest", "matters"),
    [
        ("SGD", {"lr": 0.1, "weight_decay": 0.1}, False),
        ("AdamW", {"weight_decay": 0.1}, False),
        ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}, False),
        ("RMSprop", {"weight_decay": 0.1}, True),
        ("RMSprop", {}, False),
        ("Adafactor", {}, True),
    ],
)
def test_which_optimizers_see_the_mean(name: str, rest: dict[str, Any], matters: bool) -> None:
    from enjoyln_cli.train.optimizers import why_mean_matters

    weight, other = (nn.Parameter(torch.ones(3, 4)) for _ in range(2))
    optimizer = getattr(torch.optim, name)([weight], **rest)
    assert bool(why_mean_matters(optimizer, [weight])) is matters
    assert name == "Adafactor" or not why_mean_matters(optimizer, [other])


# LoRA.


def with_lora(model: Any, *layers: str, **more: Any) -> Any:
    peft = pytest.importorskip("peft")
    fan = {"fan_in_fan_out": True} if model.config.model_type == "gpt2" else {}
    torch.manual_seed(2)
    lora = peft.LoraConfig(target_modules=[*layers], r=3, init_lora_weights=False, **fan, **more)
    return peft.get_peft_model(model, lora).double()


LORA_ON = {"gpt2": ("c_attn", "c_proj"), "phi": ("q_proj", "dense", "fc2")}
"""Layers that read the residual stream, and layers that write into it."""


@pytest.mark.one_case
@pytest.mark.parametrize("name", MODELS)
def test_adapters_are_trained_as_with_layer_norm(
    name: str, plans: dict[str, Plan], tmp_path: Path
) -> None:
    plain, kept = (with_lora(make(), *LORA_ON[name]) for make in (MODELS[name],) * 2)
    expected = train(plain, OPTIMIZERS["AdamW"](plain.parameters()))
    assert float(expected[-1]) < 0.95 * float(expected[0])
    optimizer = OPTIMIZERS["AdamW"](kept.parameters())
    keep_centred(kept, optimizer, plan=plans[name])
    assert largest(train(kept, optimizer), expected) < 1e-11
    inner = kept.get_base_model()
    assert uses_rms_norm_after_a_call(inner)
    with torch.no_grad():
        assert largest(loss_of(kept.eval()), loss_of(plain.eval())) < 1e-11

    kept.train().save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    means = {key: float(t.mean(0).abs().max() / t.abs().max()) for key, t in saved.items()}
    writers = {key for key in means if key.endswith("lora_B.weight") and "attn.c_attn" not in key}
    writers -= {key for key in means if "q_proj" in key}
    assert writers and all(means[key] < 1e-7 for key in writers)  # saved in float32 or wider
    assert all(means[key] > 1e-3 for key in means.keys() - writers)
    with torch.no_grad():
        before = loss_of(kept.eval())
        merged = kept.merge_and_unload()
        assert largest(loss_of(merged), before) < 1e-12 and uses_rms_norm(merged)


def test_an_adapter_that_does_more_than_add_is_refused(plans: dict[str, Plan]) -> None:
    model = with_lora(phi(), "dense", use_dora=True)
    before = loss_of(model.eval()).detach()
    with pytest.raises((NotCentred, UnsupportedModel), match="dense: (has an|its) adapter"):
        keep_centred(model, plan=plans["phi"])
    assert torch.equal(loss_of(model).detach(), before)
