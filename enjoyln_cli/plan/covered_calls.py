"""Which calls of a model a proof covers.

A traced graph shows one path through ``forward``. Python code chooses that path by the arguments
that are passed, by plain values among them (``None``, booleans, numbers, strings), by the
structure of the other arguments, and by sizes. A ``CallSignature`` records all of these for one
traced call. Another call is covered if it matches a recorded signature, and refused otherwise. To
match, it needs

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
as unproven (``input_sets.optional_inputs``). A single module or base class from elsewhere ends the
exception, since nothing is known about how its code uses an argument.

``call_text`` writes a signature for people: ``Net(x=float[a, b, 16], scale=2.0) if b <= 64``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import nn

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.plan.cache_argument import in_plans, is_same_argument
from enjoyln_cli.plan.schema import checked, distinct
from enjoyln_cli.plan.size_conditions import holds, names_in, require_condition
from enjoyln_cli.plan.trusted_code import is_defined_in

OTHER_CALLS = "any other call"
"""Entry of ``Plan.unproven``: every call whose signature was not traced."""

Plain = bool | int | float | str | None
Size = int | str
"""A number, or a name for a size that may have any value."""
PLAIN_TYPES = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Constant:
    """A plain value. Any other value may take another branch, even ``True`` instead of ``1``."""

    value: Plain


@dataclass(frozen=True)
class TensorSpec:
    """A tensor, by its kind (``float``, ``int``, ``bool``, ``complex``) and its sizes."""

    kind: Literal["float", "int", "bool", "complex"]
    sizes: tuple[Size, ...]


@dataclass(frozen=True)
class Items:
    """A list, a tuple, a dictionary with string keys in order, or an object's attributes.

    Such an object is of a class of transformers, for example a cache. ``kind`` is the name of its
    class, or ``list``, ``tuple`` or ``dict``.
    """

    kind: str
    values: tuple[ArgumentSpec, ...]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Length:
    """An integer that is a size, such as the length that a cache stores."""

    size: Size


ArgumentSpec = Constant | TensorSpec | Items | Length


def sizes_in(spec: ArgumentSpec) -> Iterator[Any]:
    """The sizes of all tensors in ``spec`` and its lengths, in order: numbers, names or symbols."""
    if isinstance(spec, TensorSpec):
        yield from spec.sizes
    elif isinstance(spec, Length):
        yield spec.size
    elif isinstance(spec, Items):
        for value in spec.values:
            yield from sizes_in(value)


def named_sizes(arguments: Iterable[tuple[str, ArgumentSpec]]) -> set[str]:
    """The names of sizes in the arguments of a call."""
    sizes = (size for _, spec in arguments for size in sizes_in(spec))
    return {size for size in sizes if isinstance(size, str)}


@dataclass(frozen=True)
class CallSignature:
    """One way to call a model of the class named ``owner``."""

    owner: str
    arguments: tuple[tuple[str, ArgumentSpec], ...]
    """By name, unless equal to their default. Items of ``*args`` are ``*0``, ``*1`` ..."""
    conditions: tuple[Annotated[str, checked(require_condition)], ...] = ()
    """A call is covered only if all of these hold for its sizes (see ``plan.size_conditions``)."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a condition on a size that no argument has."""
        sizes = named_sizes(self.arguments)
        for condition in self.conditions:
            if not names_in(condition) <= sizes:
                raise ValueError(f"{condition:.80} is a condition on sizes that the call lacks")


@dataclass(frozen=True)
class CoveredCalls:
    """The calls that a proof covers, and the attributes of the model for which it holds."""

    signatures: Annotated[tuple[CallSignature, ...], checked(distinct)]
    attributes: tuple[tuple[str, str, Plain], ...] = ()
    """Class, dotted name and value of each plain attribute that a ``forward`` may read."""

    def require_any(self, name: str) -> None:
        """Raise ``UnsupportedModel`` if no call is covered; ``name`` is the model's, to show."""
        if not self.signatures:
            raise UnsupportedModel(
                f"{name}: no call could be proven, since its code branches on the values of its "
                "inputs, or an argument is an object of an unknown class; convert a submodule that "
                "is called with tensors only, or go on with LayerNorm"
            )

    def calls_of(self, module: nn.Module) -> ProvenCalls:
        """The covered calls of ``module``: the signatures whose owner is the name of its class."""
        signatures = tuple(
            signature for signature in self.signatures if signature.owner == type(module).__name__
        )
        return ProvenCalls(signatures, signature_of(module))

    def changed(self, model: nn.Module) -> str | None:
        """A description of the first attribute that has changed since the trace, or ``None``."""
        missing = object()
        for owner, name, value in self.attributes:
            if owner == type(model).__name__:
                present: Any = model
                for attribute in name.split("."):
                    present = getattr(present, attribute, missing)
                if present is missing or not _same(present, value):
                    now = "gone" if present is missing else repr(present)
                    return f"{owner}.{name} was {value!r} and is now {now}"
        return None


@dataclass(frozen=True)
class ForwardSignature:
    """What ``forward`` of a module takes."""

    order: tuple[str, ...]
    """Names of the arguments that can be passed by position."""
    defaults: Mapping[str, Plain]
    """The plain defaults of arguments."""
    has_cache: bool
    """Whether one argument takes a cache, by either name (see ``plan.cache_argument``)."""

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call that differ from their default, by their names in plans."""
        arguments = dict(zip(self.order, args, strict=False))
        for place in range(len(self.order), len(args)):
            arguments[f"*{place - len(self.order)}"] = args[place]
        arguments.update(kwargs)
        return {
            in_plans(name) if self.has_cache else name: value
            for name, value in arguments.items()
            if name not in self.defaults or not _same(value, self.defaults[name])
        }


def signature_of(module: nn.Module) -> ForwardSignature:
    """The signature of the ``forward`` of ``module``."""
    accepted = inspect.signature(module.forward).parameters
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    order = tuple(p.name for p in accepted.values() if p.kind in kinds)
    defaults = {p.name: p.default for p in accepted.values() if type(p.default) in PLAIN_TYPES}
    return ForwardSignature(order, defaults, is_same_argument(accepted))


@dataclass(frozen=True)
class ProvenCalls:
    """``CoveredCalls`` for one module, with the signature of its ``forward``."""

    signatures: tuple[CallSignature, ...]
    signature: ForwardSignature

    def uncovered(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """The arguments because of which a call is not covered; empty if it is covered."""
        arguments = self.signature.arguments(args, kwargs)
        for signature in self.signatures:
            if len(signature.arguments) == len(arguments) and not _differing(signature, arguments):
                return []
        differing = [_differing(signature, arguments) for signature in self.signatures]
        return min(differing, key=len) if differing else list(arguments) or [OTHER_CALLS]


def argument_spec(value: Any) -> ArgumentSpec | None:
    """The description of one argument, with its sizes; ``None`` if an object cannot be described.

    To allow other sizes, pass a ``TensorSpec`` in place of a tensor.
    """
    if isinstance(value, TensorSpec):
        return value
    if isinstance(value, torch.Tensor):
        return None if value.is_nested else TensorSpec(kind_of(value), tuple(value.shape))
    if type(value) in PLAIN_TYPES:
        return Constant(value)
    if isinstance(value, torch.SymInt):
        return Length(value)  # type: ignore[arg-type]
    cls = type(value)
    keys: tuple[Any, ...] = ()
    if cls.__module__.partition(".")[0] == "transformers" and hasattr(value, "__dict__"):
        value = _attributes(value)
    elif cls not in (list, tuple, dict):
        return None
    if isinstance(value, dict):
        keys, value = tuple(value), value.values()
    described = map(argument_spec, value)
    specs = tuple(spec for spec in described if spec is not None)
    if len(specs) < len(value) or not all(type(key) is str for key in keys):
        return None
    return Items(cls.__name__, specs, keys)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, without dtypes and devices; a class is replaced by its name."""
    return {
        name: x.__name__ if isinstance(x, type) else x
        for name, x in vars(value).items()
        if not isinstance(x, (torch.dtype, torch.device))
    }


def call_signature(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> CallSignature | None:
    """The signature of one call; ``None`` if ``argument_spec`` cannot describe an argument."""
    arguments = signature_of(module).arguments(args, kwargs)
    specs = [(name, argument_spec(value)) for name, value in arguments.items()]
    described = [(name, spec) for name, spec in specs if spec is not None]
    if len(described) < len(specs):
        return None
    described.sort(key=lambda argument: not argument[0].startswith("*"))
    return CallSignature(type(module).__name__, tuple(described))


def kind_of(tensor: torch.Tensor) -> Literal["float", "int", "bool", "complex"]:
    """``float``, ``complex``, ``bool`` or ``int``: the width stays open to allow casts."""
    if tensor.is_floating_point():
        return "float"
    if tensor.is_complex():
        return "complex"
    return "bool" if tensor.dtype == torch.bool else "int"


def _differing(signature: CallSignature, arguments: Mapping[str, Any]) -> list[str]:
    """Names of the arguments in which a call differs from a signature."""
    sizes: dict[str, int] = {}
    expected = dict(signature.arguments)
    differing = [name for name in arguments if name not in expected]
    for name, proven in signature.arguments:
        if name not in arguments or not _fits(proven, argument_spec(arguments[name]), sizes):
            differing.append(name)
    if differing or all(holds(condition, sizes) for condition in signature.conditions):
        return differing
    tensors = (name for name, proven in signature.arguments if isinstance(proven, TensorSpec))
    return [f"{name} of this size" for name in tensors]


def _fits(spec: ArgumentSpec, argument: ArgumentSpec | None, sizes: dict[str, int]) -> bool:
    """Whether ``spec`` allows such an argument; adds the sizes that it has to ``sizes``."""
    if isinstance(spec, Length):
        is_number = isinstance(argument, Constant) and type(argument.value) is int
        return is_number and _is_size(argument.value, spec.size, sizes)  # type: ignore
    if isinstance(spec, TensorSpec):
        if not isinstance(argument, TensorSpec) or argument.kind != spec.kind:
            return False
        return len(argument.sizes) == len(spec.sizes) and all(
            _is_size(size, expected, sizes)
            for size, expected in zip(argument.sizes, spec.sizes, strict=True)
        )
    if isinstance(spec, Constant):
        return isinstance(argument, Constant) and _same(argument.value, spec.value)
    if not isinstance(argument, Items) or argument.kind != spec.kind:
        return False
    if len(argument.values) != len(spec.values) or {*argument.keys} != {*spec.keys}:
        return False
    values = argument.values
    if spec.kind == "dict" and argument.keys != spec.keys:
        return False
    if spec.keys:  # the attributes of an object have no order
        named = dict(zip(argument.keys, values, strict=True))
        values = tuple(named[name] for name in spec.keys)
    return all(_fits(inner, value, sizes) for inner, value in zip(spec.values, values, strict=True))


def _is_size(size: Any, expected: Size, sizes: dict[str, int]) -> bool:
    return bool(size == (sizes.setdefault(expected, size) if type(expected) is str else expected))


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and type(value) in PLAIN_TYPES and value == other


def attributes_of(model: nn.Module) -> tuple[tuple[str, str, Plain], ...]:
    """The plain attributes on which ``forward`` of custom code may branch.

    These are the plain attributes of all modules that are neither torch's nor transformers', and
    the entries of the config that not every transformers config has.
    """
    owner, attributes = type(model).__name__, {}
    internal = {*vars(nn.Module()), "name_or_path"}
    if hasattr(model, "config"):
        from transformers import PreTrainedModel

        internal |= {*PreTrainedModel.__init__.__code__.co_names}
    for path, module in model.named_modules():
        if not is_defined_in(type(module), ("transformers", "torch")):
            for name, value in vars(module).items():
                if type(value) in PLAIN_TYPES and name not in internal and "_hf_" not in name:
                    attributes[f"{path}.{name}" if path else name] = value
    config = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        from transformers import PretrainedConfig

        shared = {*vars(PretrainedConfig()), *PretrainedConfig().to_dict()}
        for name, value in vars(config).items():
            if type(value) in PLAIN_TYPES and name not in shared and not name.startswith("_"):
                attributes[f"config.{name}"] = value
    return tuple((owner, name, value) for name, value in attributes.items())
