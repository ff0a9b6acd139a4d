"""An analysis or a verification does not pass over the objects of the whole process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from enjoyln_cli.garbage import collections_of_new_objects, no_collections


class Loop:
    """Garbage that only the collector finds, once nobody else holds it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> Iterator[None]:
    """The tests freeze what exists when they begin, so that they collect faster."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_garbage_of_the_block_is_found_before_older_garbage() -> None:
    older = weakref.ref(Loop())
    with collections_of_new_objects():
        newer = weakref.ref(Loop())
        gc.collect()
        assert newer() is None and older() is not None
    gc.collect()
    assert older() is None


def test_what_the_program_froze_stays_frozen() -> None:
    frozen = Loop()
    gc.freeze()
    with collections_of_new_objects():
        newer = weakref.ref(Loop())
        gc.collect()
        assert newer() is None
    gone = weakref.ref(frozen)
    del frozen
    gc.collect()
    assert gone() is not None


@pytest.mark.parametrize("collecting", [True, False])
def test_the_collector_is_afterwards_as_it_was(collecting: bool) -> None:
    (gc.enable if collecting else gc.disable)()
    try:
        with pytest.raises(KeyError), no_collections():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is collecting
    finally:
        gc.enable()
