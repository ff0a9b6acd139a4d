"""The command on narrow terminals, with closed streams, and in locales without UTF-8."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import GPT2, enjoyln, refused, running
from terminal import on_a_terminal

PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A locale without UTF-8, with Python's own UTF-8 modes off."""


@pytest.mark.slow
def test_a_fold_without_a_reader_is_whole(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = ("fold", GPT2, "-o", tmp_path / "out", "--no-verify")
    process = running(*words, stdout=writing, stderr=writing)
    os.close(writing)
    assert process.wait() == 1
    assert [path.name for path in tmp_path.iterdir()] in ([], ["out"])


@pytest.mark.slow
def test_closed_streams_in_a_locale_without_utf8(tmp_path: Path) -> None:
    """Printed text must not go into a file that has the number of a closed stream.

    A path that the locale cannot encode is refused: other programs could not open the result.
    """
    source, out, again = (tmp_path / name for name in ("model", "out", "again"))
    shutil.copytree(GPT2, source)

    def fold(place: Path) -> subprocess.CompletedProcess[bytes]:
        words = ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", sys.executable, "-m", "enjoyln_cli"]
        words += ["fold", str(source), "-o", str(place), "--no-verify"]
        return subprocess.run(words, env={**os.environ, **PLAIN}, stdout=subprocess.PIPE)

    refused = tmp_path / "\u00e9t\u00e9"
    assert fold(refused).returncode == 1 and not refused.exists()
    done = fold(out)
    assert done.returncode == 0 and done.stdout.startswith(b"converted 7 of 7 LayerNorms")
    assert enjoyln("fold", source, "-o", again, "--no-verify", "--quiet").output == ""
    (out / "README.md").read_bytes().decode("utf-8")
    names_the_source = ("README.md", "config.json")
    for path in out.iterdir():
        if path.name not in names_the_source:
            assert path.read_bytes() == (again / path.name).read_bytes(), path.name
    json.loads((out / "config.json").read_text())


@pytest.mark.slow
def test_a_narrow_terminal_shows_every_number(tmp_path: Path) -> None:
    fold = ["fold", GPT2, "-o", str(tmp_path / "out"), "--no-verify"]
    commands = f"""
from enjoyln_cli.cli.main import main
for words in (["report", {GPT2!r}], {fold}):
    main(words, standalone_mode=False)
"""
    text = on_a_terminal("-c", commands, COLUMNS="20", NO_COLOR="1")
    for line in ("LayerNorms 7", "become RMSNorm 7", "stay 0", "converted 7 of 7"):
        assert line in text
    assert "\x1b[3" not in text, "a colour"


def test_tests_use_one_thread_in_a_process(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (1, "1")
    plugins = pytestconfig.pluginmanager
    workers = plugins.subset_hook_caller("pytest_xdist_auto_num_workers", [])

    def chosen(*arguments: object) -> int:
        config = SimpleNamespace(args=[str(argument) for argument in arguments])
        return int(workers(config=config))

    assert chosen(__file__) == chosen(f"{__file__}::test_one", __file__) == 0
    assert chosen(tmp_path) == chosen(tmp_path, __file__) == min(8, os.cpu_count() or 1)


LOUD = """
import logging, warnings
import click
from enjoyln_cli.cli import help
from enjoyln_cli.cli.group import Commands

@click.group(cls=Commands)
def main() -> None: ...

@main.command()
def load() -> None:
    logging.warning("a library could not be loaded")
    logging.getLogger("torchao").warning("a kernel could not be loaded")
    warnings.warn("a function is deprecated")
    logging.getLogger("torchao").error("memory is lost")

try:
    main()
finally:
    logging.getLogger("mine").warning("outside of the command")
"""


@pytest.mark.parametrize("debug", ["", "1"])
def test_warnings_of_libraries_do_not_stand_in_the_output(debug: str) -> None:
    environment = {**os.environ, "ENJOYLN_DEBUG": debug}
    words = [sys.executable, "-c", LOUD, "load"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout == ""
    assert "memory is lost" in done.stderr and "outside of the command" in done.stderr
    assert ("could not be loaded" in done.stderr) is ("is deprecated" in done.stderr) is bool(debug)


@pytest.mark.parametrize("command", ["report", "fold", "rotate"])
def test_commands_refuse_quantised_models_in_the_same_words(command: str, tmp_path: Path) -> None:
    shutil.copytree(GPT2, tmp_path / "gpt2-4bit")
    file = tmp_path / "gpt2-4bit" / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    file.write_text(json.dumps(config))
    place = [] if command == "report" else ["-o", tmp_path / "out"]
    line = refused(command, file.parent, *place).splitlines()[-1]
    assert line == (
        f"error: {file.parent} is quantised (gptq), and rounded weights cannot be compared "
        "or edited exactly; convert the original checkpoint, then quantise the result"
    )
    file.write_text(json.dumps(config | {"enjoyln": {"version": 4}}))
    assert "use the converted checkpoint that it was" in refused(command, file.parent, *place)
