"""The pass for Olive; skipped where Olive is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from live_models import CHECKPOINTS
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow
RTN = {"type": "Rtn", "bits": 8, "group_size": -1}
workflows = pytest.importorskip("olive.workflows")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(torch.arange(3, 43)[None], use_cache=False).logits
    return result


def run_passes(model: str, passes: dict[str, Any], folder: Path) -> Any:
    """The model that Olive writes, loaded."""
    from olive.model import HfModelHandler

    from enjoyln_cli.quantisation.olive_pass import package_config

    accelerators = [{"device": "cpu", "execution_providers": ["CPUExecutionProvider"]}]
    config = {
        "input_model": {"type": "HfModel", "model_path": str(CHECKPOINTS / model)},
        "target": {"type": "LocalSystem", "accelerators": accelerators},
        "passes": passes,
        "output_dir": str(folder / "out"),
        "cache_dir": str(folder / "cache"),
        "evaluate_input_model": False,
    }
    result = workflows.run(config, package_config=package_config())
    return HfModelHandler(result.get_best_candidate().model_path).load_model()


def test_a_rotated_model_computes_the_same(tmp_path: Path) -> None:
    original = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "gpt2")
    rotated = run_passes("gpt2", {"rotate": {"type": "EnjoylnRotate", "seed": 3}}, tmp_path)
    exact = logits(original)
    assert (logits(rotated) - exact).norm() < 1e-5 * exact.norm()
    head = original.get_output_embeddings().weight
    assert (rotated.get_output_embeddings().weight - head).norm() > 0.5 * head.norm()


def test_a_later_pass_quantises_the_rotated_model(tmp_path: Path) -> None:
    passes = {"rotate": {"type": "EnjoylnRotate"}, "quantise": RTN}
    exact = logits(AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "phi"))
    error = (logits(run_passes("phi", passes, tmp_path)) - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.05
