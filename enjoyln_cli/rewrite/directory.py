"""Carry a plan out: on a checkpoint's files, or on a model in memory.

The edits are those of ``edit`` and nothing else. This module decides nothing about which
norms fold; it decides what a converted directory consists of: the weights, the source's other files
unchanged, ``config.json`` with the plan's settings and the ``enjoyln`` entry (the marker),
``enjoyln_recipe.yaml`` and reports. Of a pipeline that is the transformer's folder, and the other
modules come along as they are.
The directory appears whole, after the check has passed, or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter
from typing import Any

import torch
from torch import nn

from enjoyln_cli import __version__
from enjoyln_cli.archive.archive_file import save
from enjoyln_cli.archive.recorder import keeper_of, unread
from enjoyln_cli.checkpoint.config import MARKER, changed, raw_config, require_unfolded, set_entry
from enjoyln_cli.checkpoint.file_roles import CONFIG
from enjoyln_cli.checkpoint.marker import marker
from enjoyln_cli.checkpoint.reader import (
    Checkpoint,
    blocks_of,
    open_checkpoint,
    other_files,
    pipeline_files,
)
from enjoyln_cli.checkpoint.result_files import CARD_FILE, FILE, FOLDER, RECIPE_FILE, is_own
from enjoyln_cli.checkpoint.source import Source, State, open_source, require_unchanged, states_of
from enjoyln_cli.errors import BadCheckpoint, OutputError, VerificationFailed
from enjoyln_cli.fs.digests import digest, digest_of, digest_of_tensor
from enjoyln_cli.fs.staging import RESULT, clear, staged_output, work_of
from enjoyln_cli.models.offload import Reader, Value, reader_of
from enjoyln_cli.plan.edits import Edit, Given, edited, edits_of, given
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.rewrite.checked_edits import checked_edits
from enjoyln_cli.rewrite.journal import Journal
from enjoyln_cli.rewrite.processes import ALONE, Team
from enjoyln_cli.rewrite.shard_layout import plain_layout
from enjoyln_cli.rewrite.writer import write_shards

_DTYPE_NAMES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class FoldResult:
    """What a fold has written, and what its check returned."""

    out: Path
    plan: Plan
    bytes_written: int
    seconds: float
    """Of writing, the check apart."""
    verification: Any | None
    bytes_kept: int = 0
    """Of those written: what it takes to restore the source."""
    resumed: int = 0
    """Weight files that an earlier run had finished."""
    check_seconds: float = 0.0
    """Of the check."""


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
    resume: bool = False,
    keep_means: bool = False,
    allow_nonfinite: bool = False,
    progress: Callable[[int], None] | None = None,
    check: Callable[[Path], Any] | None = None,
    finish: Callable[[Path], None] | None = None,
    team: Team = ALONE,
) -> FoldResult:
    """Write ``checkpoint`` with the edits of ``plan`` to the new directory ``out``.

    ``dtype``, ``max_shard_size`` (bytes), ``jobs``, ``allow_nonfinite`` and ``progress`` (bytes
    since the last call) are those of ``write_shards``. With ``keep_means`` the folder ``enjoyln``
    of the result holds what it takes to restore the source bit for bit (``archive``); ``dtype`` is
    refused then: what it rounds away would take as much space as the source. With ``resume`` the
    weight files that an interrupted run has finished are not written again, if it was made from the
    same source, plan and options (``journal.py``); with ``keep_means`` all are. ``check`` sees the
    finished directory before it gets its name; a result whose ``passed`` is false raises
    ``VerificationFailed`` with its ``summary``. ``finish`` then adds the files that tell of it
    (``REPORTS``). Of a ``team`` all call this; the weight files are shared out, and all else is the
    first one's.

    Raises ``AlreadyFolded``, ``NothingToFold``, ``BadCheckpoint`` (a tensor of the plan is missing
    or of another shape, or holds NaN or Inf; a file changes while it is read) and ``OutputError``;
    ``out`` is then as it was before.
    """
    begin = perf_counter()
    source = checkpoint.source
    config = raw_config(source)
    require_unfolded(config, source.model)
    edits = checked_edits(plan, checkpoint)
    if keep_means and dtype is not None:
        raise OutputError(
            f"--keep-means cannot be combined with --dtype: restoring what {dtype} rounds away "
            "would take another whole checkpoint; fold without --dtype, then convert the result"
        )
    if keep_means and team.size > 1:
        raise OutputError("--keep-means works in a single process only; start it without torchrun")
    names = [name for name in other_files(checkpoint) if not is_own(name)]
    around = pipeline_files(checkpoint)
    others = states_of(source.path, names), states_of(source.root, around)
    with ExitStack() as stack:
        if team.rank:
            staged = work_of(out) / RESULT
        else:
            place = staged_output(out, source=source.root, force=force, resume=resume)
            staged = stack.enter_context(place)
            if keep_means:
                clear(staged.parent)
        inner = staged / source.folder
        if not team.rank:
            inner.mkdir(parents=True, exist_ok=True)
        keeper = journal = None
        if keep_means:
            (inner / FOLDER).mkdir()
            spool = stack.enter_context(TemporaryFile(dir=inner / FOLDER))
            keeper = keeper_of(checkpoint, edits, spool.fileno())
        else:
            asked = {"dtype": str(dtype), "--max-shard-size": str(max_shard_size)}
            asked["recipe"] = digest_of(recipe_text)
            asked["--allow-nonfinite"] = str(allow_nonfinite)
            known = _known_by_name(checkpoint)
            made_from = _made_from(checkpoint, known, edits, others, asked)
            reread = None if known else partial(blocks_of, checkpoint)
            journal = Journal(staged.parent, made_from, team, force, reread)
        write_shards(
            checkpoint,
            edits,
            inner,
            dtype=dtype,
            max_shard_size=max_shard_size,
            jobs=jobs,
            progress=progress,
            keeper=keeper,
            journal=journal,
            allow_nonfinite=allow_nonfinite,
        )
        if team.rank:
            return FoldResult(out, plan, 0, perf_counter() - begin, None)
        copy_files(names, source.path, inner)
        copy_files(around, source.root, staged)
        require_unchanged(source.path, {**checkpoint.states, **others[0]})
        require_unchanged(source.root, others[1])
        config = changed(config, {one.name: one.value for one in plan.settings})
        config = config_with_marker(config, plan, source, allow_nonfinite)
        if dtype is not None:
            config = _with_dtype(config, str(dtype).removeprefix("torch."))
        (inner / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (inner / RECIPE_FILE).write_text(recipe_text, encoding="utf-8")
        if keeper:
            written = open_checkpoint(open_source(str(inner), weights=True))
            for name in unread(keeper, edits):
                keeper.unread[name] = digest_of_tensor(blocks_of(written, name))
            headers, index = plain_layout(checkpoint)
            files = {CONFIG: (source.path / CONFIG).read_bytes(), **index}
            if (source.root / CARD_FILE).is_file():
                files[CARD_FILE] = (source.root / CARD_FILE).read_bytes()
            save(keeper, inner / FOLDER, config[MARKER], headers, files)
        checking = perf_counter()
        verification = check(staged) if check else None
        check_seconds = perf_counter() - checking
        if verification is not None and not verification.passed:
            raise VerificationFailed(str(verification.summary))
        if finish:
            finish(staged)
        size = sum(path.stat().st_size for path in staged.rglob("*") if path.is_file())
        kept = (inner / FOLDER / FILE).stat().st_size if keeper else 0
    seconds = perf_counter() - begin - check_seconds
    taken_over = len(journal.taken_over) if journal else 0
    return FoldResult(out, plan, size, seconds, verification, kept, taken_over, check_seconds)


def _made_from(
    checkpoint: Checkpoint,
    known: bool,
    edits: Mapping[str, Edit],
    others: tuple[Mapping[str, State], Mapping[str, State]],
    asked: Mapping[str, str],
) -> dict[str, str]:
    """What decides the bytes of a result, by the name that a user knows it by.

    Of weights that are not ``known`` by their names only the size: their content is found out as it
    is read. Those that are fetched one by one may lie there or not.
    """
    source = checkpoint.source
    found = {"enjoyln": __version__, "the source": f"{source.path} {source.revision}"}
    inner = {**checkpoint.states, **others[0]}
    for folder, states in ((source.path, inner), (source.root, others[1])):
        for name, (size, _) in states.items():
            if name not in checkpoint.shards:
                found[f"the file {name}"] = f"{size} bytes, {digest(folder / name)}"
            elif not known:
                found[f"the file {name}"] = f"{size} bytes"
            elif not source.remote:
                found[f"the file {name}"] = f"{size} bytes, {(folder / name).resolve().name}"
    headers, _ = plain_layout(checkpoint)
    found |= {f"the header of {name}": sha256(head).hexdigest() for name, head in headers.items()}
    found["the plan"] = digest_of([[name, repr(edits[name])] for name in sorted(edits)])
    return found | {f"the {name}": value for name, value in asked.items()}


def _known_by_name(checkpoint: Checkpoint) -> bool:
    """Whether the weights lie in the Hub's cache, under names that are digests.

    There are none on a file system without links. What is fetched file by file is known by its
    commit.
    """
    source = checkpoint.source
    linked = all((source.path / name).is_symlink() for name in checkpoint.shards)
    return source.cached and (source.remote is not None or linked)


def copy_files(names: Iterable[str], source: Path, out: Path) -> None:
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, out / name)


def centre_parameters(model: nn.Module, plan: Plan) -> None:
    """Carry out every edit of ``plan`` in place: in float64, rounded once.

    What the plan unties becomes a parameter of its own first. A parameter that several names share
    is edited once. Raises ``BadCheckpoint`` for a parameter that ``model`` lacks or holds in
    another shape, ``UnsupportedModel`` where no call is proven; nothing is changed then.
    """
    if plan.covered is not None and plan.writers:
        plan.covered.require_any(type(model).__name__)
    tensors = _tensors(model)
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
    for mlp in plan.widened:
        for part in mlp.parts:
            tensor = tensors.get(part.parameter)
            if tensor is None or tensor.shape[part.dim] != mlp.size:
                raise BadCheckpoint(
                    f"{part.parameter}: the plan adds to {mlp.size} hidden units, "
                    f"{type(model).__name__} has another number; pass the model that was analysed"
                )
    for named in (name for one in plan.merged for name in one.names):
        if named.parameter not in tensors:
            raise BadCheckpoint(
                f"{named.parameter}: the plan merges a norm into it, {type(model).__name__} has "
                "none; pass the model that was analysed"
            )
    reader = reader_of(model)
    _untie(model, plan, reader)
    for setting in plan.settings:
        set_entry(getattr(model, "config", None), setting.name, setting.value)
    tensors = _tensors(model)
    edits: dict[int, tuple[torch.Tensor, Edit]] = {}
    for name, edit in edits_of(plan, held=True).items():
        tensor = tensors[name]
        known = edits.get(id(tensor), (tensor, edit))[1]
        axes = tuple(dict.fromkeys((*known.axes, *edit.axes)))
        edits[id(tensor)] = tensor, replace(edit, axes=axes)
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)

    def read(name: str) -> torch.Tensor:
        return reader[name] if reader and tensors[name].is_meta else tensors[name]

    with torch.no_grad():
        values = {key: given(edit, read) for key, (_, edit) in edits.items()}
        for key, (tensor, edit) in edits.items():
            if reader and tensor.is_meta:
                for name in names[key]:
                    reader.make(name, _made(reader.source(name), edit, values[key]))
                tensor.data = tensor.new_empty(edit.shape(tuple(tensor.shape)))
                continue
            wide = edited(tensor.double(), edit, values[key])
            if wide.shape == tensor.shape:
                tensor.copy_(wide)
            else:
                tensor.data = wide.to(tensor.dtype)
    for mlp in plan.widened:
        for part in mlp.parts:
            _tell_size(model, part.parameter, mlp.size, mlp.to)


def _made(source: Value, edit: Edit, values: Given) -> Value:
    """What gives a weight edited, once it is asked for."""
    return lambda: edited(source().double(), edit, values)


def _tell_size(model: nn.Module, parameter: str, size: int, to: int) -> None:
    """A layer whose parameter has grown remembers the new size."""
    owner: Any = model.get_submodule(parameter.rpartition(".")[0])
    if isinstance(owner, nn.Linear):
        owner.out_features, owner.in_features = owner.weight.shape
        return
    for name, value in list(vars(owner).items()):
        if type(value) is int and value == size:
            setattr(owner, name, to)


def _untie(model: nn.Module, plan: Plan, reader: Reader | None) -> None:
    """A copy of its own for everything that the plan unties and that the model has."""
    tensors = _tensors(model)
    for one in plan.untied:
        if one.parameter not in tensors:
            continue  # the head of another class
        owner, _, name = one.parameter.rpartition(".")
        shared = tensors[one.source]
        copied = nn.Parameter(shared.detach().clone(), shared.requires_grad)
        setattr(model.get_submodule(owner), name, copied)
        if reader and shared.is_meta:
            reader.make(one.parameter, reader.source(one.source))
        getattr(model, "all_tied_weights_keys", {}).pop(one.parameter, None)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, under each of its names."""
    held: dict[str, torch.Tensor] = dict(model.named_buffers(remove_duplicate=False))
    held.update(model.named_parameters(remove_duplicate=False))
    return held


def config_with_marker(
    config: dict[str, Any], plan: Plan, source: Source, nonfinite: bool = False
) -> dict[str, Any]:
    """A copy of ``config`` with the marker as its last entry."""
    return {**config, MARKER: marker(plan, source, nonfinite)}


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
