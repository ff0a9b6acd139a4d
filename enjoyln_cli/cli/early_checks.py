"""Refuses wrong names and places before a command imports torch, which takes seconds.

The library checks them again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from enjoyln_cli.checkpoint import config
from enjoyln_cli.checkpoint.model_name import local_folder
from enjoyln_cli.checkpoint.open_options import OpenOptions
from enjoyln_cli.checkpoint.result_files import PRECISIONS_FILE
from enjoyln_cli.checkpoint.source import Source, open_source
from enjoyln_cli.comparison.data_files import (
    SAMPLES_FILE,
    DataFiles,
    UserData,
    require_readable,
)
from enjoyln_cli.errors import ModelNotFound, OutputError, UnsupportedModel
from enjoyln_cli.fs.staging import check_place, learning_state
from enjoyln_cli.plan.fold_options import Options, WriteOptions
from enjoyln_cli.rotation_search.choice_options import ChoiceOptions

PREPARED_BY = {
    "text": ("a tokenizer", ("*token*", "*vocab*", "*.model", "*bpe*", "tekken.json")),
    "images": ("an image processor", ("*processor_config.json",)),
    "recordings": ("a feature extractor", ("*processor_config.json",)),
}
"""For each kind of data, what a directory needs for it, and patterns of the names of its files."""
EarlyCheck = Callable[[Mapping[str, Any], str], None]
"""Refuses a model by its config and its name."""


def require_model(name: str | Path | None, check: EarlyCheck | None = None) -> None:
    """Refuse a directory without a config and a name that is no Hub id; ``check`` the config.

    A Hub id is left to ``look_up``.
    """
    if name is not None and local_folder(str(name)) is not None:
        raw = config.raw_config(open_source(str(name)))
        if check is not None:
            check(raw, str(name))


def require_convertible(raw: Mapping[str, Any], model: str) -> None:
    """Refuse the config of a model that is quantised, or was converted already."""
    config.require_unquantised(raw, model)
    config.require_unfolded(raw, model)


def require_quantisable(raw: Mapping[str, Any], model: str) -> None:
    """Refuse the config of a model that is quantised, or was folded already."""
    config.require_unquantised(raw, model)
    config.require_unfolded(raw, model, may_be_rotated=True)


def look_up(model: str | Path, opening: OpenOptions, check: EarlyCheck | None = None) -> None:
    """Fetch the config of a Hub id and ``check`` it; a directory has been checked already.

    Call this after the first line is printed, which says that the Hub is asked.
    """
    name = str(model)
    if local_folder(name) is None:
        raw = config.raw_config(open_source(name, opening))
        if check is not None:
            check(raw, name)


def require_source_of(out: Path, opening: OpenOptions) -> None:
    """Refuse a converted directory whose original is not where its config says."""
    folder = local_folder(str(out))
    entry = config.raw_config(open_source(str(out))).get("enjoyln") if folder else None
    if not isinstance(entry, dict) or not isinstance(entry.get("source"), str):
        return  # the library names the mistake
    try:
        look_up(entry["source"], replace(opening, revision=entry.get("revision")))
    except ModelNotFound as error:
        raise ModelNotFound(f"{error}; name the original with --against") from error


def with_origin(model: str | Path) -> str:
    """``model`` as the first line names it: whether it is looked for on the Hub."""
    is_local = local_folder(str(model)) is not None
    return f"{model}{'' if is_local else ' from the Hub, since no directory has this name'}"


def require_folded(out: str | Path) -> None:
    """Refuse a directory that was not converted. A Hub id is left to the library."""
    if (folder := local_folder(str(out))) is not None:
        if (folder / PRECISIONS_FILE).is_file():
            raise UnsupportedModel(
                f"{out} was written by `enjoyln quantize` or `export`, and only `enjoyln verify` "
                "and `enjoyln push` take such a result"
            )
        config.require_folded(config.raw_config(open_source(str(out))), str(out))


def require_new_folder(out: Path, model: str | Path, *, force: bool, resume: bool = False) -> None:
    """Refuse ``out`` if it cannot be made, or if it is not apart from the directory ``model``."""
    check_place(out, source=local_folder(str(model)), force=force, resume=resume)


def passed_options(*names: str) -> list[str]:
    """The parameters among ``names``, by default among all, that are on the command line."""
    context = click.get_current_context()
    by_name = {option.name: option for option in context.command.params}
    return [
        max(by_name[name].opts, key=len)
        for name in names or by_name
        if isinstance(by_name.get(name), click.Option)
        and context.get_parameter_source(str(name)) is click.core.ParameterSource.COMMANDLINE
    ]


def refuse_ignored(used: Collection[str], by: str) -> None:
    """Refuse options on the command line that would have no effect; ``used`` are the others.

    ``by`` says which use of the command ignores them. Names are the names of its parameters.
    """
    every = (str(option.name) for option in click.get_current_context().command.params)
    for option in passed_options(*(name for name in every if name not in used)):
        raise click.UsageError(f"{option} has no effect {by}; leave it out.")


def require_plan_options(options: Options) -> None:
    """Refuse an option that changes nothing unless another option is given."""
    if passed_options("widen_to") and not options.widen_mlp:
        raise click.UsageError("--widen-to needs --widen-mlp.")
    used = passed_options("seed", "matrix") + ([] if options.values else ["--no-values"])
    if used and not options.rotate:
        raise click.UsageError(f"{used[0]} needs --rotate.")


def read_data(data: DataFiles, model: str | Path | None) -> UserData:
    """The user's own inputs. Refuses files that cannot be read, or that no package here reads.

    A directory ``model`` has to contain what prepares them.
    """
    own = data.read()
    require_readable(own)
    if model is not None and local_folder(str(model)) is not None:
        _require_prepared(own, open_source(str(model)))
    return own


def _require_prepared(data: UserData, source: Source) -> None:
    """Refuse data for which ``source`` has no tokenizer, processor or feature extractor."""
    names = [path.name for path in source.path.iterdir()]
    has_own = "pretrained_cfg" in config.raw_config(source)  # timm's way to prepare images
    given = {
        "text": data.text is not None or bool(data.texts),
        "images": bool(data.images) and not has_own,
        "recordings": bool(data.audio),
    }
    for what, (needed, patterns) in PREPARED_BY.items():
        found = any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
        if given[what] and not found:
            raise UnsupportedModel(f"reading {what} needs {needed}, and {source.path} has none")


def require_one_source(data: DataFiles, *, is_needed: bool = False) -> None:
    """Refuse inputs from two sources, and if data ``is_needed`` none. Images may have a text."""
    if data.conflict:
        raise click.UsageError(f"{' and '.join(data.conflict)} cannot be combined.")
    if is_needed and not data.sources:
        raise click.UsageError("your data are needed: pass --text, --image, --audio or --tokens.")


def require_choice(
    choice: ChoiceOptions,
    options: Options,
    data: DataFiles,
    writing: WriteOptions,
    out: Path | None,
    dry_run: bool,
    like: Path | None,
) -> None:
    """Refuse --search and --learn beside options that exclude them, or without options they need.

    Without ``force`` and ``resume``, the state of an interrupted run of --learn is refused.
    """
    search, learn = choice.search, choice.learn
    if not (search or learn):
        option = "--scheme" if choice.scheme else "--device"
        raise click.UsageError(f"{option} needs --search or --learn.")
    name = "--search" if search else "--learn"
    for other, is_given in {
        "--learn": search and learn,
        "--seed": search and options.seed,
        "--matrix": search and options.matrix,
        "--dry-run": learn and dry_run,
        "--like": like,
    }.items():
        if is_given:
            raise click.UsageError(f"{name} cannot be combined with {other}.")
    if not choice.scheme:
        raise click.UsageError(f"{name} needs --scheme, such as --scheme w4a8.")
    if not {*data.sources} - {SAMPLES_FILE}:
        raise click.UsageError(f"{name} needs one of --text, --image, --audio, --tokens.")
    require_one_source(data)
    if learn and out and not (writing.force or writing.resume) and learning_state(out).exists():
        raise OutputError(
            f"{learning_state(out)} belongs to an interrupted run; continue it with --resume, or "
            "begin again with --force"
        )
