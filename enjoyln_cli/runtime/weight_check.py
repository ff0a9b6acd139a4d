"""Do the weights that a fold has centred still have zero mean?

RMSNorm computes LayerNorm only as long as they do. What a mean may be is decided by rounding alone:
values that were centred exactly and rounded once are off by half a step of their dtype at most, so

    |mean(w)| <= eps / 2 * mean(|w|)        for every group of the axis

in the narrowest dtype that holds all values of the tensor: a bfloat16 result that is loaded in
float32 is as exact as bfloat16. Fine-tuning goes far beyond that, and so does a single new row.
Hidden units that subtract a mean have one themselves: they hold the values of ``plan.mean_units``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from enjoyln_cli.checkpoint.marker import CentredTensor
from enjoyln_cli.errors import EnjoyLNError, NotCentred
from enjoyln_cli.plan.axis import Axis, group_means, scale_along
from enjoyln_cli.plan.mean_units import UNITS, Layers, Units, intact
from enjoyln_cli.runtime.adapters import about_quantised, about_replaced, quantisation_of
from enjoyln_cli.runtime.install import locate

Naming = Callable[[str], str | None]
"""From a path to another one of the same thing, if it has one."""
SLICE = 1 << 24
"""Elements of a tensor that are looked at at once."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Narrowest first."""
WHAT_NOW = "call enjoyln_cli.refold(model) to centre it again, or go on with LayerNorm"


@dataclass(frozen=True)
class WatchList:
    """What a folded model rests on, with the paths of a live model."""

    weights: tuple[CentredTensor, ...]
    ops: tuple[str, ...]
    """Modules that carry an explicit centring."""
    units: tuple[Units, ...] = ()
    weightless: tuple[str, ...] = ()
    """Norms whose weight a merge has set to one."""
    biasless: tuple[str, ...] = ()
    """Norms whose bias it has set to zero."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Every parameter that is looked at."""
        pairs = [(one.parameter, one.scale) for one in self.weights]
        parts = [(one.first, one.bias, one.second) for one in self.units]
        return tuple(dict.fromkeys(name for found in (*pairs, *parts) for name in found if name))


def watch_list_of(
    model: nn.Module,
    weights: Iterable[CentredTensor],
    ops: Iterable[str],
    units: Iterable[Units] = (),
    weightless: Iterable[str] = (),
    biasless: Iterable[str] = (),
) -> WatchList:
    """The names of the class that was folded as names of ``model``, without those of a lost head.

    Raises ``NotCentred`` for what ``model`` does not have.
    """
    weights, ops, units = tuple(weights), tuple(ops), tuple(units)
    names = (*(one.parameter for one in weights), *ops)
    try:
        return rename(
            WatchList(weights, ops, units, tuple(weightless), tuple(biasless)),
            lambda name: locate(model, name, names, tensor_at),
            lambda name: locate(model, name, names),
        )
    except EnjoyLNError as error:
        raise NotCentred(_about_missing(model, names) or str(error)) from None


def _about_missing(model: nn.Module, names: tuple[str, ...]) -> str:
    """What to say of the first layer that is there without its tensor; empty if there is none."""
    for name in names:
        path, _, own = name.rpartition(".")
        with suppress(EnjoyLNError):
            place = locate(model, path, names)
            module = model.get_submodule(place) if place else None
            if module is not None and own not in {**module._buffers, **module._parameters}:
                inner = (type(m) for m in module.modules() if own in m._parameters)
                return about_replaced(place or "", module, next(inner, nn.Linear))
    return ""


def rename(watch: WatchList, tensor: Naming, module: Naming) -> WatchList:
    """``watch`` by other names of tensors and modules, without what has none."""
    weights, units = [], []
    for one in watch.weights:
        path, scale = tensor(one.parameter), one.scale and tensor(one.scale)
        if path is not None:
            weights.append(CentredTensor(path, one.axis, scale))
    for some in watch.units:
        first, second, bias = tensor(some.first), tensor(some.second), some.bias
        if first is not None and second is not None:
            units.append(Units(first, bias and tensor(bias), second, some.dim, some.start))
    named = (watch.ops, watch.weightless, watch.biasless)
    ops, weightless, biasless = (
        tuple(place for place in map(module, names) if place is not None) for names in named
    )
    return WatchList(tuple(weights), ops, tuple(units), weightless, biasless)


def tensor_at(model: nn.Module, path: str) -> torch.Tensor:
    """The parameter or buffer at ``path``; ``AttributeError`` where there is none."""
    owner, _, name = path.rpartition(".")
    module = model.get_submodule(owner)
    tensor = {**module._buffers, **module._parameters}.get(name)
    if tensor is None:
        raise AttributeError(f"no tensor {path}")
    return tensor


def check_centred(model: nn.Module, watch: WatchList) -> None:
    """Raises ``NotCentred``, naming the first tensor that has a mean or cannot be looked at."""
    for path in watch.ops:
        if not getattr(model.get_submodule(path), "centrings", ()):
            raise NotCentred(
                f"{path}: its added mean subtraction is gone, since the layer was replaced or "
                f"resized; {WHAT_NOW}"
            )
    beside = {some.second: some for some in watch.units}
    require_unquantised(model, watch.tensors)
    for one in watch.weights:
        with _at_hand(model, one.parameter), _at_hand(model, one.scale or one.parameter):
            tensor = tensor_at(model, one.parameter)
            scale = tensor_at(model, one.scale) if one.scale else None
            for part in _without_units(tensor.detach(), beside.get(one.parameter)):
                _check_tensor(one, part, None if scale is None else scale.detach())
    _check_biases(model, watch)
    for some in watch.units:
        with _at_hand(model, some.first), _at_hand(model, some.second):
            _check_units(some, layers_of(model, some))


def require_unquantised(model: nn.Module, paths: Iterable[str]) -> None:
    """Raises ``NotCentred`` for the first quantised tensor of those at ``paths``."""
    for path in paths:
        if found := quantisation_of(tensor_at(model, path)):
            raise NotCentred(about_quantised(path.rpartition(".")[0], found))


def _check_biases(model: nn.Module, watch: WatchList) -> None:
    """Raises ``NotCentred`` where a layer with a centred weight adds what was not centred."""
    for one in watch.weights:
        path, _, name = one.parameter.rpartition(".")
        module = model.get_submodule(path)
        layer = isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        added = getattr(module, "bias", None) if layer and name == "weight" else None
        if added is not None and f"{path}.bias" not in watch.tensors:
            raise NotCentred(
                f"{path}: has a bias that it did not have when it was centred; convert the model "
                "as it is now, or go on with LayerNorm"
            )


def layers_of(model: nn.Module, units: Units) -> Layers:
    """The parameters that hold ``units``, without gradients."""
    bias = tensor_at(model, units.bias).detach() if units.bias else None
    first, second = (tensor_at(model, path).detach() for path in (units.first, units.second))
    return Layers(first, bias, second)


def _without_units(tensor: torch.Tensor, units: Units | None) -> list[torch.Tensor]:
    """The hidden units before and after those, along their dimension."""
    if units is None or tensor.ndim != 2 or tensor.shape[units.dim] < units.start + UNITS:
        return [tensor]
    sizes = (units.start, UNITS, tensor.shape[units.dim] - units.start - UNITS)
    return [part for part in tensor.split(sizes, units.dim)[::2] if part.numel()]


def _check_units(units: Units, layers: Layers) -> None:
    if isinstance(layers.second, FakeTensor):
        return
    for path, tensor in ((units.first, layers.first), (units.second, layers.second)):
        if tensor.is_meta or tensor.dtype not in FLOATS or tensor.ndim != 2:
            raise NotCentred(
                f"{path}: {'on the meta device' if tensor.is_meta else tensor.dtype} has no "
                "values that could be looked at; load the model unquantised, or go on with "
                "LayerNorm"
            )
    second, first = layers.second.shape[units.dim], layers.first.shape[1 - units.dim]
    dtypes = FLOATS[: FLOATS.index(layers.second.dtype) + 1]
    if min(first, second) < units.start + UNITS or not intact(layers, units, dtypes):
        raise NotCentred(
            f"{units.second}: its hidden units from {units.start} on, which subtract a mean, have "
            f"changed; {WHAT_NOW}"
        )


def _at_hand(model: nn.Module, path: str) -> AbstractContextManager[Any]:
    """Within the block, a tensor that accelerate has put on the CPU or the disk is there."""
    owner = model.get_submodule(path.rpartition(".")[0])
    if not (tensor_at(model, path).is_meta and hasattr(owner, "_hf_hook")):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(owner, "cpu")


def _check_tensor(one: CentredTensor, tensor: torch.Tensor, scale: torch.Tensor | None) -> None:
    if isinstance(tensor, FakeTensor):
        return  # while the model is exported; it was looked at before
    if tensor.is_meta:
        raise NotCentred(f"{one.parameter}: its values are not in memory; load the model first")
    if tensor.dtype not in FLOATS:
        raise NotCentred(
            f"{one.parameter}: {tensor.dtype} has no mean that could be looked at; load the model "
            "in a floating dtype, or go on with LayerNorm"
        )
    if one.axis.dim >= tensor.ndim or one.axis.stop > tensor.shape[one.axis.dim]:
        raise NotCentred(
            f"{one.parameter}: has shape {list(tensor.shape)}, which dimension {one.axis.dim} of "
            "the proof does not fit; convert the source again"
        )
    own = FLOATS.index(tensor.dtype)
    worst = 0.0
    for part in _parts(tensor, one.axis.dim):
        beyond = _beyond(part, one.axis, scale, tensor.dtype)
        if beyond <= 0:
            continue
        alone = scale is None or bool((scale == 1).all())
        narrower = FLOATS[:own] if alone else ()
        held = (d for d in narrower if torch.equal(tensor.to(d).to(tensor.dtype), tensor))
        narrow = next((d for d in held if _beyond(tensor, one.axis, scale, d) <= 0), None)
        if narrow is not None:
            return
        worst = max(worst, beyond)
    if worst > 0:
        rounding = _bound(tensor.dtype)
        raise NotCentred(
            f"{one.parameter}: its mean is {worst:.1e} of its size, and rounding explains at most "
            f"{rounding:.0e}, so it has changed since it was centred; {WHAT_NOW}"
        )


def _parts(tensor: torch.Tensor, dim: int) -> Iterator[torch.Tensor]:
    """``tensor`` in parts of bounded size that hold whole groups of ``dim``."""
    free = [d for d in range(tensor.ndim) if d != dim]
    if tensor.numel() <= SLICE or not free:
        yield tensor
        return
    along = max(free, key=lambda d: tensor.shape[d])
    yield from tensor.split(max(1, SLICE * tensor.shape[along] // tensor.numel()), along)


def _bound(dtype: torch.dtype) -> float:
    """Half a step; in float64 the mean itself is not taken exactly."""
    eps = torch.finfo(dtype).eps
    return 16 * eps if dtype == torch.float64 else 0.51 * eps


def _beyond(
    part: torch.Tensor, axis: Axis, scale: torch.Tensor | None, dtype: torch.dtype
) -> float:
    """The largest mean over the size of its group where that is more than rounding; else 0."""
    half = part.dtype in (torch.float16, torch.bfloat16)
    wide = part.to(torch.float32 if half else torch.float64)
    if scale is not None:
        wide = scale_along(wide, scale.to(wide), axis.dim)
    means, sizes = group_means(wide, axis).abs(), group_means(wide.abs(), axis)
    bad = ~(means <= _bound(dtype) * (sizes + torch.finfo(dtype).smallest_normal))
    if not bad.any():
        return 0.0
    worst = float((means / sizes.clamp_min(torch.finfo(wide.dtype).tiny))[bad].max())
    return worst if math.isfinite(worst) else math.inf
