"""``effects.garbage``: an analysis does not pass over the objects of the whole process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from enjoyln_cli.effects import garbage
from enjoyln_cli.effects.garbage import collections_of_new_objects, no_collections


class Loop:
    """Garbage that only the collector finds, once nobody else holds it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def nothing_was_ever_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(garbage, "_frozen_by_others", False)
    gc.unfreeze()
    yield
    gc.freeze()


def loop() -> weakref.ref[Loop]:
    return weakref.ref(Loop())


def test_garbage_of_the_block_is_found_in_it_and_older_garbage_afterwards() -> None:
    older = loop()
    with collections_of_new_objects():
        newer = loop()
        gc.collect()
        assert newer() is None and older() is not None
        with collections_of_new_objects():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert older() is None


def test_what_a_process_has_frozen_itself_stays_frozen() -> None:
    older = loop()
    gc.freeze()
    with collections_of_new_objects():
        pass
    gc.collect()
    assert gc.get_freeze_count() > 0 and older() is not None


@pytest.mark.parametrize("collecting", [True, False])
def test_the_collector_is_afterwards_as_it_was(collecting: bool) -> None:
    (gc.enable if collecting else gc.disable)()
    try:
        with pytest.raises(KeyError), no_collections():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is collecting
        with pytest.raises(KeyError), collections_of_new_objects():
            raise KeyError
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()
