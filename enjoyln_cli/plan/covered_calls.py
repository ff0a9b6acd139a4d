"""Which calls of a model a proof covers.

A traced graph shows one path through ``forward``. Python code chooses that path by the arguments
that are passed, by plain values among them (``None``, booleans, numbers, strings), by the
structure of the other arguments, and by sizes. A ``CallForm`` records all of these for one traced
call. Another call is covered if it matches a recorded form, and refused otherwise. To match, it
needs

* the same arguments (an argument equal to its default counts as left out),
* the same plain values,
* the same dictionaries, lists, tuples and caches, with tensors of the same kind and rank at the
  same places,
* sizes for which ``forward`` takes the same path.

No argument name is special here: ``labels`` is an argument like any other.

Models that consist of transformers' own classes (``trusted_code.is_stock``) are the exception,
since these share conventions that hold without a trace: labels are only used after the outputs are
computed, ``output_attentions`` and similar flags choose what is returned and not what is computed,
and sizes decide nothing but shapes. For such models every argument is covered unless it is listed
as unproven (``input_forms.optional_inputs``). A single module or base class from elsewhere ends the
exception, since nothing is known about how its code uses an argument.

As text, a form is a readable Python expression::

    Net(x=float[a, b, 16], scale=2.0, pair=(int[a], None)) if b <= 64 else refused
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.plan.cache_argument import in_plans, is_same_argument
from enjoyln_cli.plan.trusted_code import is_defined_in

OTHER_CALLS = "any other call"
"""Entry of ``Plan.unproven``: every call whose form was not traced."""

Plain = bool | int | float | str | None
Size = int | str
"""A number, or a name for a size that may have any value."""
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
    """A plain value. Any other value may take another branch, even ``True`` instead of ``1``."""

    value: Plain


@dataclass(frozen=True)
class TensorForm:
    """A tensor, by its kind (``float``, ``int``, ``bool``, ``complex``) and its sizes."""

    kind: str
    sizes: tuple[Size, ...]


@dataclass(frozen=True)
class Items:
    """A list, a tuple, a dictionary with string keys in order, or an object's attributes.

    Such an object is of a class of transformers, for example a cache. ``kind`` is the name of its
    class, or ``list``, ``tuple`` or ``dict``.
    """

    kind: str
    values: tuple[Any, ...]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Length:
    """An integer that is a size, such as the length that a cache stores."""

    size: Size


Form = Constant | TensorForm | Items | Length


def sizes_in(form: Form) -> Iterator[Any]:
    """The sizes of all tensors in ``form`` and its lengths, in order: numbers, names or symbols."""
    if isinstance(form, TensorForm):
        yield from form.sizes
    elif isinstance(form, Length):
        yield form.size
    elif isinstance(form, Items):
        for one in form.values:
            yield from sizes_in(one)


@dataclass(frozen=True)
class CallForm:
    """One way to call a model of the class named ``owner``."""

    owner: str
    arguments: tuple[tuple[str, Form], ...]
    """By name, without those equal to their default. Items of ``*args`` are ``*0``, ``*1`` ..."""
    conditions: tuple[Expression, ...] = ()
    """A call is covered only if all of these hold for its sizes."""


@dataclass(frozen=True)
class CoveredCalls:
    """The calls that a proof covers, and the attributes of the model for which it holds."""

    forms: tuple[CallForm, ...]
    attributes: tuple[tuple[str, str, Plain], ...] = ()
    """Class, dotted name and value of each plain attribute that a ``forward`` may read."""

    def require_any(self, name: str) -> None:
        """Raise ``UnsupportedModel`` if no call is covered; ``name`` is the model's, to show."""
        if not self.forms:
            raise UnsupportedModel(
                f"{name}: no call could be proven, since its code branches on the values of its "
                "inputs, or an argument is an object of an unknown class; convert a submodule that "
                "is called with tensors only, or go on with LayerNorm"
            )

    def calls_of(self, module: nn.Module) -> ProvenCalls:
        """The covered calls of ``module``: the forms whose owner is the name of its class."""
        own = tuple(form for form in self.forms if form.owner == type(module).__name__)
        return ProvenCalls(own, *signature_of(module))

    def changed(self, model: nn.Module) -> str | None:
        """A description of the first attribute that has changed since the trace, or ``None``."""
        missing = object()
        for owner, name, value in self.attributes:
            if owner == type(model).__name__:
                found: Any = model
                for part in name.split("."):
                    found = getattr(found, part, missing)
                if found is missing or not _same(found, value):
                    now = "gone" if found is missing else repr(found)
                    return f"{owner}.{name} was {value!r} and is now {now}"
        return None


@dataclass(frozen=True)
class ProvenCalls:
    """``CoveredCalls`` for one module, with the signature of its ``forward``."""

    forms: tuple[CallForm, ...]
    order: tuple[str, ...]
    """Names of the arguments that can be passed by position."""
    defaults: tuple[tuple[str, Plain], ...]
    has_cache: bool = False
    """Whether one argument takes a cache, by either name (see ``plan.cache_argument``)."""

    def uncovered(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """The arguments because of which a call is not covered; empty if it is covered."""
        signature = (self.order, self.defaults, self.has_cache)
        given = call_arguments(signature, args, kwargs)
        for form in self.forms:
            if len(form.arguments) == len(given) and not _differing(form, given):
                return []
        found = [_differing(form, given) for form in self.forms]
        return min(found, key=len) if found else list(given) or [OTHER_CALLS]


Signature = tuple[tuple[str, ...], tuple[tuple[str, Plain], ...], bool]


def signature_of(module: nn.Module) -> Signature:
    """The first fields of ``ProvenCalls``, after the forms.

    These are the names of positional arguments, the plain defaults of all arguments, and whether
    one of them takes a cache.
    """
    accepted = inspect.signature(module.forward).parameters
    parameters = accepted.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    order = tuple(p.name for p in parameters if p.kind in kinds)
    defaults = ((p.name, p.default) for p in parameters if type(p.default) in PLAIN_TYPES)
    return order, tuple(defaults), is_same_argument(accepted)


def call_arguments(
    signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by their names in plans, without those that equal their default."""
    order, plain, has_cache = signature
    defaults = dict(plain)
    given = dict(zip(order, args, strict=False))
    for place in range(len(order), len(args)):
        given[f"*{place - len(order)}"] = args[place]
    given.update(kwargs)
    return {
        in_plans(name) if has_cache else name: value
        for name, value in given.items()
        if name not in defaults or not _same(value, defaults[name])
    }


def form_of(value: Any) -> Form | None:
    """The form of one argument, with its sizes; ``None`` for an object that cannot be described.

    To allow other sizes, pass a ``TensorForm`` in place of a tensor.
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
    """Whether a value is an object of a transformers class that stores its state in attributes."""
    cls = type(value)
    return cls.__module__.partition(".")[0] == "transformers" and hasattr(value, "__dict__")


def attribute_values(value: Any) -> dict[str, Any]:
    """The attributes of an object, without dtypes and devices; a class is replaced by its name."""
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
    """The form of one call; ``None`` if an argument cannot be described (see ``form_of``)."""
    given = call_arguments(signature_of(module), args, kwargs)
    found = [(name, form_of(value)) for name, value in given.items()]
    described = [(name, form) for name, form in found if form is not None]
    if len(described) < len(found):
        return None
    described.sort(key=lambda argument: not argument[0].startswith("*"))
    return CallForm(type(module).__name__, tuple(described), tuple(conditions))


def kind_of(tensor: torch.Tensor) -> str:
    """``float``, ``complex``, ``bool`` or ``int``: a form leaves the width open to allow casts."""
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
    """The value of an expression, given the sizes by name."""
    if isinstance(expression, tuple):
        name, left, right = expression
        return OPERATORS[name](value_of(left, sizes), value_of(right, sizes))
    return sizes[expression] if isinstance(expression, str) else expression


def attributes_of(model: nn.Module) -> tuple[tuple[str, str, Plain], ...]:
    """The plain attributes on which ``forward`` of custom code may branch.

    These are the plain attributes of all modules that are neither torch's nor transformers', and
    those entries of the config that not every transformers config has.
    """
    owner, found = type(model).__name__, {}
    internal = {*vars(nn.Module()), "name_or_path"}
    if hasattr(model, "config"):
        from transformers import PreTrainedModel

        internal |= {*PreTrainedModel.__init__.__code__.co_names}
    for path, module in model.named_modules():
        if not is_defined_in(type(module), ("transformers", "torch")):
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
