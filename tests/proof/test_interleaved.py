"""Persimmon's projection holds query, key and value of each head side by side.

So there are gaps between the groups of queries, and between the groups of keys. On disk, the
queries and keys of each head are centred, and the values are not. The marker records such
groups, and is read back.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from live_models import moved
from safetensors.torch import load_file
from stored_files import changed
from tiny_models import BERT
from transformers import PersimmonConfig, PersimmonForCausalLM

from enjoyln_cli import fold, from_pretrained
from enjoyln_cli.checkpoint.marker import read_marker
from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.plan.axis import Axis, blocks, centre, group_means
from enjoyln_cli.runtime.modules import RMSNorm

HEADS, D = 4, 8
QUERIES, KEYS = Axis(0, 0, HEADS, D, 1, 3 * D), Axis(0, D, HEADS, D, 1, 3 * D)
SIZES = {**BERT, "hidden_size": HEADS * D, "num_attention_heads": HEADS, "qk_layernorm": True}
FUSED = "self_attn.query_key_value"


def model() -> PersimmonForCausalLM:
    return moved(PersimmonForCausalLM(PersimmonConfig(**SIZES)))


def ids(seed: int, tokens: int = 7) -> torch.Tensor:
    return torch.randint(31, (2, tokens), generator=torch.Generator().manual_seed(seed))


def values_of(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(HEADS, 3, D, -1)[:, 2]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("persimmon") / "source"
    model().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def out(source: Path) -> Path:
    path = source.parent / "out"
    fold(source, path, verify=False)
    return path


def test_on_disk(source: Path, out: Path) -> None:
    old, new = (load_file(path / "model.safetensors") for path in (source, out))
    name = f"model.layers.1.{FUSED}.weight"
    for axis in (QUERIES, KEYS):
        assert group_means(new[name], axis).abs().max() < 1e-15
        assert group_means(old[name], axis).abs().max() > 1e-2
    assert torch.equal(values_of(new[name]), values_of(old[name]))
    torch.testing.assert_close(new[name], centre(centre(old[name], QUERIES), KEYS))
    original = PersimmonForCausalLM.from_pretrained(source, dtype=torch.float64).eval()
    folded = from_pretrained(out, dtype=torch.float64).eval()
    assert isinstance(folded.model.layers[0].self_attn.q_layernorm, RMSNorm)
    with torch.no_grad():
        expected = original(ids(5, 9)).logits
        torch.testing.assert_close(folded(ids(5, 9)).logits, expected, rtol=1e-12, atol=1e-12)


def test_the_marker_is_read_back(out: Path) -> None:
    config = json.loads((out / "config.json").read_text())
    stored = [weight["axis"] for weight in config["enjoyln"]["plan"]["centred_weights"]]
    axes = {Axis(**axis) for axis in stored}
    assert axes == {weight.axis for weight in read_marker(config).plan.centred_weights}
    assert {QUERIES, KEYS} <= axes
    assert all(("step" in axis) == bool(Axis(**axis).step) for axis in stored)
    assert len({axis.step for axis in axes}) > 1


def test_a_weight_that_is_no_longer_centred_is_noticed(out: Path, tmp_path: Path) -> None:
    """If the mean of one head's keys changes, no norm runs as RMSNorm; values may change freely."""
    name = f"model.layers.0.{FUSED}.weight"
    spoilt = changed(out, tmp_path / "key", lambda t: t[name][2 * 3 * D + D + 1].add_(0.5))
    with pytest.raises(EnjoyLNError, match="since it was centred"):
        from_pretrained(spoilt)
    from_pretrained(changed(out, tmp_path / "value", lambda t: t[name][2 * D + 1].add_(0.5)))


def test_blocks_cover_what_the_axis_does() -> None:
    x = torch.randn(2, HEADS * 3 * D, 5, dtype=torch.float64)
    axis = Axis(1, D, HEADS, D // 2, 2, 3 * D)
    y = x
    for block in blocks(axis):
        assert not block.step
        y = centre(y, block)
    assert torch.equal(y, centre(x, axis))
    assert blocks(axis)[-1].stop == axis.stop
    assert group_means(centre(x, axis), axis).abs().max() < 1e-15
    assert group_means(x, axis).shape == (2, HEADS, 1, 2, 5)
