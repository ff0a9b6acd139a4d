"""Before a command imports anything slow, it prints its first line, or refuses early."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from commands import GPT2, refused
from hub_server import nobody

from enjoyln_cli.checkpoint.result_files import PRECISIONS_FILE
from enjoyln_cli.cli.convert_commands import USED_WITH_LIKE
from enjoyln_cli.cli.main import main
from enjoyln_cli.cli.measure_commands import USED_FOR_QUANTISED

FIRST_WRITES = """
import json, os, sys
from enjoyln_cli.cli.main import main

class Stream:
    encoding = "utf-8"

    def write(self, text):
        text = text.decode() if isinstance(text, bytes) else text
        if text.strip() and (is_refused <= text.startswith("error: ")):
            slow = sorted({"torch", "transformers", "numpy", "onnx"} & {*sys.modules})
            os.write(1, json.dumps([slow, text]).encode() + b"\\n")
            os._exit(0)

    def flush(self):
        pass

    def isatty(self):
        return False

for arguments, is_refused in json.load(sys.stdin):
    child = os.fork()
    if not child:
        sys.stdout = sys.stderr = Stream()
        main(arguments, prog_name="enjoyln")
        os._exit(1)
    os.waitpid(child, 0)
"""
"""Runs each command up to the first text that it writes, or with ``is_refused`` to its error.

Prints which slow modules are there.
"""


STARTS = {
    "report": ([GPT2], f"analysing {GPT2}"),
    "fold": ([GPT2, "-o", "new"], f"opening {GPT2}"),
    "rotate": ([GPT2, "-o", "new"], f"opening {GPT2}"),
    "quantize": ([GPT2, "-o", "new", "--text", "folded/config.json"], f"opening {GPT2}"),
    "verify": (["folded"], "verifying folded"),
    "export": (["folded", "-o", "new.onnx"], "opening folded"),
    "push": (["folded", "me/model"], "checking folded"),
    "env": ([], "looking for devices and kernels"),
    "completion": (["bash"], "_enjoyln_completion()"),
}
"""Arguments for each command, and how its first text starts."""


ONNX = ["export", GPT2, "-o"]
VIT = GPT2.replace("gpt2", "vit")
NO_TOKENIZER = f"reading text needs a tokenizer, and {VIT} has none"
NOT_FOLDED = f"error: {GPT2} was not folded: its config.json has no enjoyln entry"


OPTIONS = [
    (["fold", GPT2, "-o", "new", *options], text)
    for options, text in (
        (["--widen-mlp", "--untie", "--merge", "bias"], f"opening {GPT2}"),
        (["--rotate", "--seed", "1"], f"opening {GPT2}"),
    )
]
WRONG = [
    (["fold", "no/such/model", "-o", "new"], "error: there is no directory 'no/such/model'"),
    (["report", "no/such/model"], "error: there is no directory"),
    (["report", __file__], f"error: {__file__} is a file"),
    (["rotate", f"{GPT2}x", "-o", "new"], f"error: there is no directory '{GPT2}x'; did you"),
    (["fold", GPT2, "-o", GPT2], f"error: {GPT2} is the source itself"),
    (["fold", GPT2, "-o", "."], "error: "),
    (["fold", GPT2, "-o", "full"], "error: {here}/full exists"),
    (["rotate", GPT2, "-o", "/proc/new"], "error: cannot create a directory in /proc"),
    (["verify", "no/such/model"], "error: there is no directory"),
    (["verify", GPT2, "--against", "no/such/model"], "error: there is no directory"),
    (["verify", GPT2, "--text", "none.txt"], "Usage: "),
    (["fold", GPT2, "-o", "new", "--recipe", "none.yaml"], "Usage: "),
    (["rotate", GPT2, "-o", "new", "--matrix", "none.pt"], "Usage: "),
    (["fold", GPT2, "-o", "new", "--like", "none"], "Usage: "),
    (["fold", GPT2, "-o", "new", "--samples", "none.txt"], "Usage: "),
    ([*ONNX, "/proc/onnx"], "error: cannot create a directory in /proc"),
    ([*ONNX, "a.onnx", "--against", "no/such/model"], "error: there is no directory"),
    (["push", "none", "me/model"], "error: there is no directory 'none'; push a directory"),
    (["push", "no/such/model", "me/model"], "error: there is no directory 'no/such/model'"),
    (["push", GPT2, "me/model"], NOT_FOLDED),
    (["verify", GPT2], NOT_FOLDED),
    (["export", "gptq", "-o", "a.onnx"], "error: gptq is quantised (gptq)"),
    (["verify", "listed"], "error: listed/config.json holds a JSON list, not an object"),
    (["verify", "."], "error: . has no config.json; "),
    (["verify", "full"], "error: full has no config.json; "),
    (["fold", "full", "-o", "new"], "error: full has no config.json; "),
    (["quantize", "full", "-o", "new", "--text", "full/notes.txt"], "error: full has no config"),
    (["fold", "adapter", "-o", "new"], "error: adapter holds a PEFT adapter"),
    (["report", "adapter"], "error: adapter holds a PEFT adapter"),
    (["rotate", "folded", "-o", "new"], "error: folded is the result of an earlier fold"),
    (["report", "gptq"], "error: gptq is quantised (gptq)"),
    (["verify", "pipeline"], "error: pipeline was not folded"),
    (["push", "quantised", "me/model"], "checking quantised"),
    (["verify", "quantised"], "Usage: "),
    (["quantize", GPT2, "-o", "new"], "Usage: "),
    (["verify", "folded", "--max-ratio", "-1"], "Usage: "),
    ([*ONNX, "a.onnx", "--max-ratio", "0"], "Usage: "),
    (["report", GPT2, "--save", "none/a.svg"], "error: none/a.svg cannot be written"),
    (["report", GPT2, "--write-recipe", "none/a.yaml"], "error: none/a.yaml cannot be"),
    *(
        (["push", "folded", name], f"error: {name!r} is not a repository")
        for name in ("a/b/c", "me/my model", "me/x.git")
    ),
]
QUANTIZE, ROTATE = ["quantize", GPT2, "-o", "new"], ["rotate", GPT2, "-o", "new"]
VERIFY = ["verify", "folded"]
SPACE = "full/notes.txt"
DOT = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a4944415478"
    "9c636000000002000148afa4710000000049454e44ae426082"
)
"""A picture of one pixel."""
WRONG_DATA = [
    ([*QUANTIZE, "--audio", "full"], "error: full/notes.txt cannot be read: "),
    ([*QUANTIZE, "--image", "full"], "error: full/notes.txt cannot be read: it is no image"),
    ([*QUANTIZE, "--image", SPACE], "error: full/notes.txt cannot be read: it is no image"),
    ([*QUANTIZE, "--image", "dot.png"], "error: reading images needs an image processor, and "),
    (["quantize", VIT, "-o", "new", "--image", "dot.png"], "error: too little data: 1 input, but"),
    (["quantize", VIT, "-o", "new", "--text", "folded/config.json"], f"error: {NO_TOKENIZER}"),
    (["fold", VIT, "-o", "new", "--text", "folded/config.json"], f"error: {NO_TOKENIZER}"),
    (["report", VIT, "--fp16", "--text", "folded/config.json"], f"error: {NO_TOKENIZER}"),
    ([*QUANTIZE, "--tokens", "folded/config.json"], "error: folded/config.json, line 1: not a"),
    ([*QUANTIZE, "--tokens", SPACE], "error: full/notes.txt contains no token ids"),
    ([*QUANTIZE, "--text", SPACE], "error: full/notes.txt contains no text"),
    ([*QUANTIZE, "--text", "latin"], "error: latin is not UTF-8"),
    ([*QUANTIZE, "--audio", "gptq"], "error: gptq contains no recordings"),
    ([*VERIFY, "--image", "gptq"], "error: gptq contains no images"),
    ([*VERIFY, "--image", "full"], "error: full/notes.txt cannot be read: it is no image"),
    ([*VERIFY, "--samples", SPACE], "error: full/notes.txt contains no text; write"),
    ([*ROTATE, "--audio", "full"], "error: full/notes.txt cannot be read: "),
    ([*ROTATE, "--search", "2", "--scheme", "w8a8", "--text", "latin"], "error: latin is not"),
]
HUB = [
    (["fold", "gpt2", "-o", "new"], "opening gpt2 from the Hub, since no directory has this name"),
    (["report", "gpt2"], "analysing gpt2 from the Hub, since"),
]
NO_HUB = [
    ["report", "me/model"],
    ["fold", "me/model", "-o", "new"],
    ["rotate", "me/model", "-o", "new"],
    ["quantize", "me/model", "-o", "new", "--text", "folded/config.json"],
    ["verify", "me/model"],
    ["verify", "moved"],
    ["verify", "lost"],
    ["export", "me/model", "-o", "new.onnx"],
]
NAMES = {"moved": "me/model", "lost": "/no/such/model"}
"""Results to the sources in their configs."""
CASES = [
    *(([name, *words], text) for name, (words, text) in STARTS.items()),
    *OPTIONS,
    *HUB,
    *WRONG,
    *WRONG_DATA,
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each command wrote first, in one directory, and the slow modules that it had."""
    here = tmp_path_factory.mktemp("here")
    for name, content in {
        "folded/config.json": '{"enjoyln": {}}',
        "full/notes.txt": " ",
        "latin": "\xe9",
        "dot.png": DOT.decode("latin-1"),
        "adapter/adapter_config.json": "{}",
        "gptq/config.json": '{"quantization_config": {"quant_method": "gptq"}}',
        "listed/config.json": "[]",
        "pipeline/modules.json": '[{"path": "0_Transformer"}]',
        "pipeline/0_Transformer/config.json": '{"enjoyln": null}',
        **{
            f"{name}/config.json": json.dumps({"enjoyln": {"source": source}})
            for name, source in NAMES.items()
        },
        "quantised/enjoyln_precisions.json": "{}",
    }.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(content, encoding="latin-1")
    with nobody() as closed:
        done = subprocess.run(
            [sys.executable, "-c", FIRST_WRITES],
            input=json.dumps([*([w, False] for w, _ in CASES), *([w, True] for w in NO_HUB)]),
            env={**os.environ, "HF_ENDPOINT": closed, "HF_HOME": str(here / "home")},
            capture_output=True,
            text=True,
            check=True,
            cwd=here,
        )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    run = [*(words for words, _ in CASES), *NO_HUB]
    assert len(found) == len(run), done.stderr
    return {"here": here} | {str(words): one for words, one in zip(run, found, strict=True)}


def test_every_command_is_started() -> None:
    assert STARTS.keys() == main.commands.keys()


@pytest.mark.parametrize(
    ("arguments", "text"), CASES, ids=[" ".join(words).replace(GPT2, "GPT2") for words, _ in CASES]
)
def test_a_command_says_at_once_what_it_does_or_what_is_wrong(
    arguments: list[str], text: str, said: dict[str, Any]
) -> None:
    modules, first = said[str(arguments)]
    by_reader = {"numpy"} if "--audio" in arguments else set()  # soundfile imports it
    assert by_reader.issuperset(modules)
    assert first.strip().startswith(text.format(here=said["here"]))


@pytest.mark.parametrize("words", NO_HUB, ids=" ".join)
def test_a_hub_without_an_answer_is_noticed_early(words: list[str], said: dict[str, Any]) -> None:
    modules, error = said[str(words)]
    assert modules == []
    if words[1] == "lost":
        assert "there is no directory '/no/such/model'" in error
    else:
        assert "me/model is not in the cache, and http://127.0.0.1" in error
    assert ("--against" in error) is (words[1] in NAMES)


@pytest.mark.parametrize(
    ("words", "status"), [(["--version"], 0), (["report", "no/such/model"], 1)]
)
def test_a_process_ends_without_looking_for_garbage(words: list[str], status: int) -> None:
    ends = f"""
import atexit, gc, os, sys
atexit.register(lambda: gc.callbacks.append(lambda *_: os.write(1, b"looked for garbage")))
atexit.register(lambda: print("cleaned up"))
from enjoyln_cli.cli.main import run
sys.argv = {["enjoyln", *words]}
run()
"""
    done = subprocess.run([sys.executable, "-c", ends], capture_output=True, text=True)
    assert done.returncode == status
    assert done.stdout.endswith("cleaned up\n")


def value_of(option: click.Option, folder: Path) -> list[str]:
    """The option on a command line, with a value that it accepts."""
    name, kind = max(option.opts, key=len), option.type
    if option.is_flag:
        return [name]
    if isinstance(kind, click.Choice):
        return [name, str(kind.choices[0])]
    if isinstance(kind, click.Path):
        return [name, str(folder / "config.json" if not kind.dir_okay else folder)]
    return [name, "1"]


@pytest.mark.parametrize(
    ("command", "words", "used"),
    [
        (command, ["me/adapter", "-o", "new", "--like", "."], USED_WITH_LIKE)
        for command in ("fold", "rotate")
    ]
    + [("verify", ["."], USED_FOR_QUANTISED)],
)
def test_no_option_is_ignored(
    command: str, words: list[str], used: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    if command == "verify":
        (tmp_path / PRECISIONS_FILE).write_text("{}")
    given = [
        option for option in main.commands[command].params if option.name not in {*used, "help"}
    ]
    ignored = [o for o in given if isinstance(o, click.Option)]
    assert len(ignored) > 5
    for option in ignored:
        told = refused(command, *words, *value_of(option, tmp_path), status=2)
        assert max(option.opts, key=len) in told.rpartition("Error: ")[2]
