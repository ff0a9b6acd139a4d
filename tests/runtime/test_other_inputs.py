"""Inputs of a loaded result that were never centred or never proven, and encoders called alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from converted_checkpoints import inputs, original, run, same
from eight_models import given, pair
from live_models import CHECKPOINTS, computes_rms, moved
from rounding import IDENTITY, as_exact, in_float64, relative
from torch import nn
from transformers import ViTModel

from enjoyln_cli import fold, from_pretrained, optimize
from enjoyln_cli.runtime.call_guards import input_means
from enjoyln_cli.runtime.loading import plan_of

pytestmark = [
    pytest.mark.filterwarnings("error:computing LayerNorm"),
    pytest.mark.usefixtures("seeded"),
]


@pytest.mark.parametrize("name", ["gpt2", "phi"])
def test_a_prefix_of_soft_prompts(outs: dict[str, Path], name: str) -> None:
    """Prompt tuning: learned rows before the embedded tokens."""
    ids = inputs(name)["input_ids"]
    prefix = torch.randn(1, 4, 1) + torch.randn(1, 4, original(name).config.hidden_size)
    found = []
    for model in (original(name), from_pretrained(outs[name])):
        model = model.double()
        with torch.no_grad():
            # rows of the weight: the embedding module would return them centred
            rows = nn.functional.embedding(ids, original(name).get_input_embeddings().weight)
            given = torch.cat([prefix.expand(2, -1, -1), rows], 1).double()
            found.append(model(inputs_embeds=given).logits)
            found.append(
                model.generate(
                    inputs_embeds=given, max_new_tokens=5, do_sample=False, pad_token_id=0
                )
            )
    assert computes_rms(model, inputs_embeds=given)
    assert as_exact(found[2], found[0], found[0], torch.float32)
    assert torch.equal(found[3], found[1])


def test_masked_patches_make_a_vit_compute_layer_norm(tmp_path: Path) -> None:
    """The mask token is stored, but no trace reads it: the traced class is built without it."""
    config = transformers.AutoConfig.from_pretrained(CHECKPOINTS / "vit")
    source = ViTModel(config, use_mask_token=True)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape) + 0.1)
    source.eval().save_pretrained(tmp_path / "source")
    fold(tmp_path / "source", tmp_path / "out", verify=False)
    model = from_pretrained(tmp_path / "out", use_mask_token=True)
    given = inputs("vit")
    masked = {**given, "bool_masked_pos": torch.rand(2, 16) < 0.5}
    assert not computes_rms(model, **masked) and computes_rms(model, **given)
    assert same(model, source, masked)
    with input_means(model) as means:
        run(model, masked)
    assert max(means.values()) > 0.01


def test_inputs_that_only_an_unproven_base_model_takes(outs: dict[str, Path]) -> None:
    model = from_pretrained(outs["vit"])
    model.vit.embeddings.mask_token = nn.Parameter(torch.randn(1, 1, 64) + 1)
    optimize(model)
    masked = {**inputs("vit"), "bool_masked_pos": torch.rand(2, 16) < 0.5}
    assert not computes_rms(model.vit, **masked)
    assert computes_rms(model, **inputs("vit"))


# Encoders, which `generate` calls directly.

PEGASUS = {
    "vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 40,
}  # fmt: skip


@pytest.fixture(scope="module")
def pegasus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model with an encoder and a decoder, and the directory of its converted checkpoint."""
    source = moved(
        transformers.PegasusForConditionalGeneration(transformers.PegasusConfig(**PEGASUS))
    ).float()
    folder = tmp_path_factory.mktemp("pegasus")
    source.save_pretrained(folder / "source")
    fold(folder / "source", folder / "out", verify=False)
    return source, folder / "out"


def generated(model: Any, **given: Any) -> torch.Tensor:
    """The logits of six steps of greedy generation."""
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        found = transformers.GenerationMixin.generate(
            model, **given, **settings, return_dict_in_generate=True, output_logits=True
        )
    return torch.stack(found.logits)


def encoder_computes_rms(model: Any, **given: Any) -> bool:
    return computes_rms(model.get_encoder(), **given)


@pytest.mark.slow
def test_generate_with_embeddings_for_the_encoder(pegasus: tuple[Any, Path]) -> None:
    source, out = pegasus
    model = copy.deepcopy(from_pretrained(out))
    assert plan_of(model).entry_inputs == ("inputs_embeds",)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :2] = 0
    for heard in (
        {"input_ids": torch.randint(5, 90, (2, 7))},
        {"inputs_embeds": torch.randn(2, 7, 32) + 3},
        {"inputs_embeds": torch.randn(2, 7, 32) + 3, "attention_mask": mask},
    ):
        exact = generated(in_float64(source), **in_float64(heard))
        assert as_exact(generated(model, **heard), generated(source, **heard), exact)
    assert encoder_computes_rms(model, inputs_embeds=torch.randn(2, 7, 32))


def test_an_unproven_input_of_the_encoder_alone(eight: Path) -> None:
    model, stock = pair("whisper", eight)
    assert "attention_mask" in plan_of(model).unproven
    sound = {"input_features": given("whisper")["input_features"]}
    masked = {**sound, "attention_mask": torch.ones(2, 18, dtype=torch.long)}
    assert not encoder_computes_rms(model, **masked)
    assert encoder_computes_rms(model, **sound)
    start = {"decoder_input_ids": torch.full((2, 1), 4)}
    for heard in (sound, masked):
        found, expected = (generated(one, **heard, **start) for one in (model, stock))
        assert relative(found, expected) <= IDENTITY


def test_an_encoder_that_is_called_first_is_looked_at(pegasus: tuple[Any, Path]) -> None:
    model = from_pretrained(pegasus[1])
    given = {"inputs_embeds": torch.randn(2, 7, 32)}
    assert encoder_computes_rms(model, **given)
    with torch.no_grad():
        model.model.encoder.layers[0].fc2.weight += 0.1
    with pytest.warns(UserWarning, match="computing LayerNorm: .*fc2"):
        assert not encoder_computes_rms(model, **given)
