"""The command in processes of their own, in front of a server that stands for the Hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hub_server import Hub
from live_models import CHECKPOINTS
from warm_process import run

GPT2 = CHECKPOINTS / "gpt2"
TOKEN = "hf_PLANTEDtokenPLANTEDtoken"
"""Of the user ``me``; it may stand in no output and in no file."""


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


def settings_for(hub: Hub, home: Path, **more: str) -> dict[str, str]:
    """What a process has to read when it imports ``huggingface_hub``."""
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **more}


def enjoyln(hub: Hub, home: Path, *calls: list[object], **environment: str) -> list[Done]:
    """Each call of the command, one after the other."""
    return [_done(hub, home, ["-m", "enjoyln_cli", *call], environment) for call in calls]


def python(hub: Hub, home: Path, code: str, **environment: str) -> str:
    """What a program prints."""
    done = _done(hub, home, ["-c", code], environment, fresh=True)
    assert done.status == 0, done.err
    return done.out.strip()


def _done(
    hub: Hub, home: Path, words: list[object], environment: dict[str, str], fresh: bool = False
) -> Done:
    token = {name: value for name, value in environment.items() if name == "HF_TOKEN"}
    more = {name: value for name, value in environment.items() if name != "HF_TOKEN"}
    settings = settings_for(hub, home, **more)
    found = Done(*run(*words, settings=settings, environment=token, fresh=fresh))
    assert TOKEN not in found.out + found.err
    return found
