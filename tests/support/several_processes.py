"""Start several processes that work together, as a launcher does."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from warm_process import start


def together(*commands: Sequence[object]) -> list[tuple[int, str]]:
    """Exit status and output of each process, started as by a launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": f"{len(commands)}",
        "LOCAL_WORLD_SIZE": f"{len(commands)}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
    }
    running = [
        start(*command, environment={**common, "RANK": f"{rank}"})
        for rank, command in enumerate(commands)
    ]
    said = [process.communicate()[0] for process in running]
    return [(process.wait(), text) for process, text in zip(running, said, strict=True)]
