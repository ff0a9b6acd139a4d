"""Which inputs a check runs on: as many as make a ratio of two rounding errors stable.

The user's come first, and made-up ones fill up (``batches``). Where the time or the number of
inputs is limited, the first two are timed, and batches are small and ordered, so that those that
come first show most: rows with padding, the last positions of a table, masked patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.comparison import batches as inputs
from enjoyln_cli.comparison import user_data
from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.pace import Pace
from enjoyln_cli.comparison.run import run
from enjoyln_cli.comparison.text_scores import head_kind
from enjoyln_cli.comparison.user_data import UserData
from enjoyln_cli.errors import UnsupportedModel

ENTRIES = 1 << 14
"""Entries per output that a ratio of two rounding errors should at least rest on. The entries of a
row err together, so this takes more than their number suggests."""
MOST_ENTRIES = 1 << 25
FEWEST_ROWS, MOST_ROWS, TEXT_ROWS = 16, 128, 64
FEWEST_BATCHES = 4
"""Where inputs are limited, so that there is one of each kind."""


@dataclass(frozen=True)
class Runner:
    """The original in float64, and what it takes to make inputs for it."""

    model: Any
    folder: Path
    """Of the tokenizer and the image processor."""
    dtype: torch.dtype
    unproven: Sequence[str]
    """Inputs that no proof covers."""
    trust_remote_code: bool
    run: Callable[[Batch], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Examples:
    """What the models are run on, and the longer text that a perplexity is over."""

    batches: list[Batch]
    own: int = 0
    """Batches that the user gave; they come first."""
    full: int = 0
    """Inputs of a check that nothing limits."""
    kind: str = "inputs"
    windows: list[Batch] = field(default_factory=list)
    """All that a perplexity is over; none where the text is as limited as the inputs."""
    is_scored: bool = False
    mask_token: int | None = None

    def text(self, count: int) -> list[Batch]:
        """What a perplexity is over, where the first ``count`` batches are run."""
        if not self.is_scored:
            return []
        return self.windows or self.batches[: min(count, self.own)]


def choose(runner: Runner, data: UserData, seed: int, pace: Pace) -> Examples:
    """The user's examples first; seeded ones fill up to the rows that a stable ratio needs."""
    own, mask_token, is_scored = _own(runner, data)
    if is_scored:
        pace.plan_run()
        pace.plan_run()
    first = own or inputs.seeded_batches(runner.model, 2, seed, runner.dtype)
    two = {name: value[:2] for name, value in first[0].items()}
    begin = pace.clock.now()
    found = runner.run(two)
    seconds = (pace.clock.now() - begin) / length(two)
    fewest, most = _rows(found)
    full = data.number if data.texts and data.number else fewest
    rows = min(full, most) if data.texts else data.number or full
    fitting = pace.fitting(seconds)
    rows = rows if fitting is None else min(rows, fitting)
    is_cut = rows < full
    batches = _first_rows(own, rows)
    count = len(batches)
    missing = (rows if is_cut else max(rows, fewest)) - sum(map(length, batches))
    if missing > 0:
        made, masked = _made(runner, missing, seed, is_cut)
        batches += made
        full += masked
    if not is_cut:
        full = sum(map(length, batches))
    pace.costs = [sum(value.numel() for value in batch.values()) for batch in batches]
    kind = "images" if first[0].keys() == {"pixel_values"} else "inputs"
    is_limited = fitting is not None or data.number is not None
    return Examples(batches, count, full, kind, [] if is_limited else own, is_scored, mask_token)


def _own(runner: Runner, data: UserData) -> tuple[list[Batch], int | None, bool]:
    """The user's data as inputs, the mask token, and whether a perplexity can be taken on them."""
    if not data.is_given:
        return [], None, False
    model, is_scored, mask_token = runner.model, False, None
    if data.images:
        found = user_data.from_images(model, data.images, runner.folder, runner.dtype)
    else:
        tokenizer = user_data.tokenizer_of(runner.folder, runner.trust_remote_code)
        mask_token = tokenizer.mask_token_id
        if data.text is None:
            found = user_data.from_texts(model, tokenizer, data.texts)
        else:
            found = user_data.from_text(model, tokenizer, data.text, TEXT_ROWS)
            is_scored = _has_score(model, mask_token)
    return user_data.runnable(model, found, runner.dtype, runner.run), mask_token, is_scored


def _has_score(model: Any, mask_token: int | None) -> bool:
    try:
        return head_kind(model) == "causal" or mask_token is not None
    except UnsupportedModel:
        return False


def _made(runner: Runner, rows: int, seed: int, is_cut: bool) -> tuple[list[Batch], int]:
    """Seeded batches of about ``rows`` rows, and how many rows with masked patches are on top."""
    model, dtype = runner.model, runner.dtype
    at_once = inputs.ROWS_AT_ONCE
    if is_cut:
        at_once = min(at_once, max(2, rows // FEWEST_BATCHES))
    plain = inputs.seeded_batches(model, rows, seed, dtype, at_once)
    late = _late(runner, plain[-1], seed) if len(plain) > 1 else None
    masked = _masked(model, plain[0], seed)
    if not is_cut:
        return [*plain[: -1 if late else None], *([late] if late else []), *masked], 0
    special = [*([late] if late else []), *masked][: len(plain) - 1]
    plain = plain[: len(plain) - len(special)]
    return [*plain[:1], *special, *plain[1:]], sum(map(length, masked))


def length(batch: Batch) -> int:
    """Its inputs."""
    return len(next(iter(batch.values())))


def _late(runner: Runner, batch: Batch, seed: int) -> Batch | None:
    """A batch at the last positions that the model takes, in place of ``batch``."""
    model = runner.model
    for late in inputs.at_last_positions(model, batch, seed, runner.dtype, runner.unproven):
        row = {name: value[:1] for name, value in late.items()}
        plain = {name: value for name, value in row.items() if name in batch}
        try:
            (found,) = run(model, [row])
            if plain.keys() < row.keys() and _equal(found, *run(model, [plain])):
                continue  # a model that takes positions and counts them itself
        except (RuntimeError, IndexError, ValueError, TypeError, AttributeError, KeyError):
            continue  # a model that counts its positions in another way
        return late
    return None


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def _masked(model: Any, batch: Batch, seed: int) -> list[Batch]:
    """A batch with masked patches; a class may take the mask and refuse it for its config."""
    masked = inputs.with_masked_patches(model, batch, seed)
    try:
        row = {name: value[:1] for name, value in (masked or {}).items()}
        return [masked] if masked and run(model, [row]) else []
    except (ValueError, AttributeError):
        return []


def _rows(outputs: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Enough for a ratio that hardly depends on the seed, and the most to be kept in memory."""
    sizes = [value.numel() // max(len(value), 1) for value in outputs.values()]
    fewest = math.ceil(ENTRIES / max(min(sizes, default=1), 1))
    most = max(2, MOST_ENTRIES // max(sum(sizes), 1))
    return min(max(fewest, FEWEST_ROWS), most, MOST_ROWS), most


def _first_rows(batches: list[Batch], rows: int) -> list[Batch]:
    kept = []
    for batch in batches:
        if rows > 0:
            kept.append({name: value[:rows] for name, value in batch.items()})
        rows -= length(batch)
    return kept
