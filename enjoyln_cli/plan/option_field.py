"""Fields of frozen dataclasses that are options of a command, and keywords of a public function.

Such a field has the option's name, type, default and help, in one place: ``cli.options`` makes the
option of the command line from it, and ``keywords_of`` the keyword. Nothing slow is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial, wraps
from inspect import Parameter, signature
from typing import Any, Literal, TypeVar

Made = TypeVar("Made")

LARGEST = 2**40


@dataclass(frozen=True)
class InRange:
    """A mark for ``Annotated``: a number from ``lowest`` to ``highest``, both ends included."""

    lowest: float
    highest: float = LARGEST
    is_open: bool = False
    """``lowest`` itself is not included."""

    def __get_pydantic_core_schema__(self, kind: Any, handler: Callable[[Any], Any]) -> Any:
        """Let ``plan.schema`` check the number in a file."""
        from pydantic_core.core_schema import no_info_after_validator_function

        return no_info_after_validator_function(self.checked, handler(kind))

    def checked(self, value: float) -> float:
        """The value. Raises ``ValueError`` if it is outside of the range."""
        if not self.lowest <= value <= self.highest:
            where = f"a number from {self.lowest} to {self.highest}"
            raise ValueError(f"{repr(value)[:60]} instead of {where}")
        return value


ABOVE_ZERO = InRange(0, is_open=True)


@dataclass(frozen=True)
class OptionText:
    """How an option is written on the command line, besides its name, type and default."""

    help: str
    flags: tuple[str, ...] = ()
    """``-o`` and ``--out``, or ``--yes/--no``; by default the name of the field."""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    """The values to choose from, for a field without a ``Literal``."""
    parse: Callable[[str], Any] | None = None
    """Makes the value from text; raises ``ValueError`` for a wrong text."""
    path: Literal["folder", "old folder", "file", "old path"] | None = None
    """What a path has to be; only ``folder`` may be new."""
    may_be_repeated: bool = False
    """Whether it may be given several times; the value is a tuple."""
    shows_default: bool = False
    """Whether the help shows the default."""
    group: str = "Options"
    """The section of the help."""
    is_in_card: bool = True
    """Whether the command in a model card, which repeats a conversion, has this option."""


def option(default: Any, help: str, *, repr: bool = True, **written: Any) -> Any:
    """A field of a dataclass that is an option; ``written`` are fields of ``OptionText``."""
    return field(default=default, repr=repr, metadata={"option": OptionText(help, **written)})


hub_option = partial(option, group="The Hub")
plan_option = partial(option, group="The plan")
data_option = partial(option, group="Your data")
measuring_option = partial(option, group="Measuring")


def keyword(default: Any, help: str) -> Any:
    """A field that is a keyword of a public function, and no option of a command."""
    return field(default=default, repr=False, metadata={"help": help})


def options_in(kind: Any) -> Iterator[tuple[str, Any, OptionText]]:
    """The name, the default and the text of each option of a dataclass."""
    for each in fields(kind):
        if "option" in each.metadata:
            yield each.name, each.default, each.metadata["option"]


def flags_of(name: str, text: OptionText) -> tuple[str, ...]:
    """The flags of the option with this name, as Click takes them."""
    return text.flags or (f"--{name.replace('_', '-')}",)


def flag_for(name: str, value: Any, text: OptionText) -> str:
    """The flag that gives the option ``value``, or that switches it off for ``False``."""
    on, _, off = flags_of(name, text)[-1].partition("/")
    return off if off and value is False else on


def changed_options(options: Any) -> Iterator[tuple[str, Any, OptionText]]:
    """The options that do not have their default, with their values, also of inner dataclasses.

    Options that are switched off come last.
    """
    for each in sorted(fields(options), key=lambda field: getattr(options, field.name) is False):
        value = getattr(options, each.name)
        if is_dataclass(value):
            yield from changed_options(value)
        elif "option" in each.metadata and value != each.default:
            yield each.name, value, each.metadata["option"]


def made_from(kind: Callable[..., Made], values: Mapping[str, Any]) -> Made:
    """A dataclass ``kind`` with the ``values`` that it has fields for; the others are ignored."""
    names: Any = fields(kind)  # type: ignore[arg-type]
    return kind(**{each.name: values[each.name] for each in names if each.name in values})


def _help(named: Any) -> str:
    """The help of a field. A flag that switches the field off says what ``False`` does."""
    text = named.metadata.get("option")
    if text is None:
        return str(named.metadata["help"])
    is_off = any(flag.startswith("--no-") for flag in text.flags)
    return f"``False``: {text.help[0].lower()}{text.help[1:]}" if is_off else text.help


def keywords_of(**kinds: type) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """A decorator for a public function, whose keywords are the fields of these dataclasses.

    The function itself gets each dataclass by the name that it has here. Its signature has the
    fields, and its docstring ends with their help.
    """
    named = {each.name: each for kind in kinds.values() for each in fields(kind)}

    def decorate(function: Callable[..., Made]) -> Callable[..., Made]:
        @wraps(function)
        def called(*args: Any, **keywords: Any) -> Made:
            made = {argument: made_from(kind, keywords) for argument, kind in kinds.items()}
            rest = {name: value for name, value in keywords.items() if name not in named}
            if unknown := next((name for name in rest if name in kinds), None):
                raise TypeError(f"{function.__name__}() has no keyword {unknown!r}")
            return function(*args, **made, **rest)

        own = signature(function)
        every = [each for name, each in own.parameters.items() if name not in kinds]
        every += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
            for name, each in named.items()
        ]
        every.sort(key=lambda each: each.kind)
        called.__signature__ = own.replace(parameters=every)  # type: ignore
        lines = [f"    * ``{name}``: {_help(each)}" for name, each in named.items()]
        called.__doc__ = "\n".join([(function.__doc__ or "").rstrip(), "", *lines, ""])
        return called

    return decorate
