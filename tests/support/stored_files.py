"""Checkpoint directories written by hand, right or wrong, and how they are opened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from live_models import CHECKPOINTS
from safetensors.torch import load_file, save_file

from enjoyln_cli.checkpoint.marker import proof_of
from enjoyln_cli.checkpoint.reader import Checkpoint, open_checkpoint
from enjoyln_cli.checkpoint.result_files import VERIFY_FILE
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.recipe.stored_plan import read_plan
from enjoyln_cli.rewrite.written_files import record_files


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(open_source(str(folder)))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path in it."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def stored_plan(folder: Path) -> Plan:
    """The plan in a result, without the calls that are in its marker."""
    return read_plan(opened(folder), None)


def refused(folder: Path, words: str, kind: type[Exception] = BadCheckpoint) -> None:
    with pytest.raises(kind, match=words) as caught:
        opened(folder)
    assert "\n" not in str(caught.value)


def tensors(*names: str) -> dict[str, torch.Tensor]:
    """Random weights whose mean is not zero, the same for the same names."""
    made = torch.Generator().manual_seed(sum(map(ord, "".join(names))))
    return {name: torch.randn(3, 5, generator=made) + 0.7 for name in names}


def rewritten(out: Path) -> Path:
    """A result that was written as it is now, so far as its record says; or an original."""
    if (out / VERIFY_FILE).is_file():
        record_files(open_source(str(out)), {})
    return out


def changed(out: Path, into: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a folded checkpoint in which some tensors were written wrong."""
    shutil.copytree(out, into)
    tensors = load_file(into / "model.safetensors")
    edit(tensors)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    return rewritten(into)


def with_marker(out: Path, into: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a result that was written with another marker, whose digest is right."""
    shutil.copytree(out, into)
    config = json.loads((into / "config.json").read_text())
    change(config["enjoyln"])
    config["enjoyln"]["proof"] = proof_of(config["enjoyln"])
    (into / "config.json").write_text(json.dumps(config))
    return rewritten(into)


def shallow(name: str, folder: Path) -> Path:
    """The first two layers of a trained checkpoint, with its other files."""
    shutil.copytree(CHECKPOINTS / name, folder)
    (model_class,) = json.loads((folder / "config.json").read_text())["architectures"]
    cls = getattr(transformers, model_class)
    cls.from_pretrained(folder, num_hidden_layers=2).save_pretrained(folder)
    return folder
