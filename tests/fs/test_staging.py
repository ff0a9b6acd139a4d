"""The output directory appears complete or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stored_files import contents

from enjoyln_cli.errors import OutputError
from enjoyln_cli.fs.staging import check_file, check_place, staged_output, work_of
from enjoyln_cli.fs.whole_file import write_whole


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def test_appears_at_the_end_and_not_before(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    with staged_output(out, source=source, force=False) as staged:
        (staged / "inner").mkdir()
        (staged / "inner" / "a.txt").write_text("a")
        (staged / "b.txt").write_text("b")
        assert not out.exists()
        assert staged.parent.parent == out.parent
    assert contents(out) == {"inner/a.txt": b"a", "b.txt": b"b"}
    assert names(tmp_path) == ["out", "source"]


def test_has_the_permissions_of_any_new_directory(tmp_path: Path, source: Path) -> None:
    (tmp_path / "other").mkdir()
    with staged_output(tmp_path / "out", source=source, force=False):
        pass
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("force", [False, True])
def test_a_failure_leaves_everything_as_it_was(
    tmp_path: Path, source: Path, failure: type[BaseException], force: bool
) -> None:
    out = tmp_path / "out"
    if force:
        out.mkdir()
        (out / "old.txt").write_text("old")
    before = contents(tmp_path)
    with pytest.raises(failure), staged_output(out, source=source, force=force) as staged:
        (staged / "half.txt").write_text("half")
        raise failure
    assert contents(tmp_path) == before
    assert out.exists() == force


def test_what_a_killed_trial_has_left_is_removed(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "new" / "out"
    out.parent.mkdir()
    (out.parent / ".enjoyln.trial").mkdir()
    with staged_output(out, source=source, force=False):
        pass
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_force_replaces_a_directory(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    (out / "inner").mkdir(parents=True)
    (out / "inner" / "old.txt").write_text("old")
    with staged_output(out, source=source, force=True) as staged:
        (staged / "new.txt").write_text("new")
        assert contents(out) == {"inner/old.txt": b"old"}
    assert contents(out) == {"new.txt": b"new"}
    assert names(tmp_path) == ["out", "source"]


def test_force_replaces_a_link_but_not_its_target(tmp_path: Path, source: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a.txt").write_text("a")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "file").write_text("old")
    for name in ("link", "file"):
        with staged_output(tmp_path / name, source=source, force=True) as staged:
            (staged / "new.txt").write_text("new")
        assert contents(tmp_path / name) == {"new.txt": b"new"}
    assert contents(tmp_path / "kept") == {"a.txt": b"a"}


def test_a_place_taken_in_the_meantime_is_left_alone(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    with (
        pytest.raises(OutputError, match="appeared in the meantime"),
        staged_output(out, source=source, force=False),
    ):
        out.mkdir()
    assert names(tmp_path) == ["out", "source"]


REFUSED = {
    "directory": "exists; .*--force",
    "file": "exists; .*--force",
    "link": "exists; .*--force",
    "source": "is the source itself",
    "alias": "is the source itself",
    "x/../source": "is the source itself",
    "source/out": "lies inside the source",
    "alias/out": "lies inside the source",
    ".": "contains the source",
    "here": "contains the working directory",
    "file/out": "is not a directory",
    "file/no/out": "is not a directory",
    "x" * 300: "name that is too long",
    f"none/{'x' * 300}/out": "name that is too long",
}
"""Places for a result beside the source, and why they are refused; most of them with force, too."""


@pytest.mark.parametrize(("place", "words"), REFUSED.items(), ids=lambda text: text[:20])
def test_a_place_is_refused(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, place: str, words: str
) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "alias").symlink_to(source)
    (tmp_path / "here" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "deep")
    if place != "here":
        refuses(tmp_path / place, source, words, force=False)
    if "--force" not in words:
        refuses(tmp_path / place, source, words, force=True)


def test_missing_parents_are_made_and_are_gone_after_a_failure(
    tmp_path: Path, source: Path
) -> None:
    out = tmp_path / "a" / "b" / "out"
    with (
        pytest.raises(ValueError, match="stopped"),
        staged_output(out, source=source, force=False),
    ):
        raise ValueError("stopped")
    assert names(tmp_path) == ["source"]
    with staged_output(out, source=source, force=False) as staged:
        (staged / "file").write_text("whole")
    assert (out / "file").read_text() == "whole" and names(out.parent) == ["out"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_parent_that_cannot_be_written_to(tmp_path: Path, source: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    refuses(tmp_path / "closed" / "out", source, "cannot create a directory in", force=False)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a place that is read-only")
def test_a_file_system_that_cannot_be_written_to(source: Path) -> None:
    for out in (Path("/proc/out"), Path("/proc/self/none/out")):
        with pytest.raises(OutputError, match="cannot create a directory in /proc"):
            check_place(out, source=source, force=False)
    with pytest.raises(OutputError, match="/proc does not allow new files"):
        check_file(Path("/proc/new"))


def refuses(out: Path, source: Path, words: str, force: bool) -> None:
    before = names(source), names(source.parent)
    with (
        pytest.raises(OutputError, match=words) as caught,
        staged_output(out, source=source, force=force),
    ):
        pytest.fail("the block must not run")
    assert "\n" not in str(caught.value)
    assert (names(source), names(source.parent)) == before


def test_a_parent_that_goes_away_ends_the_run(tmp_path: Path, source: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()

    def gone(*_: object, **__: object) -> Path:
        shutil.rmtree(parent)
        parent.write_text("a file in its place")
        return parent / "out"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("enjoyln_cli.fs.staging.check_place", gone)
        with (
            pytest.raises(OutputError, match="parent cannot be written to"),
            staged_output(parent / "out", source=source, force=False),
        ):
            pass
    assert parent.is_file()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is full")
def test_a_full_disk(tmp_path: Path, source: Path) -> None:
    with (
        pytest.raises(OutputError, match="the disk is full; free some space"),
        staged_output(tmp_path / "out", source=source, force=False) as staged,
    ):
        (staged / "half.txt").write_text("half")
        Path("/dev/full").write_bytes(b"more")
    assert names(tmp_path) == ["source"]


# Single files.


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError("I/O error: no space (os error 28)"),
            "the disk is full",
        ),
        (RuntimeError("I/O error: File too large (os error 27)"), "forbids files of this size"),
        (OSError("problem writing element 4096 to file"), "problem writing element 4096"),
    ],
)
def test_a_library_that_cannot_write_its_file(
    error: Exception, told: str, tmp_path: Path, source: Path
) -> None:
    with (
        pytest.raises(OutputError, match=f"cannot write .*out: .*{told}"),
        staged_output(tmp_path / "out", source=source, force=False),
    ):
        raise error


def test_other_errors_of_a_library_stay_as_they_are(tmp_path: Path, source: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="no such operator"),
        staged_output(tmp_path / "out", source=source, force=False),
    ):
        raise RuntimeError("no such operator (os error 2)")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("folder", "it is a directory"),
        ("none/new", "none is not a directory"),
        ("file/new", "file is not a directory"),
        ("file", "it is read-only"),
    ],
)
def test_a_file_that_cannot_be_written_is_found_before(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    if name == "file":
        check_file(tmp_path / name)
        monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # not for root
    with pytest.raises(OutputError, match=f"{name} cannot be written: .*{why}$"):
        check_file(tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


PART = """
import resource, signal, sys
from pathlib import Path
from enjoyln_cli.errors import OutputError
from enjoyln_cli.fs.staging import write_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
try:
    write_file(Path(sys.argv[1]), bytes(1 << 17))
except OutputError as error:
    print(error)
"""


def test_a_new_file_is_whole_or_not_there(tmp_path: Path) -> None:
    """Writing fails in the middle, as on a disk that is full."""
    command = [sys.executable, "-c", PART, str(tmp_path / "picture.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path / 'picture.png'} cannot be written: File too large\n"
    assert names(tmp_path) == []


def test_what_was_moved_aside_by_a_killed_run_is_put_back(source: Path, out: Path) -> None:
    work = work_of(out)
    (work / "replaced").mkdir(parents=True)
    (work / "replaced" / "mine").write_text("text")
    with (
        pytest.raises(OutputError, match="--force"),
        staged_output(out, source=source, force=False),
    ):
        pytest.fail("the block must not run")
    assert (out / "mine").read_text() == "text"
    assert sorted(os.listdir(out.parent)) == ["out", "source"]


def test_what_a_killed_run_has_half_removed_is_not_put_back(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it removes the replaced result; then the new result is moved away."""
    out.mkdir()
    (out / "mine").write_text("text")

    def killed(*_arguments: Any, **_keywords: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("enjoyln_cli.fs.staging.shutil.rmtree", killed)
        with pytest.raises(Killed), staged_output(out, source=source, force=True) as staged:
            (staged / "new").touch()
    assert os.listdir(out) == ["new"]
    out.rename(out.with_name("elsewhere"))
    with staged_output(out, source=source, force=False) as staged:
        (staged / "newer").touch()
    assert os.listdir(out) == ["newer"]
    assert sorted(os.listdir(out.parent)) == ["elsewhere", "out", "source"]


class Killed(BaseException):
    """An exception that nothing handles."""


def test_a_link_in_place_of_the_work_directory(source: Path, out: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("text")
    work_of(out).symlink_to(victim)
    with (
        pytest.raises(OutputError, match="is a symbolic link; remove it"),
        staged_output(out, source=source, force=True),
    ):
        pytest.fail("the block must not run")
    assert (victim / "file").read_text() == "text" and not out.exists()


def test_a_link_in_place_of_a_file_that_is_begun(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("text")
    (tmp_path / "report.json.begun").symlink_to(tmp_path / "victim")
    write_whole(tmp_path / "report.json", "{}")
    assert (tmp_path / "victim").read_text() == "text"
    assert (tmp_path / "report.json").read_text() == "{}"
    assert sorted(os.listdir(tmp_path)) == ["report.json", "victim"]


def test_a_long_name(source: Path, tmp_path: Path) -> None:
    out = tmp_path / ("é" * 120)
    with staged_output(out, source=source, force=False) as staged:
        assert len(os.fsencode(staged.parent.name)) < 100
    assert out.is_dir()
