"""The command, called in this process or beside it."""

from __future__ import annotations

from typing import Any

from click.testing import CliRunner, Result
from live_models import CHECKPOINTS
from warm_process import Started, start

from enjoyln_cli.cli.main import main

GPT2 = str(CHECKPOINTS / "gpt2")


def enjoyln(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def good(*arguments: object) -> str:
    result = enjoyln(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object, status: int = 1) -> str:
    """The one line of a refusal."""
    result = enjoyln(*arguments)
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    if status == 1:
        lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert lines == result.stderr.splitlines()[-1:]
    return result.stderr


def running(*arguments: object, **options: Any) -> Started:
    return start("-m", "enjoyln_cli", *arguments, **options)
