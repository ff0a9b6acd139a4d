"""Times several calls in rounds.

In a round each call runs once, and every other round runs them in the opposite order. So slow
changes (clock rates, other programs) affect all calls alike, and two calls can be compared by their
ratio within each round. A short call is repeated within its round until the repeats take
``SHORTEST``. ``torch.utils.benchmark`` is the clock: it waits for a GPU to finish.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.benchmark import timer

SHORTEST = 0.01
"""Least seconds of each call in a round; a shorter call is repeated."""
WARM_UP = 2
"""Runs of each call before the first round: the first may compile, the second shows its time."""
ENOUGH = 6
"""Rounds that run even if the time is short."""


def time_rounds(
    calls: Mapping[str, Callable[[], Any]],
    repeats: int,
    seconds: float = math.inf,
    now: Callable[[], float] = timer,
    warm_up: int = WARM_UP,
) -> dict[str, list[float]]:
    """Seconds of every call in each round.

    There are ``repeats`` rounds, or as many as fit into ``seconds``, but at least ``ENOUGH`` if
    ``repeats`` allows them. Without ``warm_up``, the calls have run before, and none is repeated
    within its round.
    """
    begin = now()
    number: dict[str, int] = {}
    """How often each call runs in a round."""
    times: dict[str, list[float]] = {name: [] for name in calls}

    def time(call: Callable[[], Any], runs: int) -> float:
        start = now()
        for _ in range(runs):
            call()
        return now() - start

    for name, call in calls.items():
        taken = SHORTEST
        for _ in range(warm_up):
            taken = time(call, 1)
        number[name] = max(1, math.ceil(SHORTEST / max(taken, 1e-9)))
    for done in range(repeats):
        if done >= ENOUGH and now() - begin >= seconds:
            break
        for name in list(calls)[:: -1 if done % 2 else 1]:
            times[name].append(time(calls[name], number[name]) / number[name])
    return times
