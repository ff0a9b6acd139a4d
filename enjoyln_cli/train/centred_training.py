"""Train a model in LayerNorm and use it in RMSNorm: centre its weights whenever they are used.

In training mode every norm computes LayerNorm, so the loss depends on ``P W`` alone: a mean over
the outputs of a centred weight ``W`` changes nothing. Then its gradient has zero mean as well, and
``W <- P W`` between two steps is a change of gauge: the loss, the gradient and every later ``P W``
stay the same, while the weights become those of a folded model. (In Enjoy-LN, Proposition 2,
``P W`` is computed in each step instead.) So the weights need to be centred only when somebody
reads them as such:

    a call in eval mode     the check before it centres them, and the norms run RMSNorm
    ``state_dict()``        every way to save reads it first
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from enjoyln_cli.checkpoint.config import MARKER
from enjoyln_cli.checkpoint.marker import marker_of_plan
from enjoyln_cli.checkpoint.result_files import PLAN_FILE, RECIPE_FILE
from enjoyln_cli.errors import NotCentred, UnsupportedModel
from enjoyln_cli.fs.whole_file import write_whole
from enjoyln_cli.models.holders import models_in
from enjoyln_cli.models.sharding import sharded_modules
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.recipe.stored_plan import plan_text
from enjoyln_cli.runtime.entries import entry_of
from enjoyln_cli.runtime.install import run_folded
from enjoyln_cli.runtime.loading import marker_of, watched_weights
from enjoyln_cli.runtime.weight_check import (
    centre_watched,
    require_unquantised,
    tensor_at,
    with_adapters,
)
from enjoyln_cli.runtime.weight_watch import KeepCentred, unedited, weight_checks
from enjoyln_cli.train.optimizers import warn_of_dependence
from enjoyln_cli.train.trained_fold import (
    marker_in_training,
    plan_in_training,
    recipe_in_training,
)


class CentredTraining:
    """A model in training whose weights are centred when they are used; see ``keep_centred``."""

    def __init__(self, models: list[nn.Module], handles: list[Any]) -> None:
        self.models = models
        self._handles = handles

    def centre(self) -> None:
        """Centre the weights now. Raises ``NotCentred`` if a model was edited since the start."""
        for model in self.models:
            _centre(model)

    def remove(self) -> None:
        """Stop: the weights are centred once more, and further training leaves them alone."""
        self.centre()
        for handle in self._handles:
            handle.remove()
        for model in self.models:
            vars(model).pop("save_pretrained", None)
            for _, check in weight_checks(model):
                check.recentres = False


def keep_centred(
    model: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    plan: Plan | None = None,
) -> CentredTraining:
    """Keep ``model`` folded while it is trained, in place.

    In training mode it computes LayerNorm, as without this function. In eval mode it runs RMSNorm.
    Its weights are centred before a call in eval mode, before ``state_dict`` (and so before every
    save). A checkpoint that ``model.save_pretrained`` writes is a folded checkpoint: its config has
    the marker, its recipe is in ``enjoyln_recipe.yaml``, and ``enjoyln verify`` compares RMSNorm
    with LayerNorm on its weights. Names, the state dict, and the optimizer with its state stay as
    they are.

    * ``model``: a folded model, or a LayerNorm model of transformers that is folded now (in
      seconds; its function stays the same), or an object that holds such models, as for
      ``optimize``. For any other module pass its ``plan``.
    * ``optimizer``: if it is passed, there is a warning where what it learns depends on the mean of
      the weights.
    * ``plan``: the plan to follow; by default the one that ``analyze`` proves for the model.

    Call ``centre()`` of the result to centre at another time, and ``remove()`` to stop.

    What is learned does not change, up to rounding, under every optimizer that sees the weights
    through their gradients alone or changes them linearly: SGD (with momentum and weight decay),
    AdamW and other optimizers with decoupled weight decay, clipping of gradients, any schedule.
    There is a change, and a warning, if an optimizer mixes weights with gradients in another way:
    Adam with coupled weight decay (which penalises the mean as well), or steps whose length depends
    on the size of weights (Adafactor, LAMB, LARS). It also changes where a dropout with p > 0
    stands between a centred weight and its norm: dropout removes features of the mean, so that it
    is no constant any more. Then the model still computes the same function before and after it is
    centred, but the noise of later training steps differs.

    Raises ``UnsupportedModel`` for what cannot be trained so (hidden units of ``--widen-mlp``, a
    LayerScale that is trained, weights that DeepSpeed or FSDP has split before this call, code that
    only training runs and that reads a residual stream without a norm: see ``train.free_means``),
    ``TraceFailed`` if a call cannot be traced in training mode, ``NothingToFold`` if no norm
    becomes RMSNorm, and ``NotCentred`` if the model was edited. If it is edited later (a forward
    hook on a block), calls in eval mode compute LayerNorm, and saves have weights that are not
    centred, both with a warning: training goes on.
    """
    models = models_in(model)
    handles = [handle for inner in models for handle in _start(inner, plan)]
    if optimizer is not None:
        warn_of_dependence(optimizer, centred_parameters(models))
    return CentredTraining(models, handles)


def centred_parameters(models: list[nn.Module]) -> list[torch.Tensor]:
    """The parameters of ``models`` that are centred."""
    return [
        tensor_at(model, weight.parameter)
        for model in models
        for weight in with_adapters(model, _check_of(model).watch).weights
    ]


def _start(model: Any, plan: Plan | None) -> list[Any]:
    """Fold ``model`` in memory and centre its weights from now on; the handles of its hooks."""
    _require_whole(model)
    plan = plan_in_training(model, plan)
    entry = marker_in_training(model, plan)
    marker = marker_of_plan(plan, trained=True)
    watch = with_adapters(model, watched_weights(model, marker))
    require_unquantised(model, watch.tensors)
    if any(weight.scale for weight in watch.weights):
        centre_watched(model, watch, merge_scales=True)
    if hasattr(getattr(model, "config", None), "to_dict"):
        setattr(model.config, MARKER, entry)
        marker = marker_of(model)
        model.save_pretrained = SaveWithRecipe(model, plan)
    run_folded(model, marker, unedited(model))
    for _, check in weight_checks(model):
        check.recentres = True
    _centre(model)
    return [model.register_state_dict_pre_hook(_centre_before_reading)]


def _require_whole(model: nn.Module) -> None:
    """Raise ``UnsupportedModel`` if another library holds parts of the weights elsewhere."""
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise UnsupportedModel(
                "the first version of FSDP flattens weights, so that they cannot be centred; use "
                "fully_shard (fsdp_version=2)"
            )
    if sharded_modules(model):
        raise UnsupportedModel(
            "the weights are split by fully_shard already; call keep_centred before it"
        )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise UnsupportedModel(
                f"{name}: is split by DeepSpeed (ZeRO-3), so that it cannot be centred; use ZeRO-2 "
                "or fully_shard"
            )
        if parameter.is_meta:
            raise NotCentred(f"{name}: its values are not in memory; load the model first")


def _check_of(model: nn.Module) -> KeepCentred:
    check = getattr(entry_of(model), "check", None)
    if not isinstance(check, KeepCentred):
        raise NotCentred(f"{type(model).__name__}: is no longer folded; call keep_centred again")
    return check


def _centre(model: nn.Module) -> None:
    _check_of(model).centre(model)


def _centre_before_reading(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    """A hook of ``state_dict``. It holds no model, so that it is right in copies of the model."""
    centre_or_warn(model)


def centre_or_warn(model: nn.Module) -> None:
    """Centre the weights of ``model``; warn if it was edited, so that training can go on."""
    try:
        _centre(model)
    except NotCentred as error:
        warnings.warn(f"the weights are left as they are, not centred: {error}", stacklevel=3)


@dataclass(frozen=True, eq=False)
class SaveWithRecipe:
    """``save_pretrained`` of a model, which puts the recipe beside the weights.

    It is an attribute of the model. Copies and pickles of the model have their own.
    """

    model: Any
    plan: Plan

    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_main_process", True):
            folder = Path(save_directory)
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / RECIPE_FILE, recipe_in_training(self.model, self.plan))
            write_whole(folder / PLAN_FILE, plan_text(self.plan))
        return type(self.model).save_pretrained(self.model, save_directory, *args, **kwargs)
