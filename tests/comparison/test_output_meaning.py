"""What the outputs of real classes mean, and the measures that follow from it.

The models are small classes of transformers, with random weights; their answers are disturbed, and
the measures are computed a second time, by torch's own losses or by hand.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from live_models import shaken
from torch.nn import functional as F

from enjoyln_cli.comparison.output_meaning import (
    DECISIONS,
    KL,
    LEAST_COSINE,
    MEAN_COSINE,
    NEIGHBOURS,
    OVERLAP,
    PEAKS,
    TOP1,
    Kind,
    Meaning,
    divergence,
    embedding_measures,
    in_same_order,
    meanings,
    means,
    results,
    sums,
)
from enjoyln_cli.comparison.run import run

BACKBONE = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 33,
    "image_size": [32, 48], "patch_size": 8,
}  # fmt: skip
TEXT = {
    "vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 33, "max_position_embeddings": 40,
}  # fmt: skip
PICTURE = {"pixel_values": (1, 3, 32, 48)}
WORDS = {"input_ids": (1, 9)}

ONE_OF, EACH, VALUES = Kind.ONE_OF, Kind.EACH, Kind.VALUES
YOLOS = {**BACKBONE, "num_labels": 5, "num_detection_tokens": 7}
SEGFORMER = {
    "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 3, 4], "decoder_hidden_size": 16,
    "depths": [1, 1, 1, 1],
}  # fmt: skip
RT_DETR = {
    "encoder_hidden_dim": 32, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_in_channels": [32, 48, 64], "feat_strides": [8, 16, 32], "num_queries": 9,
    "decoder_in_channels": [32, 32, 32], "encoder_attention_heads": 4, "decoder_layers": 2,
    "decoder_attention_heads": 4, "num_denoising": 0, "num_labels": 5, "anchor_image_size": None,
    "backbone_config": transformers.RTDetrResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"], layer_type="basic",
    ),
}  # fmt: skip
CLIPSEG = {
    "text_config": {**TEXT, "projection_dim": 12},
    "vision_config": {**BACKBONE, "image_size": 32, "projection_dim": 12},
    "projection_dim": 12, "extract_layers": [0, 1], "reduce_dim": 8, "conditional_layer": 0,
    "decoder_num_attention_heads": 2, "decoder_intermediate_size": 16,
}  # fmt: skip
CLASSES = {"num_labels": 5}
MANY = {**CLASSES, "problem_type": "multi_label_classification"}
REGRESSION = {**CLASSES, "problem_type": "regression"}
PIXELS = {"pixel_values": (1, 3, 64, 64)}
SQUARE = {"pixel_values": (1, 3, 32, 32), "input_ids": (1, 9)}

PAIR = {
    "text_config": {**TEXT, "projection_size": 24},
    "vision_config": {**BACKBONE, "image_size": 32},
}  # fmt: skip
TEXTS = {"pixel_values": (2, 3, 32, 32), "input_ids": (2, 9)}
LOGITS_OF_PAIRS = ("logits_per_image", "logits_per_text")
EMBEDS = {name: Meaning(Kind.EMBEDDING) for name in ("text_embeds", "image_embeds")}
UPERNET = {
    "backbone_config": transformers.ConvNextConfig(
        hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
        out_features=["stage1", "stage2", "stage3", "stage4"],
    ),
    "hidden_size": 16, "auxiliary_in_channels": 24, "auxiliary_channels": 8, "num_labels": 5,
}  # fmt: skip

VITPOSE = {
    "backbone_config": transformers.VitPoseBackboneConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, image_size=[64, 48],
        patch_size=[8, 8], mlp_ratio=2, out_indices=[2],
    ),
    "num_labels": 5, "use_simple_decoder": True,
}  # fmt: skip
SAM = {
    "vision_config": transformers.SamVisionConfig(
        hidden_size=24, output_channels=16, num_hidden_layers=2, num_attention_heads=3,
        image_size=64, patch_size=8, mlp_dim=36, window_size=4, global_attn_indexes=[1],
        num_pos_feats=8,
    ).to_dict(),
    "prompt_encoder_config": transformers.SamPromptEncoderConfig(
        hidden_size=16, image_size=64, patch_size=8, mask_input_channels=4
    ).to_dict(),
    "mask_decoder_config": transformers.SamMaskDecoderConfig(
        hidden_size=16, mlp_dim=24, num_attention_heads=2, iou_head_hidden_dim=16
    ).to_dict(),
}  # fmt: skip

CASES: list[tuple[str, dict[str, Any], dict[str, tuple[int, ...]], dict[str, Meaning]]] = [
    ("YolosForObjectDetection", YOLOS, PICTURE,
     {"logits": Meaning(ONE_OF), "pred_boxes": Meaning(Kind.BOXES)}),
    ("RTDetrForObjectDetection", RT_DETR, PIXELS,
     {"logits": Meaning(EACH), "pred_boxes": Meaning(Kind.BOXES)}),
    ("SegformerForSemanticSegmentation", {**SEGFORMER, **CLASSES}, PIXELS,
     {"logits": Meaning(ONE_OF, 1)}),
    ("SegformerForSemanticSegmentation", {**SEGFORMER, "num_labels": 1}, PIXELS,
     {"logits": Meaning(EACH)}),
    ("SegformerForImageClassification", {**SEGFORMER, **CLASSES}, PIXELS,
     {"logits": Meaning(ONE_OF)}),
    ("CLIPSegForImageSegmentation", CLIPSEG, SQUARE,
     {"logits": Meaning(EACH), "conditional_embeddings": Meaning(Kind.EMBEDDING),
      "pooled_output": Meaning(VALUES)}),
    ("SiglipModel", PAIR, TEXTS, {name: Meaning(EACH) for name in LOGITS_OF_PAIRS} | EMBEDS),
    ("CLIPModel", {**PAIR, "projection_dim": 12}, TEXTS,
     {name: Meaning(ONE_OF) for name in LOGITS_OF_PAIRS} | EMBEDS),
    ("VitPoseForPoseEstimation", VITPOSE, {"pixel_values": (1, 3, 64, 48)},
     {"heatmaps": Meaning(Kind.PEAK)}),
    ("SamModel", SAM, PIXELS, {"pred_masks": Meaning(EACH), "iou_scores": Meaning(VALUES)}),
    ("UperNetForSemanticSegmentation", UPERNET, PIXELS, {"logits": Meaning(ONE_OF, 1)}),
    ("ViTForImageClassification", {**BACKBONE, **MANY}, PICTURE, {"logits": Meaning(EACH)}),
    ("ViTForImageClassification", {**BACKBONE, **CLASSES}, PICTURE, {"logits": Meaning(ONE_OF)}),
    ("BertForSequenceClassification", {**TEXT, **MANY}, WORDS, {"logits": Meaning(EACH)}),
    ("BertForSequenceClassification", {**TEXT, **REGRESSION}, WORDS, {"logits": Meaning(VALUES)}),
    ("BertForSequenceClassification", {**TEXT, "num_labels": 1}, WORDS,
     {"logits": Meaning(VALUES)}),
    ("BertForQuestionAnswering", TEXT, WORDS,
     {"start_logits": Meaning(ONE_OF), "end_logits": Meaning(ONE_OF)}),
    ("BertModel", TEXT, WORDS,
     {"last_hidden_state": Meaning(VALUES), "pooler_output": Meaning(Kind.EMBEDDING)}),
]  # fmt: skip


def computed(name: str, settings: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Any:
    """A small class, its inputs, and its outputs for them."""
    torch.manual_seed(0)
    cls: Any = getattr(transformers, name)
    model = shaken(cls(cls.config_class(**settings)), 0.1)
    batch = {
        name: torch.randint(3, 30, shape) if "ids" in name else torch.randn(shape)
        for name, shape in shapes.items()
    }
    return model, batch, run(model, [batch])[0]


@pytest.mark.parametrize(("name", "settings", "shapes", "expected"), CASES)
def test_what_the_outputs_of_a_class_mean(
    name: str,
    settings: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    expected: dict[str, Meaning],
) -> None:
    model, batch, outputs = computed(name, settings, shapes)
    read = results(list(outputs))
    assert meanings(model, {name: outputs[name] for name in read}, batch) == expected


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (("logits", "pred_boxes", "encoder_last_hidden_state"), ("logits", "pred_boxes")),
        (("logits", "intermediate_logits", "enc_topk_bboxes"), ("logits",)),
        (("prediction.0", "prediction.1", "init_reference_points"),
         ("prediction.0", "prediction.1")),
        (("heatmaps", "hidden_states.0"), ("heatmaps",)),
        (("text_embeds", "vision_model_output.pooler_output"), ("text_embeds",)),
        (("class_queries_logits", "masks_queries_logits", "pixel_decoder_last_hidden_state"),
         ("class_queries_logits", "masks_queries_logits")),
        (("last_hidden_state", "encoder_last_hidden_state"),
         ("last_hidden_state", "encoder_last_hidden_state")),
    ],
)  # fmt: skip
def test_what_users_read(names: tuple[str, ...], read: tuple[str, ...]) -> None:
    assert results(names) == read


def measured(meaning: Meaning, got: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    return means([sums(meaning, a[None], b[None]) for a, b in zip(got, exact, strict=True)])


def noisy(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two runs, the second of which is taken as exact."""
    generator = torch.Generator().manual_seed(4)
    exact = 2 * torch.randn(shape, generator=generator)
    return exact + 0.7 * torch.randn(shape, generator=generator), exact


def test_a_segmentation_is_compared_over_its_classes() -> None:
    got, exact = noisy(3, 5, 4, 6)
    found = measured(Meaning(Kind.ONE_OF, 1), got, exact)
    p, q = exact.double().log_softmax(1), got.double().log_softmax(1)
    pixels = 3 * 4 * 6
    assert found[KL] == pytest.approx(
        float(F.kl_div(q, p, reduction="sum", log_target=True)) / pixels
    )
    assert found[TOP1] == float((got.argmax(1) == exact.argmax(1)).sum()) / pixels
    over_columns = measured(Meaning(Kind.ONE_OF), got, exact)
    assert abs(over_columns[KL] - found[KL]) > 0.05 * found[KL]


def test_labels_are_compared_each_by_itself() -> None:
    got, exact = noisy(6, 5)
    found = measured(Meaning(Kind.EACH), got, exact)
    p, q = (torch.stack([x.sigmoid(), (-x).sigmoid()]).double() for x in (exact, got))
    assert found[KL] == pytest.approx(float((p * (p / q).log()).sum(0).mean()), rel=1e-5)
    assert found[DECISIONS] == float(((got > 0) == (exact > 0)).sum()) / 30 < 1
    shifted = measured(Meaning(Kind.EACH), exact + 3, exact)
    assert shifted[KL] > 0.1  # a softmax would not have seen it
    assert measured(Meaning(Kind.ONE_OF), exact + 3, exact)[KL] == pytest.approx(0, abs=1e-12)


def test_logits_that_are_infinite_in_both_runs_are_equal() -> None:
    exact = torch.tensor([[[0.5, -math.inf, 1.0]]])
    for kind in (Kind.ONE_OF, Kind.EACH):
        assert measured(Meaning(kind), exact, exact)[KL] == pytest.approx(0.0, abs=1e-12)


def test_the_overlap_of_boxes() -> None:
    exact = torch.tensor([[[0.5, 0.5, 0.2, 0.4], [0.2, 0.2, 0.1, 0.1], [0.3, 0.3, 0.0, 0.0]]])
    got = torch.tensor([[[0.6, 0.5, 0.2, 0.4], [0.8, 0.8, 0.1, 0.1], [0.3, 0.3, 0.0, 0.0]]])
    assert measured(Meaning(Kind.BOXES), got, exact)[OVERLAP] == pytest.approx((1 / 3 + 0 + 1) / 3)


DETECTIONS = {
    "logits": Meaning(Kind.EACH), "pred_boxes": Meaning(Kind.BOXES), "embedding": Meaning(VALUES),
}  # fmt: skip


def detections(rows: int = 2, queries: int = 40) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return {
        "logits": 3 * torch.randn(rows, queries, 5, generator=generator),
        "pred_boxes": torch.rand(rows, queries, 4, generator=generator),
        "embedding": torch.randn(rows, 3, generator=generator),
    }


def test_detections_that_change_places_are_the_same_detections() -> None:
    exact = detections()
    orders = [torch.randperm(40, generator=torch.Generator().manual_seed(at)) for at in (1, 2)]
    got = {
        name: torch.stack([each[row] for each, row in zip(exact[name], orders, strict=True)])
        for name in ("logits", "pred_boxes")
    } | {"embedding": exact["embedding"]}
    found = in_same_order(DETECTIONS, got, exact)
    assert all(torch.equal(found[name], value) for name, value in exact.items())
    moved = {**got, "pred_boxes": got["pred_boxes"] + 0.01}
    found = in_same_order(DETECTIONS, moved, exact)
    assert torch.equal(found["logits"], exact["logits"])
    assert torch.allclose(found["pred_boxes"] - exact["pred_boxes"], torch.tensor(0.01))


def test_a_detection_stands_for_one_detection_only() -> None:
    exact = detections(rows=1)
    got = {name: value.clone() for name, value in exact.items()}
    got["pred_boxes"][0, 7], got["logits"][0, 7] = exact["pred_boxes"][0, 3], exact["logits"][0, 3]
    found = in_same_order(DETECTIONS, got, exact)
    wrong = (found["pred_boxes"] != exact["pred_boxes"]).any(-1)[0]
    assert wrong.nonzero().flatten().tolist() == [7]  # number 3 is there twice, number 7 is lost


def test_what_is_not_a_number_ends_the_search() -> None:
    exact = detections(rows=1)
    got = {name: value.clone() for name, value in exact.items()}
    got["pred_boxes"][0, :5] = math.nan
    found = in_same_order(DETECTIONS, got, exact)
    assert torch.equal(found["pred_boxes"][0, 5:], exact["pred_boxes"][0, 5:])
    assert found["pred_boxes"][0, :5].isnan().all()


def test_outputs_without_boxes_keep_their_order() -> None:
    exact = {"logits": detections()["logits"]}
    got = {"logits": exact["logits"].flip(1)}
    assert in_same_order({"logits": Meaning(Kind.ONE_OF)}, got, exact) is got


def test_the_peaks_of_heat_maps() -> None:
    exact = torch.zeros(1, 2, 3, 4)
    exact[0, 0, 1, 2] = exact[0, 1, 2, 0] = 1.0
    got = exact.clone()
    got[0, 1, 0, 3] = 2.0
    assert measured(Meaning(Kind.PEAK), got, exact)[PEAKS] == 0.5


def test_embeddings_are_compared_by_cosine_and_neighbours() -> None:
    angles = torch.tensor([0.0, 0.1, 0.9, 1.2, 3.0])
    turned = angles + torch.tensor([0.0, 0.6, 0.0, 0.0, 0.0])  # the second comes closer to others

    def embeddings(at: torch.Tensor, length: float) -> list[torch.Tensor]:
        return [length * torch.stack([each.cos(), each.sin()])[None] for each in at]

    found = embedding_measures(embeddings(turned, 7.0), embeddings(angles, 1.0))
    assert found[LEAST_COSINE] == pytest.approx(math.cos(0.6))
    assert found[MEAN_COSINE] == pytest.approx((4 + math.cos(0.6)) / 5)
    # nearest before: 1 0 3 2 3; after: 1 2 1 2 3
    assert found[NEIGHBOURS] == pytest.approx(3 / 5)
    assert NEIGHBOURS not in embedding_measures(
        embeddings(turned[:2], 1.0), embeddings(angles[:2], 1.0)
    )


def test_runs_of_other_shapes_have_no_measures() -> None:
    got, exact = noisy(2, 5, 7)
    assert means([sums(Meaning(Kind.ONE_OF), got[:, :4], exact)]) == {}


def test_divergence_of_logits() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.5, 0.25]]).log()
    config, batches = SimpleNamespace(num_labels=3, problem_type=None), [{}]
    kl, top1 = divergence(config, batches, [{"logits": q}], [{"logits": p}])
    assert kl == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5)) and top1 == 0.0
    assert divergence(config, batches, [{"logits": p}], [{"logits": p}]) == (0.0, 1.0)
    assert divergence(config, batches, [{"hidden": p}], [{"hidden": p}]) == (None, None)
    config.problem_type = "multi_label_classification"
    apart, agreed = divergence(config, batches, [{"logits": p + 2}], [{"logits": p}])
    assert apart is not None and apart > 0.1 and agreed == 0.0
