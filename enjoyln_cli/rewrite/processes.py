"""Several processes that write one result, started by ``torchrun`` or ``accelerate launch``.

The environment names the processes (``RANK`` of ``WORLD_SIZE``, at ``MASTER_ADDR``). They exchange
messages through ``torch.distributed`` (gloo), which notices if a process dies; processes that wait
for it stop too. Weights go through the file system alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from enjoyln_cli.errors import OutputError
from enjoyln_cli.text import first_line

T = TypeVar("T")

MEETING = timedelta(minutes=10)
"""How long the processes wait for each other at the start."""
WORKING = timedelta(days=365)
"""How long a process waits for the work of another that is alive."""


@dataclass(frozen=True)
class ProcessGroup:
    """This process (``rank``) and the number of processes that write one result (``size``)."""

    rank: int = 0
    size: int = 1
    local: int = 1
    """How many of the processes run on this machine."""
    group: Any = None


ALONE = ProcessGroup()


def present() -> ProcessGroup:
    """The process group as the environment gives it, without connecting to the others.

    ``ALONE`` if the environment variables are missing or invalid.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return ALONE
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    texts = [os.environ.get(name, "1") for name in names]
    if not all(text.isdecimal() for text in texts):
        return ALONE
    rank, size, local = map(int, texts)
    return ProcessGroup(rank, size, max(1, local)) if rank < size and size > 1 else ALONE


@contextmanager
def join_group(on_event: Callable[[str, str], None] | None = None) -> Iterator[ProcessGroup]:
    """Connect all processes. Raises ``OutputError`` if some do not connect in time."""
    team = present()
    if team.size == 1:
        yield team
        return
    if on_event:
        on_event("stage", f"waiting for {team.size - 1} other processes")
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=MEETING)
        group = dist.new_group(backend="gloo", timeout=WORKING)
    except (RuntimeError, ValueError) as error:
        raise OutputError(
            f"WORLD_SIZE is {team.size}, but the other processes did not connect "
            f"({first_line(error)}); start all of them, or unset RANK and WORLD_SIZE"
        ) from error
    try:
        yield ProcessGroup(team.rank, team.size, team.local, group)
    finally:
        dist.destroy_process_group()


def gather(team: ProcessGroup, value: T) -> list[T]:
    """The ``value`` of each process, by rank.

    If a process has ended, the first process raises ``OutputError`` and the others exit silently,
    so that the user gets one message.
    """
    if team.size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * team.size
    try:
        dist.all_gather_object(values, value, group=team.group)
    except RuntimeError as error:
        if team.rank:
            raise SystemExit(1) from error
        raise OutputError(f"one of the {team.size} processes has ended early") from error
    return values
