"""Run programs with their cache: a few tokens at a time, or a whole row as the original would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.onnx_export.cached_calls import (
    ENCODED,
    ENCODED_MASK,
    ENCODER,
    LOGITS,
    MERGED,
    MODEL,
    POSITIONS,
    STATES,
)
from enjoyln_cli.onnx_export.call import DECODER, IDS, MASK
from enjoyln_cli.onnx_export.cross_cache import PRESENT
from enjoyln_cli.onnx_export.runtimes import RUNTIMES, LoadedProgram, Run
from enjoyln_cli.plan.cache_argument import CACHE

STEPS = (2, 1, 1, 1, 1, 1, 1)
"""The last tokens of a whole row are read in steps of so many tokens, after all others at once."""
ENCODED_OUTPUT = f"encoder_{STATES}"
"""The name of the encoder's output in the outputs of transformers."""


def load_programs(
    folder: Path, suffix: str = "", runtime: str = "onnxruntime", threads: int = 0
) -> dict[str, LoadedProgram]:
    """The programs in a directory that ``programs.save`` has written, loaded in a runtime.

    0 leaves the number of ``threads`` to the runtime.
    """
    files = {name: folder / "onnx" / f"{name}{suffix}.onnx" for name in (MODEL, ENCODER, MERGED)}
    load = RUNTIMES[runtime]
    return {name: load(file, threads) for name, file in files.items() if file.exists()}


def is_cached(name: str) -> bool:
    """Whether an input or output of a program holds keys or values."""
    return name.startswith((f"{CACHE}.", f"{PRESENT}."))


@dataclass
class Generation:
    """Rows of tokens that a decoder reads, a few at a time."""

    decoder: LoadedProgram
    known: Batch
    """Its inputs in the next call, without the new tokens."""
    done: int = 0
    """The number of tokens in the cache."""
    encoded: Batch = field(default_factory=dict)
    """The outputs of the encoder, with the names that they have in transformers."""

    def again(self) -> Generation:
        """The same state, which reading tokens does not change."""
        return replace(self, known=dict(self.known))

    def logits(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Read new tokens and return the logits of each, of shape ``(rows, tokens, vocabulary)``.

        ``mask`` covers the tokens in the cache as well; padding is on the left. None is needed if
        no row is padded, or behind an encoder.
        """
        rows, size = ids.shape
        if mask is None:
            mask = ids.new_ones(rows, self.done + size)
        counted = (mask.cumsum(1) - 1).clamp(min=0)[:, -size:]
        found = self.decoder({**self.known, IDS: ids, MASK: mask, POSITIONS: counted})
        logits = found.pop(LOGITS)
        self.known |= {  # a cross attention's keys and values are returned once
            name.replace(PRESENT, CACHE, 1): value for name, value in found.items() if value.numel()
        }
        self.done += size
        return logits


def begin(programs: Mapping[str, LoadedProgram], batch: Batch) -> Generation:
    """Run the encoder, if there is one, and take an empty cache; ``batch`` is for a whole model."""
    decoder = programs.get(MERGED) or programs[MODEL]
    known: Batch = {}
    encoded: Batch = {}
    if ENCODER in programs:
        states = programs[ENCODER](batch)[STATES]
        encoded = {ENCODED_OUTPUT: states}
        known = {ENCODED: states}
        if MASK in batch:
            known[ENCODED_MASK] = batch[MASK]
    rows = len(next(iter(batch.values())))
    known |= {name: decoder.empty(name, rows) for name in decoder.inputs if is_cached(name)}
    return Generation(decoder, known, encoded=encoded)


def greedy(
    programs: Mapping[str, LoadedProgram],
    batch: Batch,
    new: int,
    ends: frozenset[int] = frozenset(),
) -> torch.Tensor:
    """The ``new`` most probable tokens after those of each row, of shape ``(rows, new)``.

    ``batch`` has ``input_ids``, with a mask if they are padded, or ``decoder_input_ids`` and the
    inputs of the encoder. Stops earlier where each row has one of the tokens ``ends``.
    """
    generation = begin(programs, batch)
    prefix = DECODER if ENCODER in programs else ""
    ids, mask = batch[f"{prefix}{IDS}"], batch.get(f"{prefix}{MASK}")
    found: list[torch.Tensor] = []
    ended = torch.zeros(len(ids), 1, dtype=torch.bool)
    while len(found) < new and not bool(ended.all()):
        ids = generation.logits(ids, mask)[:, -1:].argmax(-1)
        found.append(ids)
        ended |= torch.isin(ids, torch.tensor(sorted(ends), dtype=ids.dtype))
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
    return torch.cat(found, 1)


def whole_rows(programs: Mapping[str, LoadedProgram]) -> Run:
    """The programs as a function of whole rows, which are read in several calls (see ``STEPS``).

    Programs without a cache are called once.
    """
    if not any(is_cached(name) for program in programs.values() for name in program.inputs):
        return programs[MODEL].run
    prefix = DECODER if ENCODER in programs else ""

    def compute(batch: Batch) -> Batch:
        ids, mask = batch[f"{prefix}{IDS}"], batch.get(f"{prefix}{MASK}")
        generation = begin(programs, batch)
        logits = []
        for size in (max(1, ids.shape[1] - sum(STEPS)), *STEPS):
            end = generation.done + size
            new = ids[:, generation.done : end]
            if new.shape[1]:
                logits.append(generation.logits(new, mask if mask is None else mask[:, :end]))
        return {**generation.encoded, LOGITS: torch.cat(logits, 1)}

    return compute
