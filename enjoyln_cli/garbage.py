"""When Python looks for garbage.

An analysis makes many objects of which few are garbage, in a process that holds a million of torch
and transformers. Python's collector would pass over all of them once in a while. That took two
fifths of an analysis, and two thirds of a verification, which frees several models.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Let nothing look for garbage inside the block."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def collections_of_new_objects() -> Iterator[None]:
    """Look for garbage inside the block only among objects made since.

    Where the program has frozen its objects already, they stay frozen, and nothing else is.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
