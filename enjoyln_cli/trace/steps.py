"""Run a model's calls for a trace, and return every value that leaves them.

``Steps`` runs the calls in one graph, on a copy of the model without weights. ``watch`` prepares
that copy: its insertion points are marked, and what its hooks see is noted. The copy is thrown away
after the trace, so the model itself stays as it is. ``quiet`` is all that a trace changes in the
process meanwhile.

A call passes values on by returning them, in caches, by replacing buffers, and by writing into
parameters, buffers and inputs. If it leaves something behind, the next call may use it, so a second
call is traced in the same graph. Other state, such as attributes of modules, is not looked at: a
``forward`` is a function of its arguments, parameters and buffers.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any
from weakref import ReferenceType

import torch
from torch import nn
from torch.fx import _symbolic_trace as symbolic_trace
from torch.fx import config as fx_config
from torch.utils import _pytree as pytree

from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.graph.insertion_points import InsertionPoints, mark_insertion_points
from enjoyln_cli.models.known_answers import KnownAnswers
from enjoyln_cli.models.meta_device import answers_without_values
from enjoyln_cli.models.outputs import by_field, tensors_in
from enjoyln_cli.plan.cache_argument import CACHE, cache_argument, returned_cache
from enjoyln_cli.plan.trusted_code import foreign_hooks

_LATER = (Iterator, FunctionType, MethodType, BuiltinMethodType, partial, ReferenceType)
"""Types of results whose tensors come to light after the call."""


@dataclass(frozen=True)
class Watchers:
    """Records about a model while it is captured."""

    places: InsertionPoints
    hooked: list[Any] = field(default_factory=list)
    """Inputs and outputs of modules that hooks of other code get to see."""


class Steps(nn.Module):
    """Runs a model's calls in one graph and returns every tensor that leaves them."""

    def __init__(
        self,
        model: nn.Module,
        flags: Mapping[str, Any],
        inner: str | None,
        watchers: Watchers | None = None,
        cache: Any = None,
        before: Callable[[tuple[Any, ...], dict[str, Any]], None] = lambda args, kwargs: None,
    ) -> None:
        """Let calls pass ``flags`` too; outputs of the submodule ``inner`` count as returned.

        The first step gets a copy of ``cache``. ``before`` is called with the arguments of each
        step. ``watchers`` hold what hooks see.
        """
        super().__init__()
        self.model = model
        self.flags = dict(flags)
        self.inner = inner
        self.watchers = watchers
        self.cache = cache
        self.before = before
        self.replaced: set[str] = set()
        """Names of parameters that a call replaces by other tensors."""
        self.written: set[str] = set()
        """Names of parameters that a call writes in place."""

    def forward(self, *steps: Any) -> list[tuple[dict[str, list[torch.Tensor]], Any]]:
        """Run the steps; returns for each the output by field, and what ``inner`` returned.

        The last entry of the result holds the values that leave the calls without being returned:
        buffers that were replaced, buffers and inputs that were written, and values that hooks see.
        Parameters are not among them: ``written`` names parameters that a call writes. If a call
        writes something or replaces a buffer, the same steps run once more.
        """
        weights = dict(self.model.named_parameters(remove_duplicate=False))
        given = [*weights.values(), *self.model.buffers(), *tensors_in(steps)]
        with torch._C.DisableTorchFunction():  # the model does not read them
            versions = [version(tensor) for tensor in given]
        returned = self._run(steps)
        if self._changed(given, versions) or self._replaced(given):
            returned = returned + self._run(steps)
        written = self._changed(given, versions)
        now = dict(self.model.named_parameters(remove_duplicate=False))
        if added := now.keys() - weights.keys():
            raise TraceFailed(f"forward creates a parameter, {min(added)}")
        self.replaced |= {name for name, tensor in weights.items() if now.get(name) is not tensor}
        changed = {*map(id, written)}
        self.written |= {name for name, tensor in weights.items() if id(tensor) in changed}
        hooked = tensors_in(self.watchers.hooked) if self.watchers else []
        left = (*written, *self._replaced(given), *hooked)
        others = {id(tensor): tensor for tensor in left}
        for tensor in (*weights.values(), *tensors_in([fields for fields, _ in returned])):
            others.pop(id(tensor), None)
        return [*returned, ({}, [*others.values()])]

    def _changed(self, given: list[torch.Tensor], versions: list[int]) -> list[torch.Tensor]:
        """The tensors that were written in place since they had these ``versions``."""
        return [t for t, v in zip(given, versions, strict=True) if version(t) != v]

    def _replaced(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """The buffers that were not among ``given`` before the call."""
        known = {*map(id, given)}
        return [buffer for buffer in self.model.buffers() if id(buffer) not in known]

    def _run(self, steps: Any) -> list[tuple[dict[str, list[torch.Tensor]], Any]]:
        returned: list[tuple[dict[str, list[torch.Tensor]], Any]] = []
        name = cache_argument(self.model.forward) or CACHE
        cache = {} if self.cache is None else {name: _fresh(self.cache)}
        inside: list[Any] = []
        if self.inner is not None:
            base = self.model.get_submodule(self.inner)
            hook = base.register_forward_hook(lambda *call: inside.append(call[-1]))
        for args, kwargs in steps:
            named = {**kwargs, **cache, **self.flags}
            self.before(args, named)
            result = self.model(*args, **named)
            later = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, _LATER))
            if (value := next(later, None)) is not None:
                kind = type(value).__name__
                raise TraceFailed(f"forward returns a {kind}, which computes after the call")
            returned.append((by_field(result), tensors_in(inside)))
            if (kept := returned_cache(result)) is None:
                break
            cache = {name: kept}
        if self.inner is not None:
            hook.remove()
        return returned


def version(tensor: torch.Tensor) -> int:
    """How often the tensor was written in place; -1 for inference tensors, which do not count."""
    with torch._C.DisableTorchFunction():
        return -1 if tensor.is_inference() else tensor._version


def _fresh(cache: Any) -> Any:
    """A copy of an empty cache, whose tensors are cloned as part of the graph."""
    held = [vars(one) for one in (cache, *getattr(cache, "layers", ())) if hasattr(one, "__dict__")]
    return copy.deepcopy(cache, {id(tensor): tensor.clone() for tensor in tensors_in(held)})


def watch(bare: nn.Module, training: bool = False) -> Watchers:
    """Set the mode of a copy of a model, and observe its places and its hooks."""
    bare.train(training)
    watchers = Watchers(mark_insertion_points(bare))

    def see(module: nn.Module, *values: Any) -> None:
        watchers.hooked.append(values)

    for module in bare.modules():
        if foreign_hooks(module._forward_pre_hooks.values()):
            module.register_forward_pre_hook(see, prepend=True, with_kwargs=True)
        if foreign_hooks(module._forward_hooks.values()):
            module.register_forward_hook(see, prepend=True, with_kwargs=True)
    return watchers


@contextmanager
def quiet(training: bool = False, exporting: bool = True) -> Iterator[None]:
    """The process-wide state of a trace: all that is set here is as before afterwards.

    No gradients; no warnings and logs of torch's exceptions; nodes without their Python stack,
    which makes tracing faster; torch's random numbers on the CPU. In training mode, some branches
    are decided (see ``models.known_answers``). If ``exporting``, the code of a model takes the same
    branches as under ``torch.export``.
    """
    logged = logging.root.manager.disable
    unrecorded = getattr(fx_config, "do_not_emit_stack_traces", False)  # since torch 2.13
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(redirect_stderr(StringIO()))
        stack.enter_context(answers_without_values())
        if training:
            stack.enter_context(KnownAnswers())
        if exporting:
            stack.enter_context(_as_exporting())
        logging.disable(logging.ERROR)
        fx_config.do_not_emit_stack_traces = True
        try:
            yield
        finally:
            logging.disable(logged)
            fx_config.do_not_emit_stack_traces = unrecorded


@contextmanager
def _as_exporting() -> Iterator[None]:
    """Let a model's code take the same branches inside the block as under ``torch.export``."""
    compiler, flags = torch.compiler, ("_is_compiling_flag", "_is_exporting_flag")
    before = {flag: getattr(compiler, flag) for flag in flags}
    traced = symbolic_trace._is_fx_tracing_flag
    try:
        for flag in flags:
            setattr(compiler, flag, True)
        symbolic_trace._is_fx_tracing_flag = True
        yield
    finally:
        symbolic_trace._is_fx_tracing_flag = traced
        for flag, value in before.items():
            setattr(compiler, flag, value)
