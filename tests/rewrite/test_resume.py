"""A killed run can be resumed, to the same bytes; finished files are recognised by content."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import GPT2, good, refused, running
from fold_cases import EDITS, fold, gathered, plan_for, state, store
from live_models import ROOT
from stored_files import contents, opened

from enjoyln_cli.errors import BadCheckpoint, EnjoyLNError, OutputError
from enjoyln_cli.fs.staging import count_finished, staged_output, work_of
from enjoyln_cli.rewrite.directory import fold_checkpoint

SUPPORT = ROOT / "tests" / "support"
SHARDS = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]


def stop(folded: Path) -> Any:
    raise KeyboardInterrupt


def stopped(source: Path, out: Path, **options: Any) -> Path:
    """The work directory of a fold that Ctrl-C stopped after its weights were written."""
    with pytest.raises(KeyboardInterrupt) as caught:
        fold(source, out, check=stop, **options)
    assert not out.exists()
    assert str(work_of(out)) in str(caught.value) and "--resume" in str(caught.value)
    return work_of(out)


def expected(source: Path, out: Path, **options: Any) -> dict[str, bytes]:
    """The files of an undisturbed fold, which is removed again."""
    fold(source, out, **options)
    found = contents(out)
    shutil.rmtree(out)
    return found


def refuses(source: Path, out: Path, words: str, **options: Any) -> None:
    """Check that a fold is refused in one line, and that no file changes."""
    before = contents(out.parent)
    with pytest.raises(OutputError, match=words) as caught:
        fold(source, out, **options)
    assert "\n" not in str(caught.value)
    assert contents(out.parent) == before


# Killed.


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """``ENJOYLN_KILLS`` sets the least number of rounds; in each, a run is killed at least once."""
    runs = os.environ.get("ENJOYLN_KILLS", "3")
    done = subprocess.run(
        [sys.executable, SUPPORT / "kill_runs.py", tmp_path, runs, "7"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["0 finished"] and seen["1 finished"] and seen["gone on"]


def ended_by(number: signal.Signals, out: Path) -> tuple[int | None, str]:
    """The status of a fold that gets a signal once its weights are written, and its last words."""
    process = running("fold", GPT2, "-o", out, "--samples", 2000)  # which takes its time
    for line in process.stderr:
        if line.startswith("verifying"):
            process.send_signal(number)
            break
    _, rest = process.communicate(timeout=120)
    return process.returncode, rest


@pytest.mark.slow
def test_the_command_goes_on_after_a_kill(tmp_path: Path, out: Path) -> None:
    good("fold", GPT2, "-o", out)
    whole = contents(out)
    shutil.rmtree(out)
    ended_by(signal.SIGKILL, out)
    assert not out.exists() and count_finished(work_of(out)) == 1
    line = refused("fold", GPT2, "-o", out)
    assert "--resume" in line and "--force" in line and "finding" not in line
    said = good("fold", GPT2, "-o", out, "--resume")
    assert "1 weight file had been finished by an earlier run" in said
    assert contents(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_ctrl_c_says_what_it_leaves(tmp_path: Path, out: Path) -> None:
    status, rest = ended_by(signal.SIGINT, out)
    assert status == 130
    (line,) = rest.splitlines()
    work = work_of(out)
    assert line.startswith(f"error: interrupted; 1 finished file kept in {work}; continue with")
    assert list(tmp_path.iterdir()) == [work]


# Resumed.


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sharded", {}),
        ("bin", {"dtype": torch.bfloat16}),
        ("sharded bin", {"max_shard_size": 3 << 20}),
    ],
)
def test_the_bytes_are_as_after_an_undisturbed_run(
    tmp_path: Path, out: Path, kind: str, options: dict[str, Any]
) -> None:
    store(tmp_path / "model", state(torch.float32), kind)
    whole = expected(tmp_path / "model", out, **options)
    work = stopped(tmp_path / "model", out, **options)
    told: list[int] = []
    result = fold(tmp_path / "model", out, resume=True, progress=told.append, **options)
    assert contents(out) == whole
    assert result.resumed == sum(name.endswith(".safetensors") for name in whole)
    tensors = sum(t.nbytes for t in state(torch.float32).values())
    assert sum(told) == tensors or options.get("dtype")
    assert not work.exists()


def test_what_is_finished_is_not_written_again(source: Path, out: Path) -> None:
    work = stopped(source, out)
    (work / "finished" / f"{SHARDS[1]}.json").unlink()
    before = {name: (work / "result" / name).stat().st_ino for name in SHARDS}
    kept = {name: os.open(work / "result" / name, os.O_RDONLY) for name in SHARDS}
    assert fold(source, out, resume=True).resumed == 2
    same = [name for name in SHARDS if (out / name).stat().st_ino == before[name]]
    assert same == [SHARDS[0], SHARDS[2]]
    for file in kept.values():
        os.close(file)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def rename_a_tensor(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"out.bias"', b'"out.biaz"'))


def another_shard(work: Path) -> None:
    """Another shard, with its note, under the name of a missing shard."""
    for folder, end in (("result", ""), ("finished", ".json")):
        shutil.copy(work / folder / f"{SHARDS[0]}{end}", work / folder / f"{SHARDS[2]}{end}")


def other_files(work: Path) -> None:
    (work / "result" / "stray").mkdir()
    (work / "result" / "stray" / "file").write_text("x")
    (work / "result" / "config.json").write_text("half")


def other_times(work: Path) -> None:
    """Weights are recognised by their time; other files are compared by content."""
    for path in (work.parent / "model").rglob("*"):
        if path.suffix != ".safetensors":
            os.utime(path, ns=(10**18, 10**18))


def damage(how: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda work: how(work / "result" / SHARDS[1])


def note(text: str) -> Callable[[Path], object]:
    return lambda work: (work / "finished" / f"{SHARDS[0]}.json").write_text(text)


CHANGES: dict[str, tuple[Callable[[Path], object], int]] = {
    "a flipped bit": (damage(flip), 2),
    "a byte less": (damage(lambda path: os.truncate(path, path.stat().st_size - 1)), 2),
    "a link": (damage(link), 2),
    "another header": (damage(rename_a_tensor), 2),
    "a file that is gone": (damage(Path.unlink), 2),
    "another shard": (another_shard, 2),
    "an empty note": (note(""), 2),
    "a note that lacks an entry": (note('{"size": 1, "modified": 1}'), 2),
    "a deep note": (note("[" * 9999), 2),
    "no list of inputs": (lambda work: (work / "made-from.json").write_text("{"), 0),
    "other files": (other_files, 3),
    "other times": (other_times, 3),
}
"""What changes after the first run, and how many files the second takes over from it."""


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_finished_counts_as_long_as_it_is_whole(
    source: Path, out: Path, change: str
) -> None:
    whole = expected(source, out)
    make, resumed = CHANGES[change]
    make(stopped(source, out))
    assert fold(source, out, resume=True).resumed == resumed
    assert contents(out) == whole


def test_where_there_is_nothing_to_resume_a_fold_begins(source: Path, out: Path) -> None:
    whole = expected(source, out)
    assert fold(source, out, resume=True).resumed == 0
    assert contents(out) == whole
    refuses(source, out, "is complete, so there is nothing to resume", resume=True)


# Refused.


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "custom/code.py"])
def test_another_file_of_the_source_that_changed(source: Path, out: Path, name: str) -> None:
    work = stopped(source, out)
    (source / name).write_bytes((source / name).read_bytes() + b"\n")
    words = f"the file {name} was .* and is .* now; start anew with --force"
    refuses(source, out, words, resume=True)
    assert count_finished(work) == 3
    assert fold(source, out, force=True).resumed == 0


@pytest.mark.parametrize(("kind", "at"), [("sharded", 0), ("sharded bin", 2)])
def test_weights_that_changed(tmp_path: Path, out: Path, kind: str, at: int) -> None:
    source = tmp_path / "model"
    store(source, state(torch.float32), kind)
    stopped(source, out)
    weights = sorted(path for path in source.iterdir() if path.suffix in (".bin", ".safetensors"))
    os.utime(weights[at], ns=(10**18, 10**18))
    words = f"the file {weights[at].name} was .* bytes, modified .* start anew with --force"
    refuses(source, out, words, resume=True)
    assert fold(source, out, resume=True, force=True).resumed == 0
    whole = contents(out)
    assert fold(source, out, force=True).resumed == 0 and contents(out) == whole


def test_the_cache_of_the_hub(tmp_path: Path, out: Path) -> None:
    """A commit identifies weights, whenever they were downloaded."""
    source, blob = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs" / "0123"
    values = state(torch.float32)
    source.parent.mkdir(parents=True)
    blob.parent.mkdir()
    store(source, values, "single")
    (source / "model.safetensors").rename(blob)
    (source / "model.safetensors").symlink_to(blob)
    plan = plan_for(values, EDITS)

    def begin(commit: str = "abc", **options: Any) -> int:
        checkpoint = opened(source)
        cached = replace(checkpoint, source=replace(checkpoint.source, revision=commit))
        result = fold_checkpoint(cached, plan, out, recipe_text="r", **gathered(options))
        return result.resumed

    with pytest.raises(KeyboardInterrupt):
        begin(check=stop)
    os.utime(blob, ns=(10**18, 10**18))
    with pytest.raises(KeyboardInterrupt):
        begin(check=stop, resume=True)
    with pytest.raises(OutputError, match="the source was .* then and is .* now"):
        begin("def", resume=True)
    assert begin(resume=True) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": torch.float16}, "the dtype was None then and is float16 now"),
        ({"max_shard_size": 10**6}, "the --max-shard-size was None then and is 1000000 now"),
        ({"allow_nonfinite": True}, "the --allow-nonfinite was False then and is True now"),
        ({"edits": {"out.weight": EDITS["out.weight"]}}, "the plan"),
    ],
)
def test_another_plan_or_option(
    source: Path, out: Path, options: dict[str, Any], words: str
) -> None:
    stopped(source, out)
    refuses(source, out, words, resume=True, **options)


def test_one_run_at_a_time(source: Path, out: Path) -> None:
    with staged_output(out, source=source, force=False):
        for options in ({}, {"force": True}, {"resume": True}):
            refuses(source, out, "another run is writing", **options)
    assert out.exists()


def test_what_forbids_the_result_leaves_nothing(source: Path, out: Path) -> None:
    def lose(folded: Path) -> Any:
        raise BadCheckpoint("a weight is wrong")

    with pytest.raises(BadCheckpoint):
        fold(source, out, check=lose)
    assert not work_of(out).exists()


def test_a_full_disk_keeps_what_is_finished(source: Path, out: Path) -> None:
    def fill(folded: Path) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    whole = expected(source, out)
    with pytest.raises(OutputError, match="the disk is full; .*3 finished files.*--resume"):
        fold(source, out, check=fill)
    assert fold(source, out, resume=True).resumed == 3
    assert contents(out) == whole


FULL = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from fold_cases import fold
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.errors import OutputError
source, disk = map(Path, sys.argv[1:3])
edits = {"w": (Axis(0, 0, 1, 1000, 1),)}
def fill(written):
    try:
        with (disk / "filler").open("ab", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
    except OSError:
        pass
try:
    fold(source, disk / "out", edits, progress=fill, jobs=1)
except OutputError as error:
    print(error)
print(sorted(path.name for path in disk.iterdir()))
(disk / "filler").unlink()
fold(source, disk / "out", edits, resume=True, jobs=1)
print(sorted(path.name for path in disk.iterdir()))
"""


@pytest.mark.slow
def test_a_disk_that_fills_up_during_the_write(tmp_path: Path) -> None:
    store(tmp_path / "model", {"w": torch.randn(1000, 30_000)}, "single")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size=150m none "$0" && exec "$@"']
    if subprocess.run([*mounted, disk, "true"], capture_output=True).returncode:
        pytest.skip("needs a file system of its own")
    done = subprocess.run(
        [*mounted, disk, sys.executable, "-c", FULL, tmp_path / "model", disk, SUPPORT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said, left, after = done.stdout.splitlines()
    assert said.startswith("cannot write") and "the disk is full" in said
    assert "'out'" not in left
    assert after == "['out']"


@pytest.mark.parametrize("name", [SHARDS[0], "config.json"])
def test_a_source_that_changes_while_it_is_read(source: Path, out: Path, name: str) -> None:
    checkpoint = opened(source)
    shapes = {n: torch.empty(s.shape, device="meta") for n, s in checkpoint.tensors.items()}

    def touch(written: int) -> None:
        os.utime(source / name, ns=(1, 1))

    with pytest.raises(BadCheckpoint, match=f"{name} has changed in .* while it was read"):
        fold_checkpoint(checkpoint, plan_for(shapes, EDITS), out, recipe_text="r", progress=touch)
    assert os.listdir(source.parent) == ["model"]


def test_a_source_that_changes_between_its_header_and_its_data(source: Path, out: Path) -> None:
    checkpoint = opened(source)
    shapes = {n: torch.empty(s.shape, device="meta") for n, s in checkpoint.tensors.items()}
    (source / SHARDS[0]).write_bytes((source / SHARDS[0]).read_bytes())
    with pytest.raises(BadCheckpoint, match="has changed"):
        fold_checkpoint(checkpoint, plan_for(shapes, EDITS), out, recipe_text="r")
    (source / SHARDS[0]).rename(source / "away")
    with pytest.raises((EnjoyLNError, OSError)):
        fold_checkpoint(checkpoint, plan_for(shapes, EDITS), out, recipe_text="r")
    assert os.listdir(source.parent) == ["model"]
