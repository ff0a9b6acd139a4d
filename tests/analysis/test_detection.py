"""The verdicts, checked on live weights: a class of each of six families computes the same.

In float64, with random γ, β and biases and weights of non-zero mean, for prefill, a decoding step
with the cache, padding, and the optional inputs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from folding_live import Computing
from tiny_models import BERT, GPT2, PHI, TOKENS, VIT, WHISPER, calls, converted, error, live
from torch import nn
from transformers import CONFIG_MAPPING

from enjoyln_cli import analyze, fold
from enjoyln_cli.analysis.analyze import analyze_calls, analyze_config
from enjoyln_cli.calls.calls import Call, ways_to_call
from enjoyln_cli.checkpoint.marker import read_marker
from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.runtime.call_guards import input_means
from enjoyln_cli.runtime.install import install

OPT = {**BERT, "ffn_dim": 33, "word_embed_proj_dim": 21}
BLOOM = {**TOKENS, "n_layer": 2, "n_head": 3, "hidden_size": 21}

CLASSES: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", GPT2, "GPT2LMHeadModel"),
    ("gpt2", GPT2, "GPT2DoubleHeadsModel"),
    ("bert", BERT, "BertForQuestionAnswering"),
    ("opt", OPT, "OPTForCausalLM"),
    ("bloom", BLOOM, "BloomModel"),
    ("phi", {**PHI, "qk_layernorm": True}, "PhiForTokenClassification"),
    ("vit", VIT, "ViTForMaskedImageModeling"),
]


@pytest.mark.one_case
@pytest.mark.parametrize(("model_type", "settings", "model_class"), CLASSES)
def test_a_class_by_itself_computes_what_it_did(
    model_type: str, settings: dict[str, Any], model_class: str
) -> None:
    config = CONFIG_MAPPING[model_type](**settings)
    plan = analyze(config, model_class=model_class).plan
    original = live(model_class, config)
    folded = converted(original, plan)
    # with an unproven input, all norms would compute LayerNorm
    assert calls(original)[0].keys().isdisjoint(plan.unproven)
    for given in calls(original):
        with input_means(folded) as seen:
            assert error(folded, original, given) <= 1e-12, sorted(given)
        # with an unproven input, LayerNorm runs, and its input need not be zero-mean
        if given.keys().isdisjoint(plan.unproven):
            assert max(seen.values(), default=0.0) <= 1e-12, sorted(given)
        assert set(seen) == {verdict.norm for verdict in plan.folded}, sorted(given)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("model_type", "settings", "saved", "others"),
    [
        ("gpt2", GPT2, "GPT2ForSequenceClassification", {"GPT2LMHeadModel", "GPT2Model"}),
        ("vit", VIT, "ViTForMaskedImageModeling", set()),
    ],
)
def test_one_fold_serves_every_class_that_loads_the_checkpoint(
    model_type: str, settings: dict[str, Any], saved: str, others: set[str], tmp_path: Path
) -> None:
    config = CONFIG_MAPPING[model_type](**settings)
    live(saved, config).save_pretrained(tmp_path / "source")
    plan = fold(tmp_path / "source", tmp_path / "out", verify=False).plan
    assert others | {saved} <= set(plan.classes)
    stored = read_marker(transformers.AutoConfig.from_pretrained(tmp_path / "out").to_dict()).plan
    for name in plan.classes:
        load = getattr(transformers, name).from_pretrained
        original, stock, folded = (
            load(tmp_path / folder, dtype=torch.float64).eval()
            for folder in ("source", "out", "out")
        )
        install(folded, stored)
        for given in calls(original):
            assert error(folded, original, given) <= 1e-12, (name, sorted(given))
            if "inputs_embeds" not in given:
                assert error(stock, original, given) <= 1e-12, (name, sorted(given))


def image_call(masked: bool) -> Call:
    given: dict[str, Any] = {"pixel_values": torch.randn(2, 3, 15, 15, dtype=torch.float64)}
    if masked:
        given["bool_masked_pos"] = torch.rand(2, 9) < 0.5
    return Call("masked" if masked else "images", (((), given),))


def test_a_parameter_that_no_call_reads_is_unproven() -> None:
    original = live("ViTForMaskedImageModeling", CONFIG_MAPPING["vit"](**VIT))
    plain, masked = calls(original)[:2]
    narrow = analyze_calls(original, [image_call(False)]).plan
    assert {"vit.embeddings.mask_token", "bool_masked_pos"} <= set(narrow.unproven)
    wrong = converted(original, narrow, guarded=False)
    assert error(wrong, original, plain) <= 1e-12
    assert error(wrong, original, masked) > 1e-3
    guarded = converted(original, narrow)
    assert max(error(guarded, original, given) for given in (plain, masked)) <= 1e-12

    both = analyze_calls(original, [image_call(False), image_call(True)]).plan
    assert "vit.embeddings.mask_token" in [writer.parameter for writer in both.centred_weights]
    right = converted(original, both)
    assert max(error(right, original, given) for given in (plain, masked)) <= 1e-12


def test_a_live_model_is_guarded_against_other_inputs() -> None:
    original = live("PhiModel", CONFIG_MAPPING["phi"](**PHI))
    plain = calls(original)[0]
    plan = analyze(original, **plain).plan
    assert "inputs_embeds" in plan.unproven and not set(plain) & set(plan.unproven)
    assert analyze(original, *plain.values()).plan.unproven == plan.unproven
    given = {"inputs_embeds": torch.randn(2, 7, 24).double() + 0.5}
    assert error(converted(original, plan), original, given) <= 1e-12
    assert error(converted(original, plan, guarded=False), original, given) > 1e-3


@pytest.mark.slow
def test_a_live_transformers_model_needs_no_example() -> None:
    original = live("PhiModel", CONFIG_MAPPING["phi"](**PHI))
    plan = analyze(original).plan
    assert plan.folded == plan.norms and "past_key_values" not in plan.unproven
    main = next(ways_to_call(original))[0]
    (first, *_) = main.steps
    for single in (
        Call("alone", ((first[0], first[1]),)),
        dataclasses.replace(main, steps=(first,)),
    ):
        assert "past_key_values" in analyze_calls(original, [single]).plan.unproven
    assert max(error(converted(original, plan), original, c) for c in calls(original)) <= 1e-12


@pytest.mark.slow
def test_a_switch_of_forward_is_proven_on_and_off() -> None:
    sizes = {"patch_size": 4, "crop_size": 8, "frames_per_clip": 4, "mlp_ratio": 2}
    encoder = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    predictor = {f"pred_{name}": value for name, value in {**encoder, "hidden_size": 26}.items()}
    config = CONFIG_MAPPING["vjepa2"](**sizes, **encoder, **predictor)
    original = live("VJEPA2Model", config)
    # fused norms cannot compute LayerNorm, so a call that is not proven would be refused
    plan = analyze_config(config, options=Options(fold=False, rotate=True)).plan
    assert plan.fused
    video = torch.randn(2, 4, 3, 8, 8, dtype=torch.float64)
    off = {"pixel_values_videos": video, "skip_predictor": True}
    result = converted(original, plan)
    assert error(result, original, off) <= 1e-12
    on = off | {"skip_predictor": False}
    target = result(**on).predictor_output.target_hidden_state
    torch.testing.assert_close(target, original(**on).predictor_output.target_hidden_state)


@pytest.mark.slow
def test_cross_attention_is_proven_with_what_an_encoder_gives() -> None:
    original = live("GPT2Model", CONFIG_MAPPING["gpt2"](**GPT2, add_cross_attention=True))
    plan = analyze(original).plan
    assert plan.folded == plan.norms and len(plan.norms) == 7
    assert not {"encoder_hidden_states", "encoder_attention_mask"} & set(plan.unproven)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    states = {"encoder_hidden_states": torch.randn(2, 5, 21).double()}
    given = {**calls(original)[0], **states, "encoder_attention_mask": mask}
    assert error(converted(original, plan), original, given) <= 1e-12


def test_an_operation_on_the_input_of_a_block() -> None:
    """The encoder's stem ends in a function, so the first block's input is centred."""
    tied = {"decoder_layers": 2, "tie_word_embeddings": True}
    config = CONFIG_MAPPING["whisper"](**{**WHISPER, **tied})
    plan = analyze(config, model_class="WhisperForConditionalGeneration").plan
    assert [(op.module, op.place) for op in plan.subtractions] == [
        ("model.encoder.layers.0", "input"),
        ("model.decoder.embed_tokens", "output"),
    ]
    assert len(plan.folded) == len(plan.norms) == 12
    original = live("WhisperForConditionalGeneration", config)
    features = torch.randn(2, 8, 40, dtype=torch.float64)
    ids = torch.randint(3, 37, (2, 7))
    heard = {"input_features": features, "decoder_input_ids": ids}
    alone = {"encoder_outputs": (torch.randn(2, 20, 24).double(),), "decoder_input_ids": ids}
    folded = converted(original, plan)
    assert error(folded, original, heard) <= 1e-12
    with input_means(folded) as seen:
        assert error(folded, original, alone) <= 1e-12
    assert seen and max(seen.values()) <= 1e-12
    assert not any(getattr(module, "shifted", False) for module in folded.modules())
    for left_out in range(2):
        ops = tuple(op for i, op in enumerate(plan.subtractions) if i != left_out)
        wrong = converted(original, dataclasses.replace(plan, subtractions=ops))
        assert error(wrong, original, heard) > 1e-3


def stemmed(reads: bool) -> Any:
    """A stem that ends in a function, and a block with two norms of its input.

    The stem's value is returned, too. With ``reads``, the block adds its input to its output.
    """

    def block(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.one(x) * m.two(x)
        return y + x if reads else y

    def run(m: Any, x: torch.Tensor) -> Any:
        h = nn.functional.gelu(m.stem(x))
        return m.blocks[0](h), h

    blocks = [Computing(block, one=nn.LayerNorm(13), two=nn.LayerNorm(13))]
    return Computing(run, stem=nn.Linear(5, 13), blocks=nn.ModuleList(blocks)).double().eval()


def test_the_input_of_a_block_is_centred_for_the_block_alone() -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    model = stemmed(reads=False)
    plan = analyze(model, x).plan
    assert [(op.module, op.place) for op in plan.subtractions] == [("blocks.0", "input")]
    assert [v.status for v in plan.norms] == ["with_subtraction", "with_subtraction"]
    expected, found = model(x), converted(model, plan)(x)
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, expected, strict=True))
    kept = analyze(stemmed(reads=True), x).plan
    assert kept.subtractions == () and kept.folded == ()
    assert {v.reason for v in kept.kept} == {"gelu does not keep a zero mean"}


def test_norms_to_keep_need_no_edits_of_their_own() -> None:
    """The projections of the queries are centred for the norms of the queries only."""
    model = live("PhiForCausalLM", CONFIG_MAPPING["phi"](**PHI, qk_layernorm=True))
    options = Options(keep_norms=("*.q_layernorm",))
    by_name: dict[str, Any] = {"keep_norms": "*.q_layernorm"}
    assert Options(**by_name) == options
    whole, plan = (analyze(model, options=chosen).plan for chosen in (Options(), options))
    kept = {verdict.norm: verdict.reason for verdict in plan.kept}
    assert kept and all(norm.endswith(".q_layernorm") for norm in kept)
    assert {*kept.values()} == {"--keep-norms names it"}
    assert {v.norm for v in whole.folded} == {v.norm for v in plan.folded} | {*kept}
    dropped = {w.parameter for w in whole.centred_weights} - {
        w.parameter for w in plan.centred_weights
    }
    assert dropped and all(".q_proj." in name for name in dropped)
    folded = converted(model, plan)
    for given in calls(model):
        assert error(folded, model, given) <= 1e-12


@pytest.mark.parametrize("pattern", ["h.q_norm", "*.Q_layernorm", ""])
def test_an_unknown_norm_to_keep_is_refused(pattern: str) -> None:
    config = CONFIG_MAPPING["phi"](**PHI, qk_layernorm=True)
    with pytest.raises(EnjoyLNError, match="no LayerNorm of the model is called"):
        analyze(config, options=Options(keep_norms=(pattern,)))
