"""The experiments of ``paper_training.py`` that compare runs step by step.

equality     Proposition 2 of Enjoy-LN: CBWC follows LayerNorm's trajectory (appendix H.4.1)
transformer  the same for a transformer without dropout, and with dropout that is centred behind
moving       weights and optimizer state move between LayerNorm and CBWC in the middle of a run
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from train_tiny import Batch
from training_runs import (
    CBWC,
    LAYER_NORM,
    METHODS,
    TRANSFORMER,
    Method,
    largest_difference,
    load_weights,
    move_state,
    reverse_rows,
    score,
    share_beyond,
    train,
    with_norms,
)
from training_sizes import Sizes, Tell, tell_of_part
from training_tasks import Task, digits_epoch, digits_task, language_task

from enjoyln_cli.train import merge

ROUNDING = "LayerNorm, rows in reverse"
"""The control: LayerNorm again, with the rows of each batch in reverse order. In exact arithmetic
it is the same run, so what it differs by is rounding."""
CENTRED_DROPOUT = "CBWC, centred behind dropout"
CASES: tuple[tuple[str, type[nn.Module], torch.dtype], ...] = (
    ("float64", nn.ReLU, torch.float64),
    ("float32", nn.ReLU, torch.float32),
    ("float32", nn.GELU, torch.float32),
)
"""ReLU is the paper's. It has a kink, where rounding decides about gradients; GELU has none."""
BOUNDS = {"float32": 1e-5, "float64": 1e-11}
"""The paper's bound for weights (appendix H.4.1), and ours in float64."""


@dataclass
class Together:
    """Runs on the same batches."""

    losses: dict[str, list[float]]
    weights: dict[str, list[float]]
    """After each part of the run: the largest difference from the weights of the first model."""

    def loss_differences(self, name: str) -> list[float]:
        """The difference from the loss of the first model in each step."""
        first = next(iter(self.losses.values()))
        return _distances(first, self.losses[name])


def run_together(
    models: Mapping[str, Any],
    batches: Sequence[Batch],
    method: Method,
    every: int,
    tell: Tell = lambda share, text: None,
) -> Together:
    """Train each model on the same batches with the same dropout masks, ``every`` steps at a time.

    The model called ``ROUNDING`` gets the rows of each batch in reverse order.
    """
    optimizers = {name: method.optimizer(model.parameters()) for name, model in models.items()}
    found = Together({name: [] for name in models}, {name: [] for name in models})
    first = next(iter(models.values()))
    for begin in range(0, len(batches), every):
        part = batches[begin : begin + every]
        for name, model in models.items():
            torch.manual_seed(begin)
            found.losses[name] += train(
                model,
                reverse_rows(part) if name == ROUNDING else iter(part),
                len(part),
                method,
                optimizer=optimizers[name],
                begin=begin,
                of=len(batches),
            )
        for name, model in models.items():
            found.weights[name].append(largest_difference(first, model)[0])
        tell((begin + len(part)) / len(batches), f"step {begin + len(part)}")
    return found


def equality(sizes: Sizes, tell: Tell) -> dict[str, Any]:
    """An MLP on the digits with each of ``METHODS``, in each of ``CASES``."""
    epoch = digits_epoch(sizes.made_up)
    rows = []
    total = len(sizes.methods) * len(CASES)
    for method in sizes.methods:
        for precision, activation, dtype in CASES:
            task = digits_task(sizes.depth, sizes.width, dtype, sizes.made_up, activation)
            models = {
                LAYER_NORM: task.model(0, LAYER_NORM),
                CBWC: task.model(0, CBWC),
                ROUNDING: task.model(0, LAYER_NORM),
            }
            batches = task.draw(1, sizes.epochs * epoch)
            found = run_together(models, batches, method, epoch)
            compared, bound = (CBWC, ROUNDING), BOUNDS[precision]
            rows.append({
                "optimizer": method.name, "dtype": precision, "bound": bound,
                "activation": activation.__name__,
                "loss": {name: max(found.loss_differences(name)) for name in compared},
                "weights": {name: found.weights[name] for name in compared},
                "beyond": {name: share_beyond(models[LAYER_NORM], models[name], bound)
                           for name in compared},
                "first_loss": found.losses[LAYER_NORM][0],
                "last_loss": found.losses[LAYER_NORM][-1],
                "accuracy": score(models[CBWC], task.unseen())["accuracy"],
            })  # fmt: skip
            tell(len(rows) / total, f"{method.name}, {activation.__name__}, {precision}")
    return {"epochs": sizes.epochs, "steps": sizes.epochs * epoch, "depth": sizes.depth,
            "width": sizes.width, "rows": rows}  # fmt: skip


def transformer(sizes: Sizes, tell: Tell) -> dict[str, Any]:
    """A language model in float64: without dropout, and with dropout that is centred behind."""
    found: dict[str, Any] = {"steps": sizes.steps, "method": TRANSFORMER.name, "cases": {}}
    cases: dict[str, tuple[float, dict[str, dict[str, Any]]]] = {
        "without dropout": (0.0, {LAYER_NORM: {}, CBWC: {}, ROUNDING: {}}),
        "dropout 0.1": (0.1, {LAYER_NORM: {}, CENTRED_DROPOUT: {"dropout": "centre"}}),
    }
    for number, (case, (dropout, variants)) in enumerate(cases.items()):
        task = language_task(sizes.text, dropout, torch.float64)
        models = {
            name: task.model(0, {ROUNDING: LAYER_NORM, CENTRED_DROPOUT: CBWC}.get(name, name),
                        **options)
            for name, options in variants.items()
        }  # fmt: skip
        batches = task.draw(1, sizes.steps)
        tell_case = tell_of_part(tell, number, len(cases), case)
        together = run_together(models, batches, TRANSFORMER, sizes.every, tell_case)
        found["cases"][case] = {
            "curves": together.losses,
            "distances": {name: together.loss_differences(name) for name in models},
        }
    return found


def moving(sizes: Sizes, tell: Tell) -> dict[str, Any]:
    """LayerNorm, then CBWC, then LayerNorm again, a third of the steps each; against LayerNorm.

    Once the state goes by name into a new model and a new optimizer; ``W`` itself goes on. Once the
    model is converted in place, by ``reparametrize`` and ``merge``; then ``P W`` goes on.
    """
    task = language_task(sizes.text, 0.0, torch.float64)
    third = sizes.moving_steps // 3
    batches = task.draw(1, 3 * third)
    rows = []
    for number, method in enumerate((METHODS[1], METHODS[2], METHODS[3])):
        stays = task.model(0, LAYER_NORM)
        expected = train(stays, iter(batches), len(batches), method)
        tell((number + 0.3) / 3, f"{method.name}: LayerNorm")
        loaded, losses = _moved_by_loading(task, batches, third, method)
        tell((number + 0.7) / 3, f"{method.name}: loaded twice")
        in_place = _moved_in_place(task, batches, third, method)
        rows.append({
            "optimizer": method.name,
            "loss": {
                "loaded": max(_distances(losses, expected)),
                "in place": max(_distances(in_place, expected)),
            },
            "weights": largest_difference(stays, loaded)[0],
            "of": largest_difference(stays, loaded)[1],
            "first_loss": expected[0], "last_loss": expected[-1],
        })  # fmt: skip
        tell((number + 1) / 3, f"{method.name}: converted twice")
    return {"steps": 3 * third, "rows": rows}


def _moved_by_loading(
    task: Task, batches: Sequence[Batch], third: int, method: Method
) -> tuple[Any, list[float]]:
    model, optimizer, losses = task.model(0, LAYER_NORM), None, []
    for part, variant in enumerate((LAYER_NORM, CBWC, LAYER_NORM)):
        previous, moved_from = model, optimizer
        if part:
            model = task.model(7, variant)  # other weights, so that nothing is right by luck
            load_weights(previous, model)
        optimizer = method.optimizer(model.parameters())
        if moved_from is not None:
            move_state(previous, moved_from, model, optimizer)
        losses += _train_part(model, batches, part, third, method, optimizer)
    return model, losses


def _moved_in_place(
    task: Task, batches: Sequence[Batch], third: int, method: Method
) -> list[float]:
    model = task.model(0, LAYER_NORM)
    optimizer = method.optimizer(model.parameters())
    losses = _train_part(model, batches, 0, third, method, optimizer)
    with_norms(model, CBWC, batches[0], task.plans.get((CBWC,)))
    losses += _train_part(model, batches, 1, third, method, optimizer)
    merge(model)
    return losses + _train_part(model, batches, 2, third, method, optimizer)


def _train_part(
    model: Any, batches: Sequence[Batch], part: int, third: int, method: Method, optimizer: Any
) -> list[float]:
    begin = part * third
    return train(model, iter(batches[begin : begin + third]), third, method, optimizer=optimizer,
                 begin=begin, of=3 * third)  # fmt: skip


def _distances(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
