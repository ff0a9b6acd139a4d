"""Find the inputs for which a call takes the same path as the traced call.

A second recording makes every size a symbol. Whenever Python reads a size (a comparison, ``range``,
``len``, an index), torch adds a condition under which the path stays the same. For all sizes that
meet these conditions, the call runs the same operations. As a check, the operations of both
recordings are compared. A size of 1 stays 1, since torch broadcasts it.

In the same way, a recording in which sizes and numbers that depend on values are symbols shows
whether a call runs the same operations for all values of its inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.experimental import _config as symbolic
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from enjoyln_cli.calls.calls import Call
from enjoyln_cli.models.meta_device import copy_without_weights
from enjoyln_cli.plan.cache_argument import CACHE, cache_argument
from enjoyln_cli.plan.covered_calls import (
    ArgumentSpec,
    CallSignature,
    Constant,
    Items,
    Length,
    TensorSpec,
    call_signature,
    sizes_in,
)
from enjoyln_cli.plan.size_conditions import holds, names_in, require_condition
from enjoyln_cli.trace.annotate import CallToTrace
from enjoyln_cli.trace.recorder import Symbols, record_symbolic
from enjoyln_cli.trace.steps import Steps, quiet
from enjoyln_cli.trace.trace import Trace


def traced_signatures(model: nn.Module, trace: Trace) -> tuple[CallSignature, ...]:
    """The signatures of calls that a trace of ``model`` covers: a signature for each step.

    If it is unknown for which sizes they hold, only the signature of the first step, with its exact
    sizes. Empty if Python read values of the example inputs.
    """
    call = trace.call
    if trace.by_values:
        return ()
    if general := _general_signatures(model, call, trace):
        return general
    args, kwargs = call.steps[0]
    named = {**kwargs, **call.flags}
    if call.cache is not None:
        named[cache_argument(model.forward) or CACHE] = call.cache
    signature = call_signature(model, args, named)
    return () if signature is None else (signature,)


def holds_for_all_values(this: CallToTrace, graph: Graph) -> bool:
    """Whether a call runs the operations of ``graph`` for all values of inputs of these sizes.

    ``graph`` was recorded with the values of the example inputs. A check (``assert``,
    ``torch._check``) may read any value: if it fails, so does the call. Raises an exception if it
    is unknown.
    """
    symbolic = record_symbolic(this.runner(), this.call.steps, Symbols(), free=False)
    return _operations(symbolic) == _operations(graph)


def in_two_rows(call: Call) -> Iterator[Call]:
    """The same call with two rows if it has a single row, which torch may broadcast."""

    def doubled(value: Any) -> Any:
        single = isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == 1
        return value.expand(2, *value.shape[1:]).clone() if single else value

    steps = pytree.tree_map(doubled, call.steps)
    leaves = zip(pytree.tree_leaves(steps), pytree.tree_leaves(call.steps), strict=True)
    if any(new is not old for new, old in leaves):
        yield replace(call, label=f"{call.label}, in two rows", steps=steps, required=False)


@dataclass
class _Before:
    """Records each step's signature, and how many conditions on sizes existed when it began."""

    model: nn.Module
    sizes: Symbols
    signatures: list[CallSignature | None] = field(default_factory=list)
    known: list[int] = field(default_factory=list)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.signatures.append(call_signature(self.model, args, kwargs))
        self.known.append(len(self.sizes.guards))


def in_one_row(call: Call, signatures: Iterable[CallSignature]) -> Iterator[Call]:
    """The same call with a single row, unless all of its ``signatures`` hold for a single row.

    torch broadcasts a single row, so code may take another path with it.
    """
    leaves = pytree.tree_leaves(call.steps)
    rows = next((leaf.shape[0] for leaf in leaves if torch.is_tensor(leaf) and leaf.ndim), 1)
    if rows == 1 or all(map(_holds_for_one, signatures)):
        return

    def single(value: Any) -> Any:
        of_rows = torch.is_tensor(value) and value.ndim and value.shape[0] == rows
        return value[:1].clone() if of_rows else value

    steps = pytree.tree_map(single, call.steps)
    yield replace(call, label=f"{call.label}, in one row", steps=steps, required=False)


def _holds_for_one(signature: CallSignature) -> bool:
    """Whether no condition concerns the number of rows (the first size of the first tensor)."""
    first = next(_sizes(signature), 1)
    return first == 1 or not any(first in names_in(one) for one in signature.conditions)


def _general_signatures(model: nn.Module, call: Call, trace: Trace) -> tuple[CallSignature, ...]:
    """The signatures with symbolic sizes; empty if it is unknown for which sizes they hold."""
    sizes = Symbols()
    try:
        bare = copy_without_weights(model)
        bare.train(call.training)
        before = _Before(bare, sizes)
        oblivious = symbolic.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
        runner = Steps(bare, call.flags, None, cache=call.cache, before=before)
        with quiet(call.training), oblivious, _read_as_text():
            graph = record_symbolic(runner, call.steps, sizes)
        if _operations(graph) != _operations(trace.graph):
            return ()
        return tuple(_forms_with_conditions(before, len(call.steps)))
    except Exception:  # of the model's code, or of torch
        return ()


@contextmanager
def _read_as_text() -> Iterator[None]:
    """Let text made of a symbolic size show its number inside the block; the number is then fixed.

    Torch has no hook for this: it shows the symbol, and records no condition.
    """
    plain = torch.SymInt.__repr__

    def number(size: torch.SymInt) -> str:
        return str(int(size))

    torch.SymInt.__repr__ = number  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.SymInt.__repr__ = plain  # type: ignore[method-assign]


def _operations(graph: Graph) -> list[tuple[str, str]]:
    """The operations on tensors in order, by the names of an op and its overload.

    An op that writes in place counts as the op that does not. Left out are reads of sizes and
    numbers, ops inside ``torch.tensor``, and ops that may return their operand: which of these are
    recorded depends on devices, strides and writes.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function" and not _is_whole(node)]
    targets = [node.target for node in nodes if isinstance(node.target, torch._ops.OpOverload)]
    names = ((target._schema.name, target._overloadname) for target in targets)
    return [
        (name.rstrip("_"), overload)
        for name, overload in names
        if not name.startswith(("aten::_assert", "aten::sym_")) and name not in _UNCOMPARED
    ]


_UNCOMPARED = {
    "aten::_is_all_true", "aten::alias", "aten::contiguous", "aten::detach", "aten::detach_",
    "aten::dropout", "aten::feature_dropout", "aten::item", "aten::lift_fresh",
    "aten::lift_fresh_copy",
}  # fmt: skip


def _is_whole(node: Node) -> bool:
    """Whether a slice selects everything, as ``x[:]`` does."""
    whole = (0, sys.maxsize)
    return node.target is torch.ops.aten.slice.Tensor and tuple(node.args[2:]) in ((), whole)


def _forms_with_conditions(before: _Before, steps: int) -> Iterator[CallSignature]:
    """The signatures of the steps, with conditions from the guards on sizes.

    Raises ``ValueError`` for a condition that cannot be expressed.
    """
    if any(before.sizes.deferred_runtime_asserts.values()):
        return
    guards = before.sizes.guards
    ends = [*before.known[1:steps], len(guards)]
    for signature, begin, end in zip(before.signatures[:steps], before.known, ends, strict=False):
        if signature is not None:
            conditions = [before.sizes.simplify(guard.expr) for guard in guards[:end]]
            yield _with_names(signature, conditions[:begin], conditions[begin:])


def _with_names(signature: CallSignature, earlier: list[Any], own: list[Any]) -> CallSignature:
    """``signature`` with named sizes, and the conditions under which its path is the same.

    Conditions of ``earlier`` steps on sizes that this step does not have are left out.
    """
    fresh = _letters()
    names: dict[Any, str] = {}
    exact: dict[str, int] = {}

    def named(size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        if expression not in names:
            names[expression] = next(fresh)
        exact[names[expression]] = size.node.hint
        return names[expression]

    arguments = tuple((name, _renamed(one, named)) for name, one in signature.arguments)
    symbols = {one: type(one)(name) for one, name in names.items() if one.is_symbol}
    conditions: list[str] = []
    for expression, name in names.items():
        unknown = expression.free_symbols - set(symbols)
        if len(unknown) == 1 and len(expression.free_symbols) == 1:
            (one,) = unknown  # such as a length of which the cache adds one
            if (more := expression - one).is_number:
                symbols[one] = type(one)(name) - more
                conditions.append(f"{name} >= {int(more)}")
    for expression, name in names.items():
        if not (expression.is_symbol or symbols.get(expression) == expression):
            value = _condition(expression, symbols)
            conditions += [f"{name} == {value}"] * (name != value)
    for place, left in enumerate((*earlier, *own)):
        if left == True or (  # noqa: E712 (sympy's own truth)
            place < len(earlier) and left.free_symbols.isdisjoint(symbols)
        ):
            continue
        conditions.append(_condition(left, symbols))
    if not all(holds(condition, exact) for condition in conditions):
        raise ValueError("the sizes that were traced are not among those that are covered")
    return CallSignature(signature.owner, arguments, tuple(dict.fromkeys(conditions)))


def _renamed(spec: ArgumentSpec, named: Callable[[Any], Any]) -> ArgumentSpec:
    """``spec`` with every size replaced by ``named(size)``."""
    if isinstance(spec, TensorSpec):
        return replace(spec, sizes=tuple(map(named, spec.sizes)))
    if isinstance(spec, Length):
        size = named(spec.size)
        return Constant(size) if type(size) is int else Length(size)
    if isinstance(spec, Items):
        return replace(spec, values=tuple(_renamed(one, named) for one in spec.values))
    return spec


def _sizes(signature: CallSignature | None) -> Iterator[Any]:
    for _, one in signature.arguments if signature else ():
        yield from sizes_in(one)


def _condition(expression: Any, symbols: dict[Any, Any]) -> str:
    if not expression.free_symbols <= set(symbols):
        raise ValueError(f"{expression} depends on a size that is not the size of an input")
    renamed = expression.xreplace(symbols)
    return require_condition(PythonPrinter().doprint(renamed))


def _letters() -> Iterator[str]:
    yield from "abcdefghijklmnopqrstuvwxyz"
    yield from (f"s{number}" for number in count())
