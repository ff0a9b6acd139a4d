"""Make calls in threads, each of which computes with one thread of torch.

The pieces of an edit are too small for torch's own threads, which would mostly wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def in_threads(calls: Sequence[Callable[[], T]], threads: int) -> Iterator[T]:
    """Make all calls in ``threads`` threads. Yields the results in the order of the calls.

    An error in a call, or where the results are used, ends all: no further call begins.
    """
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, "", torch.set_num_threads, (1,)) as pool:
            yield from pool.map(lambda call: call(), calls)
    finally:
        torch.set_num_threads(before)
