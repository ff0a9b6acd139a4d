"""The command on narrow terminals, with closed streams, and in locales without UTF-8."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import GPT2, good, running

PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A locale without UTF-8, with Python's own UTF-8 modes off."""


COMMANDS = """
import sys
from enjoyln_cli.cli.main import main
while "then" in sys.argv:
    at = sys.argv.index("then")
    words, sys.argv[1:] = sys.argv[1:at], sys.argv[at + 1:]
    main(words, standalone_mode=False)
"""


def started(*calls: list[object], redirected: str = "", **environment: str) -> list[object]:
    """Exit status, standard output and standard error of commands in one process of a shell."""
    words = [str(word) for call in calls for word in [*call, "then"]]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, "-c", COMMANDS, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    assert b"Traceback" not in done.stderr
    return [done.returncode, done.stdout, done.stderr]


@pytest.mark.slow
def test_a_reader_that_goes_away() -> None:
    """``| head`` closes the pipe like this once it has its lines."""
    words = [GPT2, GPT2]
    process = running("report", *words, "--format", "json")
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1


@pytest.mark.slow
def test_a_fold_without_a_reader_is_whole(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = ("fold", GPT2, "-o", tmp_path / "out", "--no-verify")
    process = running(*words, stdout=writing, stderr=writing)
    os.close(writing)
    assert process.wait() != 0
    assert [path.name for path in tmp_path.iterdir()] in ([], ["out"])


@pytest.mark.slow
def test_closed_streams(tmp_path: Path) -> None:
    """Printed text must not go into a file that has the number of a closed stream."""
    out = tmp_path / "out"
    status, _, err = started(["fold", GPT2, "-o", out, "--no-verify"], redirected="<&- >&- 2>&-")
    assert (status, err) == (0, b"")
    again = tmp_path / "again"
    good("fold", GPT2, "-o", again, "--no-verify")
    for path in out.iterdir():
        if path.name != "README.md":
            assert path.read_bytes() == (again / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_a_locale_without_utf8(tmp_path: Path) -> None:
    """File names that the locale cannot encode are still read and written."""
    source, out = tmp_path / "modèle", tmp_path / "été"
    shutil.copytree(GPT2, source)
    fold = ["fold", source, "-o", out, "--no-verify", "--quiet"]
    status, said, err = started(fold, ["report", source, "--why", "transformer.h.0.ln_1"], **PLAIN)
    assert (status, err) == (0, b"") and said.startswith(b"transformer.h.0.ln_1 becomes RMSNorm")
    (out / "README.md").read_bytes().decode("utf-8")
    assert (out / "model.safetensors").is_file()


def on_a_terminal(words: list[object], **environment: str) -> str:
    """The output of a command whose three streams are a terminal."""
    ours, theirs = pty.openpty()
    environment = {"TERM": "xterm-256color", **environment}
    process = running(*words, environment=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    received = b""
    try:
        while block := os.read(ours, 65536):
            received += block
    except OSError:  # the terminal's other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0, received
    return received.decode()


@pytest.mark.slow
def test_a_narrow_terminal_shows_every_number() -> None:
    text = on_a_terminal(["report", GPT2], COLUMNS="20", NO_COLOR="1")
    lines = [line.strip() for line in text.splitlines()]
    for line in ("LayerNorms 7", "become RMSNorm 7", "stay 0"):
        assert line in lines
    assert "\x1b[3" not in text, "a colour"


def test_a_narrow_terminal_shows_help() -> None:
    text = on_a_terminal(["fold", "--help"], COLUMNS="20")
    assert "--resume" in text


@pytest.mark.slow
def test_a_fold_on_a_narrow_terminal(tmp_path: Path) -> None:
    words = ["fold", GPT2, "-o", tmp_path / "out", "--no-verify"]
    text = on_a_terminal(words, COLUMNS="20", NO_COLOR="1")
    assert "converted 7 of 7" in text and "\x1b[3" not in text
