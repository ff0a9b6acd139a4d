"""``EnjoyLNCallback``: a model that stays folded in the ``Trainer`` of transformers."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from enjoyln_cli.models.holders import models_in
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.train.centred_training import (
    CentredTraining,
    centre_or_warn,
    centred_parameters,
    keep_centred,
)
from enjoyln_cli.train.optimizers import warn_of_dependence


class EnjoyLNCallback(TrainerCallback):
    """Keeps the model of a ``Trainer`` folded while it is trained; see ``keep_centred``.

    Pass it in ``callbacks``. The model may be a folded one, or a LayerNorm model, which is folded
    in memory first. It is trained in LayerNorm, as without this callback. Its weights are centred
    before each evaluation, before each checkpoint and at the end, in all processes at the same
    steps. Evaluation and generation run RMSNorm, and every checkpoint is a folded one. Resuming
    from a checkpoint goes on as if there had been no stop.

    Raises as ``keep_centred`` does, when the ``Trainer`` is made (or when training begins, if the
    callback is added later).
    """

    def __init__(self, plan: Plan | None = None) -> None:
        self.plan = plan
        self._training: CentredTraining | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fold the model."""
        self._start(kwargs["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fold the model, if that is another one or not done yet, and judge the optimizer."""
        training = self._start(kwargs["model"])
        if (optimizer := kwargs.get("optimizer")) is not None:
            warn_of_dependence(optimizer, centred_parameters(training.models))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Centre the weights in every process, if they are about to be used in one."""
        if control.should_evaluate or control.should_save:
            self._centre()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Centre the weights for whatever comes after training."""
        self._centre()

    def _centre(self) -> None:
        for model in self._training.models if self._training else ():
            centre_or_warn(model)

    def _start(self, model: nn.Module) -> CentredTraining:
        models = models_in(model)
        before = self._training.models if self._training else []
        if self._training is None or [*map(id, models)] != [*map(id, before)]:
            self._training = keep_centred(model, plan=self.plan)
        return self._training
