"""When does a model check that its weights are still centred (``weight_check``)?

Weights change after loading: by training, ``load_state_dict``, adapters, resized embeddings,
quantisation. At each call, a hook compares tensors and modules with those of the last check. If
they have changed, it checks again. If the check fails, the norms compute LayerNorm.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from enjoyln_cli.checkpoint.marker import CentredTensor
from enjoyln_cli.models.sharding import in_shards, sharded_modules
from enjoyln_cli.plan.mean_units import Units
from enjoyln_cli.runtime.adapters import added_weights, require_additive_adapter
from enjoyln_cli.runtime.hooks import encoder_of, enter_of, entries
from enjoyln_cli.runtime.modules import Folded
from enjoyln_cli.runtime.neutral import neutral_parameters, set_flags
from enjoyln_cli.runtime.scope import Enter
from enjoyln_cli.runtime.structure import (
    KeepStructure,
    Snapshot,
    Structure,
    set_trouble,
    trouble_with,
)
from enjoyln_cli.runtime.weight_check import (
    WatchList,
    centre_watched,
    check_centred,
    rename,
    tensor_under,
    watch_list_of,
    with_adapters,
)

LINEAR = ("Linear", "Conv1D")
_VERSION = attrgetter("_version")


class KeepCentred(KeepStructure):
    """The check at the start of a call: whether the model is unedited and its weights are centred.

    If not, its norms compute LayerNorm. The first call checks the values. Later calls check again
    only if a tensor or module was replaced, or if torch has counted an in-place change of a tensor
    (writes through ``tensor.data`` are not counted). If the call is compiled with the code around
    it, the check runs at compile time and leaves no trace in the graph. Copies and unpickled models
    check again.
    """

    def __init__(
        self,
        watch: WatchList,
        model: nn.Module,
        reference: nn.Module | None = None,
        outer: Enter | None = None,
    ) -> None:
        self.watch = watch
        self.linear = _centred_linears(reference or model, watch)
        loose = _uncentred_linears(reference or model, watch)
        super().__init__(model, loose, reference, self._adapted(model))
        self.outer = outer
        """The entry of the model around this one, which warns of the same trouble."""
        self.merged = neutral_parameters(model, watch.weightless, watch.biasless)
        self.values: Any = Values(model, self._paths(model))
        set_flags(model, self.merged)
        self.trained = -1
        self.accepted: Accepted | None = None
        self.recentres = False
        """Whether weights that have left zero mean are centred again, instead of being refused."""
        self.split = False
        """Whether weights are split over processes, which have to check them together. So they are
        checked once after each ``train()``, and not where addresses of tensors differ."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "values": None, "accepted": None}

    def centre(self, model: nn.Module) -> None:
        """Centre the weights again, in training mode too.

        Raises ``NotCentred``, with nothing changed, if the model was edited since it was folded.
        """
        self.built.compare(model, self._adapted(model), in_any_mode=True)
        with in_shards(model):
            centre_watched(model, self.watch)

    def accept(self, model: nn.Module) -> None:
        """Take the weights as they are now for centred, until one of them changes."""
        values = Values(model, self._paths(model))
        self.accepted = Accepted(Structure(model, self.built.loose), values)
        self.values = None

    def take_back(self) -> None:
        """Undo ``accept``."""
        self.accepted = self.values = None

    def unchanged(self) -> bool:
        """Whether modules, tensors and their values are those of the last check."""
        looked = self.values is not None and self.trained == Folded.trained
        return looked and (self.split or self.values.unchanged()) and super().unchanged()

    def _look(self, entry: Enter, model: nn.Module) -> None:
        trained, values = Folded.trained, Values(model, self._paths(model))
        known = not values.fake or bool(self.values and self.values.unchanged())
        flags = [] if values.fake and known else set_flags(model, self.merged, known)
        self.split = bool(sharded_modules(model))
        facts = [] if self.split else values.facts
        snapshot = Snapshot(model, self.built.loose, [*facts, *flags])
        trouble = trouble_with(self._compare, model)
        if values.fake:
            trouble = trouble or entry.trouble  # fake tensors have no values: keep the last result
            if not trouble:
                return
        set_trouble(entry, trouble, bool(self.outer and self.outer.trouble))
        self.snapshot, self.values, self.trained = snapshot, values, trained
        for seen in [entry] if self.outer else entry.fold.entries:  # this covers inner models too
            seen.moved = False

    def _compare(self, model: nn.Module) -> None:
        if self.accepted is not None and self.accepted.values.are_those_of_model():
            self.accepted.structure.compare(model)
            return
        adapted = self._adapted(model)
        for path, (kind, dim) in self.linear.items():
            with suppress(AttributeError):  # a layer that was removed
                if path not in adapted:
                    require_additive_adapter(path, model.get_submodule(path), kind, dim)
        self.built.compare(model, adapted)
        with in_shards(model):
            if self.recentres:
                centre_watched(model, self.watch)
            check_centred(model, self.watch)

    def _adapted(self, model: nn.Module) -> set[str]:
        """Paths of the centred linear layers that a LoRA adapter stands around."""
        found = set()
        for path, (kind, _) in self.linear.items():
            with suppress(AttributeError):  # a layer that was removed
                if added_weights(model.get_submodule(path), kind) is not None:
                    found.add(path)
        return found

    def _paths(self, model: nn.Module) -> tuple[str, ...]:
        """Paths of the tensors whose values are checked."""
        watch = self.watch
        with suppress(AttributeError):  # a layer that was removed
            watch = with_adapters(model, watch)
        return (*watch.tensors, *(one.path for one in self.merged))


@dataclass(frozen=True, eq=False)
class Accepted:
    """A model whose weights are not centred, but whose error with RMSNorm was measured."""

    structure: Structure
    values: Values


class Values:
    """Which tensors a model has at some paths, and their version counters and addresses."""

    def __init__(self, model: nn.Module, paths: Iterable[str]) -> None:
        held: list[tuple[dict[str, Any], str]] = []
        for path in paths:
            above, _, name = path.rpartition(".")
            with suppress(AttributeError):  # a removed layer: ``Snapshot`` notices that
                owner = model.get_submodule(above)
                held.append((owner._buffers if name in owner._buffers else owner._parameters, name))
        self.absent = [(group, name) for group, name in held if _is_absent(group.get(name))]
        there = [(group, name) for group, name in held if not _is_absent(group.get(name))]
        self.facts = [(group, name, group[name]) for group, name in there]
        """The tensors, as facts for a ``Snapshot``."""
        tensors = [tensor for _, _, tensor in self.facts]
        self.fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        self.counted = [t for t in tensors if not (isinstance(t, FakeTensor) or t.is_inference())]
        self.versions = [*map(_VERSION, self.counted)]
        self.addresses = [*map(torch.Tensor.data_ptr, self.counted)]

    def unchanged(self) -> bool:
        return (
            [*map(_VERSION, self.counted)] == self.versions
            and [*map(torch.Tensor.data_ptr, self.counted)] == self.addresses
            and all(_is_absent(group.get(name)) for group, name in self.absent)
        )

    def are_those_of_model(self) -> bool:
        """Whether the model still has the same tensors, and they are unchanged."""
        return self.unchanged() and all(group.get(name) is t for group, name, t in self.facts)


def _is_absent(tensor: Any) -> bool:
    """Whether there is no tensor, or one that accelerate offloads and creates anew at each call."""
    return tensor is None or bool(tensor.is_meta)


def _centred_linears(model: nn.Module, watch: WatchList) -> dict[str, tuple[type, int]]:
    """The centred linear layers by path: class, and the dimension of the weight that is centred."""
    found = {}
    for one in watch.weights:
        path, _, name = one.parameter.rpartition(".")
        kind = type(model.get_submodule(path))
        if kind.__name__ in LINEAR and name == "weight":
            found[path] = kind, one.axis.dim
    return found


def _uncentred_linears(model: nn.Module, watch: WatchList) -> list[str]:
    """Paths of the linear layers that were not centred: their outputs may have any mean."""
    paths = (*(name.rpartition(".")[0] for name in watch.tensors), *watch.ops)
    held = {id(model.get_submodule(path)) for path in paths}
    return [
        path
        for path, module in model.named_modules()
        if type(module).__name__ in LINEAR
        and type(module).__module__ in (nn.Linear.__module__, "transformers.pytorch_utils")
        and id(module) not in held
    ]


def watch_weights(
    model: nn.Module,
    weights: Iterable[CentredTensor],
    ops: Iterable[str],
    units: Iterable[Units] = (),
    weightless: Iterable[str] = (),
    biasless: Iterable[str] = (),
) -> None:
    """Make a model with installed norms check at its calls whether its weights are centred.

    The names are those of the class that was folded. Raises ``NotCentred`` if the model lacks one.
    """
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


def weight_checks(model: nn.Module) -> list[tuple[nn.Module, KeepCentred]]:
    """The modules in ``model`` whose calls check weights, with their checks."""
    found = ((module, entry.check) for module, entry in entries(model))
    return [(module, check) for module, check in found if isinstance(check, KeepCentred)]


def _unedited(model: Any) -> nn.Module | None:
    """A new model of this class and config on the meta device; ``None`` if it cannot be built."""
    try:
        with torch.device("meta"):
            return type(model)(copy.deepcopy(model.config))  # type: ignore[no-any-return]
    except Exception:  # the constructor of any class: it may need more than the config
        return None


def _part_in(inner: nn.Module, model: nn.Module, watch: WatchList) -> WatchList:
    """The part of ``watch`` that is in ``inner``, by the names that ``inner`` has for it.

    Tensors and modules are matched by identity, since ``inner`` may share them with other parts.
    """
    tensors = {id(t): name.replace(".base_layer.", ".") for name, t in _named_tensors(inner)}
    modules = {id(m): name for name, m in inner.named_modules(remove_duplicate=False)}
    return rename(
        watch,
        lambda name: tensors.get(id(tensor_under(model, name))),
        lambda path: modules.get(id(model.get_submodule(path))),
    )


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
