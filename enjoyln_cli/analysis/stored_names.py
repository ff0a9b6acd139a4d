"""Map a checkpoint's stored tensors to the parameters of each model class.

The mapping is transformers' own (its conversion mapping and ``rename_source_key``); this module
guesses nothing from names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from enjoyln_cli.analysis.stored_layout import Conversion, conversion
from enjoyln_cli.checkpoint.reader import Checkpoint, read_tensor, same_values
from enjoyln_cli.edits.step import Shape
from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel
from enjoyln_cli.text import first_line


@dataclass(frozen=True, eq=False)
class StoredClass:
    """A class on the meta device, and where its parameters come from."""

    model: nn.Module
    stored: dict[str, tuple[str, ...]]
    """Maps each parameter or buffer name to the names of the stored tensors that hold it."""
    converted: dict[str, Conversion]
    """Parameters that are built from stored tensors of another layout (stacked, fused, split)."""
    missing: tuple[str, ...]
    """Names that no stored tensor fills, not even one of a tied parameter."""
    checkpoint: Checkpoint | None = None
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Without a checkpoint: the values of the weights of ``model``, as far as they are known."""

    @property
    def name(self) -> str:
        return type(self.model).__name__

    def lost_by_division(self, bias: str, weight: str, offset: float) -> float:
        """How much coarser a norm is rounded if its ``bias`` is divided by ``weight`` + ``offset``.

        With g and v for both, and features x whose root mean square is 1: ``g x + v`` is rounded
        relative to its size, so to ``hypot(rms(g), rms(v))``. A rotation spreads the rounding of
        ``x + v/g`` over all features, which are multiplied by g then: to ``rms(v/g) rms(g)``. The
        quotient of both is infinite if ``v/g`` is, or is too large for the stored dtype, and 0 if
        the values are not known.
        """
        shift, gain = self._values(bias), self._values(weight)
        if shift is None or gain is None:
            return 0.0
        largest = torch.finfo(shift.dtype).max
        shift, gain = shift.double(), gain.double() + offset
        quotient = shift / gain
        if not gain.all() or quotient.abs().max() > largest:
            return math.inf
        divided, v, g = (float(x.square().mean().sqrt()) for x in (quotient, shift, gain))
        return divided * g / math.hypot(v, g)

    def _values(self, tensor: str) -> torch.Tensor | None:
        if self.checkpoint is not None:
            return read_tensor(self.checkpoint, tensor)
        held = self.weights.get(tensor)
        return None if held is None or held.is_meta else held.detach()


def stored_in_groups(found: StoredClass, groups: Mapping[str, str]) -> dict[str, list[str]]:
    """Map the first name of each tied group to the names of the group that are stored."""
    names: dict[str, list[str]] = {}
    for name, group in groups.items():
        if name in found.stored or name in found.converted:
            names.setdefault(group, []).append(name)
    return names


def saved_shapes(model: Any) -> dict[str, Shape]:
    """The tensors that ``save_pretrained`` would write for this class, by name.

    Raises ``UnsupportedModel`` if transformers cannot convert the weights into their stored layout.
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = dict(model.state_dict())
    for target in model.all_tied_weights_keys:
        state.pop(target, None)
    try:
        stored = dict(revert_weight_conversion(model, state))
    except Exception as error:  # ops may raise anything for sizes that do not fit
        first = first_line(error)
        raise UnsupportedModel(
            f"{type(model).__name__}: transformers cannot determine how its weights are stored "
            f"({type(error).__name__}: {first}); pass a checkpoint, or correct the sizes in the "
            "config"
        ) from error
    return {name: tuple(tensor.shape) for name, tensor in stored.items()}


def candidate(
    model: Any, shapes: Mapping[str, Shape], checkpoint: Checkpoint | None
) -> StoredClass:
    """How stored tensors of these ``shapes`` fill the class, by transformers' loading rules.

    If a checkpoint stores tied parameters with different values, they are untied in ``model``, as
    by ``from_pretrained``. Raises ``BadCheckpoint`` for a stored shape that is not the model's.
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
        if key not in state and name in state:  # renamed by another model's rule
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
    left = (name for name in state if name not in filled)
    missing = tuple(n for n in left if not any(re.search(pattern, n) for pattern in ignored))
    names = {key: tuple(found) for key, found in stored.items()}
    return StoredClass(model, names, converted, missing, checkpoint)


def _check_shape(name: str, checkpoint: Checkpoint, shape: tuple[int, ...]) -> None:
    entry = checkpoint.tensors[name]
    if entry.shape != shape:
        raise BadCheckpoint(
            f"{entry.file}: {name} has shape {list(entry.shape)}, but config.json implies "
            f"{list(shape)}; this config.json does not belong to these weights"
        )


def _untie(model: Any, target: str) -> None:
    parent, _, name = target.rpartition(".")
    owner = model.get_submodule(parent)
    tied = getattr(owner, name)
    setattr(owner, name, nn.Parameter(torch.empty_like(tied), requires_grad=False))
    model.all_tied_weights_keys.pop(target)
