"""Fixtures that several test modules ask for."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import inductor
import pytest
import torch
import transformers
from hub_repositories import Hub
from hub_server import connected, serving
from live_models import CHECKPOINTS

from enjoyln_cli import Options, fold

MOST_WORKERS = 8
"""Each needs about 1 GB of memory."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker for each core, up to ``MOST_WORKERS``; none to run single files or tests."""
    named = [Path(argument.partition("::")[0]) for argument in config.args]
    if all(path.is_file() for path in named):
        return 0
    return min(MOST_WORKERS, os.cpu_count() or 1)


def pytest_configure() -> None:
    """One thread for each process, also for processes of tests: small models run faster so.

    A job in the background of a script ignores Ctrl-C, and so would the commands it starts. What
    transformers logs goes to the stream that was there when it was imported, which pytest has
    closed by the time of the tests. No test uses a token of the user. Python looks for garbage less
    often than by default.
    """
    torch.set_num_threads(1)
    gc.set_threshold(20_000, 20, 100)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("HF_TOKEN", None)
    transformers.logging.set_verbosity_error()
    inductor.keep_apart()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is marked ``one_case``, all cases but the first are slow."""
    seen: set[str] = set()
    for item in items:
        if item.get_closest_marker("one_case"):
            name = item.nodeid.partition("[")[0]
            if name in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(name)


@pytest.fixture(scope="module", autouse=True)
def garbage_of_this_module_alone() -> None:
    """Each ``gc.collect`` passes over what was imported and made before: up to a second a time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def seeded() -> None:
    """Torch draws the same random numbers in each run of the test."""
    torch.manual_seed(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint directory that holds a config and no weights yet."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "gpt2"}')
    return path


class Converted(dict[str, Path]):
    """Converts a checkpoint when it is first asked for, as ``phi`` or ``phi merge bias``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, case: str) -> Path:
        name, _, merge = case.partition(" merge ")
        options = Options(merge=merge or None)  # type: ignore[arg-type]
        self[case] = self.folder / case.replace(" ", "-")
        fold(CHECKPOINTS / name, self[case], verify=False, options=options)
        return self[case]


@pytest.fixture(scope="session")
def outs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The converted checkpoints, by the name of the original; nobody writes into them."""
    return Converted(tmp_path_factory.mktemp("folded"))


@pytest.fixture(scope="session")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ``eight_models`` are converted, each when it is first asked for."""
    return tmp_path_factory.mktemp("eight")


@pytest.fixture(scope="session")
def hub_server() -> Iterator[Hub]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def home(hub_server: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache of the module's tests, which reach ``hub_server`` in place of the Hub."""
    path = tmp_path_factory.mktemp("home")
    with connected(hub_server.url, path):
        yield path


@pytest.fixture
def quiet_hub(hub: Hub, home: Path) -> None:
    """The module's ``hub`` begins each test without requests and faults."""
    hub.requests.clear()
    hub.faults.clear()
