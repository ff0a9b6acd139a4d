"""Run the original and the folded checkpoint, one model in memory at a time.

``planned_runs`` lists the runs. ``measure`` loads each model that the list needs, runs it, and
frees it. ``sampling`` chooses the inputs, and ``pace`` decides how many of them fit into the time.

If the compute dtype is float64, there is no more exact run to compare the original with. So its
error in float64 is estimated from its error in float32. To first order a rounding error is
``u * C``, where ``u`` is the unit roundoff of the dtype. ``C`` depends on the model, its inputs and
the order of its sums, and these are the same in both dtypes. So the error in float64 is
``eps64 / eps32`` times the error in float32. The reference run in float64 is rounded too,
independently, which gives a factor of ``sqrt(2)``. The error of a wrong fold is far above this.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import torch

from enjoyln_cli.analysis.stored_class import require_weights
from enjoyln_cli.checkpoint.marker import blame_marker
from enjoyln_cli.clock import duration
from enjoyln_cli.comparison.batches import Batch, length
from enjoyln_cli.comparison.data_files import UserData
from enjoyln_cli.comparison.metrics import (
    Distance,
    distances_of,
    largest,
    pool_distances,
    ratios,
    relative,
    worst,
)
from enjoyln_cli.comparison.output_meaning import divergence
from enjoyln_cli.comparison.pace import Pace
from enjoyln_cli.comparison.run import Outputs, cache_flag
from enjoyln_cli.comparison.sampling import Examples, Runner, choose
from enjoyln_cli.comparison.text_scores import perplexity
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.garbage import collections_of_new_objects
from enjoyln_cli.models.load import refusing
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.rewrite.stock_class import stock_model
from enjoyln_cli.runtime.call_guards import input_means
from enjoyln_cli.runtime.install import install
from enjoyln_cli.text import dtype_name
from enjoyln_cli.verification.checkpoint_pair import CheckpointPair
from enjoyln_cli.verification.nonfinite import nonfinite_outputs

FLOAT64_OVER_FLOAT32 = (
    math.sqrt(2) * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
)
"""The original's error in float64 divided by its error in float32, for a float64 reference."""


@dataclass(frozen=True)
class Run:
    """One pass over all inputs. Successive runs of the same weights and dtype share a model."""

    name: str
    weights: Literal["original", "folded"]
    dtype: torch.dtype
    norm: Literal["LayerNorm", "RMSNorm"]
    """With RMSNorm, the original's weights are edited in memory as the plan says."""


def planned_runs(dtype: torch.dtype, folds: bool) -> tuple[Run, ...]:
    """The runs of a check in the compute dtype ``dtype``; each is compared with the first.

    ``folds`` says whether any norm becomes RMSNorm. Otherwise the runtime is the stock class.
    """
    rounded = torch.float32 if dtype == torch.float64 else dtype
    stock = Run("stock", "folded", dtype, "LayerNorm")
    return (
        Run("exact", "original", torch.float64, "LayerNorm"),
        Run("identity", "original", torch.float64, "RMSNorm"),
        Run("original", "original", rounded, "LayerNorm"),
        *[stock] * folds,
        Run("runtime", "folded", dtype, "RMSNorm"),
        Run("storage", "folded", torch.float64, "RMSNorm"),
    )


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The results of running the models. Errors are relative, of the worst output."""

    identity_error: float
    storage_error: float
    runtime_error: float
    original_error: float
    stock_error: float
    ratio: float
    """Runtime error divided by original error, for the output in which it is the most telling."""
    chance: float
    """With the inputs that were run, ``ratio`` may by chance be this many times the true ratio."""
    stock_ratio: float
    """Stock error divided by original error."""
    stock_chance: float
    """The same as ``chance`` for ``stock_ratio``."""
    undecided_outputs: dict[str, float] = field(default_factory=dict)
    """Outputs with too few inputs to judge their rounding, with their ``chance``."""
    kl: float | None
    """Mean KL divergence of the folded logits from the original's, in nats."""
    top1_agreement: float | None
    """Fraction of positions at which both models have the same most likely class."""
    norm_input_mean: dict[str, float]
    """From each RMSNorm's path to its input's mean, relative to the input's rms; worst first."""
    perplexity: dict[str, float] | None
    """``original``, ``folded`` and the number of ``tokens``."""
    rows: int
    """Number of inputs that were run."""
    full_rows: int = 0
    """Number of inputs that an unlimited check would run."""
    own_rows: int = 0
    """Number of the inputs run that the user gave."""
    inputs_are: str = "inputs"
    """``images`` or ``inputs``."""


@dataclass
class Results:
    """What the runs so far have returned; dicts are by the name of the run."""

    distances: dict[str, list[Mapping[str, Distance]]] = field(default_factory=dict)
    """The distances from the exact outputs, for each batch."""
    outputs: dict[str, list[Outputs]] = field(default_factory=dict)
    """The exact outputs, and the outputs of both models in the compute dtype."""
    text: list[Batch] = field(default_factory=list)
    scores: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Their perplexities, with the number of tokens."""
    input_means: dict[str, float] = field(default_factory=dict)


@collections_of_new_objects()  # they free models, and need not pass over all of torch
def measure(
    pair: CheckpointPair, data: UserData, seed: int, pace: Pace
) -> tuple[Measurement, dict[str, str]]:
    """Load and run the models, one after the other, and measure their errors.

    Each run uses as many inputs as its share of the time allows; later runs never use more.
    Returns the errors, and the original's outputs that are not finite (see ``nonfinite_outputs``).
    Raises ``UnsupportedModel`` if the model does not run in float64 or in the compute dtype, and
    ``BadCheckpoint`` if the original does not store a weight that the model needs.
    """
    runs = planned_runs(pair.dtype, folds=bool(pair.marker.plan.folded))
    models = [list(group) for _, group in groupby(runs, lambda run: (run.weights, run.dtype))]
    pace.loads, pace.runs = len(models), len(runs)
    results, examples = Results(), None
    for group in models:
        examples = _run_model(pair, group, results, examples, data, seed, pace)
        gc.collect()  # the model may be part of reference cycles
    assert examples is not None
    exact = results.outputs["exact"]
    nonfinite = nonfinite_outputs(exact, examples.batches[: len(exact)])
    return _measurement(pair, results, examples), nonfinite


def _run_model(
    pair: CheckpointPair,
    group: list[Run],
    results: Results,
    examples: Examples | None,
    data: UserData,
    seed: int,
    pace: Pace,
) -> Examples:
    """Load one model and make all its runs. The first model chooses the ``examples``."""
    opened = pair.original if group[0].weights == "original" else pair.folded
    dtype, missing = group[0].dtype, set[str]()
    opened.cls  # noqa: B018  (imports are not what each load costs)
    with pace.loading():
        model = opened.load(dtype, offload=pair.offload(opened, dtype), missing=missing)
    with refusing(UnsupportedModel, _does_not_run(model, dtype)):
        if examples is None:
            examples = choose(_runner(pair, model), data, seed, pace)
            _tell_limit(pair, examples, pace)
            require_weights(model, missing, pair.original.source.model)
        for run in group:
            with ExitStack() as stack:
                if run.name == "identity":  # the first that is set up as the marker says
                    stack.enter_context(blame_marker(pair.marker.plan.model_class))
                _run(pair, run, model, results, examples, pace)
            if run.name in _scored(pair.dtype):
                _score(run, model, results, examples, seed, pace)
    return examples


def _run(
    pair: CheckpointPair, run: Run, model: Any, results: Results, examples: Examples, pace: Pace
) -> None:
    """Run ``model`` on all examples that fit into the time, and add its outputs."""
    if run.norm == "RMSNorm":
        if run.weights == "original":
            centre_parameters(model, pair.plan, allow_nonfinite=True)
            if pair.target:
                model = stock_model(pair.target, pair.folded.config, model, pair.plan)
        install(model, pair.marker.plan)
    batches, outputs = examples.batches, results.outputs.setdefault(run.name, [])
    if run.name == "exact":
        results.outputs["exact"] = pace.run(lambda at: pair.run(model, batches[at]))
        return

    def distances(at: int) -> Mapping[str, Distance]:
        returned = pair.run(model, batches[at])
        if run.name in _scored(pair.dtype):
            outputs.append(returned)
        return distances_of(returned, results.outputs["exact"][at])

    with ExitStack() as stack:
        means = stack.enter_context(input_means(model)) if run.name == "runtime" else {}
        results.distances[run.name] = pace.run(distances)
    results.input_means |= means


def _score(
    run: Run, model: Any, results: Results, examples: Examples, seed: int, pace: Pace
) -> None:
    """Compute the perplexity on the text that had time for the first scored run."""
    if not results.scores:
        results.text = examples.text(len(pace.costs))
    if results.text:
        results.scores[run.name] = perplexity(model, results.text, examples.mask_token, seed)
    pace.end_run(was_planned=examples.is_scored)


def _scored(dtype: torch.dtype) -> tuple[str, str]:
    """The runs of the original and of the folded model in the compute dtype."""
    return ("exact" if dtype == torch.float64 else "original", "runtime")


def _runner(pair: CheckpointPair, model: Any) -> Runner:
    covered = pair.marker.plan.covered
    proven = covered.calls_of(model) if covered else None

    def covers(batch: Batch) -> bool:
        return proven is None or not proven.uncovered((), {**batch, **cache_flag(model)})

    return Runner(
        model,
        pair.folded.source.path,
        pair.dtype,
        pair.marker.plan.unproven,
        pair.folded.trust_remote_code,
        lambda batch: pair.run(model, batch),
        pair.event,
        covers,
    )


def _tell_limit(pair: CheckpointPair, examples: Examples, pace: Pace) -> None:
    """Say how many inputs fit into the time, if it is limited."""
    planned = sum(map(length, examples.batches))
    if math.isinf(pace.clock.limit) or planned >= examples.full:
        return
    within = duration(pace.clock.limit)
    message = f"running up to {planned} of {examples.full} {examples.kind} within {within}"
    if pace.share <= 0:
        message = f"{within} is too short to load the models: running {planned} of {examples.full}"
    pair.event("stage", message)


def _measurement(pair: CheckpointPair, results: Results, examples: Examples) -> Measurement:
    """The errors over the batches that every run had time for; the identity over all it ran."""
    count = min(map(len, results.distances.values()))
    measured = {name: pool_distances(run[:count]) for name, run in results.distances.items()}
    if pair.dtype == torch.float64:
        measured["original"] = {
            name: distance.times(FLOAT64_OVER_FLOAT32)
            for name, distance in measured["original"].items()
        }
    measured.setdefault("stock", measured["runtime"])
    errors = {name: largest(relative(pooled)) for name, pooled in measured.items()}
    rounding = measured["original"]
    runtime, stock = (ratios(measured[name], rounding, pair.dtype) for name in ("runtime", "stock"))
    at_runtime, in_stock = worst(runtime), worst(stock)
    before, after = _scored(pair.dtype)
    compared = (results.outputs[name][:count] for name in (after, before))
    kl, agreement = divergence(pair.original.config, examples.batches[:count], *compared)
    rows = sum(map(length, examples.batches[:count]))
    scores: dict[str, float] | None = None
    if results.scores:
        (original, _), (folded, tokens) = (results.scores[name] for name in (before, after))
        scores = {"original": original, "folded": folded, "tokens": tokens}
    return Measurement(
        identity_error=largest(relative(pool_distances(results.distances["identity"]))),
        storage_error=errors["storage"],
        runtime_error=errors["runtime"],
        original_error=errors["original"],
        stock_error=errors["stock"],
        ratio=at_runtime.value,
        chance=at_runtime.chance,
        stock_ratio=in_stock.value,
        stock_chance=in_stock.chance,
        undecided_outputs={
            name: max(runtime[name].chance, stock[name].chance)
            for name in rounding
            if runtime[name].is_coarse or stock[name].is_coarse
        },
        kl=kl,
        top1_agreement=agreement,
        norm_input_mean=worst_first(results.input_means),
        perplexity=scores,
        rows=rows,
        full_rows=max(examples.full, rows),
        own_rows=sum(map(length, examples.batches[: min(count, examples.own)])),
        inputs_are=examples.kind,
    )


def _does_not_run(model: Any, dtype: torch.dtype) -> str:
    """The refusal of a model that does not run in ``dtype``, without the model's own error."""
    advice = "; pass another --compute-dtype"
    if dtype == torch.float64:
        advice = (
            ", so there is no exact result to compare with; `enjoyln fold --no-verify` converts it "
            "unverified"
        )
    return f"{type(model).__name__} does not run in {dtype_name(dtype)}{advice}"


def worst_first(values: dict[str, float]) -> dict[str, float]:
    return dict(sorted(values.items(), key=lambda item: -item[1]))
