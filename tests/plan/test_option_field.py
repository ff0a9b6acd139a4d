"""An option stands once: in a field, from which a command's option and a keyword are made."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal

import click
import pytest
from click.testing import CliRunner

import enjoyln_cli
from enjoyln_cli.checkpoint.open_options import OpenOptions
from enjoyln_cli.cli.help import Command
from enjoyln_cli.cli.main import main
from enjoyln_cli.cli.options import options_of
from enjoyln_cli.plan.fold_options import FoldOptions, WriteOptions
from enjoyln_cli.plan.option_field import (
    ABOVE_ZERO,
    InRange,
    changed_options,
    keyword,
    keywords_of,
    option,
    options_in,
)
from enjoyln_cli.publish.push_options import PushOptions
from enjoyln_cli.text import bytes_in
from enjoyln_cli.verification.verify_options import CheckOptions, VerifyOptions


@dataclass(frozen=True)
class Given:
    count: Annotated[int, InRange(1)] | None = option(None, "A count.", metavar="N")
    ratio: Annotated[float, ABOVE_ZERO] = option(1.5, "A ratio.")
    kind: Literal["a", "b"] | None = option(None, "A kind.", group="Measuring")
    names: tuple[str, ...] = option((), "Some names.")
    size: int | None = option(None, "A size.", parse=bytes_in)
    fast: bool = option(False, "Be fast.")
    check: bool = option(True, "Skip the check.", flags=("--no-check",))
    seed: int = keyword(3, "A seed.")


@click.command(cls=Command)
@options_of(Given, "given", without=("fast",), seed=4)
def command(given: Given) -> None:
    click.echo(repr(tuple(getattr(given, each.name) for each in fields(given))))


def said(*words: str) -> Any:
    return CliRunner().invoke(command, list(words))


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([], (None, 1.5, None, (), None, False, True, 4)),
        (["--count", "2", "--ratio", "0.5"], (2, 0.5, None, (), None, False, True, 4)),
        (["--kind", "b", "--no-check"], (None, 1.5, "b", (), None, False, False, 4)),
        (["--names", "x, y,x"], (None, 1.5, None, ("x", "y"), None, False, True, 4)),
        (["--size", "2kB"], (None, 1.5, None, (), 2000, False, True, 4)),
    ],
)
def test_a_command_takes_the_fields(words: list[str], values: tuple[Any, ...]) -> None:
    assert said(*words).output == f"{values!r}\n"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--count", "0"], "0 is not in the range x>=1"),
        (["--ratio", "0"], "0.0 is not in the range x>0"),
        (["--ratio", "nan"], "'nan' is not a number"),
        (["--kind", "c"], "'c' is not one of 'a', 'b'"),
        (["--names", ","], "is empty"),
        (["--size", "big"], "'big' is not a size; write 5GB or 500MB"),
        (["--fast"], "No such option"),
        (["--seed", "1"], "No such option"),
    ],
)
def test_a_wrong_value_is_refused(words: list[str], why: str) -> None:
    found = said(*words)
    assert found.exit_code == 2 and why in found.output


@keywords_of(given=Given)
def function(place: str, *, given: Given, more: int = 0) -> tuple[str, Given, int]:
    """Do it.

    The other keywords:
    """
    return place, given, more


def test_a_function_takes_the_fields() -> None:
    assert function("x", count=2, more=1) == ("x", Given(count=2), 1)
    found = inspect.signature(function).parameters
    assert [*found][:3] == ["place", "more", "count"] and "given" not in found
    assert found["ratio"].default == 1.5 and found["seed"].default == 3
    assert "* ``count``: A count.\n" in str(function.__doc__)
    assert "* ``check``: ``False``: skip the check.\n" in str(function.__doc__)
    for wrong in ({"given": Given()}, {"counts": 2}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            function("x", **wrong)


def test_what_is_changed_is_listed_with_what_is_off_at_the_end() -> None:
    found = [(name, value) for name, value, _ in changed_options(Given(check=False, count=2))]
    assert found == [("count", 2), ("check", False)] and not [*changed_options(Given())]


@pytest.mark.parametrize(
    ("command_name", "function_name", "kinds"),
    [
        ("fold", "fold", (OpenOptions, FoldOptions, WriteOptions, CheckOptions)),
        ("verify", "verify", (OpenOptions, VerifyOptions)),
        ("push", "push", (PushOptions,)),
    ],
)
def test_command_and_function_have_the_same(
    command_name: str, function_name: str, kinds: tuple[type, ...]
) -> None:
    keywords = inspect.signature(getattr(enjoyln_cli, function_name)).parameters
    options = {str(each.name): each for each in main.commands[command_name].params}
    for kind in kinds:
        for name, default, text in options_in(kind):
            assert keywords[name].default == default is not MISSING
            assert isinstance(options[name], click.Option) and options[name].help == text.help
