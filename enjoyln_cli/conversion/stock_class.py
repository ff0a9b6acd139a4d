"""A folded model as another stock class, which computes RMSNorm itself (``fold --as``).

Every engine then takes its own path of RMSNorm. Which classes fit is data
(``templates/stock_rms_norm.yaml``). The target gets the tensors of the folded model under their own
names; a norm without weight gets ones. Refused is any other tensor that only one class has, and a
config entry that the target might not follow. The result is compared with the original.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.checkpoint.open_options import OpenOptions
from enjoyln_cli.checkpoint.reader import other_files
from enjoyln_cli.checkpoint.result_files import CARD_FILE
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.comparison.batches import unpadded_batches
from enjoyln_cli.comparison.metrics import distances_of, largest, pool_distances, ratios, relative
from enjoyln_cli.comparison.metrics import worst as worst_of
from enjoyln_cli.comparison.run import OutputsOfRuns, run
from enjoyln_cli.conversion.fold import FoldJob, prepare
from enjoyln_cli.errors import UnsupportedModel, VerificationFailed
from enjoyln_cli.events import Event, default_listener
from enjoyln_cli.fs.staging import staged_output
from enjoyln_cli.models.classes import class_named
from enjoyln_cli.plan.fold_options import FoldOptions, WriteOptions
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.recipe.stock_forms import StockForm, form_for
from enjoyln_cli.rewrite.directory import copy_files
from enjoyln_cli.rewrite.written_files import record_files
from enjoyln_cli.text import counted, listed_briefly, number
from enjoyln_cli.verification.verify import RATIO, compute_dtype

SIZES = ((1, 7), (2, 16), (3, 5))
"""Rows and tokens of the batches that the result is compared on."""
BOUND = 1e-5
"""The largest error in float64: the norms of the targets compute in float32."""


@dataclass(frozen=True)
class StockResult:
    """What ``fold_as`` has written."""

    out: str
    source: str
    source_class: str
    model_class: str
    norms: int
    """Number of norms that became RMSNorm."""
    error: float
    """Relative error of the worst output in float64; the norms compute in float32."""
    ratio: float
    """The rounding error in the stored dtype, divided by the original's own."""
    seconds: float


def fold_as(
    model: str | Path,
    out: str | Path,
    name: str,
    opening: OpenOptions,
    folding: FoldOptions,
    writing: WriteOptions,
    on_event: Event | None = None,
) -> StockResult:
    """Fold ``model`` and store it in ``out`` as the stock class of the target ``name``.

    The model is in memory as a whole. Raises ``UnsupportedModel`` if the class has no such target,
    a norm stays LayerNorm, or a tensor or config entry has no place in the target;
    ``VerificationFailed`` if the result computes another function. ``out`` is not written then.
    """
    start, event = time.perf_counter(), on_event or default_listener
    job = prepare(model, out, opening, folding, writing, scales=True, on_event=event)
    form = form_for(job.plan.model_class, name)
    options = replace(folding.options, **form.options)
    if options != folding.options:
        folding = replace(folding, options=options)
        job = prepare(model, out, opening, folding, writing, on_event=event)
    _require_whole(job.plan)
    config = target_config(form, job.opened.config)
    opened, source = job.opened.as_class(job.plan.model_class), job.opened.source
    dtype = compute_dtype(opened.checkpoint, writing.stored_dtype)
    place = staged_output(Path(out), source=source.root, force=writing.force)
    with place as staged:
        event("stage", f"writing {out} as {form.target}")
        made = stock_model(form, config, opened.load(dtype, job.plan))
        copied = [one for one in other_files(opened.checkpoint) if one != CARD_FILE]
        copy_files(copied, source.path, staged)
        made.save_pretrained(staged)
        del made
        event("stage", "verifying")
        error, ratio, failure = _compared(job, form, staged, dtype)
        if failure:
            raise VerificationFailed(f"{form.target} computes another function: {failure}")
        summary = f"error {ratio:.2f} x the original's own, {error:.1e} in float64"
        record_files(Source(str(staged), staged, None), {"passed": True, "summary": summary})
        card = _CARD.format(
            out=Path(out).name,
            source=source.model,
            source_class=form.source,
            target=form.target,
            norms=counted(len(job.plan.folded), "LayerNorm"),
            summary=summary,
        )
        (staged / CARD_FILE).write_text(card, encoding="utf-8")
    many, seconds = len(job.plan.folded), time.perf_counter() - start
    return StockResult(
        str(out), source.model, form.source, form.target, many, error, ratio, seconds
    )


def target_config(form: StockForm, config: Any) -> Any:
    """The config of the target. Raises ``UnsupportedModel`` for an entry that it has no place for.

    An entry with its default value is passed over, since the class may not read it.
    """
    held = config.to_dict()
    for name, value in form.require.items():
        if held.get(name) != value:
            raise UnsupportedModel(
                f"{form.target} has no {name}: it is {held.get(name)!r:.60} in {form.source}"
            )
    plain = type(config)().to_dict()
    common = {"architectures", "model_type", "dtype", "transformers_version", "_name_or_path"}
    known = {*form.same, *form.require, *form.given, *form.copied.values(), *common}
    unknown = [
        name for name, value in held.items() if name not in known and value != plain.get(name)
    ]
    if unknown:
        raise UnsupportedModel(
            f"{form.source} has {listed_briefly(unknown)} in its config, which {form.target} "
            "is not known to follow"
        )
    entries = {name: held[name] for name in form.same if name in held}
    entries |= {name: held[other] for name, other in form.copied.items()}
    layers = int(held["num_hidden_layers"])
    entries |= {name: [value] * layers for name, value in form.per_layer.items()}
    made = class_named(form.target).config_class(**entries, **form.given)  # type: ignore[attr-defined]
    made.architectures = [form.target]
    return made


def stock_model(form: StockForm, config: Any, folded: Any) -> Any:
    """The target with the tensors of the ``folded`` model, in the same dtype.

    Raises ``UnsupportedModel`` if only one class has a tensor, unless it is a bias of zeros or a
    weight that the form fills with ones.
    """
    cls: Any = class_named(form.target)
    made = cls(config).to(next(folded.parameters()).dtype).eval()
    state, wanted = dict(folded.state_dict()), made.state_dict()
    for name in wanted.keys() - state.keys():
        if not any(fnmatchcase(name, pattern) for pattern in form.ones):
            raise UnsupportedModel(f"{form.target} needs {name}, which {form.source} does not have")
        state[name] = torch.ones_like(wanted[name])
    for name in sorted(state.keys() - wanted.keys()):
        size = float(state.pop(name).abs().max())
        if size:
            raise UnsupportedModel(
                f"{form.target} has no place for {name} of {form.source}, which is not zero (up to "
                f"{number(size)})"
            )
    made.load_state_dict(state)
    made.generation_config = folded.generation_config
    return made


def _require_whole(plan: Plan) -> None:
    """Raise ``UnsupportedModel`` unless every norm becomes RMSNorm by its weights alone."""
    for verdict in plan.norms:
        if verdict.status != "in_weights":
            why = verdict.reason or "its mean can only be subtracted by an added operation; --untie"
            raise UnsupportedModel(f"{verdict.norm} would stay LayerNorm: {why}")


def _compared(
    job: FoldJob, form: StockForm, staged: Path, dtype: torch.dtype
) -> tuple[float, float, str]:
    """The error in float64, the ratio of rounding errors, and why the result fails, if it does."""
    opened, target = job.opened.as_class(job.plan.model_class), class_named(form.target)
    original = opened.load(torch.float64)
    batches = unpadded_batches(original, SIZES, torch.float64)
    exact = run(original, batches)
    del original

    def distances(outputs: OutputsOfRuns) -> Any:
        pairs = zip(outputs, exact, strict=True)
        return pool_distances([distances_of(one, other) for one, other in pairs])

    def stock(kind: torch.dtype) -> Any:
        load: Any = target.from_pretrained  # type: ignore[attr-defined]
        return distances(run(load(staged, dtype=kind).eval(), batches))

    error = largest(relative(stock(torch.float64)))
    if not error <= BOUND:
        return error, float("inf"), f"error {error:.1e} in float64 (limit {BOUND:g})"
    own = distances(run(opened.load(dtype), batches))
    found = worst_of(ratios(stock(dtype), own, dtype))
    failure = "" if found.value <= RATIO * found.chance else f"{found.value:.2f} x the rounding"
    return error, found.value, failure


_CARD = """\
---
library_name: transformers
tags: [enjoyln, rmsnorm]
---

# {out}

`{source}`, a {source_class}, stored as a {target}: {norms} became the RMSNorm of that class, by the
weights alone. It computes the same function: {summary}. Any engine that runs {target} runs it,
without further code.

`enjoyln fold --as` wrote it.
"""
