"""RMSNorm and explicit centring, in place on live models."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from live_models import install, moved
from rounding import as_exact, exactly
from tiny_models import TOKENS, live
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, GPT2Model
from transformers.models.cohere.modeling_cohere import CohereLayerNorm

from enjoyln_cli import analyze
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.classes import locate
from enjoyln_cli.models.norm_modules import interference
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.plan import MeanSubtraction
from enjoyln_cli.runtime.install import fold_in_memory
from enjoyln_cli.runtime.modules import Folded, RMSNorm
from enjoyln_cli.runtime.scope import FoldedModelState

pytestmark = pytest.mark.usefixtures("seeded")
D = 32
NORMS = ["transformer.h.0.ln_1", "transformer.h.0.ln_2", "transformer.ln_f"]
WTE = MeanSubtraction("transformer.wte", "output", Axis(-1, 0, 1, D, 1), "tied to the output head")


def gpt2(cls: type = GPT2LMHeadModel) -> Any:
    config = GPT2Config(
        n_embd=D, n_layer=1, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return moved(cls(config))


def centre_writers(model: Any) -> Any:
    """Centre all weights that write to the residual stream, except the token embedding."""
    base = getattr(model, "transformer", model)
    with torch.no_grad():
        base.wpe.weight -= base.wpe.weight.mean(1, keepdim=True)
        for part in (base.h[0].attn.c_proj, base.h[0].mlp.c_proj):
            part.weight -= part.weight.mean(1, keepdim=True)
            part.bias -= part.bias.mean()
    return model


def ids() -> torch.Tensor:
    return torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(1))


def result(model: Any) -> torch.Tensor:
    """The logits, or the last hidden state of a base model."""
    return model(ids())[0]


@pytest.fixture(autouse=True)
def no_layer_norm_fallback(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Turn off the fallback to LayerNorm, which would hide an input with a mean.

    Norms compute RMSNorm where autograd records nothing.
    """
    monkeypatch.setattr(FoldedModelState, "literal", True)
    with torch.no_grad():
        yield


# The formula.


@pytest.mark.parametrize(
    ("affine", "bias", "shape"), [(True, True, (D,)), (True, False, (4, 8)), (False, False, (D,))]
)
def test_rms_norm_is_layer_norm_of_zero_mean_inputs(
    affine: bool, bias: bool, shape: tuple[int, ...]
) -> None:
    norm = moved(nn.LayerNorm(shape, elementwise_affine=affine, bias=bias))
    x = torch.randn(5, 3, *shape, dtype=torch.float64) * 7
    over = tuple(range(-len(shape), 0))
    centred = x - x.mean(over, keepdim=True)
    expected, shifted = norm(centred), norm(x)
    install(norm, [""], [])
    assert isinstance(norm, RMSNorm)
    assert torch.allclose(norm(centred), expected, rtol=1e-13, atol=1e-13)
    assert not torch.allclose(norm(x), shifted, rtol=1e-3)


# A whole model.


@pytest.mark.parametrize("cls", [GPT2LMHeadModel, GPT2Model])
def test_a_folded_gpt2_computes_the_same(cls: type) -> None:
    """With the names of the class with a head, and not without the centring of the embedding."""
    model = gpt2(cls)
    expected, names = result(model), list(model.state_dict())
    install(centre_writers(model), NORMS, [WTE], ["inputs_embeds"])
    assert sum(isinstance(m, RMSNorm) for m in model.modules()) == 3
    assert list(model.state_dict()) == names
    if cls is GPT2LMHeadModel:
        assert model.lm_head.weight is model.transformer.wte.weight
    assert torch.allclose(result(model), expected, rtol=1e-12, atol=1e-12)
    model = install(centre_writers(gpt2(cls)), NORMS, [])
    assert (result(model) - expected).norm() > 0.01 * expected.norm()


def test_installing_twice_changes_nothing() -> None:
    model = install(centre_writers(gpt2()), NORMS, [WTE], ["inputs_embeds"])
    classes = [type(m) for m in model.modules()]
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    expected = result(model)
    install(model, NORMS, [WTE], ["inputs_embeds"])
    assert [type(m) for m in model.modules()] == classes
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert torch.equal(result(model), expected)


def test_an_unproven_input_makes_the_norms_compute_layer_norm() -> None:
    model = gpt2()
    positions = torch.full((2, 9), 3)
    with torch.no_grad():
        model.transformer.wpe.weight[3] += 1.5  # this row stays uncentred: no trace reads it
        row = model.transformer.wpe.weight[3].clone()
        expected = model(ids(), position_ids=positions).logits
        centre_writers(model).transformer.wpe.weight[3] = row
        plain = copy.deepcopy(model)
        install(plain, NORMS, [WTE])
        install(model, NORMS, [WTE], unproven=["position_ids", "encoder_hidden_states"])
        wrong = plain(ids(), position_ids=positions).logits
        assert (wrong - expected).norm() > 0.01 * expected.norm()
        for given in ((ids(), {"position_ids": positions}), (ids(), {})):
            got = model(given[0], **given[1]).logits
            other = expected if given[1] else plain(ids()).logits
            assert torch.allclose(got, other, rtol=1e-11, atol=1e-11)
        base = model.transformer(ids(), None, None, None, positions).last_hidden_state
        assert torch.allclose(model.lm_head(base), expected, rtol=1e-11, atol=1e-11)
        with pytest.raises(IndexError):
            model(ids(), position_ids=positions + 99)
        assert torch.equal(model(ids()).logits, plain(ids()).logits)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(ids()).logits, plain(ids()).logits, rtol=1e-11)


def test_an_unproven_input_is_refused_where_norms_were_fused() -> None:
    """Other layers may read the fused norms in such a call, and would miss the fused affine."""
    model = centre_writers(gpt2())
    install(model, NORMS, [WTE], unproven=["position_ids"], fused=True)
    positions = torch.full((2, 9), 3)
    with pytest.raises(UnsupportedModel, match="not proven for calls with position_ids; .*fused"):
        model(ids(), position_ids=positions)
    with pytest.raises(UnsupportedModel, match="leave that input out, or fold without --merge"):
        model.transformer(ids(), None, None, None, positions)
    assert model(ids()).logits.isfinite().all()


def test_an_unproven_input_at_its_default_is_as_good_as_none() -> None:
    model = centre_writers(gpt2())
    install(model, NORMS, [WTE], unproven=["logits_to_keep"], fused=True)
    expected = model(ids()).logits
    assert torch.equal(model(ids(), logits_to_keep=0).logits, expected)
    with pytest.raises(UnsupportedModel, match="not proven for calls with logits_to_keep"):
        model(ids(), logits_to_keep=2)


# Names.


def test_names_of_the_base_class_in_the_head_class() -> None:
    names = [name.removeprefix("transformer.") for name in NORMS]
    model = install(gpt2(), names, [MeanSubtraction("wte", "output", WTE.axis, "")])
    assert isinstance(model.transformer.ln_f, RMSNorm)
    assert type(model.transformer.wte).__name__ == "CentredEmbedding"


def test_a_norm_of_a_head_is_passed_over_in_the_base_class() -> None:
    config = BertConfig(
        hidden_size=D, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    head = BertForMaskedLM(config)
    names = ("bert.embeddings.LayerNorm", "cls.predictions.transform.LayerNorm")
    assert [locate(head, name, names) for name in names] == list(names)
    assert [locate(head.bert, name, names) for name in names] == ["embeddings.LayerNorm", None]
    with pytest.raises(UnsupportedModel, match="bert.embeddings.LayerNrm"):
        locate(head.bert, "bert.embeddings.LayerNrm", names)


@pytest.mark.parametrize("name", ["transformer.h.7.ln_1", "transformer.ln_g"])
def test_a_missing_module_is_named_and_nothing_is_changed(name: str) -> None:
    model = gpt2()
    with pytest.raises(UnsupportedModel, match=name):
        install(model, [*NORMS, name], [WTE])
    assert not any(isinstance(m, Folded) for m in model.modules())


def test_a_module_that_is_no_layer_norm_is_named() -> None:
    with pytest.raises(UnsupportedModel, match=r"transformer\.h\.0\.attn\.c_proj"):
        install(gpt2(), ["transformer.h.0.attn.c_proj"], [])


# LayerNorms by other names.


def test_a_spelled_out_layer_norm() -> None:
    norm = moved(CohereLayerNorm(hidden_size=D, eps=1e-5)).float()
    x = torch.randn(3, 4, D)
    centred = x - x.mean(-1, keepdim=True)
    expected, shifted, exact = norm(centred), norm(x + 3), exactly(norm, centred)
    install(norm, [""], [])
    assert isinstance(norm, Folded) and isinstance(norm, CohereLayerNorm)
    assert as_exact(norm(centred), expected, exact)
    assert not torch.allclose(norm(x + 3), shifted, rtol=1e-3)
    again = pickle.loads(pickle.dumps(norm))
    assert torch.equal(again(x), norm(x))
    assert type(install(again, [""], [])) is type(norm)
    assert interference(again) is None, "its class is known to be one of ours"


# Explicit centring.


class Pair(nn.Module):
    """Takes its input by position or by keyword, and returns a tuple."""

    def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, float]:
        return hidden * scale, scale


class Named(nn.Module):
    """Passes its input on by keyword."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(hidden=x, scale=1.0)


@pytest.mark.parametrize("place", ["input", "output"])
def test_centring_of_a_first_input_and_of_a_tuple(place: Any) -> None:
    module = nn.Sequential(Pair()).eval()
    install(module, [], [MeanSubtraction("0", place, Axis(-1, 0, 1, D, 1), "")])
    x = torch.randn(2, 3, D, dtype=torch.float64) + 4
    named = Named(Pair()).eval()
    install(named, [], [MeanSubtraction("inner", place, Axis(-1, 0, 1, D, 1), "")])
    for output in (module(x), named(x)):
        assert output[1] == 1.0
        assert torch.allclose(output[0], x - x.mean(-1, keepdim=True), rtol=0, atol=1e-14)


def test_centring_over_groups_of_the_last_dimension() -> None:
    module = nn.Sequential(nn.Identity()).eval()
    install(module, [], [MeanSubtraction("0", "output", Axis(-1, 0, 4, 8, 1), "")])
    x = torch.randn(2, D, dtype=torch.float64)
    heads = x.view(2, 4, 8)
    assert torch.allclose(module(x).view(2, 4, 8), heads - heads.mean(-1, keepdim=True))


# A fold of a live model.


def test_query_and_key_norms_with_a_weight_for_every_head() -> None:
    """In float32, and so few features that torch's LayerNorm computes them on a CPU."""
    config = transformers.CohereConfig(
        **TOKENS, hidden_size=24, intermediate_size=33, num_hidden_layers=2, use_qk_norm=True,
        num_attention_heads=4, num_key_value_heads=2, logit_scale=1.0,
    )  # fmt: skip
    stock = live("CohereForCausalLM", config)
    assert stock.model.layers[0].self_attn.q_norm.weight.shape == (4, 6)
    narrow = copy.deepcopy(stock).float()
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(FoldedModelState, "literal", False)  # as a user's calls are
        exact, like = stock(tokens).logits, narrow(tokens).logits
        fold_in_memory(narrow, analyze(narrow).plan)
        assert not narrow.model.layers[0].self_attn.q_norm.shifted
        assert as_exact(narrow(tokens).logits, like, exact)


def test_a_live_module_notices_other_weights() -> None:
    stock = moved(nn.Sequential(nn.Linear(5, 9), nn.LayerNorm(9), nn.Linear(9, 3)))
    x = torch.randn(4, 5, dtype=torch.float64)
    net = copy.deepcopy(stock)
    fold_in_memory(net, analyze(net, x).plan)
    assert torch.allclose(net(x), stock(x), rtol=1e-12) and not net[1].shifted
    net[0].weight.copy_(stock[0].weight)
    with pytest.warns(UserWarning, match="computing LayerNorm: 0.weight: its mean is"):
        mixed = net(x)
    stock[0].bias -= stock[0].bias.mean()
    assert net[1].shifted and torch.allclose(mixed, stock(x), rtol=1e-12)
