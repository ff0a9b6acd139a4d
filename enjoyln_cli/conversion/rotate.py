"""Rotate a live transformers model in place: prove on a copy without weights, then edit weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from enjoyln_cli.analysis import untying
from enjoyln_cli.analysis.analyze import analyze_calls, calls_of
from enjoyln_cli.analysis.stored_names import StoredClass
from enjoyln_cli.checkpoint.config import require_unfolded
from enjoyln_cli.errors import NothingToFold, UnsupportedModel
from enjoyln_cli.models.load import stored_weights
from enjoyln_cli.models.meta_device import copy_without_weights
from enjoyln_cli.models.outputs import as_names
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.rewrite.preconditions import why_nothing_changes
from enjoyln_cli.runtime.adapters import quantisation_of
from enjoyln_cli.trace.failure_reasons import foreign_code


def rotate(
    model: Any,
    *,
    seed: int = 0,
    untie: bool = True,
    values: bool = True,
    outputs: str | Sequence[str] = (),
) -> Plan:
    """Rotate the features of ``model``, a loaded transformers model, by orthogonal matrices.

    The model is changed in place and computes the same function, as the result of
    ``enjoyln rotate`` does; ``save_pretrained`` saves it as a checkpoint of the stock class. Each
    weight is edited in float64 and rounded once to its dtype. The parameters:

    * ``seed`` chooses the matrices.
    * ``untie``: a head that is tied to the embedding gets a copy of its own, if the config allows
      that. Without it the stream of a LayerNorm model cannot rotate if its head is tied.
    * ``values``: also rotate the values of each attention head.
    * ``outputs``: the outputs that must stay unchanged, as names or patterns; by default
      the outputs that the class is used for.

    Returns the plan, which says what was rotated. Raises ``NothingToFold`` if nothing can rotate,
    ``AlreadyFolded`` for a converted model, ``UnsupportedModel`` for a quantised model, a model
    that is not of transformers or whose weights cannot be edited (see ``rewrite.editable``), and
    ``TraceFailed``; nothing is changed then.
    """
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None:
        raise UnsupportedModel(
            f"{name} is no model of transformers; use analyze and centre_parameters"
        )
    require_unfolded(config, name)
    for path, parameter in model.named_parameters():
        if kind := quantisation_of(parameter):
            raise UnsupportedModel(f"{path} is quantised ({kind}); rotate the model before that")
    copied: Any = copy_without_weights(model)
    untied_classes = _untied_classes(copied) if untie else None
    options = Options(fold=False, rotate=True, values=values, seed=seed)
    with foreign_code(copied):
        calls = calls_of(copied, (), {}, ())
    names, weights = as_names(outputs), stored_weights(model)
    plan = analyze_calls(copied, calls, names, options, weights).plan
    if not plan.rotated:
        raise NothingToFold(why_nothing_changes(plan, name))
    plan = untying.untie(plan, untied_classes) if untied_classes else plan
    centre_parameters(model, plan)
    return plan


def _untied_classes(model: Any) -> untying.UntiedClasses | None:
    """Untie the parameters of ``model`` in place; ``None`` if none is tied, or all stay tied."""
    weights = stored_weights(model)
    candidate = StoredClass(model, {name: (name,) for name in weights}, {}, ())
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    try:
        untied_classes = untying.find_untied_classes(model.config, [candidate], shapes, None)
    except UnsupportedModel:  # a saved checkpoint would load tied
        return None
    for copy in untied_classes.untied if untied_classes else ():
        owner, _, name = copy.parameter.rpartition(".")
        parameter = nn.Parameter(weights[copy.source].detach().clone())
        setattr(model.get_submodule(owner), name, parameter)
    return untied_classes
