"""Do the weights that a fold has centred still have zero mean?

RMSNorm computes LayerNorm only as long as they do. What a mean may be is decided by rounding alone:
values that were centred exactly and rounded once are off by half a step of their dtype at most, so

    |mean(w)| <= eps / 2 * mean(|w|)        for every group of the axis

in the narrowest dtype that holds all values of the tensor: a bfloat16 result that is loaded in
float32 is as exact as bfloat16. Fine-tuning goes far beyond that, and so does a single new row.
Hidden units that subtract a mean have one themselves: they hold the values of ``units``.

Weights move after loading, too: training, ``load_state_dict``, adapters, resized embeddings,
quantised layers. A hook sees at each call whether tensors and modules are the ones that were
looked at, looks again where they are not, and makes the norms compute LayerNorm where it has to.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo.comptime import comptime
from torch._subclasses import FakeTensor
from torch.compiler import is_dynamo_compiling

from enjoyln_cli.axis import Axis, group_means, scaled
from enjoyln_cli.errors import EnjoyLNError, NotCentred
from enjoyln_cli.marker import Centred
from enjoyln_cli.norms import MOVED, Folded, call_first, encoder_of, locate, set_shifted
from enjoyln_cli.units import UNITS, Layers, Units, intact

Naming = Callable[[str], str | None]
"""From a path to another one of the same thing, if it has one."""

SLICE = 1 << 24
"""Elements of a tensor that are looked at at once."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Narrowest first."""
WHAT_NOW = "call enjoyln_cli.refold(model), which centres it again, or go on with LayerNorm"


@dataclass(frozen=True)
class Watched:
    """What a folded model rests on, with the paths of a live model."""

    weights: tuple[Centred, ...]
    ops: tuple[str, ...]
    """Modules that carry an explicit centring."""
    units: tuple[Units, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """Every parameter that is looked at."""
        pairs = [(one.parameter, one.scale) for one in self.weights]
        parts = [(one.first, one.bias, one.second) for one in self.units]
        return tuple(dict.fromkeys(name for found in (*pairs, *parts) for name in found if name))


def watched(
    model: nn.Module,
    weights: Iterable[Centred],
    ops: Iterable[str],
    units: Iterable[Units] = (),
) -> Watched:
    """The names of the class that was folded as names of ``model``, without those of a lost head.

    Raises ``NotCentred`` for what ``model`` does not have.
    """
    weights, ops, units = tuple(weights), tuple(ops), tuple(units)
    names = (*(one.parameter for one in weights), *ops)
    try:
        return _renamed(
            Watched(weights, ops, units),
            lambda name: locate(model, name, names, tensor_at),
            lambda name: locate(model, name, names),
        )
    except EnjoyLNError as error:
        raise NotCentred(
            f"{error}, or a layer has been replaced (by an adapter or a quantised one): what it "
            "writes cannot be known to have zero mean; merge the adapter, or go on with LayerNorm"
        ) from None


def _renamed(watch: Watched, tensor: Naming, module: Naming) -> Watched:
    """``watch`` by other names of tensors and modules, without what has none."""
    weights, units = [], []
    for one in watch.weights:
        path, scale = tensor(one.parameter), one.scale and tensor(one.scale)
        if path is not None:
            weights.append(Centred(path, one.axis, scale))
    for some in watch.units:
        first, second, bias = tensor(some.first), tensor(some.second), some.bias
        if first is not None and second is not None:
            units.append(Units(first, bias and tensor(bias), second, some.dim, some.start))
    places = map(module, watch.ops)
    held = tuple(place for place in places if place is not None)
    return Watched(tuple(weights), held, tuple(units))


def tensor_at(model: nn.Module, path: str) -> torch.Tensor:
    """The parameter or buffer at ``path``; ``AttributeError`` where there is none."""
    owner, _, name = path.rpartition(".")
    module = model.get_submodule(owner)
    tensor = {**module._buffers, **module._parameters}.get(name)
    if tensor is None:
        raise AttributeError(f"no tensor {path}")
    return tensor


def check_centred(model: nn.Module, watch: Watched) -> None:
    """Raises ``NotCentred``, naming the first tensor that has a mean or cannot be looked at."""
    for path in watch.ops:
        if not getattr(model.get_submodule(path), "centrings", ()):
            raise NotCentred(
                f"{path}: the explicit centring that it carried is gone (a layer that was replaced "
                f"or resized); {WHAT_NOW}"
            )
    beside = {some.second: some for some in watch.units}
    for one in watch.weights:
        with _at_hand(model, one.parameter), _at_hand(model, one.scale or one.parameter):
            tensor = tensor_at(model, one.parameter)
            scale = tensor_at(model, one.scale) if one.scale else None
            for part in _without_units(tensor.detach(), beside.get(one.parameter)):
                _check_tensor(one, part, None if scale is None else scale.detach())
    for some in watch.units:
        with _at_hand(model, some.first), _at_hand(model, some.second):
            _check_units(some, layers_of(model, some))


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


def _check_tensor(one: Centred, tensor: torch.Tensor, scale: torch.Tensor | None) -> None:
    if isinstance(tensor, FakeTensor):
        return  # while the model is exported; it was looked at before
    if tensor.is_meta:
        raise NotCentred(f"{one.parameter}: its values are not in memory; load the model first")
    if tensor.dtype not in FLOATS:
        raise NotCentred(
            f"{one.parameter}: {tensor.dtype} (a quantised layer) has no mean that could be looked "
            "at; optimize the model before it is quantised, or go on with LayerNorm"
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
            f"{one.parameter}: has a mean of {worst:.1e} of its size where {rounding:.0e} is "
            f"rounding, so it has changed since it was centred; {WHAT_NOW}"
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
        wide = scaled(wide, scale.to(wide), axis.dim)
    means, sizes = group_means(wide, axis).abs(), group_means(wide.abs(), axis)
    bad = ~(means <= _bound(dtype) * (sizes + torch.finfo(dtype).smallest_normal))
    if not bad.any():
        return 0.0
    worst = float((means / sizes.clamp_min(torch.finfo(wide.dtype).tiny))[bad].max())
    return worst if math.isfinite(worst) else math.inf


# While the model is in use.


class KeepCentred:
    """A forward pre-hook: once what a model rests on has moved, its norms compute LayerNorm.

    The first call looks at the values; later ones see what torch counts as a change of a tensor,
    or another tensor or module, and not what is written through ``tensor.data``. Under
    ``torch.compile`` the look is taken when the call is compiled, and leaves no trace in the graph.
    Copies and pickles look anew.
    """

    def __init__(self, watch: Watched, model: nn.Module) -> None:
        self.watch = watch
        self.outer: KeepCentred | None = None
        modules = {path: model.get_submodule(path) for path in _modules_of(watch)}
        self.kinds = {path: (type(module), _foreign(module)) for path, module in modules.items()}
        self.trouble = ""
        self._forget()

    def _forget(self) -> None:
        self.modules: list[tuple[dict[str, Any], str, Any, Any, Any, int]] = []
        self.tensors: list[tuple[dict[str, Any], str, Any, int, int]] = []
        self.trained = -1

    def __getstate__(self) -> dict[str, Any]:
        kept = ("watch", "outer", "kinds", "trouble")
        return {name: value for name, value in vars(self).items() if name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module.training:
            return
        if is_dynamo_compiling():
            comptime(_look_while_compiling)
        else:
            look(self, module)

    def unchanged(self) -> bool:
        """Whether all modules and tensors are those of the last look, with the values of then."""
        if self.trained != Folded.trained:
            return False
        for children, name, module, before, after, hooks in self.modules:
            if children.get(name) is not module or len(before) + len(after) != hooks:
                return False
        for tensors, name, tensor, version, pointer in self.tensors:
            found = tensors.get(name)
            if found is not tensor:
                if tensor is not None or found is None or not found.is_meta:
                    return False
            elif version >= 0 and (found._version != version or found.data_ptr() != pointer):
                return False
        return True

    def walk(self, model: nn.Module) -> None:
        """Remember the modules and tensors that are there now. Raises ``NotCentred``."""
        self._forget()
        for path, (kind, foreign) in self.kinds.items():
            above, _, name = path.rpartition(".")
            holder = model.get_submodule(above)._modules
            module = holder.get(name)
            hooks = (
                (module._forward_pre_hooks, module._forward_hooks)
                if module is not None
                else ({}, {})
            )
            self.modules.append((holder, name, module, *hooks, sum(map(len, hooks))))
            if type(module) is not kind and not issubclass(kind, type(module)):
                raise NotCentred(
                    f"{path}: is a {type(module).__name__} now and was a {kind.__name__}: what it "
                    "writes cannot be known to have zero mean; merge the adapter, or go on with "
                    "LayerNorm"
                )
            if module is not None and _foreign(module) > foreign:
                raise NotCentred(
                    f"{path}: has a forward hook that was not there, which may change what it "
                    "writes; remove it, or go on with LayerNorm"
                )
        for path in self.watch.tensors:
            above, _, name = path.rpartition(".")
            owner = model.get_submodule(above)
            held = owner._buffers if name in owner._buffers else owner._parameters
            self.tensors.append((held, name, *_print_of(held.get(name))))


def _foreign(module: nn.Module) -> int:
    """Hooks of a user: neither of transformers, which only record, nor of this package."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    homes = (str(getattr(getattr(hook, "func", hook), "__module__", "")) for hook in hooks)
    return sum(not home.startswith(("transformers.", "enjoyln_cli.")) for home in homes)


def _modules_of(watch: Watched) -> dict[str, None]:
    """Every module on the way to a watched one, and the one itself."""
    found: dict[str, None] = {}
    owners = [name.rpartition(".")[0] for name in watch.tensors]
    for path in (*owners, *watch.ops):
        parts = path.split(".") if path else []
        found.update(dict.fromkeys(".".join(parts[: i + 1]) for i in range(len(parts))))
    return found


def _print_of(tensor: Any) -> tuple[Any, int, int]:
    """A tensor, its version and its address. One that accelerate fetches is another every time."""
    if tensor is None or tensor.is_meta:
        return None, -1, 0
    if isinstance(tensor, FakeTensor) or tensor.is_inference():
        return tensor, -1, 0
    return tensor, tensor._version, tensor.data_ptr()


def _look_while_compiling(context: Any) -> None:
    """Where Dynamo compiles the call of a hook: with the objects that its names stand for.

    Functions that Dynamo takes for constant get no such objects before torch 2.13.
    """
    hook, module = (
        context.get_local(name)._ComptimeVar__variable.value for name in ("self", "module")
    )
    look(hook, module)


def look(hook: KeepCentred, model: nn.Module) -> bool:
    """Whether all is as it was centred. The folded norms in ``model`` know it afterwards."""
    if hook.unchanged():
        return not hook.trouble
    before, hook.trouble = hook.trouble, ""
    try:
        hook.walk(model)
        check_centred(model, hook.watch)
    except (EnjoyLNError, AttributeError, RuntimeError, TypeError) as error:
        hook.trouble = str(error).split("\n")[0]
        if not (before or (hook.outer and hook.outer.trouble)):
            warnings.warn(f"computing LayerNorm: {hook.trouble}", stacklevel=2)
    if any(isinstance(tensor, FakeTensor) for _, _, tensor, _, _ in hook.tensors):
        hook.trouble = hook.trouble or before  # no values to look at: what is known goes on
        if not hook.trouble:
            return True
    set_shifted(model, MOVED, bool(hook.trouble))
    hook.trained = Folded.trained
    return not hook.trouble


def keep_centred(
    model: nn.Module,
    weights: Iterable[Centred],
    ops: Iterable[str],
    units: Iterable[Units] = (),
) -> None:
    """Hook a model that was checked, so that its norms go on computing what is right."""
    weights, ops, units = tuple(weights), tuple(ops), tuple(units)
    inner: KeepCentred | None = None
    places = {id(m): m for m in (getattr(model, "base_model", model), model)}
    watches = [(module, watched(module, weights, ops, units)) for module in places.values()]
    if (encoder := encoder_of(model)) is not None and id(encoder) not in places:
        watches.insert(0, (encoder, _part_in(encoder, model, watches[-1][1])))
    for module, watch in watches:
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, KeepCentred)]:
            del hooks[key]
        hook = KeepCentred(watch, module)
        module.register_forward_pre_hook(hook)
        call_first(module)
        if inner:
            inner.outer = hook
        inner = hook


def _part_in(inner: nn.Module, model: nn.Module, watch: Watched) -> Watched:
    """What of ``watch`` is in ``inner``, under whatever names: it may share with the rest."""
    tensors = {id(t): name for name, t in _held(inner)}
    modules = {id(m): name for name, m in inner.named_modules(remove_duplicate=False)}
    return _renamed(
        watch,
        lambda name: tensors.get(id(tensor_at(model, name))),
        lambda path: modules.get(id(model.get_submodule(path))),
    )


def _held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
