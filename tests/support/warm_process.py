"""Run commands in processes that are forked from one which has imported everything.

Before a command begins, it spends four seconds of processor time on imports, and on what torch
registers when it traces for the first time. A fork of a process that has done this spends none.
What Python itself reads when it starts (closed streams, the encoding of the locale) still needs a
process that is started.

The process that forks is called a server. ``huggingface_hub`` reads its settings when it is
imported, so there is a server for each group of settings. All servers are forks of one process, the
origin, which has imported torch alone. Each ends when its link to the tests is closed.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO


@dataclass
class Started:
    """A command that runs, with what ``subprocess.Popen`` has of it."""

    pid: int
    link: socket.socket
    stdout: TextIO
    stderr: TextIO
    returncode: int | None = None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = ask(self.link, {"status": self.pid, "wait": False})
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        if self.returncode is None:
            self.link.settimeout(timeout)
            self.returncode = ask(self.link, {"status": self.pid, "wait": True})
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Read both outputs to their end; a pipe must hold what goes to ``stderr`` (64 kB)."""
        with self.stdout, self.stderr:
            said = self.stdout.read(), self.stderr.read()
        self.wait(timeout)
        return said


SERVERS: dict[tuple[object, ...], socket.socket] = {}
"""Links to the servers, by ``fresh`` and the settings (see ``start``)."""
ORIGIN: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []
"""The process that all servers are forked from, and the link to it; empty until it is needed."""


def start(
    *words: object,
    settings: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    cwd: Path | None = None,
    fresh: bool = False,
) -> Started:
    """Run what ``python`` followed by ``words`` would run.

    ``settings`` are environment variables that are read by imports, ``environment`` others.
    ``stdin``, ``stdout`` and ``stderr`` are file descriptors: by default an empty file, and pipes.
    If ``stdin`` is a terminal, it controls the process: Ctrl-C is a signal. A process that is
    ``fresh`` has imported torch alone.
    """
    settings = settings or {}
    key = (fresh, *sorted(settings.items()))
    if key not in SERVERS:
        SERVERS[key] = _server(settings)
    out, err = os.pipe(), os.pipe()
    defaults = (os.open(os.devnull, os.O_RDONLY), out[1], err[1])
    given = zip((stdin, stdout, stderr), defaults, strict=True)
    streams = [default if stream is None else stream for stream, default in given]
    own = {**settings, **(environment or {})}
    steps = [] if fresh else ["import"]
    if not fresh and {"fold", "report", "verify"} & set(words):
        steps.append("trace")
    pid = fork(SERVERS[key], words, own, cwd, streams, steps)
    for descriptor in defaults:
        os.close(descriptor)
    return Started(pid, SERVERS[key], _opened(out[0]), _opened(err[0]))


def _opened(descriptor: int) -> TextIO:
    return os.fdopen(descriptor, errors="surrogateescape")  # any bytes


def run(*words: object, **options: Any) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command (see ``start``)."""
    process = start(*words, **options)
    out, err = process.communicate()
    return process.wait(), out, err


def on_a_terminal(*words: object, **environment: str) -> str:
    """What a terminal receives from a command that has it as all three streams, and succeeds."""
    status, text = asked_on_a_terminal(b"", *words, environment=environment)
    assert status == 0, text
    return text


def asked_on_a_terminal(
    reply: bytes, *words: object, environment: Mapping[str, str], **options: Any
) -> tuple[int, str]:
    """The exit status of a command and what its terminal receives.

    The user answers ``reply`` to a question that ends in ``[y/N]``.
    """
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    environment = {"TERM": "xterm-256color", **environment}
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = start(*words, environment=environment, **streams, **options)
    os.close(theirs)
    received, quiet, patience = b"", 0, 1
    with contextlib.suppress(OSError):  # raised when the other end is closed
        while True:
            heard = bool(select.select([ours], [], [], 1.0)[0])
            if heard and not (block := os.read(ours, 65536)):
                break
            received += block if heard else b""
            quiet = 0 if heard else quiet + 1
            # Python misses a signal right before it waits; a second signal while it ends kills it
            if b"[y/N]" in received and quiet >= patience:
                os.write(ours, reply)
                quiet, patience = 0, 20
    os.close(ours)
    return process.wait(), received.decode()


@contextlib.contextmanager
def servers() -> Iterator[None]:
    """End the servers that were started in the block, and wait until they have ended."""
    try:
        yield
    finally:
        for link in SERVERS.values():
            link.close()
        SERVERS.clear()
        for link, process in ORIGIN:
            link.close()
            process.wait(timeout=60)
        ORIGIN.clear()


def _server(settings: Mapping[str, str]) -> socket.socket:
    if not ORIGIN:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, __file__, f"{theirs.fileno()}"],
                env=_environment(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        ORIGIN.append((ours, process))
    ours, theirs = socket.socketpair()
    with theirs:
        fork(ORIGIN[0][0], (), settings, None, (0, 1, 2, theirs.fileno()))
    return ours


def _environment() -> dict[str, str]:
    left = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**left, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def fork(
    link: socket.socket,
    words: Sequence[object],
    environment: Mapping[str, str],
    cwd: Path | None,
    descriptors: Sequence[int],
    steps: Sequence[str] = (),
) -> Any:
    """Let a server fork a process, and return the number of the process.

    Before it forks, the server takes those of the ``steps`` (see ``STEPS``) that it has not taken.
    """
    what = {
        "words": [str(word) for word in words],
        "environment": {**_environment(), **environment},
        "cwd": str(cwd or Path.cwd()),
        "steps": steps,
    }
    return ask(link, what, descriptors)


def ask(link: socket.socket, what: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
    socket.send_fds(link, [json.dumps(what).encode() + b"\n"], descriptors)
    answer, _ = receive(link)
    return answer


def receive(link: socket.socket) -> tuple[Any, list[int]]:
    """A line of JSON and the file descriptors beside it; ``EOFError`` if the link is closed."""
    text, descriptors = b"", []
    while not text.endswith(b"\n"):
        more, new, _, _ = socket.recv_fds(link, 1 << 16, 4)
        if not more:
            raise EOFError("the other end of the link is closed")
        text += more
        descriptors += new
    return json.loads(text), descriptors


# In the servers.


def serve(link: socket.socket) -> tuple[list[str], list[int]]:
    """Fork a process for each request. Returns, in that process, its words and descriptors."""
    taken: set[str] = set()
    while True:
        try:
            wanted, descriptors = receive(link)
        except EOFError:
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.wait()
            os._exit(0)
        if "status" in wanted:
            pid, status = os.waitpid(wanted["status"], 0 if wanted["wait"] else os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            for step in wanted["steps"]:
                if step not in taken:
                    STEPS[step]()
                    taken.add(step)
            answer = os.fork()
            if not answer:
                link.close()
                take_over(wanted, descriptors)
                return wanted["words"], descriptors
            for descriptor in descriptors:
                os.close(descriptor)
        link.sendall(json.dumps(answer).encode() + b"\n")


def take_over(wanted: dict[str, Any], descriptors: list[int]) -> None:
    """Become the process that is wanted: take its streams, its environment and its directory."""
    for standard, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    if sys.stdin.isatty():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if torch := sys.modules.get("torch"):
        # The first use after a fork renews torch's pool of threads. Two threads must not do so at
        # once, as those in which transformers loads weights may ("Invalid thread pool!").
        torch.set_num_threads(torch.get_num_threads())


def import_all() -> None:
    """Import what all commands import."""
    import enjoyln_cli.conversion.fold
    import enjoyln_cli.publish.push
    import enjoyln_cli.verification.verify  # noqa: F401

    gc.collect()
    gc.freeze()  # collections in the forked processes pass over all this


def trace() -> None:
    """Fold a model. When torch traces for the first time, it imports and registers much more."""
    from commands import GPT2, good

    with tempfile.TemporaryDirectory() as folder:
        good("fold", GPT2, "-o", f"{folder}/out")
    gc.collect()
    gc.freeze()


STEPS = {"import": import_all, "trace": trace}


def run_here(words: list[str]) -> None:
    """Do what Python does with these words on its command line."""
    first, *rest = words
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = [first, *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


def end_with(words: list[str]) -> NoReturn:
    """Run, and end as Python does, but do not free each object, which would take a second."""
    status = 0
    try:
        run_here(words)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    import torch._dynamo  # which imports most of torch
    import torch.export  # noqa: F401

    _, given = serve(socket.socket(fileno=int(sys.argv[1])))
    line, _ = serve(socket.socket(fileno=given[3]))
    end_with(line)
