"""Which values of a model can be rotated, and that rotating them changes no output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from folding_live import Computing
from live_models import moved
from tiny_models import BERT, GPT2, TOKENS, VIT, WHISPER, live, main_call, rotated
from torch import nn
from torch.nn import functional as F
from transformers import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from enjoyln_cli.analysis.analyze import analyze_calls, analyze_config, analyze_module
from enjoyln_cli.calls.calls import Call
from enjoyln_cli.comparison.run import choose_outputs, run
from enjoyln_cli.plan.cache_argument import cache_argument, returned_cache
from enjoyln_cli.plan.fold_options import Options

ROTATED = Options(fold=False, rotate=True)

LLAMA = {
    **TOKENS, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 24, "intermediate_size": 33, "head_dim": 6,
}  # fmt: skip
T5 = {
    "vocab_size": 37, "d_model": 24, "d_kv": 6, "num_heads": 4, "num_layers": 2, "d_ff": 33,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
SMALL = {**TOKENS, "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2}
UNTIED = {"tie_word_embeddings": False}


def config_of(kind: str, settings: dict[str, Any]) -> Any:
    config = CONFIG_MAPPING[kind](**settings)
    if "tie_word_embeddings" in settings:  # T5 ignores it in the arguments
        config.tie_word_embeddings = settings["tie_word_embeddings"]
    return config


MODELS: list[tuple[str, dict[str, Any], str, tuple[str, ...], int, int]] = [
    ("gpt2", {**GPT2, **UNTIED}, "GPT2LMHeadModel", (), 1, 2),
    ("llama", {**LLAMA, **UNTIED}, "LlamaForCausalLM", (), 1, 2),
    ("gemma", {**LLAMA, **UNTIED}, "GemmaForCausalLM", (), 1, 2),
    ("phi3", {**LLAMA, **UNTIED}, "Phi3ForCausalLM", (), 1, 2),
    ("t5", {**T5, **UNTIED}, "T5ForConditionalGeneration", ("logits",), 2, 6),
    ("bloom", {**SMALL, "n_layer": 2, "n_head": 4}, "BloomForCausalLM", (), 0, 2),
    ("falcon", {**SMALL, "bias": True, **UNTIED}, "FalconForCausalLM", (), 1, 2),
    (
        "falcon",
        {**SMALL, "num_kv_heads": 2, "new_decoder_architecture": True, **UNTIED},
        "FalconForCausalLM",
        (),
        1,
        2,
    ),
    ("whisper", WHISPER, "WhisperForConditionalGeneration", ("logits",), 1, 4),
    ("vit", VIT, "ViTForImageClassification", (), 1, 2),
    ("bert", BERT, "BertForMaskedLM", (), 0, 2),
]


def far(model: Any, original: Any, outputs: tuple[str, ...]) -> float:
    """The largest difference of any output but the cache, relative to its largest element."""
    given = [main_call(original)]
    (new,), (old,) = (choose_outputs(run(m, given), outputs) for m in (model, original))
    assert new.keys() == old.keys() and old
    return max(float((new[n] - old[n]).abs().max() / old[n].abs().max()) for n in old)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("kind", "settings", "name", "outputs", "streams", "attentions"), MODELS,
    ids=[model[0] for model in MODELS],
)  # fmt: skip
def test_the_function_stays_the_same_in_the_stock_class(
    kind: str, settings: dict[str, Any], name: str, outputs: tuple[str, ...], streams: int,
    attentions: int,
) -> None:  # fmt: skip
    config = config_of(kind, settings)
    plan = analyze_config(config, model_class=name, outputs=outputs, options=ROTATED).plan
    kinds = [group.kind for group in plan.rotated]
    assert (kinds.count("residual"), kinds.count("values")) == (streams, attentions), [
        (group.kind, group.reason, group.culprit) for group in plan.rotation_groups
    ]
    original = live(name, config)
    rotated_model = rotated(original, plan)
    assert type(rotated_model) is type(original)
    assert far(rotated_model, original, outputs) <= 1e-12
    changed = {one.parameter for group in plan.rotated for one in group.tensors}
    before, after = dict(original.named_parameters()), dict(rotated_model.named_parameters())
    for parameter in changed & before.keys():
        assert not torch.allclose(before[parameter], after[parameter]), parameter


def test_a_decoding_step_uses_the_cache_of_the_rotated_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = CONFIG_MAPPING["llama"](**LLAMA, **UNTIED)
    original = live("LlamaForCausalLM", config)
    plan = analyze_config(config, model_class="LlamaForCausalLM", options=ROTATED).plan
    rotated_model, ids = rotated(original, plan), main_call(original)["input_ids"]
    steps = []

    def in_the_dtype_of_its_input(norm: Any, x: torch.Tensor) -> torch.Tensor:
        """Llama's own computes in float32."""
        return nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", in_the_dtype_of_its_input)
    for model in (original, rotated_model):
        with torch.no_grad():
            cache = returned_cache(model(ids, use_cache=True))
            steps.append(model(ids[:, :1], **{cache_argument(model.forward): cache}).logits)
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-11, atol=1e-11)
    keys, values = cache.layers[0].keys, cache.layers[0].values
    with torch.no_grad():
        own = returned_cache(original(ids, use_cache=True)).layers[0]
    torch.testing.assert_close(keys[:, :, :7], own.keys, rtol=1e-11, atol=1e-11)
    assert not torch.allclose(values[:, :, :7], own.values, atol=1e-2)


def test_a_tied_weight_that_rotates_on_one_side_alone_is_untied() -> None:
    """ELECTRA's head reads the stream behind its GELU, which stays; the embedding rotates."""
    settings = {**TOKENS, "embedding_size": 12, "hidden_size": 24, "num_hidden_layers": 1,
                "num_attention_heads": 4, "intermediate_size": 33}  # fmt: skip
    config = CONFIG_MAPPING["electra"](**settings)
    untied = replace(ROTATED, untie=True)
    plan = analyze_config(config, model_class="ElectraForMaskedLM", options=untied).plan
    assert [one.parameter for one in plan.untied] == ["generator_lm_head.weight"]
    assert "electra.embeddings.word_embeddings.weight" in [group.name for group in plan.rotated]
    original = live("ElectraForMaskedLM", config)
    assert far(rotated(original, plan), original, ()) <= 1e-12
    tied = analyze_config(config, model_class="ElectraForMaskedLM", options=ROTATED).plan
    assert "electra.embeddings.word_embeddings.weight" not in [one.name for one in tied.rotated]


def test_a_tied_head_rotates_with_its_embedding() -> None:
    """MPT ties the head; its norms have no bias, and a weight that the head cannot take."""
    settings = {**TOKENS, "n_layers": 1, "n_heads": 4, "d_model": 24}
    tied = CONFIG_MAPPING["mpt"](**settings)
    plan = analyze_config(tied, model_class="MptForCausalLM", options=ROTATED).plan
    (kept,) = [group for group in plan.rotation_groups if group.reason]
    assert (kept.kind, kept.culprit) == ("residual", "transformer.norm_f")
    assert kept.reason == (
        "the weight of a norm acts on single features, and cannot be fused into linear layers: a "
        "linear layer after it shares a parameter with another layer (--untie separates tied "
        "weights)"
    )

    def run(m: Any, ids: torch.Tensor) -> torch.Tensor:
        x = m.table(ids)
        x = x + m.down(F.gelu(m.up(m.norm(x))))
        return m.head(F.layer_norm(x, (12,)))  # without weight

    table, head = nn.Embedding(6, 12), nn.Linear(12, 6, bias=False)
    head.weight = table.weight
    parts = {"norm": nn.LayerNorm(12), "up": nn.Linear(12, 9), "down": nn.Linear(9, 12)}
    model = moved(Computing(run, table=table, head=head, **parts))
    plan = analyze_module(model, torch.tensor([[1, 2, 4]]), options=ROTATED).plan
    (group,) = plan.rotated
    rotated_model = rotated(model, plan)
    assert rotated_model.head.weight is rotated_model.table.weight
    ids = torch.tensor([[0, 3, 5, 5]])
    torch.testing.assert_close(rotated_model(ids), model(ids), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(rotated_model.table.weight, model.table.weight)


# One stream, and what may happen in it.

D = 12


class Stream(nn.Module):
    """A residual stream with one block, and ``inside`` applied to it before the last norm."""

    def __init__(self, inside: Callable[[Stream, torch.Tensor], Any]) -> None:
        super().__init__()
        self.inside = inside
        self.enter, self.norm, self.last = nn.Linear(7, D), nn.LayerNorm(D), nn.LayerNorm(D)
        self.up, self.down, self.head = nn.Linear(D, 9), nn.Linear(9, D), nn.Linear(D, 5)
        self.scale, self.part = nn.Parameter(torch.ones(D)), nn.LayerNorm(D // 2)
        self.other, self.half = nn.Linear(7, D), nn.Linear(7, D // 2)
        self.grouped = nn.Conv1d(D, D, 3, padding=1, groups=3)
        self.mixing = nn.Conv1d(D, D, 3, padding=1)
        self.router, self.experts = nn.Linear(D, 3), nn.Parameter(torch.zeros(3, D, D))
        self.rms = nn.RMSNorm(D)
        self.lora, self.wide, self.back = nn.Linear(D, D), nn.Linear(D, 9), nn.Linear(9, D)
        self.first, self.both, self.pair = nn.LayerNorm(D), nn.LayerNorm(2 * D), nn.Linear(2 * D, D)
        self.rest, self.more, self.cut = nn.Linear(D, 6), nn.LayerNorm(D + 6), nn.Linear(D + 6, D)
        for name, persistent in (("stored", True), ("fixed", False)):
            values = torch.arange(24.0).view(2, D).sin()
            self.register_buffer(name, values, persistent=persistent)
        moved(self)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.enter(x)
        h = h + self.down(F.relu(self.up(self.norm(h))))
        h = self.inside(self, h)
        if isinstance(h, tuple):
            return self.head(self.last(h[0])), h[1]
        return self.head(self.last(h))


def in_one(h: torch.Tensor) -> torch.Tensor:
    """Both tokens side by side, as one token."""
    return h.reshape(2, 1, 2 * D)


def by_feature(h: torch.Tensor) -> torch.Tensor:
    """Both tokens feature by feature, as one token."""
    return h.mT.reshape(2, 1, 2 * D)


def class_and_mean(h: torch.Tensor) -> torch.Tensor:
    return torch.cat([h[:, :1], h.mean(1, keepdim=True)], -1)


def rope(h: torch.Tensor) -> torch.Tensor:
    first, second = h.chunk(2, -1)
    return torch.cat([-second, first], -1)


TURNS: dict[str, Callable[[Stream, torch.Tensor], Any]] = {
    "nothing": lambda m, h: h,
    "other tokens": lambda m, h: h + h.roll(1, 1) * 0.5,
    "an LayerScale before the sum": lambda m, h: h + m.scale * m.back(F.relu(m.wide(h))),
    "a scaled layer from the stream to itself": lambda m, h: h + m.scale * m.lora(h),
    "a convolution over channels": lambda m, h: h + m.mixing(h.mT).mT,
    "an RMSNorm": lambda m, h: h + m.down(F.relu(m.wide(m.rms(h)))),
    "a LayerNorm by hand": lambda m, h: h + m.down(m.wide(by_hand(h))),
    "a router and its experts": lambda m, h: h + routed(m, h),
    "a mask over tokens": lambda m, h: h.masked_fill(torch.tensor([[[False], [True]]]), 0),
    "attention over tokens": lambda m, h: (
        h + F.scaled_dot_product_attention(m.wide(h), m.wide(h), h)
    ),
    "tokens in one": lambda m, h: h + m.pair(in_one(h)),
    "a norm, then tokens in one, by feature": lambda m, h: h + m.pair(by_feature(m.first(h))),
    "a norm over tokens in one": lambda m, h: h + m.pair(m.both(in_one(h))),
    "a norm by hand over tokens in one": lambda m, h: h + m.pair(by_hand(in_one(h))),
    "a norm, then a token beside the mean": lambda m, h: h + m.pair(class_and_mean(m.first(h))),
    "tokens in one, in part": lambda m, h: h + m.pair(torch.cat([h[:, :1], h[:, 1:]], -1)[:, -1:]),
    "an adapter": lambda m, h: h + m.back(m.wide(h)) + m.lora(h),
    "positions in the checkpoint": lambda m, h: h + m.stored,
}
STAYS: dict[str, tuple[Callable[[Stream, torch.Tensor], Any], str]] = {
    "an activation": (lambda m, h: F.gelu(h), "gelu acts on single features"),
    "a rotary embedding": (
        lambda m, h: h * 0.5 + rope(h), "chunk acts on single features"
    ),
    "a grouped convolution": (lambda m, h: h + m.grouped(h.mT).mT, "a grouped convolution"),
    "a scale on the stream": (lambda m, h: m.scale * h, "a vector multiplies it"),
    "a norm over a part": (
        lambda m, h: h + torch.cat([m.part(h[..., :6]), h[..., 6:]], -1), "acts on single features"
    ),
    "single features": (lambda m, h: h + h[..., :1], "acts on single features"),
    "the caller": (lambda m, h: (h, h), "the model returns it"),
    "a constant": (lambda m, h: h + torch.arange(12.0), "it is an input or a constant"),
    "positions in the code": (
        lambda m, h: h + m.fixed, "it is a constant that the checkpoint does not store"
    ),
    "a norm that is added": (
        lambda m, h: h + m.norm(h), "its result is read by add, which is not a linear layer"
    ),
    "a norm beside the stream": (
        lambda m, h: h + m.pair(torch.cat([m.first(h), h], -1)), "also reads other features"
    ),
    "a norm over other features, too": (
        lambda m, h: h + m.cut(m.more(torch.cat([h, m.rest(h)], -1))), "other elements"
    ),
    "some features replaced": (
        lambda m, h: h + torch.slice_scatter(h, m.rest(h), 2, 6), "written to a part"
    ),
}  # fmt: skip


def by_hand(h: torch.Tensor) -> torch.Tensor:
    centred = h - h.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def routed(m: Stream, h: torch.Tensor) -> torch.Tensor:
    shares = m.router(h).softmax(-1)
    return torch.einsum("bte,btd,edf->btf", shares, h, m.experts)


def rows(seed: int = 3) -> torch.Tensor:
    return torch.randn(2, 2, 7, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("case", TURNS)
def test_a_stream_that_rotates(case: str) -> None:
    model = Stream(TURNS[case])
    plan = analyze_module(model, rows(), options=ROTATED).plan
    assert not [
        group.reason for group in plan.rotation_groups if group.kind == "residual" and group.reason
    ]
    rotated_model = rotated(model, plan)
    assert not torch.allclose(rotated_model.enter.weight, model.enter.weight)
    torch.testing.assert_close(rotated_model(rows(4)), model(rows(4)), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", STAYS)
def test_a_stream_that_stays(case: str) -> None:
    inside, reason = STAYS[case]
    model = Stream(inside)
    plan = analyze_module(model, rows(), options=ROTATED).plan
    kept = next(group for group in plan.rotation_groups if group.name == "enter.weight")
    assert reason in kept.reason, kept
    rotated_model = rotated(model, plan)
    torch.testing.assert_close(rotated_model(rows(4)), model(rows(4)), rtol=1e-11, atol=1e-11)


def test_an_input_that_a_norm_reads_stays() -> None:
    model = moved(nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 3)))
    (kept,) = analyze_module(model, rows(), options=ROTATED).plan.rotation_groups
    assert (kept.reason, kept.culprit) == ("it is an input of the model", "input")


def test_a_weight_that_is_read_twice_stays() -> None:
    model = Stream(lambda m, h: h + m.down(m.up(m.norm(h))) * m.norm.weight.sum())
    plan = analyze_module(model, rows(), options=ROTATED).plan
    (kept,) = plan.rotation_groups
    assert kept.reason == "the parameters of a norm are also used elsewhere"
    assert kept.culprit == "norm.weight"


def test_a_zero_in_a_weight_keeps_the_bias_from_being_divided() -> None:
    model = Stream(TURNS["nothing"])
    with torch.no_grad():
        model.last.weight[2] = 0
    plan = analyze_module(model, rows(), options=ROTATED).plan
    assert {one.norm: one.divided for one in plan.fused} == {"norm": "norm.bias", "last": ""}
    torch.testing.assert_close(rotated(model, plan)(rows(4)), model(rows(4)), rtol=0, atol=1e-11)
    model.head.bias = None
    (kept,) = analyze_module(model, rows(), options=ROTATED).plan.rotation_groups
    assert kept.culprit == "last" and "has a zero" in kept.reason


@pytest.mark.parametrize("joined", [in_one, by_feature, class_and_mean])
def test_a_bias_that_cannot_be_divided_moves_into_each_group(
    joined: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model = Stream(lambda m, h: h + m.pair(joined(m.first(h))))
    with torch.no_grad():
        model.first.weight[2] = 0
    plan = analyze_module(model, rows(), options=ROTATED).plan
    (fusion,) = [one for one in plan.fused if one.norm == "first"]
    assert fusion.bias == "first.bias" and not fusion.divided
    torch.testing.assert_close(rotated(model, plan)(rows(4)), model(rows(4)), rtol=0, atol=1e-11)


class ListedHeads(nn.Module):
    """An attention whose values are some heads of a projection, by a list of their numbers.

    An activation reads the other heads, so only the listed heads can rotate.
    """

    def __init__(self, heads: list[int]) -> None:
        super().__init__()
        self.heads = heads
        self.others = {0, 1, 2, 3, 4} - {head % 5 for head in heads}
        self.project, self.queries = nn.Linear(7, 5 * 6), nn.Linear(7, 6)
        self.out = nn.Linear(6 * len(heads), 5)
        moved(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).view(2, 2, 5, 6)
        values, asked = heads[:, :, self.heads], self.queries(x).unsqueeze(1)
        mixed = F.scaled_dot_product_attention(asked, asked, values.transpose(1, 2))
        read: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return read + sum(F.gelu(heads[:, :, at]).sum(-1, keepdim=True) for at in self.others)


@pytest.mark.parametrize("heads", [[-1], [3, 4], [0, 2, 4], [-3, -2], [4, 0], [-1, 0], [0, 1, 3]])
def test_values_are_heads_by_their_numbers(heads: list[int]) -> None:
    model = ListedHeads(heads)
    plan = analyze_module(model, rows(), options=ROTATED).plan
    torch.testing.assert_close(rotated(model, plan)(rows(4)), model(rows(4)), rtol=0, atol=1e-11)
    listed = [group.reason for group in plan.rotation_groups]
    if heads in ([4, 0], [-1, 0], [0, 1, 3]):  # no slice takes these
        assert listed == ["gelu acts on single features, so it does not commute with a rotation"]
        return
    assert listed == [""]
    (written,) = [one.axis for one in plan.rotated[0].tensors if one.parameter == "project.weight"]
    assert [(written.start + (written.step or 6) * at) // 6 for at in range(written.outer)] == [
        head % 5 for head in heads
    ]


SEPARATE = {
    "d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 33,
    "decoder_ffn_dim": 33, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "max_position_embeddings": 31, "vocab_size": 37, "scale_embedding": True,
}  # fmt: skip


@pytest.mark.one_case
@pytest.mark.parametrize("untied", [{}, UNTIED], ids=["untied here", "untied before"])
def test_embeddings_from_the_model_itself_are_rotated(untied: dict[str, Any]) -> None:
    """``get_input_embeddings`` gives a table that ``forward`` does not read once it is untied."""
    name = "PegasusForConditionalGeneration"
    config = CONFIG_MAPPING["pegasus"](**SEPARATE, **untied)
    options = replace(ROTATED, untie=not untied)
    plan = analyze_config(config, model_class=name, outputs=("logits",), options=options).plan
    assert [group.kind for group in plan.rotated].count("residual") == 2
    assert "decoder_inputs_embeds" in plan.unproven
    config.tie_word_embeddings = False
    original = live(name, config)
    with torch.no_grad():  # the same values in all tables, as in a model that was tied
        for model in (original.get_encoder(), original.get_decoder()):
            model.embed_tokens.weight.copy_(original.get_input_embeddings().weight)
    rotated_model = rotated(original, replace(plan, untied=(), settings=()))
    given, results = main_call(original), []
    ids = given.pop("input_ids")
    with torch.no_grad():
        for model in (original, rotated_model):
            embeds = 24**0.5 * model.get_input_embeddings().weight[ids]
            results.append(model(inputs_embeds=embeds, **given).logits)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-10)
    assert far(rotated_model, original, ("logits",)) <= 1e-12


class Heard(nn.Module):
    """Reads token ids, and features through a norm if it is given some."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.last = nn.Embedding(6, D), nn.LayerNorm(9), nn.LayerNorm(D)
        self.project, self.head = nn.Linear(9, D), nn.Linear(D, 5)
        moved(self)

    def forward(self, ids: torch.Tensor, features: torch.Tensor | None = None) -> torch.Tensor:
        h: torch.Tensor = self.table(ids)
        if features is not None:
            h = h + self.project(self.norm(features))
        out: torch.Tensor = self.head(self.last(h))
        return out


def test_an_input_that_the_model_never_computes_stays() -> None:
    """``inputs_embeds`` can come from the rotated model, ``features`` can not."""
    ids, features = torch.tensor([[1, 2, 4]]), torch.randn(1, 3, 9).double()
    calls = [
        Call("ids", (((ids,), {}),)),
        Call("features", (((ids, features), {}),), required=False),
    ]
    plan = analyze_calls(Heard(), calls, options=ROTATED).plan
    rotated_model, kept = plan.rotation_groups
    assert rotated_model.name == "table.weight" and not rotated_model.reason
    assert kept.reason == "it is an input that the model never computes"
    assert (kept.kind, kept.culprit) == ("residual", "features")


def test_an_input_that_the_model_also_computes_rotates_with_it() -> None:
    config = config_of("gpt2", {**GPT2, **UNTIED})
    plan = analyze_config(config, model_class="GPT2LMHeadModel", options=ROTATED).plan
    assert [one.inputs for one in plan.rotated if one.kind == "residual"] == [("inputs_embeds",)]


def test_without_values_only_streams_rotate() -> None:
    config = CONFIG_MAPPING["gpt2"](**GPT2, **UNTIED)
    options = Options(fold=False, rotate=True, values=False)
    plan = analyze_config(config, model_class="GPT2LMHeadModel", options=options).plan
    assert [group.kind for group in plan.rotation_groups] == ["residual"]


def test_heads_with_a_norm_of_their_own_say_why_they_stay() -> None:
    config = CONFIG_MAPPING["qwen3"](**LLAMA, **UNTIED)
    plan = analyze_config(config, model_class="Qwen3ForCausalLM", options=ROTATED).plan
    heads = [group for group in plan.rotation_groups if group.kind == "heads"]
    assert len(heads) == 4 and all(group.reason and group.size == 6 for group in heads)
    original = live("Qwen3ForCausalLM", config)
    assert far(rotated(original, plan), original, ()) <= 1e-12


def test_the_outputs_that_may_change_decide() -> None:
    config = config_of("t5", {**T5, **UNTIED})
    name, state = "T5ForConditionalGeneration", "encoder_last_hidden_state"
    plan = analyze_config(config, model_class=name, options=ROTATED).plan
    assert [b.outputs for b in plan.rotated if b.kind == "residual"] == [(state,), ()]
    outputs = ("logits", state)
    plan = analyze_config(config, model_class=name, outputs=outputs, options=ROTATED).plan
    reasons = [group.reason for group in plan.rotation_groups if group.kind == "residual"]
    assert sorted(reasons) == ["", "the model returns it"]
