"""Run a model without its weights, even if shapes depend on the values of its inputs.

Weights, and everything computed with them, have shapes only: they are on the meta device. Inputs
(token ids, masks, grids of patches, pixels), and everything computed from inputs alone, have
values: they are on the CPU. So a model of any size runs quickly. A value that Python reads from a
tensor (``item``, ``tolist``) cannot depend on a weight or an activation: these have no values, and
reading one raises an error. If an activation selects positions (``nonzero``: the tokens of an
expert, the pixels of a mask), the run assumes that it selects all of them, so that a loop over
selected experts runs for every expert.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as symbolic
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.models.extents import identity_of

aten = torch.ops.aten

_CONSTANTS = {
    aten.arange, aten.linspace, aten.new_ones, aten.ones, aten.ones_like, aten.randint,
    aten.randperm, aten.scalar_tensor, aten.tril_indices, aten.triu_indices,
}  # fmt: skip
"""Ops that create masks and positions. Even float results have values: few are written into."""
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._index_put_impl_}


@contextmanager
def meta_weights() -> Iterator[Memory]:
    """Let a model on the meta device run on inputs that have values, inside the block.

    Reading a value that depends on a weight raises ``RuntimeError``. Yields the memory of all
    values that the run computes.
    """
    all_chosen = symbolic.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
    with _KeepConstants(), _KeepInputs() as run, all_chosen:
        yield run.computed


@contextmanager
def answers_without_values() -> Iterator[None]:
    """Let torch answer two questions inside the block that it cannot answer without values.

    * ``torch.is_autocast_enabled(x.device.type)`` raises an error on the meta device, and so does
      ``torch.autocast(x.device.type)``. Here both answer as for the CPU.
    * ``nn.TransformerEncoder`` compares its mask with a causal mask if ``is_causal`` is not given.
      The result is the same either way, so here the mask counts as not causal.
    """
    begin: Any = torch.autocast.__init__
    asked: Any = torch.is_autocast_enabled, torch.get_autocast_dtype
    compare = transformer._detect_is_causal_mask

    def on_cpu(device: Any) -> Any:
        return "cpu" if device == "meta" else device

    def begin_on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(self, on_cpu(device_type), *args, **kwargs)

    def on_any(ask: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *device: ask(*map(on_cpu, device))

    torch.is_autocast_enabled, torch.get_autocast_dtype = map(on_any, asked)
    torch.autocast.__init__ = begin_on_cpu  # type: ignore[method-assign]
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    try:
        yield
    finally:
        torch.is_autocast_enabled, torch.get_autocast_dtype = asked
        torch.autocast.__init__ = begin  # type: ignore[method-assign]
        transformer._detect_is_causal_mask = compare


class Memory:
    """The storages of all tensors that a run computes."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._whole: set[int] = set()
        """Storages computed only from sizes, constants in the code, and integer inputs."""

    def add(self, result: Any, operands: Any, writes: bool) -> None:
        """Record the results of an op; ``writes``: it may have written into its operands."""
        before = _storages(operands)
        found = _storages(result)
        self._storages |= {key: one for key, one in found.items() if key not in before}
        changed = found.keys() | before.keys() if writes else found.keys()
        if all(map(self._is_whole, tensors_of(operands))):
            self._whole |= changed - before.keys()
        else:
            self._whole -= changed

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the run computed the storage of ``tensor``, whatever its Python object."""
        return not self._storages.keys().isdisjoint(_storages(tensor))

    def holds_real(self, tensor: torch.Tensor) -> bool:
        """Whether the run computed ``tensor`` and it may depend on a weight or a float input."""
        return self.holds(tensor) and not self._is_whole(tensor)

    def _is_whole(self, tensor: torch.Tensor) -> bool:
        keys = _storages(tensor).keys()
        if keys and keys <= self._storages.keys():
            return keys <= self._whole
        return bool(keys) and _known(tensor) and not _is_real(tensor)


def tensors_of(values: Any) -> list[torch.Tensor]:
    """The tensors among the arguments or results of an op, which may be in lists."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = tuple(values.values())
    if not isinstance(values, (tuple, list)):
        return []
    return [tensor for value in values for tensor in tensors_of(value)]


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    found = {}
    for value in tensors_of(values):
        try:
            storage = value.untyped_storage()
        except (RuntimeError, NotImplementedError, ValueError):  # sparse, or not materialised
            continue
        found[storage._cdata] = storage
    return found


class _KeepConstants(TorchFunctionMode):
    """Constants in the code keep their values on the CPU, whatever device the code names.

    An index computed from activations stays a tensor; otherwise Python would read its value.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.__getitem__ and _is_unknown_place(args[1]):
            return args[0].index_select(0, args[1].reshape(1)).squeeze(0)
        return func(*args, **kwargs)


class KeepWhole(TorchFunctionMode):
    """While a model is built without weights, integer constants in its code keep their values.

    An example is the stride of a convolution that is stored as a tensor. ``forget_buffers`` then
    removes the values that a checkpoint provides. For a tensor without values no random values are
    drawn: torch takes half of the time of building a GPT-2 for them.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DRAWS and kwargs["tensor"].is_meta:
            return kwargs["tensor"]
        if func is torch.tensor and type(args[0]) is int:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


_DRAWS = {nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_}
"""Functions that pass on their arguments by name, and draw values in place."""


def forget_buffers(model: nn.Module, keep_integers: bool = False) -> None:
    """Move buffers to the meta device, each shared buffer once.

    With ``keep_integers``, integer and bool buffers that no checkpoint stores keep their values.
    """
    moved = {buffer: buffer.to("meta") for buffer in model.buffers()}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            is_stored = name not in module._non_persistent_buffers_set
            if buffer is None or (keep_integers and not is_stored and not _is_real(buffer)):
                continue
            setattr(module, name, moved[buffer])


class _KeepInputs(TorchDispatchMode):
    """Ops on tensors with values run on the CPU, all others on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = Memory()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = self._run(func, args, dict(kwargs or {}))
        self.computed.add(result, (args, kwargs), func._schema.is_mutable)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = tensors_of((args, kwargs))
        if _makes_new(func, given):
            kwargs["device"] = _device_of_new(func, args, kwargs, given)
            args = pytree.tree_map_only(torch.Tensor, _on(kwargs["device"]), args)
            return func(*args, **kwargs)
        if func.overloadpacket is aten._to_copy:
            kwargs["device"] = None
        if all(map(_known, given)):
            return func(*args, **kwargs)
        if func._schema.is_mutable and _known(args[0]):
            raise RuntimeError(f"{func} writes what has no values into what has")
        if func.overloadpacket in _INDEXED:
            args = (args[0], _whole_indices(args[1]), *args[2:])
            _check_put(*args[:3])
        if func.overloadpacket is aten.masked_select and _known(args[1]):
            mask = args[1].broadcast_to(args[0].shape)
            func, args = aten.index.Tensor, (args[0], _whole_indices([mask]))
        args, kwargs = pytree.tree_map_only(torch.Tensor, without_values, (args, kwargs))
        return func(*args, **kwargs)


def _known(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "meta"


def is_mask(index: torch.Tensor) -> bool:
    """Whether an index is a mask, whose values decide how many elements it selects."""
    return index.dtype in (torch.bool, torch.uint8)


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_unknown_place(index: Any) -> bool:
    unknown = isinstance(index, torch.Tensor) and index.is_meta
    return unknown and not index.dim() and index.dtype in (torch.int64, torch.int32)


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the meta device, which has its shape only."""
    return tensor.to("meta")


def _on(device: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that replaces a tensor by an empty tensor of its shape on ``device``."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device.type == device else torch.empty_like(tensor, device=device)

    return moved


def _makes_new(func: Any, given: list[torch.Tensor]) -> bool:
    """Whether the op creates a tensor, and reads no more than the shape of its operands."""
    name = func.overloadpacket.__name__
    alike = not given or name.endswith("_like") or name.startswith("new_")
    return alike and takes_device(func)


@cache
def takes_device(func: Any) -> bool:
    """Whether an argument of an op says on which device its result is."""
    return any(argument.name == "device" for argument in func._schema.arguments)


def _device_of_new(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
) -> str:
    scalar = not given and bool(args) and args[0] == []
    if func.overloadpacket in _CONSTANTS or scalar:
        return "cpu"
    default = given[0].dtype if given else torch.get_default_dtype()
    return "meta" if (kwargs.get("dtype") or default).is_floating_point else "cpu"


def _whole_indices(indices: Any) -> list[Any]:
    """Replace masks with values by the positions that they select, so that shapes are known."""
    found: list[Any] = []
    for index in indices:
        found.extend(index.nonzero().unbind(1) if _known(index) and is_mask(index) else [index])
    return found


def _check_put(target: torch.Tensor, indices: list[Any], values: Any = None) -> None:
    """Raise ``RuntimeError`` if values do not fit the positions that they are written to.

    On the meta device, torch does not check this. If the positions depend on an activation, their
    number is unknown and nothing is checked.
    """
    if not isinstance(values, torch.Tensor) or not all(i is None or _known(i) for i in indices):
        return
    index = [i if i is None else without_values(i) for i in indices]
    places, given = aten.index.Tensor(without_values(target), index).shape, values.shape
    pairs = zip(reversed(given), reversed(places), strict=False)
    if len(given) > len(places) or any(size not in (1, place) for size, place in pairs):
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(given)} cannot be broadcast to "
            f"indexing result of shape {list(places)}"
        )


def without_weights(model: nn.Module) -> nn.Module:
    """``model`` if all its weights are on the meta device, else a copy with its weights there.

    Raises as ``copy_without_weights`` does.
    """
    hooked = any(hasattr(module, "_hf_hook") for module in model.modules())
    if not hooked and all(parameter.is_meta for parameter in model.parameters()):
        return model
    return copy_without_weights(model)


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter on the meta device, which has shapes only.

    A parameter of another class, such as a quantised parameter, is copied with its values.
    """
    if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
        return copy.deepcopy(parameter)
    return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def copy_without_weights(model: nn.Module, copied: list[torch.Tensor] | None = None) -> nn.Module:
    """A copy of ``model`` whose parameters are on the meta device.

    Parameters that are the same elements of the same memory are one parameter of the copy.
    The copy has no hooks of accelerate, which would load the weights. The originals of all other
    copied tensors are appended to ``copied``. Raises ``TraceFailed`` if the model cannot be copied,
    or if its own code returns a copy that shares the weights.
    """
    kind = type(model).__name__
    hooked = [module for module in model.modules() if hasattr(module, "_hf_hook")]
    first = {identity_of(parameter): parameter for parameter in reversed([*model.parameters()])}
    bare_ones = {key: _on_meta(parameter) for key, parameter in first.items()}
    memo: dict[int, Any] = {id(p): bare_ones[identity_of(p)] for p in model.parameters()}
    replaced = {*map(id, memo.values())}
    memo |= {id(module._hf_hook): None for module in hooked}
    computed: list[torch.Tensor] = []
    for module in model.modules():  # deepcopy takes no tensors that autograd computed
        tensors = (value for value in vars(module).values() if isinstance(value, torch.Tensor))
        computed += [value for value in tensors if not value.is_leaf]
    memo |= {id(value): value.detach().clone() for value in computed}
    try:
        bare = copy.deepcopy(model, memo)
        for module in bare.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                hooks |= {key: _with_copied_closure(hook, memo) for key, hook in hooks.items()}
            module.__dict__.pop("_compiled_call_impl", None)  # it runs the original
            vars(module).update(
                {
                    name: _with_copied_closure(value, memo)
                    for name, value in vars(module).items()
                    if isinstance(value, FunctionType)
                }
            )
    except Exception as error:  # objects of the model's own classes may raise anything
        raise TraceFailed(
            f"{kind} cannot be copied, and only copies are traced, so that the model itself stays "
            f"as it is; remove the attribute that copy.deepcopy refuses ({error})"
        ) from error
    if not replaced.issuperset(map(id, bare.parameters())):
        raise TraceFailed(f"{kind}: a copy of the model shares its weights")
    if copied is not None:
        held = memo.get(id(memo), ())  # deepcopy stores the originals here
        copied += [value for value in (*held, *computed) if isinstance(value, torch.Tensor)]
    for module in bare.modules() if hooked else ():
        for name in ("forward", "_old_forward", "_hf_hook"):
            module.__dict__.pop(name, None)
    return bare


def _with_copied_closure(function: Any, memo: dict[int, Any]) -> Any:
    """A function with copies of its closure and defaults, which ``deepcopy`` does not make."""
    if not isinstance(function, FunctionType):
        return function
    code, defaults = function.__code__, copy.deepcopy(function.__defaults__, memo)
    held = (cell.cell_contents for cell in function.__closure__ or ())
    cells = tuple(CellType(copy.deepcopy(value, memo)) for value in held)
    found = FunctionType(code, function.__globals__, function.__name__, defaults, cells)
    found.__module__ = function.__module__
    found.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
    found.__dict__.update(function.__dict__)
    return found


def on_cpu(value: Any) -> Any:
    """Nested inputs, moved to the CPU; tensors without values stay on the meta device."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t if t.is_meta else t.cpu(), value)
