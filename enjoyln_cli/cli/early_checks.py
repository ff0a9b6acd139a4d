"""Refuses wrong names and places before a command imports torch, which takes seconds.

The library checks them again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import click

from enjoyln_cli.checkpoint import config
from enjoyln_cli.checkpoint.access import HubAccess
from enjoyln_cli.checkpoint.model_name import local_folder
from enjoyln_cli.checkpoint.result_files import QUANTISATION_FILE
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.comparison.data_files import UserData, read_user_data, require_readable
from enjoyln_cli.errors import ModelNotFound, OutputError, UnsupportedModel
from enjoyln_cli.fs.staging import check_place, learning_state

Check = Callable[[Mapping[str, Any], str], None]
"""Refuses a model by its config and its name."""


def require_model(name: str | Path | None, check: Check | None = None) -> None:
    """Refuse a directory without a config, and what is no Hub id either; ``check`` the config.

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


def look_up(
    model: str | Path,
    check: Check | None = None,
    revision: str | None = None,
    *,
    access: HubAccess,
) -> None:
    """Fetch the config of a Hub id and ``check`` it; a directory has been checked already.

    Call this after the first line is printed, which says that the Hub is asked.
    """
    name = str(model)
    if local_folder(name) is None:
        raw = config.raw_config(open_source(name, revision=revision, access=access))
        if check is not None:
            check(raw, name)


def require_source_of(out: Path, access: HubAccess) -> None:
    """Refuse a converted directory whose original is not where its config says."""
    folder = local_folder(str(out))
    entry = config.raw_config(open_source(str(out))).get("enjoyln") if folder else None
    if not isinstance(entry, dict) or not isinstance(entry.get("source"), str):
        return  # the library says what is wrong
    try:
        look_up(entry["source"], revision=entry.get("revision"), access=access)
    except ModelNotFound as error:
        raise ModelNotFound(f"{error}; name the original with --against") from error


def with_origin(model: str | Path) -> str:
    """``model`` as the first line names it: whether it is looked for on the Hub."""
    is_local = local_folder(str(model)) is not None
    return f"{model}{'' if is_local else ' from the Hub, since no directory has this name'}"


def require_folded(out: str | Path) -> None:
    """Refuse a directory that was not converted. A Hub id is left to the library."""
    if (folder := local_folder(str(out))) is not None:
        if (folder / QUANTISATION_FILE).is_file():
            raise UnsupportedModel(
                f"{out} was written by `enjoyln quantize`, and only `enjoyln verify` and "
                "`enjoyln push` take such a result"
            )
        config.require_folded(config.raw_config(open_source(str(out))), str(out))


def require_new_folder(out: Path, model: str | Path, *, force: bool, resume: bool = False) -> None:
    """Refuse ``out`` if it cannot be made, or if it is not apart from the directory ``model``."""
    check_place(out, source=local_folder(str(model)), force=force, resume=resume)


def refuse_ignored(used: Collection[str], by: str) -> None:
    """Refuse options on the command line of which nothing would come; ``used`` are the others.

    ``by`` says what does not use them. Names are those of the command's parameters.
    """
    context = click.get_current_context()
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        is_passed = source is click.core.ParameterSource.COMMANDLINE
        if isinstance(option, click.Option) and is_passed and option.name not in used:
            raise click.UsageError(f"{max(option.opts, key=len)} has no effect {by}; leave it out.")


def data_sources(data: Mapping[str, Any]) -> dict[str, Any]:
    """The options with data of the user that were passed, with their values."""
    sources = {"--text": data["text"], "--image": data["images"], "--audio": data["audio"]}
    sources["--tokens"] = data["tokens"]
    return {option: value for option, value in sources.items() if value}


def read_data(data: Mapping[str, Any], samples: Any = None) -> UserData:
    """The user's own inputs. Refuses files that cannot be read, or that no package here reads."""
    own = read_user_data(**data, samples=samples)
    require_readable(own)
    return own


def require_one_source(
    data: Mapping[str, Any], samples: Any = None, *, is_needed: bool = False
) -> None:
    """Refuse inputs from two sources, and none if one ``is_needed``. Images may have a text."""
    passed = [*data_sources(data), *["--samples with a file"] * isinstance(samples, Path)]
    if len(passed) > 1 and passed != ["--text", "--image"]:
        raise click.UsageError(f"{passed[0]} and {passed[1]} cannot be combined.")
    if is_needed and not data_sources(data):
        raise click.UsageError("your data are needed: pass --text, --image, --audio or --tokens.")


def require_choice(
    search: int | None,
    learn: int | None,
    scheme: str | None,
    device: str | None,
    *,
    opening: Mapping[str, Any],
    like: Path | None,
    data: Mapping[str, Any],
    out: Path | None,
    dry_run: bool,
    force: bool,
    resume: bool,
    **options: Any,
) -> None:
    """Refuse what --search and --learn cannot be combined with, and what they lack.

    Without ``force`` and ``resume``, the state of an interrupted run of --learn is refused.
    """
    if not (search or learn):
        option = "--scheme" if scheme else "--device"
        raise click.UsageError(f"{option} needs --search or --learn.")
    name = "--search" if search else "--learn"
    seed, matrix = (opening["options"][key] for key in ("seed", "matrix"))
    for other, is_given in {
        "--learn": search and learn,
        "--seed": search and seed,
        "--matrix": search and matrix,
        "--dry-run": learn and dry_run,
        "--like": like,
    }.items():
        if is_given:
            raise click.UsageError(f"{name} cannot be combined with {other}.")
    if not scheme:
        raise click.UsageError(f"{name} needs --scheme, such as --scheme w4a8.")
    if not any(data.values()):
        raise click.UsageError(f"{name} needs one of --text, --image, --audio, --tokens.")
    if learn and out and not (force or resume) and learning_state(out).exists():
        raise OutputError(
            f"{learning_state(out)} is of an interrupted run; continue it with --resume, or begin "
            "again with --force"
        )
