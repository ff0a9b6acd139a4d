"""The command, called in this process or beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from click.testing import CliRunner, Result
from hub_repositories import TOKEN
from live_models import CHECKPOINTS

from enjoyln_cli.cli.main import main

GPT2 = str(CHECKPOINTS / "gpt2")


def enjoyln(*arguments: object, **environment: str) -> Result:
    words = [str(argument) for argument in arguments]
    result = CliRunner().invoke(main, words, env=environment)
    assert TOKEN not in result.output
    return result


def good(*arguments: object, **environment: str) -> str:
    result = enjoyln(*arguments, **environment)
    assert result.exit_code == 0, result.output
    return result.stdout


def ignore(*_: object) -> None:
    """Hears of events and progress, and does nothing."""


def refused(*arguments: object, status: int = 1, **environment: str) -> str:
    """The one line of a refusal."""
    result = enjoyln(*arguments, **environment)
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    if status == 1:
        lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert lines == result.stderr.splitlines()[-1:]
    return result.stderr


def python(
    *words: object, environment: Mapping[str, str] | None = None, **streams: Any
) -> subprocess.Popen[str]:
    """Start Python with these words on its command line.

    By default, the standard input is empty and both outputs are pipes. Settings of
    ``huggingface_hub`` are not inherited, since commands in this process make some.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        env={**inherited, **path, **(environment or {})},
        text=True,
        errors="surrogateescape",
        **(pipes | streams),
    )


def running(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    return python("-m", "enjoyln_cli", *arguments, **options)
