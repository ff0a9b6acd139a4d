"""Norms of stored checkpoints that were fused with the layers after them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from fold_cases import written
from live_models import CHECKPOINTS
from rounding import as_exact, in_float64

from enjoyln_cli import Options, fold, from_pretrained, refold
from enjoyln_cli.checkpoint.marker import read_marker
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.runtime.modules import RMSNorm


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    folder = tmp_path_factory.mktemp("fused") / "phi"
    plan = fold(
        CHECKPOINTS / "phi",
        folder,
        model_class="PhiForCausalLM",
        options=Options(merge="affine"),
        verify=False,
    ).plan
    return folder, plan


def test_what_is_stored(out: tuple[Path, Plan]) -> None:
    folder, plan = out
    before, after = written(CHECKPOINTS / "phi"), written(folder)
    head = plan.fused[-1].readers[0]
    gain, add = (before[f"model.final_layernorm.{name}"].double() for name in ("weight", "bias"))
    weight, bias = before[head.weight.tensor].double(), before["lm_head.bias"].double()
    assert torch.equal(after["lm_head.weight"], (weight * gain).float())
    step = torch.finfo(torch.float32).eps  # rounded once
    expected = bias + weight @ add
    torch.testing.assert_close(after["lm_head.bias"].double(), expected, rtol=step, atol=1e-15)
    for one in plan.fused:
        assert torch.equal(after[one.weight], torch.ones_like(after[one.weight]))
        assert torch.equal(after[one.bias], torch.zeros_like(after[one.bias]))


def test_the_marker_says_what_an_engine_may_leave_out(out: tuple[Path, Plan]) -> None:
    config = json.loads((out[0] / "config.json").read_text())
    found = [(one.norm, bool(one.weight), bool(one.bias)) for one in read_marker(config).plan.fused]
    assert found == [(one.norm, True, True) for one in out[1].fused] and len(found) == 5


def test_what_a_norm_learns_to_add_after_a_fusion_counts(out: tuple[Path, Plan]) -> None:
    model = from_pretrained(out[0], dtype=torch.float32)
    norm = model.model.layers[1].input_layernorm
    ids = torch.arange(12).view(1, 12) + 20
    with torch.no_grad():
        same = model(ids).logits
        assert isinstance(norm, RMSNorm) and not norm.bias.any()
        model.train()
        norm.bias += 0.7
        model.model.layers[0].mlp.fc2.bias += 0.5
        model.eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            learned, exact = model(ids).logits, in_float64(model)(ids).logits
        assert float((learned - same).abs().max()) > 1e-2
        refold(model)
        assert as_exact(model(ids).logits, learned, exact)
        assert not norm.shifted and float(norm.bias.min()) > 0.6
