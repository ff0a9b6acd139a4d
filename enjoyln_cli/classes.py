"""Which model classes a checkpoint serves, and what its stored tensors are called in each.

transformers' own renaming decides (its conversion mapping and ``rename_source_key``); nothing is
guessed from names here.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from enjoyln_cli.checkpoint import Checkpoint, same_values
from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel
from enjoyln_cli.layout import Conversion, conversion
from enjoyln_cli.weightless import KeepWhole, forget_stored

Shape = tuple[int, ...]

MOST_MODULES = 500_000
"""A model that wants more of them is none: a config of a few bytes can ask for any number."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A class on the meta device, and where its parameters come from."""

    model: nn.Module
    stored: dict[str, tuple[str, ...]]
    """Parameter or buffer name to the names of the stored tensors that it equals."""
    converted: dict[str, Conversion]
    """Parameters that are made from stored tensors of another layout (stacked, fused, split)."""
    missing: tuple[str, ...]
    """Names that no stored tensor fills, tying counted."""

    @property
    def name(self) -> str:
        return type(self.model).__name__


def build(model_class: type, config: Any) -> nn.Module:
    """An instance without weights; ``UnsupportedModel`` if the config does not describe one."""
    try:
        with torch.device("meta"), KeepWhole(), _countable():
            model: Any = model_class(copy.deepcopy(config)).eval()
    except Exception as error:  # a config can be wrong in as many ways as there are models
        first = str(error).strip().split("\n")[0][:200]
        raise UnsupportedModel(
            f"{model_class.__name__} cannot be built from this config: "
            f"{type(error).__name__}: {first}"
        ) from error
    forget_stored(model)
    apply_experts(model)
    return model


@contextmanager
def _countable() -> Iterator[None]:
    """Within it, building a model ends: with ``ValueError`` after ``MOST_MODULES`` modules."""
    built = 0

    def count(*_: Any) -> None:
        nonlocal built
        built += 1
        if built > MOST_MODULES:
            raise ValueError(f"it has more than {MOST_MODULES} modules")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def apply_experts(model: nn.Module, way: str = "batched_mm") -> None:
    """Set how ``model`` and the models in it apply experts; some of these have none.

    Without ``way`` it is the one whose shapes no value decides, and that float64 can run.
    """
    for part in model.modules():
        if getattr(part, "_can_set_experts_implementation", bool)():
            cast(Any, part).set_experts_implementation(way)


def class_named(name: str) -> type:
    """A model class of transformers. Raises ``UnsupportedModel`` with the nearest names."""
    import transformers

    found = getattr(transformers, name, None)
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    near = difflib.get_close_matches(
        name, [n for n in dir(transformers) if "For" in n or "Mo" in n]
    )
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise UnsupportedModel(f"transformers has no model class {name}{hint}")


def classes_for(config: Any) -> list[type]:
    """Every class that the auto classes know for this config, the config's own class first."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto import modeling_auto

    custom = getattr(config, "auto_map", None) or {}
    if own := [code for auto, code in custom.items() if auto.startswith("AutoModel")]:
        return [get_class_from_dynamic_module(code, config._name_or_path) for code in own]
    names: dict[str, None] = dict.fromkeys(config.architectures or ())
    tables = [n for n in dir(modeling_auto) if n.startswith("MODEL") and n.endswith("_NAMES")]
    for table in sorted(tables, key=lambda n: n != "MODEL_MAPPING_NAMES"):
        entry = getattr(modeling_auto, table).get(config.model_type, ())
        names.update(dict.fromkeys((entry,) if isinstance(entry, str) else entry))
    if not names:
        raise UnsupportedModel(f"no model class is known for the model type {config.model_type}")
    return [class_named(name) for name in names]


def saved_shapes(model: Any) -> dict[str, Shape]:
    """The tensors that ``save_pretrained`` would write for this class, by name.

    Raises ``UnsupportedModel`` where its weights cannot be turned into what is stored.
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = dict(model.state_dict())
    for target in model.all_tied_weights_keys:
        state.pop(target, None)
    try:
        stored = dict(revert_weight_conversion(model, state))
    except Exception as error:  # a conversion raises whatever its ops do at a size that fits ill
        first = str(error).strip().split("\n")[0][:200]
        raise UnsupportedModel(
            f"{type(model).__name__}: transformers cannot tell how its weights are stored "
            f"({type(error).__name__}: {first}); pass a checkpoint, or correct the sizes in the "
            "config"
        ) from error
    return {name: tuple(tensor.shape) for name, tensor in stored.items()}


def candidate(model: Any, shapes: Mapping[str, Shape], checkpoint: Checkpoint | None) -> Candidate:
    """How stored tensors of these ``shapes`` fill the class, with transformers' rules of loading.

    Tied parameters that a checkpoint stores twice with different values are untied, as
    ``from_pretrained`` does. Raises ``BadCheckpoint`` for a stored shape that is not the model's.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        dot_natural_key,
        rename_source_key,
    )

    state = model.state_dict()
    mapping: list[Any] = get_model_conversion_mapping(model)
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    renamings = [m for m in mapping if not isinstance(m, WeightConverter)]
    by_pattern = {pattern: m for m in converters for pattern in m.source_patterns}
    stored: dict[str, list[str]] = {}
    collected: dict[str, dict[str, tuple[str, Shape]]] = {}
    prefix = model.base_model_prefix
    for name in sorted(shapes, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if key not in state and name in state:  # what another model's rule should not have renamed
            key, pattern = rename_source_key(name, [], [], prefix, state)
        if key in state and pattern is not None:
            collected.setdefault(key, {})[name] = pattern, shapes[name]
        elif key in state:
            stored.setdefault(key, []).append(name)
            if checkpoint is not None:
                _check_shape(name, checkpoint, tuple(state[key].shape))
    converted: dict[str, Conversion] = {}
    for key, unordered in collected.items():
        sources = {name: unordered[name] for name in sorted(unordered, key=dot_natural_key)}
        pattern = next(iter(sources.values()))[0]
        found = conversion(by_pattern[pattern], key, sources, model, state)
        converted.update(dict.fromkeys(found.targets, found) if found else {})
    filled = {*stored, *converted}
    for target, source in dict(model.all_tied_weights_keys).items():
        both = target in stored and source in stored
        if (
            both
            and checkpoint
            and not same_values(checkpoint, stored[target][0], stored[source][0])
        ):
            _untie(model, target)
            continue
        if target in filled or source in filled:
            filled |= {target, source}
    ignored = tuple(model._keys_to_ignore_on_load_missing or ())
    missing = tuple(k for k in state if k not in filled and not _matches(k, ignored))
    return Candidate(model, {k: tuple(v) for k, v in stored.items()}, converted, missing)


def _check_shape(name: str, checkpoint: Checkpoint, shape: tuple[int, ...]) -> None:
    entry = checkpoint.tensors[name]
    if entry.shape != shape:
        raise BadCheckpoint(
            f"{entry.file}: {name} has shape {list(entry.shape)}, the model's config asks for "
            f"{list(shape)}; config.json does not belong to these weights"
        )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _untie(model: Any, target: str) -> None:
    parent, _, name = target.rpartition(".")
    owner = model.get_submodule(parent)
    tied = getattr(owner, name)
    setattr(owner, name, nn.Parameter(torch.empty_like(tied), requires_grad=False))
    model.all_tied_weights_keys.pop(target)


def naming_between(model: Any, reference: Any) -> Callable[[str], str]:
    """Turns a path in ``model`` into the path of the same thing in ``reference``.

    Two classes of one family share their base model: one is it, another holds it as
    ``transformer.``. What lies outside of the base keeps its path.
    """
    own, target = (f"{base_path(m)}." if base_path(m) else "" for m in (model, reference))

    def naming(path: str) -> str:
        return target + path.removeprefix(own) if path.startswith(own) else path

    return naming if own != target else str


def base_path(model: Any) -> str:
    """Where a class with a head holds its base model; empty for a base model itself."""
    prefix = getattr(model, "base_model_prefix", "")
    return prefix if prefix and hasattr(model, prefix) else ""
