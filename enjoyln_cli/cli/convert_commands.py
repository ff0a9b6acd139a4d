"""``enjoyln fold`` and ``rotate``: to a converted checkpoint. ``export``: to an ONNX file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from enjoyln_cli.checkpoint import config
from enjoyln_cli.checkpoint.access import HubAccess
from enjoyln_cli.cli import help
from enjoyln_cli.cli.early_checks import (
    look_up,
    read_data,
    refuse_ignored,
    require_choice,
    require_convertible,
    require_folded,
    require_model,
    require_new_folder,
    require_one_source,
    with_origin,
)
from enjoyln_cli.cli.group import show_transfers
from enjoyln_cli.cli.options import (
    DTYPES,
    FILE,
    FOLDER,
    OLD_FOLDER,
    Options,
    against_option,
    all_of,
    checking_options,
    data_options,
    hub_options,
    jobs_option,
    json_option,
    make_opening,
    max_ratio_option,
    model_class_option,
    no_verify_option,
    opening_options,
    outputs_option,
    parse_size,
    plan_options,
    quiet_option,
    rotation_options,
    untie_option,
)
from enjoyln_cli.fs.staging import learning_state
from enjoyln_cli.quantisers.schemes import SIMULATED

if TYPE_CHECKING:
    from enjoyln_cli.cli.progress import Watch
    from enjoyln_cli.comparison.data_files import UserData
    from enjoyln_cli.conversion.fold import PreparedFold
    from enjoyln_cli.matrix_choice.trials import MatrixChoice

conversion_options = all_of(
    opening_options,
    json_option,
    quiet_option,
    click.option("--resume", is_flag=True, help="Continue an interrupted run, if there is one."),
    click.option("--force", is_flag=True, help="Replace OUT if it exists."),
    checking_options(60),
    no_verify_option,
    click.option("--dry-run", is_flag=True, help="Show the plan and the sizes; write nothing."),
    click.option(
        "--allow-nonfinite",
        is_flag=True,
        help="Accept weights with NaN or Inf; the edits spread them within a tensor.",
    ),
    jobs_option,
    click.option(
        "--max-shard-size",
        callback=parse_size,
        metavar="SIZE",
        help="Re-shard into files of at most this size, such as 5GB.",
    ),
    click.option(
        "--dtype", type=DTYPES, help="Also convert all floating-point weights to this dtype."
    ),
)
"""The options of a command that writes a converted checkpoint."""


model_options = all_of(
    outputs_option,
    model_class_option,
    click.option(
        "--recipe",
        type=FILE,
        help="Refuse if the proof gives other edits than this recipe has.",
    ),
    click.option(
        "-o", "--out", type=FOLDER, help="New directory for the result; needed unless --dry-run."
    ),
    click.argument("model", shell_complete=help.folders),
)
"""MODEL, OUT, and the options for what is proven about MODEL."""


USED_WITH_LIKE = {"like", "out", "force", "quiet", "token", "cache_dir"}
"""The options of ``fold`` and ``rotate`` that ``--like`` takes."""

like_option = click.option(
    "--like",
    type=OLD_FOLDER,
    metavar="RESULT",
    help="MODEL is a LoRA adapter, a prompt or a draft: edit it as its base model was for RESULT.",
)


@help.command()
@model_options
@plan_options
@like_option
@conversion_options
def fold(opening: Options, like: Path | None, **options: Any) -> None:
    """Convert MODEL into the new directory OUT and verify the result."""
    if like is not None:
        _edit_like(like, opening, **options)
        return
    _convert(opening=opening, choice={}, **options)


@help.command()
@model_options
@untie_option
@rotation_options
@click.option(
    "--search",
    type=click.IntRange(min=1),
    metavar="N",
    help="Try N seeds with simulated rounding on your data, and use the best.",
)
@click.option(
    "--learn",
    type=click.IntRange(min=1),
    metavar="STEPS",
    help="Learn the matrices on your data with simulated rounding, in this many steps.",
)
@click.option(
    "--scheme",
    type=click.Choice(list(SIMULATED)),
    help="The rounding that --search and --learn simulate: bits of weights and inputs.",
)
@click.option(
    "--device",
    metavar="DEVICE",
    help="Where --search and --learn run: cpu, cuda or mps (default: a GPU if there is one).",
)
@like_option
@data_options
@conversion_options
def rotate(
    opening: Options,
    like: Path | None,
    search: int | None,
    learn: int | None,
    scheme: str | None,
    device: str | None,
    **options: Any,
) -> None:
    """Rotate the features of MODEL by an orthogonal matrix, so that it quantises better.

    The result computes the same function in the stock class: outliers are spread over all
    features, and norms stay as they are (their weights are fused). Norms are not converted.
    """
    choice: Options = {}
    if search or learn or scheme or device:
        choice = {"search": search, "learn": learn, "scheme": scheme, "device": device}
        require_choice(opening=opening, like=like, **choice, **options)
        require_one_source(options["data"], options["samples"])
    if like is not None:
        _edit_like(like, opening, **options)
        return
    _convert(opening=opening, choice=choice, **options)


def _edit_like(
    like: Path,
    opening: Options,
    model: str,
    out: Path | None,
    force: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Edit an adapter, a prompt or a draft model for the result ``like``."""
    refuse_ignored(USED_WITH_LIKE, "with --like")
    if out is None:
        raise click.UsageError("Missing option '-o' / '--out'.")
    require_folded(like)
    require_new_folder(out, model, force=force)
    from enjoyln_cli.cli.progress import watch_job

    with watch_job(quiet, f"opening {with_origin(model)}"):
        from enjoyln_cli.conversion.relatives import edit_like  # takes seconds

        edit_like(model, like, out, access=opening["access"], force=force)
    if not quiet:
        click.echo(f"wrote {out}, for {like}")


def _convert(
    model: str,
    out: Path | None,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    choice: Options,
    **options: Any,
) -> None:
    if out is None and not dry_run:
        raise click.UsageError("Missing option '-o' / '--out'.")
    out = None if dry_run else out
    chatty = not (quiet or as_json)
    if chatty:
        show_transfers()
    data = {name: value for name, value in options.pop("data", {}).items() if value}
    if data and isinstance(options["samples"], Path):
        raise click.UsageError("--samples with a file cannot be combined with other inputs.")
    is_checked = options["verify"] and not dry_run
    if not (is_checked or choice) and (options["samples"] or options["seconds"] or data):
        option = "--seconds" if options["seconds"] else "--samples"
        option = f"--{next(iter(data)).removesuffix('s')}" if data else option
        without = "--dry-run" if dry_run else "--no-verify"
        raise click.UsageError(f"{option} needs the check; drop {without}.")
    if options["seconds"] is None:
        del options["seconds"]
    require_model(model, require_convertible)
    own = read_data(data, options["samples"])
    if out:
        require_new_folder(out, model, force=options["force"], resume=options["resume"])
    from enjoyln_cli.cli.progress import watch_job

    job = watch_job(not chatty, f"opening {with_origin(model)}")
    with naming_learned_steps(out), job as watch:
        where = options["opening"]
        look_up(model, require_convertible, where["revision"], access=where["access"])
        from enjoyln_cli.conversion.fold import prepare, write
        from enjoyln_cli.conversion.results import fold_json
        from enjoyln_cli.report.model_report import ModelReport
        from enjoyln_cli.rewrite.directory import WriteOptions
        from enjoyln_cli.verification.verify import floating_dtype  # takes seconds

        opening = make_opening(options.pop("opening"))
        how = {field.name: options.pop(field.name) for field in fields(WriteOptions)}
        how["dtype"] = how["dtype"] and floating_dtype(how["dtype"])
        writing = WriteOptions(**how)
        place = {"force": writing.force, "resume": writing.resume}
        ready = prepare(model, out, opening, **place, on_event=watch.event)
        chosen = None
        if choice:
            chosen = _choose(ready, own, out, watch, options["samples"], writing.resume, **choice)
            ready = ready.with_plan(chosen.plan)
        listeners: Options = {"on_event": watch.event, "on_progress": watch.progress}
        listeners["on_check"] = watch.seconds
        result = write(ready, out, writing, data=data, **listeners, **options) if out else None
        if choice and choice["learn"] and out:
            learning_state(out).unlink(missing_ok=True)
    from enjoyln_cli.cli.console import write_fold, write_json

    report = ModelReport(model, ready.plan)
    printed = fold_json(report, ready, result, writing, watch.warnings)
    if chosen is not None:
        printed["matrices"] = chosen.to_json()
    if as_json:
        write_json(printed)
    elif not quiet:
        write_fold(report, printed)


@contextmanager
def naming_learned_steps(out: Path | None) -> Iterator[None]:
    """If the block is interrupted, say where the steps of ``--learn`` that are done are kept."""
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
    ready: PreparedFold,
    inputs: UserData,
    out: Path | None,
    watch: Watch,
    samples: int | None,
    resume: bool,
    *,
    search: int | None,
    learn: int | None,
    scheme: str,
    device: str | None,
) -> MatrixChoice:
    """Choose the matrices for --search or --learn, on at most ``samples`` inputs."""
    from enjoyln_cli.matrix_choice.learned_matrices import learn_matrices
    from enjoyln_cli.matrix_choice.seed_search import search_seeds
    from enjoyln_cli.matrix_choice.trials import device_named, trials

    run_on = device_named(device)
    with trials(ready, inputs, scheme, samples, watch.event, run_on, watch.seconds) as tried:
        if learn and out:
            state = learning_state(out)
            return learn_matrices(tried, learn, state, watch.event, watch.seconds, resume=resume)
        return search_seeds(tried, search or 1, watch.event, watch.seconds)


@help.command()
@click.argument("out", type=FOLDER)
@click.option(
    "-o",
    "--out",
    "folder",
    type=FOLDER,
    required=True,
    metavar="DIR",
    help="New directory.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16"]),
    help="Convert all weights to this dtype (default: that of OUT).",
)
@click.option(
    "--model-class", metavar="CLASS", help="Export this class of the same family, e.g. GPT2Model."
)
@against_option
@max_ratio_option
@no_verify_option
@click.option(
    "--opset",
    type=click.IntRange(18, 23),
    metavar="N",
    help="Version of the operators, 18 to 23; below 23 with LayerNormalization.",
)
@click.option("--force", is_flag=True, help="Replace DIR if it exists.")
@quiet_option
@json_option
@hub_options
def export(out: Path, folder: Path, quiet: bool, as_json: bool, **options: Any) -> None:
    """Write the converted checkpoint OUT as ONNX for transformers.js and optimum, and verify it.

    DIR/onnx has model.onnx, or an encoder_model.onnx and a decoder_model_merged.onnx. Each folded
    norm becomes one RMSNormalization (opset 23). A model that generates has a cache. Needs the
    packages onnx and onnxscript, and onnxruntime to verify.
    """
    if not options["verify"] and (options["against"] or options["max_ratio"]):
        option = "--against" if options["against"] else "--max-ratio"
        raise click.UsageError(f"{option} needs the check; drop --no-verify.")
    from enjoyln_cli.cli.progress import watch_job
    from enjoyln_cli.onnx_export.requirements import require_export

    require_model(options["against"])
    require_export(folder, force=options["force"], verify=options["verify"])
    require_folded(out)
    with watch_job(quiet or as_json, f"opening {with_origin(out)}") as watch:
        access = HubAccess(token=options["token"], cache_dir=options["cache_dir"])
        look_up(out, config.require_folded, options["revision"], access=access)
        from enjoyln_cli import export as write_onnx
        from enjoyln_cli.cli.console import write_export, write_json  # takes seconds

        exported = write_onnx(out, folder, on_event=watch.event, **options)
    if as_json:
        write_json(exported.to_json())
    elif not quiet:
        write_export(exported)
