"""Which outputs a rotation keeps by default, and that exactly the listed outputs change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from folding_live import Computing
from live_models import moved
from tiny_models import TOKENS, live, rotated
from torch import nn
from transformers import CONFIG_MAPPING

from enjoyln_cli.analysis.analyze import analyze_config, analyze_module
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.rotation.used_outputs import by_products

ROTATED = Options(fold=False, rotate=True)
TOWER = {"hidden_size": 24, "intermediate_size": 33, "num_attention_heads": 4}

CASES: dict[str, tuple[bool, set[str], set[str]]] = {
    "a head": (True, {"logits"}, {"hidden_states.0", "encoder_last_hidden_state", "attentions.1"}),
    "a detector": (True, {"logits", "pred_boxes"}, {"last_hidden_state"}),
    "parts of a model": (True, {"logits"}, {"image_outputs.pooler_output", "image_hidden_states"}),
    "two towers": (
        False, {"text_embeds", "logits_per_image"},
        {"text_model_output.pooler_output", "last_hidden_state"},
    ),
    "a base model": (False, {"last_hidden_state", "pooler_output"}, {"hidden_states.3"}),
    "an encoder and a decoder": (False, {"last_hidden_state"}, {"encoder_last_hidden_state"}),
    "a base model with images": (
        False, {"last_hidden_state"}, {"image_outputs.last_hidden_state", "image_hidden_states"}
    ),
    "a pyramid": (False, {"last_hidden_state", "fpn_hidden_states.0", "fpn_positions.0"}, set()),
    "decoder states alone": (True, {"hidden_states.0", "hidden_states.1"}, set()),
    "a tuple": (True, {"0", "1.0"}, set()),
    "names of its own": (False, {"tokens", "hidden_states"}, set()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_a_class_is_used_for(case: str) -> None:
    has_head, used, others = CASES[case]
    assert by_products(used | others, has_head) == others


def clip() -> Any:
    text = {**TOKENS, **TOWER, "num_hidden_layers": 2, "max_position_embeddings": 31}
    image = {**TOWER, "num_hidden_layers": 1, "image_size": 15, "patch_size": 5}
    both = {"text_config": text, "vision_config": image, "projection_dim": 11}
    return CONFIG_MAPPING["clip"](**both)


def moved_fields(plan: Any, config: Any) -> tuple[set[str], set[str]]:
    """The output fields of CLIP that stay the same, and the fields that change."""
    original = live("CLIPModel", config)
    rotated_model = rotated(original, plan)
    ids = torch.randint(3, 37, (2, 7), generator=torch.Generator().manual_seed(3))
    pixels = torch.randn(2, 3, 15, 15, generator=torch.Generator().manual_seed(4)).double()
    with torch.no_grad():
        before, after = (m(input_ids=ids, pixel_values=pixels) for m in (original, rotated_model))
    same, changed = set(), set()
    for name in before:
        nested = hasattr(before[name], "items")
        pairs = before[name] if nested else {"": before[name]}
        for field, old in pairs.items():
            new = after[name][field] if nested else after[name]
            is_same = float((new - old).abs().max() / old.abs().max()) <= 1e-11
            (same if is_same else changed).add(f"{name}.{field}" if field else name)
    return same, changed


def test_outputs_of_parts_rotate_and_are_listed() -> None:
    plan = analyze_config(clip(), model_class="CLIPModel", options=ROTATED).plan
    (stream,) = [group for group in plan.rotated if group.kind == "residual"]
    assert stream.outputs == ("text_model_output.last_hidden_state",)
    assert set(plan.outputs) == {
        "image_embeds", "logits_per_image", "logits_per_text", "text_embeds"
    }  # fmt: skip
    same, changed = moved_fields(plan, clip())
    assert changed == {"text_model_output.last_hidden_state"} and set(plan.outputs) <= same


def test_a_named_output_is_kept() -> None:
    kept = ("logits_per_text", "text_model_output.last_hidden_state")
    plan = analyze_config(clip(), model_class="CLIPModel", outputs=kept, options=ROTATED).plan
    reasons = {
        group.reason for group in plan.rotation_groups if group.name.startswith("text_model")
    }
    assert "the model returns it" in reasons and plan.outputs == kept
    assert set(kept) <= moved_fields(plan, clip())[0]


def unread() -> Any:
    """A norm behind the stream that nothing but a returned state reads."""

    def run(m: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = m.enter(x)
        return {"logits": m.head(m.norm(h)), "last_hidden_state": torch.tanh(m.after(h))}

    parts = {"enter": nn.Linear(7, 12), "norm": nn.LayerNorm(12), "after": nn.LayerNorm(12)}
    return moved(Computing(run, **parts, head=nn.Linear(12, 5)))


def test_a_norm_that_nothing_reads_is_no_obstacle() -> None:
    model = unread()
    x, other = (torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    plan = analyze_module(model, x.double(), options=ROTATED).plan
    (group,) = plan.rotated
    assert group.outputs == ("last_hidden_state",) and group.norms == ("norm",)
    rotated_model = rotated(model, plan)
    assert torch.equal(rotated_model.after.weight, model.after.weight)
    before, after = model(other.double()), rotated_model(other.double())
    torch.testing.assert_close(after["logits"], before["logits"], rtol=1e-11, atol=1e-11)
    assert not torch.allclose(after["last_hidden_state"], before["last_hidden_state"], atol=1e-2)


def test_a_norm_whose_result_is_to_stay_is_an_obstacle() -> None:
    x, both = torch.ones(2, 3, 7).double(), ("logits", "last_hidden_state")
    plan = analyze_module(unread(), x, outputs=both, options=ROTATED).plan
    (group,) = plan.rotation_groups
    said = "tanh acts on single features, so it does not commute with a rotation"
    assert group.reason == said


def test_where_no_output_changes_all_are_proven() -> None:
    config = CONFIG_MAPPING["gpt2"](**TOKENS, n_embd=24, n_layer=1, n_head=4)
    plan = analyze_config(config, model_class="GPT2Model", options=ROTATED).plan
    assert plan.outputs == () and [group.kind for group in plan.rotated] == ["values"]
    (kept,) = [group for group in plan.rotation_groups if group.kind == "residual"]
    assert kept.reason == "the model returns it"
