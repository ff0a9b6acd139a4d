"""Carry out a plan on a checkpoint's files.

The plan has decided which norms fold, and ``edits`` how its tensors change. This module decides
what a converted directory consists of: the weights, the source's other files unchanged,
``config.json`` with the plan's settings and the ``enjoyln`` entry (the marker),
``enjoyln_recipe.yaml`` and reports. In a pipeline, this is the transformer's folder; the other
modules are copied unchanged. The directory appears whole, after its check has passed, or not at
all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any

from safetensors.torch import save_file

from enjoyln_cli.checkpoint.config import MARKER, require_unfolded, with_entries
from enjoyln_cli.checkpoint.file_roles import CONFIG
from enjoyln_cli.checkpoint.marker import marker
from enjoyln_cli.checkpoint.reader import (
    Checkpoint,
    other_files,
    pipeline_files,
)
from enjoyln_cli.checkpoint.result_files import (
    FOLDER,
    MATRIX_FILE,
    PLAN_FILE,
    RECIPE_FILE,
)
from enjoyln_cli.checkpoint.source import Source, require_unchanged
from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.errors import VerificationFailed
from enjoyln_cli.fs.digests import digest_of_data, digest_of_file
from enjoyln_cli.fs.staging import staged_output
from enjoyln_cli.plan.fold_options import WRITE_DEFAULTS, WriteOptions
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.recipe.stored_plan import plan_text
from enjoyln_cli.rewrite.journal import Journal
from enjoyln_cli.rewrite.preconditions import check_edits
from enjoyln_cli.rewrite.shard_layout import plain_layout
from enjoyln_cli.rewrite.writer import write_shards
from enjoyln_cli.rewrite.written_files import record_files
from enjoyln_cli.version import __version__

_DTYPE_NAMES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class FoldResult:
    """The result of a fold, and the result of its check."""

    out: Path
    plan: Plan
    bytes_written: int
    seconds: float
    """Seconds of writing, without the check."""
    verification: Any | None
    resumed: int = 0
    """How many weight files an earlier run had finished."""
    check_seconds: float = 0.0
    """Seconds of the check."""


def fold_checkpoint(
    checkpoint: Checkpoint,
    plan: Plan,
    out: Path,
    *,
    recipe_text: str,
    options: WriteOptions = WRITE_DEFAULTS,
    progress: Callable[[int], None] | None = None,
    check: Callable[[Path], Any] | None = None,
    finish: Callable[[Path], None] | None = None,
    stock: Callable[[Path], dict[str, Any]] | None = None,
) -> FoldResult:
    """Write ``checkpoint`` with the edits of ``plan`` to the new directory ``out``.

    ``progress`` receives the number of bytes written since its last call. With ``resume``, files
    of an interrupted run are taken over only if that run had the same source, plan and options
    (``journal.py``). ``check`` gets the finished directory before it is renamed to ``out``; if the
    ``passed`` of its result is false, ``VerificationFailed`` is raised with its ``summary``. Then
    the digests of all files are recorded, and ``finish`` adds the card. ``stock`` writes the
    weights as another class instead, and returns the config.

    Raises ``AlreadyFolded``, ``NothingToFold``, ``BadCheckpoint`` (a tensor of the plan is missing,
    has another shape, or holds NaN or Inf; or a file changes while it is read) and ``OutputError``.
    ``out`` is unchanged then.
    """
    begin = perf_counter()
    source = checkpoint.source
    require_unfolded(checkpoint.raw_config, source.model)
    edits = check_edits(plan, checkpoint)
    names, around = other_files(checkpoint), pipeline_files(checkpoint)
    copied = [*(source.path / name for name in names), *(source.root / name for name in around)]
    place = staged_output(out, source=source.root, force=options.force, resume=options.resume)
    with place as staged:
        inner = staged / source.folder
        taken_over = 0
        if stock:
            config = stock(inner)
        else:
            journal = _journal(checkpoint, edits, copied, staged, recipe_text, options)
            write_shards(checkpoint, edits, inner, options, progress=progress, journal=journal)
            taken_over = len(journal.taken_over)
            config = _result_config(checkpoint.raw_config, plan, source, options)
        copy_files(names, source.path, inner)
        copy_files(around, source.root, staged)
        require_unchanged(source.path, checkpoint.states)
        (inner / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (inner / RECIPE_FILE).write_text(recipe_text, encoding="utf-8")
        (inner / PLAN_FILE).write_text(plan_text(plan), encoding="utf-8")
        matrices = {group.name: group.given.values for group in plan.rotated if group.given}
        if matrices:
            (inner / FOLDER).mkdir(exist_ok=True)
            save_file(matrices, inner / MATRIX_FILE)
        checking = perf_counter()
        verification = check(staged) if check else None
        check_seconds = perf_counter() - checking
        if verification is not None and not verification.passed:
            raise VerificationFailed(str(verification.summary))
        written = replace(source, model=str(staged), path=inner, revision=None)
        record_files(written, verification.to_json() if verification else {})
        if finish:
            finish(staged)
        size = sum(path.stat().st_size for path in staged.rglob("*") if path.is_file())
    seconds = perf_counter() - begin - check_seconds
    return FoldResult(out, plan, size, seconds, verification, taken_over, check_seconds)


def _journal(
    checkpoint: Checkpoint,
    edits: Mapping[str, Edit],
    copied: Sequence[Path],
    staged: Path,
    recipe_text: str,
    options: WriteOptions,
) -> Journal:
    """The journal of finished files, also of an earlier run that had the same inputs."""
    chosen = {"dtype": str(options.dtype), "--max-shard-size": str(options.max_shard_size)}
    chosen["recipe"] = digest_of_data(recipe_text)
    chosen["--allow-nonfinite"] = str(options.allow_nonfinite)
    made_from = _made_from(checkpoint, edits, copied, chosen)
    return Journal(staged.parent, made_from, options.force)


def _made_from(
    checkpoint: Checkpoint,
    edits: Mapping[str, Edit],
    copied: Sequence[Path],
    chosen: Mapping[str, str],
) -> dict[str, str]:
    """Everything that determines the bytes of a result, under names for messages.

    Weight files appear with their size and time, except files of the Hub: the commit identifies
    them.
    """
    source = checkpoint.source
    inputs = {"enjoyln": __version__, "the source": f"{source.path} {source.revision}"}
    for name, (size, modified) in checkpoint.states.items():
        if name in checkpoint.shards and not source.cached:
            inputs[f"the file {name}"] = f"{size} bytes, modified {modified} ns"
    small = [source.path / name for name in checkpoint.states if name not in checkpoint.shards]
    for path in (*small, *copied):
        inputs[f"the file {path.relative_to(source.root)}"] = f"digest {digest_of_file(path)}"
    headers, _ = plain_layout(checkpoint)
    inputs |= {f"the header of {name}": sha256(head).hexdigest() for name, head in headers.items()}
    inputs["the plan"] = digest_of_data([[name, repr(edits[name])] for name in sorted(edits)])
    return inputs | {f"the {name}": value for name, value in chosen.items()}


def copy_files(names: Iterable[str], source: Path, out: Path) -> None:
    """Copy the files ``names`` (relative paths) from ``source`` to ``out``."""
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, out / name)


def _result_config(
    config: dict[str, Any], plan: Plan, source: Source, options: WriteOptions
) -> dict[str, Any]:
    """``config`` with the plan's settings, the chosen dtype, and the marker as its last entry."""
    config = with_entries(config, {setting.name: setting.value for setting in plan.settings})
    config = {**config, MARKER: marker(plan, source, options.allow_nonfinite)}
    return config if options.dtype is None else _with_dtype(config, str(options.dtype))


def _with_dtype(config: dict[str, Any], name: str) -> dict[str, Any]:
    """``config`` with the new dtype wherever it has a dtype, and in any case at its top level."""
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
