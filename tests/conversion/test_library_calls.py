"""The library's own calls: what they take, warn of and refuse."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from commands import CHECKPOINTS, GPT2, refused

import enjoyln_cli
from enjoyln_cli.errors import EnjoyLNError


def test_the_library_takes_a_config_and_a_path() -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(GPT2)
    one = enjoyln_cli.analyze(config, model_class="GPT2Model").plan
    stored = enjoyln_cli.analyze(GPT2, model_class="GPT2Model").plan
    assert one.norms == stored.norms
    pairs = zip(one.centred_weights, stored.centred_weights, strict=True)
    assert all(of_file.tensor == f"transformer.{own.tensor}" for own, of_file in pairs)


def test_example_inputs_without_a_module_are_refused() -> None:
    with pytest.raises(EnjoyLNError, match="example inputs"):
        enjoyln_cli.analyze(GPT2, torch.zeros(1))


def test_the_library_warns_and_reports_progress(tmp_path: Path) -> None:
    news: list[tuple[str, str]] = []
    done: list[tuple[int, int]] = []
    result = enjoyln_cli.fold(
        GPT2,
        tmp_path / "out",
        verify=False,
        on_event=lambda level, text: news.append((level, text)),
        on_progress=lambda now, total: done.append((now, total)),
    )
    assert result.out == tmp_path / "out" and len(result.plan.folded) == 7
    assert [level for level, _ in news] == ["stage"] * 2
    assert done[0][0] == 0 and done[-1][0] == done[-1][1] > 0
    assert enjoyln_cli.load_recipe(result.out / "enjoyln_recipe.yaml").model_type == "gpt2"


@pytest.mark.parametrize(
    ("option", "missing", "needed"),
    [
        ("--image", ["PIL"], "images needs: pip install pillow"),
        (
            "--audio",
            ["soundfile", "torchcodec", "librosa"],
            "recordings needs: pip install soundfile soxr",
        ),
    ],
)
def test_data_without_their_library_are_refused(
    option: str,
    missing: list[str],
    needed: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "of_the_user").touch()
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    line = refused("rotate", CHECKPOINTS / "vit", "-o", tmp_path / "out", option, tmp_path)
    assert line.splitlines() == [f"error: reading {needed}"]
