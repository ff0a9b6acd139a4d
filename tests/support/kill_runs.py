"""Fold, kill the fold at a random moment, go on with it, again and again. Prints what happened.

    python tests/support/kill_runs.py FOLDER RUNS SEED

Every run is a child of this process, which has imported torch and has no threads. Fails if the
source is touched, if OUT is ever anything but the whole result, or if a continued fold writes other
bytes than an undisturbed fold. After RUNS rounds it goes on until
there was a kill before and after the first finished file, and a run that continued another.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import torch
from fold_cases import EDITS, plan_for, state, store
from stored_files import contents, opened

from enjoyln_cli.fs.staging import FINISHED, count_finished, work_of
from enjoyln_cli.plan.fold_options import WriteOptions
from enjoyln_cli.rewrite.directory import fold_checkpoint

OUTCOMES = ("0 finished", "1 finished", "gone on")


def child(source: Path, out: Path, resume: bool) -> int:
    """Start a fold in a process of its own."""
    pid = os.fork()
    if pid:
        return pid
    try:
        checkpoint = opened(source)
        shapes = {n: torch.empty(s.shape, device="meta") for n, s in checkpoint.tensors.items()}
        plan = plan_for(shapes, EDITS)
        limit = 1_500_000
        options = WriteOptions(resume=resume, max_shard_size=limit, jobs=1)
        fold_checkpoint(checkpoint, plan, out, recipe_text="r", options=options)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(folder: Path, runs: int, seed: int) -> None:
    source, out, work = folder / "model", folder / "out", work_of(folder / "out")
    store(source, state(torch.bfloat16), "sharded")
    (source / "tokenizer.json").write_text("{}")
    times = []
    for _ in range(3):
        shutil.rmtree(out, ignore_errors=True)
        begin = time.perf_counter()
        assert ended(child(source, out, False)) == 0
        times.append(time.perf_counter() - begin)
    untouched, whole = contents(source), contents(out)
    shutil.rmtree(out)
    made, seen = random.Random(seed), Counter[str]()
    while runs > 0 or not all(seen[outcome] for outcome in OUTCOMES):
        runs -= 1
        resume = False
        while not out.exists():  # now and then what goes on is killed as well
            pid = child(source, out, resume)
            time.sleep(made.uniform(0, 1.2 * max(times)))
            os.kill(pid, signal.SIGKILL)
            status = ended(pid)
            assert status in (0, -signal.SIGKILL), status
            assert contents(source) == untouched
            assert not out.exists() or contents(out) == whole
            seen["whole" if out.exists() else f"{min(count_finished(work), 1)} finished"] += 1
            resume = True
            if not out.exists() and made.random() < 0.7:
                before = count_finished(work)
                assert ended(child(source, out, True)) == 0
                seen["gone on"] += before > 0
        assert contents(out) == whole
        assert contents(source) == untouched
        assert {path.name for path in folder.iterdir()} <= {"model", "out", work.name}
        assert not (work / FINISHED).exists() or not (work / "result").exists()
        shutil.rmtree(out)
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps({"seconds": max(times), **seen}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
