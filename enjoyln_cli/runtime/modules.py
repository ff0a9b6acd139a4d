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

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.graph.insertion_points import change_input, change_output
from enjoyln_cli.kernels import rms_norm
from enjoyln_cli.models.norm_modules import first_input, only_input
from enjoyln_cli.models.norm_probe import LayerNormSpec, per_feature
from enjoyln_cli.plan.axis import centre_value
from enjoyln_cli.runtime.scope import NOT_INSTALLED, computes_layer_norm, runs_proven


class Folded:
    """Base class of every module that computes RMSNorm instead of LayerNorm."""

    _enjoyln_state = NOT_INSTALLED
    """The state shared by all norms and hooks of the model that this norm is installed in."""
    dim = -1
    """The normalised dimension; 1 for channels-first inputs."""
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
        return computes_layer_norm(self._enjoyln_state)

    def train(self, mode: bool = True) -> Any:
        """As for any module. After training, computes LayerNorm until the weights are checked."""
        self._enjoyln_state.trained += mode
        return super().train(mode)  # type: ignore[misc]


class RMSNorm(Folded, nn.LayerNorm):
    """An ``nn.LayerNorm`` whose input has zero mean: same parameters, names and options.

    In eval mode ``weight * x / sqrt(mean(x^2) + eps) + bias``, in training mode LayerNorm unless a
    parametrisation centres the weights.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not runs_proven(self._enjoyln_state):
            return super().forward(input)
        weight = None if self.weightless else self.weight
        bias = None if self.biasless else self.bias
        literal = self._enjoyln_state.literal
        return rms_norm(input, weight, bias, self.eps, len(self.normalized_shape), literal)


class FactoryClass(type):
    """The metaclass of the classes created here: pickling stores the call that creates a class."""

    made_by: tuple[Any, ...]


@cache
def _metaclass(of_base: type) -> type:
    """``FactoryClass`` for a base class with the metaclass ``of_base`` (``ABCMeta``, say)."""
    if issubclass(of_base, FactoryClass):
        return of_base
    plain = of_base is type
    metaclass = FactoryClass if plain else type(of_base.__name__, (FactoryClass, of_base), {})
    copyreg.pickle(metaclass, lambda cls: (cls.made_by[0], cls.made_by[1:]))  # type: ignore
    return metaclass


def make_class(
    name: str, bases: tuple[type, ...], factory: Callable[..., type], *arguments: Any, **body: Any
) -> type:
    """Create the class that ``factory(*arguments)`` returns; it is pickled as this call."""
    members = {"__module__": __name__, "made_by": (factory, *arguments), **body}
    return _metaclass(type(bases[-1]))(name, bases, members)  # type: ignore[no-any-return]


@cache
def rms_subclass(base: type) -> type:
    """A subclass of ``base`` that computes RMSNorm; ``base`` has the ``forward`` of LayerNorm."""
    if base is nn.LayerNorm:
        return RMSNorm
    return make_class(f"RMS{base.__name__}", (RMSNorm, base), rms_subclass, base)


@cache
def rms_spelled_out(base: type, spec: LayerNormSpec) -> type:
    """A subclass of ``base`` that computes RMSNorm; ``base`` has its own LayerNorm ``forward``.

    ``spec`` says how ``base`` computes LayerNorm: dimension, eps and the use of its parameters. A
    call with further arguments than the input, which no proof covers, computes what ``base`` does.
    """
    plain: Callable[..., Any] = base.forward  # type: ignore[attr-defined]
    name = first_input(plain)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        input = only_input(args, kwargs, name)
        if input is None or not runs_proven(self._enjoyln_state) or not spec.holds_for(input.ndim):
            return plain(self, *args, **kwargs)
        literal = self._enjoyln_state.literal
        gain, bias = affine(self, spec)
        if not spec.takes_other_dtypes and _differs_in_dtype(input, gain, bias):
            return plain(self, *args, **kwargs)
        gain = None if self.weightless else gain
        bias = None if self.biasless else bias
        y = rms_norm(input.movedim(spec.dim, -1), gain, bias, spec.eps, literal=literal)
        return y.movedim(-1, spec.dim)

    forward.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
    body: dict[str, Any] = {"forward": forward, "dim": spec.dim}
    body |= {"weight_name": spec.weight, "bias_name": spec.bias}
    body["unit"] = 0.0 if spec.gain == "1 + weight" else 1.0
    return make_class(f"RMS{base.__name__}", (Folded, base), rms_spelled_out, base, spec, **body)


def affine(module: Any, spec: LayerNormSpec) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The factor and the summand that a norm applies, each of shape ``(features,)`` or ``None``."""
    weight = getattr(module, spec.weight, None) if spec.gain != "1" else None
    gain = None if weight is None else per_feature(weight)
    bias = per_feature(getattr(module, spec.bias)) if spec.biased else None
    return (1 + gain if spec.gain == "1 + weight" and gain is not None else gain), bias


def _differs_in_dtype(input: torch.Tensor, *parameters: torch.Tensor | None) -> bool:
    """Whether a parameter has another dtype than the input."""
    return any(p is not None and p.dtype != input.dtype for p in parameters)


@cache
def centred_subclass(base: type) -> type:
    """A subclass of ``base`` that applies ``self.centrings`` to its first input or its output.

    Only in proven calls. The proof and this class take the value to centre from the same module,
    ``graph.insertion_points``.
    """
    inner: Callable[..., Any] = base.forward  # type: ignore[attr-defined]
    first = first_input(inner)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not runs_proven(self._enjoyln_state):
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
