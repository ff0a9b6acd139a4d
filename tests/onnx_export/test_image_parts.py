"""Models of pictures and text in parts: the whole model's logits and tokens, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest
import torch
import transformers
from live_models import shaken
from vision_language import IMAGE, TEXT, small, two_rows

import enjoyln_cli
from enjoyln_cli import export, fold
from enjoyln_cli.calls.generation import generated_positions
from enjoyln_cli.comparison.run import run
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.onnx_export.cached_run import load_programs, whole_rows
from enjoyln_cli.onnx_export.image_parts import with_features
from enjoyln_cli.onnx_export.programs import Programs, programs_of, save
from enjoyln_cli.onnx_export.runtimes import RUNTIMES
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.quantisers.onnxruntime_quantiser import is_rounded
from enjoyln_cli.quantisers.schemes import SCHEMES
from enjoyln_cli.quantisers.static_ranges import ranges_of
from enjoyln_cli.quantisers.traced_programs import quantised

PARTS = ["vision_encoder", "embed_tokens", "decoder_model_merged"]


class Exported(NamedTuple):
    """A model, its programs, and the folder with them."""

    name: str
    model: Any
    programs: Programs
    folder: Path


@pytest.fixture(scope="module", params=["LLaVA", "SmolVLM", "Idefics3", "Qwen2-VL"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("parts")
    model = small(request.param)
    programs = programs_of(model, torch.float32)
    files = save(programs, folder)
    assert [file.stem for file in files] == PARTS
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    return Exported(request.param, model, programs, folder)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_parts_compute_what_the_model_does(runtime: str, exported: Exported) -> None:
    name, model, _, folder = exported
    inputs = two_rows(name)
    exact_model = small(name).double()
    (exact,) = run(exact_model, [inputs])
    (own,) = run(model, [inputs])
    told = {**inputs, "position_ids": generated_positions(model, inputs)}
    compute = whole_rows(load_programs(folder, "", runtime))
    seen = inputs["attention_mask"].bool()
    found = compute(told)["logits"][seen].double()
    logits = exact["logits"][seen]
    scale = logits.norm()
    assert (found - logits).norm() / scale < max(
        1e-6, 4 * (own["logits"][seen] - logits).norm() / scale
    )
    blind = compute({**told, "pixel_values": told["pixel_values"] / 2})["logits"][seen]
    assert (blind - logits).norm() / scale > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3])
def test_the_parts_generate_what_the_model_does(beams: int, exported: Exported) -> None:
    name, model, _, folder = exported
    inputs, settings = two_rows(name), {"max_new_tokens": 10, "do_sample": False}
    expected = model.generate(**inputs, **settings, num_beams=beams)
    loaded = enjoyln_cli.load_onnx(folder, "fp32")
    found = loaded.generate(**inputs, **settings, num_beams=beams)
    assert torch.equal(found, expected)
    assert len(set(found[:, -10:].flatten().tolist())) > 2
    with torch.no_grad():
        exact = model(**inputs).logits[:, -1]
    torch.testing.assert_close(loaded(**inputs).logits[:, -1], exact, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_inputs_and_outputs_have_the_names_that_clients_read(
    exported: Exported,
) -> None:
    name, *_, folder = exported
    models = {part: onnx.load(folder / "onnx" / f"{part}.onnx") for part in PARTS}
    read = {part: [one.name for one in model.graph.input] for part, model in models.items()}
    pictures = {"LLaVA": ["pixel_values"], "Qwen2-VL": ["pixel_values", "grid_thw"]}
    both = ["pixel_values", "pixel_attention_mask"]
    assert read["vision_encoder"] == pictures.get(name, both)
    assert [one.name for one in models["vision_encoder"].graph.output] == ["image_features"]
    assert read["embed_tokens"] == ["input_ids"]
    past = [f"past_key_values.{at}.{kind}" for at in range(2) for kind in ("key", "value")]
    assert read["decoder_model_merged"] == [
        "inputs_embeds",
        "attention_mask",
        "position_ids",
        *past,
    ]
    (token,) = models["vision_encoder"].metadata_props
    assert (token.key, token.value) == ("image_token_id", str(IMAGE))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-static", "w4a16"])
def test_each_part_is_quantised(scheme: str, exported: Exported) -> None:
    """With scales that a static scheme finds by running all parts on pictures and text."""
    name, model, programs, folder = exported
    inputs = two_rows(name)
    told = {**inputs, "position_ids": generated_positions(model, inputs)}
    settings = SCHEMES[scheme]
    small_ones = quantised(programs, settings, ranges_of(programs, [told]), {})
    rounded = [part for part, one in small_ones.models.items() if is_rounded(one)]
    assert {*rounded} >= {"vision_encoder", "decoder_model_merged"}
    save(small_ones, folder, settings.suffix)
    exact = whole_rows(load_programs(folder))(told)["logits"]
    found = whole_rows(load_programs(folder, settings.suffix))(told)["logits"]
    assert 1e-4 < (found - exact).norm() / exact.norm() < (0.5 if scheme == "w4a16" else 0.15)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LLaVA", "SmolVLM"])
def test_a_converted_model_is_checked_with_pictures(name: str, tmp_path: Path) -> None:
    small(name).save_pretrained(tmp_path / "in")
    fold(tmp_path / "in", tmp_path / "out", verify=False, options=Options())
    found = export(tmp_path / "out", tmp_path / "onnx")
    assert found.files == tuple(f"onnx/{part}.onnx" for part in PARTS)
    assert len(found.checks) == len(RUNTIMES)
    assert all(0 < check.ratio < 2 and check.generated for check in found.checks)
    assert found.programs["vision_encoder"].nodes["RMSNormalization"]


def refusal(model: Any) -> str:
    with pytest.raises(UnsupportedModel) as refused:
        programs_of(model.eval(), torch.float32)
    return str(refused.value)


def test_pictures_that_change_more_than_tokens_are_refused() -> None:
    """Qwen3-VL adds features of pictures to later layers as well."""
    torch.manual_seed(0)
    rotary = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    text = {**TEXT, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
    vision = {
        "depth": 2, "hidden_size": 24, "out_hidden_size": 24, "num_heads": 2, "patch_size": 4,
        "intermediate_size": 36, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config = transformers.Qwen3VLConfig(
        vision_config=vision,
        text_config={**text, "rope_parameters": rotary, "bos_token_id": 1, "eos_token_id": 2},
        image_token_id=IMAGE,
        video_token_id=51,
        vision_start_token_id=52,
        vision_end_token_id=53,
    )
    model = shaken(transformers.Qwen3VLForConditionalGeneration(config))
    assert "change more than the embeddings of image tokens" in refusal(model)


def test_as_many_features_as_image_tokens_are_needed() -> None:
    embedded, ids = torch.zeros(2, 3, 4), torch.tensor([[IMAGE, 1, 2], [3, IMAGE, IMAGE]])
    features = torch.arange(12.0).reshape(3, 4) + 1
    found = with_features(embedded, ids == IMAGE, features)
    assert torch.equal(found[ids == IMAGE], features)
    assert not found[ids != IMAGE].any()
    with pytest.raises(UnsupportedModel, match="3 image tokens, and the pictures 2"):
        with_features(embedded, ids == IMAGE, features[:2])
