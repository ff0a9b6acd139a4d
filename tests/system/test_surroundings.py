"""The command on narrow terminals, with closed streams, and in locales without UTF-8."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import GPT2

PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A locale without UTF-8, with Python's own UTF-8 modes off."""


def started(words: list[object], redirected: str = "", **environment: str) -> list[object]:
    """Exit status, standard output and standard error of a command run by a shell."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, "-m", "enjoyln_cli"]
        + [str(word) for word in words],
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
    process = subprocess.Popen(
        [sys.executable, "-m", "enjoyln_cli", "report", *words, "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1


@pytest.mark.slow
def test_a_fold_without_a_reader_is_whole(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [sys.executable, "-m", "enjoyln_cli", "fold", GPT2, "-o", tmp_path / "out", "--no-verify"],
        stdout=writing,
        stderr=writing,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    os.close(writing)
    assert process.returncode == 1
    assert [path.name for path in tmp_path.iterdir()] in ([], ["out"])


@pytest.mark.slow
@pytest.mark.parametrize("redirected", ["2>&-", "<&- >&- 2>&-"])
def test_closed_streams(tmp_path: Path, redirected: str) -> None:
    """Printed text must not go into a file that has the number of a closed stream."""
    out = tmp_path / "out"
    status, _, err = started(["fold", GPT2, "-o", out, "--no-verify"], redirected)
    assert (status, err) == (0, b"")
    again = tmp_path / "again"
    assert started(["fold", GPT2, "-o", again, "--no-verify", "--quiet"]) == [0, b"", b""]
    for path in out.iterdir():
        if path.name != "README.md":
            assert path.read_bytes() == (again / path.name).read_bytes(), path.name


@pytest.mark.slow
@pytest.mark.parametrize("environment", [PLAIN, {"LC_ALL": "C"}], ids=["without", "with"])
def test_a_locale_without_utf8(tmp_path: Path, environment: dict[str, str]) -> None:
    """File names that the locale cannot encode are still read and written."""
    source, out = tmp_path / "modèle", tmp_path / "été"
    shutil.copytree(GPT2, source)
    status, said, _ = started(["fold", source, "-o", out, "--no-verify"], **environment)
    assert status == 0 and said.startswith(b"converted 7 of 7 LayerNorms")
    (out / "README.md").read_bytes().decode("utf-8")
    assert (out / "model.safetensors").is_file()
    words = ["report", GPT2, "--why", "transformer.h.0.ln_1"]
    status, said, err = started(words, **environment)
    assert (status, err) == (0, b"") and said.startswith(b"transformer.h.0.ln_1 becomes RMSNorm")


def on_a_terminal(words: list[object], **environment: str) -> str:
    """The output of a command whose three streams are a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "enjoyln_cli", *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", **environment},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
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
