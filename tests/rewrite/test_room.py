"""Steps that need much memory wait for one another."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from enjoyln_cli.rewrite import blocks
from enjoyln_cli.rewrite.blocks import Room


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    monkeypatch.setattr(blocks, "available_memory", lambda: 20)  # half of it may be used
    return Room()


def enters(room: Room, nbytes: int) -> tuple[threading.Thread, threading.Event]:
    """A thread that takes ``nbytes`` and gives them back, and whether it got them."""
    got = threading.Event()

    def take() -> None:
        with room.taken(nbytes):
            got.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread, got


def test_steps_that_fit_run_side_by_side(room: Room) -> None:
    with room.taken(4):
        thread, got = enters(room, 6)
        assert got.wait(60)
    thread.join(60)


def test_a_step_that_does_not_fit_waits(room: Room) -> None:
    with ExitStack() as held:
        held.enter_context(room.taken(4))
        thread, got = enters(room, 7)
        assert not got.wait(0.2)
        held.close()
        assert got.wait(60)
    thread.join(60)


def test_a_step_larger_than_all_runs_alone(room: Room) -> None:
    with room.taken(1000):
        thread, got = enters(room, 1)
        assert not got.wait(0.2)
    assert got.wait(60)
    thread.join(60)


def test_an_error_gives_the_memory_back(room: Room) -> None:
    with pytest.raises(ZeroDivisionError), room.taken(9):
        raise ZeroDivisionError
    thread, got = enters(room, 9)
    assert got.wait(60)
    thread.join(60)
