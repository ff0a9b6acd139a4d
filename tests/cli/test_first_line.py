"""Before a command imports anything slow, it says what it does, or refuses what it can refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import GPT2

from enjoyln_cli.cli.main import main

SLOW = ("torch", "transformers", "numpy", "onnx")

FIRST_WRITE = f"""
import os, sys

class Stream:
    encoding = "utf-8"

    def write(self, text):
        text = text.decode() if isinstance(text, bytes) else text
        if text.strip():
            slow = sorted({{*{SLOW!r}}} & {{*sys.modules}})
            os.write(1, f"{{slow}}\\n{{text}}".encode())
            os._exit(0)

    def flush(self):
        pass

    def isatty(self):
        return False

sys.stdout = sys.stderr = Stream()
from enjoyln_cli.cli.main import main
main(prog_name="enjoyln")
"""
"""Runs a command up to the first text that it writes; prints which slow modules are there."""


def first_write(*arguments: object) -> tuple[str, str]:
    """The slow modules that a command had imported before its first text, and that text."""
    words = [sys.executable, "-c", FIRST_WRITE, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    modules, _, text = done.stdout.partition("\n")
    return modules, text


STARTS = {
    "report": ([GPT2], f"analysing {GPT2}"),
    "fold": ([GPT2, "-o", "new"], f"opening {GPT2}"),
    "rotate": ([GPT2, "-o", "new"], f"opening {GPT2}"),
    "unfold": (["folded", "-o", "new"], "restoring the original of folded"),
    "quantize": ([GPT2, "-o", "new", "--text", "folded/config.json"], f"opening {GPT2}"),
    "verify": (["folded"], "verifying folded"),
    "bench": (["folded"], "opening folded"),
    "export": (["folded", "-o", "new.onnx"], "opening folded"),
    "push": (["folded", "me/model"], "checking folded"),
    "env": ([], "looking for devices and kernels"),
    "completion": (["bash"], "_enjoyln_completion()"),
}
"""Arguments for each command, and how its first text starts."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folded").mkdir()
    Path("folded/config.json").write_text('{"enjoyln": {}}')


@pytest.mark.parametrize("name", main.commands)
def test_every_command_says_at_once_what_it_does(name: str) -> None:
    arguments, text = STARTS[name]
    modules, said = first_write(name, *arguments)
    assert modules == "[]" and said.strip().startswith(text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--widen-mlp", "--untie", "--merge", "bias"], f"opening {GPT2}"),
        (["--rotate", "--seed", "1"], f"opening {GPT2}"),
    ],
)
def test_options_of_a_fold_do_not_delay_it(options: list[str], text: str) -> None:
    modules, said = first_write("fold", GPT2, "-o", "new", *options)
    assert modules == "[]" and said.strip().startswith(text)


ONNX = ["export", GPT2, "-o"]
NOT_FOLDED = f"error: {GPT2} was not folded: its config.json has no enjoyln entry"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["fold", "no/such/model", "-o", "new"], "error: there is no directory 'no/such/model'"),
        (["report", "no/such/model"], "error: there is no directory"),
        (["report", __file__], f"error: {__file__} is a file"),
        (["rotate", f"{GPT2}x", "-o", "new"], f"error: there is no directory '{GPT2}x'; did you"),
        (["fold", GPT2, "-o", GPT2], f"error: {GPT2} is the source itself"),
        (["fold", GPT2, "-o", "."], "error: "),
        (["fold", GPT2, "-o", "full"], "error: {here}/full exists"),
        (["rotate", GPT2, "-o", "/proc/new"], "error: cannot create a directory in /proc"),
        (["unfold", GPT2, "-o", "/proc/new"], "error: cannot create a directory in /proc"),
        (["unfold", "no/such/model", "-o", "new"], "error: there is no directory"),
        (["verify", "no/such/model"], "error: there is no directory"),
        (["verify", GPT2, "--against", "no/such/model"], "error: there is no directory"),
        (["verify", GPT2, "--text", "none.txt"], "Usage: "),
        (["fold", GPT2, "-o", "new", "--recipe", "none.yaml"], "Usage: "),
        (["rotate", GPT2, "-o", "new", "--matrix", "none.pt"], "Usage: "),
        (["fold", GPT2, "-o", "new", "--like", "none"], "Usage: "),
        (["fold", GPT2, "-o", "new", "--samples", "none.txt"], "Usage: "),
        (["bench", GPT2, "--original", "no/such/model"], "error: there is no directory"),
        ([*ONNX, "none/a.onnx"], "error: {here}/none/a.onnx cannot be written"),
        ([*ONNX, "/proc/a.onnx"], "error: /proc/a.onnx cannot be written"),
        ([*ONNX, "a.onnx", "--against", "no/such/model"], "error: there is no directory"),
        (["push", "none", "me/model"], "error: there is no directory 'none'; push a directory"),
        (["push", "no/such/model", "me/model"], "error: there is no directory 'no/such/model'"),
        (["push", GPT2, "me/model"], NOT_FOLDED),
        (["unfold", GPT2, "-o", "new"], NOT_FOLDED),
        (["verify", GPT2], NOT_FOLDED),
        (["bench", GPT2, "--json"], NOT_FOLDED),
        ([*ONNX, "a.onnx"], NOT_FOLDED),
        (["verify", "."], "error: . has no config.json; "),
        (["verify", "full"], "error: full has no config.json; "),
        (["bench", "listed"], "error: listed/config.json holds a JSON list, not an object"),
        (["unfold", "pipeline", "-o", "new"], "error: pipeline was not folded"),
        (["report", GPT2, "--save", "none/a.svg"], "error: none/a.svg cannot be written"),
        (["report", GPT2, "--write-recipe", "none/a.yaml"], "error: none/a.yaml cannot be"),
    ],
)
def test_what_is_wrong_is_refused_at_once(arguments: list[str], text: str) -> None:
    for name, content in {
        "full/notes.txt": "",
        "listed/config.json": "[]",
        "pipeline/modules.json": '[{"path": "0_Transformer"}]',
        "pipeline/0_Transformer/config.json": '{"enjoyln": null}',
    }.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)
    modules, said = first_write(*arguments)
    assert modules == "[]" and said.startswith(text.format(here=os.getcwd()))


@pytest.mark.parametrize("repo_id", ["a/b/c", "me/my model", "me/x.git"])
def test_a_name_that_no_repository_has_is_refused_at_once(repo_id: str) -> None:
    code = f"import sys, runpy; sys.argv = ['enjoyln', 'push', 'folded', {repo_id!r}]"
    code += "\ntry: runpy.run_module('enjoyln_cli', run_name='__main__')"
    code += "\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith(f"error: {repo_id!r} is not a repository name")
    assert done.stdout == "False\n"
