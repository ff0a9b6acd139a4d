"""Which model class a checkpoint belongs to, if its tensors fill another than its config names.

Only the headers of the weight files are read. The class that the config names stays if the
checkpoint stores every weight that it needs. Otherwise the checkpoint belongs to the class that its
tensors fill (a config that names a masked language model, over the tensors of an encoder). If they
fill no class, a prefix that all their names begin with is left out: a wrapper may have added it.

transformers initialises weights that a checkpoint does not store. That is right for a part that was
never trained, such as an unused pooler. A missing weight is needed if

    its module         has another parameter that is stored (a bias without its weight)
    another layer      stores the same weight (all layers but the third)
    every output       is computed with it, as the graph of a call shows

A class that the config does not name (``--model-class``) may have a new head. For such a class,
only the outputs of the base model count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import Node

from enjoyln_cli.analysis.stored_names import Shape, StoredClass, candidate
from enjoyln_cli.checkpoint.reader import Checkpoint
from enjoyln_cli.errors import BadCheckpoint, TraceFailed, UnsupportedModel
from enjoyln_cli.models.classes import base_path, build, class_named, classes_for, unknown_class
from enjoyln_cli.models.meta_device import without_weights
from enjoyln_cli.text import did_you_mean, listed_briefly
from enjoyln_cli.trace.capture import Recorder
from enjoyln_cli.trace.trace import Trace
from enjoyln_cli.trace.traced_calls import likely_calls

WRAPPERS = {
    "module": "torch.nn.DataParallel",
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_forward_module": "Lightning",
    "model": "a training script",
}
"""The programs that add a prefix to the names of all tensors that they save, by prefix."""


@dataclass(frozen=True)
class StoredTensors:
    """The tensors that a class may load, with the config that it is built from."""

    config: Any
    shapes: Mapping[str, Shape]
    checkpoint: Checkpoint | None = None
    """Where they are; ``None`` for the tensors that the config's own class would save."""

    def candidate(self, model_class: type) -> StoredClass:
        """The class as a candidate. Raises if it cannot be built, or if a shape does not fit."""
        return candidate(build(model_class, self.config), self.shapes, self.checkpoint)

    def fitting(self, model_class: type) -> StoredClass | None:
        """The class as a candidate; ``None`` if it cannot be built, or if a shape does not fit."""
        try:
            return self.candidate(model_class)
        except (BadCheckpoint, UnsupportedModel):
            return None

    def loaded_by(self, model_class: type) -> StoredClass | None:
        """The class as a candidate, if it loads the tensors without missing weights."""
        found = self.fitting(model_class)
        return None if found is None or found.missing else found

    def filled(self, listed: Sequence[type]) -> list[StoredClass]:
        """The classes that load them without missing weights; a class that takes more comes first.

        Classes that take as many tensors are in the order of ``listed``.
        """
        found = [one for cls in listed if (one := self.loaded_by(cls))]
        return sorted(found, key=_count_taken, reverse=True)


def tensors_of(config: Any, checkpoint: Checkpoint) -> StoredTensors:
    """The tensors in a checkpoint."""
    shapes = {name: stored.shape for name, stored in checkpoint.tensors.items()}
    return StoredTensors(config, shapes, checkpoint)


def require_known_class(config: Any, checkpoint: Checkpoint | None) -> None:
    """Raise ``UnsupportedModel`` for a class that transformers lacks, and name another class.

    It is the class that takes most of the stored tensors, or without a checkpoint the base class.
    """
    unknown = unknown_class(config)
    if unknown is None:
        return
    listed = classes_for(config)
    names, why = [cls.__name__ for cls in listed], "it has"
    if checkpoint:
        names = [found.name for found in tensors_of(config, checkpoint).filled(listed)]
        why = "the stored tensors belong to"
    if hint := did_you_mean(unknown, names, most=1) or (
        names and f"{why} {names[0]}: pass --model-class {names[0]}"
    ):
        raise UnsupportedModel(f"transformers has no model class {unknown}; {hint}")
    class_named(unknown)


def class_of(listed: Sequence[type], config: Any, checkpoint: Checkpoint) -> StoredClass:
    """The class that the checkpoint belongs to: the first of ``listed``, or another that is filled.

    Raises ``BadCheckpoint`` if the first lacks weights that it needs and no other is filled.
    """
    stored = tensors_of(config, checkpoint)
    first = stored.candidate(listed[0])
    needed = needed_weights(first.model, first.missing)
    if not needed:
        return first
    _require_no_prefix(listed[0], stored, checkpoint, len(first.missing))
    others = stored.filled(listed[1:]) or [
        base
        for cls in listed[1:2]  # the base class, whose pooler may be new
        if (base := stored.fitting(cls)) and not needed_weights(base.model, base.missing)
    ]
    if not others:
        raise missing_weights(first.model, needed, checkpoint.source.model)
    return others[0]


def _count_taken(found: StoredClass) -> int:
    """How many of the stored tensors a class loads."""
    taken = {name for names in found.stored.values() for name in names}
    return len(taken.union(*(layout.sources for layout in found.converted.values())))


def _require_no_prefix(
    model_class: type, stored: StoredTensors, checkpoint: Checkpoint, missing: int
) -> None:
    """Raise ``BadCheckpoint`` if fewer weights are missing without a prefix of all tensor names."""
    common = os.path.commonprefix(list(stored.shapes)).split(".")[:-1]
    for depth, head in enumerate(common, 1):
        prefix = ".".join(common[:depth]) + "."
        shapes = {name.removeprefix(prefix): shape for name, shape in stored.shapes.items()}
        bare = StoredTensors(stored.config, shapes).fitting(model_class)
        if bare and len(bare.missing) < missing:
            cause = WRAPPERS.get(head, "the program that wrote it")
            raise BadCheckpoint(
                f"the names of all tensors of {checkpoint.source.model} begin with {prefix!r}, "
                f"which {cause} adds and {model_class.__name__} does not know; "
                f"{_how_to_rename(checkpoint, prefix)}"
            )


def _how_to_rename(checkpoint: Checkpoint, prefix: str) -> str:
    """How to remove a prefix, in Python."""
    load, save = (
        ("load_file(path)", "save_file(tensors, path, {'format': 'pt'})")
        if checkpoint.format == "safetensors"
        else ("torch.load(path)", "torch.save(tensors, path)")
    )
    every = f" in each shard, and the names in {checkpoint.index}" if checkpoint.index else ""
    return (
        f"remove it{every}: tensors = {{name.removeprefix({prefix!r}): tensor for name, tensor in "
        f"{load}.items()}}; {save}"
    )


def require_weights(model: Any, missing: Iterable[str], checkpoint: str) -> None:
    """Raise ``BadCheckpoint`` if ``model`` needs weights that its checkpoint does not store.

    ``missing`` are the names of weights that are not stored, ``checkpoint`` is a name for messages.
    """
    if needed := needed_weights(model, missing):
        raise missing_weights(model, needed, checkpoint)


def missing_weights(model: nn.Module, needed: Sequence[str], checkpoint: str) -> BadCheckpoint:
    """The error for weights that ``model`` needs and ``checkpoint`` does not store."""
    return BadCheckpoint(
        f"{checkpoint} does not store {listed_briefly(needed)}, which {type(model).__name__} "
        "needs; fetch the checkpoint again, or name the class that you use with --model-class"
    )


def needed_weights(model: Any, missing: Iterable[str]) -> list[str]:
    """The ``missing`` weights that ``model`` needs (see above), sorted."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    left = sorted(set(missing) & parameters)
    if not left:
        return []
    return _next_to_stored(left, parameters - set(left)) or _read_by_all_outputs(model, left)


def _next_to_stored(missing: list[str], stored: set[str]) -> list[str]:
    """The ``missing`` weights that must be stored, by the first two rules (see above)."""
    modules = {name.rpartition(".")[0] for name in stored}
    layers = {_without_numbers(name) for name in stored}
    return [
        name
        for name in missing
        if name.rpartition(".")[0] in modules - {""} or _without_numbers(name) in layers
    ]


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _read_by_all_outputs(model: Any, missing: list[str]) -> list[str]:
    """The ``missing`` weights with which every output is computed."""
    base = base_path(model)
    named = type(model).__name__ in (getattr(model.config, "architectures", None) or ())
    prefix = f"{base}." if base and not named else ""
    part = model.get_submodule(base) if prefix else model
    read = _weights_of_all_outputs(part)
    return [name for name in missing if name.startswith(prefix) and name[len(prefix) :] in read]


def _weights_of_all_outputs(model: nn.Module) -> set[str]:
    """The weights with which every output of the simplest call is computed, caches aside.

    Empty if no call can be traced.
    """
    captures = Recorder(without_weights(model))
    try:
        trace = captures.capture(likely_calls(captures)[0])
    except (TraceFailed, UnsupportedModel):
        return set()
    results = [node for node, fields in trace.returned.items() if {*fields} - trace.fed_back]
    return set.intersection(*(_weights_of(trace, node) for node in results)) if results else set()


def _weights_of(trace: Trace, result: Node) -> set[str]:
    """All names of the weights that ``result`` is computed from."""
    waiting, seen = [result], {result}
    while waiting:
        operands = set(waiting.pop().all_input_nodes) - seen
        seen |= operands
        waiting += operands
    return {name for node in seen for name in trace.parameters.get(node, ())}
