"""How fast a result is beside float32: a call, or for a model that generates a whole generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from torch.utils.benchmark import timer

from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.timing import WARM_UP, time_rounds
from enjoyln_cli.onnx_export.cached_run import greedy, have_cache
from enjoyln_cli.onnx_export.call import DECODER, IDS, MASK
from enjoyln_cli.onnx_export.image_parts import EMBED
from enjoyln_cli.onnx_export.runtimes import LoadedProgram
from enjoyln_cli.text import counted

ROUNDS, GENERATIONS = 15, 3
"""Rounds in which a call, and a whole generation, is timed."""
SECONDS = 10.0
MOST_GENERATED = 32
EQUAL = 1.05
"""Times that differ by less are taken for equal."""


@dataclass(frozen=True)
class Speed:
    """Median times of one input."""

    milliseconds: float
    what: str = "a call"
    """What takes so long: a call, or for a model that generates ``generating 31 tokens``."""
    token_milliseconds: float | None = None
    """Of one more token, with all earlier tokens in the cache."""

    def is_slower_than(self, other: Speed) -> bool:
        """Whether it takes clearly longer."""
        return self.milliseconds > EQUAL * other.milliseconds


def speeds(calls: Mapping[str, Callable[[], Any]]) -> dict[str, Speed]:
    """The median times of some calls, which take turns."""
    return {name: Speed(time) for name, time in _milliseconds(calls).items()}


def speeds_of_programs(
    programs: Mapping[str, Mapping[str, LoadedProgram]], batch: Batch
) -> dict[str, Speed]:
    """The times of the programs of some models for one input.

    Programs with a cache generate greedily. Behind an encoder they begin with the decoder's first
    token, with pictures with all tokens, and otherwise with the first half of the tokens.
    """
    one = next(iter(programs.values()))
    if not have_cache(one):
        return speeds(
            {name: partial(next(iter(p.values())), batch) for name, p in programs.items()}
        )
    prefix = DECODER if f"{DECODER}{IDS}" in batch else ""
    ids = batch[f"{prefix}{IDS}"]
    half = 1 if prefix else max(1, ids.shape[1] // 2)
    tokens = max(1, min(MOST_GENERATED, ids.shape[1] - half))
    if EMBED in one:
        half, tokens = ids.shape[1], MOST_GENERATED
    prompt = {**batch, f"{prefix}{IDS}": ids[:, :half]}
    if not prefix:
        prompt.pop(MASK, None)
    firsts: dict[str, list[float]] = {name: [] for name in programs}

    def generate(name: str) -> None:
        begin = timer()
        for at, _ in enumerate(greedy(programs[name], prompt, tokens)):
            if not at:
                firsts[name].append(timer() - begin)

    whole = _milliseconds({name: partial(generate, name) for name in programs}, GENERATIONS, 1)
    first = {name: 1000 * median(seconds[1:]) for name, seconds in firsts.items()}
    what, more = f"generating {counted(tokens, 'token')}", tokens - 1
    return {
        name: Speed(whole[name], what, (whole[name] - first[name]) / more if more else None)
        for name in programs
    }


def _milliseconds(
    calls: Mapping[str, Callable[[], Any]], repeats: int = ROUNDS, warm_up: int = WARM_UP
) -> dict[str, float]:
    rounds = time_rounds(calls, repeats, SECONDS, warm_up=warm_up)
    return {name: 1000 * median(seconds) for name, seconds in rounds.items()}
