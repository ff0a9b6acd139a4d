"""Start several processes that work together, as a launcher does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence


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
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    running = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env={**os.environ, **common, "RANK": f"{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
    said = [process.communicate(timeout=300)[0] for process in running]
    return [(process.returncode, text) for process, text in zip(running, said, strict=True)]
