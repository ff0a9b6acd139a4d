"""Do the weights that a fold has centred still have zero mean?

RMSNorm equals LayerNorm only while they do. The allowed mean follows from rounding alone. Rounding
an exactly centred value changes it by at most eps / 2 times its size, so

    |mean(w)| <= eps / 2 * mean(|w|)        for every group of the axis

where eps belongs to the narrowest dtype that can represent all values of the tensor: bfloat16
weights that are loaded in float32 are as exact as bfloat16. Fine-tuning, or a single new embedding
row, exceeds this bound by far. Hidden units that subtract a mean (``--widen-mlp``) do not have zero
mean: they must have the values that ``plan.mean_units`` defines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from enjoyln_cli.checkpoint.marker import live_part
from enjoyln_cli.errors import EnjoyLNError, NotCentred
from enjoyln_cli.models.classes import locate
from enjoyln_cli.plan.axis import Axis, centre, group_means, scale_along
from enjoyln_cli.plan.edited_tensors import CentredWeight, GrownParameter, NamedParameter
from enjoyln_cli.plan.mean_units import UNITS, Layers, Widening, intact
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.runtime.adapters import (
    added_weights,
    quantisation_of,
    quantised_message,
)

Renamed = TypeVar("Renamed", NamedParameter, GrownParameter, CentredWeight)
NewName = Callable[[str], str | None]
"""Maps a path to the path of the same tensor or module elsewhere, or to ``None``."""
SLICE = 1 << 24
"""Number of elements of a tensor that are checked at a time."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes that can be checked, narrowest first."""
WHAT_NOW = "call enjoyln_cli.refold(model) to centre it again, or keep LayerNorm"


@dataclass(frozen=True)
class WatchList:
    """The tensors and modules that a folded model depends on, by their paths in a live model."""

    weights: tuple[CentredWeight, ...]
    ops: tuple[str, ...] = ()
    """Modules that carry an explicit centring."""
    mlps: tuple[Widening, ...] = ()
    """MLPs with hidden units that subtract a mean."""
    constant: tuple[str, ...] = ()
    """Weights of norms that are baked into a table: each is one number for all features."""

    @classmethod
    def of(cls, plan: Plan) -> WatchList:
        """What a model depends on that was folded by ``plan``, by the plan's names."""
        return cls(
            live_part(plan).centred_weights,
            tuple(op.module for op in plan.subtractions),
            tuple(mlp for mlp in plan.widened if mlp.subtracts),
            tuple(norm.weight.parameter for norm in plan.baked.values()),
        )

    @property
    def tensors(self) -> tuple[str, ...]:
        """Every parameter that is checked."""
        weights = [one for weight in self.weights for one in (weight, weight.scale) if one]
        units = [part for mlp in self.mlps for part in mlp.parts]
        return tuple(
            dict.fromkeys([*(one.parameter for one in (*weights, *units)), *self.constant])
        )


def locate_watched(model: nn.Module, watch: WatchList) -> WatchList:
    """``watch`` with the paths in ``model`` for the names of the class that was folded.

    Names of a head that ``model`` does not have are left out. Raises ``NotCentred`` if ``model``
    lacks anything else.
    """
    names = (*(weight.parameter for weight in watch.weights), *watch.ops)
    try:
        return rename(
            watch,
            lambda name: locate(model, name, names, tensor_under),
            lambda name: locate(model, name, names),
        )
    except EnjoyLNError as error:
        raise NotCentred(
            f"{error}, or the layer was replaced; convert the model as it is now, or keep LayerNorm"
        ) from None


def rename(watch: WatchList, tensor: NewName, module: NewName) -> WatchList:
    """``watch`` with new names of its tensors and modules; entries without a name are dropped."""

    def named(parameter: Renamed) -> Renamed | None:
        path = tensor(parameter.parameter)
        return None if path is None else replace(parameter, parameter=path, tensor="")

    weights, mlps = [], []
    for old in watch.weights:
        if (weight := named(old)) is not None:
            weights.append(replace(weight, scale=old.scale and named(old.scale)))
    for mlp in watch.mlps:
        first = named(mlp.first)
        second = named(mlp.second)
        bias = mlp.bias and named(mlp.bias)
        if first is not None and second is not None:
            mlps.append(replace(mlp, first=first, second=second, bias=bias))
    ops = tuple(place for place in map(module, watch.ops) if place is not None)
    constant = tuple(path for path in map(tensor, watch.constant) if path is not None)
    return WatchList(tuple(weights), ops, tuple(mlps), constant)


def tensor_at(model: nn.Module, path: str) -> torch.Tensor:
    """The parameter or buffer at ``path``. Raises ``AttributeError`` if there is none."""
    owner, _, name = path.rpartition(".")
    module = model.get_submodule(owner)
    tensor = {**module._buffers, **module._parameters}.get(name)
    if tensor is None:
        raise AttributeError(f"no tensor {path}")
    return tensor


def tensor_under(model: nn.Module, path: str) -> torch.Tensor:
    """``tensor_at``, or the tensor of that name in the layer that a LoRA adapter has replaced."""
    owner, _, name = path.rpartition(".")
    lora = added_weights(model.get_submodule(owner)) is not None
    return tensor_at(model, f"{owner}.base_layer.{name}" if lora else path)


def with_adapters(model: nn.Module, watch: WatchList) -> WatchList:
    """``watch`` for a model with LoRA adapters on centred layers.

    Names the tensors of the layers inside, and adds the weights that the adapters add.
    """
    weights = []
    for weight in watch.weights:
        path, _, name = weight.parameter.rpartition(".")
        added = added_weights(model.get_submodule(path))
        if added is None:
            weights.append(weight)
            continue
        weights.append(replace(weight, parameter=f"{path}.base_layer.{name}"))
        if name == "weight":
            rows = replace(weight.axis, dim=0)
            weights += [replace(weight, parameter=f"{path}.{b}", axis=rows) for b in added]
    return replace(watch, weights=tuple(weights))


def check_centred(model: nn.Module, watch: WatchList) -> None:
    """Raise ``NotCentred`` for the first tensor that is not centred or cannot be checked."""
    for path in watch.ops:
        if not getattr(model.get_submodule(path), "centrings", ()):
            raise NotCentred(
                f"{path}: its added mean subtraction is gone, since the layer was replaced or "
                f"resized; {WHAT_NOW}"
            )
    beside = {mlp.second.parameter: mlp for mlp in watch.mlps}
    require_unquantised(model, watch.tensors)
    for weight in watch.weights:
        scale_path = weight.scale.parameter if weight.scale else weight.parameter
        with _in_memory(model, weight.parameter), _in_memory(model, scale_path):
            tensor = tensor_at(model, weight.parameter).detach()
            scale = tensor_at(model, scale_path).detach() if weight.scale else None
            for values in _without_units(tensor, beside.get(weight.parameter)):
                _check_tensor(weight, values, scale)
    _check_biases(model, watch)
    for path in watch.constant:
        with _in_memory(model, path):
            _check_constant(path, tensor_at(model, path).detach())
    for mlp in watch.mlps:
        with _in_memory(model, mlp.first.parameter), _in_memory(model, mlp.second.parameter):
            _check_units(mlp, layers_of(model, mlp))


def require_unquantised(model: nn.Module, paths: Iterable[str]) -> None:
    """Raise ``NotCentred`` for the first tensor at ``paths`` that is quantised."""
    for path in paths:
        if kind := quantisation_of(tensor_at(model, path)):
            raise NotCentred(quantised_message(path.rpartition(".")[0], kind))


def _check_biases(model: nn.Module, watch: WatchList) -> None:
    """Raise ``NotCentred`` if a layer with a centred weight has a bias that was not centred."""
    for weight in watch.weights:
        path, _, name = weight.parameter.rpartition(".")
        module = model.get_submodule(path)
        layer = isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        added = getattr(module, "bias", None) if layer and name == "weight" else None
        if added is not None and f"{path}.bias" not in watch.tensors:
            raise NotCentred(
                f"{path}: has a bias that it did not have when it was centred; convert the model "
                "as it is now, or keep LayerNorm"
            )


def require_values(path: str, tensor: torch.Tensor) -> None:
    """Raise ``NotCentred`` for a tensor whose mean cannot be computed."""
    if hasattr(tensor, "full_tensor"):
        raise NotCentred(
            f"{path}: is split over processes (DTensor), so its mean cannot be checked; load the "
            "whole model in each process, or keep LayerNorm"
        )
    if tensor.is_meta:
        raise NotCentred(f"{path}: its values are not in memory; load the model first")
    if tensor.dtype not in FLOATS:
        raise NotCentred(
            f"{path}: the mean of {tensor.dtype} cannot be checked; load the model in a floating "
            "dtype, or keep LayerNorm"
        )


def _check_constant(path: str, weight: torch.Tensor) -> None:
    require_values(path, weight)
    if bool((weight != weight.flatten()[0]).any()):
        raise NotCentred(
            f"{path}: is no longer one number for all features, as it has to be since its norm was "
            "baked into the embedding table; freeze it in training, or keep LayerNorm"
        )


def layers_of(model: nn.Module, mlp: Widening) -> Layers:
    """The parameters of ``mlp``, detached."""
    first, bias, second = (
        tensor_at(model, part.parameter).detach() if part else None
        for part in (mlp.first, mlp.bias, mlp.second)
    )
    assert first is not None and second is not None
    return Layers(first, bias, second)


def _without_units(tensor: torch.Tensor, mlp: Widening | None) -> list[torch.Tensor]:
    """The parts of ``tensor`` before and after the hidden units that subtract a mean."""
    if mlp is None or tensor.ndim != 2 or tensor.shape[mlp.second.dim] < mlp.size + UNITS:
        return [tensor]
    sizes = (mlp.size, UNITS, tensor.shape[mlp.second.dim] - mlp.size - UNITS)
    return [piece for piece in tensor.split(sizes, mlp.second.dim)[::2] if piece.numel()]


def _check_units(mlp: Widening, layers: Layers) -> None:
    name = mlp.second.parameter
    require_values(mlp.first.parameter, layers.first)
    require_values(name, layers.second)
    if layers.first.ndim != 2 or layers.second.ndim != 2:
        raise NotCentred(f"{name}: is no linear layer any more; {WHAT_NOW}")
    second, first = layers.second.shape[mlp.second.dim], layers.first.shape[1 - mlp.second.dim]
    dtypes = FLOATS[: FLOATS.index(layers.second.dtype) + 1]
    if min(first, second) < mlp.size + UNITS or not intact(layers, mlp, dtypes):
        raise NotCentred(
            f"{name}: its hidden units from {mlp.size} on, which subtract a mean, have "
            f"changed; {WHAT_NOW}"
        )


@torch.no_grad()
def centre_watched(model: nn.Module, watch: WatchList) -> None:
    """Centre the weights of ``watch`` in place: in float64, rounded once.

    Weights whose mean is due to rounding stay as they are, bit for bit. A LayerScale that is no
    longer ones is fused into its weights, and becomes ones.
    """
    fused: dict[str, torch.Tensor] = {}
    for weight in watch.weights:
        tensor = tensor_at(model, weight.parameter)
        scale = tensor_at(model, weight.scale.parameter) if weight.scale else None
        if weight.scale and scale is not None and not bool((scale == 1).all()):
            fused[weight.scale.parameter] = scale
            wide = scale_along(tensor.double(), scale.double(), weight.axis.dim)
            tensor.copy_(centre(wide, weight.axis))
        for _ in range(2):  # a mean far above the other values is rounded: once more
            if not unexplained_mean(weight.axis, tensor):
                break
            tensor.copy_(centre(tensor.double(), weight.axis))
    for scale in fused.values():
        scale.fill_(1)


def _in_memory(model: nn.Module, path: str) -> AbstractContextManager[Any]:
    """Load a tensor that accelerate has offloaded to CPU or disk, for the block."""
    owner = model.get_submodule(path.rpartition(".")[0])
    if not (tensor_at(model, path).is_meta and hasattr(owner, "_hf_hook")):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(owner, "cpu")


def _check_tensor(weight: CentredWeight, tensor: torch.Tensor, scale: torch.Tensor | None) -> None:
    require_values(weight.parameter, tensor)
    if weight.axis.dim >= tensor.ndim or weight.axis.stop > tensor.shape[weight.axis.dim]:
        raise NotCentred(
            f"{weight.parameter}: has shape {list(tensor.shape)}, which does not fit the proof "
            f"(dimension {weight.axis.dim}); convert the source again"
        )
    if worst := unexplained_mean(weight.axis, tensor, scale):
        path, adapter, _ = weight.parameter.partition(".lora_B.")
        if adapter:
            raise NotCentred(
                f"{path}: has an adapter (peft.tuners.lora.layer.Linear) whose output may have a "
                "mean; call enjoyln_cli.refold, which centres it, or keep LayerNorm"
            )
        rounding = _rounding_bound(tensor.dtype)
        raise NotCentred(
            f"{weight.parameter}: its mean is {worst:.1e} of its size, and rounding explains at "
            f"most {rounding:.0e}, so it has changed since it was centred; {WHAT_NOW}"
        )


def unexplained_mean(axis: Axis, tensor: torch.Tensor, scale: torch.Tensor | None = None) -> float:
    """The largest relative mean of ``tensor`` if rounding does not explain it, otherwise 0."""
    index = FLOATS.index(tensor.dtype)
    worst = 0.0
    for piece in _parts(tensor, axis.dim):
        excess = _excess_mean(piece, axis, scale, tensor.dtype)
        if excess <= 0:
            continue
        unscaled = scale is None or bool((scale == 1).all())
        narrower = FLOATS[:index] if unscaled else ()
        exact = (d for d in narrower if torch.equal(tensor.to(d).to(tensor.dtype), tensor))
        if any(_excess_mean(tensor, axis, scale, d) <= 0 for d in exact):
            return 0.0
        worst = max(worst, excess)
    return worst


def _parts(tensor: torch.Tensor, dim: int) -> Iterator[torch.Tensor]:
    """``tensor`` in parts of bounded size, each with the full length of dimension ``dim``."""
    free = [d for d in range(tensor.ndim) if d != dim]
    if tensor.numel() <= SLICE or not free:
        yield tensor
        return
    along = max(free, key=lambda d: tensor.shape[d])
    yield from tensor.split(max(1, SLICE * tensor.shape[along] // tensor.numel()), along)


def _rounding_bound(dtype: torch.dtype) -> float:
    """The largest relative mean after rounding; more in float64, where the mean is rounded too."""
    eps = torch.finfo(dtype).eps
    return 16 * eps if dtype == torch.float64 else 0.51 * eps


def _excess_mean(
    piece: torch.Tensor, axis: Axis, scale: torch.Tensor | None, dtype: torch.dtype
) -> float:
    """The largest |mean(w)| / mean(|w|) among the groups that exceed the bound; 0 if none does."""
    half = piece.dtype in (torch.float16, torch.bfloat16)
    wide = piece.to(torch.float32 if half else torch.float64)
    if scale is not None:
        wide = scale_along(wide, scale.to(wide), axis.dim)
    means, sizes = group_means(wide, axis).abs(), group_means(wide.abs(), axis)
    bound = _rounding_bound(dtype)
    bad = ~(means <= bound * (sizes + torch.finfo(dtype).smallest_normal))
    if not bad.any():
        return 0.0
    worst = float((means / sizes.clamp_min(torch.finfo(wide.dtype).tiny))[bad].max())
    return worst if math.isfinite(worst) else math.inf
