"""Modules that compute RMSNorm instead of LayerNorm, or subtract a mean.

No module is added to a model. Instead, the class of an instance is replaced, so that parameters,
their names, tying, hooks, ``generate``, ``save_pretrained``, copies and pickles keep working.

    RMSNorm     y = weight * x / sqrt(mean(x^2) + eps) + bias        (LayerNorm where mean(x) = 0)
    centring    y = x - mean(x)            on what a module returns, or on its first input

They do so only within a proven call of the whole model (see ``scope``). Elsewhere they compute what
their original class computes: in training mode, where dropout and updated weights break the zero
mean (except under ``train.reparametrize``), and where a part of the model is called directly.
"""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling, is_dynamo_compiling, is_exporting
from torch.nn import functional as F

from enjoyln_cli import kernels
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.graph.insertion_points import change_input, change_output
from enjoyln_cli.models.norm_modules import (
    first_input,
    only_input,
)
from enjoyln_cli.models.norm_probe import LayerNormForm, per_feature
from enjoyln_cli.plan.axis import Axis, centre, on_dimension
from enjoyln_cli.runtime.scope import (
    NOT_INSTALLED,
    computes_layer_norm,
    runs_proven,
    thread,
)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dims: int = 1,
    literal: bool = False,
) -> torch.Tensor:
    """``weight * x / sqrt(mean(x^2) + eps) + bias`` over the last ``dims`` dimensions.

    ``x`` has shape ``(..., *shape)`` and any floating dtype; ``weight`` and ``bias`` broadcast
    against it. Computes in float32 or wider, and rounds once to the dtype of ``x``. Uses a fast
    kernel if there is one (see ``kernels``), otherwise LayerNorm: the rows must have zero mean. In
    float64, used for checks, it computes this formula on every machine. In an export it calls
    torch's own RMSNorm operator, so that the graph has one node for it. With ``literal``, it never
    computes LayerNorm instead, and its gradient is that of RMSNorm.
    """
    if dims > 1:
        weight, bias = (None if p is None else p.flatten() for p in (weight, bias))
        return rms_norm(x.flatten(-dims), weight, bias, eps, literal=literal).reshape(x.shape)
    if is_exporting():
        return kernels.formula.exported_rms_norm(x, weight, bias, eps)
    if x.dtype == torch.float64:
        return kernels.formula.rms_norm(x, weight, bias, eps)
    if literal and not is_compiling():
        return kernels.trained_rms_norm(x, weight, bias, eps)
    return kernels.rms_norm(x, weight, bias, eps)


def group_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    groups: int,
) -> torch.Tensor:
    """RMSNorm of each of ``groups`` groups of features, then weight and bias of all features.

    ``x`` has shape ``(rows, features)``. Computed in float32 or wider, and rounded once.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (groups, -1))
    y = rms_norm(wide, None, None, eps, literal=True).flatten(-2)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


class Folded:
    """Base class of every module that computes RMSNorm instead of LayerNorm."""

    _enjoyln_fold = NOT_INSTALLED
    """The state shared by all norms and hooks of the model that this norm is installed in."""
    dim = -1
    """The normalised dimension; 1 for channels-first inputs."""
    trained = 0
    """How often ``train()`` was called on any folded norm (a class attribute)."""
    weightless = biasless = False
    """Whether the weight multiplies by one, and whether the bias is zero (see ``neutral``)."""
    weight_name, bias_name, unit = "weight", "bias", 1.0
    """Names of the two parameters, and the weight's value that multiplies by one."""

    @property
    def shifted(self) -> bool:
        """Whether the norm computes LayerNorm, since its input may have a mean.

        The answer is for the call that runs in this thread. Outside of a call: whether the last
        check found changed weights or modules.
        """
        return computes_layer_norm(self._enjoyln_fold)

    def _is_proven(self) -> bool:
        """Whether the norm computes RMSNorm now: in training mode only if the plan covers it."""
        fold = self._enjoyln_fold
        trains = self.training and fold.training_plan is None  # type: ignore[attr-defined]
        return not trains and runs_proven(fold)

    def train(self, mode: bool = True) -> Any:
        """As for any module. After training, computes LayerNorm until the weights are checked."""
        if mode and self._enjoyln_fold.training_plan is None:
            Folded.trained += 1
            for entry in self._enjoyln_fold.entries:
                entry.moved = True
        return super().train(mode)  # type: ignore[misc]


def needs(parameter: Any, neutral: bool) -> bool:
    """Whether a norm has to read its ``parameter``.

    ``neutral`` says that the parameter changes nothing now (a weight of one, a bias of zero). It is
    read anyway if it needs a gradient, and if the model's call was compiled with the code around
    it: that code would not notice a later change. An exported program has fixed parameters.
    """
    if not neutral or is_exporting():
        return not neutral
    return not thread.running.is_checked or (torch.is_grad_enabled() and parameter.requires_grad)


class RMSNorm(Folded, nn.LayerNorm):
    """An ``nn.LayerNorm`` whose input has zero mean: same parameters, names and options.

    In eval mode ``weight * x / sqrt(mean(x^2) + eps) + bias``, in training mode LayerNorm unless a
    parametrisation centres the weights.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not is_dynamo_compiling():
            call = self, input, thread.running.proven, thread.running.is_checked
            y = kernels.native.entry.module_rms_norm(*call)  # all of this method in one C++ call
            if y is NotImplemented and kernels.native.load(input.device.type):
                y = kernels.native.entry.module_rms_norm(*call)
            if y is not NotImplemented:
                return y
        if not self._is_proven():
            return super().forward(input)
        weight = self.weight if needs(self.weight, self.weightless) else None
        bias = self.bias if needs(self.bias, self.biasless) else None
        literal = self._enjoyln_fold.training_plan is not None
        if not literal and kernels.is_layer_norm(input, weight, bias):
            if torch.is_grad_enabled():  # checkpointing calls it again, outside of the proven call
                return super().forward(input)
            return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        return rms_norm(input, weight, bias, self.eps, len(self.normalized_shape), literal)


class FactoryClass(type):
    """The metaclass of the classes created here: pickling stores the call that creates a class."""

    made_by: tuple[Any, ...]


copyreg.pickle(FactoryClass, lambda cls: (cls.made_by[0], cls.made_by[1:]))  # type: ignore


def make_class(
    name: str, bases: tuple[type, ...], factory: Callable[..., type], *given: Any, **body: Any
) -> type:
    """Create the class that ``factory(*given)`` returns; it is pickled as this call."""
    members = {"__module__": __name__, "made_by": (factory, *given), **body}
    return FactoryClass(name, bases, members)


@cache
def rms_subclass(base: type) -> type:
    """A subclass of ``base`` that computes RMSNorm; ``base`` has the ``forward`` of LayerNorm."""
    if base is nn.LayerNorm:
        return RMSNorm
    return make_class(f"RMS{base.__name__}", (RMSNorm, base), rms_subclass, base)


@cache
def rms_spelled_out(base: type, form: LayerNormForm) -> type:
    """A subclass of ``base`` that computes RMSNorm; ``base`` has its own LayerNorm ``forward``.

    ``form`` says how ``base`` computes LayerNorm: dimension, eps and the use of its parameters. A
    call with further arguments than the input, which no proof covers, computes what ``base`` does.
    """
    plain: Callable[..., Any] = base.forward  # type: ignore[attr-defined]
    name = first_input(plain)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        input = only_input(args, kwargs, name)
        if not self._is_proven() or input is None or not form.holds_for(input.ndim):
            return plain(self, *args, **kwargs)
        literal = self._enjoyln_fold.training_plan is not None
        if not literal and _wants_gradients(self, input):
            return plain(self, *args, **kwargs)
        gain, bias = affine(self, form)
        if not form.takes_other_dtypes and _differs_in_dtype(input, gain, bias):
            return plain(self, *args, **kwargs)
        if self.weightless and not needs(getattr(self, form.weight), True):
            gain = None
        if self.biasless and not needs(getattr(self, form.bias), True):
            bias = None
        if form.groups > 1:
            return group_rms_norm(input, gain, bias, form.eps, form.groups)
        y = rms_norm(input.movedim(form.dim, -1), gain, bias, form.eps, literal=literal)
        return y.movedim(-1, form.dim)

    forward.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
    body: dict[str, Any] = {"forward": forward, "dim": form.dim}
    body |= {"weight_name": form.weight, "bias_name": form.bias}
    body["unit"] = 0.0 if form.gain == "1 + weight" else 1.0
    return make_class(f"RMS{base.__name__}", (Folded, base), rms_spelled_out, base, form, **body)


def stock_class(cls: type) -> type:
    """The class that a module had before norms were folded and weights split (FSDP)."""
    while cls.__module__.startswith(("enjoyln_cli.", "torch.distributed.fsdp.")):
        cls = cls.__bases__[-1]
    return cls


def affine(module: Any, form: LayerNormForm) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The factor and the summand that a norm applies, each of shape ``(features,)`` or ``None``."""
    weight = getattr(module, form.weight, None) if form.gain != "1" else None
    gain = None if weight is None else per_feature(weight)
    bias = per_feature(getattr(module, form.bias)) if form.biased else None
    return (1 + gain if form.gain == "1 + weight" and gain is not None else gain), bias


def _differs_in_dtype(input: torch.Tensor, *parameters: torch.Tensor | None) -> bool:
    """Whether a parameter has another dtype than the input."""
    return any(p is not None and p.dtype != input.dtype for p in parameters)


def _wants_gradients(norm: Any, input: torch.Tensor) -> bool:
    """Whether to compute LayerNorm because the call needs gradients and LayerNorm is as fast.

    Gradient checkpointing computes the call again in the backward pass, outside of the proven call,
    with LayerNorm. Autograd has to record the same operations both times.
    """
    if not torch.is_grad_enabled() or not kernels.layer_norm_will_do():
        return False
    return input.requires_grad or any(p.requires_grad for p in norm.parameters(recurse=False))


@cache
def centred_subclass(base: type) -> type:
    """A subclass of ``base`` that applies ``self.centrings`` to its first input or its output.

    Only in proven calls. The proof and this class take the value to centre from the same module,
    ``graph.insertion_points``.
    """
    inner: Callable[..., Any] = base.forward  # type: ignore[attr-defined]
    first = first_input(inner)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not runs_proven(self._enjoyln_fold):
            return inner(self, *args, **kwargs)
        for op in self.centrings:
            if op.place == "input":
                args, kwargs = _require_change(
                    self, change_input(partial(centre_value, axis=op.axis), first, args, kwargs)
                )
        output = inner(self, *args, **kwargs)
        for op in self.centrings:
            if op.place == "output":
                change = partial(centre_value, axis=op.axis)
                output = _require_change(self, change_output(change, output))
        return output

    return make_class(f"Centred{base.__name__}", (base,), centred_subclass, base, forward=forward)


def _require_change(module: nn.Module, changed: Any) -> Any:
    if changed is None:
        raise UnsupportedModel(
            f"{type(module).__name__}: the plan subtracts a mean here, but in this call there is "
            "no floating-point tensor to subtract it from; use the original model for such a call"
        )
    return changed


def centre_value(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """``x - mean(x)`` over ``axis``, in float32 or wider, rounded once to the dtype of ``x``."""
    if x.is_nested:  # nn.TransformerEncoder turns padded rows into a nested tensor
        return torch.nested.as_nested_tensor([centre_value(row, axis) for row in x.unbind()])
    wide = torch.promote_types(x.dtype, torch.float32)
    if axis.outer == axis.inner == 1 and axis.size == x.shape[axis.dim]:
        return (x - x.mean(axis.dim, keepdim=True, dtype=wide)).to(x.dtype)
    return centre(x.to(wide), on_dimension(axis, axis.dim % x.ndim)).to(x.dtype)
