"""What is folded in a model that is trained: its plan, and the marker and recipe of its weights.

A trained model is a model of its own. Its plan is the one that the analysis proves for its class
and config, as if it were folded now. The marker says that it was ``trained``: the function that its
checkpoints keep is that of their own weights with LayerNorm.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import nn

from enjoyln_cli.analysis.analyze import analyze_config
from enjoyln_cli.checkpoint.config import MARKER
from enjoyln_cli.checkpoint.marker import Marker, marker, read_marker
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.errors import NothingToFold, UnsupportedModel
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.recipe.write import recipe_text
from enjoyln_cli.rewrite.preconditions import why_nothing_changes
from enjoyln_cli.train.free_means import require_free_means


def plan_in_training(model: nn.Module, plan: Plan | None = None) -> Plan:
    """The plan for ``model``: ``plan``, or the one that the analysis proves for it.

    ``model`` is a transformers model, folded or not, or any module if ``plan`` is given. Raises
    ``NothingToFold`` if no norm becomes RMSNorm, and ``UnsupportedModel`` for a plan, or a folded
    model, that cannot be trained without a change of its function, or whose loss may depend on the
    mean of a centred weight (see ``free_means``).
    """
    name = type(model).__name__
    before = marker_in(model)
    if before is not None and before.units:
        raise UnsupportedModel(
            f"{name}: was folded with --widen-mlp, and training changes the hidden units that "
            "subtract a mean; train the original, or fold it without --widen-mlp"
        )
    plan = plan or _analysed(model, before)
    if not plan.folded:
        raise NothingToFold(why_nothing_changes(plan, name))
    if others := _other_edits(plan):
        raise UnsupportedModel(
            f"{name}: the plan does more than centring ({', '.join(others)}); fold the model with "
            "it first, and train the result without a plan"
        )
    _require_frozen_scales(model, plan)
    require_free_means(model, plan, _unmarked(getattr(model, "config", None)))
    return plan


def _other_edits(plan: Plan) -> list[str]:
    """The options because of which ``plan`` does more than centring."""
    edits: dict[str, Collection[Any]] = {"widen-mlp": plan.widened, "merge": plan.merged}
    edits |= {"untie": plan.untied or plan.baked, "rotate": plan.turned}
    return [option for option, tensors in edits.items() if tensors]


def marker_in(model: nn.Module) -> Marker | None:
    """The marker in the config of ``model``, if it has one."""
    config = _config_of(model)
    return read_marker(config, type(model).__name__) if MARKER in config else None


def _config_of(model: Any) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    return config.to_dict() if hasattr(config, "to_dict") else {}


def _analysed(model: Any, before: Marker | None) -> Plan:
    """The plan that is proven for the class and config of ``model``.

    If the model is folded, it has to fold the same norms.
    """
    name = type(model).__name__
    if not _config_of(model):
        raise UnsupportedModel(
            f"{name} has no transformers config; pass plan=analyze(model, *inputs).plan"
        )
    config = _unmarked(model.config)
    config.architectures = [name]
    outputs = before.outputs if before else ()
    for only in (None, name):  # right for every class that loads the weights, or for this one
        plan = analyze_config(config, model_class=only, outputs=outputs).plan
        folded = {verdict.norm for verdict in plan.folded}
        if name in plan.classes and (before is None or folded == set(before.rmsnorm)):
            return plan
    if before is None:
        raise UnsupportedModel(f"{name}: its calls could not be traced, so nothing is proven")
    raise UnsupportedModel(
        f"{name}: was folded by a recipe or for another class, and its analysis now converts other "
        "norms; pass plan= with the plan to follow"
    )


def _unmarked(config: Any) -> Any:
    config = copy.deepcopy(config)
    getattr(config, "__dict__", {}).pop(MARKER, None)
    return config


def _require_frozen_scales(model: nn.Module, plan: Plan) -> None:
    """Raise ``UnsupportedModel`` if a LayerScale that is merged into its layer is trained.

    ``scale * (W x)`` with centred ``scale * W`` needs a new ``W`` for each new ``scale``, which the
    optimizer does not know of.
    """
    scales = {writer.scale.parameter for writer in plan.writers if writer.scale}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in scales and parameter.requires_grad:
            raise UnsupportedModel(
                f"{name}: is merged into the layer before it and set to ones, so it cannot be "
                "trained beside it; freeze it with requires_grad_(False)"
            )


def marker_in_training(model: Any, plan: Plan) -> dict[str, Any]:
    """The marker of ``plan`` as an entry for a config; it says that the model is trained.

    Its source is the checkpoint that training began from, if that is known.
    """
    before, config = marker_in(model), getattr(model, "config", None)
    start = before.source if before else getattr(config, "_name_or_path", "")
    revision = before.revision if before else getattr(config, "_commit_hash", None)
    return marker(plan, Source(start or "", Path(), revision), trained=True)


def recipe_in_training(model: Any, plan: Plan) -> str:
    """The text of the recipe for a checkpoint that ``model`` saves."""
    return recipe_text(plan, _unmarked(model.config))
