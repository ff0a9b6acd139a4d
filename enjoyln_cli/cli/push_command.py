"""``enjoyln push``, and what the user confirms before anything is sent."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import click

from enjoyln_cli.checkpoint.result_files import PRECISIONS_FILE
from enjoyln_cli.cli import help
from enjoyln_cli.cli.early_checks import require_folded
from enjoyln_cli.cli.group import show_transfers
from enjoyln_cli.cli.options import FOLDER, json_option, option, options_of, quiet_option
from enjoyln_cli.publish.push_options import PushOptions

hub = partial(option, group="The Hub")


def ask(upload: str, yes: bool) -> None:
    """Ask the user to confirm a push; without a terminal, require ``--yes``."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(
            f"would push {upload}; pass --yes to confirm, since there is no terminal to ask on"
        )
    try:
        click.confirm(f"Push {upload}?", abort=True, err=True)
    except click.Abort as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise


@help.command()
@click.argument("out", type=FOLDER)
@click.argument("repo_id")
@options_of(PushOptions, "options")
@hub("--yes", "-y", is_flag=True, help="Push without asking.")
@option("--dry-run", is_flag=True, help="List the files that would be sent.")
@quiet_option
@json_option
def push(
    out: Path,
    repo_id: str,
    options: PushOptions,
    yes: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Upload a verified OUT to the Hub as REPO_ID. Continues an interrupted upload."""
    from enjoyln_cli.cli.output_lines import say
    from enjoyln_cli.publish.repository import full_name, require_directory, require_repo_id

    require_directory(out.expanduser())
    if not (out / PRECISIONS_FILE).is_file():
        require_folded(out)
    require_repo_id(repo_id)
    chatty = not quiet and not as_json
    if chatty:
        say(f"checking {out}", "dim", stderr=True)
        show_transfers()
    from enjoyln_cli.cli.console import upload_line, write_doubts, write_json, write_push
    from enjoyln_cli.publish import push as pushing

    if "/" not in repo_id and not dry_run:
        repo_id = full_name(repo_id, options.opening)
    upload = pushing.prepare(out, repo_id, options)
    if chatty:
        write_doubts(upload)
    if not dry_run:
        ask(upload_line(upload), yes)
        upload = pushing.send(upload, options)
    if as_json:
        write_json(upload.to_json())
    elif not quiet:
        write_push(upload)
