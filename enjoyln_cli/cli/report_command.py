"""``enjoyln report``: the plans of models as a table, a tree, a recipe or a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click

from enjoyln_cli.checkpoint.open_options import OpenOptions
from enjoyln_cli.cli import help
from enjoyln_cli.cli.early_checks import (
    look_up,
    read_data,
    refuse_ignored,
    require_convertible,
    require_model,
    require_one_source,
    require_plan_options,
    with_origin,
)
from enjoyln_cli.cli.group import complain
from enjoyln_cli.cli.options import NEW_FILE, Names, option, options_of
from enjoyln_cli.comparison.data_files import DataFiles
from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.fs.staging import check_file, write_file
from enjoyln_cli.plan.fold_options import FoldOptions, Options

printing = partial(option, group="Printing")


@help.command()
@click.argument("models", nargs=-1, metavar="MODEL...", shell_complete=help.folders)
@printing("--why", metavar="NORM", help="Show why this norm becomes RMSNorm or stays LayerNorm.")
@printing("--paper", is_flag=True, help="Add the count of Algorithm 1 of the Enjoy-LN paper.")
@options_of(FoldOptions, "folding", without=("recipe", "stored_as", "compress"))
@options_of(Options, "options")
@option(
    "--model-type",
    "types",
    multiple=True,
    metavar="TYPE",
    help="Use this type's default config instead of a MODEL.",
)
@printing("--write-recipe", "save", type=NEW_FILE, metavar="FILE", help="Save the plan as YAML.")
@printing(
    "--save",
    "picture",
    type=NEW_FILE,
    metavar="FILE",
    help="Draw the model: .svg, .png, .pdf or .dot.",
)
@printing(
    "--mappings",
    type=click.Choice(["llm-compressor", "json"]),
    help="Print which layers read each norm: for recipes of llm-compressor, or as JSON.",
)
@printing("--fp16", is_flag=True, help="Show where MODEL overflows in float16 on your data.")
@options_of(DataFiles, "data", without=("samples",))
@printing("--json", "as_json", is_flag=True, help="Print one JSON object for each model.")
@options_of(OpenOptions, "opening")
def report(
    models: Names,
    types: Names,
    why: str | None,
    save: Path | None,
    mappings: Literal["llm-compressor", "json"] | None,
    fp16: bool,
    data: DataFiles,
    as_json: bool,
    opening: OpenOptions,
    folding: FoldOptions,
    options: Options,
    paper: bool,
    picture: Path | None,
) -> None:
    """Show which LayerNorms can become RMSNorm, and why others stay. Reads no weights.

    With --fp16, show instead where MODEL overflows in float16; this runs it.
    """
    require_plan_options(options)
    require_one_source(data, is_needed=fp16)
    if data.sources and not fp16:
        raise click.UsageError(f"{data.sources[0]} needs --fp16.")
    if fp16:
        used = {"models", "fp16", "as_json", "folding", "token", "revision", "cache_dir"}
        used |= {"text", "images", "audio", "tokens", "trust_remote_code", "model_class"}
        refuse_ignored(used, "with --fp16")
        if len(models) != 1:
            raise click.UsageError("--fp16 takes one MODEL.")
        _report_overflows(models[0], data, folding.model_class, opening, as_json=as_json)
        return
    folding = replace(folding, options=options)
    if bool(models) == bool(types):
        raise click.UsageError("name at least one MODEL, or use --model-type instead.")
    outputs = {"--why": why, "--save": picture, "--write-recipe": save}
    chosen = [name for name, value in outputs.items() if value]
    if chosen and len(models or types) > 1:
        raise click.UsageError(f"{chosen[0]} takes one MODEL.")
    if len(chosen) > 1:
        raise click.UsageError(f"{chosen[0]} and {chosen[1]} cannot be combined.")
    if paper and (chosen or mappings):
        raise click.UsageError(f"--paper cannot be combined with {[*chosen, '--mappings'][0]}.")
    if types:
        from_hub = {"revision", "token", "cache_dir", "trust_remote_code"}
        used = {each.name for each in click.get_current_context().command.params} - from_hub
        refuse_ignored({name for name in used if name}, "with --model-type")
    if why and as_json:
        raise click.UsageError("--why cannot be combined with --json.")
    if mappings and (chosen or as_json or len(models or types) > 1):
        raise click.UsageError("--mappings takes one MODEL and no other output.")
    if picture:
        from enjoyln_cli.report.picture import check

        check(picture)
    if save:
        check_file(save)
    names = models or types
    first = names[0]
    if len(models) == 1:
        require_model(first, require_convertible)
    from enjoyln_cli.cli.progress import watch_job

    named = with_origin(first) if len(models) == 1 else first
    with watch_job(as_json or bool(mappings), f"analysing {named}") as watch:
        if len(models) == 1:
            look_up(first, opening, require_convertible)
        from enjoyln_cli.cli.console import say, write_json, write_reports, write_tree
        from enjoyln_cli.conversion.open_and_analyse import mappings_text  # takes seconds
        from enjoyln_cli.recipe.write import recipe_text

        if mappings:
            text = mappings_text(first, opening, folding, mappings, is_type=bool(types))
            click.echo(text, nl=False)
            return
        inspections, failed = _inspect_all(names, bool(types), opening, folding, watch.event)
        if not (save or why or picture):
            reports = [inspection.report(paper) for inspection in inspections]
    if picture:
        from enjoyln_cli.report.model_graph import model_picture
        from enjoyln_cli.report.picture import save as draw

        draw(model_picture(names[0], inspections[0].analysis), picture)
        say(f"drew {picture}")
    elif why:
        write_tree(inspections[0].analysis.why(why))
    elif save:
        plan, config = inspections[0].analysis.plan, inspections[0].config
        write_file(save, recipe_text(plan, config, inspections[0].options).encode())
        say(f"wrote {save}")
    elif as_json:
        for each in reports:
            write_json(each.to_json())
    else:
        write_reports(reports)
    if failed:
        raise click.exceptions.Exit(1)


def _report_overflows(
    model: str, data: DataFiles, model_class: str | None, opening: OpenOptions, *, as_json: bool
) -> None:
    """Print where ``model`` overflows in float16 on the data."""
    require_model(model, require_convertible)
    own = read_data(data, model)
    from enjoyln_cli.cli.progress import watch_job

    with watch_job(as_json, f"running {with_origin(model)}"):
        look_up(model, opening, require_convertible)
        from enjoyln_cli.cli.console import write_json, write_overflows
        from enjoyln_cli.plan.schema import to_json
        from enjoyln_cli.rewrite.opened_model import open_model
        from enjoyln_cli.scaling.overflows import overflows_of

        opened = open_model(model, opening, unfolded=True)
        opened = opened.as_class(model_class or opened.stored_class.name)
        found = overflows_of(opened, own)
    if as_json:
        write_json(to_json(found))
    else:
        write_overflows(model, found)


def _inspect_all(
    names: Names,
    are_types: bool,
    opening: OpenOptions,
    folding: FoldOptions,
    event: Callable[[str, str], None],
) -> tuple[list[Any], bool]:
    """Analyse each model, and say whether one failed. A failure is printed; the others continue."""
    from enjoyln_cli.conversion.open_and_analyse import open_and_analyse

    inspections, failed = [], False
    for name in names:
        if name != names[0]:
            event("stage", f"analysing {name}")
        try:
            inspections.append(open_and_analyse(name, opening, folding, is_type=are_types))
        except EnjoyLNError as error:
            if len(names) == 1:
                raise
            complain(str(error) if name in str(error) else f"{name}: {error}")
            failed = True
    return inspections, failed
