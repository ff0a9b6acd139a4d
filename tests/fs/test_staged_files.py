"""A file, and the files that belong to it, appear complete or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from stored_files import contents

from enjoyln_cli.errors import OutputError
from enjoyln_cli.fs.staged_files import staged_file

DATA = (Path("model.data"),)


def write(file: Path, text: str, data: str = "", force: bool = False) -> None:
    with staged_file(file, DATA, force=force) as staged:
        staged.write_text(text)
        if data:
            staged.with_name("model.data").write_text(data)


def test_files_appear_together_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "model"
    with staged_file(file, DATA) as staged:
        staged.write_text("graph")
        staged.with_name("model.data").write_text("weights")
        assert staged.name == "model" and staged.parent.parent == tmp_path
        assert not file.exists() and not (tmp_path / "model.data").exists()
    assert contents(tmp_path) == {"model": b"graph", "model.data": b"weights"}


@pytest.mark.parametrize("name", ["model", "model.data"])
def test_an_existing_file_is_replaced_only_with_force(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("old")
    with pytest.raises(OutputError, match=rf"{name} exists; .*--force"):
        write(tmp_path / "model", "graph", "weights")
    assert contents(tmp_path) == {name: b"old"}
    write(tmp_path / "model", "graph", "weights", force=True)
    assert contents(tmp_path) == {"model": b"graph", "model.data": b"weights"}


def test_data_of_a_replaced_file_does_not_stay(tmp_path: Path) -> None:
    write(tmp_path / "model", "graph", "weights")
    write(tmp_path / "model", "small graph", force=True)
    assert contents(tmp_path) == {"model": b"small graph"}


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_files(tmp_path: Path, failure: type[BaseException]) -> None:
    write(tmp_path / "model", "graph", "weights")
    with (
        pytest.raises(failure),
        staged_file(tmp_path / "model", DATA, force=True) as staged,
    ):
        staged.write_text("half")
        raise failure
    assert contents(tmp_path) == {"model": b"graph", "model.data": b"weights"}


def test_a_file_that_appears_in_the_meantime_is_not_replaced(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match="model exists"),
        staged_file(tmp_path / "model", DATA) as staged,
    ):
        staged.write_text("graph")
        (tmp_path / "model").write_text("of another program")
    assert contents(tmp_path) == {"model": b"of another program"}


@pytest.mark.parametrize(
    ("place", "words"),
    [("folder", "it is a directory"), ("nowhere/model", "nowhere is not a directory")],
)
def test_a_place_is_refused(tmp_path: Path, place: str, words: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match=words):
        write(tmp_path / place, "graph", force=True)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_place_that_takes_no_directories() -> None:
    with pytest.raises(OutputError, match="in /proc/self; choose another|not allow new files"):
        write(Path("/proc/self/model"), "graph")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("force", [False, True])
def test_a_directory_that_allows_no_new_files(tmp_path: Path, force: bool) -> None:
    (tmp_path / "model").write_text("old") if force else None
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(OutputError, match="does not allow new files"):
            write(tmp_path / "model", "graph", force=force)
    finally:
        tmp_path.chmod(0o700)
