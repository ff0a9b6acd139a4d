"""Norms after ``--merge``: weights of ones and zero biases stay stored, and are not read."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from live_models import CHECKPOINTS, folded_norms
from rounding import IDS, TIMES, logits, lost_by, relative
from torch import nn
from transformers import AutoModelForCausalLM

from enjoyln_cli import from_pretrained
from enjoyln_cli.runtime.loading import plan_of
from enjoyln_cli.runtime.modules import Folded, RMSNorm
from enjoyln_cli.runtime.scope import FoldedModelState, thread

NEW = 0.7


@pytest.fixture
def fused(outs: dict[str, Path]) -> dict[str, Path]:
    """Checkpoints whose norms lost their biases, or their biases and weights."""
    return {how: outs[f"phi merge {how}"] for how in ("bias", "affine")}


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return relative(a, b) <= TIMES * lost_by(CHECKPOINTS / "phi")


def poison(model: nn.Module, how: str) -> None:
    """Write NaN into parameters that must not be read, without a change of torch's counter."""
    for name in ("bias",) if how == "bias" else ("bias", "weight"):
        for norm in folded_norms(model):
            if getattr(norm, f"{name}less"):
                getattr(norm, name).data.fill_(torch.nan)


def shift(model: nn.Module, name: str = "bias") -> dict[str, torch.Tensor]:
    """A state dict in which the parameter ``name`` of fused norms is no longer neutral."""
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for path, module in model.named_modules():
        if isinstance(module, Folded):
            state[f"{path}.{name}"] += NEW
    return state


def flagged(model: Any, flag: str) -> list[str]:
    """The paths of the norms whose ``flag`` (``weightless`` or ``biasless``) is set."""
    named = model.named_modules()
    return [path for path, norm in named if isinstance(norm, Folded) and getattr(norm, flag)]


def fused_norms(model: Any, name: str) -> list[str]:
    """The norms that the marker lists as fused; asserts that they are not all norms."""
    names = [one.norm for one in plan_of(model).fused if getattr(one, name)]
    assert 3 < len(names) < len(folded_norms(model)) or not names
    return sorted(names)


@pytest.mark.parametrize("how", ["bias", "affine"])
def test_neutral_parameters_are_not_read(fused: dict[str, Path], how: str) -> None:
    stock = AutoModelForCausalLM.from_pretrained(fused[how]).eval()
    names, expected = list(stock.state_dict()), logits(stock)
    model = from_pretrained(fused[how])
    logits(model)
    assert sorted(flagged(model, "biasless")) == fused_norms(model, "bias")
    assert sorted(flagged(model, "weightless")) == fused_norms(model, "weight")
    assert bool(flagged(model, "weightless")) == (how == "affine")
    assert list(model.state_dict()) == names
    poison(model, how)
    assert close(logits(model), expected)


def test_a_weight_of_ones_that_no_fusion_has_left_is_not_read(fused: dict[str, Path]) -> None:
    """Until it changes."""
    model, first = from_pretrained(fused["bias"]), "model.layers.0.input_layernorm"
    with torch.no_grad():
        for norm in folded_norms(model):
            norm.weight.fill_(1.0)
        model.get_submodule(first).weight[3] = 1 + NEW
    expected = logits(model)
    assert len(flagged(model, "weightless")) == len(folded_norms(model)) - 1
    assert first not in flagged(model, "weightless")
    for norm in folded_norms(model):
        if norm.weightless:
            norm.weight.data.fill_(torch.nan)
    assert close(logits(model), expected)
    with torch.no_grad():
        for norm in folded_norms(model):
            norm.weight.fill_(2.0)
    changed = logits(model)
    assert changed.isfinite().all() and not close(changed, expected)
    assert not flagged(model, "weightless")


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("load", "bias"),
        ("assign", "weight"),
        ("copy", "bias"),
        ("pickle", "bias"),
        ("data", "bias"),
    ],
)
def test_other_values_are_read_again(fused: dict[str, Path], how: str, name: str) -> None:
    """Loaded into the model or into a copy, or put into other storage."""
    model = from_pretrained(fused["affine"])
    stock = AutoModelForCausalLM.from_pretrained(fused["affine"]).eval()
    before = logits(model)
    copied = {"copy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}
    model = copied.get(how, lambda m: m)(model)
    state = shift(model, name)
    stock.load_state_dict(state)
    if how == "data":
        for key, parameter in model.named_parameters():
            parameter.data = state[key]
    else:
        model.load_state_dict(state, assign=how == "assign")
    after = logits(model)
    assert close(after, logits(stock)) and not close(after, before)
    assert not flagged(model, f"{name}less")


def test_a_gradient_of_a_neutral_parameter(fused: dict[str, Path]) -> None:
    stock = AutoModelForCausalLM.from_pretrained(fused["affine"]).eval()
    model = from_pretrained(fused["affine"])
    logits(model)
    found = []
    for one in (model, stock):
        one(input_ids=IDS).logits.square().mean().backward()
        found.append(one.model.layers[0].input_layernorm)
    for name in ("weight", "bias"):
        grads = [getattr(norm, name).grad for norm in found]
        assert grads[0].abs().max() > 0 and close(*grads)


def test_a_part_that_is_called_alone_reads_them(fused: dict[str, Path]) -> None:
    model = from_pretrained(fused["bias"])
    logits(model)
    norm = model.model.final_layernorm
    with torch.no_grad():
        norm.bias += NEW
        x = torch.randn(2, norm.normalized_shape[0])
        expected = nn.functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
        assert close(norm(x), expected)


def placeholders_that_are_used(program: Any) -> set[str]:
    inputs = program.graph_signature.inputs_to_parameters
    used = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    return {target for name, target in inputs.items() if name in used}


def test_an_export_reads_them_only_when_they_changed(fused: dict[str, Path]) -> None:
    model = from_pretrained(fused["affine"])
    names = {f"{path}.{name}" for name in ("bias", "weight") for path in fused_norms(model, name)}
    for changed in (False, True):
        if changed:
            model.load_state_dict(shift(model))
        expected = logits(model)
        given = {"input_ids": IDS, "use_cache": False}
        program = torch.export.export(model, (), given, strict=False)
        read = names & placeholders_that_are_used(program)
        assert bool(read) == changed
        assert close(program.module()(**given).logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize("around", [False, True], ids=["the model", "code around it"])
def test_compiled(fused: dict[str, Path], around: bool) -> None:
    """Code around a call that was compiled with it does not check parameters, so it reads them."""
    torch._dynamo.reset()
    model = from_pretrained(fused["affine"])
    stock = AutoModelForCausalLM.from_pretrained(fused["affine"]).eval()
    called: Any = (lambda **given: model(**given)) if around else model
    compiled = torch.compile(called, backend="eager")
    assert close(logits(compiled), logits(stock))
    if not around:
        poison(model, "affine")
        assert close(logits(compiled), logits(stock))
    state = shift(stock)
    model.load_state_dict(state)
    stock.load_state_dict(state)
    assert close(logits(compiled), logits(stock))


@pytest.mark.slow
@pytest.mark.parametrize(("eps", "opset"), [(1e-12, 23), (1e-5, 24)])
def test_one_operation_of_onnx_with_any_eps(eps: float, opset: int, tmp_path: Path) -> None:
    onnx, onnxruntime = map(pytest.importorskip, ("onnx", "onnxruntime"))
    pytest.importorskip("onnxscript")
    norm = RMSNorm(16, eps=eps).eval()
    x = torch.randn(4, 16)
    x = 1e-6 * (x - x.mean(-1, keepdim=True))
    x[0] = 0
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.bias.normal_()
        expected = nn.functional.layer_norm(x, (16,), norm.weight, norm.bias, eps)
        norm._enjoyln_state = thread.running.proven = FoldedModelState()
        try:
            torch.onnx.export(norm, (x,), tmp_path / "n.onnx", opset_version=opset, verbose=False)
        finally:
            thread.running.proven = None
    graph = onnx.load(tmp_path / "n.onnx").graph
    assert sorted(node.op_type for node in graph.node) == ["Add", "RMSNormalization"]
    session = onnxruntime.InferenceSession(tmp_path / "n.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert close(torch.from_numpy(found), expected)
