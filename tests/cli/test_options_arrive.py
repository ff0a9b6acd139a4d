"""Each option of each command changes what the library is asked for, or is refused by its name."""

from __future__ import annotations

import importlib
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from commands import GPT2, enjoyln
from live_models import ROOT

from enjoyln_cli.cli.main import main

TEXT = ["--text", str(ROOT / "LICENSE")]
ASKED = {
    "fold": ([GPT2, "-o", "new"], ["conversion.fold:prepare", "conversion.fold:write"]),
    "rotate": (
        [GPT2, "-o", "new", *TEXT, "--search", "2", "--scheme", "w8a8"],
        ["conversion.fold:prepare", "conversion.fold:write", "cli.convert_commands:_choose"],
    ),
    "quantize": ([GPT2, "-o", "new", *TEXT], ["quantisation.quantize:quantize"]),
    "verify": (["result"], ["verification.verify:check_result"]),
    "export": (["result", "-o", "new"], ["onnx_export.export:export"]),
    "push": (
        ["result", "me/model", "--yes", "-q"],
        ["publish.push:prepare", "cli.console:upload_line", "publish.push:send"],
    ),
}
"""For each command, arguments and the functions of the library that it calls."""
SHOWN = {"quiet", "as_json", "help"}
"""Options of what is printed."""


def value_of(option: click.Option, folder: Path) -> list[str]:
    """The option on a command line, with another value than its default."""
    name, kind = max((*option.opts, *option.secondary_opts), key=len), option.type
    if option.is_flag:
        return [option.opts[0] if option.default is not True else name]
    if isinstance(kind, click.Choice):
        return [name, str(next(one for one in kind.choices[::-1] if one != option.default))]
    if isinstance(kind, click.Path):
        return [name, str(folder / "file.txt" if not kind.dir_okay else folder / "result")]
    if isinstance(kind, click.IntRange | click.FloatRange) and kind.max is not None:
        return [name, str(kind.max - 1)]
    return [name, "7"]


def shown(value: Any) -> Any:
    """All parts of a value, also those that its ``repr`` leaves out."""
    if is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, dict):
        return {name: shown(one) for name, one in value.items()}
    return [shown(one) for one in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize("command", ASKED)
def test_no_option_stops_half_way(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "result").mkdir()
    (tmp_path / "result" / "config.json").write_text('{"enjoyln": {}}')
    (tmp_path / "file.txt").write_text("word " * 99)
    words, functions = ASKED[command]
    asked: list[str] = []

    def recorder(function: str) -> Any:
        def record(*args: Any, **given: Any) -> SimpleNamespace:
            told = {name: value for name, value in given.items() if not name.startswith("on_")}
            asked.append(f"{function} {shown(args)} {shown(told)}")
            return SimpleNamespace()

        return record

    for function in functions:
        module, name = function.split(":")
        monkeypatch.setattr(importlib.import_module(f"enjoyln_cli.{module}"), name, recorder(name))
    enjoyln(command, *words)
    usual = [*asked]
    assert usual
    lost = []
    for option in main.commands[command].params:
        if not isinstance(option, click.Option) or option.name in SHOWN or option.opts[0] in words:
            continue
        asked.clear()
        result = enjoyln(command, *words, *value_of(option, tmp_path))
        by_name = option.opts[-1] in result.stderr and "Invalid value" not in result.stderr
        if asked == usual and not by_name:
            lost.append((option.opts[-1], result.stderr))
    assert lost == []
