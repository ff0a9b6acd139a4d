"""Norm modules that do more in a call than run ``forward`` once on one tensor are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from folding_live import Computing, randomised
from live_models import install
from rounding import relative
from tiny_models import converted
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2Model

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.runtime.modules import Folded

D = 11
Change = Callable[[Any], Any]


def given(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (2, 5, D), generator=torch.Generator().manual_seed(1)).double()


class Block(nn.Module):
    """A writer, a norm and a reader; ``way`` calls the norm, perhaps on other values too."""

    def __init__(self, norm: nn.Module | None = None, way: Callable[..., Any] | None = None):
        super().__init__()
        self.write, self.read = nn.Linear(D, D), nn.Linear(D, 3)
        self.norm = nn.LayerNorm(D) if norm is None else norm
        self.way = way or (lambda block, y, x: block.norm(y))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.way(self, self.write(x), x))


def error(model: nn.Module, plan: Plan, *inputs: torch.Tensor) -> float:
    """Relative error of the folded model, on inputs that the analysis did not have."""
    with torch.no_grad():
        expected, got = model(*inputs), converted(model, plan, guarded=False)(*inputs)
    return relative(got, expected)


def verdicts(model: nn.Module, *inputs: torch.Tensor) -> dict[str, str]:
    """The reason of each kept norm, ``""`` for folded norms; also checks the folded model."""
    plan = analyze_module(model, *(inputs or (given(),))).plan
    assert error(model, plan, *(inputs or (3 * given(4, 3, D) + 1,))) < 1e-12
    return {v.norm: v.reason if v.status == "stays_layernorm" else "" for v in plan.norms}


# What can come between a call of a norm and its forward.


def weighted(norm: Any) -> Any:
    """Multiplies the input of the norm by a vector that is not constant along the features."""
    scale = torch.linspace(0.5, 2, D, dtype=torch.float64)
    norm.register_forward_pre_hook(lambda module, args: (args[0] * scale,))
    return norm


def recording(norm: Any) -> Any:
    norm.register_forward_hook(lambda module, args, output: output.relu())
    return norm


def by_keywords(norm: Any) -> Any:
    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        return (args[0].exp(),), kwargs

    norm.register_forward_pre_hook(hook, with_kwargs=True)
    return norm


class Bound(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.abs()


def parametrised(norm: Any) -> Any:
    return parametrize.register_parametrization(norm, "weight", Bound())


def patched(norm: Any) -> Any:
    norm.forward = lambda x: F.layer_norm(x.exp(), (D,), norm.weight, norm.bias)
    return norm


class Calls(nn.LayerNorm):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x * torch.arange(D))


class Property(nn.LayerNorm):
    """A LayerNorm whose weight is read through a property, which ``with_property`` adds."""


def with_property() -> nn.Module:
    norm = Property(D)
    read = property(lambda module: module._parameters["weight"].abs())
    Property.weight = read  # type: ignore[assignment]
    return norm


class Positive(torch.Tensor):
    """A tensor subclass, which may compute anything."""


def compiled(norm: Any) -> Any:
    norm.compile(backend="eager")
    return norm


def weight_normed(norm: Any) -> Any:
    return nn.utils.weight_norm(norm, "weight")


def subclassed(norm: Any) -> Any:
    norm.weight = nn.Parameter(norm.weight.detach().as_subclass(Positive))
    return norm


HOOK = "a forward hook may change its input or output"


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (weighted(nn.LayerNorm(D)), HOOK),
        (recording(nn.LayerNorm(D)), HOOK),
        (by_keywords(nn.LayerNorm(D)), HOOK),
        (weighted(Calls(D)), HOOK),
        (parametrised(nn.LayerNorm(D)), "its weight is computed"),
        (with_property(), "its weight is computed"),
        (patched(nn.LayerNorm(D)), "its forward was replaced on the instance"),
        (Calls(D), "its class replaces __call__"),
        (compiled(nn.LayerNorm(D)), "it was compiled separately, by its own compile method"),
        (weight_normed(nn.LayerNorm(D)), HOOK),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_code_between_a_call_and_forward_keeps_a_norm(norm: nn.Module, reason: str) -> None:
    model = randomised(Block(norm))
    assert verdicts(model)["norm"].startswith(reason)
    with pytest.raises(UnsupportedModel, match="norm: "):
        install(model, ["norm"], [])
    assert type(model.norm) is type(norm) and not isinstance(norm, Folded)


def test_a_hook_on_every_module_keeps_all_norms() -> None:
    model = randomised(Block())
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: (args[0].exp(),) if isinstance(module, nn.LayerNorm) else None
    )
    try:
        assert verdicts(model) == {"norm": HOOK}
    finally:
        handle.remove()
    assert verdicts(model) == {"norm": ""}


@pytest.mark.parametrize("changed", [True, False])
def test_a_layer_norm_whose_class_was_patched_is_examined(
    changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.exp() if changed else x
        return F.layer_norm(x, (D,), self.weight, self.bias, self.eps)

    monkeypatch.setattr(nn.LayerNorm, "forward", forward)
    model = randomised(Block())
    plan = analyze_module(model, given()).plan
    assert [v.norm for v in plan.folded] == ([] if changed else ["norm"])
    assert error(model, plan, given(3, D)) < 1e-12
    if changed:
        with pytest.raises(UnsupportedModel, match="norm: LayerNorm does not compute LayerNorm"):
            install(model, ["norm"], [])


def test_a_module_edited_after_the_analysis_is_refused() -> None:
    model = randomised(nn.Sequential(Block(), nn.Linear(3, D), Block()))
    plan = analyze_module(model, given()).plan
    assert len(plan.folded) == 2
    edits: list[Change] = [weighted, parametrised, patched, subclassed]
    for edit in edits:
        edited = copy.deepcopy(model)
        centre_parameters(edited, plan)
        edit(edited[2].norm)
        x = given()
        expected = edited(x)
        with pytest.raises(UnsupportedModel, match=r"^2\.norm: "):
            install(edited, ["0.norm", "2.norm"], plan.subtractions)
        assert torch.equal(edited(x), expected)
        assert not any(isinstance(module, Folded) for module in edited.modules())


@pytest.mark.parametrize(
    ("home", "status"),
    [
        ("transformers.utils.output_capturing", "in_weights"),
        ("torch.utils.flop_counter", "in_weights"),
        ("transformers.models.gpt2.modeling_gpt2", "stays_layernorm"),
        ("transformers_modules.own", "stays_layernorm"),
        ("torch.utilsother", "stays_layernorm"),
    ],
)
def test_a_hook_is_trusted_by_the_module_that_defines_it(home: str, status: str) -> None:
    def hook(module: nn.Module, args: Any, output: Any) -> None: ...

    hook.__module__ = home
    model = randomised(Block())
    cast(Any, model.norm).register_forward_hook(partial(hook))
    (verdict,) = analyze_module(model, given()).plan.norms
    assert verdict.status == status


def test_hooks_that_transformers_records_with_keep_no_norm() -> None:
    config = GPT2Config(n_embd=12, n_layer=2, n_head=2, vocab_size=30, n_positions=16)
    model = randomised(GPT2Model(config))
    ids = torch.arange(6)[None]
    model.enable_input_require_grads()
    model(ids, output_hidden_states=True, output_attentions=True)
    plan = analyze_module(model, ids).plan
    assert len(plan.folded) == 5
    install(copy.deepcopy(model), [v.norm for v in plan.folded], plan.subtractions)


def test_no_operation_stands_where_a_hook_changes_the_output() -> None:
    """The operation would run before the hook, but the proof concerns the value after the hook."""

    def run(m: Any, ids: torch.Tensor) -> torch.Tensor:
        x = m.embed(ids)
        return F.linear(m.one(x).tanh() + m.two(x).exp(), m.embed.weight)

    norms = {"one": nn.LayerNorm(D), "two": nn.LayerNorm(D)}
    ids, model = torch.arange(7)[None], Computing(run, embed=nn.Embedding(7, D), **norms)
    model = randomised(model)
    plan = analyze_module(model, ids).plan
    assert [op.module for op in plan.subtractions] == ["embed"] and error(model, plan, ids) < 1e-12
    model.embed.register_forward_hook(lambda module, args, output: output.square())
    assert analyze_module(model, ids).plan.folded == ()
    with pytest.raises(UnsupportedModel, match="embed: a forward hook may change"):
        install(model, ["one", "two"], plan.subtractions)


# Ways to call a norm.


def written_and_normed(run: Callable[..., Any], **more: Any) -> Any:
    return randomised(Computing(run, write=nn.Linear(D, D), norm=nn.LayerNorm(D), **more))


class Extra(nn.LayerNorm):
    """A norm with further arguments."""

    def forward(self, x: torch.Tensor, scale: Any = None, residual: Any = None) -> torch.Tensor:
        x = x if residual is None else x + residual
        y = super().forward(x)
        return y if scale is None else y * scale


@pytest.mark.parametrize(
    ("norm", "way", "reason"),
    [
        (Extra(D), lambda b, y, x: b.norm(y, scale=x), "called with more than one tensor"),
        (Extra(D), lambda b, y, x: b.norm(y, 2.0), "called with more than one tensor"),
        (Extra(D), lambda b, y, x: b.norm(y, residual=x.exp()), "called with more than one tensor"),
        (Extra(D), lambda b, y, x: b.norm(y) + b.norm(x, residual=x.exp()), "more than one tensor"),
    ],
)
def test_a_norm_that_is_called_on_more_than_one_tensor_stays(
    norm: nn.Module, way: Callable[..., Any], reason: str
) -> None:
    assert reason in verdicts(randomised(Block(copy.deepcopy(norm), way)))["norm"]


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        (lambda b, y, x: b.norm.forward(y), ""),
        (lambda b, y, x: b.norm(y) + b.norm.forward(x.exp()), "exp does not keep a zero mean"),
    ],
)
def test_a_run_of_its_forward_is_a_call_of_a_norm(way: Callable[..., Any], reason: str) -> None:
    assert verdicts(randomised(Block(way=way))) == {"norm": reason}


def test_a_forward_that_stays_is_no_call_of_the_norm() -> None:
    """``nn.LayerNorm.forward(norm, x)`` still computes LayerNorm after the fold."""
    model = randomised(Block(way=lambda b, y, x: b.norm(y) + nn.LayerNorm.forward(b.norm, x.exp())))
    assert verdicts(model)["norm"] == ""


class Named(nn.Module):
    """A custom LayerNorm whose argument has another name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        centred = hidden_states - hidden_states.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return self.weight * centred * scale + self.bias


@pytest.mark.parametrize(
    ("norm", "name"), [(nn.LayerNorm(D), "input"), (Named(), "hidden_states"), (Extra(D), "x")]
)
def test_a_norm_that_is_called_by_keyword_folds(norm: nn.Module, name: str) -> None:
    model = randomised(Block(copy.deepcopy(norm), lambda b, y, x: b.norm(**{name: y})))
    assert verdicts(model) == {"norm": ""}


def test_a_folded_norm_accepts_the_same_arguments() -> None:
    model = randomised(Block(Extra(D)))
    changed, x = converted(model, analyze_module(model, given()).plan, False), given()
    assert isinstance(changed.norm, Folded)
    for more in ({"scale": 2.0}, {"residual": x.exp()}, {"scale": x, "residual": None}):
        assert torch.equal(changed.norm(x, **more), model.norm(x, **more))
    assert torch.equal(changed.norm(x, None, x), model.norm(x, None, x))
    with pytest.raises(TypeError):
        changed.norm()


# Norms with several names.


def two_names(both: bool) -> Any:
    """One norm with two names: only the first is called on a value that can be centred."""

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.write(x)
        return m.first(y) * m.second(2 * y if both else x.exp())

    norm = nn.LayerNorm(D)
    return randomised(Computing(run, write=nn.Linear(D, D), first=norm, second=norm))


@pytest.mark.parametrize("both", [True, False])
def test_one_norm_under_two_names_folds_if_all_calls_can(both: bool) -> None:
    found = verdicts(two_names(both))
    assert found == {"first": "" if both else "exp does not keep a zero mean"}


@pytest.mark.parametrize("last", [True, False])
def test_a_norm_of_a_block_that_stands_at_several_places(last: bool) -> None:
    """With ``last``, its last run skips ``write``: the norm reads the output of ``read``, too."""

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(m.blocks):
            x = block.read(block.norm(x)) if last and i == 2 else block(x)
        return x

    block = Block()
    block.read = nn.Linear(D, D)
    found = verdicts(randomised(Computing(run, blocks=nn.ModuleList([block] * 3))))
    assert list(found) == ["blocks.0.norm"]
    assert ("also read by" in found["blocks.0.norm"]) == last


def test_a_norm_with_a_name_that_stays_is_not_installed() -> None:
    model = two_names(True)
    with pytest.raises(UnsupportedModel, match="second: is the same module as first"):
        install(model, ["second"], [])
    assert type(model.first) is nn.LayerNorm


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_a_checkpointed_norm_folds(reentrant: bool) -> None:
    model = written_and_normed(lambda m, x: checkpoint(m.norm, m.write(x), use_reentrant=reentrant))
    assert verdicts(model) == {"norm": ""}


def test_a_norm_that_is_called_with_other_weights_stays() -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        other = {"weight": m.weight, "bias": m.norm.bias}
        return m.norm(m.write(x)) + torch.func.functional_call(m.norm, other, (x.exp(),))

    assert verdicts(written_and_normed(run, weight=nn.Parameter(torch.ones(D))))["norm"]


def test_a_model_is_left_as_it_was() -> None:
    model = randomised(Block(Named()))
    before = [(type(m), sorted(vars(m))) for m in model.modules()]
    analyze_module(model, given())
    assert [(type(m), sorted(vars(m))) for m in model.modules()] == before
