"""Every example in the README and in docs runs, and prints what its page shows.

The blocks of a page run in order, in a new directory with copies of the test checkpoints:

    ```python      is executed; the blocks of a page share their variables
    ```text        right after such a block is the output of that block
    ```console     runs each command after a ``$``; the lines below are its output

``...`` stands for any text. A number with a decimal point may differ. A number with an exponent is
an error: it may be smaller, or up to a hundred times as large. The norms with the largest input
means may differ, since these means are rounding errors. The width of tables may differ. Everything
else has to be the same. A command has to succeed, unless ``; echo $?`` shows its exit status.
``<!-- needs: peft -->`` before a block names a library; without it, the block is skipped.
``<!-- varies -->`` comes before a block whose output depends on the machine.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import inductor
import pytest
from click.testing import CliRunner
from hub_repositories import TOKEN, Hub
from live_models import ROOT

import enjoyln_cli
from enjoyln_cli.cli.main import main
from enjoyln_cli.runtime.modules import RMSNorm

CHECKPOINTS = ROOT / "tests" / "checkpoints"
PAGES = sorted((ROOT / "docs").rglob("*.md"))

BLOCK = re.compile(
    r"^(?:<!-- needs: (?P<needs>[\w ]+) -->\n)?(?P<varies><!-- varies -->\n)?"
    r"```(?P<kind>python|console)\n(?P<code>.*?)^```$"
    r"(?:\n+```text\n(?P<printed>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
VARIES = re.compile(
    r"(?<=input means: )(?P<mean>\S.*)|(?P<error>\d+(?:\.\d+)?e[+-]\d+)"
    r"|(?P<number>\d+(?:\.\d+)+)|(?P<any>\.\.\.)"
)
A_NUMBER = r"(-?\d+(?:\.\d+)*(?:e[+-]\d+)?)"
LARGER = 100
"""Largest allowed error, divided by the error on the page."""

HUB = "https://huggingface.co"
HERE = "/home/me"
"""The names on a page for the test's own Hub, and for the directory of the test."""
FILES = "https://github.com/enjoyln/enjoyln/blob/main/"
"""Where the README's links lead, as an index of packages shows it without the other files."""


@dataclass(frozen=True)
class Block:
    """One example of a page."""

    place: str
    """Page and line number."""
    kind: str
    code: str
    printed: str | None
    needs: tuple[str, ...]
    varies: bool


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, found.start('code'))}",
            found["kind"],
            found["code"],
            found["printed"],
            tuple((found["needs"] or "").split()),
            bool(found["varies"]),
        )
        for found in BLOCK.finditer(text)
    ]


def same(expected: str, printed: str) -> bool:
    """Whether a page's text and the printed text agree, except where they may differ."""
    expected, printed = (_narrow(text) for text in (expected, printed))
    pattern, errors, end = "", [], 0
    patterns = {"any": "(.*?)", "mean": r"(\S+ \(\S+\)[^\n]*)"}
    for found in VARIES.finditer(expected):
        pattern += re.escape(expected[end : found.start()])
        pattern += patterns.get(str(found.lastgroup), A_NUMBER)
        errors.append(float(found["error"]) if found["error"] else None)
        end = found.end()
    match = re.fullmatch(pattern + re.escape(expected[end:]), printed, re.DOTALL)
    if match is None:
        return False
    pairs = zip(errors, match.groups(), strict=True)
    return all(bound is None or float(text) <= LARGER * bound for bound, text in pairs)


def _narrow(text: str) -> str:
    """The text without widths of tables, spaces at the ends of lines, and what the machine decides.

    The machine decides how fast the disk writes.
    """
    text = re.sub(r"([━─═])\1+", r"\1", text.strip())
    text = re.sub(r"^.* s left\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"[\d.]+ [kMGT]?B/s", "1.0 MB/s", text)
    return re.sub(r" +", " ", re.sub(r" +$", "", text, flags=re.MULTILINE))


def run(page: Path, subtests: pytest.Subtests, hub: str = HUB) -> dict[str, Any]:
    """Run each block of a page in this directory. Returns the variables that its code has set."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        with subtests.test(block.place):
            for library in block.needs:
                if importlib.util.find_spec(library) is None:
                    pytest.skip(f"{library} is not installed")
            if "torch.compile(" in block.code and not inductor.WORKS:
                pytest.skip("Inductor's own code does not compile here")
            if block.kind == "python":
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(block.code, block.place, "exec"), names)
                if block.printed is not None:
                    check(block.printed, out.getvalue())
                continue
            commands = re.split(r"^\$ ", block.code, flags=re.MULTILINE)
            assert commands[0] == "", "text before the first command"
            for text in commands[1:]:
                line, _, printed = text.partition("\n")
                found = shell(line)
                if not block.varies:
                    check(printed, found.replace(hub, HUB).replace(str(Path.cwd()), HERE))
    return names


def check(expected: str, printed: str) -> None:
    assert same(expected, printed), f"it prints:\n{printed}"


def shell(line: str) -> str:
    """The output of a command. ``enjoyln`` runs in this process, which has imported everything.

    A command that follows an installation in the same line runs without it.
    """
    if "pip install" in line:
        line = line.rpartition(" && ")[2]
    command, show, _ = line.partition("; echo $?")
    if command.startswith("enjoyln "):
        command, _, file = command.partition(" > ")
        words = shlex.split(command, comments=True)[1:]
        result = CliRunner().invoke(main, words, prog_name="enjoyln")
        status, printed = result.exit_code, result.stderr if file else result.output
        if file:
            Path(file).write_text(result.stdout)
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path}
        done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment)
        status, printed = done.returncode, done.stdout + done.stderr
    if show:
        return f"{printed}{status}\n"
    assert status == 0, printed
    return printed


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new directory with the checkpoints, where the commands run as in a terminal."""
    shutil.copytree(CHECKPOINTS, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("ENJOYLN_DEBUG", raising=False)
    return tmp_path


@pytest.fixture
def online(hub_server: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use the test's own Hub, as the user ``me``."""
    hub_server.tokens[TOKEN] = "me"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub_server.url


@pytest.mark.one_case
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_examples_of_a_page_run(page: Path, online: str, subtests: pytest.Subtests) -> None:
    run(page, subtests, online)


def test_the_examples_of_the_readme_run(place: Path, subtests: pytest.Subtests) -> None:
    shutil.copytree(CHECKPOINTS, place / CHECKPOINTS.relative_to(ROOT))
    names = run(ROOT / "README.md", subtests)
    assert isinstance(names["model"].transformer.h[0].ln_1, RMSNorm)
    assert names["result"].verification.passed


@pytest.mark.parametrize("page", (ROOT / "docs" / "commands").iterdir(), ids=lambda page: page.stem)
def test_the_page_of_a_command_has_its_options(page: Path) -> None:
    found = {name for param in main.commands[page.stem].params for name in names_of(param)}
    table = page.read_text(encoding="utf-8").rpartition("| option |")[2]
    first = "\n".join(row.split("|")[1] for row in table.splitlines() if row.count("|") > 2)
    assert set(re.findall(r"`(--[a-z0-9-]+)`", first)) == found - {"--help"}


OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
OPTIONS = {
    name: {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    | {"--help", "--version"}
    for name, command in main.commands.items()
}
COMMAND = re.compile(rf"(?:enjoyln )?({'|'.join(OPTIONS)})\b(?!-)")


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_page_names_options_that_their_command_takes(page: Path) -> None:
    """In a command line, and in a sentence that also names a command."""
    text = page.read_text(encoding="utf-8")
    lines = re.findall(r"enjoyln (\w+)([^\n|;`]*)", text)
    lines += re.findall(rf"`({'|'.join(OPTIONS)})( [^`]*)`", FENCED.sub("", text))
    for name, rest in lines:
        wrong = set(OPTION.findall(rest)) - OPTIONS.get(name, set(OPTION.findall(rest)))
        assert not wrong, f"enjoyln {name}{rest}"
    for sentence in re.split(r"(?<=[.:;|])\s|\n\n", FENCED.sub("", text)):
        spans = re.findall(r"`([^`]+)`", sentence)
        commands = {found[1] for span in spans if (found := COMMAND.match(span))}
        named = {option for span in spans if span[:2] == "--" for option in OPTION.findall(span)}
        known = set().union(*(OPTIONS[name] for name in commands or OPTIONS))
        assert named - known <= FOREIGN, f"{commands or 'no command'}: {sentence}"


FOREIGN = {"--beside", "--pdb"}
"""Options of other programs that the pages name."""


def names_of(param: click.Parameter) -> list[str]:
    return [name for name in (*param.opts, *param.secondary_opts) if name.startswith("--")]


def test_the_page_for_developers_shows_a_rule_that_is_there() -> None:
    text = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```py\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert shown in (ROOT / "enjoyln_cli" / "proof" / "rules.py").read_text(encoding="utf-8")


def test_the_changelog_begins_with_this_version_and_is_short() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, _, said = text.split("\n## ")[1].partition("\n")
    assert version == enjoyln_cli.__version__ and said.count("\n") <= 60


def test_the_page_for_library_users_names_what_there_is() -> None:
    text = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", text)) | set(re.findall(r"^## (\w+)$", text, re.MULTILINE))
    assert set(enjoyln_cli.__all__) - {"EnjoyLNError"} <= named


@pytest.mark.parametrize("name", ["analyze", "fold", "verify", "push"])
def test_the_page_for_library_users_names_arguments_that_exist(name: str) -> None:
    text = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {name}$(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    assert section
    cells = re.findall(r"^\|(.*?)\|", section[1].rpartition("| argument |")[2], re.MULTILINE)
    named = {word for cell in cells for word in re.findall(r"`(\w+)`", cell)}
    taken = inspect.signature(getattr(enjoyln_cli, name)).parameters
    assert named and named <= set(taken)


def test_the_counts_of_models_agree_with_the_census() -> None:
    text = (ROOT / "docs" / "which_models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [\w-]+ \| \w+\*? \| \d.*$", text, re.MULTILINE)
    census = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    assert rows and [row for row in rows if f"\n{row}" not in census] == []


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz")
def test_the_picture_is_as_it_is_drawn() -> None:
    shell("enjoyln report gpt2 --save drawn.svg")
    drawn, shown = (
        sorted(re.findall(r">([^<>]+)<", file.read_text(encoding="utf-8")))
        for file in (Path("drawn.svg"), ROOT / "docs" / "pictures" / "gpt2.svg")
    )
    assert drawn == shown


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if page.name == "README.md" and page.parent == ROOT:
            assert re.match(r"https?:|#", link), f"{link} leads nowhere on an index of packages"
            link = link.replace(FILES, f"{ROOT}/")
        if re.match(r"https?:", link):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not heading or heading in headings(target), link


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in found}


@pytest.mark.parametrize(
    ("expected", "printed", "good"),
    [
        ("ratio 0.95, error 4.4e-16", "ratio 1, error 1e-15", True),
        ("error 4.4e-16", "error 4.4e-13", False),
        ("folded 7 of 7", "folded 6 of 7", False),
        ("┏━━━┓\n┃ a ┃", "┏━━━━━┓\n┃  a  ┃  ", True),
        ("one\n...\nlast", "one\ntwo\nthree\nlast", True),
        ("one\n...", "two\nthree", False),
        ("input means: 2.0e-08 (h.0.ln)", "input means: 1.0e-08 (h.1.ln), 0 (a)", True),
        ("input means: 2.0e-08 (h.0.ln)", "input means: none", False),
        ("2 MB of 2 MB, 1.1 MB/s", "1 MB of 2 MB, 1.5 kB/s, 9 s left\n2 MB of 2 MB, 2 B/s", True),
        ("2 MB of 2 MB, 1.1 MB/s", "2 MB of 3 MB, 1.1 MB/s", False),
        ("", "something", False),
    ],
)
def test_what_may_vary_on_a_page_and_what_may_not(expected: str, printed: str, good: bool) -> None:
    assert same(expected, printed) is good
