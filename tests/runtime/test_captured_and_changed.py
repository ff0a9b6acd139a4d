"""Weights that change around an export, a compiler or a transform of ``torch.func``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from eight_models import far, given, pair, replace_dropout, source
from live_models import computed_rms
from torch.func import functional_call, grad, vmap

from enjoyln_cli import refold
from enjoyln_cli.runtime.call_guards import call_guards
from enjoyln_cli.runtime.loading import plan_of
from enjoyln_cli.runtime.modules import Folded
from enjoyln_cli.runtime.scope import thread


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def inputs(name: str) -> dict[str, Any]:
    return {**given(name), "use_cache": False}


def run(model: Any, name: str) -> Any:
    with torch.no_grad():
        return model(**copy.deepcopy(inputs(name))).logits


def load_in_place(model: Any, state: Any) -> None:
    model.load_state_dict(state)


def assign(model: Any, state: Any) -> None:
    model.load_state_dict(state, assign=True)


def replace_dropouts(model: Any, state: Any) -> None:
    replace_dropout(model)


def write_to_one(model: Any, state: Any) -> None:
    name = model.config.enjoyln["plan"]["centred_weights"][-1]["parameter"]
    with torch.no_grad():
        model.get_parameter(name).copy_(state[name])


def rms_norms_in_an_export(model: Any, name: str, expected: torch.Tensor) -> int:
    """How many there are; asserts that the exported program computes what is expected."""
    program = torch.export.export(model, (), inputs(name), strict=False)
    assert far(program.module()(**inputs(name)).logits, expected) < 1e-9
    return [str(node.target) for node in program.graph.nodes].count("aten.rms_norm.default")


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("name", "change", "called"),
    [("gpt2", load_in_place, False), ("whisper", write_to_one, True)],
)
def test_an_export_has_rms_norms_while_the_weights_are_centred(
    eight: Path, name: str, change: Callable[[Any, Any], None], called: bool
) -> None:
    """Weights that changed, or of a copy, are exported as LayerNorm until a call or ``refold``."""
    model, stock = pair(name, eight)
    if called:
        model = copy.deepcopy(model)
        assert rms_norms_in_an_export(model, name, run(stock, name)) == 0
        run(model, name)
    folded = len(plan_of(model).folded)
    assert rms_norms_in_an_export(model, name, run(stock, name)) == folded
    for one in (model, stock):
        change(one, source(name).state_dict())
    expected = run(stock, name)
    assert rms_norms_in_an_export(model, name, expected) == 0
    assert rms_norms_in_an_export(refold(model), name, expected) == folded


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("name", "change", "how"),
    [
        ("gpt2", load_in_place, "function"),
        ("phi", assign, "method"),
        ("gpt2", replace_dropouts, "function"),
        ("phi", write_to_one, "around"),
    ],
)
def test_a_compiled_model_looks_at_its_weights(
    eight: Path, name: str, change: Callable[[Any, Any], None], how: str
) -> None:
    """Code ``around`` a call is compiled with it and cannot look again: it computes LayerNorm."""
    model, stock = pair(name, eight)
    compiled: Any = model
    if how == "method":
        model.compile(backend="eager")
    elif how == "function":
        compiled = torch.compile(model, backend="eager")
    else:
        compiled = torch.compile(lambda **kw: model(**kw), backend="eager", fullgraph=True)
    assert far(run(compiled, name), run(stock, name)) < 1e-9
    norms = [m for m in model.modules() if isinstance(m, Folded)]
    assert how == "around" or not any(norm.shifted for norm in norms)
    for one in (model, stock):
        change(one, source(name).state_dict())
    assert far(run(compiled, name), run(stock, name)) < 1e-9
    assert how == "around" or all(norm.shifted for norm in norms)
    assert thread.running.guard is None


@pytest.mark.parametrize("change", [assign, write_to_one])
def test_a_copy_that_is_made_in_inference_mode(
    eight: Path, change: Callable[[Any, Any], None]
) -> None:
    model, stock = pair("phi", eight)
    with torch.inference_mode():
        other, plain = copy.deepcopy(model), copy.deepcopy(stock)
        assert far(run(other, "phi"), run(plain, "phi")) < 1e-9
        for one in (other, plain):
            change(one, source("phi").state_dict())
        assert far(run(other, "phi"), run(plain, "phi")) < 1e-9
    assert any(computed_rms(model, lambda: run(model, "phi")))


class Logits(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def test_a_trace_of_torch_jit(eight: Path) -> None:
    model, stock = pair("phi", eight)
    ids = given("phi")["input_ids"]
    traced = torch.jit.trace(Logits(model), (ids,), check_trace=False)
    for one in (model, stock):
        load_in_place(one, source("phi").state_dict())
    with torch.no_grad():
        assert far(traced(ids), Logits(stock)(ids)) < 1e-9


def gradients(call: Any, model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    call(**inputs("gpt2")).logits.square().mean().backward()
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
def test_gradients_in_eval_mode_are_as_in_the_stock_class(eight: Path) -> None:
    model, stock = pair("gpt2", eight)
    expected = gradients(stock, stock)
    for call in (model, torch.compile(model, backend="aot_eager")):
        found = gradients(call, model)
        assert found.keys() == expected.keys()
        assert max(far(found[key], expected[key]) for key in expected) < 1e-9


class Own(torch.optim.Optimizer):
    """Of another library: writes where torch does not count."""

    def __init__(self, parameters: Any, lr: float, fused: bool) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(group["lr"] * parameter.grad.sign())


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "Adagrad": torch.optim.Adagrad,
    "SGD": torch.optim.SGD,
    "compiled": torch.optim.AdamW,
    "own": Own,
}


@pytest.mark.one_case
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_that_torch_does_not_count(eight: Path, kind: str) -> None:
    """In eval mode, where nothing else says that weights may change.

    Gradients have zero mean, so SGD leaves weights centred.
    """
    (model, stock), (other, _) = pair("phi", eight), pair("phi", eight)
    run(model, "phi"), run(other, "phi")
    looks = [guard.check.snapshot for _, guard in call_guards(other)]
    weight = model.model.layers[0].mlp.fc2.weight
    version = weight._version
    for one in (model, stock):
        optimizer = OPTIMIZERS[kind](one.parameters(), lr=0.1, fused=True)  # type: ignore[operator]
        step = optimizer.step
        step = torch.compile(step, backend="eager") if kind == "compiled" else step
        for _ in range(2):
            one(**inputs("phi")).logits.square().mean().backward()
            step()
    centred = kind == "SGD"
    assert weight._version == version and bool(weight.mean(0).abs().max() < 1e-9) == centred
    assert far(run(model, "phi"), run(stock, "phi")) < 1e-9
    assert any(computed_rms(model, lambda: run(model, "phi"))) == centred
    assert [guard.check.snapshot for _, guard in call_guards(other)] == looks, "it was not stepped"
    assert all(computed_rms(refold(model), lambda: run(model, "phi")))
    assert far(run(model, "phi"), run(stock, "phi")) < 1e-9


def test_transforms_of_torch_func_over_inputs_and_weights(eight: Path) -> None:
    model, stock = pair("phi", eight)
    run(model, "phi")

    def loss(weights: Any, one: Any) -> torch.Tensor:
        return functional_call(one, weights, (), inputs("phi")).logits.square().mean()

    weights = {key: value.detach() for key, value in stock.named_parameters()}
    found, expected = (grad(loss)(weights, one) for one in (model, stock))
    assert max(far(found[key], expected[key]) for key in expected) < 1e-9
    ids = torch.randint(3, 41, (3, 2, 6))
    with torch.no_grad():
        found, expected = (vmap(Logits(one))(ids) for one in (model, stock))
    assert far(found, expected) < 1e-9
    other = dict(source("phi").named_parameters())
    both = {key: torch.stack([weights[key], other[key].detach()]) for key in weights}
    with torch.no_grad():
        found, expected = (
            vmap(lambda weights, one=one: loss(weights, one), randomness="same")(both)
            for one in (model, stock)
        )
        assert far(found, expected) < 1e-9
        for state in (weights, other):
            assert far(loss(state, model), loss(state, stock)) < 1e-9
    assert any(computed_rms(model, lambda: run(model, "phi")))
