"""How far the outputs of a quantised model are from the original's in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, isinf, sqrt
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from enjoyln_cli.clock import Countdown, Progress, no_progress
from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.data_files import UserData
from enjoyln_cli.comparison.embedding import EMBEDDING, Embed, embedder
from enjoyln_cli.comparison.metrics import distances_of, largest, pool_distances, relative
from enjoyln_cli.comparison.output_meaning import (
    DECISIONS,
    KL,
    LOGITS,
    TOP1,
    Kind,
    Meaning,
    Sums,
    embedding_measures,
    in_same_order,
    meanings,
    means,
    results,
    sums,
)
from enjoyln_cli.comparison.run import Outputs, choose_outputs, encoded_once, run
from enjoyln_cli.comparison.text_scores import perplexity_of, text_loss
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.events import Event
from enjoyln_cli.models.outputs import match_names
from enjoyln_cli.quantisation.examples import Example, split
from enjoyln_cli.rewrite.opened_model import OpenedModel

Compute = Callable[[Batch], Outputs]
"""Runs a model on one batch; returns its outputs by name."""
ERROR = "error"
"""The relative error among the measures of an output."""
CHANCE = 0.2
"""The probability that a candidate is taken for better although its savings are chance."""
DIRECTIONS = 20_000


@dataclass(frozen=True)
class Differences:
    """Over all inputs. What a model does not have is ``None``."""

    error: float
    """``||a - b|| / ||b||`` of the worst output."""
    kl: float | None
    """Mean KL divergence from the original's logits, in nats: of the worst output, if all of them
    are logits."""
    top1: float | None
    """The fraction of positions with the original's answer, of the worst output that has any."""
    perplexity: float | None
    """Of the quantised model on a text."""
    costs: tuple[float, ...] = ()
    """For each input: the mean KL divergence of its logits, or its error without logits."""
    outputs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """For each output that is compared, its measures (see ``comparison.output_meaning``)."""

    @property
    def measures(self) -> dict[str, float]:
        """All measures of all outputs, by their names in a table."""
        many = len(self.outputs) > 1
        return {
            f"{name}: {measure}" if many else measure: value
            for name, measured in self.outputs.items()
            for measure, value in measured.items()
        }

    @property
    def cost(self) -> float:
        """The cost that candidates are compared by: the KL divergence, or else the error."""
        if not isfinite(self.error):
            return inf
        return self.error if self.kl is None else self.kl


def compared_outputs(outputs: Outputs, used: Sequence[str]) -> tuple[str, ...]:
    """The outputs to compare: a sentence embedding, or the results that the class is ``used`` for.

    ``used`` are names or patterns; empty for all outputs.
    """
    if EMBEDDING in outputs:
        return (EMBEDDING,)
    return results(sorted(match_names(used, outputs)) if used else list(outputs))


@dataclass(frozen=True)
class ExactOutputs:
    """What the original in float32 computes for some inputs."""

    meanings: Mapping[str, Meaning]
    """The outputs to compare, and what they mean."""
    examples: list[Example]
    outputs: list[Outputs]
    """One for each example."""
    embed: Embed | None = None
    """Adds the sentence embedding of a sentence-transformers pipeline to the outputs."""

    @property
    def names(self) -> tuple[str, ...]:
        """The outputs to compare."""
        return tuple(self.meanings)


def differences(compute: Compute, exact: ExactOutputs) -> Differences:
    """Run ``compute`` on the examples and compare its outputs with the exact outputs."""
    distances, costs, loss, tokens = [], [], 0.0, 0
    found: dict[str, list[Sums]] = {name: [] for name in exact.names}
    embeddings: dict[str, list[torch.Tensor]] = {}
    for example, expected in zip(exact.examples, exact.outputs, strict=True):
        got = with_embedding(compute(example.batch), example.batch, exact.embed)
        got = {name: got[name] for name in exact.names if name in got}
        got = in_same_order(exact.meanings, got, expected)
        distances.append(distances_of(got, {name: expected[name] for name in exact.names}))
        error = largest(relative(distances[-1]))
        for name, meaning in exact.meanings.items():
            if name in got:
                found[name].append(sums(meaning, got[name], expected[name]))
                if meaning.kind is Kind.EMBEDDING and got[name].shape == expected[name].shape:
                    embeddings.setdefault(name, []).append(got[name])
        apart = _worst_divergence([means(each[-1:]) for each in found.values()])
        costs.append(error if apart is None or not isfinite(error) else apart)
        if example.predicted is not None:
            more, count = text_loss(got[LOGITS], example.predicted)
            loss, tokens = loss + more, tokens + count
    errors = relative(pool_distances(distances))
    measured = {name: means(each) for name, each in found.items()}
    for name, rows in embeddings.items():
        if len(rows) == len(exact.outputs):
            measured[name] |= embedding_measures(rows, [each[name] for each in exact.outputs])
    answers = [each[of] for each in measured.values() for of in (TOP1, DECISIONS) if of in each]
    return Differences(
        error=largest(errors),
        kl=_worst_divergence(measured.values()),
        top1=min(answers, default=None),
        perplexity=perplexity_of(loss, tokens) if tokens else None,
        costs=tuple(costs),
        outputs={name: {**each, ERROR: errors[name]} for name, each in measured.items()},
    )


def _worst_divergence(measured: Iterable[Mapping[str, float]]) -> float | None:
    """The largest KL divergence of an output; ``None`` if an output has none."""
    found = [each.get(KL) for each in measured]
    known = [each for each in found if each is not None]
    return max(known) if known and len(known) == len(found) else None


def clearly_cheaper(others: Sequence[Differences], original: Differences) -> list[bool]:
    """Whether each of ``others`` costs less than the original by more than chance explains.

    What counts is the logarithm of the ratio of both costs, for each input. If the savings were
    chance, this vector would point in any direction. So its angle to the vector of ones is compared
    with its angles to random directions. For each direction, the smallest angle to any of
    ``others`` counts, so that many candidates have no better chance than a single candidate. This
    is the rotation test of Langsrud (2005), exact for normally distributed logarithms; for a single
    candidate it is the t test of paired differences. Any finite cost is less than a cost that is
    not finite.
    """
    if not others:
        return []
    logs = torch.tensor([other.costs for other in (original, *others)], dtype=torch.float64)
    limits = torch.finfo(logs.dtype)
    logs = logs.nan_to_num(nan=limits.max).clamp(min=limits.tiny).log()
    savings = F.normalize(logs[0] - logs[1:], dim=1)
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(DIRECTIONS, logs.shape[1], generator=generator, dtype=torch.float64)
    by_chance = (savings @ F.normalize(directions, dim=1).T).amax(0)
    needed = float(by_chance.quantile(1 - CHANCE))
    cosines = (savings.sum(1) / sqrt(logs.shape[1])).tolist()
    return [
        other.cost < original.cost and (cosine > needed or isinf(original.cost))
        for other, cosine in zip(others, cosines, strict=True)
    ]


def exact_halves(
    model: Any,
    opened: OpenedModel,
    data: UserData,
    most: int,
    used: Sequence[str],
    folder: Path,
    event: Event,
    on_progress: Progress,
) -> tuple[ExactOutputs, ExactOutputs]:
    """Run the original on both halves of the data: calibration data and held-out data.

    ``model`` is the original of ``opened`` in float32. Each half has at most ``most`` inputs.
    ``used`` are the outputs that the class is used for; a sentence-transformers pipeline is used
    for its sentence embeddings. Outputs are stored in files in ``folder``. Raises
    ``UnsupportedModel`` if there are too few inputs, or if the model cannot run on them.
    """
    embed = embedder(opened.source, event)
    place, trusted = opened.source.path, opened.trust_remote_code
    with encoded_once(model):
        first, second = split(
            model, place, data, most, trusted, on_progress=on_progress, event=event
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
    """Run the original on each example; the outputs ``names`` are stored in files in ``folder``.

    Raises ``UnsupportedModel`` for an input on which the original returns NaN: any other model that
    returns NaN there would count as equal. Outputs that are 0 for all inputs have no relative error
    either.
    """
    countdown, found = Countdown(len(examples), on_progress), []
    for example in examples:
        (exact,) = run(model, [example.batch], folder)
        found.append(with_embedding(exact, example.batch, embed))
        countdown.count()
    outputs = choose_outputs(found, names)
    for example, exact in zip(examples, outputs, strict=True):
        if wrong := [name for name, value in exact.items() if value.isnan().any()]:
            raise UnsupportedModel(
                f"the original in float32 returns NaN in {', '.join(wrong)} for {example.name}; "
                "leave it out"
            )
    if not any(value.any() for exact in outputs for value in exact.values()):
        raise UnsupportedModel(
            f"the original returns nothing but zeros in {', '.join(outputs[0])}, so no error "
            "can be measured"
        )
    return ExactOutputs(meanings(model, outputs[0], examples[0].batch), examples, outputs, embed)


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
