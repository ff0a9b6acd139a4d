"""Models whose streams and values were rotated compute the same, in their stock classes."""

from __future__ import annotations

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

from enjoyln_cli.analysis.analyze import analyze_config, analyze_module
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
SEPARATE = {
    "d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 33,
    "decoder_ffn_dim": 33, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "max_position_embeddings": 31, "vocab_size": 37, "scale_embedding": True,
}  # fmt: skip
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
        "parameter of a linear layer after it is also read by embedding (--untie separates tied "
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
