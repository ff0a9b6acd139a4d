"""Training with centred weights and RMSNorm is the training of the LayerNorm model."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from live_models import moved
from tiny_models import GPT2, VIT, calls, live, outputs
from torch import nn
from torch.nn.utils import parametrize
from training import OPTIMIZERS, differences, language_loss, square_loss, train

from enjoyln_cli import analyze, fold_in_memory
from enjoyln_cli.errors import EnjoyLNError, NothingToFold, UnsupportedModel
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.runtime.modules import Folded, RMSNorm
from enjoyln_cli.trace.steps import quiet
from enjoyln_cli.train import merge, reparametrize

EXACT = 1e-11
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}


class Mlp(nn.Module):
    """Two layers with norms, a raw parameter in the sum, and dropout of a given rate."""

    def __init__(self, p: float = 0.0, functional: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 9), nn.LayerNorm(9)
        self.second, self.norm2 = nn.Linear(9, 9), nn.LayerNorm(9)
        self.position = nn.Parameter(torch.zeros(1, 9))
        self.drop, self.p = nn.Dropout(0.0 if functional else p), p if functional else 0.0
        self.head = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm(self.first(x) + self.position))
        x = self.drop(F.dropout(self.second(x), self.p, self.training))
        return self.head(self.norm2(x))


@pytest.fixture(scope="module")
def mlp() -> Mlp:
    return moved(Mlp())


@pytest.fixture(scope="module")
def mlp_plan(mlp: Mlp, xs: list[torch.Tensor]) -> Plan:
    return reparametrize(copy.deepcopy(mlp), example=xs[0])


@pytest.fixture(scope="module")
def xs() -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.randn(6, 5, dtype=torch.float64) + 0.3 for _ in range(4)]


@pytest.fixture(scope="module")
def ids() -> list[torch.Tensor]:
    torch.manual_seed(4)
    return [torch.randint(3, 37, (2, 7)) for _ in range(4)]


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return live("GPT2LMHeadModel", transformers.GPT2Config(**GPT2, **NO_DROPOUT))


@pytest.fixture(scope="module")
def gpt2_plan(gpt2: Any) -> Plan:
    return reparametrize(copy.deepcopy(gpt2))


@pytest.mark.parametrize(("optimizer", "clip"), zip(OPTIMIZERS, (None, 0.3, 0.3), strict=True))
def test_an_mlp_trains_as_with_layer_norm(
    mlp: Mlp, mlp_plan: Plan, xs: list[torch.Tensor], optimizer: str, clip: float | None
) -> None:
    losses, weights, plan = differences(mlp, square_loss, xs * 3, optimizer, clip, plan=mlp_plan)
    assert len(plan.folded) == 2
    assert losses < EXACT and weights < EXACT


@pytest.mark.slow
def test_a_tied_model_with_dropout_trains_as_with_layer_norm(
    gpt2: Any, gpt2_plan: Plan, ids: list[torch.Tensor]
) -> None:
    """The embedding is tied to the head, so its mean is subtracted by an explicit operation."""
    assert gpt2.config.attn_pdrop == 0.1 and len(gpt2_plan.subtractions) == 1
    losses, weights, plan = differences(gpt2, language_loss, ids, "AdamW", 1.0, plan=gpt2_plan)
    assert len(plan.folded) == 5
    assert losses < EXACT and weights < EXACT


@pytest.mark.slow
def test_convolutions_and_raw_parameters_are_centred() -> None:
    model = live("ViTForImageClassification", transformers.ViTConfig(**VIT))
    given = calls(model)[0]["pixel_values"]

    def loss(one: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(one(pixel_values=x).logits, torch.tensor([0, 1]))

    losses, weights, plan = differences(model, loss, [given, -given], "SGD")
    centred = {writer.parameter.rpartition(".")[2] for writer in plan.centred_weights}
    assert {"cls_token", "position_embeddings", "weight", "bias"} <= centred
    assert any("projection" in writer.parameter for writer in plan.centred_weights)
    assert losses < EXACT and weights < EXACT


def test_norms_compute_rms_norm_in_training_mode(
    mlp: Mlp, mlp_plan: Plan, xs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(mlp)
    reparametrize(model, mlp_plan)
    monkeypatch.setattr(nn.LayerNorm, "forward", None)
    for mode in (True, False):
        model.train(mode)
        square_loss(model, xs[0]).backward()
        assert type(model.norm) is RMSNorm and not model.norm.shifted
    gradient = model.first.parametrizations.weight.original.grad
    assert gradient.abs().max() > 1e-3
    assert gradient.sum(0).abs().max() < 1e-12 * gradient.abs().max()


def test_a_copy_can_be_merged_without_the_original(
    mlp: Mlp, mlp_plan: Plan, xs: list[torch.Tensor]
) -> None:
    model = copy.deepcopy(mlp)
    reparametrize(model, mlp_plan)
    other = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = model(xs[0])
    merge(other)
    assert not any(map(parametrize.is_parametrized, other.modules()))
    for one in (model, other.eval()):
        assert float((one(xs[0]) - before).detach().abs().max()) < 1e-12
    merge(model)


@pytest.mark.slow
def test_a_compiled_step_is_the_same(mlp: Mlp, mlp_plan: Plan, xs: list[torch.Tensor]) -> None:
    losses = []
    for backend in ("", "aot_eager"):
        model = copy.deepcopy(mlp)
        reparametrize(model, mlp_plan)
        called: Any = torch.compile(model, backend=backend) if backend else model
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        losses.append(train(called, square_loss, xs, optimizer))
        assert not model.norm.shifted
    assert losses[0] == pytest.approx(losses[1], rel=EXACT)


def test_gradient_checkpointing_computes_the_same(
    gpt2: Any, gpt2_plan: Plan, ids: list[torch.Tensor]
) -> None:
    losses = []
    for checkpointing in (False, True):
        model = copy.deepcopy(gpt2)
        reparametrize(model, gpt2_plan)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": True})
        losses.append(train(model, language_loss, ids, OPTIMIZERS["SGD"](model.parameters())))
    assert losses[0] == pytest.approx(losses[1], rel=EXACT)


def test_merging_leaves_an_ordinary_folded_model(
    gpt2: Any, gpt2_plan: Plan, ids: list[torch.Tensor]
) -> None:
    model = copy.deepcopy(gpt2)
    before = dict(model.named_parameters())
    reparametrize(model, gpt2_plan)
    assert model.transformer.wte.weight is model.lm_head.weight
    train(model, language_loss, ids, OPTIMIZERS["SGD"](model.parameters()))
    model.eval()
    trained = outputs(model, calls(model)[1])
    assert merge(model) is model
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(one is before[name] for name, one in model.named_parameters())
    assert not any(map(parametrize.is_parametrized, model.modules()))
    assert not any(norm.shifted for norm in model.modules() if isinstance(norm, Folded))
    for one, other in zip(trained, outputs(model, calls(model)[1]), strict=True):
        assert float((one - other).abs().max()) < 1e-12
    weight = model.transformer.h[0].mlp.c_proj.weight
    assert float(weight.detach().mean(1).abs().max()) < 1e-15
    with pytest.raises(EnjoyLNError, match="has no centred parametrisation"):
        merge(model)


def test_the_optimizer_goes_on_across_both_changes(
    gpt2: Any, gpt2_plan: Plan, ids: list[torch.Tensor]
) -> None:
    plain, changing = copy.deepcopy(gpt2), copy.deepcopy(gpt2)
    losses = []
    for model in (plain, changing):
        optimizer, found = OPTIMIZERS["AdamW"](model.parameters()), []
        for change in (None, reparametrize, merge, reparametrize):
            if model is changing and change is not None:
                change(model, *([gpt2_plan] if change is reparametrize else []))
            found += train(model, language_loss, ids, optimizer)
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


class Shared(nn.Module):
    """Two tables that share one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(7, 9), nn.Embedding(7, 9)
        self.two.weight = self.one.weight
        self.norm, self.head = nn.LayerNorm(9), nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.one(x) + 2 * self.two(x + 1)))


def test_tied_weights_stay_one_parameter() -> None:
    model = moved(Shared())
    batches = [torch.tensor([[0, 1, 5], [2, 2, 4]]), torch.tensor([[3, 1, 5], [0, 2, 4]])]
    losses, weights, _ = differences(
        model, square_loss, batches * 2, "Adam with coupled L2", example=batches[0]
    )
    assert losses < EXACT and weights < EXACT
    reparametrize(model, example=batches[0])
    assert len(list(model.parameters())) == 5
    merge(model)
    assert model.one.weight is model.two.weight


class Fused(nn.Module):
    """Normed queries and keys out of a fused projection, whose values are not normed."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm, self.out = nn.Linear(6, 36), nn.LayerNorm(4), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:-1], 3, 3, 4).unbind(-3)
        q, k, v = (one.transpose(-2, -3) for one in (self.norm(q), self.norm(k), v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 * self.training)
        return self.out(y.transpose(-2, -3).flatten(-2))


def test_blocks_of_a_fused_projection_are_centred() -> None:
    torch.manual_seed(5)
    batches = [torch.randn(2, 5, 6, dtype=torch.float64) for _ in range(3)]
    losses, weights, plan = differences(
        moved(Fused()), square_loss, batches, "AdamW", example=batches[0]
    )
    assert len(plan.folded) == 1
    assert {writer.axis.size for writer in plan.centred_weights} == {4}
    assert losses < EXACT and weights < EXACT


@pytest.mark.parametrize("functional", [False, True])
def test_a_norm_behind_a_dropout_stays_layer_norm(xs: list[torch.Tensor], functional: bool) -> None:
    losses, weights, plan = differences(
        moved(Mlp(0.4, functional)), square_loss, xs, "SGD", example=xs[0]
    )
    assert [verdict.norm for verdict in plan.folded] == ["norm"]
    (kept,) = plan.kept
    assert "dropout in training mode" in kept.reason
    assert kept.culprit == ("dropout" if functional else "drop")
    assert losses < EXACT and weights < EXACT


class DropsPaths(Mlp):
    """Stochastic depth: all features of a row are dropped together."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if self.training:
            y = y / 0.6 * (0.6 + torch.rand(x.shape[0], 1, dtype=x.dtype)).floor()
        return self.head(self.norm2(self.second(F.silu(self.norm(y + self.position)))))


class Masks(Mlp):
    """Dropout that is written out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) + self.position
        if self.training:
            y = y * torch.bernoulli(torch.full_like(y, 0.5))
        return self.head(self.norm2(self.second(F.silu(self.norm(y)))))


class ReadsWhileTraining(Mlp):
    """A head that reads the input of a norm in training mode only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) + self.position
        z = self.head(self.norm2(self.second(F.silu(self.norm(y)))))
        return z + self.head(y) if self.training else z


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        (DropsPaths, ""),
        (Masks, "an elementwise product"),
        (ReadsWhileTraining, "a weight that produces its input is also read by a layer"),
    ],
)
def test_code_of_training_mode_is_seen(xs: list[torch.Tensor], kind: type[Mlp], kept: str) -> None:
    losses, weights, plan = differences(moved(kind()), square_loss, xs, "SGD", example=xs[0])
    assert [verdict.norm for verdict in plan.kept] == ["norm"] * bool(kept)
    assert all(verdict.reason.startswith(kept) for verdict in plan.kept)
    assert losses < EXACT and weights < EXACT


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda drop: setattr(drop, "p", 0.4), "drop.p: drops out 0.4, but the proof is for 0.0"),
        (lambda drop: drop.eval(), "drop: is in eval mode"),
    ],
)
def test_another_dropout_makes_the_norms_compute_layer_norm(
    xs: list[torch.Tensor], mlp: Mlp, mlp_plan: Plan, change: Any, words: str
) -> None:
    """A dropout of rate zero is no obstacle."""
    assert len(mlp_plan.folded) == 2 and not mlp_plan.subtractions
    model = copy.deepcopy(mlp)
    reparametrize(model, mlp_plan)
    model.train()
    change(model.drop)
    with pytest.warns(UserWarning, match=words):
        model(xs[0])
    assert model.norm.shifted


@pytest.mark.slow
def test_what_cannot_be_parametrised_is_refused(xs: list[torch.Tensor], mlp_plan: Plan) -> None:
    model = moved(Mlp(0.4))
    plan = analyze(model, xs[0]).plan
    with pytest.raises(UnsupportedModel, match="proven for eval mode only"):
        reparametrize(model, plan)
    with pytest.raises(UnsupportedModel, match="drop.p: drops out 0.4, but the proof is for 0.0"):
        reparametrize(model, mlp_plan)
    fold_in_memory(model, plan)
    with pytest.raises(UnsupportedModel, match="computes RMSNorm already"):
        reparametrize(model, example=xs[0])
    behind = nn.Sequential(nn.Linear(5, 9), nn.Dropout(), nn.LayerNorm(9)).double()
    before = copy.deepcopy(behind.state_dict())
    with pytest.raises(NothingToFold, match="2: dropout in training mode .* \\(1\\)"):
        reparametrize(behind, example=xs[0])
    assert before.keys() == behind.state_dict().keys()
    with pytest.raises(UnsupportedModel, match="sparse=False"):
        sparse = nn.Sequential(nn.Embedding(5, 9, sparse=True), nn.LayerNorm(9))
        reparametrize(sparse, example=torch.tensor([1, 2]))


def test_a_norm_that_differs_in_training_mode_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8) + 0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x - x.mean(-1, keepdim=True)
            y = self.weight * y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
            return 1.5 * y if self.training else y

    model = nn.Sequential(nn.Linear(5, 8), Scaled(), nn.Linear(8, 3))
    with pytest.raises(UnsupportedModel, match="1: Scaled computes something else in training"):
        reparametrize(model, example=torch.randn(2, 5))


def test_a_model_that_skips_layers_at_random_is_refused() -> None:
    class Skipping(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and torch.rand([]) < 0.5:
                return self.head(self.norm(self.first(x) + self.position))
            return super().forward(x)

    with pytest.raises(UnsupportedModel, match="random"):
        reparametrize(Skipping(), example=torch.randn(2, 5))


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
