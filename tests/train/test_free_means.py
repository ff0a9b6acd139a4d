"""Is the mean of a centred weight free in training mode, too? If not, training is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
import transformers
from live_models import moved
from tiny_models import BERT, GPT2, live
from torch import nn
from torch.nn.functional import dropout

from enjoyln_cli import analyze
from enjoyln_cli.calls.calls import forms, main_call
from enjoyln_cli.calls.covered_examples import covered_examples
from enjoyln_cli.calls.labels import LABEL, calls_with_labels
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.classes import build
from enjoyln_cli.plan.covered_calls import CallForm, CoveredCalls, Items, TensorForm
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.runtime.modules import Folded
from enjoyln_cli.trace.capture import Captures
from enjoyln_cli.trace.steps import quiet
from enjoyln_cli.trace.traced_calls import trace_calls
from enjoyln_cli.train import keep_centred
from enjoyln_cli.train.trained_fold import plan_in_training

X = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    """A stream ``y`` that is normed, and a loss to which training mode adds ``kind`` of it."""

    kind = ""

    def __init__(self) -> None:
        super().__init__()
        self.layerdrop = 0.4
        self.write, self.norm, self.read = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.other_norm, self.aux, self.drop = nn.LayerNorm(8), nn.Linear(8, 2), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, target: Any = None) -> Any:
        kind, y = self.kind if self.training else "", self.write(x)
        if kind == "dropout":
            y = self.drop(dropout(y, 0.1, self.training))
        if kind == "LayerDrop" and not torch.rand([]) < self.layerdrop:
            y = y + self.aux(self.norm(y)).repeat(1, 4)
        branches = kind == "branch on a draw" and torch.rand([]) < 0.5
        branches = branches or (kind == "branch on a size" and len(x) > 5)
        if branches:
            return self.read(y)
        out = self.read(self.norm(y))
        extra: Any = 0.0
        if kind == "auxiliary head":
            extra = self.aux(y).square().mean()
        if kind == "statistic as a dictionary":
            return {"out": out, "loss": y.square().mean()}
        if kind == "auxiliary head behind a norm":
            extra = self.aux(self.other_norm(y)).square().mean()
        if kind == "statistic":
            extra = y.square().mean()
        if kind == "statistic with targets" and target is not None:
            extra = y.mean()
        return out, extra if target is None else (out - target).square().mean() + extra


@pytest.fixture(scope="module")
def plan() -> Plan:
    return analyze(moved(Net()), X, example_calls=[((X, Y), {})]).plan


def net_with(kind: str) -> Any:
    """A net that is the same in eval mode, whatever ``kind`` is."""
    return moved(type("Net", (Net,), {"kind": kind})())


def change_by_means(net: Net) -> float:
    """How much the loss in training mode changes if a mean is added to the centred weight."""
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        losses.append(float(sum(torch.as_tensor(one).sum() for one in net.train()(X, Y)).detach()))
        with torch.no_grad():
            net.write.weight.add_(torch.linspace(-1, 1, 5))
    return abs(losses[1] / losses[0] - 1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("auxiliary head", "noticed by aux .linear reads its mean., so the loss would change"),
        ("statistic", "noticed by the model .square .*put a norm before that code"),
        ("statistic with targets", "noticed by the model .mean reads its mean"),
        ("branch on a draw", "branches on values or random numbers"),
        ("branch on a size", r"another path for some sizes of Net\(x=float\[a, 5\]"),
    ],
)
def test_code_of_training_that_reads_the_stream_or_may_is_refused(
    kind: str, reason: str, plan: Plan
) -> None:
    net = net_with(kind)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    where = "its code" if kind.startswith("branch") else "write.weight"
    with pytest.raises(UnsupportedModel, match=f"(?=.*{where}).*in training mode, .*{reason}"):
        keep_centred(net, plan=plan)
    assert not any(isinstance(module, Folded) for module in net.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert kind.startswith("branch") or change_by_means(net) > 1e-3


def test_a_loss_counts_even_if_the_plan_is_for_other_outputs(plan: Plan) -> None:
    net = net_with("statistic as a dictionary")
    chosen = replace(plan, outputs=("out",))
    with pytest.raises(UnsupportedModel, match="write.weight: in training mode, .*square"):
        keep_centred(net, plan=chosen)


@pytest.mark.parametrize("kind", ["auxiliary head behind a norm", "LayerDrop"])
def test_training_code_behind_a_norm_is_accepted(kind: str, plan: Plan) -> None:
    net = net_with(kind)
    keep_centred(net, plan=plan)
    assert change_by_means(net) < 1e-12
    assert net.layerdrop == 0.4 and net.drop.p == 0.1
    keep_centred(net, plan=plan)  # of a model that is folded already


def test_dropout_is_another_run_and_no_obstacle(plan: Plan) -> None:
    net = net_with("dropout")
    keep_centred(net, plan=plan)
    assert change_by_means(net) > 1e-4


def test_only_these_answers_are_known() -> None:
    """A uniform draw is not below zero, and activations are finite."""
    normal = torch.zeros(2)
    with quiet(training=True):
        assert (torch.rand([]) < 0.0) is False and torch.lt(torch.rand([]), 0) is False
        assert torch.isfinite(normal).all() is True and torch.all(normal.isfinite()) is True
        others = [torch.rand([]) < 0.5, torch.randn([]) < 0.0, torch.rand(2) < 0.0]
        others += [normal.all(), torch.isfinite(normal).all(0), torch.isinf(normal).any()]
        assert all(isinstance(one, torch.Tensor) for one in others)
    with quiet():
        assert isinstance(torch.rand([]) < 0.0, torch.Tensor)


def test_layers_that_training_skips() -> None:
    config = transformers.OPTConfig(
        **BERT, ffn_dim=33, word_embed_proj_dim=21, layerdrop=0.6, dropout=0.0
    )
    model = live("OPTForCausalLM", config)
    keep_centred(model)
    ids, losses = torch.randint(3, 37, (3, 9)), []
    for _ in range(2):
        torch.manual_seed(5)
        losses.append(model.train()(input_ids=ids).logits.detach())
        with torch.no_grad():
            model.model.decoder.layers[1].fc2.weight.add_(0.3)
    assert float((losses[0] - losses[1]).abs().max()) < 1e-12 * float(losses[0].abs().max())
    assert model.model.decoder.layerdrop == 0.6


def test_nothing_of_the_model_and_no_random_state_changes() -> None:
    model = live("GPT2LMHeadModel", transformers.GPT2Config(**GPT2, embd_pdrop=0.2)).train()
    model.transformer.h[0].mlp.eval()
    before = [(p, p.detach().clone(), p._version) for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    config = model.config.to_dict()
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    plan_in_training(model)
    now = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    assert torch.equal(now[0], states[0]) and now[1] == states[1]
    assert [*map(str, now[2])] == [*map(str, states[2])]
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(p, copied) and p._version == n for p, copied, n in before)
    assert model.config.to_dict() == config and model.transformer.drop.p == 0.2


def test_another_class_of_the_same_name_is_refused() -> None:
    def forward(self: Any, **kwargs: Any) -> Any:
        out = base.forward(self, **kwargs, output_hidden_states=True)
        return {"loss": out.loss + out.hidden_states[1].mean(), "logits": out.logits}

    base = transformers.GPT2LMHeadModel
    own: Any = type("GPT2LMHeadModel", (base,), {"forward": forward})
    with pytest.raises(UnsupportedModel, match="is not the class of this name in transformers"):
        keep_centred(own(transformers.GPT2Config(**GPT2)))


def test_calls_with_labels_return_a_loss() -> None:
    model: Any = build(transformers.BertForQuestionAnswering, transformers.BertConfig(**BERT))
    call = main_call(model, next(forms(model, 2, 7)))
    traced = trace_calls(Captures(model), calls_with_labels(model, call))
    fields = {
        field for trace in traced.traces for names in trace.returned.values() for field in names
    }
    assert [trace.label for trace in traced.traces] == [LABEL] and "loss" in fields


def test_examples_of_covered_calls_meet_their_conditions() -> None:
    x, mask = TensorForm("float", ("a", "b", 5)), TensorForm("bool", ("a", "b"))
    conditions = ("a > 5", "b % 4 == 0")
    pair = CallForm("Net", (("x", Items("tuple", (x, mask))),), conditions)
    cache = CallForm("Net", (("cache", Items("DynamicCache", ())),))
    net = Net()
    ((form, call),) = covered_examples(net, CoveredCalls((pair, cache)))
    (found, masked) = call.steps[0][1]["x"]
    assert form is pair and found.shape == (*masked.shape, 5) and masked.dtype == torch.bool
    assert len(found) > 5 and found.shape[1] % 4 == 0
    with pytest.raises(UnsupportedModel, match="covers no call"):
        covered_examples(net, CoveredCalls((cache,)))
    never = CallForm("Net", (("x", x),), ("a < 0",))
    with pytest.raises(UnsupportedModel, match=r"no example inputs .*Net\(x=float\[a, b, 5\]\)"):
        covered_examples(net, CoveredCalls((never,)))
