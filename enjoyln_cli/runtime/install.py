"""What a folded model runs: RMSNorm in the place of LayerNorm, and explicit centring.

Decides how a proven plan acts on a live ``torch.nn.Module``, never which norms fold. Everything is
done in place by giving an instance another class, so that parameters, their names, tying, hooks,
``generate``, ``save_pretrained``, copies and pickles go on working:

    RMSNorm     y = weight * x / sqrt(mean(x^2) + eps) + bias        (LayerNorm where mean(x) = 0)
    centring    y = x - mean(x)            on what a module returns, or on its first input

They do so within a proven call of the whole model (see ``scope``), and elsewhere compute what they
were: in training mode, where dropout and updated weights break the zero mean, in a call that is
given an input which no proof covers, and where a part of the model is called by itself.
"""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling, is_exporting

from enjoyln_cli import kernels
from enjoyln_cli.errors import UnprovenCall, UnsupportedModel
from enjoyln_cli.graph.insertion_points import change_input, change_output
from enjoyln_cli.models.norm_modules import (
    become,
    first_input,
    first_names,
    foreign_hooks,
    forward_hooks,
    interference,
    only_input,
    replaced_forward,
    runs_torchs_layer_norm,
)
from enjoyln_cli.models.norm_probe import Known, LayerNormForm, examine, per_feature
from enjoyln_cli.plan.axis import Axis, centre, feature_axis, moved
from enjoyln_cli.plan.covered_calls import OTHER_CALLS, Covered, ProvenCalls
from enjoyln_cli.plan.plan import Centring
from enjoyln_cli.runtime.scope import (
    NOT_INSTALLED,
    Enter,
    Fold,
    Leave,
    compute_layer_norm,
    computes_layer_norm,
    is_nested,
    thread,
)
from enjoyln_cli.runtime.structure import KeepStructure


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
    float64, which is for checking, it is this formula on every machine. In an export it is torch's
    own operator, which stays one.
    """
    if dims > 1:
        weight, bias = (None if p is None else p.flatten() for p in (weight, bias))
        return rms_norm(x.flatten(-dims), weight, bias, eps).reshape(x.shape)
    if is_exporting():
        return kernels.formula.exported_rms_norm(x, weight, bias, eps)
    if x.dtype == torch.float64:
        return kernels.formula.rms_norm(x, weight, bias, eps)
    return kernels.rms_norm(x, weight, bias, eps)


class Folded:
    """Marks every module that computes RMSNorm in the place of LayerNorm."""

    _enjoyln_fold = NOT_INSTALLED
    """What it shares with the model that it was installed in."""
    dim = -1
    """What is normalised; 1 for channels before positions."""
    trained = 0
    """How often any folded norm has gone into training mode."""
    weightless = biasless = False
    """Whether its weight multiplies by one, and its bias adds zero (see ``neutral``)."""
    weight_name, bias_name, unit = "weight", "bias", 1.0
    """Its parameters, and the weight that multiplies by one."""

    @property
    def shifted(self) -> bool:
        """Whether its input may have a mean, so that it computes LayerNorm.

        In the call that runs in this thread; where none runs, since something was found to have
        moved or been edited.
        """
        return computes_layer_norm(self._enjoyln_fold)

    def train(self, mode: bool = True) -> Any:
        """As any module; after training it computes LayerNorm until the weights are looked at."""
        if mode:
            Folded.trained += 1
            for entry in self._enjoyln_fold.entries:
                entry.moved = True
        return super().train(mode)  # type: ignore[misc]


def needs(parameter: Any, neutral: bool) -> bool:
    """Whether a norm has to read its ``parameter``, which changes nothing now if it is ``neutral``.

    It has to where a gradient is wanted of it, and in code that would not see it change: where the
    call of the model was compiled with the code around it. What was exported does not change.
    """
    if not neutral or is_exporting():
        return not neutral
    return not thread.running.looked or (torch.is_grad_enabled() and parameter.requires_grad)


class RMSNorm(Folded, nn.LayerNorm):
    """A ``nn.LayerNorm`` whose input has zero mean: same parameters, names and options.

    In eval mode ``weight * x / sqrt(mean(x^2) + eps) + bias``, in training mode LayerNorm.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not is_dynamo_compiling():
            call = self, input, thread.running.proven, thread.running.looked
            y = kernels.native.entry.module_rms_norm(*call)  # the same in one step
            if y is NotImplemented and kernels.native.load(input.device.type):
                y = kernels.native.entry.module_rms_norm(*call)
            if y is not NotImplemented:
                return y
        here = thread.running.proven is self._enjoyln_fold
        if self.training or not here or kernels.layer_norm_will_do():
            return super().forward(input)
        weight = self.weight if needs(self.weight, self.weightless) else None
        bias = self.bias if needs(self.bias, self.biasless) else None
        return rms_norm(input, weight, bias, self.eps, len(self.normalized_shape))


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
    """``base`` computes LayerNorm in a ``forward`` of its own, in the way of ``form``.

    A call with more than its input, which no proof covers, computes what it did.
    """
    plain: Callable[..., Any] = base.forward  # type: ignore[attr-defined]
    name = first_input(plain)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        input = only_input(args, kwargs, name)
        proven = thread.running.proven is self._enjoyln_fold and not self.training
        if not proven or input is None or not form.holds_for(input.ndim):
            return plain(self, *args, **kwargs)
        if _wants_gradients(self, input):
            return plain(self, *args, **kwargs)
        gain, bias = affine(self, form)
        if self.weightless and not needs(getattr(self, form.weight), True):
            gain = None
        if self.biasless and not needs(getattr(self, form.bias), True):
            bias = None
        y = rms_norm(input.movedim(form.dim, -1), gain, bias, form.eps)
        return y.movedim(-1, form.dim)

    forward.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
    body: dict[str, Any] = {"forward": forward, "dim": form.dim}
    body |= {"weight_name": form.weight, "bias_name": form.bias}
    body["unit"] = 0.0 if form.gain == "1 + weight" else 1.0
    return make(f"RMS{base.__name__}", (Folded, base), rms_spelled_out, base, form, **body)


def affine(module: Any, form: LayerNormForm) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What a norm multiplies by and what it adds, by feature."""
    weight = getattr(module, form.weight, None) if form.gain != "1" else None
    gain = None if weight is None else per_feature(weight)
    bias = per_feature(getattr(module, form.bias)) if form.biased else None
    return (1 + gain if form.gain == "1 + weight" and gain is not None else gain), bias


def _wants_gradients(norm: Any, input: torch.Tensor) -> bool:
    """Then LayerNorm is computed, as by ``kernels``: a backward pass may compute the call again.

    There it runs outside of the proven call, and has to record what was recorded first.
    """
    if not torch.is_grad_enabled() or not kernels.layer_norm_will_do():
        return False
    return input.requires_grad or any(p.requires_grad for p in norm.parameters(recurse=False))


@cache
def centred_subclass(base: type) -> type:
    """``base`` with ``self.centrings`` applied to its first input or its output in proven calls.

    Which value that is, ``graph.insertion_points`` tells for the proof and here alike.
    """
    inner: Callable[..., Any] = base.forward  # type: ignore[attr-defined]
    first = first_input(inner)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if thread.running.proven is not self._enjoyln_fold:
            return inner(self, *args, **kwargs)
        for op in self.centrings:
            if op.place == "input":
                args, kwargs = _found(
                    self, change_input(partial(centre_value, axis=op.axis), first, args, kwargs)
                )
        output = inner(self, *args, **kwargs)
        for op in self.centrings:
            if op.place == "output":
                change = partial(centre_value, axis=op.axis)
                output = _found(self, change_output(change, output))
        return output

    return make(f"Centred{base.__name__}", (base,), centred_subclass, base, forward=forward)


def _found(module: nn.Module, changed: Any) -> Any:
    if changed is None:
        raise UnsupportedModel(
            f"{type(module).__name__}: the plan subtracts a mean here, but this call gives no "
            "tensor of real numbers; use the original model for such a call"
        )
    return changed


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
    """A forward pre-hook: centres the named inputs over their last dimension, where given."""

    names: tuple[str, ...]
    order: tuple[str, ...]
    """Names of the inputs that come by position."""
    alone: bool = False
    """On an encoder: the model around it has looked after its inputs."""

    def __call__(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if thread.running.proven is None or (self.alone and is_nested()):
            return None
        if not _given(self.names, self.order, args, kwargs):
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
    So is every call that is not ``proven`` of code outside of transformers: a path that no trace
    had may read a value whose mean is gone from the weights, which LayerNorm does not bring back.
    """

    names: tuple[str, ...]
    order: tuple[str, ...]
    merged: bool = False
    alone: bool = False
    proven: ProvenCalls | None = None
    """Where it is known, it decides in place of ``names``."""

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        if (self.alone or self.proven is not None) and is_nested():
            return
        if self.proven is not None:
            if found := self.proven.uncovered(args, kwargs):
                raise UnprovenCall(_not_analysed(type(module).__name__, found))
            return
        found = _given(self.names, self.order, args, kwargs)
        if found and self.merged:
            raise UnprovenCall(
                f"{type(module).__name__}: not proven for calls with {', '.join(found)}, and its "
                "norms were merged, so LayerNorm cannot be used instead; leave that input out, or "
                "fold without --merge"
            )
        if found:
            compute_layer_norm()


def _not_analysed(name: str, found: Sequence[str]) -> str:
    return (
        f"{name}: its proof covers no call with {', '.join(found)}; pass such a call in "
        "example_calls to analyze() or fold(), or use the original model for it"
    )


def _given(
    names: Sequence[str], order: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str]:
    """Those of the inputs ``names`` that a call has, by name or by their place in ``order``."""
    found = [name for name in names if kwargs.get(name) is not None]
    if args:
        by_place = zip(order, args, strict=False)
        found += [name for name, x in by_place if x is not None and name in names]
    return found


def encoder_of(model: nn.Module) -> nn.Module | None:
    """The encoder inside that ``generate`` calls by itself, with the inputs of the model."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    found = model.get_encoder() if hasattr(model, "get_encoder") else None  # type: ignore
    return next((m for m in model.modules() if m is found and m is not model), None)


def _centre_last(x: Any) -> Any:
    return centre_value(x, feature_axis(tuple(x.shape))) if isinstance(x, torch.Tensor) else x


def install(
    model: nn.Module,
    norms: Iterable[str],
    ops: Iterable[Centring],
    entry_inputs: Iterable[str] = (),
    unproven: Iterable[str] = (),
    merged: bool = False,
    covered: Covered | None = None,
) -> nn.Module:
    """Make ``model`` compute with RMSNorm at ``norms`` and with the centrings ``ops``, in place.

    Names are those of the class that the plan was made for; ``model`` may also be its base class,
    or have its base class inside (``base_model_prefix``). Norms of a head that the base class does
    not have are passed over. ``entry_inputs`` names inputs of ``forward`` (``inputs_embeds``) whose
    last dimension is centred on entry; a call that is given one of the inputs ``unproven`` computes
    LayerNorm, or is refused where norms were ``merged``. Where the plan says which calls are
    ``covered``, any other call is refused with ``UnsupportedModel``. Installing twice changes
    nothing; after training it says that weights are centred.

    Returns ``model``. Raises ``UnsupportedModel`` for a module that is missing or is not a
    LayerNorm, or whose calls may compute something else than its ``forward`` (see
    ``models.norm_modules``); then nothing has been changed.
    """
    norms, ops, unproven = tuple(norms), tuple(ops), tuple(unproven)
    if covered is None and OTHER_CALLS in unproven:
        raise UnsupportedModel(
            f"{type(model).__name__}: the plan covers only some calls; pass covered=plan.covered"
        )
    if covered is not None:
        covered.require_any(type(model).__name__)
    if covered is not None and (changed := covered.changed(model)) is not None:
        raise UnsupportedModel(
            f"{changed}: the plan was proven with the earlier value; set it back, or analyse the "
            "model again"
        )
    named = (*norms, *(op.module for op in ops))
    places = {name: locate(model, name, named) for name in norms}
    swaps: list[tuple[nn.Module, type]] = []
    known: Known = {}
    for path in (place for place in places.values() if place is not None):
        module = model.get_submodule(path)
        found = interference(module)
        if found is not None:
            raise UnsupportedModel(f"{path}: {found}; install before that, or undo it")
        if not isinstance(module, Folded):
            swaps.append((module, _folded_class(module, path, known)))
    _check_aliases(model, places.values())
    carried: dict[str, tuple[Centring, ...]] = {}
    for op in ops:
        place = locate(model, op.module, named)
        if place is not None:
            carried[place] = (*carried.get(place, ()), op)
    for path, centrings in carried.items():
        _check_forward(model.get_submodule(path), path, centrings)

    fold = _add_hooks(model, tuple(entry_inputs), unproven, merged, covered)
    for module, cls in swaps:
        become(module, cls)
    for path, centrings in carried.items():
        module = model.get_submodule(path)
        if not hasattr(module, "centrings"):
            plain: Any = type(module)
            become(module, centred_subclass(plain))
            module.register_forward_hook(be_called)
        module.centrings = centrings  # type: ignore[assignment]
        module._enjoyln_fold = fold  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, Folded):
            module._enjoyln_fold = fold
    for module, entry in entries(model):
        entry.moved, entry.trouble, entry.check = False, "", KeepStructure(module)
    return model


def _add_hooks(
    model: nn.Module,
    entry_inputs: tuple[str, ...],
    unproven: tuple[str, ...],
    merged: bool,
    covered: Covered | None,
) -> Fold:
    """On the model, and on its base model and encoder, which may be called by themselves."""
    models = {id(m): m for m in (model, getattr(model, "base_model", model))}
    encoders = [encoder_of(module) for module in models.values()]
    inner = {id(m): m for m in encoders if m is not None and id(m) not in models}
    hooked = {**models, **inner}
    present = [enter for module in hooked.values() if (enter := enter_of(module)) is not None]
    fold = present[0].fold if present else Fold()
    for module in hooked.values():
        alone, order = id(module) in inner, tuple(inspect.signature(module.forward).parameters)
        enter = Enter(fold)
        if _once(module, enter, module.register_forward_pre_hook):
            fold.entries.append(enter)
            module.register_forward_hook(Leave(enter), always_call=True)
        taken = set(unproven) & set(order)
        if taken or covered is not None:
            proven = None if covered is None else covered.calls_of(module)
            guard = GuardInputs(tuple(sorted(taken)), order, merged, alone, proven)
            _once(module, guard, module.register_forward_pre_hook, with_kwargs=True)
        if entry_inputs:
            centre = CentreInputs(entry_inputs, order, alone)
            _once(module, centre, module.register_forward_pre_hook, with_kwargs=True)
    return fold


def enter_of(module: nn.Module) -> Enter | None:
    """The hook with which a call of ``module`` begins, if one was installed."""
    found = (hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Enter))
    return next(found, None)


def entries(model: nn.Module) -> list[tuple[nn.Module, Enter]]:
    """Every hooked module in ``model``, with the hook that begins its calls."""
    found = ((module, enter_of(module)) for module in model.modules())
    return [(module, enter) for module, enter in found if enter is not None]


def _once(module: nn.Module, hook: Any, register: Callable[..., Any], **how: bool) -> bool:
    """Registers a hook unless there is one of its kind at the same place; whether it did."""
    before = register == module.register_forward_pre_hook
    present = module._forward_pre_hooks if before else module._forward_hooks
    if type(hook) in map(type, present.values()):
        return False
    register(hook, **how)
    return True


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


def _folded_class(module: nn.Module, path: str, known: Known) -> type:
    base: Any = type(module)
    if runs_torchs_layer_norm(module):
        return rms_subclass(base)
    form = examine(module, known)
    if not isinstance(form, LayerNormForm):
        why = "" if form is None else f" ({form})"
        raise UnsupportedModel(
            f"{path}: {base.__name__} does not compute LayerNorm{why}, so it stays as it is"
        )
    return rms_spelled_out(base, form)


def _check_aliases(model: nn.Module, places: Iterable[str | None]) -> None:
    """A norm that is registered under several names is proven under the first of them."""
    first, folded = first_names(model), set(places)
    for path in sorted(folded - {None}):  # type: ignore[type-var]
        if first.get(path or "", path) not in folded:
            raise UnsupportedModel(
                f"{path}: is the same module as {first[path or '']}, which stays LayerNorm"
            )


def _check_forward(module: nn.Module, path: str, centrings: Iterable[Centring]) -> None:
    """Nobody may come between a module and the centring that it carries."""
    after = any(op.place == "output" for op in centrings)
    if replaced_forward(module) or (after and foreign_hooks(forward_hooks(module))):
        what = "a forward hook may change what it returns" if after else ""
        what = "its forward was replaced on the instance" if replaced_forward(module) else what
        raise UnsupportedModel(f"{path}: {what}; install before that, or undo it")


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
