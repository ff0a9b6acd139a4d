"""Several processes write one result: the same bytes, or nothing if one of them fails."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from commands import GPT2
from fold_cases import fold, sharded, state, store
from kill_runs import contents
from live_models import ROOT
from several_processes import together

from enjoyln_cli.errors import OutputError
from enjoyln_cli.fs.staging import count_finished, work_of
from enjoyln_cli.rewrite.processes import ALONE, ProcessGroup, gather, present

MEMBER = ROOT / "tests" / "support" / "team_member.py"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return sharded(tmp_path)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.mark.slow
def test_the_bytes_are_those_of_one_process(source: Path, out: Path) -> None:
    fold(source, out)
    whole = contents(out)
    shutil.rmtree(out)
    found = together(*[(MEMBER, source, out)] * 3)
    assert found == [(0, "resumed 0\n"), (0, ""), (0, "")]
    assert contents(out) == whole
    assert sorted(os.listdir(out.parent)) == ["model", "out"]


@pytest.mark.slow
def test_a_process_that_dies_ends_the_run_and_it_can_be_resumed(source: Path, out: Path) -> None:
    dies = 1
    fold(source, out)
    whole = contents(out)
    shutil.rmtree(out)
    commands = [(MEMBER, source, out, *(["die=1"] * (rank == dies))) for rank in range(2)]
    found = together(*commands)
    assert found[dies] == (-9, "") and found[1 - dies][0] != 0
    done = count_finished(work_of(out))
    assert done and not out.exists()
    files = f"{done} finished file{'s' * (done != 1)}"
    words = f"one of the 2 processes has ended early; {files} kept in"
    assert words in found[0][1] and "--resume" in found[0][1]
    found = together(*[(MEMBER, source, out, "resume=1")] * 2)
    assert found == [(0, f"resumed {done}\n"), (0, "")]
    assert contents(out) == whole


@pytest.mark.slow
def test_a_process_with_another_option_is_refused(source: Path, out: Path) -> None:
    found = together((MEMBER, source, out), (MEMBER, source, out, "dtype=bfloat16"))
    assert found[0] == (
        1,
        "error: process 1 differs from process 0: the dtype is torch.bfloat16 there and None "
        "here; start all processes with the same source, options and versions\n",
    )
    assert found[1] == (1, "")
    assert os.listdir(out.parent) == ["model"]


@pytest.mark.slow
def test_machines_that_do_not_share_a_directory(source: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    found = together((MEMBER, source, out), (MEMBER, source, tmp_path / "elsewhere" / "out"))
    assert [status for status, _ in found] == [1, 1]
    assert "process 1 does not see the files that process 0 wrote to" in found[1][1]
    assert not out.exists() and os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.slow
def test_the_process_that_finds_nan_names_the_tensor(tmp_path: Path, out: Path) -> None:
    tensors = state(torch.float32)
    tensors["out.weight"][1, 7] = float("nan")
    store(tmp_path / "model", tensors, "sharded")
    found = together(*[(MEMBER, tmp_path / "model", out)] * 2)
    assert [status for status, _ in found] == [1, 1]
    assert any("out.weight in model-00002-of-00003" in said for _, said in found)
    assert not out.exists()


def test_keeping_means_takes_one_process(source: Path, out: Path) -> None:
    with pytest.raises(OutputError, match="single process"):
        fold(source, out, keep_means=True, team=ProcessGroup(0, 2))
    assert os.listdir(out.parent) == ["model"]


@pytest.mark.slow
def test_only_the_first_process_prints(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("-m", "enjoyln_cli", "fold", GPT2, "-o", out, "--no-verify", "--json")
    (status, said), other = together(words, words)
    assert (status, *other) == (0, 0, "")
    assert json.loads(said)["out"] == str(out)
    (status, said), other = together(words, words)
    assert (status, said, *other) == (1, "", 1, "")


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, ALONE),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ALONE),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ProcessGroup(1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, ProcessGroup(1, 4, 2)),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ALONE),
        ({"RANK": "x", "WORLD_SIZE": "2"}, ALONE),
        ({"RANK": "1"}, ALONE),
    ],
)
def test_the_environment_names_the_processes(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], found: ProcessGroup
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert present() == ALONE, "nobody says where to meet"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert present() == found


def test_a_single_process_works_without_a_group() -> None:
    assert gather(ALONE, "x") == ["x"]
