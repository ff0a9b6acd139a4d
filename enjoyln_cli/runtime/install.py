"""Install a proven plan in a live model: RMSNorm and explicit centring, in place.

Decides how a plan changes a live ``torch.nn.Module``: which module a name refers to, which class
that module gets (``modules``), which hooks the model gets (``hooks``), and which modules are
refused because a hook or another ``forward`` may change their output. Which norms are converted is
decided by the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.norm_modules import (
    become,
    first_names,
    forward_hooks,
    has_replaced_forward,
    interference,
    runs_torchs_layer_norm,
)
from enjoyln_cli.models.norm_probe import Known, LayerNormForm, examine, group_norm_form
from enjoyln_cli.plan.covered_calls import OTHER_CALLS, CoveredCalls
from enjoyln_cli.plan.plan import Centring, Plan
from enjoyln_cli.plan.trusted_code import foreign_hooks
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.runtime.entries import add_entries, be_called
from enjoyln_cli.runtime.modules import Folded, centred_subclass, rms_spelled_out, rms_subclass
from enjoyln_cli.runtime.structure import KeepStructure


def install(
    model: nn.Module,
    norms: Iterable[str],
    ops: Iterable[Centring],
    entry_inputs: Iterable[str] = (),
    unproven: Iterable[str] = (),
    merged: bool = False,
    covered: CoveredCalls | None = None,
) -> nn.Module:
    """Make ``model`` compute with RMSNorm at ``norms`` and with the centrings ``ops``, in place.

    Names are those of the class that the plan was made for. ``model`` may be that class, its base
    class, or a class with the same base class inside (``base_model_prefix``). Norms of a head that
    ``model`` does not have are skipped. The parameters:

    * ``entry_inputs``: inputs of ``forward`` (``inputs_embeds``) whose last dimension is centred on
      entry.
    * ``unproven``: a call that passes one of these inputs computes LayerNorm, or raises
      ``UnprovenCall`` if norms were ``merged`` into other layers.
    * ``covered``: if set, any call that it does not cover raises ``UnprovenCall``.

    Installing twice changes nothing, except that a model that was trained computes RMSNorm again:
    the caller vouches that its weights are centred.

    Returns ``model``. Raises ``UnsupportedModel``, with nothing changed, for a module that is
    missing or is not a LayerNorm, or whose calls may not compute its class's ``forward`` (see
    ``models.norm_modules``).
    """
    norms, ops, unproven = tuple(norms), tuple(ops), tuple(unproven)
    if covered is None and OTHER_CALLS in unproven:
        raise UnsupportedModel(
            f"{type(model).__name__}: the plan covers only some calls; pass covered=plan.covered"
        )
    if covered is not None:
        covered.require_any(type(model).__name__)
    if covered is not None and (changed := covered.changed(model)) is not None:
        raise UnsupportedModel(
            f"{changed}: the plan was proven with the earlier value; restore it, or analyse the "
            "model again"
        )
    named = (*norms, *(op.module for op in ops))
    places = {name: locate(model, name, named) for name in norms}
    swaps: list[tuple[nn.Module, type]] = []
    known: Known = {}
    for path in (place for place in places.values() if place is not None):
        module = model.get_submodule(path)
        reason = interference(module)
        if reason is not None:
            raise UnsupportedModel(f"{path}: {reason}; install before that, or undo it")
        if not isinstance(module, Folded):
            swaps.append((module, _folded_class(module, path, known)))
    _check_aliases(model, places.values())
    carried: dict[str, tuple[Centring, ...]] = {}
    for op in ops:
        place = locate(model, op.module, named)
        if place is not None:
            carried[place] = (*carried.get(place, ()), op)
    for path, centrings in carried.items():
        _check_forward(model.get_submodule(path), path, centrings)

    for module, cls in swaps:
        become(module, cls)
    for path, centrings in carried.items():
        module = model.get_submodule(path)
        if not hasattr(module, "centrings"):
            plain: Any = type(module)
            become(module, centred_subclass(plain))
            module.register_forward_hook(be_called)
        module.centrings = centrings  # type: ignore[assignment]
    fold = add_entries(model, KeepStructure, tuple(entry_inputs), unproven, merged, covered)
    for module in model.modules():
        if isinstance(module, Folded) or hasattr(module, "centrings"):
            module._enjoyln_fold = fold  # type: ignore[assignment]
    return model


def install_plan(model: nn.Module, plan: Plan) -> nn.Module:
    """``install`` for everything that ``plan`` says about a model whose weights are centred."""
    norms = [verdict.norm for verdict in plan.folded]
    merged = bool(plan.merged or plan.baked)
    return install(
        model, norms, plan.ops, plan.entry_inputs, plan.unproven, merged, covered=plan.covered
    )


def fold_in_memory(model: nn.Module, plan: Plan) -> nn.Module:
    """Carry out ``plan`` on a live model, in place: its edits of weights, then its RMSNorms.

    The weights are not watched afterwards, as those of a converted checkpoint are. Returns
    ``model``. Raises as ``centre_parameters`` and ``install`` do.
    """
    centre_parameters(model, plan)
    return install_plan(model, plan)


def locate(
    model: nn.Module,
    name: str,
    names: tuple[str, ...] = (),
    get: Callable[[nn.Module, str], Any] = nn.Module.get_submodule,
) -> str | None:
    """Path in ``model`` of the module ``name``, with the base model's prefix added or removed.

    ``None`` for a module of a head that ``model`` does not have: ``model`` is the base class, and
    others of ``names`` have the base model's prefix. ``get(model, path)`` may look up something
    else than modules; it raises ``AttributeError`` if there is nothing at ``path``. Raises
    ``UnsupportedModel`` if ``model`` has no such module.
    """
    prefix = getattr(model, "base_model_prefix", "") or ""
    head = f"{prefix}."
    for path in (name, name.removeprefix(head), head + name):
        try:
            get(model, path)
        except AttributeError:
            continue
        return path
    inside = prefix and not hasattr(model, prefix) and not name.startswith(head)
    if inside and any(other.startswith(head) for other in names):
        return None
    raise UnsupportedModel(
        f"{type(model).__name__} has no {name!r}: the plan was made for another class"
    )


def _folded_class(module: nn.Module, path: str, known: Known) -> type:
    base: Any = type(module)
    if runs_torchs_layer_norm(module):
        return rms_subclass(base)
    form = group_norm_form(module) or examine(module, known)
    if not isinstance(form, LayerNormForm):
        why = "" if form is None else f" ({form})"
        raise UnsupportedModel(
            f"{path}: {base.__name__} does not compute LayerNorm{why}, so it cannot become RMSNorm"
        )
    return rms_spelled_out(base, form)


def _check_aliases(model: nn.Module, places: Iterable[str | None]) -> None:
    """Raises ``UnsupportedModel`` if a norm to convert is also registered under a name that stays.

    The plan knows a norm that is registered under several names by its first name.
    """
    first, folded = first_names(model), set(places)
    for path in sorted(folded - {None}):  # type: ignore[type-var]
        if first.get(path or "", path) not in folded:
            raise UnsupportedModel(
                f"{path}: is the same module as {first[path or '']}, which stays LayerNorm"
            )


def _check_forward(module: nn.Module, path: str, centrings: Iterable[Centring]) -> None:
    """Raises ``UnsupportedModel`` if code may run between a module and the centring it carries."""
    after = any(op.place == "output" for op in centrings)
    if has_replaced_forward(module) or (after and foreign_hooks(forward_hooks(module))):
        what = "a forward hook may change what it returns" if after else ""
        what = "its forward was replaced on the instance" if has_replaced_forward(module) else what
        raise UnsupportedModel(f"{path}: {what}; install before that, or undo it")
