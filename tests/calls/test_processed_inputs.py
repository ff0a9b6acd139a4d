"""Everything that a checkpoint's own processor makes of the user's data reaches the model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from live_models import CHECKPOINTS, shaken
from tiny_models import BERT
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DetrConfig,
    DetrForObjectDetection,
    DetrImageProcessorPil,
    ResNetConfig,
    Siglip2Config,
    Siglip2ImageProcessorPil,
    Siglip2Model,
    Siglip2VisionModel,
    ViltConfig,
    ViltForQuestionAnswering,
    ViltImageProcessorPil,
    ViltProcessor,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)
from vision_language import PATCHES, SIZES, pictures, vision_language_model

from enjoyln_cli.calls.processed_inputs import joined
from enjoyln_cli.comparison.batches import Batch, first_rows, length
from enjoyln_cli.comparison.data_files import UserData, read_user_data
from enjoyln_cli.comparison.run import run
from enjoyln_cli.comparison.user_data import batches_of, runnable
from enjoyln_cli.errors import UnsupportedModel

pytest.importorskip("PIL")


def read(model: Any, folder: Path, data: UserData, at_once: int | None = 1) -> list[Batch]:
    return batches_of(model, data, folder, torch.float32, 8, at_once=at_once).batches


def shapes(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in batch.items()}


@pytest.fixture(scope="module")
def detr() -> Any:
    torch.manual_seed(0)
    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12, 16, 24], depths=[1] * 4, layer_type="basic",
        out_features=["stage4"],
    )  # fmt: skip
    config = DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False,
        backbone=None, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=24,
        decoder_ffn_dim=24, encoder_attention_heads=2, decoder_attention_heads=2, num_queries=5,
    )  # fmt: skip
    return shaken(DetrForObjectDetection(config), 0.02)


def test_pictures_of_two_shapes_are_inputs_of_their_own(detr: Any, tmp_path: Path) -> None:
    size = {"shortest_edge": 40, "longest_edge": 80}
    DetrImageProcessorPil(size=size).save_pretrained(tmp_path)
    data = read_user_data(images=[pictures(tmp_path / "images", 4, widen=16)])
    found = read(detr, tmp_path, data, at_once=None)
    assert [shapes(batch) for batch in found] == [
        {"pixel_values": (1, 3, 40, width), "pixel_mask": (1, 40, width)} for width in (48, 64, 80)
    ] + [{"pixel_values": (1, 3, 33, 80), "pixel_mask": (1, 33, 80)}]
    assert all(run(detr, [batch])[0]["pred_boxes"].shape == (1, 5, 4) for batch in found)


def test_pictures_of_one_shape_are_joined(detr: Any, tmp_path: Path) -> None:
    DetrImageProcessorPil(size={"height": 32, "width": 48}).save_pretrained(tmp_path)
    data = read_user_data(images=[pictures(tmp_path / "images", 11, widen=4)])
    whole = read(detr, tmp_path, data, at_once=None)
    assert [len(batch["pixel_values"]) for batch in whole] == [8, 3]
    alone = read(detr, tmp_path, data)
    assert torch.equal(whole[1]["pixel_values"][2:], alone[10]["pixel_values"])


def test_rows_of_patches_are_not_taken_for_inputs() -> None:
    batch = {"pixel_values": torch.zeros(16, 12), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    assert length(batch) == 1 and first_rows(batch, 1) is batch
    assert len(joined([batch, batch], 8)) == 2
    two = {"input_ids": torch.zeros(2, 5), "attention_mask": torch.ones(2, 5)}
    assert length(two) == 2 and length(first_rows(two, 1)) == 1


@pytest.fixture(scope="module")
def siglip2() -> Siglip2Config:
    vision = {**SIZES, "patch_size": 8, "num_patches": 16}
    text = {**SIZES, "vocab_size": 40, "max_position_embeddings": 16, "projection_size": 24}
    return Siglip2Config(text_config=text, vision_config=vision)


def test_the_shapes_of_patches_reach_the_model(siglip2: Siglip2Config, tmp_path: Path) -> None:
    Siglip2ImageProcessorPil(patch_size=8, max_num_patches=24).save_pretrained(tmp_path)
    data = read_user_data(images=[pictures(tmp_path / "images", 4, widen=40)])
    model = shaken(Siglip2VisionModel(siglip2.vision_config), 0.05)
    found = read(model, tmp_path, data)
    assert set(found[0]) == {"pixel_values", "pixel_attention_mask", "spatial_shapes"}
    sides = [tuple(batch["spatial_shapes"][0].tolist()) for batch in found]
    assert len(set(sides)) > 1 and all(
        int(batch["pixel_attention_mask"].sum()) == high * wide
        for batch, (high, wide) in zip(found, sides, strict=True)
    )


def test_what_is_made_up_is_said(siglip2: Siglip2Config, tmp_path: Path) -> None:
    Siglip2ImageProcessorPil(patch_size=8, max_num_patches=24).save_pretrained(tmp_path)
    data = read_user_data(images=[pictures(tmp_path / "images", 2, widen=40)])
    told: list[str] = []

    def complete(model: Any) -> list[Batch]:
        own = read(model, tmp_path, data)
        return runnable(
            model,
            own,
            torch.float32,
            lambda row: run(model, [row]),
            lambda _, text: told.append(text),
        )

    complete(shaken(Siglip2VisionModel(siglip2.vision_config), 0.05))
    assert told == []
    model = shaken(Siglip2Model(siglip2), 0.05)
    own, found = read(model, tmp_path, data), complete(model)
    assert "do not have input_ids" in told[0] and "spatial_shapes" not in told[0]
    assert all(torch.equal(found[1][name], value) for name, value in own[1].items())


def test_pictures_with_text_go_through_the_chat_template(tmp_path: Path) -> None:
    model = vision_language_model(tmp_path)
    images = pictures(tmp_path / "images", 3)
    (tmp_path / "text.txt").write_text("You may copy .\nYou may not copy it .\nThe licence .\n")
    data = read_user_data(images=[images], text=tmp_path / "text.txt")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    found = read(model, tmp_path, data)
    assert set(found[0]) == {"input_ids", "attention_mask", "pixel_values"}
    said = [tokenizer.decode(batch["input_ids"][0]) for batch in found]
    assert "You may not copy it" in said[1] and said[1].rstrip().endswith("assistant:")
    assert all(
        int((batch["input_ids"] == model.config.image_token_id).sum()) == PATCHES for batch in found
    )
    (logits,) = (one["logits"] for one in run(model, found[:1]))
    without = {**found[0], "pixel_values": torch.zeros(1, 3, 32, 32)}
    assert not torch.allclose(run(model, [without])[0]["logits"], logits)
    (tmp_path / "text.txt").write_text("You may copy .\n")
    same = read(model, tmp_path, read_user_data(images=[images], text=tmp_path / "text.txt"))
    assert len(same) == 3 and torch.equal(same[2]["input_ids"], same[0]["input_ids"])
    alone = read(model, tmp_path, read_user_data(images=[images]))
    assert int((alone[0]["input_ids"] == model.config.image_token_id).sum()) == PATCHES
    (tmp_path / "text.txt").write_text("You may copy .\nYou may not .\n")
    with pytest.raises(UnsupportedModel, match="2 lines of text for 3 images"):
        read(model, tmp_path, read_user_data(images=[images], text=tmp_path / "text.txt"))


def test_a_processor_without_chat_gets_both(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = ViltConfig(
        **SIZES, vocab_size=600, image_size=32, patch_size=8, max_position_embeddings=40
    )
    model = shaken(ViltForQuestionAnswering(config), 0.05)
    config.save_pretrained(tmp_path)
    size = {"shortest_edge": 32}
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "bert")
    images = ViltImageProcessorPil(size=size, size_divisor=8)
    ViltProcessor(images, tokenizer).save_pretrained(tmp_path)
    data = UserData(images=tuple(pictures(tmp_path / "images", 2).iterdir()), texts=("You may .",))
    found = read(model, tmp_path, data)
    assert {"input_ids", "pixel_values", "pixel_mask"} <= set(found[0])
    assert run(model, found)[0]["logits"].shape[0] == 1


def test_the_picture_that_cannot_be_read_is_named(detr: Any, tmp_path: Path) -> None:
    DetrImageProcessorPil(size={"height": 32, "width": 48}).save_pretrained(tmp_path)
    images = pictures(tmp_path / "images", 3)
    whole = (images / "1.png").read_bytes()
    (images / "1.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnsupportedModel, match=r"1\.png cannot be read: .*truncated"):
        read(detr, tmp_path, read_user_data(images=[images]))


def test_a_shape_that_the_model_does_not_take_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**SIZES, image_size=40, patch_size=8)).eval()
    ViTImageProcessorPil(do_resize=False).save_pretrained(tmp_path)
    for name, widen, fits in (("equal", 0, True), ("other", 8, False)):
        images = pictures(tmp_path / name, 3, widen=widen, width=40)
        found = read(model, tmp_path, read_user_data(images=[images]))
        check = partial(runnable, model, found, torch.float32, lambda row: run(model, [row]))
        if fits:
            assert check() is found
            continue
        with pytest.raises(UnsupportedModel, match=r"cannot run on pixel_values.*48"):
            check()


class OfPersons(ViTImageProcessorPil):
    """Cuts each box out of its picture, as the processor of a pose model does."""

    def preprocess(self, images: Any, boxes: Any, **others: Any) -> Any:
        cut = [images[0].crop((x, y, x + w, y + h)) for x, y, w, h in boxes[0]]
        return super().preprocess(cut, **others)


def test_the_whole_picture_is_a_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that takes boxes is given the whole picture; other processors are given none."""
    model = ViTForImageClassification(ViTConfig(**SIZES, image_size=32, patch_size=8))
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    data = read_user_data(images=[pictures(tmp_path / "images", 2, widen=16)])
    expected = read(model, tmp_path, data)
    processor = OfPersons.from_pretrained(tmp_path)
    monkeypatch.setattr(AutoImageProcessor, "from_pretrained", lambda *args, **given: processor)
    found = read(model, tmp_path, data)
    assert len(found) == 2
    for batch, other in zip(found, expected, strict=True):
        assert torch.equal(batch["pixel_values"], other["pixel_values"])


def test_a_text_model_takes_no_pictures(tmp_path: Path) -> None:
    data = read_user_data(images=[pictures(tmp_path / "images", 1)])
    with pytest.raises(UnsupportedModel, match="BertModel takes input_ids"):
        read(BertModel(BertConfig(**BERT)), tmp_path, data)


PAIRS = ("may I copy\tYou may copy it .", "who sells\tYou may not sell it .")


def test_a_tab_separates_the_texts_of_a_pair() -> None:
    folder = CHECKPOINTS / "bert"
    config = BertConfig.from_pretrained(folder, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (batch, _) = read(BertForSequenceClassification(config), folder, UserData(texts=PAIRS))
    expected = tokenizer(*PAIRS[0].split("\t"), return_tensors="pt")
    assert set(batch) == set(expected)
    assert all(torch.equal(batch[name], value) for name, value in expected.items())
    assert int((batch["input_ids"] == tokenizer.sep_token_id).sum()) == 2


@pytest.mark.parametrize(
    ("cls", "texts"), [(BertModel, PAIRS), (BertForSequenceClassification, (*PAIRS, "alone"))]
)
def test_other_texts_with_tabs_are_single(cls: Any, texts: tuple[str, ...]) -> None:
    folder = CHECKPOINTS / "bert"
    batch, *_ = read(cls(BertConfig.from_pretrained(folder)), folder, UserData(texts=texts))
    expected = AutoTokenizer.from_pretrained(folder)(texts[0], return_tensors="pt")
    assert torch.equal(batch["input_ids"], expected["input_ids"])
