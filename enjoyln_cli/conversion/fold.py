"""From a model to a verified checkpoint: the order of the steps, and when it stops.

Open the model, refuse a checkpoint that is folded already, analyse, compare with the user's recipe,
write the weights, verify, and write the card. Only then the output appears. The proof decides: a
recipe that is not of its plan is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from enjoyln_cli.analysis.suggest import better, suggestions
from enjoyln_cli.checkpoint.model_name import local_folder
from enjoyln_cli.checkpoint.open_options import OPENED_PLAINLY, OpenOptions
from enjoyln_cli.checkpoint.result_files import MATRIX_FILE
from enjoyln_cli.clock import Progress, no_progress
from enjoyln_cli.comparison.data_files import NO_DATA, DataFiles, UserData, require_data, seconds_of
from enjoyln_cli.edits.planned_edits import edits_of
from enjoyln_cli.errors import NothingToFold, UnsupportedModel
from enjoyln_cli.events import Event, default_listener
from enjoyln_cli.fs.staging import check_place, count_finished, work_of
from enjoyln_cli.plan.fold_options import (
    CENTRING_ONLY,
    FOLD_DEFAULTS,
    WRITE_DEFAULTS,
    FoldOptions,
    Options,
    WriteOptions,
)
from enjoyln_cli.plan.option_field import keywords_of
from enjoyln_cli.report.notes import suggestion
from enjoyln_cli.rewrite.directory import FoldResult, fold_checkpoint
from enjoyln_cli.rewrite.opened_model import OpenedModel, open_model
from enjoyln_cli.rewrite.preconditions import why_nothing_changes
from enjoyln_cli.rewrite.shard_layout import bytes_to_write
from enjoyln_cli.rewrite.writer import total_progress
from enjoyln_cli.rotation.given_matrices import give_matrices
from enjoyln_cli.rotation.rotations import NORM_STAYS
from enjoyln_cli.text import counted
from enjoyln_cli.verification.verify_options import (
    CHECK_DEFAULTS,
    CheckOptions,
    VerifyOptions,
)

if TYPE_CHECKING:
    from enjoyln_cli.analysis.analyze import Analysis
    from enjoyln_cli.plan.plan import Plan
    from enjoyln_cli.recipe.model import Recipe
    from enjoyln_cli.recipe.stock_targets import StockTarget
    from enjoyln_cli.verification.verify import Verification


@dataclass(frozen=True)
class FoldJob:
    """Everything known before the first byte is written."""

    opened: OpenedModel
    plan: Plan
    analysis: Analysis
    """The proof of the plan, before matrices and scales were chosen."""
    options: Options
    """The edits that are allowed: by the user's options, or else by the user's recipe."""
    opening: OpenOptions
    folding: FoldOptions
    target: StockTarget | None
    """The class that the result is stored as, if it is another class."""
    analyze: Callable[..., Analysis]
    """Analyses the same checkpoint with another config."""

    def with_plan(self, plan: Plan) -> FoldJob:
        """The same job with a plan that rotates by other matrices."""
        matrix = MATRIX_FILE if any(group.given for group in plan.rotated) else ""
        options, user_options = (
            replace(before, seed=plan.seed, matrix=matrix)
            for before in (self.options, self.folding.options)
        )
        folding = replace(self.folding, options=user_options)
        return replace(self, plan=plan, options=options, folding=folding)

    def bytes_to_write(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of all tensors, with floating-point tensors in ``dtype``."""
        return bytes_to_write(self.opened.checkpoint, edits_of(self.plan), dtype)

    def bytes_added(self, dtype: torch.dtype | None = None) -> int:
        """How many of the bytes to write come from tensors that grow or are new."""
        return self.bytes_to_write(dtype) - bytes_to_write(self.opened.checkpoint, {}, dtype)


def prepare(
    model: str | Path,
    out: str | Path | None,
    opening: OpenOptions = OPENED_PLAINLY,
    folding: FoldOptions = FOLD_DEFAULTS,
    writing: WriteOptions = WRITE_DEFAULTS,
    *,
    scales: bool = False,
    on_event: Event | None = None,
) -> FoldJob:
    """Open and analyse ``model``, and decide which proven edits will be made.

    If ``write`` could not create ``out``, ``out`` is refused before any work. A recipe of the user
    is refused unless it has the edits of the plan. The outputs and options are by default the
    recipe's. With ``scales``, which ``with_safe_scales`` adds, a plan that changes nothing is not
    refused yet. Raises ``EnjoyLNError``.
    """
    from enjoyln_cli.analysis.analyze import analyze_config
    from enjoyln_cli.recipe.compare import require_same
    from enjoyln_cli.recipe.read import load_recipe
    from enjoyln_cli.recipe.stock_targets import target_for
    from enjoyln_cli.rewrite.stock_class import compressed_plan, require_all_folded, target_config

    event = on_event or default_listener
    folder = local_folder(str(model))
    if folding.compress and not folding.stored_as:
        raise UnsupportedModel("compress needs a class to store the model as; pass stored_as")
    if folding.stored_as and (writing.resume or writing.jobs):
        raise UnsupportedModel("another stock class is written at once, without resume and jobs")
    if out is not None:
        check_place(Path(out), source=folder, force=writing.force, resume=writing.resume)
    if folder is None:
        event("download", f"looking up {model} on the Hub")
    opened = open_model(str(model), opening, unfolded=True)
    config, checkpoint = opened.config, opened.checkpoint
    recipe = None if folding.recipe is None else load_recipe(folding.recipe)
    model_class, options = folding.model_class, folding.options
    outputs = folding.outputs or (recipe.outputs if recipe else ())
    if recipe is not None and folding.recipe is not None:
        options = _with_options_of(recipe, Path(folding.recipe), options)
    kind = config.model_type
    to_fold = f"the LayerNorms of {kind} that can be converted"
    to_rotate = f"which features of {kind} can be rotated"
    event("stage", f"finding {to_fold if options.fold else to_rotate}")
    analyze = partial(
        analyze_config,
        model_class=model_class,
        checkpoint=checkpoint,
        outputs=outputs,
        options=options,
        example_calls=folding.example_calls,
    )
    analysis, target = analyze(config), None
    if folding.stored_as:
        target = target_for(analysis.plan.model_class, folding.stored_as)
        before = options, outputs
        options = replace(options, **target.options)
        if folding.compress:
            options = replace(options, rotate=True, values=options.rotate and options.values)
        if (options, outputs or target.outputs) != before:
            analyze = partial(analyze, options=options, outputs=outputs or target.outputs)
            analysis = analyze(config)
        require_all_folded(analysis.plan)
    plan = compressed_plan(analysis.plan) if folding.compress else analysis.plan
    if target is not None:
        target_config(target, config, plan)  # refused before anything is written
    if recipe is not None:
        require_same(recipe, plan, config=config)
    if options.matrix:
        plan = give_matrices(plan, Path(options.matrix))
        options = replace(options, matrix=MATRIX_FILE)
    if unproven := sorted(set(config.architectures or ()) - set(plan.classes)):
        event("warning", _why_another_class(plan, unproven, is_chosen=bool(model_class or outputs)))
    for warning in _about_untying(analysis, options):
        event("warning", warning)
    if not plan.changes_weights and not scales:
        ways: Sequence[str] = ()
        if options.fold:
            event("stage", "looking for options that would convert some")
            is_chosen = model_class or options.keep_norms  # whose names are of one class
            alone = {
                name: analyze_config(
                    config, model_class=name, checkpoint=checkpoint, options=options
                )
                for name in (plan.classes if len(plan.classes) > 1 and not is_chosen else ())
            }
            ways = _ways_to_convert(analysis, options, alone)
        raise NothingToFold(why_nothing_changes(plan, str(model), ways))
    if plan.covered is not None:
        plan.covered.require_any(plan.model_class)
    return FoldJob(opened, plan, analysis, options, opening, folding, target, analyze)


def with_safe_scales(
    job: FoldJob, data: UserData, writing: WriteOptions = WRITE_DEFAULTS, event: Event | None = None
) -> FoldJob:
    """``job`` with streams at scales for which no norm overflows in float16 on ``data``.

    Raises ``UnsupportedModel`` if its stock class cannot compute the same with them (see
    ``scaling.stored_scales``), and ``NothingToFold`` if nothing else changes and nothing overflows.
    """
    from enjoyln_cli.scaling.float16 import calibration_batches, edits_for
    from enjoyln_cli.scaling.stored_scales import with_stored_scales

    event = event or default_listener
    require_data(data)
    event("stage", "looking for norms that overflow in float16")
    opened, plan = job.opened.as_class(job.plan.model_class), job.plan
    analysis, analyze = job.analysis, job.analyze
    if not analysis.problem.flow.traces:  # there is no LayerNorm
        analyze = partial(analyze, options=Options(fold=False, rotate=True))
        analysis = analyze(opened.config)
    model = opened.load(torch.float32)
    batches = calibration_batches(opened, model, data)
    edits = edits_for(model, batches, analysis, keeps_all=not job.folding.outputs)
    if edits.overflowing:
        eps_entry = job.target.eps if job.target and job.target.eps in job.target.given else ""
        stored: Any = (writing.stored_dtype, event, eps_entry)
        plan = with_stored_scales(analysis, plan, opened.config, edits, analyze, *stored)
        found = counted(len(edits.overflowing), "norm")
        event("stage", f"{found} would overflow in float16, so streams get another scale")
    else:
        event("warning", "no norm overflows in float16 on these data, so nothing is scaled")
    if not plan.changes_weights:
        raise NothingToFold(why_nothing_changes(plan, opened.source.model))
    return replace(job, plan=plan)


def _why_another_class(plan: Plan, unproven: Sequence[str], is_chosen: bool) -> str:
    """A warning that the result is not for the ``unproven`` classes that its config names."""
    named = ", ".join(unproven)
    if is_chosen or plan.model_class in unproven:
        return (
            f"the result is proven for {', '.join(plan.classes)} only; if it is loaded as "
            f"{named}, the class it was saved as, its outputs may differ"
        )
    return (
        f"config.json names {named}, but not all of its weights are stored; the stored tensors "
        f"belong to {plan.model_class}, so load the result as {plan.model_class}"
    )


def _with_options_of(recipe: Recipe, path: Path, options: Options) -> Options:
    """``options`` with the options of the recipe at ``path``: all of the recipe's if none is set.

    If a rotation is asked for without a seed or a matrix, the recipe's are taken.
    """
    recipe_options = recipe.options
    if recipe_options.matrix:
        recipe_options = replace(recipe_options, matrix=str(path.parent / recipe_options.matrix))
    if options == CENTRING_ONLY:
        return recipe_options
    if options.rotate and not options.matrix and options.seed == CENTRING_ONLY.seed:
        return replace(options, seed=recipe_options.seed, matrix=recipe_options.matrix)
    return options


def write(
    job: FoldJob,
    out: str | Path,
    writing: WriteOptions = WRITE_DEFAULTS,
    checking: CheckOptions = CHECK_DEFAULTS,
    data: UserData = NO_DATA,
    *,
    on_event: Event | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_check: Progress = no_progress,
) -> FoldResult:
    """Carry out the plan of ``prepare`` (see ``convert``). ``data`` are inputs to check it on."""
    from enjoyln_cli.recipe.write import recipe_text

    event = on_event or default_listener
    opened, source = job.opened, job.opened.source
    seconds_of(checking.seconds)  # a bad value is refused before anything is written

    def check(folded: Path) -> Verification:
        from enjoyln_cli.verification.verify import check_result

        event("stage", "verifying")
        return check_result(
            folded,
            data,
            VerifyOptions(seconds=checking.seconds),
            job.opening,
            original=opened,
            plan=job.plan,
            on_event=event,
            on_progress=on_check,
        )

    def finish(folded: Path) -> None:
        from enjoyln_cli.publish.written_card import write_card

        chosen = (job.opening, job.folding, writing, checking)
        stored_as = job.target.target if job.target else ""
        final = Path(out).expanduser().absolute()
        write_card(folded, job.plan, source, chosen, final, stored_as=stored_as)

    def stock(target: StockTarget, folder: Path) -> dict[str, Any]:
        from enjoyln_cli.rewrite.stock_class import write_stock_class
        from enjoyln_cli.verification.verify import compute_dtype

        dtype = compute_dtype(opened.checkpoint, writing.stored_dtype)
        original = opened.as_class(job.plan.model_class)
        return write_stock_class(target, original, job.plan, folder, dtype, writing)

    left = count_finished(work_of(Path(out))) if writing.resume else 0
    before = f", {counted(left, 'file')} finished by an earlier run" if left else ""
    event("stage", f"writing {out}{before}")
    return fold_checkpoint(
        opened.checkpoint,
        job.plan,
        Path(out),
        recipe_text=recipe_text(job.plan, opened.config, job.options, source.pinned),
        options=writing,
        progress=total_progress(job.bytes_to_write(writing.stored_dtype), on_progress),
        check=check if checking.verify else None,
        finish=finish,
        stock=partial(stock, job.target) if job.target else None,
    )


@keywords_of(opening=OpenOptions, folding=FoldOptions, writing=WriteOptions, checking=CheckOptions)
def convert(
    model: str | Path,
    out: str | Path,
    *,
    opening: OpenOptions,
    folding: FoldOptions,
    writing: WriteOptions,
    checking: CheckOptions,
    samples: int | str | Path | None = None,
    fp16_data: UserData | None = None,
    on_event: Event | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_check: Progress = no_progress,
) -> FoldResult:
    """Fold ``model`` (a Hub id or a directory) into the new directory ``out``.

    With ``verify``, a result that does not compute the original function is deleted, and
    ``VerificationFailed`` is raised. The check ends in about a minute, or without a limit with
    ``seconds=None``; in any case it compares every stored tensor, and the identity in float64.
    ``samples`` is another number of inputs for it, or a file with one text on each line.
    ``fp16_data`` are calibration data on which no norm of the result may overflow in float16.
    ``max_shard_size`` is in bytes.

    ``on_progress`` receives the bytes done and the bytes in all, ``on_event`` stages and warnings,
    ``on_check`` the seconds that the check has taken and the seconds that it should take in all.
    Raises ``EnjoyLNError`` whenever no ``out`` is written. The other keywords:
    """
    from enjoyln_cli.verification.verify import floating_dtype

    if writing.dtype is not None:
        floating_dtype(writing.dtype)  # bad values are refused before any work
    data = DataFiles(samples=samples).read()
    seconds_of(checking.seconds)
    scales = fp16_data is not None
    job = prepare(model, out, opening, folding, writing, scales=scales, on_event=on_event)
    if fp16_data is not None:
        job = with_safe_scales(job, fp16_data, writing, on_event)
    listeners: Any = {"on_event": on_event, "on_progress": on_progress, "on_check": on_check}
    return write(job, out, writing, checking, data, **listeners)


def _about_untying(analysis: Analysis, options: Options) -> Iterator[str]:
    """Warnings if untying would rotate more, or changes nothing."""
    if options.rotate and not options.untie and (more := _may_rotate_if_untied(analysis)):
        yield f"weights are tied; --untie may also rotate {more}"
    if options.untie and not analysis.plan.untied:
        which = "no LayerNorm" if options.fold else "nothing that is rotated"
        yield f"--untie changes nothing here: {which} depends on a tied weight"


def _may_rotate_if_untied(analysis: Analysis) -> str:
    """The groups that a norm keeps from rotating in a model with tied weights; empty if none."""
    if all(name == first for name, first in analysis.problem.groups.items()):
        return ""
    stay = [group for group in analysis.plan.rotation_groups if group.reason.startswith(NORM_STAYS)]
    words = {"residual": "residual stream"}
    return ", ".join(f"the {words.get(one.kind, one.kind)} of {one.name}" for one in stay)


def _ways_to_convert(
    analysis: Analysis, options: Options, alone: Mapping[str, Analysis]
) -> list[str]:
    """Options that would convert some norms of a model in which no norm becomes RMSNorm.

    ``alone`` maps each of the plan's classes to the analysis for that class only.
    """
    by_class = ((f"--model-class {name}", analysed.plan) for name, analysed in alone.items())
    more = (*suggestions(analysis, options), *better(analysis.plan, by_class))
    gains = analysis.gains()
    return [
        *(suggestion(way) for way in more),
        *(f"--outputs {','.join(gain.outputs)} would convert {gain.norms}" for gain in gains),
    ]
