"""The calls of a folded model: each one decides whether the norms inside compute RMSNorm.

A folded model gets a subclass of its class, with the same name, whose ``__call__`` decides that for
the time of the call, in this thread. It does so in plain Python, each time:

* ``torch.compile(model)`` and ``model.compile()`` compile what runs inside of ``__call__``.
* Code that was compiled around a call of the model contains that call, so nobody would notice a
  change of the weights. Such a call computes LayerNorm.
* ``torch.export`` runs ``__call__`` once. The weights are constants of the program, and they are
  checked then.

Inputs that enter the residual stream (``inputs_embeds``) are centred on entry. If a call passes an
input that the proof does not cover, the model computes LayerNorm. If LayerNorm would not compute
the original function either, the call is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code
from torch.compiler import is_dynamo_compiling, is_exporting

from enjoyln_cli.errors import UnprovenCall
from enjoyln_cli.models.norm_modules import become
from enjoyln_cli.plan.axis import feature_axis
from enjoyln_cli.plan.cache_argument import in_plans
from enjoyln_cli.plan.covered_calls import CoveredCalls, ProvenCalls
from enjoyln_cli.runtime.modules import Folded, centre_value, make_class
from enjoyln_cli.runtime.scope import Fold, compute_layer_norm, thread


class Check(Protocol):
    """A check of a model's modules and weights."""

    def holds(self, entry: Entry, model: nn.Module) -> bool:
        """Whether ``model`` is as the proof assumes. Sets ``entry.trouble`` to the reason if not.

        Raises ``UnsupportedModel`` if LayerNorm would be wrong, too.
        """


class InputRule(Protocol):
    """Reads the inputs of a call, in a call of the whole model or inside of one."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The inputs to pass in their place; ``None`` to leave them as they are."""


class Entry:
    """A module whose calls are calls of a folded model: the model, its base model or its encoder.

    A call inside another call of the same ``fold`` belongs to that call, and is not checked again.
    """

    def __init__(self, fold: Fold, check: Check) -> None:
        self.fold = fold
        self.check = check
        self.inputs: tuple[InputRule, ...] = ()
        """What is done with the inputs of a call, one after the other."""
        self.trouble = ""
        """The reason why the norms have to compute LayerNorm; empty if there is none."""

    @torch.compiler.disable  # runs in Python beside a compiled call
    def proves(self, model: nn.Module) -> bool:
        """Whether the norms compute RMSNorm in a call of ``model`` that begins now.

        With gradients they compute LayerNorm: its gradients of weights are those of the original.
        A parametrised model (``training_plan``) has the same gradients with RMSNorm.
        """
        parametrised = self.fold.training_plan is not None
        if (model.training and not parametrised) or torch.jit.is_tracing():
            return False
        holds = self.check.holds(self, model)
        if parametrised:
            self.fold.was_proven = holds
            return holds
        recorded = torch.is_grad_enabled() and not is_exporting()
        return holds and not recorded and self.fold.checked == self.fold.trained


def add_entry(model: nn.Module, fold: Fold, check: Check) -> Entry:
    """Make calls of ``model`` calls of a folded model; returns its entry."""
    entry = Entry(fold, check)
    cls: Any = type(model)
    become(model, entry_class(cls))
    model._enjoyln_entry = entry  # type: ignore[assignment]
    fold.entries.append(entry)
    return entry


def entry_of(module: nn.Module) -> Entry | None:
    """The entry of ``module``, if its calls are calls of a folded model."""
    return vars(module).get("_enjoyln_entry")


def is_nested(module: nn.Module) -> bool:
    """Whether the call of ``module`` that is running is inside another call of the same model."""
    entry = getattr(module, "_enjoyln_entry", None)
    return entry is not None and thread.running.entry is not entry


def entries(model: nn.Module) -> list[tuple[nn.Module, Entry]]:
    """Every module of ``model`` that has an entry, with that entry."""
    found = ((module, entry_of(module)) for module in model.modules())
    return [(module, entry) for module, entry in found if entry is not None]


@cache
def entry_class(base: Any) -> type:
    """A subclass of ``base`` with the same name, whose calls are calls of a folded model."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        entry, running = self._enjoyln_entry, thread.running
        if entry is None:
            return base.__call__(self, *args, **kwargs)
        around, proven = running.entry, running.proven
        if around is not None and around.fold is entry.fold:
            args, kwargs = _changed_inputs(entry, self, args, kwargs)
            return base.__call__(self, *args, **kwargs)
        try:
            running.entry = entry
            proves = not is_dynamo_compiling() and entry.proves(self)
            running.proven = entry.fold if proves else None
            args, kwargs = _changed_inputs(entry, self, args, kwargs)
            return base.__call__(self, *args, **kwargs)
        finally:
            running.entry, running.proven = around, proven

    skip_code(call.__code__)  # Dynamo leaves ``call`` to Python, and compiles what runs inside
    body = {"__call__": call, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return make_class(base.__name__, (base,), entry_class, base, _enjoyln_entry=None, **body)


def _changed_inputs(
    entry: Entry, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for rule in entry.inputs:
        changed = rule(module, args, kwargs)
        if changed is not None:
            args, kwargs = changed
    return args, kwargs


def be_called(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook that changes nothing, but makes a parent call the module's ``forward``.

    Without any hook, ``nn.TransformerEncoderLayer`` takes a fast path where no gradient is needed:
    one fused op on its children's weights, without calling the children. No trace shows this path.
    """


@dataclass(frozen=True)
class CentreInputs:
    """Centres the named inputs over their last dimension, if passed; an ``InputRule``."""

    names: tuple[str, ...]
    order: tuple[str, ...]
    """Names of the positional inputs of ``forward``."""
    alone: bool = False
    """Whether this acts only if the module is not called by the model around it.

    True for an encoder: the model around it has handled its inputs.
    """

    def __call__(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if thread.running.proven is None or (self.alone and is_nested(module)):
            return None
        if not _passed_inputs(self.names, self.order, args, kwargs):
            return None
        values = [
            _centre_last(value) if name in self.names else value
            for name, value in zip(self.order, args, strict=False)
        ]
        changed = {n: _centre_last(v) if n in self.names else v for n, v in kwargs.items()}
        return (*values, *args[len(values) :]), changed


@dataclass(frozen=True)
class GuardInputs:
    """A call that passes one of the named inputs computes LayerNorm everywhere.

    It is an ``InputRule``, and can be used as a forward pre-hook, too. Raises ``UnprovenCall``
    where LayerNorm cannot restore the original function:

    * The affine of norms was ``merged`` into the layers after them, or norms into a table before
      them. With the unproven input, other layers may read these norms, or they other values.
    * ``proven`` is set (a model outside of transformers) and does not cover the call. A path that
      no trace took may read a value whose mean was removed by centring the weights.
    """

    names: tuple[str, ...]
    order: tuple[str, ...]
    merged: bool = False
    alone: bool = False
    """Whether this acts only if the module is not called by the model around it.

    What that model passes, it passes in the traced calls as well.
    """
    proven: ProvenCalls | None = None
    """The calls that the proof covers. If set, they decide instead of ``names``."""

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        if (self.alone or self.proven is not None) and is_nested(module):
            return
        if self.proven is not None:
            if found := self.proven.uncovered(args, kwargs):
                raise UnprovenCall(_uncovered_message(type(module).__name__, found))
            return
        found = _passed_inputs(self.names, self.order, args, kwargs)
        if found and self.merged:
            raise UnprovenCall(
                f"{type(module).__name__}: not proven for calls with {', '.join(found)}; LayerNorm "
                "cannot be used instead, since norm weights or biases were merged into other "
                "layers; leave that input out, or fold without --merge and --untie"
            )
        if found:
            compute_layer_norm()


def _uncovered_message(name: str, found: Sequence[str]) -> str:
    return (
        f"{name}: its proof covers no call with {', '.join(found)}; pass such a call in "
        "example_calls to analyze() or fold(), or use the original model for it"
    )


def _passed_inputs(
    names: Sequence[str], order: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str]:
    """Those of the inputs ``names`` that a call passes, by keyword or by position in ``order``."""
    found = [name for name in kwargs if in_plans(name) in names and kwargs[name] is not None]
    if args:
        given = zip(order, args, strict=False)
        found += [name for name, x in given if x is not None and in_plans(name) in names]
    return found


def _centre_last(x: Any) -> Any:
    return centre_value(x, feature_axis(tuple(x.shape))) if isinstance(x, torch.Tensor) else x


def encoder_of(model: nn.Module) -> nn.Module | None:
    """The encoder of an encoder-decoder model, which ``generate`` calls directly; else ``None``."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    found = model.get_encoder() if hasattr(model, "get_encoder") else None  # type: ignore
    return next((m for m in model.modules() if m is found and m is not model), None)


def add_entries(
    model: nn.Module,
    check: Callable[[nn.Module], Check],
    entry_inputs: tuple[str, ...],
    unproven: tuple[str, ...],
    merged: bool,
    covered: CoveredCalls | None,
) -> Fold:
    """Make calls of the model, its base model and its encoder calls of a folded model.

    Each gets an entry with the ``check`` that is made for it, and rules for its inputs. Rules that
    it has already stay. Returns the ``Fold`` that all of them share.
    """
    models = {id(m): m for m in (model, getattr(model, "base_model", model))}
    encoders = [encoder_of(module) for module in models.values()]
    inner = {id(m): m for m in encoders if m is not None and id(m) not in models}
    called = {**models, **inner}
    present = [entry for module in called.values() if (entry := entry_of(module)) is not None]
    fold = present[0].fold if present else Fold()
    names = tuple(sorted({*map(in_plans, unproven)}))
    for module in called.values():
        alone, order = id(module) in inner, tuple(inspect.signature(module.forward).parameters)
        entry = entry_of(module) or add_entry(module, fold, check(module))
        entry.trouble, entry.check = "", check(module)
        if entry.inputs:
            continue
        if names or covered is not None:
            proven = None if covered is None else covered.calls_of(module)
            entry.inputs += (GuardInputs(names, order, merged, module is not model, proven),)
        if entry_inputs:
            entry.inputs += (CentreInputs(entry_inputs, order, alone),)
    fold.checked = fold.trained
    return fold


@contextmanager
def input_means(model: nn.Module) -> Iterator[dict[str, float]]:
    """Within the block, measures the mean of every RMSNorm's input, relative to the input's rms.

    Yields a dict from module path to the root mean square over tokens of ``mean(x) / rms(x)``, of
    the call with the largest value. It is complete when the block ends. 0 is correct; 1 means that
    the input is constant along the features.
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
