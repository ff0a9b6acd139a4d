"""What is shown: rows as data, tables, trees and progress, on terminals of every kind."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from live_models import ROOT
from report_cases import CHECKED, ONLY_RMS, PLAN, REASON
from rich.cells import cell_len
from rich.table import Table
from terminal import on_a_terminal

from enjoyln_cli.cli import console, progress
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.proof.explain import Tree
from enjoyln_cli.publish.push import File, Upload
from enjoyln_cli.report import layer_names, notes
from enjoyln_cli.report.model_report import ModelReport
from enjoyln_cli.text import number, size
from enjoyln_cli.verification.verify import Verification


def test_a_report_counts_what_the_plan_says() -> None:
    found = ModelReport("m", PLAN, paper=("h.0.ln", "h.1.ln", "h.2.ln")).to_json()
    assert (found["layernorms"], found["in_weights"], found["become_rmsnorm"]) == (5, 1, 2)
    assert (found["subtractions"], found["tensors_centred"]) == (1, 2)
    assert found["parameters_centred"] == 42
    assert found["plan"]["norms"][2] == {
        "norm": "h.2.ln",
        "status": "stays_layernorm",
        "reason": REASON,
        "culprit": "embed.ln",
        "path": ["h.2", "embed.ln"],
    }
    assert found["paper"] == ["h.0.ln", "h.1.ln", "h.2.ln"]
    assert "paper" not in ModelReport("m", PLAN).to_json()
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["h.0.ln", "h.1.ln", "h.2.ln"], ["h.0-2.ln"]),
        (["h.0.ln", "h.2.ln", "f"], ["h.0,2.ln", "f"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1"], ["a.0-1.b.0-1"]),
        (["a.0.b.0", "a.1.b.1"], ["a.*.b.*"]),
        (["ln_1", "x.10.ln_1"], ["ln_1", "x.10.ln_1"]),
        (["a.01.b", "scale by 0.05"], ["a.01.b", "scale by 0.05"]),
        (["a.01.b", "a.02.b"], ["a.01.b", "a.02.b"]),
        (["scale by 0.05", "scale by 0.06"], ["scale by 0.05", "scale by 0.06"]),
        (["eps 1.5e-05", "eps 2.5e-05"], ["eps 1.5e-05", "eps 2.5e-05"]),
        (["h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2"], ["h.0-1.ln_1-2"]),
        (
            ["sum of h.1.a, 2 times (h.1)", "sum of h.2.a, 2 times (h.2)"],
            ["sum of h.*.a, 2 times (h.*)"],
        ),
        ([], []),
    ],
)
def test_names_that_differ_in_numbers_are_joined(names: list[str], shown: list[str]) -> None:
    assert layer_names.compact(names) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1.234e-16, "1.2e-16"),
        (0.0, "0"),
        (None, "-"),
        (1.0333, "1.03"),
        (0.001, "0.001"),
        (1234.4, "1234"),
        (5e12, "5.0e+12"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_are_readable(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_sizes_are_decimal() -> None:
    assert [size(n) for n in (0, 999, 1500, 4_300_000_000, 7e12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "4.3 GB",
        "7.0 TB",
    ]


def test_notes_name_ops_reasons_and_culprits() -> None:
    text = "\n".join(notes.notes(ModelReport("m", PLAN)))
    assert "mean subtraction added at the output of wte: it is tied to the head" in text
    assert f"2 stay LayerNorm: {REASON}\n    h.2-3.ln" in text
    assert "because of embed.ln" in text
    assert "LayerNorm is used in calls with inputs_embeds" in text


def test_a_note_on_calls_names_inputs_and_no_weights() -> None:
    unproven = ("bool_masked_pos", "embeddings.mask_token")
    *_, last = notes.notes(ModelReport("m", replace(PLAN, unproven=unproven)))
    assert last == "  LayerNorm is used in calls with bool_masked_pos"


def test_a_model_without_layernorm_says_why() -> None:
    assert notes.notes(ModelReport("LLaMA", ONLY_RMS)) == [
        "LLaMA: 33 norms are RMSNorm already, no LayerNorm to convert"
    ]
    bare = replace(ONLY_RMS, other_norms=())
    assert notes.notes(ModelReport("vgg", bare)) == ["vgg: no LayerNorm in this model"]


def test_the_table_shows_the_counts(capsys: pytest.CaptureFixture[str]) -> None:
    reports = [ModelReport("m", PLAN, ("h.0.ln",)), ModelReport("LLaMA", ONLY_RMS)]
    console.write_reports(reports)
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("│ m "))
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        *("m", "5", "2", "1", "3", "1")
    ]
    assert "LLaMA: 33 norms are RMSNorm already" in out
    assert "never used to convert" in out


def test_a_tree_keeps_its_shape_and_its_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    leaf = Tree("w[0]: centred [red]in the weights[/red]", True)
    console.write_tree(Tree("h.0.ln folds", True, (leaf, Tree("embed: opaque", False))))
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines] == [
        "h.0.ln folds",
        "├── w[0]: centred [red]in the weights[/red]",
        "└── embed: opaque",
    ]


def test_a_verification_shows_each_error_beside_the_originals(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console.write_verification(CHECKED)
    out = capsys.readouterr().out
    for text in ("1.2e-16", "2.5e-08", "3.1e-07", "3.0e-07", "1.03", "12.5001", "512 tokens"):
        assert text in out
    assert "largest relative input means: 2.0e-08 (h.0.ln), 1.0e-08 (h.1.ln)\n" in out
    assert out.splitlines()[-1] == CHECKED.summary


def test_a_failed_verification_says_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    console.write_verification(replace(CHECKED, passed=False, failures=("wte is not centred",)))
    assert "wte is not centred" in capsys.readouterr().out


def test_progress_is_silent_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.watch_job(True, "opening") as watch:
        watch.event("warning", "the recipe differs")
        watch.progress(1, 2)
    assert capsys.readouterr() == ("", "")
    assert watch.warnings == ["the recipe differs"]


def test_progress_in_a_pipe_is_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("enjoyln_cli.cli.progress.time.monotonic", lambda: clock[0])
    with progress.watch_job(False, "opening") as watch:
        watch.event("warning", "the recipe differs")
        for clock[0], done in ((101.0, 0), (131.0, 900_000_000), (140.0, 950_000_000)):
            watch.progress(done, 1_000_000_000)
        watch.event("stage", "verifying")
        for clock[0], total in ((169.9, 220.0), (170.0, 220.0), (171.0, 220.0), (210.0, 0.0)):
            watch.seconds(clock[0] - 140, total)
    out, err = capsys.readouterr()
    assert out == "" and "\x1b" not in err
    assert err.splitlines() == [
        "opening",
        "warning: the recipe differs",
        "900.0 MB of 1.0 GB",
        "verifying",
        "30 s of about 3 min 40 s",
        "70 s",
    ]


def test_the_last_line_stays_below_the_messages() -> None:
    job = """
import time
from enjoyln_cli.cli import progress
with progress.watch_job(False, "opening") as watch:
    watch.progress(0, 2_000_000)
    watch.event("warning", "careful")
    watch.progress(1_000_000, 2_000_000)
    time.sleep(0.3)  # the line is drawn ten times a second
    watch.progress(2_000_000, 2_000_000)
    watch.event("stage", "verifying")
    watch.seconds(1.0, 31.0)
    time.sleep(0.3)
    watch.event("download", "fetching")
    print("a bar of the Hub")
"""
    text = re.sub(r"\x1b\[\??[\d;]*[A-Za-z]", "", on_a_terminal("-c", job, COLUMNS="80"))
    lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
    order = ("opening", "warning: careful", "1.0 MB of 2.0 MB", "verifying",
             "3%", "fetching", "a bar of the Hub")  # fmt: skip
    at = [next(n for n, line in enumerate(lines) if words in line) for words in order]
    assert at == sorted(at)
    assert not any(lines[at[-1] + 1 :]), "nothing is left of the line"


def test_a_stage_of_unknown_length_has_no_total() -> None:
    line = progress.LastLine()
    (task,) = line.bar.tasks
    line.count_bytes(2, 2)
    line.begin("stage")
    assert task.total is None and not task.finished
    line.count_seconds(3.0, 3.0)
    assert task.finished
    line.count_seconds(9.0, 0.0)
    assert task.total is None and not task.finished and task.completed == 9.0
    line.begin("stage")
    line.count_seconds(9.0, 12.0)
    assert task.remaining == 3.0
    line.end()


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_any_encoding_does(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    for name in ("stdout", "stderr"):
        stream = io.TextIOWrapper(shown, encoding, write_through=True)
        monkeypatch.setattr(sys, name, stream)
    reports = [ModelReport("a/long/model/名前", PLAN, ()), ModelReport("LLaMA", ONLY_RMS)]
    console.write_reports(reports)
    console.write_tree(Tree("→ root", True, (Tree("leaf", False),)))
    console.write_verification(CHECKED)
    with progress.watch_job(False, "écrire") as watch:
        watch.progress(0, 10)
        watch.progress(10, 10)
    assert "h.2-3.ln" in shown.getvalue().decode(encoding)


@pytest.mark.parametrize(("width", "lines"), [(1, True), (20, True), (79, False), (200, False)])
def test_nothing_of_a_table_is_lost(
    width: int, lines: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("enjoyln_cli.cli.output_lines.PIPED_WIDTH", width)
    table = Table("model", "LNs", "in weights", "")
    table.add_row("an/owner/and/a/name", "1,234", "1,200", "most of them")
    table.add_row("gpt2", "25", "", "[red]")
    console._show(table)
    text = capsys.readouterr().out
    assert (text.splitlines()[0] == "model an/owner/and/a/name") is lines
    for word in ("1,234", "1,200", "in weights", "25", "most of them", "gpt2", "[red]"):
        assert word in text


def every_table() -> None:
    """Print each table that a command prints, with the widest columns that it can have."""
    names = ("tests/checkpoints/gpt2", "sentence-transformers/all-mpnet-base-v2")
    for paper in (None, ("h.0.ln",)):
        console.write_reports([ModelReport(name, PLAN, paper) for name in names])
    console.write_verification(CHECKED)
    files = tuple(File(name, 10**9) for name in ("config.json", "model.safetensors"))
    upload = Upload(Path("out"), "me/model", None, None, False, files, None, "", ())
    console.write_push(upload)
    speeds = Table("case", "original", "folded", "with torch's RMSNorm", "without norms")
    speeds.add_row("prefill, 8 x 1024, float32", "1234.5 ms", "1.012x", "1.021x", "1.034x")
    console._show(speeds)


@pytest.mark.parametrize("width", range(40, 160, 4))
def test_no_word_of_a_table_is_broken(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("enjoyln_cli.cli.output_lines.PIPED_WIDTH", 10_000)
    every_table()
    whole = words_of(capsys.readouterr().out)
    monkeypatch.setattr("enjoyln_cli.cli.output_lines.PIPED_WIDTH", width)
    every_table()
    printed = capsys.readouterr().out
    assert words_of(printed) >= whole
    assert max(map(cell_len, table_lines(printed)), default=0) <= width


def table_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("│", "┃", "┏"))]


def words_of(text: str) -> set[str]:
    """The words of tables, without the first column, whose words may be cut."""
    lines = [line for line in text.splitlines() if not line.startswith(("┏", "┡", "└"))]
    cells = [re.split("[│┃]", line)[1:] for line in lines]
    first = {word for line in cells for word in line[:1] for word in word.split()}
    return set(re.sub("[│┃]", " ", "\n".join(lines)).split()) - first


PAGE = ROOT / "docs" / "formats.md"


def test_every_key_of_a_report_is_documented() -> None:
    found = ModelReport("m", PLAN, paper=()).to_json()
    page = set(re.findall(r"`(\w+)`", PAGE.read_text(encoding="utf-8")))
    named = set(found) | {
        field.name for field in fields(Plan) if field.compare and field.name != "covered"
    }
    assert {"in_weights", "centred_weights", "calls"} <= named
    assert named <= page


def test_every_key_of_a_verification_is_documented() -> None:
    page = set(re.findall(r"`(\w+)`", PAGE.read_text(encoding="utf-8")))
    assert {field.name for field in fields(Verification)} <= page
