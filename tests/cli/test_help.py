"""Help with examples that are right, and completion in shells."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from commands import enjoyln

from enjoyln_cli.cli.help import EXAMPLES, GROUPS
from enjoyln_cli.cli.main import SHELLS, main


@pytest.mark.parametrize("name", list(main.commands))
def test_every_command_has_examples_that_parse(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("book.txt", "sentences.txt"):
        Path(file).touch()
    shown = enjoyln(name, "--help").output
    for example in EXAMPLES[name]:
        assert f"  {example}\n" in shown
        words = shlex.split(example.partition(" >")[0])
        assert words[:2] == ["enjoyln", name]
        main.commands[name].make_context(name, words[2:])


def test_every_option_is_in_a_section_of_the_help() -> None:
    options = [p for c in main.commands.values() for p in c.params if isinstance(p, click.Option)]
    assert {getattr(option, "group", None) for option in options} == {*GROUPS}


def test_options_are_shown_once_and_in_groups() -> None:
    shown = enjoyln("fold", "-h").output
    own = {getattr(p, "group", "") for p in main.commands["fold"].params}
    groups = [group for group in GROUPS if group in own]
    assert len(groups) == 6
    assert "\nYour data:\n" in shown and "\nYour data:\n" not in enjoyln("push", "-h").output
    places = [shown.index(f"\n{name}:\n") for name in (*groups, "Examples")]
    assert places == sorted(places)
    assert places[0] < shown.index("--out") < places[1] < shown.index("--outputs") < places[2]
    assert shown.count("--trust-remote-code") == 1


@pytest.mark.parametrize("shell", list(SHELLS))
def test_completion_is_what_click_asks_back(shell: str) -> None:
    script = enjoyln("completion", shell)
    assert script.exit_code == 0 and f"_ENJOYLN_COMPLETE={shell}_complete" in script.stdout
    assert "enjoyln" in script.stdout


def test_a_shell_completes_options() -> None:
    asked = {"_ENJOYLN_COMPLETE": "bash_complete", "COMP_WORDS": "enjoyln report --sa"}
    code = "from enjoyln_cli.cli.main import main; main(prog_name='enjoyln')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | asked | {"COMP_CWORD": "2"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "plain,--save\n"


def test_an_unknown_shell_is_a_usage_error() -> None:
    assert enjoyln("completion", "tcsh").exit_code == 2
