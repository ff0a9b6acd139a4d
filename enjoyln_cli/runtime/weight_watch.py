"""When does a model check that its weights are still centred (``weight_check``)?

Weights change after loading: by training, ``load_state_dict``, adapters, resized embeddings,
quantisation. At each call, tensors and modules are compared with the last check. If they have
changed, the weights are checked again. If the check fails, the norms compute LayerNorm.

Torch counts changes of a tensor, but not changes by fused optimizers. So the weights are also
checked after each step of an optimizer that has any of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.classes import build
from enjoyln_cli.models.norm_modules import stock_class
from enjoyln_cli.runtime.call_guards import call_guards
from enjoyln_cli.runtime.neutral import neutral_parameters, skip_neutral
from enjoyln_cli.runtime.scope import CallGuard
from enjoyln_cli.runtime.structure import (
    Fact,
    KeepStructure,
    Snapshot,
    check_lock,
    set_trouble,
    trouble_with,
)
from enjoyln_cli.runtime.weight_check import (
    WatchList,
    check_centred,
    locate_watched,
    rename,
    tensor_at,
    with_adapters,
)


class KeepCentred(KeepStructure):
    """The check at the start of a call: whether the model is unedited and its weights are centred.

    If not, its norms compute LayerNorm. The first call checks the values. Later calls check again
    only if a tensor or module was replaced, or if torch has counted an in-place change of a tensor
    (writes through ``tensor.data`` are not counted). Copies and unpickled models check again.
    """

    def __init__(
        self, watch: WatchList, model: nn.Module, reference: nn.Module | None = None
    ) -> None:
        super().__init__(model, reference)
        self.watch = watch
        with suppress(RuntimeError):
            self.snapshot = self._snapshot(model)

    def _look(self, guard: CallGuard, model: nn.Module) -> bool:
        if any(isinstance(tensor, FakeTensor) for _, _, tensor in self._tensors(model)):
            return self._look_in_export(guard, model)
        trained = guard.state.trained
        try:
            snapshot = self._snapshot(model)
        except RuntimeError:  # ``torch.func`` puts tensors without an address in their place
            return False
        trouble = trouble_with(self.compare, model)
        if any(tensor.is_inference() for tensor in snapshot.tensors.values):
            trouble = trouble or (
                "the weights were made in inference mode, in which torch does not count changes; "
                "load or copy the model outside of torch.inference_mode()"
            )
        set_trouble(guard, trouble)
        self.snapshot, self.trained = snapshot, trained
        guard.state.checked = trained
        return True

    def compare(self, model: nn.Module) -> None:
        """Raise ``NotCentred`` if the model was edited or a weight is not centred."""
        super().compare(model)
        check_centred(model, self.watch)

    def _look_in_export(self, guard: CallGuard, model: nn.Module) -> bool:
        """Whether an export's fake tensors, which have no values, stand for checked tensors."""
        trouble = guard.trouble or trouble_with(super().compare, model)
        snapshot = self.snapshot
        if snapshot is None or not snapshot.tensors.unchanged(_stands_for):
            trouble = trouble or (
                "weights have changed, and an export has no values to check; call the model once "
                "before it is exported"
            )
        if trouble:
            warnings.warn(f"computing LayerNorm: {trouble}", stacklevel=2)
        return not trouble

    def _snapshot(self, model: nn.Module) -> Snapshot:
        """The model as it is; from now on its norms skip their neutral parameters."""
        neutral = neutral_parameters(model)
        snapshot = Snapshot([*model.modules()], tensors=self._tensors(model, neutral))
        skip_neutral(model, neutral)
        _watching.add(self)
        return snapshot

    def _tensors(self, model: nn.Module, neutral: Iterable[str] = ()) -> list[Fact]:
        return tensors_at(model, (*self.watch.tensors, *neutral))


_watching: WeakSet[KeepCentred] = WeakSet()
"""All checks that hold a snapshot."""


@torch.compiler.disable
def _look_after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Let each model whose weights ``optimizer`` has stepped check them at its next call."""
    if not _watching:
        return
    stepped = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    with check_lock:
        for check in [*_watching]:
            snapshot = check.snapshot
            if snapshot is not None and not stepped.isdisjoint(map(id, snapshot.tensors.values)):
                check.snapshot = None


register_optimizer_step_post_hook(_look_after_step)


def _stands_for(fake: Any, real: torch.Tensor) -> bool:
    """Whether an export has made ``fake`` from ``real``; it makes one fake for each tensor."""
    if not isinstance(fake, FakeTensor):
        return fake is real
    return fake.fake_mode.from_tensor(real, static_shapes=True) is fake


def tensors_at(model: nn.Module, paths: Iterable[str]) -> list[Fact]:
    """The tensors of ``model`` at ``paths`` that are in memory, as facts.

    Other tensors are offloaded: accelerate creates them anew at each call.
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


def watch_weights(model: nn.Module, watch: WatchList, reference: nn.Module | None) -> None:
    """Make a model with installed norms check at its calls whether its weights are centred.

    ``watch`` has the names of the class that was folded; for ``reference`` see ``KeepStructure``.
    Raises ``NotCentred`` if the model lacks a watched weight.
    """
    watch = with_adapters(model, locate_watched(model, watch))
    paths = {id(module): path for path, module in model.named_modules()}
    for module, guard in call_guards(model):
        inner = reference.get_submodule(paths[id(module)]) if reference is not None else None
        watched = watch if module is model else _part_in(module, model, watch)
        guard.check = KeepCentred(watched, module, inner)


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
    tensors = {id(t): name for name, t in _named_tensors(inner)}
    modules = {id(m): name for name, m in inner.named_modules(remove_duplicate=False)}
    return rename(
        watch,
        lambda name: tensors.get(id(tensor_at(model, name))),
        lambda path: modules.get(id(model.get_submodule(path))),
    )


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
