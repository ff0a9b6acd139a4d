"""Runs every command as a new user would, on a BERT, a GPT-2 and a ViT of about 100M weights.

    python scripts/new_user.py
    python scripts/new_user.py --models vit --keep DIR

Each model has random weights (``make_checkpoint.py``). Each command runs in its own process, in a
pseudo-terminal, as it would for a person. The script measures the wall time and the longest
silence: the longest time in which nothing is written to the terminal. It prints a table as
Markdown. The exit status is 1 if a command fails, is silent for more than ``--silence`` seconds, or
if the check inside ``fold`` takes more than 1.5 times its budget.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

MODELS = {"bert": "110M", "gpt2": "124M", "vit": "84M"}
"""From model type to number of parameters."""
OPTIONS = {"bert": ["--widen-mlp"]}
"""Without this option, no LayerNorm of a BERT with its head becomes RMSNorm."""
BUDGET = 60.0
"""Default time for the check inside ``fold``, in seconds."""
PATIENCE = 1.5
"""Largest allowed time of this check, divided by its budget."""
TOO_LONG = 3600.0
"""Seconds after which a command is stopped."""
CHECKED = re.compile(r"checked on (.+?) in (\d+\.\d) s")
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Seen:
    """The output of one command, as a person saw it."""

    status: int
    seconds: float
    silence: float
    """The longest time without output, in seconds."""
    since: str
    """The last words before that silence."""
    text: str


def watch(command: list[str]) -> Seen:
    """Run ``command`` in a pseudo-terminal, and record when it writes."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "HF_HUB_OFFLINE": "1"}
    begin = last = time.monotonic()
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True
    )
    os.close(theirs)
    written, silence, since = bytearray(), 0.0, ""
    try:
        while time.monotonic() - begin < TOO_LONG:
            ready, _, _ = select.select([ours], [], [], 0.1)
            if not ready:
                continue
            try:
                chunk = os.read(ours, 1 << 16)
            except OSError:  # on Linux, this means that the other end is closed
                break
            now = time.monotonic()
            if now - last > silence:
                silence, since = now - last, plain(bytes(written[-400:]))[-60:]
            last = now
            if not chunk:
                break
            written += chunk
        else:
            process.kill()
        status = process.wait()
    finally:
        os.close(ours)
    end = time.monotonic()
    if end - last > silence:
        silence, since = end - last, plain(bytes(written[-400:]))[-60:]
    return Seen(status, end - begin, silence, " ".join(since.split()), plain(bytes(written)))


def plain(written: bytes) -> str:
    """The text without colours and cursor movements."""
    return COLOURS.sub("", written.decode(errors="replace")).replace("\r", "\n")


def commands(kind: str, model: Path, out: Path, seconds: float) -> dict[str, list[str]]:
    """What a new user tries on a model, in this order."""
    limit = ["--seconds", f"{seconds:g}"] if seconds else []
    return {
        "report": [str(model)],
        "fold": [str(model), "-o", str(out), *OPTIONS.get(kind, [])],
        "verify": [str(out), *limit],
        "bench": [str(out)],
    }


def make(kind: str, size: str, folder: Path) -> None:
    """A checkpoint of this type with random weights."""
    script = Path(__file__).with_name("make_checkpoint.py")
    words = [sys.executable, str(script), kind, "--params", size, "-o", str(folder)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help="bert,gpt2,vit")
    parser.add_argument("--params", help="number of parameters of each model")
    parser.add_argument("--commands", default="report,fold,verify,bench")
    parser.add_argument(
        "--silence", type=float, default=5.0, help="longest allowed silence in seconds"
    )
    parser.add_argument(
        "--verify-seconds", type=float, default=120.0, help="--seconds of verify; 0 for all inputs"
    )
    parser.add_argument("--keep", type=Path, help="directory for the models")
    args = parser.parse_args()
    failures = []
    print("| model | command | seconds | longest silence | |\n|---|---|---:|---:|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        for kind in args.models.split(","):
            model, out = folder / kind, folder / f"{kind}-rms"
            if not model.exists():
                make(kind, args.params or MODELS[kind], model)
            for name, words in commands(kind, model, out, args.verify_seconds).items():
                if name not in args.commands.split(","):
                    continue
                seen = watch([sys.executable, "-m", "enjoyln_cli", name, *words])
                checked = CHECKED.search(seen.text)
                note = f"checked on {checked[1]} in {checked[2]} s" if checked else ""
                times = f"{seen.seconds:.0f} s | {seen.silence:.1f} s"
                print(f"| {kind} | `{name}` | {times} | {note} |", flush=True)
                if seen.status:
                    failures.append(
                        f"{name} of {kind} ended with {seen.status}: {seen.text[-600:]}"
                    )
                if seen.silence > args.silence:
                    failures.append(
                        f"{name} of {kind} was silent for {seen.silence:.1f} s after {seen.since!r}"
                    )
                if checked and name == "fold" and float(checked[2]) > PATIENCE * BUDGET:
                    failures.append(f"the check of {kind} took {checked[2]} s")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
