"""A result of version 0.1 can still be read, verified, run and unfolded.

That version was from before the modules moved into folders. ``version_0.1/original`` is a GPT-2 in
bfloat16 with random weights, and ``version_0.1/folded`` is the result of
``enjoyln fold original -o folded --keep-means``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from enjoyln_cli import from_pretrained, load_recipe, unfold, verify
from enjoyln_cli.runtime.modules import RMSNorm

WRITTEN = Path(__file__).parent / "version_0.1"
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


@pytest.fixture
def folded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(WRITTEN / "folded", tmp_path / "folded"))


def test_it_is_verified(folded: Path) -> None:
    before = json.loads((folded / "enjoyln_verify.json").read_text())
    assert verify(folded, against=WRITTEN / "original").passed
    after = json.loads((folded / "enjoyln_verify.json").read_text())
    assert before.keys() <= after.keys()


def test_it_runs_rms_norm_and_agrees(folded: Path) -> None:
    marker = json.loads((folded / "config.json").read_text())["enjoyln"]
    model = from_pretrained(folded, dtype=torch.bfloat16).eval()
    for name in marker["rmsnorm"]:
        assert isinstance(model.get_submodule(name), RMSNorm)
    load = AutoModelForCausalLM.from_pretrained
    original = load(WRITTEN / "original", dtype=torch.bfloat16).eval()
    with torch.no_grad():
        rounded, got = original(IDS).logits.double(), model(IDS).logits.double()
        exact = original.double()(IDS).logits
    assert (got - exact).norm() < 1.25 * (rounded - exact).norm()


def test_its_recipe_is_read(folded: Path) -> None:
    recipe = load_recipe(folded / "enjoyln_recipe.yaml")
    assert recipe.model_type == "gpt2" and recipe.record is not None
    assert [line.norm for line in recipe.variants[0].norms]


def test_it_is_unfolded_bit_for_bit(folded: Path, tmp_path: Path) -> None:
    unfold(folded, tmp_path / "back")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (WRITTEN / "original" / name).read_bytes()
