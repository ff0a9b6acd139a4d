"""What a folded model runs: RMSNorm in the place of LayerNorm, and explicit centring.

Decides how a proven plan acts on a live ``torch.nn.Module``, never which norms fold. Everything is
done in place by giving an instance another class, so that parameters, their names, tying, hooks,
``generate``, ``save_pretrained``, copies and pickles go on working:

    RMSNorm     y = weight * x / sqrt(mean(x^2) + eps) + bias        (LayerNorm where mean(x) = 0)
    centring    y = x - mean(x)            on what a module returns, or on its first input

In training mode the norms compute LayerNorm: dropout and updated weights break the zero mean. So
they do in a call that is given an input which no proof covers.
"""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from enjoyln_cli import kernels
from enjoyln_cli.axis import Axis, centre, feature_axis, moved
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.plan import Centring
from enjoyln_cli.probe import LayerNormForm, layer_norm_form


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dims: int = 1,
) -> torch.Tensor:
    """``weight * x / sqrt(mean(x^2) + eps) + bias`` over the last ``dims`` dimensions.

    ``x`` is ``(..., *shape)`` of any floating dtype; ``weight`` and ``bias`` broadcast against it.
    Computed in float32 or wider and rounded once to the dtype of ``x``, by a kernel where there is
    one (see ``kernels``); where there is none, as LayerNorm, so the rows must have zero mean. In
    float64, which is for checking, it is this formula on every machine.
    """
    if dims > 1:
        weight, bias = (None if p is None else p.flatten() for p in (weight, bias))
        return rms_norm(x.flatten(-dims), weight, bias, eps).reshape(x.shape)
    if x.dtype == torch.float64:
        return kernels.formula.rms_norm(x, weight, bias, eps)
    return kernels.rms_norm(x, weight, bias, eps)


GIVEN, MOVED = 1, 2
"""Why a norm's input may have a mean: an unproven input in this call, or weights that moved."""


class Folded:
    """Marks every module that computes RMSNorm in the place of LayerNorm."""

    shifted = 0
    """``GIVEN``, ``MOVED`` or both while the norm's input may have a mean: compute LayerNorm."""
    dim = -1
    """What is normalised; 1 for channels before positions."""
    trained = 0
    """How often any folded norm has gone into training mode."""

    def train(self, mode: bool = True) -> Any:
        """As any module; after training it computes LayerNorm until the weights are looked at."""
        if mode:
            Folded.trained += 1
            self.shifted |= MOVED
        return super().train(mode)  # type: ignore[misc]


class RMSNorm(Folded, nn.LayerNorm):
    """A ``nn.LayerNorm`` whose input has zero mean: same parameters, names and options.

    In eval mode ``weight * x / sqrt(mean(x^2) + eps) + bias``, in training mode LayerNorm.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not is_dynamo_compiling():
            y = kernels.native.entry.module_rms_norm(self, input)  # the same in one step
            if y is NotImplemented and kernels.native.load(input.device.type):
                y = kernels.native.entry.module_rms_norm(self, input)
            if y is not NotImplemented:
                return y
        if self.training or self.shifted or kernels.layer_norm_will_do():
            return super().forward(input)
        return rms_norm(input, self.weight, self.bias, self.eps, len(self.normalized_shape))


class Made(type):
    """The type of classes made here; such a class is pickled as the call that makes it."""

    made_by: tuple[Any, ...]


copyreg.pickle(Made, lambda cls: (cls.made_by[0], cls.made_by[1:]))  # type: ignore


def make(
    name: str, bases: tuple[type, ...], factory: Callable[..., type], *given: Any, **body: Any
) -> type:
    """A class that ``factory(*given)`` returns, and that pickles as this call."""
    return Made(name, bases, {"__module__": __name__, "made_by": (factory, *given), **body})


@cache
def rms_subclass(base: type) -> type:
    """``base`` has the ``forward`` of ``nn.LayerNorm``, and gets that of ``RMSNorm``."""
    if base is nn.LayerNorm:
        return RMSNorm
    return make(f"RMS{base.__name__}", (RMSNorm, base), rms_subclass, base)


@cache
def rms_spelled_out(base: type, form: LayerNormForm) -> type:
    """``base`` computes LayerNorm in a ``forward`` of its own, in the way of ``form``."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if self.training or self.shifted or not form.holds_for(input.ndim):
            return base.forward(self, input)  # type: ignore[attr-defined]
        weight = getattr(self, "weight", None) if form.gain != "1" else None
        gain = 1 + weight if form.gain == "1 + weight" and weight is not None else weight
        bias = self.bias if form.biased else None
        y = rms_norm(input.movedim(form.dim, -1), gain, bias, form.eps)
        return y.movedim(-1, form.dim)

    body = {"forward": forward, "dim": form.dim}
    return make(f"RMS{base.__name__}", (Folded, base), rms_spelled_out, base, form, **body)


@cache
def centred_subclass(base: type) -> type:
    """``base`` with ``self.centrings`` applied to its first input or its output."""
    inner: Callable[..., Any] = base.forward  # type: ignore[attr-defined]
    first = next(iter([*inspect.signature(inner).parameters][1:]), "")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        for op in self.centrings:
            if op.place == "input" and args:
                args = (centre_value(args[0], op.axis), *args[1:])
            elif op.place == "input":
                kwargs = {**kwargs, first: centre_value(kwargs[first], op.axis)}
        output = inner(self, *args, **kwargs)
        for op in self.centrings:
            if op.place == "output" and isinstance(output, tuple):
                output = (centre_value(output[0], op.axis), *output[1:])
            elif op.place == "output":
                output = centre_value(output, op.axis)
        return output

    return make(f"Centred{base.__name__}", (base,), centred_subclass, base, forward=forward)


def be_called(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook that changes nothing, but makes a parent call the module's ``forward``.

    Without one ``nn.TransformerEncoderLayer`` computes from its children's weights alone, in one
    fused op and only where no gradient is wanted: no trace shows that.
    """


def centre_value(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """``x - mean(x)`` over ``axis``, in float32 or wider, rounded once to the dtype of ``x``."""
    if x.is_nested:  # what torch's encoder makes of padded rows
        return torch.nested.as_nested_tensor([centre_value(row, axis) for row in x.unbind()])
    wide = torch.promote_types(x.dtype, torch.float32)
    if axis.outer == axis.inner == 1 and axis.size == x.shape[axis.dim]:
        return (x - x.mean(axis.dim, keepdim=True, dtype=wide)).to(x.dtype)
    return centre(x.to(wide), moved(axis, axis.dim % x.ndim)).to(x.dtype)


@dataclass(frozen=True)
class CentreInputs:
    """A forward pre-hook: centres the named inputs over their last dimension, where given.

    On an encoder it does so in calls of its own alone, as ``GuardInputs`` does.
    """

    names: tuple[str, ...]
    order: tuple[str, ...]
    """Names of the inputs that come by position."""

    def __call__(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if module.within or not _given(self.names, self.order, args, kwargs):
            return None
        values = [
            _centre_last(value) if name in self.names else value
            for name, value in zip(self.order, args, strict=False)
        ]
        changed = {n: _centre_last(v) if n in self.names else v for n, v in kwargs.items()}
        return (*values, *args[len(values) :]), changed


@dataclass(frozen=True)
class GuardInputs:
    """A forward pre-hook: a call that is given a named input computes LayerNorm everywhere.

    Where norms are ``merged`` into what reads them, something else may read them in such a call,
    and LayerNorm does not bring back what they have lost: it is refused with ``UnsupportedModel``.
    """

    names: tuple[str, ...]
    order: tuple[str, ...]
    merged: bool = False

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        found = () if module.within else _given(self.names, self.order, args, kwargs)
        if found and self.merged:
            raise UnsupportedModel(
                f"{type(module).__name__}: not proven for calls with {', '.join(found)}, and its "
                "norms were merged, so that LayerNorm would not do either; leave that input out, "
                "or fold without --merge"
            )
        if found and not _guarded(module):
            module.guarding = True
            set_shifted(module, GIVEN, True)


def _given(
    names: Sequence[str], order: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str]:
    """Those of the inputs ``names`` that a call has, by name or by their place in ``order``."""
    found = [name for name in names if kwargs.get(name) is not None]
    if args:
        by_place = zip(order, args, strict=False)
        found += [name for name, x in by_place if x is not None and name in names]
    return found


def end_of_guard(module: Any, args: Any, output: Any) -> None:
    """The forward hook that goes with ``GuardInputs``: the outermost guarded call ends it."""
    if module.guarding:
        module.guarding = False
        set_shifted(module, GIVEN, False)


@dataclass(frozen=True)
class Around:
    """Hooks of a model that has an encoder inside: while it runs, it looks after their inputs.

    ``generate`` calls the encoder by itself, past the hooks of the model.
    """

    encoder: str
    step: int
    """1 as the hook before ``forward``, -1 as the one after it."""

    def __call__(self, module: nn.Module, *_: Any) -> None:
        encoder: Any = module.get_submodule(self.encoder)
        encoder.within = max(0, encoder.within + self.step)


def encoder_of(model: nn.Module) -> nn.Module | None:
    """The encoder inside that ``generate`` calls by itself, with the inputs of the model."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    found = model.get_encoder() if hasattr(model, "get_encoder") else None  # type: ignore
    return next((m for m in model.modules() if m is found and m is not model), None)


def _guarded(module: nn.Module) -> bool:
    return any(found.shifted & GIVEN for found in module.modules() if isinstance(found, Folded))


def set_shifted(module: nn.Module, why: int, value: bool) -> None:
    """Set or clear ``why`` (``GIVEN`` or ``MOVED``) on every folded norm in ``module``."""
    for found in module.modules():
        if isinstance(found, Folded):
            found.shifted = found.shifted | why if value else found.shifted & ~why


def _centre_last(x: Any) -> Any:
    return centre_value(x, feature_axis(tuple(x.shape))) if isinstance(x, torch.Tensor) else x


def install(
    model: nn.Module,
    norms: Iterable[str],
    ops: Iterable[Centring],
    entry_inputs: Iterable[str] = (),
    unproven: Iterable[str] = (),
    merged: bool = False,
) -> nn.Module:
    """Make ``model`` compute with RMSNorm at ``norms`` and with the centrings ``ops``, in place.

    Names are those of the class that the plan was made for; ``model`` may also be its base class,
    or have its base class inside (``base_model_prefix``). Norms of a head that the base class does
    not have are passed over. ``entry_inputs`` names inputs of ``forward`` (``inputs_embeds``) whose
    last dimension is centred on entry; a call that is given one of the inputs ``unproven`` computes
    LayerNorm, or is refused where norms were ``merged``. Installing twice changes nothing; after
    training it says that weights are centred.

    Returns ``model``. Raises ``UnsupportedModel`` for a module that is missing or is not a
    LayerNorm, or whose ``forward`` somebody else has replaced; then nothing has been changed.
    """
    norms, ops = tuple(norms), tuple(ops)
    named = (*norms, *(op.module for op in ops))
    places = {name: locate(model, name, named) for name in norms}
    swaps: list[tuple[nn.Module, type]] = []
    for path in (found for found in places.values() if found is not None):
        module = model.get_submodule(path)
        if not isinstance(module, Folded):
            swaps.append((module, _folded_class(module, path)))
    carried: dict[str, tuple[Centring, ...]] = {}
    for op in ops:
        place = locate(model, op.module, named)
        if place is not None:
            carried[place] = (*carried.get(place, ()), op)
    for module, _ in swaps:
        _check_forward(module)
    for path in carried:
        _check_forward(model.get_submodule(path))

    for module, cls in swaps:
        _become(module, cls)
    for path, centrings in carried.items():
        module = model.get_submodule(path)
        if not hasattr(module, "centrings"):
            plain: Any = type(module)
            _become(module, centred_subclass(plain))
            module.register_forward_hook(be_called)
        module.centrings = centrings  # type: ignore[assignment]
    _add_hooks(model, tuple(entry_inputs), tuple(unproven), merged)
    set_shifted(model, MOVED, False)
    return model


def _add_hooks(
    model: nn.Module, entry_inputs: tuple[str, ...], unproven: tuple[str, ...], merged: bool
) -> None:
    """On the model, and on its base model and encoder, which may be called by themselves."""
    models = {id(m): m for m in (model, getattr(model, "base_model", model))}
    hooked = {**models}
    for module in models.values():
        encoder = encoder_of(module)
        path = next((name for name, m in module.named_modules() if m is encoder), None)
        if encoder is not None and path is not None and id(encoder) not in models:
            hooked[id(encoder)] = encoder
            if _once(module, Around(path, 1), module.register_forward_pre_hook):
                call_first(module)
            _once(module, Around(path, -1), module.register_forward_hook, always_call=True)
    for module in hooked.values():
        module.within, module.guarding = 0, False  # type: ignore[assignment]
        order = tuple(inspect.signature(module.forward).parameters)
        if entry_inputs:
            centre = CentreInputs(entry_inputs, order)
            _once(module, centre, module.register_forward_pre_hook, with_kwargs=True)
        taken = set(unproven) & set(order)
        if taken:
            guard = GuardInputs(tuple(sorted(taken)), order, merged)
            if _once(module, guard, module.register_forward_pre_hook, with_kwargs=True):
                module.register_forward_hook(end_of_guard, always_call=True)


def _once(module: nn.Module, hook: Any, register: Callable[..., Any], **how: bool) -> bool:
    """Registers a hook unless there is one of its kind at the same place; whether it did."""
    before = register == module.register_forward_pre_hook
    present = module._forward_pre_hooks if before else module._forward_hooks
    if type(hook) in map(type, present.values()):
        return False
    register(hook, **how)
    return True


def call_first(module: nn.Module) -> None:
    """Of its forward pre-hooks, the one that was registered last is called first.

    ``prepend=True`` changes the order of an ``OrderedDict`` alone, and Dynamo before torch 2.13
    reads that of the dictionary beneath.
    """
    hooks = module._forward_pre_hooks
    for key in list(hooks)[:-1]:
        hooks[key] = hooks.pop(key)


def locate(
    model: nn.Module,
    name: str,
    names: tuple[str, ...] = (),
    get: Callable[[nn.Module, str], Any] = nn.Module.get_submodule,
) -> str | None:
    """Path in ``model`` of the module ``name``, with the base model's prefix added or removed.

    ``None`` for a module of a head, where ``model`` is the base class and other ``names`` carry the
    base model's prefix. ``get`` finds other things than modules; it raises ``AttributeError``
    for what is not there. Raises ``UnsupportedModel`` where there is no such module.
    """
    prefix = getattr(model, "base_model_prefix", "") or ""
    head = f"{prefix}."
    for path in (name, name.removeprefix(head), head + name):
        try:
            get(model, path)
        except AttributeError:
            continue
        return path
    inside = prefix and not hasattr(model, prefix) and not name.startswith(head)
    if inside and any(other.startswith(head) for other in names):
        return None
    raise UnsupportedModel(
        f"{type(model).__name__} has no {name!r}: the plan was made for another class"
    )


def _folded_class(module: nn.Module, path: str) -> type:
    base: Any = type(module)
    if base.forward is nn.LayerNorm.forward:
        return rms_subclass(base)
    form = layer_norm_form(module)
    if form is None:
        raise UnsupportedModel(
            f"{path}: {base.__name__} does not compute LayerNorm, so it stays as it is"
        )
    return rms_spelled_out(base, form)


def _check_forward(module: nn.Module) -> None:
    """Accelerate keeps the forward it wraps in ``_old_forward``; other patches hide the class."""
    if "forward" not in module.__dict__:
        return
    old = module.__dict__.get("_old_forward")
    if getattr(old, "__func__", None) is not type(module).forward:
        raise UnsupportedModel(
            f"{type(module).__name__}: forward was replaced on the instance; install before that"
        )


def _become(module: nn.Module, cls: type) -> None:
    module.__class__ = cls
    if "_old_forward" in module.__dict__:
        module._old_forward = MethodType(cls.forward, module)  # type: ignore


@contextmanager
def input_means(model: nn.Module) -> Iterator[dict[str, float]]:
    """Within the block, collects what mean every RMSNorm sees, relative to its input's rms.

    Yields a dict from module path to the root mean square over tokens of ``mean(x) / rms(x)``, the
    worst call of each module; it is complete when the block ends. 0 is right, 1 a constant input.
    """
    seen: dict[str, float] = {}

    def hook_for(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            x = (args or tuple(kwargs.values()))[0].detach().to(torch.float64)
            dims = _normalised_dims(module)
            rms = x.square().mean(dims).sqrt()
            ratio = torch.where(rms > 0, x.mean(dims) / rms, torch.zeros_like(rms))
            value = float(ratio[torch.isfinite(ratio)].square().mean().nan_to_num().sqrt())
            seen[path] = max(seen.get(path, 0.0), value)

        return hook

    handles = [
        model.get_submodule(path).register_forward_pre_hook(hook_for(path), with_kwargs=True)
        for path, module in model.named_modules()
        if isinstance(module, Folded)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _normalised_dims(module: nn.Module) -> tuple[int, ...]:
    dim = int(module.dim)  # type: ignore[arg-type]
    return (dim,) if dim != -1 else tuple(range(-len(getattr(module, "normalized_shape", (1,))), 0))
