"""Which inputs a check runs on: enough to make the ratio of two rounding errors stable.

The user's inputs come first; if they are too few, generated inputs are added (``batches``). The
first input is timed to see how many fit into the time. If the time or the number of inputs is
limited, batches are small and ordered by how much they reveal: rows with padding, the last rows of
a position table, masked patches.
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
from enjoyln_cli.comparison.batches import Batch, length
from enjoyln_cli.comparison.data_files import UserData
from enjoyln_cli.comparison.pace import Pace
from enjoyln_cli.comparison.run import run
from enjoyln_cli.comparison.text_scores import head_kind
from enjoyln_cli.events import Event, default_listener

ENTRIES = 1 << 14
"""Fewest entries of each output for a stable ratio of two rounding errors. The rounding errors
within a row are correlated, so this is more than independent entries would need."""
MOST_ENTRIES = 1 << 25
"""Most entries of all outputs that are kept in memory."""
FEWEST_ROWS, MOST_ROWS, TEXT_ROWS = 16, 128, 64
FEWEST_BATCHES = 4
"""Number of batches if inputs are limited, so that there is a batch of each kind."""


@dataclass(frozen=True)
class Runner:
    """The original model in float64, and everything that making inputs for it needs."""

    model: Any
    folder: Path
    """The directory of the tokenizer and the image processor."""
    dtype: torch.dtype
    """The dtype to which floating inputs are rounded."""
    unproven: Sequence[str]
    """Inputs that the proof does not cover."""
    trust_remote_code: bool
    run: Callable[[Batch], dict[str, torch.Tensor]]
    """Runs ``model`` on one batch."""
    event: Event = default_listener
    """Receives a warning if inputs are made up."""
    covers: Callable[[Batch], bool] = lambda batch: True
    """Whether the proof covers the call with a batch."""


@dataclass(frozen=True)
class Examples:
    """The inputs that the models are run on, and the text on which perplexity is computed."""

    batches: list[Batch]
    own: int = 0
    """Number of batches that the user gave; they come first."""
    full: int = 0
    """Number of inputs that an unlimited check would run."""
    kind: str = "inputs"
    """The word for the inputs in messages: ``inputs`` or ``images``."""
    windows: list[Batch] = field(default_factory=list)
    """The text for the perplexity; empty if it is limited to the batches that are run."""
    is_scored: bool = False
    """Whether a perplexity is computed."""
    mask_token: int | None = None

    def text(self, count: int) -> list[Batch]:
        """The text for the perplexity, if the first ``count`` batches are run."""
        if not self.is_scored:
            return []
        return self.windows or self.batches[: min(count, self.own)]


def choose(runner: Runner, data: UserData, seed: int, pace: Pace) -> Examples:
    """Choose the user's examples, and seeded examples if a stable ratio needs more rows."""
    own, mask_token, is_scored = _user_batches(runner, data)
    if is_scored:
        pace.runs += 2
    first = own or inputs.seeded_batches(runner.model, 1, seed, runner.dtype)
    one = inputs.first_rows(first[0], 1)
    outputs, fitting = pace.fitting(lambda: runner.run(one))
    fewest, most = _rows(outputs)
    full = data.number if data.texts and data.number else fewest
    rows = min(full, most) if data.texts else data.number or full
    rows = rows if fitting is None else min(rows, fitting)
    is_cut = rows < full
    batches = _first_rows(own, rows)
    count = len(batches)
    missing = (rows if is_cut else max(rows, fewest)) - sum(map(length, batches))
    if missing > 0:
        made, masked = _seeded_batches(runner, missing, seed, is_cut)
        batches += made
        full += masked
    if not is_cut:
        full = sum(map(length, batches))
    pace.costs = [sum(value.numel() for value in batch.values()) for batch in batches]
    is_picture = "pixel_values" in first[0] and "input_ids" not in first[0]
    kind = "images" if is_picture else "inputs"
    is_limited = fitting is not None or data.number is not None
    return Examples(batches, count, full, kind, [] if is_limited else own, is_scored, mask_token)


def _user_batches(runner: Runner, data: UserData) -> tuple[list[Batch], int | None, bool]:
    """The user's data as batches, the mask token, and whether to compute their perplexity."""
    if not data.is_given:
        return [], None, False
    model, dtype, trusted = runner.model, runner.dtype, runner.trust_remote_code
    found = user_data.batches_of(
        model, data, runner.folder, dtype, TEXT_ROWS, trust_remote_code=trusted
    )
    kind = head_kind(model) if data.text is not None or data.tokens else None
    is_scored = kind == "causal" or (kind == "masked" and found.mask_token is not None)
    own = user_data.runnable(model, found.batches, dtype, runner.run, runner.event)
    return own, found.mask_token, is_scored


def _seeded_batches(runner: Runner, rows: int, seed: int, is_cut: bool) -> tuple[list[Batch], int]:
    """Seeded batches of about ``rows`` rows; how many masked rows an unlimited check would add."""
    model, dtype = runner.model, runner.dtype
    at_once = inputs.ROWS_AT_ONCE
    if is_cut:
        at_once = min(at_once, max(2, rows // FEWEST_BATCHES))
    plain = inputs.seeded_batches(model, rows, seed, dtype, at_once)
    late = _last_positions(runner, plain[-1], seed) if len(plain) > 1 else None
    masked = [batch for batch in _masked_patches(model, plain[0], seed) if runner.covers(batch)]
    if not is_cut:
        return [*plain[: -1 if late else None], *([late] if late else []), *masked], 0
    special = [*([late] if late else []), *masked][: len(plain) - 1]
    plain = plain[: len(plain) - len(special)]
    return [*plain[:1], *special, *plain[1:]], sum(map(length, masked))


def _last_positions(runner: Runner, batch: Batch, seed: int) -> Batch | None:
    """A batch like ``batch`` at the model's last positions; ``None`` if none can be run."""
    model = runner.model
    for late in inputs.at_last_positions(model, batch, seed, runner.dtype, runner.unproven):
        if not runner.covers(late):
            continue
        row = inputs.first_rows(late, 1)
        plain = {name: value for name, value in row.items() if name in batch}
        try:
            (found,) = run(model, [row])
            if plain.keys() < row.keys() and _equal(found, *run(model, [plain])):
                continue  # the model accepts position_ids and ignores them
        except (RuntimeError, IndexError, ValueError, TypeError, AttributeError, KeyError):
            continue  # the model numbers its positions in another way
        return late
    return None


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def _masked_patches(model: Any, batch: Batch, seed: int) -> list[Batch]:
    """``batch`` with masked patches; empty if ``forward`` takes no mask, or refuses this mask."""
    masked = inputs.with_masked_patches(model, batch, seed)
    try:
        return [masked] if masked and run(model, [inputs.first_rows(masked, 1)]) else []
    except (ValueError, AttributeError):
        return []


def _rows(outputs: dict[str, torch.Tensor]) -> tuple[int, int]:
    """The rows for a ratio that hardly depends on the seed, and the most that memory allows.

    ``outputs`` are the outputs of a small run, which give the number of entries per row.
    """
    sizes = [value.numel() // max(len(value), 1) for value in outputs.values()]
    fewest = math.ceil(ENTRIES / max(min(sizes, default=1), 1))
    most = max(2, MOST_ENTRIES // max(sum(sizes), 1))
    return min(max(fewest, FEWEST_ROWS), most, MOST_ROWS), most


def _first_rows(batches: list[Batch], rows: int) -> list[Batch]:
    first = []
    for batch in batches:
        if rows > 0:
            first.append(inputs.first_rows(batch, rows))
        rows -= length(batch)
    return first
