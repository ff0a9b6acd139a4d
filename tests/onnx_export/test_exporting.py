"""A model that cannot be exported is refused in one line, and its exporter prints nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from live_models import shaken
from rounding import relative
from tiny_models import GPT2
from torch import nn
from transformers import (
    GPT2Config,
    GPT2Model,
    LongcatFlashConfig,
    LongcatFlashForCausalLM,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    YolosConfig,
    YolosForObjectDetection,
)

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.onnx_export.cached_run import load_programs, whole_rows
from enjoyln_cli.onnx_export.exporting import exporting
from enjoyln_cli.onnx_export.programs import programs_of, save
from enjoyln_cli.quantisers.traced_programs import TracedPrograms


class Loops(nn.Module):
    """Runs through the rows that are positive, or converts its own layer."""

    def __init__(self, converts: bool = False) -> None:
        super().__init__()
        self.layer, self.converts = nn.Linear(3, 3), converts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.converts:
            return self.layer.to(torch.float32)(x)  # type: ignore[no-any-return]
        for row in (x[:, 0] > 0).nonzero():
            x = x + self.layer(x[row])
        return x


@pytest.mark.parametrize(
    ("converts", "why"),
    [(False, "needs a tensor's value as a Python number"), (True, "converts a module to another")],
)
def test_the_line_says_where_and_why(
    converts: bool, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Loops(converts)
    at = rf"torch cannot export Loops: Loops\.forward, line \d+, {why}.*\); try that$"
    with pytest.raises(UnsupportedModel, match=at), exporting(model, "torch", "; try that"):
        torch.export.export(model, (torch.randn(4, 3),))
    assert capfd.readouterr() == ("", "")


def test_an_error_of_the_exporter_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: dict[str, Any] = {"__name__": "torch.onnx.inside"}
    exec("def export(*args, **given):\n    raise RuntimeError('no such operator')", inside)
    monkeypatch.setattr(torch.onnx, "export", inside["export"])
    with pytest.raises(
        UnsupportedModel, match=r"^torch\.onnx cannot export \w+: no such operator$"
    ):
        programs_of(shaken(GPT2Model(GPT2Config(**GPT2))), torch.float32)


def test_no_memory_is_no_reason_of_the_model() -> None:
    with pytest.raises(MemoryError), exporting(Loops(), "torch"):
        raise MemoryError


SIZES = {"vocab_size": 37, "num_layers": 1, "num_heads": 2}
SWITCH = {**SIZES, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_experts": 2}
LONGCAT = {
    "vocab_size": 37, "num_layers": 1, "num_attention_heads": 2, "hidden_size": 16,
    "ffn_hidden_size": 16, "expert_ffn_hidden_size": 8, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 2, "zero_expert_num": 1, "moe_topk": 1,
}  # fmt: skip


def switch() -> Any:
    config = SwitchTransformersConfig(**SWITCH, decoder_start_token_id=0)
    return shaken(SwitchTransformersForConditionalGeneration(config))


def longcat() -> Any:
    return shaken(LongcatFlashForCausalLM(LongcatFlashConfig(**LONGCAT)))


@pytest.mark.slow
@pytest.mark.parametrize("make", [switch, longcat])
def test_experts_in_a_loop_are_refused(make: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """The model runs, so nothing asks whether it does; another format is named."""
    model = make()
    ids = torch.randint(3, 37, (2, 7))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids[:, :4]
    said: list[str] = []
    forms = TracedPrograms([batch], batch, lambda kind, text: said.append(text))
    with pytest.raises(UnsupportedModel) as caught:
        forms.programs(model, None)
    line = str(caught.value)
    assert "forward, line" in line and line.endswith(
        "; --format torchao quantises a model without exporting it"
    )
    assert "make sure" not in line and not said and capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("width", [32, 48])
def test_pictures_of_another_size_than_the_config_says(width: int, tmp_path: Path) -> None:
    """Also if only some have another size; then the program takes all sizes.

    Another candidate fills the same program.
    """
    config = YolosConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=[32, 32], patch_size=8, num_detection_tokens=4, num_labels=3,
    )  # fmt: skip
    model = shaken(YolosForObjectDetection(config))
    other = shaken(YolosForObjectDetection(config), 0.3)
    torch.manual_seed(0)
    samples = [{"pixel_values": torch.randn(1, 3, 32, size)} for size in (32, 32, width)]
    forms = TracedPrograms(samples, {"pixel_values": torch.randn(2, 3, 32, 32)}, lambda *said: None)
    for candidate in (model, other):
        save(forms.programs(candidate, None), tmp_path)
        assert forms.is_one_call == (width != 32) and len(forms.traced) == 1
        compute = whole_rows(load_programs(tmp_path))
        for sample in samples:
            with torch.no_grad():
                exact = candidate(**sample)
            found = compute(sample)
            for name in ("logits", "pred_boxes"):
                assert relative(found[name], exact[name]) < 1e-5


@pytest.mark.slow
def test_a_model_that_only_transformers_exports(tmp_path: Path) -> None:
    """Its positions are resized to the shape of each picture."""
    config = Siglip2VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_patches=16, patch_size=4,
    )  # fmt: skip
    torch.manual_seed(0)

    def pictures(rows: int, height: int, width: int) -> dict[str, torch.Tensor]:
        mask = (torch.arange(20) < height * width).long()
        return {
            "pixel_values": torch.randn(rows, 20, 48),
            "pixel_attention_mask": mask.expand(rows, 20),
            "spatial_shapes": torch.tensor([[height, width]]).expand(rows, 2),
        }

    samples = [pictures(1, 4, 5), pictures(1, 3, 4)]
    forms = TracedPrograms(samples, pictures(2, 4, 5), lambda *said: None)
    for model in (shaken(Siglip2VisionModel(config)), shaken(Siglip2VisionModel(config), 0.3)):
        save(forms.programs(model, None), tmp_path)
        compute = whole_rows(load_programs(tmp_path))
        for sample in samples:
            with torch.no_grad():
                exact = model(**sample).last_hidden_state
            assert relative(compute(sample)["last_hidden_state"], exact) < 1e-5
    assert forms.is_by_transformers and not forms.traced
