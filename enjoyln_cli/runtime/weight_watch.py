"""When does a model check that its weights are still centred (``weight_check``)?

Weights change after loading: by training, ``load_state_dict``, adapters, resized embeddings,
quantisation. At each call, tensors and modules are compared with those of the last check. If they
have changed, the weights are checked again. If the check fails, the norms compute LayerNorm.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.classes import build
from enjoyln_cli.models.sharding import in_shards, sharded_modules
from enjoyln_cli.runtime.adapters import added_weights, require_additive_adapter
from enjoyln_cli.runtime.entries import entries
from enjoyln_cli.runtime.modules import stock_class
from enjoyln_cli.runtime.neutral import neutral_parameters, skip_neutral
from enjoyln_cli.runtime.scope import Entry
from enjoyln_cli.runtime.structure import (
    Fact,
    KeepStructure,
    Snapshot,
    set_trouble,
    trouble_with,
)
from enjoyln_cli.runtime.weight_check import (
    WatchList,
    check_centred,
    locate_watched,
    rename,
    tensor_under,
    with_adapters,
)

LINEAR = ("Linear", "Conv1D")


class KeepCentred(KeepStructure):
    """The check at the start of a call: whether the model is unedited and its weights are centred.

    If not, its norms compute LayerNorm. The first call checks the values. Later calls check again
    only if a tensor or module was replaced, or if torch has counted an in-place change of a tensor
    (writes through ``tensor.data`` are not counted). Copies and unpickled models check again.
    """

    def __init__(
        self,
        watch: WatchList,
        model: nn.Module,
        reference: nn.Module | None = None,
    ) -> None:
        self.watch = watch
        self.linear = _centred_linears(reference or model, watch)
        loose = _uncentred_linears(reference or model, watch)
        super().__init__(model, loose, reference)
        self.tensors = tensors_at(model, self._paths(model, neutral_parameters(model)))
        """The tensors of the last check; copies of the model have their own ones here."""

    def _look(self, entry: Entry, model: nn.Module) -> bool:
        if any(isinstance(tensor, FakeTensor) for _, _, tensor in self._present()):
            return self._look_in_export(entry, model)
        trained = entry.fold.trained
        split = bool(sharded_modules(model))  # then they are checked once after each ``train()``
        try:
            neutral = neutral_parameters(model)
            tensors = tensors_at(model, self._paths(model, neutral))
            snapshot = Snapshot(self.modules(model), tensors=() if split else tensors)
        except RuntimeError:  # ``torch.func`` puts tensors without an address in their place
            return False
        skip_neutral(model, neutral)
        trouble = trouble_with(self.compare, model)
        if any(tensor.is_inference() for _, _, tensor in tensors):
            trouble = trouble or (
                "the weights were made in inference mode, in which torch does not count changes; "
                "load or copy the model outside of torch.inference_mode()"
            )
        set_trouble(entry, trouble)
        self.snapshot, self.tensors = snapshot, tensors
        self.trained = entry.fold.checked = trained
        return True

    def compare(self, model: nn.Module) -> None:
        """Raises ``NotCentred`` if the model was edited or a weight is not centred."""
        adapted = self.adapted(model)
        for path, (kind, dim) in self.linear.items():
            with suppress(AttributeError):  # a layer that was removed
                if path not in adapted:
                    require_additive_adapter(path, model.get_submodule(path), kind, dim)
        self.require_structure(model)
        with in_shards(model):
            check_centred(model, self.watch)

    def adapted(self, model: nn.Module) -> set[str]:
        """Paths of the centred linear layers that a LoRA adapter stands around."""
        paths = set()
        for path, (kind, _) in self.linear.items():
            with suppress(AttributeError):  # a layer that was removed
                if added_weights(model.get_submodule(path), kind) is not None:
                    paths.add(path)
        return paths

    def _paths(self, model: nn.Module, neutral: Iterable[str]) -> tuple[str, ...]:
        """Paths of the tensors whose values are checked, with those that norms skip."""
        watch = self.watch
        with suppress(AttributeError):  # a layer that was removed
            watch = with_adapters(model, watch)
        return (*watch.tensors, *neutral)

    def _look_in_export(self, entry: Entry, model: nn.Module) -> bool:
        """Check the tensors in whose places an export has put fake ones, which have no values."""
        pairs = zip(self._present(), self.tensors, strict=True)
        if not all(_stands_for(fake, real) for (*_, fake), (*_, real) in pairs):
            warnings.warn(
                "computing LayerNorm: the weights cannot be checked in this export, since they are "
                "not those of the last call; call the model before it is exported",
                stacklevel=2,
            )
            return False
        with self._real_tensors():
            if self.unchanged(entry):
                return True
            looked = self._look(entry, model)
            self.snapshot = None  # torch takes back what ``skip_neutral`` sets in an export
            return looked

    def _present(self) -> list[Fact]:
        """``tensors`` with what stands in their places now."""
        return [(group, name, group.get(name)) for group, name, _ in self.tensors]

    @contextmanager
    def _real_tensors(self) -> Iterator[None]:
        """Within the block, the tensors of the last check are back in their places."""
        present = self._present()
        try:
            for group, name, tensor in self.tensors:
                group[name] = tensor
            with _disable_current_modes():
                yield
        finally:
            for group, name, tensor in present:
                group[name] = tensor


def _stands_for(fake: Any, real: torch.Tensor) -> bool:
    """Whether an export has made ``fake`` from ``real``; it makes one for each tensor."""
    if not isinstance(fake, FakeTensor):
        return fake is real
    return fake.fake_mode.from_tensor(real, static_shapes=True) is fake


def tensors_at(model: nn.Module, paths: Iterable[str]) -> list[Fact]:
    """The tensors of ``model`` at ``paths``, as facts; without those that are not in memory.

    accelerate offloads such tensors, and creates them anew at each call.
    """
    facts: list[Fact] = []
    for path in paths:
        above, _, name = path.rpartition(".")
        with suppress(AttributeError):  # a removed layer: ``Snapshot`` notices that
            owner = model.get_submodule(above)
            group = owner._buffers if name in owner._buffers else owner._parameters
            tensor = group.get(name)
            if tensor is not None and not tensor.is_meta:
                facts.append((group, name, tensor))
    return facts


def _centred_linears(model: nn.Module, watch: WatchList) -> dict[str, tuple[type, int]]:
    """The centred linear layers by path: class, and the dimension of the weight that is centred."""
    layers = {}
    for weight in watch.weights:
        path, _, name = weight.parameter.rpartition(".")
        kind = type(model.get_submodule(path))
        if kind.__name__ in LINEAR and name == "weight":
            layers[path] = kind, weight.axis.dim
    return layers


def _uncentred_linears(model: nn.Module, watch: WatchList) -> list[str]:
    """Paths of the linear layers that were not centred: their outputs may have any mean."""
    paths = (*(name.rpartition(".")[0] for name in watch.tensors), *watch.ops)
    watched = {id(model.get_submodule(path)) for path in paths}
    return [
        path
        for path, module in model.named_modules()
        if type(module).__name__ in LINEAR
        and type(module).__module__ in (nn.Linear.__module__, "transformers.pytorch_utils")
        and id(module) not in watched
    ]


def watch_weights(model: nn.Module, watch: WatchList, reference: nn.Module | None) -> None:
    """Make a model with installed norms check at its calls whether its weights are centred.

    ``watch`` has the names of the class that was folded; for ``reference`` see ``KeepStructure``.
    Raises ``NotCentred`` if the model lacks one.
    """
    watch = locate_watched(model, watch)
    paths = {id(module): path for path, module in model.named_modules()}
    for module, entry in entries(model):
        inner = reference.get_submodule(paths[id(module)]) if reference is not None else None
        watched = watch if module is model else _part_in(module, model, watch)
        entry.check = KeepCentred(watched, module, inner)


def unedited(model: Any) -> nn.Module | None:
    """A new model of this class and config on the meta device; ``None`` if it cannot be built."""
    try:
        return build(stock_class(type(model)), model.config)
    except (UnsupportedModel, AttributeError):  # the class may need more than the config
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
