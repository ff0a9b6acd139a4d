"""A stream that nothing linear writes rotates by a product that is added in front of a block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from live_models import moved
from tiny_models import GPT2, WHISPER, live, main_call, rotated
from torch import nn
from transformers import CONFIG_MAPPING

from enjoyln_cli import fold
from enjoyln_cli.analysis.analyze import analyze_config, analyze_module
from enjoyln_cli.comparison.run import choose_outputs, run
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.rewrite.in_memory import ROTATION_LAYER

PRODUCTS = Options(fold=False, rotate=True, online_rotations=True)
WAV2VEC2 = {
    "vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 33, "conv_dim": (9, 9), "conv_stride": (5, 2), "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer",
    "do_stable_layer_norm": True,
}  # fmt: skip
UNTIED = {"tie_word_embeddings": False}
MODELS: list[tuple[str, dict[str, Any], str, str, set[str]]] = [
    (
        "whisper", WHISPER, "WhisperForConditionalGeneration", "logits", {"model.encoder.layers.0"}
    ),
    (
        "wav2vec2", WAV2VEC2, "Wav2Vec2ForCTC", "logits", {"wav2vec2.encoder.layers.0"}
    ),
    ("gpt2", {**GPT2, **UNTIED}, "GPT2LMHeadModel", "logits", set()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings", "name", "output", "heads"), MODELS, ids=[model[0] for model in MODELS]
)
def test_the_function_stays_the_same(
    kind: str, settings: dict[str, Any], name: str, output: str, heads: set[str]
) -> None:
    config = CONFIG_MAPPING[kind](**settings)
    plan = analyze_config(config, model_class=name, outputs=(output,), options=PRODUCTS).plan
    streams = [group for group in plan.rotation_groups if group.kind == "residual"]
    assert not any(group.reason for group in streams if group.size == 24), streams
    assert {group.online_rotation for group in streams} - {""} == heads
    original = live(name, config)
    rotated_model = rotated(original, plan)
    (new,), (old,) = (
        choose_outputs(run(m, [main_call(m)]), [output]) for m in (rotated_model, original)
    )
    torch.testing.assert_close(new[output], old[output], rtol=1e-11, atol=1e-11)
    for head in heads:
        matrix = rotated_model.get_submodule(f"{head}.{ROTATION_LAYER}").weight
        one = torch.eye(24, dtype=torch.float64)
        torch.testing.assert_close(matrix @ matrix.T, one, rtol=0, atol=1e-12)
        assert (matrix - one).abs().max() > 0.1


class Layer(nn.Module):
    """A pre-norm block; ``inside`` says whether it adds its input itself."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.norm, self.linear, self.inside = nn.LayerNorm(24), nn.Linear(24, 24), inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.norm(x))
        return x + y if self.inside else y


class Sound(nn.Module):
    """A stream that a GELU writes; ``inside`` is handed to its blocks."""

    def __init__(self, inside: bool, calls: int = 1) -> None:
        super().__init__()
        self.stem, self.last, self.head = nn.Linear(9, 24), nn.LayerNorm(24), nn.Linear(24, 5)
        self.layers = nn.ModuleList([Layer(inside), Layer(inside)])
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.gelu(self.stem(x))
        for layer in [*self.layers] * self.calls:
            x = layer(x) if layer.inside else x + layer(x)
        return self.head(self.last(x))


def sound(inside: bool, calls: int = 1) -> Any:
    return moved(Sound(inside, calls))


def rows(seed: int = 1) -> torch.Tensor:
    return torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(seed)).double()


def test_a_module_whose_blocks_add_their_input() -> None:
    model = sound(inside=True)
    plan = analyze_module(model, rows(), options=PRODUCTS).plan
    assert [group.online_rotation for group in plan.rotated] == ["layers.0"]
    rotated_model = rotated(model, plan)
    torch.testing.assert_close(rotated_model(rows(2)), model(rows(2)), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("inside", "calls"), [(False, 1), (True, 2)])
def test_no_product_where_it_would_act_on_other_values(inside: bool, calls: int) -> None:
    """The first block's input is also added to its output, or is the last block's output."""
    model = sound(inside, calls)
    plan = analyze_module(model, rows(), options=PRODUCTS).plan
    assert not plan.rotated
    (kept,) = plan.rotation_groups
    assert "gelu acts on single features" in kept.reason


def test_without_the_option_nothing_is_added() -> None:
    plan = analyze_module(sound(inside=True), rows(), options=Options(fold=False, rotate=True)).plan
    assert not plan.rotated and {group.online_rotation for group in plan.rotation_groups} == {""}


def test_a_checkpoint_has_no_place_for_a_product(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["whisper"](**WHISPER)
    live("WhisperForConditionalGeneration", config).save_pretrained(tmp_path / "in")
    with pytest.raises(UnsupportedModel, match=r"layers\.0 .*a checkpoint has no place for"):
        fold(tmp_path / "in", tmp_path / "out", options=PRODUCTS, outputs=("logits",))
    assert not (tmp_path / "out").exists()
