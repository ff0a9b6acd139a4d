"""The command in processes of their own, in front of a server that stands for the Hub.

``huggingface_hub`` reads its settings when it is imported, so every environment is a process of its
own; only the token is read when it is needed. The process imports what takes long once, and forks
for each group of commands. Before the first that analyses a model it folds one itself: torch
imports and registers much more when it traces for the first time.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hub_server import Hub
from live_models import CHECKPOINTS

GPT2 = CHECKPOINTS / "gpt2"
TOKEN = "hf_PLANTEDtokenPLANTEDtoken"
"""Of the user ``me``; it may stand in no output and in no file."""

CLIENT = """
import json, os, sys, tempfile
from click.testing import CliRunner
import enjoyln_cli.conversion.fold, enjoyln_cli.publish.push, enjoyln_cli.verification.verify
import torch.export
from enjoyln_cli.cli.main import main
traced = False
for line in sys.stdin:
    token, calls = json.loads(line)
    if not traced and {"fold", "report", "verify"} & {arguments[0] for arguments in calls}:
        with tempfile.TemporaryDirectory() as folder:
            first = CliRunner().invoke(main, ["fold", sys.argv[1], "-o", folder + "/out"])
        assert first.exit_code == 0, first.output
        traced = True
    child = os.fork()
    if child == 0:
        os.environ |= token
        found = [CliRunner().invoke(main, arguments) for arguments in calls]
        print(json.dumps([[one.exit_code, one.stdout, one.stderr] for one in found]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""

CLIENTS: dict[tuple[object, ...], subprocess.Popen[str]] = {}
"""By the environment that they run in."""


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of a refusal."""
        assert self.status == 1, self
        assert "Traceback" not in self.err
        (line,) = [line for line in self.err.splitlines() if line.startswith("error: ")]
        return line


def environment(hub: Hub, home: Path, **settings: str) -> dict[str, str]:
    ours = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    left = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return {**left, **ours, "OMP_NUM_THREADS": "1", **settings}


def enjoyln(hub: Hub, home: Path, *calls: list[object], **settings: str) -> list[Done]:
    """Each call of the command, one after the other in one new process."""
    token = {name: settings.pop(name) for name in ("HF_TOKEN",) if name in settings}
    key = (home, *settings.items())
    if key not in CLIENTS:
        CLIENTS[key] = subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(GPT2)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(hub, home, **settings),
        )
    client = CLIENTS[key]
    assert client.stdin and client.stdout
    words = [[str(word) for word in call] for call in calls]
    print(json.dumps([token, words]), file=client.stdin, flush=True)
    found = client.stdout.readline()
    assert found and TOKEN not in found
    return [Done(*one) for one in json.loads(found)]


def python(hub: Hub, home: Path, code: str, **settings: str) -> str:
    """What a program prints that runs in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(hub, home, **settings),
    )
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stderr
    return done.stdout.strip()


@contextlib.contextmanager
def clients() -> Iterator[None]:
    """Within the block processes for commands may be started; they end with it."""
    try:
        yield
    finally:
        for client in CLIENTS.values():
            client.kill()
            client.wait(timeout=60)
        CLIENTS.clear()
