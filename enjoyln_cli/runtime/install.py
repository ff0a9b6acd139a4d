"""Install a proven plan in a live model: RMSNorm and explicit centring, in place.

Decides how a plan changes a live ``torch.nn.Module``: which class each module gets (``modules``),
and which modules are refused because a hook or another ``forward`` may change their output. Which
norms are converted is decided by the plan, and whether they may compute RMSNorm in a call by
``weight_watch``. ``run_folded`` is what every fold of a live model ends with: ``fold_in_memory``
and ``optimize``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from enjoyln_cli import kernels
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.classes import locate
from enjoyln_cli.models.norm_modules import (
    become,
    first_names,
    forward_hooks,
    has_replaced_forward,
    interference,
    runs_torchs_layer_norm,
)
from enjoyln_cli.models.norm_probe import Known, LayerNormSpec, examine
from enjoyln_cli.plan.plan import MeanSubtraction, Plan
from enjoyln_cli.plan.trusted_code import foreign_hooks
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.runtime.call_guards import add_guards, be_called, encoder_of
from enjoyln_cli.runtime.modules import Folded, centred_subclass, rms_spelled_out, rms_subclass
from enjoyln_cli.runtime.neutral import kinds_of_norms
from enjoyln_cli.runtime.weight_check import WatchList
from enjoyln_cli.runtime.weight_watch import watch_weights

Model = TypeVar("Model", bound=nn.Module)


def install(model: Model, plan: Plan) -> Model:
    """Make ``model`` compute with the RMSNorms and the mean subtractions of ``plan``, in place.

    ``model`` may be the class that the plan was made for, its base class, or a class with the same
    base class inside (``base_model_prefix``). Norms of a head that ``model`` does not have are
    skipped. ``entry_inputs`` are centred on entry. A call that passes an ``unproven`` input
    computes LayerNorm, or raises ``UnprovenCall`` if that does not restore the original function;
    if the plan has ``covered`` calls, any other call raises it.

    Installing twice changes nothing, except that a model that was trained computes RMSNorm again:
    the caller vouches that its weights are centred.

    Returns ``model``. Raises ``UnsupportedModel``, with nothing changed, for a module that is
    missing or is not a LayerNorm, or whose calls may not compute its class's ``forward`` (see
    ``models.norm_modules``).
    """
    swaps, carried = _changes(model, plan)
    for module, cls in swaps:
        become(module, cls)
    for path, centrings in carried.items():
        module = model.get_submodule(path)
        if not hasattr(module, "centrings"):
            plain: Any = type(module)
            become(module, centred_subclass(plain))
            module.register_forward_hook(be_called)
        module.centrings = centrings  # type: ignore[assignment]
    state = add_guards(model, plan)
    for module in model.modules():
        if isinstance(module, Folded) or hasattr(module, "centrings"):
            module._enjoyln_state = state  # type: ignore[assignment]
    return model


def _changes(
    model: nn.Module, plan: Plan
) -> tuple[list[tuple[nn.Module, type]], dict[str, tuple[MeanSubtraction, ...]]]:
    """What ``install`` changes: the new class of each norm, and the centrings by module.

    Raises ``UnsupportedModel`` as ``install`` does.
    """
    covered = plan.covered
    norms = [verdict.norm for verdict in plan.folded]
    if covered is not None:
        covered.require_any(type(model).__name__)
    if covered is not None and (changed := covered.changed(model)) is not None:
        raise UnsupportedModel(
            f"{changed}: the plan was proven with the earlier value; restore it, or analyse the "
            "model again"
        )
    named = (*norms, *(op.module for op in plan.subtractions))
    places = {name: locate(model, name, named) for name in norms}
    swaps: list[tuple[nn.Module, type]] = []
    examined: Known = {}
    for path in (place for place in places.values() if place is not None):
        module = model.get_submodule(path)
        reason = interference(module)
        if reason is not None:
            raise UnsupportedModel(f"{path}: {reason}; undo that, or do it after the conversion")
        if not isinstance(module, Folded):
            swaps.append((module, _folded_class(module, path, examined)))
    _check_aliases(model, places.values())
    carried: dict[str, tuple[MeanSubtraction, ...]] = {}
    for op in plan.subtractions:
        place = locate(model, op.module, named)
        if place is not None:
            carried[place] = (*carried.get(place, ()), op)
    for path, centrings in carried.items():
        _check_forward(model.get_submodule(path), path, centrings)
    return swaps, carried


def require_installable(model: nn.Module, plan: Plan) -> None:
    """Raise ``UnsupportedModel`` if ``install`` would, before anything is edited."""
    _changes(model, plan)


def fold_in_memory(model: nn.Module, plan: Plan) -> nn.Module:
    """Carry out ``plan`` on a live model, in place: its edits of weights, then its RMSNorms.

    ``model`` is the model that was analysed, with its hooks. Weights that change later are checked
    before the norms compute RMSNorm again. Returns ``model``. Raises as ``centre_parameters`` and
    ``install`` do; nothing is changed then.
    """
    require_installable(model, plan)
    centre_parameters(model, plan)
    return run_folded(model, plan)


def run_folded(model: Model, plan: Plan, reference: nn.Module | None = None) -> Model:
    """Let ``model`` compute RMSNorm as ``plan`` says, in place, while its weights are centred.

    They are checked at the first call, and after each change. What ``model`` has that ``reference``
    has not, a model of the same class and config, counts as an edit; without a ``reference``,
    ``model`` was proven as it is. Returns ``model``. Raises as ``install`` does.
    """
    unproven = (*plan.unproven, *_inner_inputs(model, plan))
    install(model, replace(plan, unproven=unproven))
    watch_weights(model, WatchList.of(plan), reference)
    kernels.prepare(kinds_of_norms(model))
    return model


def _inner_inputs(model: nn.Module, plan: Plan) -> set[str]:
    """Inputs that the base model or encoder takes and ``model`` does not, if its class is unproven.

    They can still reach the inner module, through ``**kwargs`` or if it is called directly.
    """
    encoder = encoder_of(model)
    inner = [getattr(model, "base_model", model), *([encoder] if encoder else [])]
    names = {
        name
        for module in inner
        if module is not model and type(module).__name__ not in plan.classes
        for name in inspect.signature(module.forward).parameters
    }
    return names - {*inspect.signature(model.forward).parameters}


def _folded_class(module: nn.Module, path: str, examined: Known) -> type:
    base: Any = type(module)
    if runs_torchs_layer_norm(module):
        return rms_subclass(base)
    spec = examine(module, examined)
    if not isinstance(spec, LayerNormSpec):
        why = "" if spec is None else f" ({spec})"
        raise UnsupportedModel(
            f"{path}: {base.__name__} does not compute LayerNorm{why}, so it cannot become RMSNorm"
        )
    return rms_spelled_out(base, spec)


def _check_aliases(model: nn.Module, places: Iterable[str | None]) -> None:
    """Raise ``UnsupportedModel`` if a norm to convert is also registered under a name that stays.

    The plan knows a norm that is registered under several names by its first name.
    """
    first, folded = first_names(model), set(places)
    for path in sorted(folded - {None}):  # type: ignore[type-var]
        if first.get(path or "", path) not in folded:
            raise UnsupportedModel(
                f"{path}: is the same module as {first[path or '']}, which stays LayerNorm"
            )


def _check_forward(module: nn.Module, path: str, centrings: Iterable[MeanSubtraction]) -> None:
    """Raise ``UnsupportedModel`` if code may run between a module and the centring it carries."""
    after = any(op.place == "output" for op in centrings)
    if has_replaced_forward(module) or (after and foreign_hooks(forward_hooks(module))):
        what = "a forward hook may change what it returns" if after else ""
        what = "its forward was replaced on the instance" if has_replaced_forward(module) else what
        raise UnsupportedModel(f"{path}: {what}; undo that, or do it after the conversion")
