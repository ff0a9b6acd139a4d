"""Run a model's calls for a trace: collect all values that leave them, then restore the model.

``Steps`` runs the calls in one graph and returns every value that leaves them. ``ready`` prepares a
model for that: eval or training mode, no gradients, norms observed and insertion points marked.
Afterwards it restores everything that the model's code can reach.
"""

from __future__ import annotations

import copy
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import torch
from torch import nn
from torch.fx import config as fx_config

from enjoyln_cli.effects.escapes import (
    WatchPython,
    changed_attributes,
    module_state,
    require_finished,
    still_alive,
    version,
    versions,
    what_holds,
)
from enjoyln_cli.effects.garbage import no_collections
from enjoyln_cli.effects.known_answers import KnownAnswers
from enjoyln_cli.effects.reachable import Snapshot
from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.graph.insertion_points import Places, mark_insertion_points
from enjoyln_cli.models.meta_device import answers_without_values
from enjoyln_cli.models.norm_modules import NormRuns, watch_norms
from enjoyln_cli.models.outputs import by_field, tensors_in
from enjoyln_cli.plan.cache_argument import CACHE, cache_argument, returned_cache


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
        """Calls of ``model`` pass ``flags`` too; outputs of the submodule ``inner`` count as
        returned.

        The first step gets a copy of ``cache``. ``before`` is called with the arguments of each
        step. ``watchers`` are told when recording begins, and get the tensors that stay alive.
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
        self.read_values = False
        """Whether Python read a tensor's value, so that other values may lead to another path."""

    def forward(self, *steps: Any) -> list[tuple[dict[str, list[torch.Tensor]], Any]]:
        """Run the steps; returns for each the output by field, and what ``inner`` returned.

        The last entry of the result holds the values that are still referenced after the calls, and
        those that Python read. Parameters are not among them: ``written`` names those that a call
        writes. If a call leaves values behind, writes parameters or changes attributes of modules,
        the same steps run once more.

        Raises ``TraceFailed`` if every call changes attributes again.
        """
        if self.watchers:
            self.watchers.norms.begin()
        weights = dict(self.model.named_parameters(remove_duplicate=False))
        own = [*weights.values(), *self.model.buffers(), *tensors_in(steps)]
        given = versions(own)
        state = module_state(self.model)
        with WatchPython() as watch:
            returned, results = self._run(steps)
            left = still_alive([*tensors_in(returned), *watch.read], given)
            after = module_state(self.model)
            if left or changed_attributes(state, after):
                more, again = self._run(steps)
                returned, results = returned + more, [*results, again]
                left = still_alive([*tensors_in(returned), *watch.read], given)
                if moving := changed_attributes(after, module_state(self.model)):
                    where = ".".join(filter(None, moving[0]))
                    raise TraceFailed(
                        f"each call changes {where}, so the next call may compute something else"
                    )
        self.read_values |= watch.read_values
        if self.watchers:
            self.watchers.left.extend(weakref.ref(one) for one in left if id(one) not in given)
        now = dict(self.model.named_parameters(remove_duplicate=False))
        if added := now.keys() - weights.keys():
            raise TraceFailed(f"forward creates a parameter, {min(added)}")
        self.replaced |= {name for name, tensor in weights.items() if now.get(name) is not tensor}
        self.written |= {
            name for name, tensor in weights.items() if version(tensor) != given[id(tensor)]
        }
        parameters = {*map(id, weights.values())}
        kept = [tensor for tensor in left if id(tensor) not in parameters]
        return [*returned, ({}, [*kept, *watch.read])]

    def _run(self, steps: Any) -> tuple[list[tuple[dict[str, list[torch.Tensor]], Any]], list[Any]]:
        returned: list[tuple[dict[str, list[torch.Tensor]], Any]] = []
        results: list[Any] = []
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
            results.append(result)
            require_finished(result)
            returned.append((by_field(result), tensors_in(inside)))
            if (kept := returned_cache(result)) is None:
                break
            cache = {name: kept}
        if self.inner is not None:
            hook.remove()
        return returned, [results, inside]


def _fresh(cache: Any) -> Any:
    """A copy of an empty cache, whose tensors are cloned as part of the graph."""
    held = [vars(one) for one in (cache, *getattr(cache, "layers", ())) if hasattr(one, "__dict__")]
    return copy.deepcopy(cache, {id(tensor): tensor.clone() for tensor in tensors_in(held)})


@dataclass(frozen=True)
class Watchers:
    """Records about a model while it is captured."""

    norms: NormRuns
    places: Places
    left: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    """Values of a call that were still referenced when it had ended."""


@contextmanager
def ready(model: nn.Module, training: bool = False) -> Iterator[Watchers]:
    """Prepare a model for a trace: no gradients, no warnings, norms and places watched.

    It is put in training mode if ``training`` is set, in eval mode otherwise. Afterwards,
    everything that the model's code can reach is restored. Raises ``TraceFailed`` if something
    cannot be restored.
    """
    modes = [(module, module.training) for module in model.modules()]
    known = KnownAnswers() if training else nullcontext()
    with no_collections():
        model.train(training)
        remembered = Snapshot(model)
        try:
            unwarned, answers = warnings.catch_warnings(), answers_without_values()
            with unwarned, torch.no_grad(), _brief_export(), known, answers:
                warnings.simplefilter("ignore")
                with watch_norms(model) as norms, mark_insertion_points(model) as places:
                    watchers = Watchers(norms, places)
                    yield watchers
        finally:
            left = remembered.put_back()
            for module, mode in modes:
                module.training = mode
    left += what_holds([ref for ref in watchers.left if not remembered.has(ref())])
    if left:
        raise TraceFailed(
            f"a call of the model changes {left[0]}, which cannot be restored after a trace; keep "
            "shared state in attributes of modules, and build the model again"
        )


@contextmanager
def _brief_export() -> Iterator[None]:
    """Inside the block, torch does not log the exceptions that it raises, and tracing is faster.

    Nodes are recorded without their Python stack.
    """
    logged = logging.root.manager.disable
    unrecorded = getattr(fx_config, "do_not_emit_stack_traces", False)  # since torch 2.13
    logging.disable(logging.ERROR)
    fx_config.do_not_emit_stack_traces = True
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(logged)
        fx_config.do_not_emit_stack_traces = unrecorded
