"""Parts of a folded model that are called directly compute the same as in the stock class."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from eight_models import calls_inside, far, given, pair, run, source
from live_models import computed_rms, install, moved, shaken
from rounding import as_exact
from torch import nn
from torch.utils import checkpoint
from transformers.models.cohere.modeling_cohere import CohereLayerNorm

from enjoyln_cli.runtime.call_guards import guard_of
from enjoyln_cli.runtime.loading import plan_of
from enjoyln_cli.runtime.modules import Folded
from enjoyln_cli.runtime.scope import thread


def same_everywhere(model: Any, stock: Any, name: str) -> None:
    """Call every module directly, with its inputs in the whole model and with shifted inputs."""
    for path, (args, kwargs) in calls_inside(stock, given(name)).items():
        for shift in (0.0, 3.0):
            moved = [
                a + shift if isinstance(a, torch.Tensor) and a.is_floating_point() else a
                for a in args
            ]
            outputs = []
            for one in (model, stock):
                with torch.no_grad():
                    outputs.append(one.get_submodule(path)(*moved, **copy.deepcopy(kwargs)))
            assert far(*outputs) < 1e-9, (path, shift)


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["clip", "whisper", "bloom"])
def test_every_module_by_itself(eight: Path, name: str) -> None:
    """Also when the weights change before the whole model, which would check them, is called."""
    model, stock = pair(name, eight)
    assert sum(isinstance(m, Folded) for m in model.modules()) >= 2
    same_everywhere(model, stock, name)
    assert far(run(model, given(name)), run(stock, given(name))) < 1e-9
    model, stock = pair(name, eight)
    for one in (model, stock):
        torch.manual_seed(3)
        shaken(one)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same_everywhere(model, stock, name)


@pytest.mark.parametrize("kind", ["image", "text"])
def test_features_of_a_tower(eight: Path, kind: str) -> None:
    model, stock = pair("clip", eight)
    key = "pixel_values" if kind == "image" else "input_ids"
    inputs = {key: given("clip")[key]}
    for load in (False, True):
        if load:
            for one in (model, stock):
                one.load_state_dict(source("clip").state_dict())
        with torch.no_grad():
            found, expected = (
                getattr(one, f"get_{kind}_features")(**inputs) for one in (model, stock)
            )
        assert far(found, expected) < 1e-9


@pytest.mark.parametrize("name", ["opt", "whisper"])
def test_a_decoder_that_is_given_embeddings(eight: Path, name: str) -> None:
    model, stock = pair(name, eight)
    inputs: dict[str, Any] = {"inputs_embeds": torch.randn(2, 5, 16).double() + 3}
    if name == "whisper":
        inputs["encoder_hidden_states"] = torch.randn(2, 9, 16).double() + 1
    for load in (False, True):
        if load:
            for one in (model, stock):
                one.load_state_dict(source(name).state_dict(), strict=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert far(*(run(one.get_decoder(), inputs) for one in (model, stock))) < 1e-9


def test_known_parts_compute_rms_norm(eight: Path) -> None:
    for name, part in (("gpt2", "transformer"), ("whisper", "model.encoder")):
        model, _ = pair(name, eight)
        names = ("input_ids", "input_features")
        inputs = {key: value for key, value in given(name).items() if key in names}
        inner = model.get_submodule(part)
        assert {*computed_rms(inner, lambda: run(inner, inputs))} == {True}  # noqa: B023


@pytest.mark.slow
def test_a_compiled_call_computes_rms_norm(eight: Path) -> None:
    """BERT keeps some of its norms."""
    torch._dynamo.reset()
    name = "bert"
    model, stock = pair(name, eight)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert far(run(compiled, given(name)), run(stock, given(name))) < 1e-9
    called = [node.target for node in graphs[0].graph.nodes]
    kept = len(plan_of(model).kept)
    assert sum(target is nn.functional.layer_norm for target in called) <= kept
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in (model, stock):
            torch.manual_seed(2)
            one.train()
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter += 0.1 * torch.randn_like(parameter)
            one.eval()
        assert far(run(compiled, given(name)), run(stock, given(name))) < 1e-9
    assert model.training is False and len(graphs) == 2


def test_a_block_that_is_copied_or_shared_belongs_to_no_call(eight: Path) -> None:
    model, stock = pair("phi", eight)
    other = source("phi")
    other.model.layers[0] = model.model.layers[0]
    plain = copy.deepcopy(other)
    plain.model.layers[0] = stock.model.layers[0]
    assert far(run(other, given("phi")), run(plain, given("phi"))) < 1e-9
    other.model.layers[0] = copy.deepcopy(model.model.layers[0])
    assert far(run(other, given("phi")), run(plain, given("phi"))) < 1e-9


def test_a_call_inside_of_another_models_call(eight: Path) -> None:
    """A hook in one folded model calls blocks of another folded model, and the whole of it."""
    model, stock = pair("phi", eight)
    second, plain = pair("gpt2", eight)
    x = torch.randn(2, 6, 16).double() + 3
    found = []
    for one, two in ((model, second), (stock, plain)):

        def within(norm: Any, args: Any, output: Any, two: Any = two) -> None:
            found.append((two.transformer.h[0](x), two(**given("gpt2")), two.transformer.h[1](x)))

        handle = one.model.layers[0].input_layernorm.register_forward_hook(within)
        found.append(run(one, given("phi")))
        handle.remove()
    assert far(found[0], found[2]) < 1e-9 and far(found[1], found[3]) < 1e-9


class Checkpointed(nn.Module):
    """Checkpoints the block with its two norms: the backward pass computes the block again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 16), nn.Linear(16, 16)
        self.norms = nn.ModuleList([CohereLayerNorm(16), nn.LayerNorm(16)])
        self.reentrant = reentrant

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.norms[1](x + self.second(self.norms[0](x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return checkpoint.checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_a_backward_pass_computes_again(reentrant: bool) -> None:
    """The second forward runs outside of the call, and must record the same operations."""
    stock = moved(Checkpointed(reentrant)).float()
    with torch.no_grad():
        for layer in (stock.first, stock.second):
            layer.weight -= layer.weight.mean(0)
            layer.bias -= layer.bias.mean()
    model = install(copy.deepcopy(stock), ["norms.0", "norms.1"], [])
    exact = copy.deepcopy(stock)
    exact.norms[0] = nn.LayerNorm(16, bias=False)  # Cohere's own computes in float32
    exact.norms[0].load_state_dict(stock.norms[0].state_dict())
    x, gradients = torch.randn(3, 5), []
    for one, inputs in ((model, x), (stock, x), (exact.double(), x.double())):
        one(inputs.requires_grad_()).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in one.parameters()]))
    assert as_exact(*gradients)


def test_a_call_that_is_interrupted(eight: Path) -> None:
    model, stock = pair("phi", eight)
    stop = model.model.layers[1].input_layernorm

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = stop.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        run(model, given("phi"))
    handle.remove()
    with torch.no_grad():
        for one in (model, stock):
            one.model.layers[0].mlp.fc2.bias += 1.0
    with pytest.warns(UserWarning, match="computing LayerNorm"):
        assert far(run(model.model, given("phi")), run(stock.model, given("phi"))) < 1e-9
    assert thread.running.guard is None and thread.running.proven is None


def test_a_call_inside_another_call_belongs_to_the_outermost(eight: Path) -> None:
    model, _ = pair("whisper", eight)
    encoder, seen = model.model.encoder, []
    encoder.layer_norm.register_forward_hook(lambda *_: seen.append(thread.running.guard))
    run(model, given("whisper"))
    run(model.model, given("whisper"))
    run(encoder, {"input_features": given("whisper")["input_features"]})
    assert seen == [guard_of(called) for called in (model, model.model, encoder)]
