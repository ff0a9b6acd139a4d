"""Options of commands, made from the fields of dataclasses, and what several commands print by.

Torch and transformers are imported inside the functions of the commands, and not here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from enjoyln_cli.cli.help import GroupedOption
from enjoyln_cli.plan.option_field import InRange, OptionText, flags_of, options_in

Names = tuple[str, ...]

FOLDER = click.Path(file_okay=False, path_type=Path)
OLD_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)
PATHS = {
    "folder": {"file_okay": False},
    "old folder": {"exists": True, "file_okay": False},
    "file": {"exists": True, "dir_okay": False},
    "old path": {"exists": True},
}
"""What a path has to be, as Click says it."""

CommandFunction = Callable[..., Any]
Decorator = Callable[[CommandFunction], CommandFunction]

option = functools.partial(click.option, cls=GroupedOption)


class Parsed(click.ParamType):
    """A type whose values are made from text by a function that raises ``ValueError``."""

    name = "text"

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value; a default is taken as it is."""
        try:
            return self.parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def names_in(text: str) -> Names:
    """``a,b`` as a tuple of names, each once. Raises ``ValueError`` if there is none."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ValueError("is empty; write logits or logits,*_embeds")
    return names


def options_of(
    kind: type, argument: str, only: Names = (), without: Names = (), **fixed: Any
) -> Decorator:
    """A decorator for a command that takes the options of the dataclass ``kind`` as ``argument``.

    An option that is not on the command line has the default of its field.
    ``only`` and ``without`` choose fields; ``fixed`` are values of fields that are no options here.
    """
    hints = get_type_hints(kind, None, {"torch": SimpleNamespace(dtype=str)}, include_extras=True)
    chosen = {
        name: (default, text)
        for name, default, text in options_in(kind)
        if name not in without and (not only or name in only)
    }

    def decorate(command: CommandFunction) -> CommandFunction:
        def gathered(**passed: Any) -> Any:
            own = {name: passed.pop(name) for name in chosen}
            own = {name: value for name, value in own.items() if value is not None}
            return command(**{argument: kind(**own, **fixed)}, **passed)

        made: CommandFunction = functools.wraps(command)(gathered)
        for name, (default, text) in reversed(chosen.items()):
            made = _option(name, hints[name], default, text)(made)
        return made

    return decorate


def _option(name: str, hint: Any, default: Any, text: OptionText) -> Decorator:
    """The option of the command line for a field."""
    flags = flags_of(name, text)
    written: dict[str, Any] = {"help": text.help, "group": text.group}
    if isinstance(default, bool) or "/" in flags[0]:
        is_off = default and "/" not in flags[0]
        written |= {"default": default} | ({"flag_value": False} if is_off else {"is_flag": True})
    else:
        written |= {"type": _type(hint, text), "metavar": text.metavar}
        written |= {"multiple": text.may_be_repeated}
    if text.shows_default:
        written |= {"default": default, "show_default": True}
    return option(*flags, name, **written)


def _type(hint: Any, text: OptionText) -> Any:
    """The type of an option: what its text says, or else the type of the field."""
    if text.choices:
        return click.Choice(text.choices)
    if text.parse:
        return Parsed(text.parse)
    if text.path:
        return click.Path(path_type=str if hint is str else Path, **PATHS[text.path])
    kinds = [kind for kind in (hint, *get_args(hint)) if kind is not type(None)]
    for kind in kinds:
        if get_origin(kind) is Literal:
            return click.Choice(get_args(kind))
        if get_origin(kind) is tuple:
            return Parsed(names_in)
        for mark in getattr(kind, "__metadata__", ()):
            if isinstance(mark, InRange):
                return _range(kind.__origin__, mark)
    return int if int in kinds else str


class _Numbers(click.FloatRange):
    """A range of numbers, which ``nan`` is not in."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def _range(kind: type, mark: InRange) -> click.ParamType:
    made: Any = click.IntRange if kind is int else _Numbers
    highest = {} if mark.highest == InRange(0).highest else {"max": mark.highest}
    return made(min=mark.lowest, min_open=mark.is_open, **highest)  # type: ignore[no-any-return]


quiet_option = option(
    "--quiet", "-q", is_flag=True, help="Print nothing but errors.", group="Printing"
)
json_option = option(
    "--json", "as_json", is_flag=True, help="Print one JSON object.", group="Printing"
)
