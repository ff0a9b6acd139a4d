"""``enjoyln verify`` and ``enjoyln bench``: whether a result is right, and how fast it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from enjoyln_cli.checkpoint.access import access_keywords
from enjoyln_cli.cli import help
from enjoyln_cli.cli.early_checks import require_folded, require_models
from enjoyln_cli.cli.group import complain
from enjoyln_cli.cli.options import (
    COMPUTE_DTYPES,
    DTYPES,
    FILE,
    FOLDER,
    NEW_FILE,
    Options,
    bench_options,
    checking_options,
    hub_options,
    json_option,
    placing_options,
    quiet_option,
)


@help.command()
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
    "--max-ratio",
    type=float,
    metavar="R",
    help="Fail above this error ratio (default: 1.25; 2 if OUT is rotated).",
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
    from enjoyln_cli.cli.progress import watch_job

    require_models(out, options["against"])
    require_folded(out)
    with watch_job(quiet or as_json, f"verifying {out}") as watch:
        from enjoyln_cli import verify as check  # takes seconds

        listeners: Options = {"on_event": watch.event, "on_progress": watch.seconds}
        hub = access_keywords(opening.pop("access"))
        found = check(out, **listeners, **options, **opening, **hub)
    from enjoyln_cli.cli.console import write_json, write_verification

    if as_json:
        write_json(found.to_json())
    elif not quiet:
        write_verification(found)
    elif not found.passed:
        complain(found.summary)
    if not found.passed:
        raise click.exceptions.Exit(1)


@help.command()
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

    Takes at most two minutes: sizes are measured from the smallest on, until the time is up.
    """
    from enjoyln_cli.cli.progress import watch_job

    if picture:
        from enjoyln_cli.benchmark import plot

        plot.check(picture)
    require_models(out, options["against"])
    require_folded(out)
    with watch_job(quiet or as_json, f"opening {out}") as watch:
        from enjoyln_cli.benchmark.bench import bench as measure
        from enjoyln_cli.benchmark.cases import BenchOptions
        from enjoyln_cli.cli.console import write_bench, write_json

        listeners: Options = {"on_event": watch.event, "on_progress": watch.seconds}
        hub = access_keywords(opening.pop("access"))
        sizes = BenchOptions(**asked)
        found = measure(out, asked=sizes, dtype=run_dtype, **listeners, **options, **opening, **hub)
    if as_json:
        write_json(found.to_json())
    elif not quiet:
        write_bench(found)
    if picture:
        plot.save(found.to_json(), picture)
