"""How often Python looks for garbage while a model is analysed.

An analysis makes many objects of which few are garbage, in a process that holds a million of torch
and transformers. Python's collector would pass over all of them once in a while: a fifth of the
time of an analysis.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_within = False
_frozen_by_others = False


@contextmanager
def no_collections() -> Iterator[None]:
    """Within it, nothing looks for garbage."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def collections_of_new_objects() -> Iterator[None]:
    """Within it, garbage is looked for among objects made since. Older garbage is found later.

    Nothing changes within another such block, or in a process that has ever had objects frozen
    itself. That is not asked again, since counting a million frozen objects takes longer than some
    analyses.
    """
    global _within, _frozen_by_others
    if not _within:
        _frozen_by_others = _frozen_by_others or gc.get_freeze_count() > 0
    if _within or _frozen_by_others:
        yield
        return
    _within = True
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        _within = False
