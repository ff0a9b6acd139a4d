"""How far the outputs of a quantised model are from those of the original in float32, and which
layers cost most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, isinf, sqrt
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from enjoyln_cli.checkpoint.reader import Subject
from enjoyln_cli.clock import Countdown, Progress, no_progress
from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.data_files import UserData
from enjoyln_cli.comparison.embedding import EMBEDDING, embedder
from enjoyln_cli.comparison.metrics import distances_of, largest, pool_distances, relative
from enjoyln_cli.comparison.run import choose_outputs, run
from enjoyln_cli.comparison.simulated_rounding import Scheme, linear_layers, simulated
from enjoyln_cli.comparison.text_scores import divergence, perplexity_of, text_loss
from enjoyln_cli.events import Event
from enjoyln_cli.models.outputs import match_names
from enjoyln_cli.quantisation.examples import Example, split
from enjoyln_cli.quantisation.schemes import QuantisationScheme

Outputs = dict[str, torch.Tensor]
Compute = Callable[[Batch], Outputs]
"""Runs a model on one batch; returns its outputs by name."""
Embed = Callable[[Outputs, Batch], Outputs]
LOGITS = "logits"
TRIED_ON = 2
"""Inputs that each layer is rounded on: the order of layers is clear with few."""
CHANCE = 0.2
"""The probability that another form is taken for better although its savings are chance."""
DIRECTIONS = 20_000


@dataclass(frozen=True)
class Differences:
    """Over all inputs. What a model does not have is ``None``."""

    error: float
    """``||a - b|| / ||b||`` of the logits, or of the worst output of a model without logits."""
    kl: float | None
    """Mean KL divergence of the logits from the original's, in nats."""
    top1: float | None
    """The fraction of positions in which the largest logit is the original's."""
    perplexity: float | None
    """Of the quantised model on a text."""
    costs: tuple[float, ...] = ()
    """For each input: the mean KL divergence of its logits, or its error without logits."""

    @property
    def cost(self) -> float:
        """What candidates are compared by: the KL divergence, or the error without one."""
        if not isfinite(self.error):
            return inf
        return self.error if self.kl is None else self.kl


def compared_outputs(outputs: Outputs, used: Sequence[str]) -> tuple[str, ...]:
    """The outputs to compare: logits, a sentence embedding, or what the class is ``used`` for.

    ``used`` are names or patterns; empty for all outputs.
    """
    for name in (LOGITS, EMBEDDING):
        if name in outputs:
            return (name,)
    return tuple(sorted(match_names(used, outputs)) if used else outputs)


@dataclass(frozen=True)
class ExactOutputs:
    """What the original in float32 computes for some inputs."""

    names: tuple[str, ...]
    """The outputs to compare."""
    examples: list[Example]
    outputs: list[Outputs]
    """One for each example."""
    embed: Embed | None = None
    """Adds the sentence embedding of a sentence-transformers pipeline to the outputs."""


def differences(compute: Compute, exact: ExactOutputs) -> Differences:
    """Run ``compute`` on the examples and compare its outputs with the exact ones."""
    names, distances, costs, loss, tokens = exact.names, [], [], 0.0, 0
    kl = top1 = positions = 0.0
    for example, expected in zip(exact.examples, exact.outputs, strict=True):
        got = with_embedding(compute(example.batch), example.batch, exact.embed)
        distances.append(
            distances_of({n: got[n] for n in names if n in got}, {n: expected[n] for n in names})
        )
        apart, agreed = divergence([got], [expected])
        error = largest(relative(distances[-1]))
        costs.append(error if apart is None or not isfinite(error) else apart)
        if apart is not None and agreed is not None:
            size = expected[LOGITS][..., 0].numel()
            kl, top1, positions = kl + size * apart, top1 + size * agreed, positions + size
        if example.predicted is not None:
            more, count = text_loss(got[LOGITS], example.predicted)
            loss, tokens = loss + more, tokens + count
    return Differences(
        error=largest(relative(pool_distances(distances))),
        kl=kl / positions if positions else None,
        top1=top1 / positions if positions else None,
        perplexity=perplexity_of(loss, tokens) if tokens else None,
        costs=tuple(costs),
    )


def clearly_cheaper(others: Sequence[Differences], original: Differences) -> list[bool]:
    """Whether each of ``others`` costs less than the original by more than chance explains.

    What counts is the logarithm of the ratio of both costs, for each input. If the savings were
    chance, this vector would point in any direction. So its angle to the vector of ones is compared
    with its angles to random directions. For each direction, the smallest angle to any of
    ``others`` counts, so that many forms have no better chance than one. This is the rotation test
    of Langsrud (2005), exact for normally distributed logarithms; for a single form it is the t
    test of paired differences. Any finite cost is less than one that is not finite.
    """
    if not others:
        return []
    logs = torch.tensor([form.costs for form in (original, *others)], dtype=torch.float64)
    limits = torch.finfo(logs.dtype)
    logs = logs.nan_to_num(nan=limits.max).clamp(min=limits.tiny).log()
    savings = F.normalize(logs[0] - logs[1:], dim=1)
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(DIRECTIONS, logs.shape[1], generator=generator, dtype=torch.float64)
    by_chance = (savings @ F.normalize(directions, dim=1).T).amax(0)
    needed = float(by_chance.quantile(1 - CHANCE))
    cosines = (savings.sum(1) / sqrt(logs.shape[1])).tolist()
    return [
        form.cost < original.cost and (cosine > needed or isinf(original.cost))
        for form, cosine in zip(others, cosines, strict=True)
    ]


def exact_halves(
    model: Any,
    subject: Subject,
    data: UserData,
    most: int,
    used: Sequence[str],
    folder: Path,
    event: Event,
    on_progress: Progress,
) -> tuple[ExactOutputs, ExactOutputs]:
    """Run the original on both halves of the data: the one to choose by, the one to measure on.

    ``model`` is the original of ``subject`` in float32. Each half has at most ``most`` inputs.
    ``used`` are the outputs that the class is used for; those of a sentence-transformers pipeline
    are its sentence embeddings. Outputs are stored in files in ``folder``. Raises
    ``UnsupportedModel`` if there are too few inputs, or if the model cannot run on them.
    """
    embed = embedder(subject.source, event)
    first, second = split(
        model, subject.source.path, data, most, subject.trust_remote_code, on_progress=on_progress
    )
    batch = first[0].batch
    names = compared_outputs(with_embedding(run(model, [batch])[0], batch, embed), used)
    exact = exact_outputs(model, [*first, *second], names, folder, embed, on_progress)
    at = len(first)
    return (
        replace(exact, examples=first, outputs=exact.outputs[:at]),
        replace(exact, examples=second, outputs=exact.outputs[at:]),
    )


def exact_outputs(
    model: Any,
    examples: list[Example],
    names: tuple[str, ...],
    folder: Path,
    embed: Embed | None = None,
    on_progress: Progress = no_progress,
) -> ExactOutputs:
    """Run the original on each example; the outputs ``names`` are stored in files in ``folder``."""
    countdown, outputs = Countdown(len(examples), on_progress), []
    for example in examples:
        (exact,) = run(model, [example.batch], folder)
        outputs.append(with_embedding(exact, example.batch, embed))
        countdown.count()
    return ExactOutputs(names, examples, choose_outputs(outputs, names), embed)


def with_embedding(outputs: Outputs, batch: Batch, embed: Embed | None) -> Outputs:
    """The outputs of a model for a batch, and what ``embed`` adds to them."""
    return embed(outputs, batch) if embed else outputs


def perplexity_in(exact: ExactOutputs) -> float | None:
    """The perplexity of the original on a text; ``None`` if the examples are not scored."""
    scores = [
        text_loss(output[LOGITS], example.predicted)
        for output, example in zip(exact.outputs, exact.examples, strict=True)
        if example.predicted is not None
    ]
    if not scores:
        return None
    return perplexity_of(sum(loss for loss, _ in scores), sum(count for _, count in scores))


def costly_layers(
    model: Any, scheme: QuantisationScheme, exact: ExactOutputs, on_progress: Progress
) -> list[str]:
    """The linear layers of ``model`` by path, the costliest first.

    Each is rounded alone (simulated: one scale for each output of a weight, and for all inputs).
    """
    rounding = Scheme(scheme.weight_bits, scheme.input_bits, per_token=False)
    few = replace(exact, examples=exact.examples[:TRIED_ON], outputs=exact.outputs[:TRIED_ON])
    layers, costs = list(linear_layers(model)), {}
    countdown = Countdown(len(layers), on_progress)
    for layer in layers:
        with simulated(model, rounding, only=layer):
            costs[layer] = differences(lambda batch: run(model, [batch])[0], few).cost
        countdown.count()
    return sorted(costs, key=lambda layer: -costs[layer])
