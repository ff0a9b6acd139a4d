"""Example inputs from a signature and a config, and the calls that a proof covers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING

from enjoyln_cli.analysis.analyze import analyze_calls, analyze_config
from enjoyln_cli.calls.calls import BATCH, TOKENS, Call, input_sets, ways_to_call
from enjoyln_cli.calls.input_makers import MAKERS
from enjoyln_cli.calls.input_sets import main_inputs, optional_inputs
from enjoyln_cli.calls.input_spec import InputSpec, ones, whole_numbers
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.classes import build
from enjoyln_cli.plan.cache_argument import returned_cache
from enjoyln_cli.trace.capture import Recorder
from enjoyln_cli.trace.traced_calls import accepted_calls

of_its_version = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="this model takes other inputs in earlier versions of transformers",
)


def model_of(model_class: str, model_type: str, **settings: Any) -> Any:
    return build(getattr(transformers, model_class), CONFIG_MAPPING[model_type](**settings))


def first(model: Any) -> dict[str, InputSpec]:
    return next(main_inputs(model, 2, 7))


def test_every_kind_of_main_input() -> None:
    text = model_of("GPT2Model", "gpt2", n_layer=1, vocab_size=37)
    assert first(text) == {"input_ids": InputSpec((2, 7), 37)}
    image = model_of("ViTModel", "vit", num_hidden_layers=1, image_size=(24, 40), num_channels=1)
    assert first(image) == {"pixel_values": InputSpec((2, 1, 24, 40))}
    whisper = model_of("WhisperModel", "whisper", num_mel_bins=5, max_source_positions=9)
    features, ids = InputSpec((2, 5, 18)), InputSpec((2, 7), whisper.config.vocab_size)
    assert first(whisper) == {"input_features": features, "decoder_input_ids": ids}
    speech = model_of("Wav2Vec2Model", "wav2vec2", num_hidden_layers=1)
    assert list(first(speech)) == ["input_values"] and len(first(speech)["input_values"].shape) == 2


def test_two_modalities_are_given_and_then_the_main_modality() -> None:
    clip = model_of("CLIPModel", "clip")
    input_sets = [set(inputs) for inputs in main_inputs(clip, 1, 3)]
    assert input_sets[0] == {"input_ids", "pixel_values"} and input_sets[-1] == {"input_ids"}


def test_boxes_go_with_the_tokens_that_they_are_around() -> None:
    page = model_of("LayoutLMModel", "layoutlm", num_hidden_layers=1)
    assert first(page)["bbox"] == InputSpec((2, 7, 4), 1)


def test_text_comes_with_the_images_of_its_config() -> None:
    """ViLT has no separate config for images: its own config has the patch size."""
    vilt = model_of("ViltModel", "vilt", num_hidden_layers=1, image_size=64, patch_size=16)
    assert first(vilt).keys() == {"input_ids", "pixel_values"}
    calls = accepted_calls(Recorder(vilt))
    assert calls is not None and calls[0].steps[0][1]["pixel_values"].shape == (BATCH, 3, 64, 64)
    gpt2 = model_of("GPT2Model", "gpt2", n_layer=1)
    assert all(inputs.keys() == {"input_ids"} for inputs in main_inputs(gpt2, 1, 3))


def test_a_second_tower_is_given_an_input_of_its_size() -> None:
    config = CONFIG_MAPPING["deepseek_vl_hybrid"]()
    config.vision_config.image_size = 32
    config.high_res_vision_config.image_size = 48
    given = first(build(transformers.DeepseekVLHybridModel, config))
    assert given["pixel_values"] == InputSpec((2, 3, 32, 32))
    assert given["high_res_pixel_values"] == InputSpec((2, 3, 48, 48))


def test_entities_and_the_future_are_given_if_read() -> None:
    luke = model_of("LukeModel", "luke", num_hidden_layers=1, entity_vocab_size=11)
    assert first(luke)["entity_ids"].below == 11 and "entity_position_ids" in first(luke)
    series = model_of("AutoformerModel", "autoformer", prediction_length=6, context_length=12)
    assert first(series)["future_values"].shape == (2, 6)
    calls = accepted_calls(Recorder(series))
    assert calls is not None and "future_values" in calls[0].steps[0][1]


def test_each_audio_feature_has_its_token_with_a_head_too() -> None:
    """The method that counts features belongs to the inner model."""
    settings = {"audio_config": {"num_hidden_layers": 1}, "audio_token_id": 9}
    head = model_of("VoxtralForConditionalGeneration", "voxtral", **settings)
    inputs = next(input_sets(head, 2, TOKENS))
    leading = inputs["input_ids"].leading
    assert set(leading) == {9} and len(leading) == 375  # of 3000 frames: by 2, and by 4
    assert inputs["input_ids"].shape == (2, TOKENS + len(leading))


def test_the_number_of_placeholders_is_in_the_error() -> None:
    """The method that counts features also reads the text, and compares both."""
    config = CONFIG_MAPPING["musicflamingo"](audio_token_id=9)
    config.audio_config.num_hidden_layers = config.text_config.num_hidden_layers = 1
    inputs = next(input_sets(build(transformers.MusicFlamingoModel, config), 2, TOKENS))
    assert inputs["input_ids"].leading == (9,) * 750  # of 3000 frames: by 2, and by 2


def test_placeholders_of_a_model_that_counts_none() -> None:
    """One placeholder is too few; the error message of torch has the number of features."""
    config = CONFIG_MAPPING["phi4_multimodal"](num_hidden_layers=1)
    vision, audio = config.vision_config, config.audio_config
    vision.num_hidden_layers, vision.image_size, vision.image_token_id = 2, 56, 8
    audio.num_blocks, audio.audio_token_id = 1, 9
    calls = accepted_calls(Recorder(build(transformers.Phi4MultimodalModel, config))) or []
    given = {call.label: call.steps[0][1] for call in calls}
    # 2 x 2 patches of the image and of its crop, a newline after each row, and one token in between
    both, seen, heard = 2 * (4 + 2) + 1, (BATCH, 2, 3, 56, 56), (BATCH, 32, 80)
    ids = given["prefill and decode"]["input_ids"]
    assert (ids == 8).sum(1).tolist() == [both] * BATCH
    assert (ids == 9).sum(1).tolist() == [4] * BATCH
    images, sound = given["image_pixel_values alone"], given["audio_input_features alone"]
    assert images["image_pixel_values"].shape == seen and "audio_input_features" not in images
    assert sound["audio_input_features"].shape == heard and "image_pixel_values" not in sound
    assert not (sound["input_ids"] == 8).any() and not (images["input_ids"] == 9).any()


@pytest.mark.slow
def test_each_switch_is_also_called_the_other_way() -> None:
    settings = {
        "hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1, "crop_size": 32,
        "pred_hidden_size": 24, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1,
        "frames_per_clip": 4,
    }  # fmt: skip
    model = model_of("VJEPA2Model", "vjepa2", **settings)
    calls = {call.label: call.flags for call in accepted_calls(Recorder(model)) or []}
    assert calls["skip_predictor=True"] == {"skip_predictor": True}
    unproven = analyze_config(model.config, model_class="VJEPA2Model").plan.unproven
    assert "skip_predictor" not in unproven  # that call has all inputs that are proven
    assert not [name for name in calls if name.startswith(("output_", "return_", "use_cache"))]


@of_its_version
def test_an_image_to_be_made_has_a_grid_of_its_own() -> None:
    config = CONFIG_MAPPING["glm_image"](image_token_id=9)
    config.vision_config.depth = config.text_config.num_hidden_layers = 1
    model = build(transformers.GlmImageModel, config)
    placed = next(inputs for inputs in input_sets(model, 2, 7) if "images_per_sample" in inputs)
    assert placed["image_grid_thw"].shape == (4, 3)
    assert placed["images_per_sample"].leading == (2, 2)
    tokens = placed["input_ids"].shape[1]
    assert placed["input_ids"].leading.count(9) == 16  # a code for each patch
    assert placed["position_ids"].leading == tuple(range(tokens))


@pytest.mark.slow
@of_its_version
def test_a_video_replaces_the_images_in_a_separate_call() -> None:
    vision = {"num_hidden_layers": 1, "image_size": 56, "patch_size": 28}
    settings = {"vision_config": vision, "text_config": {"num_hidden_layers": 1}}
    model = model_of("VideoLlavaModel", "video_llava", video_token_index=8, **settings)
    calls = accepted_calls(Recorder(model)) or []
    (film,) = [call for call in calls if call.label == "with pixel_values_videos"]
    given = film.steps[0][1]
    assert not film.required and "pixel_values" not in given
    frames = given["pixel_values_videos"].shape[1]
    assert (given["input_ids"] == 8).sum(1).tolist() == [frames * 5] * BATCH  # 4 patches, 1 class
    assert all(
        call.label != film.label for call in accepted_calls(Recorder(model_of("CLIPModel", "clip")))
    )


def test_prompts_of_a_segmentation_are_given_beside_the_image() -> None:
    sam = CONFIG_MAPPING["sam"]()
    sam.vision_config.num_hidden_layers, sam.vision_config.image_size = 1, 64
    sam.vision_config.global_attn_indexes = [0]
    sam.prompt_encoder_config.image_size = 64
    sam.prompt_encoder_config.image_embedding_size = 4
    calls = {
        call.label: call
        for call in accepted_calls(Recorder(build(transformers.SamModel, sam))) or []
    }
    given = calls["with input_masks"].steps[0][1]
    assert given["input_masks"].shape == (BATCH, 1, 16, 16) and "pixel_values" in given
    assert calls["with input_boxes"].steps[0][1]["input_boxes"].shape[-1] == 4


def test_inputs_that_belong_to_others() -> None:
    times = model_of("TimesFmModel", "timesfm", num_hidden_layers=1, patch_length=8)
    assert first(times).keys() == {"past_values", "past_values_padding", "freq"}
    assert first(times)["past_values"].shape[1] % 8 == 0
    assert accepted_calls(Recorder(times)) is not None
    painted = model_of("SegGptModel", "seggpt", num_hidden_layers=2, image_size=[64, 32])
    half = InputSpec((2, 3, 32, 32))
    assert first(painted) == dict.fromkeys(
        ("pixel_values", "prompt_pixel_values", "prompt_masks"), half
    )


@of_its_version
def test_latents_have_the_width_of_the_model() -> None:
    decoder = model_of("MimiDecoderModel", "mimi_decoder", num_hidden_layers=1)
    assert first(decoder) == {"latents": InputSpec((2, decoder.config.hidden_size, 7))}
    assert accepted_calls(Recorder(decoder)) is not None


def test_a_mask_can_be_boolean() -> None:
    assert whole_numbers(InputSpec((2, 1), 2, (1,), truth=True)).tolist() == [[True], [True]]
    assert whole_numbers(ones(2, 1)).tolist() == [[1], [1]]


@pytest.mark.slow
def test_speech_can_take_the_place_of_text() -> None:
    config = {"encoder_layers": 1, "speech_encoder_layers": 1, "decoder_layers": 1}
    calls = accepted_calls(Recorder(model_of("SeamlessM4TModel", "seamless_m4t", **config))) or []
    speech = [call for call in calls if call.label == "input_features alone"]
    assert speech and not any(call.required for call in speech)
    assert all("input_ids" not in step for call in speech for _, step in call.steps)
    assert all("decoder_input_ids" in step for call in speech for _, step in call.steps)


def test_the_first_alternative_of_an_optional_call_that_fits() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.LayerNorm(5))

    def call(label: str, *shape: int) -> Call:
        return Call(label, (((torch.randn(shape),), {}),), required=False)

    calls = [call("a", 3, 4), call("a", 3, 5), call("a", 2, 5), call("b", 1, 5)]
    traces = analyze_calls(model, calls).problem.flow.traces
    assert [trace.label for trace in traces] == ["a", "b"]


@pytest.mark.parametrize(
    ("kind", "tokens", "settings"),
    [
        ("ViT", 1 + 4, {}),
        ("DeiT", 2 + 4, {}),
        ("IJepa", 4, {}),
        ("Dinov2WithRegisters", 1 + 3 + 4, {"num_register_tokens": 3}),
    ],
)
def test_a_mask_of_image_tokens_is_proven_for_all_values(
    kind: str, tokens: int, settings: dict[str, Any]
) -> None:
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8}
    config = getattr(transformers, f"{kind}Config")(**sizes, image_size=16, **settings)
    captures = Recorder(build(getattr(transformers, f"{kind}Model"), config))
    masks = [c for c in accepted_calls(captures) or [] if c.label == "attention mask"]
    taken = [c.steps[0][1]["attention_mask"] for c in masks if captures.accepts(c)]
    assert [mask.shape[1] for mask in taken] == [tokens]
    analysis = analyze_config(config)
    assert "attention mask" in [trace.label for trace in analysis.problem.flow.traces]
    assert not analysis.plan.by_example


def test_a_list_of_modules_may_have_gaps() -> None:
    model = model_of("InformerModel", "informer", prediction_length=6, context_length=12)
    assert None in list(model.encoder.conv_layers)
    assert accepted_calls(Recorder(model)) is not None


def test_a_text_part_that_names_the_input_is_given_text() -> None:
    part = model_of("Sam3LiteTextTextModel", "sam3_lite_text_text_model", num_hidden_layers=1)
    assert part.main_input_name == "pixel_values" and first(part).keys() == {"input_ids"}


def test_audio_codes_have_a_row_for_each_codebook_and_one_mask() -> None:
    config = transformers.MusicgenDecoderConfig(num_hidden_layers=1, num_codebooks=3)
    calls = accepted_calls(Recorder(build(transformers.MusicgenForCausalLM, config)))
    assert calls is not None
    given = calls[0].steps[0][1]
    assert given["input_ids"].shape == (3 * BATCH, TOKENS)
    assert given["attention_mask"].shape == (BATCH, TOKENS)


def test_an_unknown_main_input_is_refused_by_name() -> None:
    model = model_of("GPT2Model", "gpt2", n_layer=1)
    model.main_input_name = "waveform"
    with pytest.raises(UnsupportedModel, match="takes waveform, which cannot be made up"):
        next(ways_to_call(model))


def test_a_config_without_input_sizes_is_refused_in_one_line() -> None:
    model = model_of("ViTModel", "vit", num_hidden_layers=1)
    vars(model.config)["image_size"] = {"height": "large"}
    with pytest.raises(UnsupportedModel, match="no example inputs for ViTModel can be derived"):
        next(ways_to_call(model))


def test_the_calls_of_a_decoder_with_cache_and_options() -> None:
    main, optional, cross = next(ways_to_call(model_of("GPT2Model", "gpt2", n_layer=1)))
    (_, prefill), (_, decode) = main.steps
    assert prefill["input_ids"].shape == (BATCH, TOKENS) and decode["input_ids"].shape == (BATCH, 1)
    assert decode["attention_mask"].shape == (BATCH, TOKENS + 1)
    assert main.required and main.flags == {"use_cache": True}
    ((_, given),) = optional.steps
    assert {"inputs_embeds", "position_ids", "token_type_ids"} <= set(given)
    assert "input_ids" not in given and not optional.required
    assert all("encoder_hidden_states" in step for _, step in cross.steps) and not cross.required


def test_the_decoder_of_two_stacks_is_also_called_alone() -> None:
    calls = next(ways_to_call(model_of("WhisperForConditionalGeneration", "whisper")))
    alone = next(call for call in calls if call.label == "decoder alone")
    assert [step["decoder_input_ids"].shape[1] for _, step in alone.steps] == [TOKENS, 1]
    assert all(set(step) == {"decoder_input_ids", "encoder_outputs"} for _, step in alone.steps)


def test_a_classifier_that_takes_one_row_comes_to_it_last() -> None:
    model = model_of("GPT2ForSequenceClassification", "gpt2", n_layer=1)
    rows = [next(iter(calls[0].steps[0][1].values())).shape[0] for calls in ways_to_call(model)]
    assert rows == sorted(rows, reverse=True) and set(rows) == {BATCH, 1}
    accepted = accepted_calls(Recorder(model))
    assert accepted is not None and accepted[0].steps[0][1]["input_ids"].shape[0] == 1


def test_labels_and_switches_are_no_optional_inputs() -> None:
    names = optional_inputs(model_of("GPT2LMHeadModel", "gpt2", n_layer=1))
    assert "encoder_hidden_states" in names and "inputs_embeds" in names
    assert not {"labels", "use_cache", "return_dict"} & set(names)


@pytest.mark.slow
def test_a_row_that_is_read_where_it_ends_is_traced() -> None:
    """The position is a value, so the result has no fixed shape, and counts as an observer."""
    settings = {
        "vocab_size": 37, "d_model": 20, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 33,
        "decoder_ffn_dim": 33, "max_position_embeddings": 31, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
        "forced_eos_token_id": 2,
    }  # fmt: skip
    config = CONFIG_MAPPING["mbart"](**settings)
    plan = analyze_config(config, model_class="MBartForSequenceClassification").plan
    folded = {verdict.norm for verdict in plan.folded}
    assert "model.encoder.layer_norm" in folded and "model.decoder.layer_norm" in folded
    assert isinstance(plan.kept, tuple) and all(verdict.reason for verdict in plan.kept)


def test_inputs_have_values_in_the_dtype_of_the_model() -> None:
    for call in next(ways_to_call(model_of("ViTModel", "vit", num_hidden_layers=1))):
        for _, inputs in call.steps:
            assert not any(value.is_meta for value in inputs.values())
            assert inputs["pixel_values"].dtype == torch.float32 and inputs["pixel_values"].any()


@pytest.mark.parametrize("channels", [256, [128, 32], [], None])
def test_audio_features_for_any_kind_of_channels(channels: object) -> None:
    config = SimpleNamespace(num_mel_bins=80, subsampling_conv_channels=channels)
    shapes = {inputs["input_features"].shape for inputs in MAKERS["input_features"](config, 2, 16)}
    assert {shape[-1] for shape in shapes} >= {80} | ({128} if channels == [128, 32] else set())


SWITCH = {"d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 2, "num_heads": 4, "num_experts": 3}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("SwitchTransformersForConditionalGeneration", "switch_transformers"), ("T5Model", "t5")],
)
def test_a_model_runs_as_it_is_called(name: str, kind: str) -> None:
    """Switch hands every keyword to its encoder too, which refuses ``use_cache=True``."""
    model = model_of(name, kind, vocab_size=37, decoder_start_token_id=0, **SWITCH)
    main = next(iter(ways_to_call(model)))[0]
    live = model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.normal_()
        for _, given in main.steps:
            found = live(**given, **main.flags)
            assert returned_cache(found).get_seq_length() > 0
    assert (main.flags == {"use_cache": True}) is (kind == "t5")
