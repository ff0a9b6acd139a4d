"""Weights and biases of folded norms, fused into the linear layers that read them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from folding_live import Computing
from live_models import moved
from tiny_models import BERT, GPT2, PHI, TOKENS, calls, converted, error, live
from torch import nn
from torch.nn import functional as F
from transformers import CONFIG_MAPPING

from enjoyln_cli.analysis.analyze import analyze_config, analyze_module
from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.rewrite.in_memory import centre_parameters

AFFINE, BIAS = Options(merge="affine"), Options(merge="bias")
NO_BIAS = "a linear layer that reads it has no bias to fuse its bias into"
ALSO_READ = (
    "a parameter of a linear layer after it is also read by {} (--untie separates tied weights)"
)


# Live models with random weights and biases, so that nothing passes by chance.

FALCON = {
    **TOKENS, "num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 24, "bias": True,
}  # fmt: skip
MODELS = [
    ("gpt2", {**GPT2, "tie_word_embeddings": False}, "GPT2LMHeadModel", 4, {NO_BIAS}),
    ("phi", PHI, "PhiForCausalLM", 3, set()),
    ("falcon", FALCON, "FalconForCausalLM", 2, {NO_BIAS}),
    ("bert", BERT, "BertModel", 0, {"its result is read by add, which is not a linear layer"}),
]


ALONE: dict[str, set[str]] = {"gpt2": set(), "falcon": {ALSO_READ.format("embedding")}}
"""The reasons with ``AFFINE``, where they differ: Falcon's head is tied."""


@pytest.mark.one_case
@pytest.mark.parametrize("options", [AFFINE, BIAS], ids=["affine", "bias"])
@pytest.mark.parametrize(("kind", "settings", "name", "fused", "reasons"), MODELS)
def test_the_function_stays_the_same(
    kind: str, settings: dict[str, Any], name: str, fused: int, reasons: set[str], options: Options
) -> None:
    config = CONFIG_MAPPING[kind](**settings)
    plan = analyze_config(config, model_class=name, options=options).plan
    if options == AFFINE:  # a layer without a bias takes the weight alone
        reasons = ALONE.get(kind, reasons)
    assert {one.reason for one in plan.unfused} == reasons
    assert len(plan.fused) == (fused if reasons else len(plan.folded))
    assert len(plan.fused) + len(plan.unfused) == len(plan.folded)
    original = live(name, config)
    folded = converted(original, plan)
    for given in calls(original):
        assert error(folded, original, given) <= 1e-12, sorted(given)
    for one in plan.fused:
        norm, before = folded.get_submodule(one.norm), original.get_submodule(one.norm)
        assert before.bias.any() and (bool(one.divided) or not norm.bias.any())
        weight = norm.weight if options == AFFINE else norm.weight / before.weight
        assert torch.equal(weight, torch.ones_like(weight))


def test_the_base_model_returns_what_its_last_norm_gives() -> None:
    plan = analyze_config(CONFIG_MAPPING["phi"](**PHI), options=AFFINE).plan
    assert {one.norm: one.reason for one in plan.unfused} == {
        "final_layernorm": "the model returns its result"
    }


def test_an_untied_weight_takes_the_weight_of_a_biasless_norm() -> None:
    settings = {**TOKENS, "n_layers": 1, "n_heads": 4, "d_model": 24}
    tied = CONFIG_MAPPING["mpt"](**settings)
    plan = analyze_config(tied, model_class="MptForCausalLM", options=AFFINE).plan
    assert [(one.norm, one.reason, one.culprit) for one in plan.unfused] == [
        ("transformer.norm_f", ALSO_READ.format("embedding"), "transformer.wte.weight")
    ]
    assert not analyze_config(tied, model_class="MptForCausalLM", options=BIAS).plan.unfused
    untied = CONFIG_MAPPING["mpt"](**settings, tie_word_embeddings=False)
    plan = analyze_config(untied, model_class="MptForCausalLM", options=AFFINE).plan
    assert [one.norm for one in plan.fused][-1] == "transformer.norm_f" and not plan.unfused
    original = live("MptForCausalLM", untied)
    assert max(error(converted(original, plan), original, g) for g in calls(original)) <= 1e-12


# One norm, and what reads it.

D = 12


class Gained(nn.Module):
    """LayerNorm that multiplies by ``1 + weight``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.zeros(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (D,), 1 + self.weight, self.bias, 1e-5)


Read = Callable[[Any, torch.Tensor], Any]


def tiny(read: Read, norm: nn.Module | None = None) -> Any:
    """A layer before a norm, the norm, and ``read`` applied to its result."""
    layers: dict[str, Any] = {name: nn.Linear(D, 9) for name in ("up", "gate", "other")}
    layers |= {"before": nn.Linear(7, D), "down": nn.Linear(9, D), "heads": nn.Linear(D, D)}
    layers |= {"bare": nn.Linear(D, 9, bias=False), "again": nn.LayerNorm(D)}
    layers["conv"] = transformers.pytorch_utils.Conv1D(9, D)
    more = {"matrix": nn.Parameter(torch.zeros(D, 9)), "added": nn.Parameter(torch.zeros(9))}
    layers["norm"] = norm or nn.LayerNorm(D)
    return moved(Computing(lambda m, x: read(m, m.norm(m.before(x))), **layers, **more))


def rows(seed: int = 3) -> torch.Tensor:
    return torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(seed)).double()


READ: dict[str, Read] = {
    "one layer": lambda m, y: m.up(y),
    "a gated MLP": lambda m, y: m.up(y) * F.silu(m.gate(y)),
    "a product and a sum": lambda m, y: y @ m.matrix + m.added,
    "a layer by a sum": lambda m, y: m.bare(y) + m.added,
    "the mean of the tokens": lambda m, y: m.up(y.mean(1)),
    "channels first and back": lambda m, y: m.up(y.transpose(1, 2).contiguous().permute(0, 2, 1)),
    "a pool over channels first": lambda m, y: m.up(
        F.adaptive_avg_pool1d(y.transpose(1, 2), 1).flatten(1)
    ),
    "a layer that is called twice": lambda m, y: m.up(y) + m.up(y.roll(1, 1)),
    "its shape": lambda m, y: m.up(y) + torch.zeros_like(y).sum(-1, keepdim=True),
}


KINDS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.LayerNorm(D),
    "1 + weight": Gained,
}


@pytest.mark.parametrize(
    ("read", "norm"),
    [(read, "plain") for read in READ]
    + [(read, "1 + weight") for read in ("one layer", "a product and a sum")],
)
def test_a_reader_that_a_norm_fuses_into(read: str, norm: str) -> None:
    """What the gain is computed from does not depend on how the reader is reached."""
    model = tiny(READ[read], KINDS[norm]())
    found = analyze_module(model, rows())
    for options in (AFFINE, BIAS):
        plan = found.under(options).plan
        assert [one.norm for one in plan.fused] == ["norm"], plan.unfused
        folded = converted(model, plan)
        assert not folded.norm.bias.any()
        if options == AFFINE:
            gain = folded.norm.weight + isinstance(model.norm, Gained)
            assert torch.equal(gain, torch.ones_like(gain))
        torch.testing.assert_close(folded(rows(4)), model(rows(4)), rtol=1e-12, atol=1e-12)


NO_LINEAR = "its result is read by {}, which is not a linear layer"
REFUSED: dict[str, tuple[Read, str, str]] = {
    "a residual": (lambda m, y: y + m.down(m.up(y)), NO_LINEAR.format("add"), ""),
    "the caller": (lambda m, y: (m.up(y), y), "the model returns its result", ""),
    "another norm": (lambda m, y: m.up(m.again(y)), NO_LINEAR.format("layer_norm"), "again"),
    "some of the features": (lambda m, y: m.down(y[..., :9]), NO_LINEAR.format("slice"), ""),
    "a product of it with itself": (
        lambda m, y: m.up(y).sum() + y @ y.transpose(1, 2), NO_LINEAR.format("matmul"), "",
    ),
    "a layer that reads something else, too": (
        lambda m, y: m.up(y) + m.up(m.down(m.heads.weight[:5, :9])), ALSO_READ.format("linear"),
        "up.weight",
    ),
    "a weight that is looked up": (
        lambda m, y: m.up(y) + F.embedding(torch.tensor([0]), m.up.weight).sum(),
        ALSO_READ.format("embedding"),
        "up.weight",
    ),
    "somebody who reads its weight": (
        lambda m, y: m.up(y) + m.norm.weight[:9], "its parameters are also read by slice",
        "norm.weight",
    ),
    "nobody": (lambda m, y: m.up(torch.zeros_like(y)), "no traced call reads its result", "norm"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_reader_that_a_norm_cannot_fuse_into(case: str) -> None:
    read, reason, culprit = REFUSED[case]
    model = tiny(read)
    plan = analyze_module(model, rows(), options=AFFINE).plan
    assert not plan.fused and "norm" in {verdict.norm for verdict in plan.folded}
    found = {one.norm: (one.reason, one.culprit) for one in plan.unfused}["norm"]
    assert found[0] == reason and (not culprit or found[1] == culprit), found


KEEPS_ITS_BIAS: dict[str, tuple[Read, str, str]] = {
    "a mask": (lambda m, y: m.up(y * torch.tensor([[[0.0]], [[1]]])), NO_LINEAR.format("mul"), ""),
    "a sum of the tokens": (lambda m, y: m.up(y.sum(1)), NO_LINEAR.format("sum"), ""),
    "a layer without a bias": (lambda m, y: m.up(y) + m.bare(y), NO_BIAS, "bare.weight"),
    "two layers with one bias": (
        lambda m, y: m.gate(y) + F.linear(y, m.bare.weight, m.gate.bias),
        "linear layers that read it share a parameter",
        "gate.bias",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "norm"),
    [*((case, "plain") for case in KEEPS_ITS_BIAS), ("a layer without a bias", "1 + weight")],
)
def test_a_reader_that_takes_the_weight_alone(case: str, norm: str) -> None:
    read, reason, culprit = KEEPS_ITS_BIAS[case]
    model = tiny(read, KINDS[norm]())
    found = analyze_module(model, rows())
    (kept,) = found.under(BIAS).plan.unfused
    assert kept.reason == reason and (not culprit or kept.culprit == culprit)
    plan = found.under(AFFINE).plan
    assert [(one.norm, one.bias, one.divided) for one in plan.fused] == [("norm", "", "norm.bias")]
    folded, offset = converted(model, plan), float(isinstance(model.norm, Gained))
    assert torch.equal(folded.norm.weight, torch.full_like(folded.norm.weight, 1 - offset))
    torch.testing.assert_close(folded.norm.bias, model.norm.bias / (model.norm.weight + offset))
    torch.testing.assert_close(folded(rows(4)), model(rows(4)), rtol=1e-12, atol=1e-12)


# One weight for several layers, as in the attentions of torch.


class Packed(nn.Module):
    """Two norms, and layers that share a weight of 20 outputs and a bias."""

    def __init__(self, read: Callable[[Packed, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.read = read
        self.before, self.beside = nn.Linear(7, D), nn.Linear(7, D)
        self.norm, self.other = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attend = nn.MultiheadAttention(D, 3, batch_first=True)
        self.weight, self.bias = nn.Parameter(torch.zeros(20, D)), nn.Parameter(torch.zeros(20))
        self.matrix, self.probe = nn.Parameter(torch.zeros(D, 20)), nn.Parameter(torch.zeros(2, D))

    def forward(self, x: torch.Tensor) -> Any:
        return self.read(self, self.norm(self.before(x)), self.other(self.beside(x)))

    def by(self, x: torch.Tensor, first: int, stop: int | None = None) -> torch.Tensor:
        """The outputs from ``first`` to ``stop`` of the layer that the parameters are."""
        return F.linear(x, self.weight[first:stop], self.bias[first:stop])

    def probed(self) -> torch.Tensor:
        return self.probe.expand(2, -1, -1)


PACKED: dict[str, tuple[Callable[[Packed, torch.Tensor, torch.Tensor], Any], list[str]]] = {
    "keys and values": (lambda m, y, z: m.attend(m.probed(), y, y)[0], ["norm"]),
    "values alone": (lambda m, y, z: m.attend(m.probed(), m.probed(), y[:, :2])[0], ["norm"]),
    "two norms": (lambda m, y, z: m.attend(y, z, z)[0], ["norm", "other"]),
    "one norm in three parts": (lambda m, y, z: m.attend(y, y.flip(1), y.roll(1, 1))[0], ["norm"]),
    "slices": (lambda m, y, z: m.by(y, 3, 9).tanh() + m.by(z, 14), ["norm", "other"]),
    "a slice beside what no norm writes": (
        lambda m, y, z: m.by(y, 0, 6) + m.by(m.probe[0], 6, 12), ["norm"],
    ),
    "columns": (
        lambda m, y, z: torch.addmm(m.bias[2:9], y.flatten(0, 1), m.matrix[:, 2:9]), ["norm"],
    ),
    "one slice in two calls": (lambda m, y, z: m.by(y, 2, 9) + m.by(y.flip(1), 2, 9), ["norm"]),
}  # fmt: skip


@pytest.mark.parametrize("case", PACKED)
def test_a_norm_fuses_into_the_outputs_that_read_it(case: str) -> None:
    read, fused = PACKED[case]
    model = moved(Packed(read))
    found = analyze_module(model, rows())
    for options in (AFFINE, BIAS, Options(fold=False, rotate=True)):
        plan = found.under(options).plan
        assert [one.norm for one in plan.fused] == fused or options.rotate, plan.unfused
        converted_model = converted(model, plan)
        torch.testing.assert_close(converted_model(rows(4)), model(rows(4)), rtol=0, atol=1e-11)
        for norm in fused if options == AFFINE else ():
            weight = converted_model.get_submodule(norm).weight
            assert torch.equal(weight, torch.ones_like(weight))


NOT_APART: dict[str, tuple[Callable[[Packed, torch.Tensor, torch.Tensor], Any], str]] = {
    "outputs that another value reads": (
        lambda m, y, z: m.by(y, 0, 9).sum(-1) + m.by(z, 8).sum(-1), ALSO_READ.format("slice"),
    ),
    "outputs in two slices": (
        lambda m, y, z: m.by(y, 0, 9).sum(-1) + m.by(y, 8).sum(-1),
        "linear layers that read it share a parameter",
    ),
    "the whole weight": (
        lambda m, y, z: m.by(y, 0, 9).sum(-1) + m.by(z, 0).sum(-1), ALSO_READ.format("slice"),
    ),
    "every second output": (
        lambda m, y, z: F.linear(y, m.weight[::2], m.bias[::2]),
        "its result is read by linear, whose weight or bias is computed",
    ),
    "biases of other outputs": (
        lambda m, y, z: F.linear(y, m.weight[:6], m.bias[6:12]),
        "its result is read by linear, whose weight or bias is computed",
    ),
    "a part of the inputs": (
        lambda m, y, z: m.by(y, 0, 9) + F.linear(m.probe[0, :9], m.weight[:9, :9]),
        ALSO_READ.format("slice"),
    ),
    "a slice that is also read as it is": (
        lambda m, y, z: (lambda w: F.linear(y, w, m.bias[:9]) + w.sum())(m.weight[:9]),
        "its result is read by linear, whose weight is also read by sum",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_APART)
def test_outputs_that_are_not_apart_keep_the_norm(case: str) -> None:
    read, reason = NOT_APART[case]
    model = moved(Packed(read))
    found = analyze_module(model, rows())
    plan = found.under(BIAS).plan
    assert {one.norm: one.reason for one in plan.unfused}["norm"] == reason
    plan = found.under(AFFINE).plan
    torch.testing.assert_close(converted(model, plan)(rows(4)), model(rows(4)), rtol=0, atol=1e-11)


def test_a_weight_with_a_zero_cannot_divide_the_bias() -> None:
    model = tiny(lambda m, y: m.up(y) + m.bare(y))
    with torch.no_grad():
        model.norm.weight[3] = 0
    (kept,) = analyze_module(model, rows(), options=AFFINE).plan.unfused
    reason = "its weight has a zero or is too small: its bias divided by it has no finite value"
    assert (kept.norm, kept.reason, kept.culprit) == ("norm", reason, "norm.weight")


def test_two_norms_of_one_weight_keep_it() -> None:
    model = tiny(lambda m, y: m.up(y) + m.gate(m.again(m.down(m.other(y)))))
    free = analyze_module(model, rows(), options=AFFINE).plan
    assert {one.norm for one in free.fused} == {"norm", "again"}
    model.again.weight = model.norm.weight
    plan = analyze_module(model, rows(), options=AFFINE).plan
    assert not plan.fused
    reason = "its parameters are tied, or stored in another layout"
    assert {(one.norm, one.reason) for one in plan.unfused} == {
        ("norm", reason),
        ("again", reason),
    }


def test_two_readers_of_one_weight_take_nothing() -> None:
    model = tiny(lambda m, y: m.up(y) + m.gate(y))
    model.gate.weight = model.up.weight
    (kept,) = analyze_module(model, rows(), options=AFFINE).plan.unfused
    assert (kept.norm, kept.culprit) == ("norm", "up.weight")
    assert kept.reason == (
        "a linear layer that reads it has a tied or differently stored parameter"
    )


def test_a_norm_that_stays_keeps_all() -> None:
    plan = analyze_module(
        tiny(lambda m, y: m.up(m.again(torch.exp(y)))), rows(), options=AFFINE
    ).plan
    assert "again" in {verdict.norm for verdict in plan.kept}
    assert "again" not in {one.norm for one in (*plan.fused, *plan.unfused)}


def test_another_model_is_left_alone() -> None:
    model = tiny(READ["one layer"])
    plan = analyze_module(model, rows(), options=AFFINE).plan
    for width, said in (
        (7, "up.weight: there is no such tensor, but the plan needs it"),
        (6, r"before.weight: shape \[12, 6\] before the edit, but the plan has \[12, 7\]"),
    ):
        other = nn.ModuleDict({"before": nn.Linear(width, D), "norm": nn.LayerNorm(D)}).double()
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(BadCheckpoint, match=said):
            centre_parameters(other, plan)
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_the_proof_says_where_things_go() -> None:
    model = tiny(lambda m, y: (m.up(y), m.conv(y)))
    found = analyze_module(model, rows(), options=AFFINE).why("norm")
    last = found.children[-1]
    assert last.text == "its weight and bias can be fused: all its readers are linear layers"
    assert [child.text for child in last.children] == ["up.weight", "conv.weight"]
    model = tiny(lambda m, y: m.bare(y))
    last = analyze_module(model, rows(), options=BIAS).why("norm").children[-1]
    assert last.text == f"nothing is fused: {NO_BIAS} (bare.weight)" and not last.zero_mean
    assert "fused" not in str(analyze_module(model, rows()).why("norm"))
