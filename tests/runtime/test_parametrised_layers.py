"""Parametrised layers, as wav2vec2's convolution with weight norm, in a loaded result."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import relative
from tiny_models import live
from torch.nn.utils import parametrizations, parametrize
from transformers import Wav2Vec2ConformerConfig, Wav2Vec2ConformerModel

import enjoyln_cli
from enjoyln_cli import fold
from enjoyln_cli.runtime.call_guards import call_guards, input_means
from enjoyln_cli.runtime.loading import plan_of

CONFIG = Wav2Vec2ConformerConfig(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=33,
    conv_dim=(14, 14),
    conv_stride=(5, 2),
    conv_kernel=(10, 3),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=6,
    num_conv_pos_embedding_groups=4,
)
SOUND = torch.randn(1, 400, generator=torch.Generator().manual_seed(0)).double()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint whose folded norms read a convolution with weight norm, and its result."""
    folder = tmp_path_factory.mktemp("conformer")
    source, out = folder / "source", folder / "out"
    live("Wav2Vec2ConformerModel", CONFIG).save_pretrained(source)
    fold(source, out, verify=False)
    return source, out


def loaded(out: Path) -> Any:
    return enjoyln_cli.from_pretrained(out, Wav2Vec2ConformerModel, dtype=torch.float64).eval()


def output(model: Any) -> torch.Tensor:
    for _, guard in call_guards(model):
        guard.state.literal = True
    with torch.no_grad():
        return model(SOUND).last_hidden_state


def test_they_are_known_again(folders: tuple[Path, Path]) -> None:
    source, out = folders
    model, stock = loaded(out), Wav2Vec2ConformerModel.from_pretrained(source, dtype=torch.float64)
    assert parametrize.is_parametrized(model.encoder.pos_conv_embed.conv)
    with warnings.catch_warnings(), input_means(model) as means:
        warnings.simplefilter("error")
        found = output(model)
    assert len(means) == len(plan_of(model).folded) > 0
    assert max(means.values()) < 1e-14
    assert relative(found, output(stock.eval())) < 1e-12


def remove(conv: torch.nn.Module) -> None:
    parametrize.remove_parametrizations(conv, "weight")


def normalise_twice(conv: torch.nn.Module) -> None:
    parametrizations.spectral_norm(conv)


@pytest.mark.parametrize("change", [remove, normalise_twice])
def test_a_parametrisation_that_changes_is_noticed(folders: tuple[Path, Path], change: Any) -> None:
    source, out = folders
    stock = Wav2Vec2ConformerModel.from_pretrained(source, dtype=torch.float64).eval()
    model = loaded(out)
    torch.manual_seed(0)
    change(stock.encoder.pos_conv_embed.conv)
    torch.manual_seed(0)
    change(model.encoder.pos_conv_embed.conv)
    with pytest.warns(UserWarning, match=r"computing LayerNorm: encoder\.pos_conv_embed\.conv"):
        found = output(model)
    assert relative(found, output(stock)) < 1e-12
