"""The ``enjoyln`` command. Each subcommand reads arguments, calls the library once, and prints.

Torch and transformers are imported inside the commands, so that help and usage errors are instant.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from enjoyln_cli.cli.convert_commands import export, fold, rotate
from enjoyln_cli.cli.group import Commands, end_on_signals
from enjoyln_cli.cli.measure_commands import quantize, verify
from enjoyln_cli.cli.options import json_option
from enjoyln_cli.cli.push_command import push
from enjoyln_cli.cli.report_command import report
from enjoyln_cli.version import __version__

YOUNG_OBJECTS = 20_000
"""How many new objects let Python look for garbage; 700 by default."""
SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="enjoyln")
def main() -> None:
    """Turn a LayerNorm checkpoint into an RMSNorm checkpoint that computes the same function.

    MODEL is a Hub id or a local directory.
    """


for command in (
    report,
    fold,
    rotate,
    quantize,
    verify,
    export,
    push,
):  # in the order in which they are used
    main.add_command(command)


@main.command()
@json_option
def env(as_json: bool) -> None:
    """Show what computes norms on this machine."""
    from enjoyln_cli.cli.progress import watch_job

    with watch_job(as_json, "looking for devices and kernels"):
        from enjoyln_cli.cli.console import write_environment, write_json
        from enjoyln_cli.kernels.environment import environment

        described = environment()
    if as_json:
        write_json(described)
    else:
        write_environment(described)


@main.command()
@click.argument("shell", type=click.Choice(list(SHELLS)))
def completion(shell: str) -> None:
    """Print the script that makes SHELL complete enjoyln's commands and options."""
    click.echo(SHELLS[shell](main, {}, "enjoyln", "_ENJOYLN_COMPLETE").source())


def run() -> None:
    """Run the command, and end the process.

    Python itself would look for garbage while torch is imported, for half a second, and in all of
    torch before it ends, for a second.
    """
    gc.set_threshold(YOUNG_OBJECTS)
    end_on_signals()
    try:
        main(prog_name="enjoyln")
    except SystemExit as ending:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(ending.code or 0))
