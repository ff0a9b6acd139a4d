"""Which calls of a model a proof covers, where that is not settled by a convention.

A traced graph shows one path through ``forward``. Python chooses it by which arguments are given,
by the plain values among them (``None``, truth values, numbers, text), by the structure of the
others, and by sizes. So a ``CallForm`` holds all of these for one call that was traced. Another
call is covered if it has exactly such a form, and refused if not: the same arguments (one that
equals its default counts as left out), the same values, the same dictionaries, lists, tuples and
caches with tensors of the same kind and rank at the same places, and sizes for which ``forward``
takes the same path. No name is known here: ``labels`` is an argument like any other.

The exception is the code of transformers itself (``is_stock``). Its classes share conventions that
hold without a trace: targets are read behind the outputs, ``output_attentions`` and its like choose
what is returned and not what is computed, sizes decide nothing but shapes. For them an argument is
covered unless it is listed as unproven (``calls.optional_inputs``). One class of somebody else in a
model, or as its base, ends that: what it does with an argument is unknown.

Written as text, a form is a Python expression that a person can read::

    Net(x=float[a, b, 16], scale=2.0, pair=(int[a], None)) if b <= 64 else refused
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from enjoyln_cli.errors import UnsupportedModel

OTHER_CALLS = "any other call"
"""Among what is unproven: every call of a form that no trace had."""

Plain = bool | int | float | str | None
Size = int | str
"""A number, or the name of a size that may be any."""
Expression = Any
"""A number, the name of a size, or an operator of ``OPERATORS`` with its operands, as a tuple."""

PLAIN_TYPES = (bool, int, float, str, type(None))

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv,
    "%": operator.mod, "==": operator.eq, "!=": operator.ne, "<": operator.lt,
    "<=": operator.le, ">": operator.gt, ">=": operator.ge, "min": min, "max": max,
    "and": lambda a, b: a and b, "or": lambda a, b: a or b,
}  # fmt: skip


@dataclass(frozen=True)
class Constant:
    """A plain value: another one may take another branch, ``1`` and ``True`` too."""

    value: Plain


@dataclass(frozen=True)
class TensorForm:
    """A tensor by its kind (``float``, ``int``, ``bool``, ``complex``) and its sizes."""

    kind: str
    sizes: tuple[Size, ...]


@dataclass(frozen=True)
class Items:
    """A list, a tuple, a dictionary with text as keys, in its order, or what an object keeps.

    That object is of a class of transformers, as a cache is, whose name is the ``kind``.
    """

    kind: str
    values: tuple[Any, ...]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Length:
    """A whole number that is the size of something, as what a cache says of its length."""

    size: Size


Form = Constant | TensorForm | Items | Length


@dataclass(frozen=True)
class CallForm:
    """One way of calling ``owner``, a class by its name."""

    owner: str
    arguments: tuple[tuple[str, Form], ...]
    """By name, those at their default left out; what ``*args`` takes is ``*0``, ``*1`` ..."""
    conditions: tuple[Expression, ...] = ()
    """Each holds for the sizes of a covered call."""


@dataclass(frozen=True)
class CoveredCalls:
    """The calls that a proof covers, and the state of the model in which it does."""

    forms: tuple[CallForm, ...]
    attributes: tuple[tuple[str, str, Plain], ...] = ()
    """Class, dotted name and value of each plain attribute that a ``forward`` may read."""

    def require_any(self, name: str) -> None:
        """Raises ``UnsupportedModel`` where no call is covered."""
        if not self.forms:
            raise UnsupportedModel(
                f"{name}: no call of it is proven, since the values of its inputs choose the path "
                "through its code, or an argument is an object of an unknown class; convert a part "
                "of it that is called with tensors, or go on with LayerNorm"
            )

    def calls_of(self, module: nn.Module) -> ProvenCalls:
        """What decides for calls of ``module``, by its class's name."""
        own = tuple(form for form in self.forms if form.owner == type(module).__name__)
        return ProvenCalls(own, *signature_of(module))

    def changed(self, model: nn.Module) -> str | None:
        """The first attribute that is not as it was traced, in words; ``None`` if there is none."""
        missing = object()
        for owner, name, value in self.attributes:
            if owner == type(model).__name__:
                found: Any = model
                for part in name.split("."):
                    found = getattr(found, part, missing)
                if found is missing or not _same(found, value):
                    now = "gone" if found is missing else repr(found)
                    return f"{owner}.{name} was {value!r} and is {now}"
        return None


@dataclass(frozen=True)
class ProvenCalls:
    """``CoveredCalls`` for one module, with the signature of its ``forward``."""

    forms: tuple[CallForm, ...]
    order: tuple[str, ...]
    """Names of the arguments that come by position."""
    defaults: tuple[tuple[str, Plain], ...]

    def uncovered(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """Names of the arguments for which a call is not covered; empty where it is."""
        given = call_arguments(self.order, dict(self.defaults), args, kwargs)
        for form in self.forms:
            if len(form.arguments) == len(given) and not _differing(form, given):
                return []
        found = [_differing(form, given) for form in self.forms]
        return min(found, key=len) if found else list(given) or [OTHER_CALLS]


_LAYERS = ("torch", "timm")
"""Libraries whose modules transformers builds its own from; timm's are the backbones of DETR."""


def is_stock(model: nn.Module) -> bool:
    """Whether ``forward`` runs code of transformers alone, and of the layers that it builds on."""
    own = _from(type(model), ("transformers",))
    return own and all(_from(type(m), ("transformers", *_LAYERS)) for m in model.modules())


def _from(cls: type, packages: tuple[str, ...]) -> bool:
    """Whether a class, and the ``forward`` that it has, come with one of the packages."""
    code = getattr(cls, "forward", cls)
    modules = (cls.__module__, getattr(code, "__module__", cls.__module__))
    return all(module.partition(".")[0] in packages for module in modules)


def signature_of(module: nn.Module) -> tuple[tuple[str, ...], tuple[tuple[str, Plain], ...]]:
    """The arguments of ``forward`` that come by position, and the plain defaults of all."""
    parameters = inspect.signature(module.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    order = tuple(p.name for p in parameters if p.kind in kinds)
    return order, tuple((p.name, p.default) for p in parameters if type(p.default) in PLAIN_TYPES)


def call_arguments(
    order: Sequence[str],
    defaults: Mapping[str, Plain],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments of a call by name, without those that equal their default."""
    given = dict(zip(order, args, strict=False))
    for place in range(len(order), len(args)):
        given[f"*{place - len(order)}"] = args[place]
    given.update(kwargs)
    return {
        name: value
        for name, value in given.items()
        if name not in defaults or not _same(value, defaults[name])
    }


def form_of(value: Any) -> Form | None:
    """The form of one argument, with its sizes; ``None`` for an object that cannot be described.

    Where the sizes may be others, a ``TensorForm`` stands in the place of the tensor.
    """
    if isinstance(value, TensorForm):
        return value
    if isinstance(value, torch.Tensor):
        return None if value.is_nested else TensorForm(kind_of(value), tuple(value.shape))
    if type(value) in PLAIN_TYPES:
        return Constant(value)
    if isinstance(value, torch.SymInt):
        return Length(value)  # type: ignore[arg-type]
    if _is_object(value):
        kept = attribute_values(value)
        forms = tuple(map(form_of, kept.values()))
        return None if None in forms else Items(type(value).__name__, forms, tuple(kept))
    if type(value) in (list, tuple, dict):
        named = type(value) is dict
        inside = [form_of(item) for item in (value.values() if named else value)]
        keys = tuple(value) if named else ()
        if None in inside or not all(type(key) is str for key in keys):
            return None
        return Items(type(value).__name__, tuple(inside), keys)
    return None


def _is_object(value: Any) -> bool:
    """Whether a value is an object of a class of transformers, which keeps all in attributes."""
    cls = type(value)
    return cls.__module__.partition(".")[0] == "transformers" and hasattr(value, "__dict__")


def attribute_values(value: Any) -> dict[str, Any]:
    """What an object keeps by name: classes by theirs, without what dtype and device it is on."""
    return {
        name: kept.__name__ if isinstance(kept, type) else kept
        for name, kept in vars(value).items()
        if not isinstance(kept, (torch.dtype, torch.device))
    }


def call_form(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    conditions: Iterable[Expression] = (),
) -> CallForm | None:
    """The form of one call; ``None`` where an argument cannot be described, as a cache."""
    order, defaults = signature_of(module)
    given = call_arguments(order, dict(defaults), args, kwargs)
    found = [(name, form_of(value)) for name, value in given.items()]
    described = [(name, form) for name, form in found if form is not None]
    if len(described) < len(found):
        return None
    described.sort(key=lambda argument: not argument[0].startswith("*"))
    return CallForm(type(module).__name__, tuple(described), tuple(conditions))


def kind_of(tensor: torch.Tensor) -> str:
    """What a dtype is for: its width is not part of a form, since models are cast."""
    if tensor.is_floating_point():
        return "float"
    if tensor.is_complex():
        return "complex"
    return "bool" if tensor.dtype == torch.bool else "int"


def _differing(form: CallForm, given: Mapping[str, Any]) -> list[str]:
    """Names of the arguments in which a call differs from a form."""
    sizes: dict[str, int] = {}
    expected = dict(form.arguments)
    found = [name for name in given if name not in expected]
    for name, one in form.arguments:
        if name not in given or not _fits(one, given[name], sizes):
            found.append(name)
    if found or all(value_of(condition, sizes) for condition in form.conditions):
        return found
    return [f"{name} of this size" for name, one in form.arguments if isinstance(one, TensorForm)]


def _fits(form: Form, value: Any, sizes: dict[str, int]) -> bool:
    if isinstance(form, TensorForm):
        if not isinstance(value, torch.Tensor) or value.is_nested:
            return False
        if value.ndim != len(form.sizes) or kind_of(value) != form.kind:
            return False
        for expected, size in zip(form.sizes, value.shape, strict=True):
            if size != (sizes.setdefault(expected, size) if type(expected) is str else expected):
                return False
        return True
    if isinstance(form, Constant):
        return _same(value, form.value)
    if isinstance(form, Length):
        if type(value) is not int:
            return False
        return value == (
            sizes.setdefault(form.size, value) if type(form.size) is str else form.size
        )
    if type(value).__name__ != form.kind:
        return False
    if type(value) not in (list, tuple, dict):
        if not _is_object(value):
            return False
        kept = attribute_values(value)
        names = zip(form.keys, form.values, strict=True)
        return len(kept) == len(form.keys) and all(
            name in kept and _fits(one, kept[name], sizes) for name, one in names
        )
    inside = value
    if type(value) is dict:
        if tuple(value) != form.keys:
            return False
        inside = tuple(value.values())
    if len(inside) != len(form.values):
        return False
    pairs = zip(form.values, inside, strict=True)
    return all(_fits(one, item, sizes) for one, item in pairs)


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and type(value) in PLAIN_TYPES and value == other


def value_of(expression: Expression, sizes: Mapping[str, int]) -> Any:
    """What an expression over sizes gives."""
    if isinstance(expression, tuple):
        name, left, right = expression
        return OPERATORS[name](value_of(left, sizes), value_of(right, sizes))
    return sizes[expression] if isinstance(expression, str) else expression


def attributes_of(model: nn.Module) -> tuple[tuple[str, str, Plain], ...]:
    """The plain attributes that code other than torch's and transformers' keeps on its modules.

    Its ``forward`` may branch on them, and on what its config says beside what every config has.
    """
    owner, found = type(model).__name__, {}
    internal = {*vars(nn.Module()), "name_or_path"}
    if hasattr(model, "config"):
        from transformers import PreTrainedModel

        internal |= {*PreTrainedModel.__init__.__code__.co_names}
    for path, module in model.named_modules():
        if not _from(type(module), ("transformers", "torch")):
            for name, value in vars(module).items():
                if type(value) in PLAIN_TYPES and name not in internal and "_hf_" not in name:
                    found[f"{path}.{name}" if path else name] = value
    config = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        from transformers import PretrainedConfig

        shared = {*vars(PretrainedConfig()), *PretrainedConfig().to_dict()}
        for name, value in vars(config).items():
            if type(value) in PLAIN_TYPES and name not in shared and not name.startswith("_"):
                found[f"config.{name}"] = value
    return tuple((owner, name, value) for name, value in found.items())
