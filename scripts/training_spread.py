"""The experiments of ``paper_training.py`` that compare results over several seeds.

dropout      LayerNorm, RMSNorm and CBWC with dropout: language model, classification (5.3)
fine_tuning  a trained GPT-2 in the three ways of Table 2 (5.4)
norms        norms of the inputs of linear layers at three depths (5.1, appendix F)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from train_tiny import Batch
from training_runs import (
    CBWC,
    CONVERTED,
    LAYER_NORM,
    METHODS,
    RMS_NORM,
    TRANSFORMER,
    Method,
    score,
    train,
)
from training_sizes import Sizes, Tell, tell_of_part
from training_tasks import (
    Task,
    classification_task,
    digits_epoch,
    digits_task,
    fine_tuning_task,
    language_task,
)


def over_seeds(
    task: Task,
    variants: Mapping[str, dict[str, Any]],
    method: Method,
    sizes: Sizes,
    tell: Tell,
) -> dict[str, Any]:
    """Train with each variant and seed. Curves have one point for every ``sizes.every`` steps."""
    points = range(0, sizes.dropout_steps, sizes.every)
    found: dict[str, Any] = {
        "steps": sizes.dropout_steps,
        "every": sizes.every,
        "method": method.name,
        "variants": {name: {"train": [], "test": [], "start": []} for name in variants},
    }
    unseen = task.unseen()
    runs = len(variants) * sizes.seeds
    for seed in range(sizes.seeds):
        for name, options in variants.items():
            model = task.model(seed, name, **options)
            into = found["variants"][name]
            into["start"].append(score(model, unseen))
            torch.manual_seed(1000 + seed)
            optimizer = method.optimizer(model.parameters())
            batches = task.batches()
            trained, tested = [], []
            for begin in points:
                count = min(sizes.every, sizes.dropout_steps - begin)
                losses = train(model, batches, count, method, optimizer=optimizer, begin=begin,
                               of=sizes.dropout_steps)  # fmt: skip
                trained.append(statistics.fmean(losses))
                tested.append(score(model, unseen))
            into["train"].append(trained)
            into["test"].append(tested)
            done = seed * len(variants) + list(variants).index(name) + 1
            tell(done / runs, f"{name}, seed {seed}: {tested[-1]['loss']:.3f}")
    return found


APPROXIMATE: dict[str, dict[str, Any]] = {
    LAYER_NORM: {}, RMS_NORM: {}, CBWC: {"approximate": True}
}  # fmt: skip


def dropout(sizes: Sizes, tell: Tell) -> dict[str, Any]:
    """A language model and a text classification, with dropout 0.1."""
    tasks = {
        "language model": language_task(sizes.text, 0.1),
        "classification": classification_task(sizes.classification, 0.1),
    }
    found = {}
    for number, (name, task) in enumerate(tasks.items()):
        tell_task = tell_of_part(tell, number, len(tasks), name)
        found[name] = over_seeds(task, APPROXIMATE, TRANSFORMER, sizes, tell_task)
    return found


def fine_tuning(sizes: Sizes, tell: Tell) -> dict[str, Any]:
    """The trained GPT-2 of the tests, with dropout 0.1."""
    variants = {LAYER_NORM: {}, CONVERTED: {}, CBWC: {"approximate": True}}
    method = replace(TRANSFORMER, optimizer=partial(TRANSFORMER.optimizer, lr=5e-4))
    return over_seeds(fine_tuning_task(sizes.fine_tuning, 0.1), variants, method, sizes, tell)


@torch.no_grad()
def input_norms(model: nn.Module, batches: Sequence[Batch]) -> list[float]:
    """For each linear layer the mean norm of its input, over all rows."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    sums, rows = [0.0] * len(layers), sum(len(batch["labels"]) for batch in batches)

    def hook(number: int) -> Callable[[Any, Any], None]:
        def add(module: Any, args: Any) -> None:
            sums[number] += float(args[0].norm(dim=-1).sum())

        return add

    hooks = [layer.register_forward_pre_hook(hook(n)) for n, layer in enumerate(layers)]
    score(model, batches)
    for one in hooks:
        one.remove()
    return [value / rows for value in sums]


def norms(sizes: Sizes, tell: Tell) -> dict[str, Any]:
    """MLPs on the digits with LayerNorm and with RMSNorm: norms after every epoch."""
    found: dict[str, Any] = {"epochs": sizes.norm_epochs, "width": sizes.width, "depths": {}}
    epoch = digits_epoch(sizes.made_up)
    whole = sum(sizes.depths) * sizes.norm_seeds * 2
    done = 0
    for depth in sizes.depths:
        into = found["depths"][str(depth)] = {
            name: {"last_layer": [], "all_layers": [], "accuracy": [], "train_loss": []}
            for name in (LAYER_NORM, RMS_NORM)
        }
        task = digits_task(depth, sizes.width, torch.float32, sizes.made_up)
        unseen = task.unseen()
        for seed in range(sizes.norm_seeds):
            for name, results in into.items():
                model = task.model(seed, name)
                torch.manual_seed(1000 + seed)
                batches: Iterator[Batch] = task.batches()
                method = METHODS[1]
                optimizer = method.optimizer(model.parameters())
                curve = [input_norms(model, unseen)[-1]]
                loss = 0.0
                for _ in range(sizes.norm_epochs):
                    loss = statistics.fmean(
                        train(model, batches, epoch, method, optimizer=optimizer)
                    )
                    curve.append(input_norms(model, unseen)[-1])
                results["last_layer"].append(curve)
                results["all_layers"].append(input_norms(model, unseen))
                results["accuracy"].append(score(model, unseen)["accuracy"])
                results["train_loss"].append(loss)
                done += depth
                tell(done / whole, f"depth {depth}, {name}, seed {seed}")
    return found
