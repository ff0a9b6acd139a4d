"""``enjoyln fold`` and ``rotate``: to a converted checkpoint. ``export``: to an ONNX file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from enjoyln_cli.checkpoint import config
from enjoyln_cli.checkpoint.open_options import OpenOptions
from enjoyln_cli.checkpoint.result_files import require_float
from enjoyln_cli.cli import help
from enjoyln_cli.cli.early_checks import (
    look_up,
    passed_options,
    read_data,
    refuse_ignored,
    require_choice,
    require_convertible,
    require_folded,
    require_model,
    require_new_folder,
    require_one_source,
    require_plan_options,
    with_origin,
)
from enjoyln_cli.cli.group import show_transfers
from enjoyln_cli.cli.options import (
    FOLDER,
    OLD_FOLDER,
    json_option,
    option,
    options_of,
    quiet_option,
)
from enjoyln_cli.comparison.data_files import DataFiles
from enjoyln_cli.fs.staging import learning_state
from enjoyln_cli.plan.fold_options import FoldOptions, Options, WriteOptions
from enjoyln_cli.rotation_search.choice_options import NO_CHOICE, ChoiceOptions
from enjoyln_cli.verification.verify_options import CheckOptions, ExportOptions

if TYPE_CHECKING:
    from enjoyln_cli.cli.progress import Watch
    from enjoyln_cli.comparison.data_files import UserData
    from enjoyln_cli.conversion.fold import FoldJob
    from enjoyln_cli.rotation_search.trials import MatrixChoice

model_argument = click.argument("model", shell_complete=help.folders)
out_option = option(
    "-o", "--out", type=FOLDER, help="New directory for the result; needed unless --dry-run."
)
dry_run_option = option(
    "--dry-run", is_flag=True, help="Show the plan and the sizes; write nothing."
)
fp16_option = option(
    "--fp16-safe",
    is_flag=True,
    help="Scale what norms read so that float16 does not overflow; needs calibration data.",
)
USED_WITH_LIKE = {"like", "out", "force", "quiet", "token", "cache_dir"}
"""The options of ``fold`` and ``rotate`` that ``--like`` takes."""
IGNORED_WITH_AS = ("resume", "jobs", "like")
"""The options of ``fold`` that have no effect with ``--as``."""
like_option = option(
    "--like",
    type=OLD_FOLDER,
    metavar="RESULT",
    help="MODEL is a LoRA adapter, a prompt or a draft: edit it as its base model was for RESULT.",
)


@help.command()
@model_argument
@out_option
@options_of(FoldOptions, "folding")
@options_of(Options, "options")
@like_option
@options_of(WriteOptions, "writing")
@dry_run_option
@fp16_option
@options_of(DataFiles, "data")
@options_of(CheckOptions, "checking")
@quiet_option
@json_option
@options_of(OpenOptions, "opening")
def fold(folding: FoldOptions, options: Options, **others: Any) -> None:
    """Convert MODEL into the new directory OUT and verify the result."""
    require_plan_options(options)
    if folding.stored_as:
        for passed in passed_options(*IGNORED_WITH_AS):
            raise click.UsageError(f"{passed} has no effect with --as; leave it out.")
    elif folding.compress:
        raise click.UsageError("--compress needs --as.")
    _convert(folding=replace(folding, options=options), **others)


@help.command()
@model_argument
@out_option
@options_of(FoldOptions, "folding", without=("stored_as", "compress"))
@options_of(Options, "options", only=("untie", "values", "seed", "matrix"), rotate=True, fold=False)
@options_of(ChoiceOptions, "choice")
@like_option
@options_of(WriteOptions, "writing")
@dry_run_option
@fp16_option
@options_of(DataFiles, "data")
@options_of(CheckOptions, "checking")
@quiet_option
@json_option
@options_of(OpenOptions, "opening")
def rotate(folding: FoldOptions, options: Options, **others: Any) -> None:
    """Rotate the features of MODEL by an orthogonal matrix, so that it quantises better.

    The result computes the same function in the stock class: outliers are spread over all
    features, and norms stay as they are (their weights are fused). Norms are not converted.
    """
    _convert(folding=replace(folding, options=options), **others)


def _edit_like(
    like: Path, model: str, out: Path | None, opening: OpenOptions, force: bool, quiet: bool
) -> None:
    """Edit an adapter, a prompt or a draft model for the result ``like``."""
    refuse_ignored(USED_WITH_LIKE, "with --like")
    if out is None:
        raise click.UsageError("Missing option '-o' / '--out'.")
    require_folded(like)
    require_new_folder(out, model, force=force)
    from enjoyln_cli.cli.progress import watch_job

    with watch_job(quiet, f"opening {with_origin(model)}"):
        from enjoyln_cli.conversion.edit_like import edit_like  # takes seconds

        edit_like(model, like, out, opening, force=force)
    if not quiet:
        click.echo(f"wrote {out}, for {like}")


def _convert(
    model: str,
    out: Path | None,
    like: Path | None,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    opening: OpenOptions,
    folding: FoldOptions,
    writing: WriteOptions,
    checking: CheckOptions,
    fp16_safe: bool,
    data: DataFiles,
    choice: ChoiceOptions = NO_CHOICE,
) -> None:
    chooses = choice != NO_CHOICE
    if chooses:
        require_choice(choice, folding.options, data, writing, out, dry_run, like)
    if like is not None:
        _edit_like(like, model, out, opening, writing.force, quiet)
        return
    if out is None and not dry_run:
        raise click.UsageError("Missing option '-o' / '--out'.")
    out = None if dry_run else out
    chatty = not (quiet or as_json)
    if chatty:
        show_transfers()
    if isinstance(data.samples, Path) and len(data.sources) > 1:
        raise click.UsageError("--samples with a file cannot be combined with other inputs.")
    require_one_source(data, is_needed=fp16_safe)
    used = passed_options("text", "images", "audio", "tokens", "seconds", "samples")
    if used and not (checking.verify and not dry_run or chooses or fp16_safe):
        without = "--dry-run" if dry_run else "--no-verify"
        raise click.UsageError(f"{used[0]} needs the check; drop {without}.")
    require_model(model, require_convertible)
    own = read_data(data, model)
    if out:
        require_new_folder(out, model, force=writing.force, resume=writing.resume)
    from enjoyln_cli.cli.progress import watch_job

    watched = watch_job(not chatty, f"opening {with_origin(model)}")
    with naming_learned_steps(out), watched as watch:
        look_up(model, opening, require_convertible)
        from enjoyln_cli.conversion.fold import prepare, with_safe_scales, write
        from enjoyln_cli.conversion.results import fold_json
        from enjoyln_cli.report.model_report import ModelReport  # takes seconds

        job = prepare(model, out, opening, folding, writing, scales=fp16_safe, on_event=watch.event)
        chosen = None
        if chooses:
            chosen = _choose(job, choice, own, out, watch, resume=writing.resume)
            job = job.with_plan(chosen.plan)
        if fp16_safe:
            job = with_safe_scales(job, own, writing, watch.event)
        listeners: dict[str, Any] = {"on_event": watch.event, "on_progress": watch.progress}
        listeners["on_check"] = watch.seconds
        result = write(job, out, writing, checking, own, **listeners) if out else None
        if choice.learn and out:
            learning_state(out).unlink(missing_ok=True)
    from enjoyln_cli.cli.console import write_fold, write_json

    report = ModelReport(model, job.plan)
    printed = fold_json(report, job, result, writing, watch.warnings)
    if chosen is not None:
        printed["matrices"] = chosen.to_json()
    if as_json:
        write_json(printed)
    elif not quiet:
        write_fold(report, printed)


@contextmanager
def naming_learned_steps(out: Path | None) -> Iterator[None]:
    """Say where the finished steps of ``--learn`` are kept if the block is interrupted."""
    try:
        yield
    except KeyboardInterrupt as error:
        if out is None or not learning_state(out).exists():
            raise
        kept = (
            f"finished steps of --learn are kept in {learning_state(out)}; continue with --resume"
        )
        raise KeyboardInterrupt("; ".join(filter(None, [str(error), kept]))) from error


def _choose(
    job: FoldJob,
    choice: ChoiceOptions,
    data: UserData,
    out: Path | None,
    watch: Watch,
    *,
    resume: bool,
) -> MatrixChoice:
    """Choose the matrices for --search or --learn."""
    from enjoyln_cli.rotation_search.learned_matrices import learn_matrices
    from enjoyln_cli.rotation_search.seed_search import search_seeds
    from enjoyln_cli.rotation_search.trials import device_named, trials

    device, scheme = device_named(choice.device), str(choice.scheme)
    with trials(job, data, scheme, data.number, watch.event, device, watch.seconds) as tried:
        if choice.learn and out:
            state, steps = learning_state(out), choice.learn
            return learn_matrices(tried, steps, state, watch.event, watch.seconds, resume=resume)
        return search_seeds(tried, choice.search or 1, watch.event, watch.seconds)


@help.command()
@click.argument("model", shell_complete=help.folders)
@option(
    "-o",
    "--out",
    "folder",
    type=FOLDER,
    required=True,
    metavar="DIR",
    help="New directory, or one with other precisions of the same original.",
)
@options_of(ExportOptions, "options")
@fp16_option
@options_of(DataFiles, "data", without=("samples",))
@quiet_option
@json_option
@options_of(OpenOptions, "opening")
def export(
    model: str,
    folder: Path,
    options: ExportOptions,
    fp16_safe: bool,
    data: DataFiles,
    quiet: bool,
    as_json: bool,
    opening: OpenOptions,
) -> None:
    """Write MODEL as ONNX for transformers.js, optimum and onnxruntime, and verify it.

    MODEL may be any checkpoint, converted or not. DIR/onnx has model.onnx, or an encoder_model.onnx
    and a decoder_model_merged.onnx. A model that generates has a cache. Each folded norm becomes
    one RMSNormalization (opset 23). Needs the packages onnx and onnxscript, and onnxruntime to
    verify.
    """
    if not options.verify and (options.against or options.max_ratio):
        option = "--against" if options.against else "--max-ratio"
        raise click.UsageError(f"{option} needs the check; drop --no-verify.")
    require_one_source(data, is_needed=fp16_safe)
    if data.sources and not fp16_safe:
        raise click.UsageError(f"{data.sources[0]} needs --fp16-safe.")
    own = read_data(data, model) if fp16_safe else None
    from enjoyln_cli.cli.progress import watch_job
    from enjoyln_cli.onnx_export.requirements import require_export

    require_model(options.against)
    require_export(folder, options)
    require_float(model)
    require_model(model, config.require_unquantised)
    with watch_job(quiet or as_json, f"opening {with_origin(model)}") as watch:
        look_up(model, opening, config.require_unquantised)
        from enjoyln_cli import export as write_onnx
        from enjoyln_cli.cli.console import write_export, write_json  # takes seconds

        exported = write_onnx(
            model, folder, fp16_data=own, on_event=watch.event, **vars(options), **vars(opening)
        )
    if as_json:
        write_json(exported.to_json())
    elif not quiet:
        write_export(exported)
