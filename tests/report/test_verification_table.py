"""The table of verification results, which is the same in the terminal and the model card."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_cases import CHECKED

from enjoyln_cli.checkpoint.result_files import VERIFY_FILE
from enjoyln_cli.cli import console
from enjoyln_cli.publish import card
from enjoyln_cli.report.verification_table import (
    verification_heads,
    verification_rows,
)


def test_an_object_and_its_file_give_the_same_rows() -> None:
    rows = verification_rows(vars(CHECKED))
    assert rows == verification_rows(json.loads(json.dumps(CHECKED.to_json())))
    assert all(len(row) == len(verification_heads(vars(CHECKED))) for row in rows)
    assert len(rows) == len({row[0] for row in rows}) == 8


def test_a_model_without_rmsnorm_has_one_error_of_its_runs() -> None:
    """A model that was only rotated runs in the plain class, with or without this package."""
    rows = verification_rows(vars(replace(CHECKED, norm_input_mean={})))
    assert ("runtime error", "3.2e-07", "3.0e-07", "plain class, in float32") in rows
    assert "stock error" not in [row[0] for row in rows]
    assert not any("RMSNorm" in text for row in rows for text in row)
    assert verification_heads({"norm_input_mean": {}})[1] == "rotated"
    assert verification_heads(vars(CHECKED))[1] == "folded"


def test_the_terminal_and_the_card_show_the_same_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enjoyln_cli.cli.output_lines.PIPED_WIDTH", 200)
    (tmp_path / VERIFY_FILE).write_text(json.dumps(CHECKED.to_json()))
    console.write_verification(CHECKED)
    lines = [
        tuple(cell.strip() for cell in line.strip("│").split("│"))
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("│")
    ]
    assert lines == card.state(tmp_path, "", "me/x", ())["checks"]
    assert lines == verification_rows(vars(CHECKED))


def test_the_ratio_has_a_limit_and_what_chance_allows() -> None:
    row = ("ratio", "1.03", "1", "limit 1.25 (1.44 for so few inputs)")
    assert row in verification_rows(vars(CHECKED))


def test_a_model_without_logits_has_no_rows_about_them() -> None:
    rows = verification_rows(vars(replace(CHECKED, kl=None, top1_agreement=None)))
    assert not {"KL divergence", "top-1 agreement"} & {row[0] for row in rows}
    assert len(rows) == len(verification_rows(vars(CHECKED))) - 2


def test_a_perplexity_of_few_tokens_is_marked() -> None:
    scores = {"original": 12.5, "folded": 12.25, "tokens": 255}
    *few, note = verification_rows(vars(replace(CHECKED, perplexity=scores)))[-1]
    assert few == ["perplexity", "12.2500", "12.5000"]
    assert note == "over 255 tokens: too few to be reliable"
    many = verification_rows(vars(replace(CHECKED, perplexity={**scores, "tokens": 256})))[-1]
    assert many[3] == "over 256 tokens"
    none = verification_rows(vars(replace(CHECKED, perplexity=None)))
    assert none[-1][0] == "top-1 agreement"


@pytest.mark.parametrize("value", ["1.0", [], {}, {"tokens": None}])
@pytest.mark.parametrize("key", ["identity_error", "ratio", "perplexity"])
def test_an_edited_file_has_no_table_in_the_card(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / VERIFY_FILE).write_text(json.dumps({**CHECKED.to_json(), key: value}))
    shown = card.state(tmp_path, "", "me/x", ())["checks"]
    assert shown == [] or (not value and key == "perplexity")
    (tmp_path / VERIFY_FILE).write_text("{}")
    assert card.state(tmp_path, "", "me/x", ())["checks"] == []


def test_how_many_inputs_were_run() -> None:
    some = replace(CHECKED, rows=8, full_rows=128, inputs_are="images")
    assert some.to_json()["count"] == "8 of 128 images"
    assert replace(some, full_rows=8).to_json()["count"] == "8 images"
