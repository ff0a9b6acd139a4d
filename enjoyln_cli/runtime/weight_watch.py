"""When is it looked at whether the weights are centred (``weight_check``)?

Weights move after loading: training, ``load_state_dict``, adapters, resized embeddings, quantised
layers. A hook sees at each call whether tensors and modules are the ones that were looked at, looks
again where they are not, and makes the norms compute LayerNorm where it has to.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from enjoyln_cli.checkpoint.marker import CentredTensor
from enjoyln_cli.plan.mean_units import Units
from enjoyln_cli.runtime.adapters import require_addition
from enjoyln_cli.runtime.hooks import encoder_of, enter_of
from enjoyln_cli.runtime.modules import Folded
from enjoyln_cli.runtime.neutral import neutral_parameters, set_flags
from enjoyln_cli.runtime.scope import Enter
from enjoyln_cli.runtime.structure import KeepStructure, Snapshot, set_trouble, trouble_with
from enjoyln_cli.runtime.weight_check import (
    WatchList,
    check_centred,
    rename,
    tensor_at,
    watch_list_of,
)

LINEAR = ("Linear", "Conv1D")
_VERSION = attrgetter("_version")


class KeepCentred(KeepStructure):
    """Once what a model rests on has moved or been edited, its norms compute LayerNorm.

    The first call looks at the values; later ones see what torch counts as a change of a tensor,
    or another tensor or module, and not what is written through ``tensor.data``. Under
    ``torch.compile`` the look is taken when the call is compiled, and leaves no trace in the graph.
    Copies and pickles look anew.
    """

    def __init__(
        self,
        watch: WatchList,
        model: nn.Module,
        reference: nn.Module | None = None,
        outer: Enter | None = None,
    ) -> None:
        super().__init__(model, _loose(reference or model, watch), reference)
        self.watch = watch
        self.linear = _linear(reference or model, watch)
        self.outer = outer
        """The entry of the model around, which tells of the same trouble."""
        self.merged = neutral_parameters(model, watch.weightless, watch.biasless)
        self.paths = (*watch.tensors, *(one.path for one in self.merged))
        self.values: Any = Values(model, self.paths)
        set_flags(model, self.merged)
        self.trained = -1

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "values": None}

    def unchanged(self) -> bool:
        """Whether all modules and tensors are those of the last look, with the values of then."""
        looked = self.values is not None and self.trained == Folded.trained
        return looked and self.values.unchanged() and super().unchanged()

    def _look(self, entry: Enter, model: nn.Module) -> None:
        trained, values = Folded.trained, Values(model, self.paths)
        known = not values.fake or bool(self.values and self.values.unchanged())
        flags = [] if values.fake and known else set_flags(model, self.merged, known)
        snapshot = Snapshot(model, self.built.loose, [*values.facts, *flags])
        trouble = trouble_with(self._compare, model)
        if values.fake:
            trouble = trouble or entry.trouble  # no values to look at: what is known goes on
            if not trouble:
                return
        set_trouble(entry, trouble, bool(self.outer and self.outer.trouble))
        self.snapshot, self.values, self.trained = snapshot, values, trained
        for seen in [entry] if self.outer else entry.fold.entries:  # what is inside was seen, too
            seen.moved = False

    def _compare(self, model: nn.Module) -> None:
        for path, (kind, dim) in self.linear.items():
            with suppress(AttributeError):  # a layer that is gone
                require_addition(path, model.get_submodule(path), kind, dim)
        self.built.compare(model)
        check_centred(model, self.watch)


class Values:
    """Which tensors there are, with which values, as far as torch counts their changes."""

    def __init__(self, model: nn.Module, paths: Iterable[str]) -> None:
        held: list[tuple[dict[str, Any], str]] = []
        for path in paths:
            above, _, name = path.rpartition(".")
            with suppress(AttributeError):  # a layer that is gone: the modules have changed
                owner = model.get_submodule(above)
                held.append((owner._buffers if name in owner._buffers else owner._parameters, name))
        self.away = [(group, name) for group, name in held if _is_away(group.get(name))]
        there = [(group, name) for group, name in held if not _is_away(group.get(name))]
        self.facts = [(group, name, group[name]) for group, name in there]
        """To be compared with the modules."""
        tensors = [tensor for _, _, tensor in self.facts]
        self.fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        self.counted = [t for t in tensors if not (isinstance(t, FakeTensor) or t.is_inference())]
        self.versions = [*map(_VERSION, self.counted)]
        self.addresses = [*map(torch.Tensor.data_ptr, self.counted)]

    def unchanged(self) -> bool:
        return (
            [*map(_VERSION, self.counted)] == self.versions
            and [*map(torch.Tensor.data_ptr, self.counted)] == self.addresses
            and all(_is_away(group.get(name)) for group, name in self.away)
        )


def _is_away(tensor: Any) -> bool:
    """Whether there is none, or one that accelerate fetches, which is another one every time."""
    return tensor is None or bool(tensor.is_meta)


def _linear(model: nn.Module, watch: WatchList) -> dict[str, tuple[type, int]]:
    """The centred linear layers: their classes, and which dimension of the weight is centred."""
    found = {}
    for one in watch.weights:
        path, _, name = one.parameter.rpartition(".")
        kind = type(model.get_submodule(path))
        if kind.__name__ in LINEAR and name == "weight":
            found[path] = kind, one.axis.dim
    return found


def _loose(model: nn.Module, watch: WatchList) -> list[str]:
    """Linear layers that were not centred: what comes out of them may have any mean."""
    paths = (*(name.rpartition(".")[0] for name in watch.tensors), *watch.ops)
    held = {id(model.get_submodule(path)) for path in paths}
    return [
        path
        for path, module in model.named_modules()
        if type(module).__name__ in LINEAR
        and type(module).__module__ in (nn.Linear.__module__, "transformers.pytorch_utils")
        and id(module) not in held
    ]


def keep_centred(
    model: nn.Module,
    weights: Iterable[CentredTensor],
    ops: Iterable[str],
    units: Iterable[Units] = (),
    weightless: Iterable[str] = (),
    biasless: Iterable[str] = (),
) -> None:
    """Have the calls of a model with installed norms look whether its weights are centred."""
    named = tuple(weights), tuple(ops), tuple(units), tuple(weightless), tuple(biasless)
    outer: Enter | None = None
    places = {id(m): m for m in (model, getattr(model, "base_model", model))}
    watches = [(module, watch_list_of(module, *named)) for module in places.values()]
    if (encoder := encoder_of(model)) is not None and id(encoder) not in places:
        watches.append((encoder, _part_in(encoder, model, watches[0][1])))
    reference = _unedited(model)
    for module, watch in watches:
        entry = enter_of(module)
        if entry is not None:
            path = next(name for name, m in model.named_modules() if m is module)
            inner = reference.get_submodule(path) if reference is not None else None
            entry.check = KeepCentred(watch, module, inner, outer)
            outer = entry


def _unedited(model: Any) -> nn.Module | None:
    """Another model of this class and config, without weights; ``None`` where more is needed."""
    try:
        with torch.device("meta"):
            return type(model)(copy.deepcopy(model.config))  # type: ignore[no-any-return]
    except Exception:  # code of any class: it may take more than the config
        return None


def _part_in(inner: nn.Module, model: nn.Module, watch: WatchList) -> WatchList:
    """What of ``watch`` is in ``inner``, under whatever names: it may share with the rest."""
    tensors = {id(t): name for name, t in _held(inner)}
    modules = {id(m): name for name, m in inner.named_modules(remove_duplicate=False)}
    return rename(
        watch,
        lambda name: tensors.get(id(tensor_at(model, name))),
        lambda path: modules.get(id(model.get_submodule(path))),
    )


def _held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
