"""The ``enjoyln`` command: arguments, one library call, print.

Torch and transformers are imported inside the commands, so that help and usage errors are instant.
Every refusal is one line on standard error and exit status 1; usage errors are 2, Ctrl-C is 130.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from enjoyln_cli import __version__
from enjoyln_cli.checkpoint.access import HubAccess, access_keywords
from enjoyln_cli.cli import help
from enjoyln_cli.cli.options import (
    COMPUTE_DTYPES,
    DTYPES,
    FILE,
    FOLDER,
    FORMATS,
    NEW_FILE,
    WRITING,
    Names,
    Options,
    bench_options,
    checking_options,
    hub_options,
    json_option,
    model_class_option,
    outputs_option,
    parse_size,
    placing_options,
    plan_options,
    push_options,
    quiet_option,
    refuse_push_options,
)
from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.fs.staging import check_file, write_file
from enjoyln_cli.rewrite import processes

QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
"""The libraries' own chatter, off unless the user has set otherwise or ``ENJOYLN_DEBUG=1``."""

BARS = "HF_HUB_DISABLE_PROGRESS_BARS"


def debugging() -> bool:
    """Whether the user asked for tracebacks and the libraries' own messages."""
    return os.environ.get("ENJOYLN_DEBUG", "") not in ("", "0")


def complain(message: str) -> None:
    """One line on standard error, red where colours are wanted."""
    line = " ".join(message.split())
    if rank := processes.present().rank:
        line = f"process {rank}: {line}"
    colour = False if os.environ.get("NO_COLOR") else None
    click.secho(f"error: {line}", fg="red", err=True, color=colour)


def open_streams() -> None:
    """Streams that the caller has closed lead nowhere: no other file may get their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115


class Commands(click.Group):
    """A group that turns every refusal into one line and an exit status."""

    command_class = help.Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they are used."""
        return list(self.commands)

    def main(self, *args: Any, **options: Any) -> Any:
        """As Click has it, with something behind every standard stream."""
        open_streams()
        return super().main(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        if debugging():
            return super().invoke(ctx)
        ctx.obj = {name for name in QUIET if name not in os.environ}
        os.environ.update({name: QUIET[name] for name in ctx.obj})
        warnings.simplefilter("ignore")
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            if not processes.present().rank:
                complain(f"interrupted; {str(error) or 'nothing half-written was left behind'}")
            ctx.exit(130)
        except (click.exceptions.Exit, click.Abort, click.ClickException):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise
            complain(explain(error))
            ctx.exit(1)


def explain(error: Exception) -> str:
    """What the user reads of an exception."""
    if isinstance(error, EnjoyLNError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    kind = type(error).__name__
    return f"unexpected {kind}: {error} (ENJOYLN_DEBUG=1 shows where; please report it)"


def show_transfers() -> None:
    """Let ``huggingface_hub`` draw its bars on a terminal; to be called before it is imported."""
    if sys.stderr.isatty() and BARS in (click.get_current_context().obj or ()):
        os.environ.pop(BARS, None)


def ask(what: str, yes: bool) -> None:
    """Push where the user says so; without a terminal only with ``--yes``."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(
            f"would push {what}; pass --yes to confirm, since there is no terminal to ask on"
        )
    try:
        click.confirm(f"Push {what}?", abort=True, err=True)
    except click.Abort as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="enjoyln")
def main() -> None:
    """Turn a LayerNorm checkpoint into an RMSNorm checkpoint that computes the same function.

    MODEL is a Hub id or a local directory.
    """


@main.command()
@click.argument("models", nargs=-1, metavar="MODEL...", shell_complete=help.folders)
@click.option(
    "--why", metavar="NORM", help="Show why this norm becomes RMSNorm or stays LayerNorm."
)
@click.option("--paper", is_flag=True, help="Add the count of Algorithm 1 of the Enjoy-LN paper.")
@click.option("--options", is_flag=True, help="Add the counts with --widen-mlp and with --untie.")
@model_class_option
@outputs_option
@plan_options
@click.option(
    "--model-type",
    "types",
    multiple=True,
    metavar="TYPE",
    help="Use this type's default config instead of a MODEL.",
)
@click.option(
    "--write-recipe", "save", type=NEW_FILE, metavar="FILE", help="Save the plan as YAML."
)
@click.option(
    "--save",
    "picture",
    type=NEW_FILE,
    metavar="FILE",
    help="Draw the model, or the norm of --why: .svg, .html, .png.",
)
@click.option("--format", "form", type=FORMATS, default="table", show_default=True)
@hub_options
def report(
    models: Names, types: Names, why: str | None, save: Path | None, opening: Options, **show: Any
) -> None:
    """Show which LayerNorms can become RMSNorm, and why others stay. Reads no weights."""
    if bool(models) == bool(types):
        raise click.UsageError("name at least one MODEL, or use --model-type instead.")
    if why and len(models or types) > 1:
        raise click.UsageError("--why takes one MODEL.")
    if save and (why or show["picture"]):
        raise click.UsageError(
            f"--write-recipe cannot be combined with {'--why' if why else '--save'}."
        )
    if why and show["form"] != "table":
        raise click.UsageError("--why cannot be combined with --format.")
    if show["picture"]:
        _check_picture(models or types, show["picture"])
    if save:
        check_file(save)
    from enjoyln_cli.cli.progress import watching

    with watching(not sys.stderr.isatty()) as watch:
        from enjoyln_cli.cli.console import say, write_rows, write_tree
        from enjoyln_cli.conversion.fold import recipe_text  # takes seconds

        found, failed = _inspected(models or types, bool(types), opening, watch.event)
        if not (save or why or show["picture"]):
            rows = [one.row(show["paper"], show["options"]) for one in found]
    if show["picture"]:
        _draw((models or types)[0], found[0].analysis, show["picture"], why)
    elif why:
        write_tree(found[0].analysis.why(why))
    elif save and not failed:
        write_file(save, recipe_text(found).encode())
        say(f"wrote {save}")
    elif not save:
        write_rows(rows, show["form"])
    if failed:
        raise click.exceptions.Exit(1)


def _check_picture(names: Names, file: Path) -> None:
    """Refuse what cannot be drawn before anything is computed."""
    if len(names) > 1:
        raise click.UsageError("--save takes one MODEL.")
    from enjoyln_cli.report import render

    render.check(file)


def _draw(name: str, analysis: Any, file: Path, norm: str | None) -> None:
    from enjoyln_cli.cli.console import say
    from enjoyln_cli.report import model_graph, render

    render.save(model_graph.picture(name, analysis, norm), file)
    say(f"drew {file}")


def _inspected(
    names: Names, are_types: bool, opening: Options, event: Callable[[str, str], None]
) -> tuple[list[Any], bool]:
    """Every model that could be analysed; one that could not is named and the others go on."""
    from enjoyln_cli.conversion import fold as convert

    found, failed = [], False
    for name in names:
        try:
            opened = convert.Opening(**opening)
            found.append(convert.inspect(name, opened, is_type=are_types, on_event=event))
        except EnjoyLNError as error:
            if len(names) == 1:
                raise
            complain(str(error) if name in str(error) else f"{name}: {error}")
            failed = True
    return found, failed


@main.command()
@click.argument("model", shell_complete=help.folders)
@click.option("-o", "--out", type=FOLDER, help="New directory for the result.")
@click.option(
    "--recipe", type=FILE, help="Make only the edits of this recipe; refused if one is not proven."
)
@model_class_option
@outputs_option
@plan_options
@click.option("--dtype", type=DTYPES, help="Also convert all floating-point weights to this dtype.")
@click.option(
    "--max-shard-size",
    callback=parse_size,
    metavar="SIZE",
    help="Re-shard into files of at most this size, such as 5GB.",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Parallel workers (default: number of cores)."
)
@click.option(
    "--keep-means",
    is_flag=True,
    help="Save the data that `enjoyln unfold` needs to restore MODEL exactly.",
)
@click.option(
    "--allow-nonfinite",
    is_flag=True,
    help="Accept weights with NaN or Inf; centring spreads them within a tensor.",
)
@click.option(
    "--stream", is_flag=True, help="Download, convert and delete one file at a time; not verified."
)
@click.option("--dry-run", is_flag=True, help="Show the plan and the sizes; write nothing.")
@click.option("--no-verify", "verify", flag_value=False, default=True, help="Skip the check.")
@checking_options(60)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run, if there is one.")
@click.option(
    "--push-to-hub", "repo_id", metavar="REPO_ID", help="Then upload OUT to this repository."
)
@push_options
@quiet_option
@json_option
@hub_options
def fold(
    model: str, out: Path | None, dry_run: bool, quiet: bool, as_json: bool, **options: Any
) -> None:
    """Convert MODEL into the new directory OUT and verify the result."""
    if out is None and not dry_run:
        raise click.UsageError("Missing option '-o' / '--out'.")
    if options["keep_means"] and options["dtype"]:
        raise click.UsageError("--keep-means cannot be combined with --dtype.")
    if not options["repo_id"]:
        refuse_push_options(options)
    if options["opening"]["stream"]:
        if options["max_shard_size"]:
            raise click.UsageError("--stream cannot be combined with --max-shard-size.")
        options["verify"] = False
    out = None if dry_run else out
    helps = processes.present().rank > 0
    chatty = not (quiet or as_json or helps)
    if chatty:
        show_transfers()
    if not options["verify"] and (options["samples"] or options["seconds"]):
        what = "--samples" if options["samples"] else "--seconds"
        raise click.UsageError(f"{what} goes with the check; drop --no-verify and --stream.")
    if options["seconds"] is None:
        del options["seconds"]
    push_it = _push_after(options, dry_run, helps, chatty)
    from enjoyln_cli.cli.progress import watching

    with watching(not chatty) as watch, processes.joined(watch.event) as us:
        from enjoyln_cli.conversion import fold as convert
        from enjoyln_cli.conversion.results import fold_row
        from enjoyln_cli.rewrite.directory import WriteOptions  # takes seconds

        opening = convert.Opening(**options.pop("opening"))
        how = {name: options.pop(name) for name in WRITING}
        how["dtype"] = convert.as_dtype(how["dtype"])
        writing = WriteOptions(**how)
        place = {"force": writing.force, "resume": writing.resume}
        begin = partial(convert.prepare, model, out, opening, **place, on_event=watch.event)
        ready = processes.agree(us, begin)
        told: Options = {"on_event": watch.event, "on_progress": watch.progress}
        told |= {"on_check": watch.seconds, "team": us}
        result = convert.write(ready, out, writing, **told, **options) if out else None
    if helps:
        return
    from enjoyln_cli.cli.console import write_fold, write_json

    found = fold_row(model, ready, result, writing, watch.warnings) | push_it(out)
    if as_json:
        write_json(found)
    elif not quiet:
        write_fold(found)


def _push_after(
    options: Options, dry_run: bool, helps: bool, chatty: bool
) -> Callable[[Path | None], Options]:
    """What is to be done with a finished fold; asks the user and the Hub before it begins.

    Of a dry run, which has no output, it tells where that would go.
    """
    names = ("repo_id", "private", "create_pr", "commit_message", "yes")
    repo_id, private, create_pr, message, yes = (options.pop(name) for name in names)
    if not repo_id:
        return lambda out: {}
    if not options["verify"]:
        raise click.UsageError(
            "--push-to-hub pushes verified results only; drop --no-verify and --stream."
        )
    if helps:
        return lambda out: {}
    from enjoyln_cli.cli.console import write_doubts
    from enjoyln_cli.publish import push as hub

    access: HubAccess = options["opening"]["access"]
    to: Options = {"private": private, "create_pr": create_pr, "access": access}
    target = hub.target(repo_id, **to)
    where = f"{target.repo_id} ({target.kind})"
    if not dry_run:
        ask(f"the result to {where}", yes)

    def push_it(out: Path | None) -> Options:
        if out is None:
            return {"would_push_to": where}
        try:
            upload = hub.prepare(out, repo_id, **to)
            if chatty:
                write_doubts(upload)
            sent = hub.send(upload, commit_message=message, access=access)
            return {"pushed": sent.to_json()}
        except EnjoyLNError as error:
            raise type(error)(f"{out} was written but not pushed: {error}") from error
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(
                f"{out} was written; {str(error) or 'it was not pushed'}"
            ) from None

    return push_it


@main.command()
@click.argument("folded", metavar="OUT", type=FOLDER)
@click.option(
    "-o", "--out", "back", type=FOLDER, required=True, metavar="BACK", help="New directory."
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Parallel workers (default: number of cores)."
)
@click.option("--force", is_flag=True, help="Replace BACK if it exists.")
@quiet_option
@json_option
def unfold(folded: Path, back: Path, quiet: bool, as_json: bool, **options: Any) -> None:
    """Restore the original of OUT, bit for bit if it was folded with --keep-means.

    Otherwise BACK is a copy of OUT without its `enjoyln` entry: a LayerNorm checkpoint
    that gives the same outputs.
    """
    from enjoyln_cli.cli.progress import watching

    with watching(quiet or as_json) as watch:
        from enjoyln_cli import unfold as restore
        from enjoyln_cli.cli.console import write_json, write_unfold
        from enjoyln_cli.conversion.results import unfold_row  # takes seconds

        found = unfold_row(restore(folded, back, on_progress=watch.progress, **options))
    if as_json:
        write_json(found)
    elif not quiet:
        write_unfold(found)


@main.command()
@click.argument("out", type=FOLDER)
@click.option(
    "--against", metavar="MODEL", help="The original, if it has moved since OUT was made."
)
@click.option(
    "--text", type=FILE, help="Running text to run on; adds the perplexity of a language model."
)
@click.option(
    "--image", "images", type=FILE, multiple=True, help="Run on this image; may be repeated."
)
@click.option(
    "--compute-dtype",
    "dtype",
    type=COMPUTE_DTYPES,
    help="Run in this dtype (default: that of OUT).",
)
@click.option(
    "--max-ratio", type=float, default=1.25, show_default=True, help="Fail above this error ratio."
)
@checking_options(None)
@placing_options
@click.option(
    "--layers", type=click.IntRange(min=1), metavar="N", help="Run only the first N blocks."
)
@quiet_option
@json_option
@hub_options
def verify(out: Path, quiet: bool, as_json: bool, opening: Options, **options: Any) -> None:
    """Check that OUT gives the original's outputs: exit status 0 if so, 1 if not."""
    own = {"--text": options["text"], "--image": options["images"]}
    own["--samples with a file"] = isinstance(options["samples"], Path)
    given = [name for name, value in own.items() if value]
    if len(given) > 1:
        raise click.UsageError(f"{given[0]} and {given[1]} cannot be combined.")
    from enjoyln_cli.cli.progress import watching

    with watching(quiet or as_json) as watch:
        watch.event("stage", f"verifying {out}")
        from enjoyln_cli import verify as check  # takes seconds

        told: Options = {"on_event": watch.event, "on_progress": watch.seconds}
        hub = access_keywords(opening.pop("access"))
        found = check(out, **told, **options, **opening, **hub)
    from enjoyln_cli.cli.console import write_json, write_verification

    if as_json:
        write_json(found.to_json())
    elif not quiet:
        write_verification(found)
    elif not found.passed:
        complain(found.summary)
    if not found.passed:
        raise click.exceptions.Exit(1)


@main.command()
@click.argument("out", type=FOLDER)
@click.option(
    "--original",
    "--against",
    "against",
    metavar="MODEL",
    help="The original, if it has moved since OUT was made.",
)
@bench_options
@click.option(
    "--dtype", "run_dtype", type=DTYPES, help="Run in this dtype (default: that of OUT's weights)."
)
@click.option(
    "--device", metavar="DEVICE", help="cpu, cuda or mps (default: a GPU if there is one)."
)
@click.option(
    "--plot", "picture", type=NEW_FILE, metavar="FILE", help="Draw the results: .png or .svg."
)
@quiet_option
@json_option
@hub_options
def bench(
    out: Path,
    picture: Path | None,
    quiet: bool,
    as_json: bool,
    opening: Options,
    asked: Options,
    run_dtype: str | None,
    **options: Any,
) -> None:
    """Time OUT and its original on this machine: what norms cost, and how much of it is saved.

    Takes about two minutes: a first short measurement decides which sizes fit, and how many rounds.
    """
    from enjoyln_cli.cli.progress import watching

    if picture:
        from enjoyln_cli.benchmark import plot

        plot.check(picture)
    with watching(quiet or as_json) as watch:
        from enjoyln_cli.benchmark.bench import Asked  # takes seconds
        from enjoyln_cli.benchmark.bench import bench as measure
        from enjoyln_cli.cli.console import write_bench, write_json

        told: Options = {"on_event": watch.event, "on_progress": watch.seconds}
        hub = access_keywords(opening.pop("access"))
        sizes = Asked(**asked)
        found = measure(out, asked=sizes, dtype=run_dtype, **told, **options, **opening, **hub)
    if as_json:
        write_json(found.to_json())
    elif not quiet:
        write_bench(found)
    if picture:
        plot.save(found.to_json(), picture)


@main.command()
@click.argument("out", type=FOLDER)
@click.argument("repo_id")
@push_options
@click.option("--revision", metavar="REV", help="Branch to push to; created if missing.")
@click.option("--token", metavar="TOKEN", help="Hub token that may write.")
@click.option("--dry-run", is_flag=True, help="List the files and what is new; send nothing.")
@click.option(
    "--force", is_flag=True, help="Push although OUT is not verified; the model card says so."
)
@quiet_option
@json_option
def push(
    out: Path, repo_id: str, dry_run: bool, quiet: bool, as_json: bool, **options: Any
) -> None:
    """Upload a verified OUT to the Hub as REPO_ID. Continues an interrupted upload."""
    chatty = not quiet and not as_json
    if chatty:
        show_transfers()
    from enjoyln_cli.cli.console import upload_line, write_doubts, write_json, write_push
    from enjoyln_cli.publish import push as hub

    yes, message = options.pop("yes"), options.pop("commit_message")
    access = HubAccess(token=options.pop("token"))
    upload = hub.prepare(out, repo_id, access=access, look_only=dry_run, **options)
    if chatty:
        write_doubts(upload)
    if not dry_run:
        ask(upload_line(upload), yes or not upload.differs)
        upload = hub.send(upload, commit_message=message, access=access)
    if as_json:
        write_json(upload.to_json())
    elif not quiet:
        write_push(upload)


@main.command()
@json_option
def env(as_json: bool) -> None:
    """Show which kernels this machine uses, what is missing and why. Compiles them."""
    from enjoyln_cli.cli.console import write_environment, write_json
    from enjoyln_cli.kernels.environment import environment

    found = environment()
    if as_json:
        write_json(found)
    else:
        write_environment(found)


@main.command()
@click.argument("shell", type=click.Choice(help.SHELLS))
def completion(shell: str) -> None:
    """Print the script that makes SHELL complete enjoyln's commands and options."""
    click.echo(help.completion_script(main, shell, "enjoyln"))
