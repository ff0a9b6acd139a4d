"""Carry a plan out: on a checkpoint's files, or on a model in memory.

``W <- P W`` for every writer of the plan, or ``W <- P diag(s) W`` and ``s <- 1`` where a scale is
merged into it, and nothing else. This module decides nothing about which
norms fold; it decides what a converted directory consists of: the weights, the source's other files
unchanged, ``config.json`` with the ``enjoyln`` entry (the marker), and ``enjoyln_recipe.yaml``. Of
a pipeline that is the transformer's folder, and the other modules come along as they are.
The directory appears whole, after the check has passed, or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from enjoyln_cli.axis import Axis, centre, scaled
from enjoyln_cli.checkpoint import (
    Checkpoint,
    Source,
    other_files,
    pipeline_files,
    raw_config,
    require_unfolded,
    staged_output,
)
from enjoyln_cli.config import CONFIG, MARKER
from enjoyln_cli.errors import BadCheckpoint, NothingToFold, VerificationFailed
from enjoyln_cli.marker import marker
from enjoyln_cli.plan import Plan
from enjoyln_cli.stream import write_shards

RECIPE_FILE = "enjoyln_recipe.yaml"
VERIFY_FILE = "enjoyln_verify.json"

_OWN_FILES = (CONFIG, RECIPE_FILE, VERIFY_FILE)
_DTYPE_NAMES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class FoldResult:
    """What a fold has written, and what its check returned."""

    out: Path
    plan: Plan
    bytes_written: int
    seconds: float
    verification: Any | None


def fold_checkpoint(
    checkpoint: Checkpoint,
    plan: Plan,
    out: Path,
    *,
    recipe_text: str,
    dtype: torch.dtype | None = None,
    max_shard_size: int | None = None,
    jobs: int | None = None,
    force: bool = False,
    progress: Callable[[int], None] | None = None,
    check: Callable[[Path], Any] | None = None,
) -> FoldResult:
    """Write ``checkpoint`` with the edits of ``plan`` to the new directory ``out``.

    ``dtype``, ``max_shard_size`` (bytes), ``jobs`` and ``progress`` (bytes since the last call) are
    those of ``write_shards``. ``check`` sees the finished directory before it gets its name; a
    result whose ``passed`` is false raises ``VerificationFailed`` with its ``summary``.

    Raises ``AlreadyFolded``, ``NothingToFold``, ``BadCheckpoint`` (a tensor of the plan is missing
    or of another shape, or holds NaN or Inf) and ``OutputError``; ``out`` is then as it was before.
    """
    begin = perf_counter()
    source = checkpoint.source
    config = raw_config(source)
    require_unfolded(config)
    edits = edits_of(plan, checkpoint)
    with staged_output(out, source=source.root, force=force) as staged:
        inner = staged / source.folder
        inner.mkdir(parents=True, exist_ok=True)
        write_shards(
            checkpoint,
            edits,
            inner,
            scales={w.tensor: w.scale.tensor for w in plan.writers if w.scale},
            dtype=dtype,
            max_shard_size=max_shard_size,
            jobs=jobs,
            progress=progress,
        )
        names = [name for name in other_files(checkpoint) if name not in _OWN_FILES]
        _copy(names, source.path, inner)
        _copy(pipeline_files(checkpoint), source.root, staged)
        config = config_with_marker(config, plan, source)
        if dtype is not None:
            config = _with_dtype(config, str(dtype).removeprefix("torch."))
        (inner / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (inner / RECIPE_FILE).write_text(recipe_text, encoding="utf-8")
        verification = check(staged) if check else None
        if verification is not None and not verification.passed:
            raise VerificationFailed(str(verification.summary))
        size = sum(path.stat().st_size for path in staged.rglob("*") if path.is_file())
    return FoldResult(out, plan, size, perf_counter() - begin, verification)


def _copy(names: Iterable[str], source: Path, out: Path) -> None:
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, out / name)


def edits_of(plan: Plan, checkpoint: Checkpoint) -> dict[str, tuple[Axis, ...]]:
    """The axes to centre every stored tensor over.

    Raises ``NothingToFold`` for a plan that keeps every norm, ``BadCheckpoint`` where a tensor of
    the plan is not stored or has another shape.
    """
    if not plan.folded:
        raise NothingToFold(_nothing_to_fold(plan, checkpoint.source))
    edits: dict[str, tuple[Axis, ...]] = {}
    for writer in plan.writers:
        stored = checkpoint.tensors.get(writer.tensor)
        if stored is None:
            raise BadCheckpoint(
                f"{writer.tensor}: {checkpoint.source.model} does not store this tensor, which "
                f"{plan.model_class} needs as {writer.parameter}; fetch the checkpoint again"
            )
        if tuple(stored.shape) != tuple(writer.shape):
            raise BadCheckpoint(
                f"{writer.tensor}: stored with shape {list(stored.shape)} in {stored.file}, but "
                f"{plan.model_class} holds {list(writer.shape)}; check config.json"
            )
        axes = edits.get(writer.tensor, ())
        edits[writer.tensor] = axes if writer.axis in axes else (*axes, writer.axis)
    return edits


def centre_parameters(model: nn.Module, plan: Plan) -> None:
    """``W <- P W`` in place for every writer of ``plan``, the mean in float64, rounded once.

    A scale is merged before, and becomes ones. A parameter that several names share is centred
    once. Raises ``BadCheckpoint`` for a parameter that ``model`` lacks or holds in another shape;
    nothing is changed then.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_buffers(remove_duplicate=False))
    tensors.update(model.named_parameters(remove_duplicate=False))
    edits: dict[int, tuple[torch.Tensor, list[Axis], torch.Tensor | None]] = {}
    for writer in plan.writers:
        tensor = tensors.get(writer.parameter)
        same = writer.held is not None or (tensor is not None and tensor.shape == writer.shape)
        if tensor is None or not same:
            shape = "none" if tensor is None else list(tensor.shape)
            raise BadCheckpoint(
                f"{writer.parameter}: the plan centres shape {list(writer.shape)}, "
                f"{type(model).__name__} has {shape}; pass the model that was analysed"
            )
        scale = tensors.get(writer.scale.parameter) if writer.scale else None
        if writer.scale and (scale is None or scale.numel() != tensor.shape[writer.axis.dim]):
            raise BadCheckpoint(
                f"{writer.scale.parameter}: the plan merges it into {writer.parameter}, and "
                f"{type(model).__name__} has none that fits; pass the model that was analysed"
            )
        axes, axis = (
            edits.setdefault(id(tensor), (tensor, [], scale))[1],
            writer.held or writer.axis,
        )
        if axis not in axes:
            axes.append(axis)
    with torch.no_grad():
        for shared, axes, scale in edits.values():
            wide = shared.double()
            if scale is not None:
                wide = scaled(wide, scale.double(), axes[0].dim)
            for axis in axes:
                wide = centre(wide, axis)
            shared.copy_(wide)
        for _, _, scale in edits.values():
            if scale is not None:
                scale.fill_(1)


def config_with_marker(config: dict[str, Any], plan: Plan, source: Source) -> dict[str, Any]:
    """A copy of ``config`` with the marker as its last entry."""
    return {**config, MARKER: marker(plan, source)}


def _with_dtype(config: dict[str, Any], name: str) -> dict[str, Any]:
    """``config`` naming the new dtype wherever it names one, and at its top in any case."""
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    nested = {
        key: _renamed_dtypes(value, name) if isinstance(value, dict) and key != MARKER else value
        for key, value in config.items()
    }
    last = {MARKER: nested.pop(MARKER)}
    return {**nested, **dict.fromkeys(keys, name), **last}


def _renamed_dtypes(config: dict[str, Any], name: str) -> dict[str, Any]:
    def renamed(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _renamed_dtypes(value, name)
        return name if key in ("dtype", "torch_dtype") and value in _DTYPE_NAMES else value

    return {key: renamed(key, value) for key, value in config.items()}


def _nothing_to_fold(plan: Plan, source: Source) -> str:
    if not plan.norms:
        others = ", ".join(f"{count} {name}" for name, count in plan.other_norms)
        return f"{source.model} has no LayerNorm to fold" + (
            f" (it has {others})" if others else ""
        )
    reasons: dict[str, int] = {}
    for verdict in plan.kept:
        reasons[verdict.reason] = reasons.get(verdict.reason, 0) + 1
    why = "; ".join(f"{count} x {reason}" for reason, count in reasons.items())
    return (
        f"no LayerNorm of {source.model} can be folded for {', '.join(plan.classes)}: {why}; "
        "--model-class narrows the proof to the one class you use"
    )
