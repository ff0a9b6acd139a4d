"""Run programs with their cache: a few tokens at a time, or a whole row as the original would."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.errors import ModelNotFound, UnsupportedModel
from enjoyln_cli.onnx_export.cached_calls import (
    ENCODED,
    ENCODED_MASK,
    ENCODER,
    LOGITS,
    MERGED,
    MODEL,
    POSITIONS,
    STATES,
    TYPES,
)
from enjoyln_cli.onnx_export.call import DECODER, IDS, MASK
from enjoyln_cli.onnx_export.cross_cache import PRESENT
from enjoyln_cli.onnx_export.image_parts import (
    EMBED,
    EMBEDS,
    FEATURES,
    IMAGE_TOKEN,
    VISION,
    image_inputs,
    with_features,
)
from enjoyln_cli.onnx_export.runtimes import RUNTIMES, LoadedProgram, RunProgram
from enjoyln_cli.plan.cache_argument import CACHE

STEPS = (2, 1, 1, 1, 1, 1, 1)
"""The last tokens of a whole row are read in steps of so many tokens, after all others at once."""
ENCODED_OUTPUT = f"encoder_{STATES}"
"""The name of the encoder's output in the outputs of transformers."""


def suffix_of(folder: Path, precision: str | None) -> str:
    """What the names of program files end with, before ``.onnx``.

    Without a ``precision``, the ending of the only files there.

    Raises ``ModelNotFound`` and ``UnsupportedModel`` as ``load_onnx`` does.
    """
    files = sorted((folder / "onnx").glob("*.onnx"))
    named = (re.fullmatch(rf"({MODEL}|{MERGED})(_(.+))?", file.stem) for file in files)
    found = {one[3] or "fp32": one[2] or "" for one in named if one}
    if not found:
        raise ModelNotFound(f"{folder / 'onnx'} has no program of a model")
    known = ", ".join(found)
    if precision is None and len(found) > 1:
        raise UnsupportedModel(f"{folder} has several precisions: pass one of {known}")
    wanted = known if precision is None else precision or "fp32"
    if wanted not in found:
        raise ModelNotFound(f"{folder} has no precision {precision}, only {known}")
    return found[wanted]


def load_programs(
    folder: Path,
    suffix: str = "",
    runtime: str = "onnxruntime",
    threads: int = 0,
    spin: bool = False,
) -> dict[str, LoadedProgram]:
    """The programs in a directory that ``programs.save`` has written, loaded in a runtime.

    0 leaves the number of ``threads`` to the runtime. ``spin`` makes onnxruntime as fast as it is
    by default (see ``runtimes.session_options``).
    """
    files = {
        name: folder / "onnx" / f"{name}{suffix}.onnx"
        for name in (MODEL, ENCODER, MERGED, VISION, EMBED)
    }
    load = RUNTIMES[runtime]
    return {name: load(file, threads, spin) for name, file in files.items() if file.exists()}


def leaves_types_out(config: Any) -> bool:
    """Whether leaving out the types of tokens is the same to a model as zeros.

    So it is for BERT and its relatives. GPT-2 adds embeddings to all types, zeros included.
    """
    return hasattr(config, "type_vocab_size")


def require_read(
    programs: Mapping[str, LoadedProgram], given: Mapping[str, Any], config: Any
) -> None:
    """Raise ``UnsupportedModel`` for an input that no program reads, and that would change results.

    Programs that generate take no types of tokens and no mask of the decoder. ``config`` is the
    model's.
    """
    neutral = {TYPES: 0 if leaves_types_out(config) else None, f"{DECODER}{MASK}": 1}
    for name, value in neutral.items():
        tensor = given.get(name)
        if tensor is None or any(name in program.inputs for program in programs.values()):
            continue
        if value is None or bool((tensor != value).any()):
            raise UnsupportedModel(f"the programs take no {name}; leave it out")


def is_cached(name: str) -> bool:
    """Whether an input or output of a program holds keys or values."""
    return name.startswith((f"{CACHE}.", f"{PRESENT}."))


def have_cache(programs: Mapping[str, LoadedProgram]) -> bool:
    """Whether any program reads tokens after others that are in a cache."""
    return any(one.reset or any(map(is_cached, one.inputs)) for one in programs.values())


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
    embed: LoadedProgram | None = None
    """Computes the embeddings of tokens, for a decoder that reads these."""
    embedded: torch.Tensor | None = None
    """The embeddings of the first tokens, with the features of pictures in them."""
    positions: torch.Tensor | None = None
    """The positions of the first tokens, if they are more than their numbers."""

    def logits(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Read new tokens and return the logits of each, of shape ``(rows, tokens, vocabulary)``.

        ``mask`` covers the tokens in the cache as well; padding is on the left. None is needed if
        no row is padded, or behind an encoder.
        """
        rows, size = ids.shape
        if mask is None:
            mask = ids.new_ones(rows, self.done + size)
        told = {IDS: ids, MASK: mask, POSITIONS: self._positions(mask, size)}
        if self.embedded is not None and self.embed:
            known = self.embedded[:, self.done : self.done + size]
            told[EMBEDS] = known if known.shape[1] == size else self.embed({IDS: ids})[EMBEDS]
        found = self.decoder({**self.known, **told})
        logits = found.pop(LOGITS)
        held = computed_values(found).items()
        self.known |= {name.replace(PRESENT, CACHE, 1): value for name, value in held}
        self.done += size
        return logits

    def _positions(self, mask: torch.Tensor, size: int) -> torch.Tensor:
        """The positions of the last ``size`` tokens of the tokens that ``mask`` covers."""
        counted = (mask.cumsum(1) - 1).clamp(min=0)[:, -size:]
        if self.positions is None:
            return counted
        end = self.positions.shape[-1]
        if mask.shape[1] <= end:
            return self.positions[..., self.done : mask.shape[1]]
        following = self.positions.amax((0, 2)) + 1 - mask[:, :end].sum(1)
        return (counted + following[:, None]).expand(len(self.positions), -1, -1).contiguous()


def computed_values(found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The keys and values that a call of a decoder has computed.

    A cross attention computes its keys and values in the first call, and returns empty tensors in
    all later calls.
    """
    return {name: value for name, value in found.items() if value.numel()}


def picture_features(
    programs: Mapping[str, LoadedProgram], given: Mapping[str, Any]
) -> torch.Tensor | None:
    """The features of the pictures in ``given``, a row for each image token; ``None`` for none."""
    encoder = programs[VISION]
    inputs = image_inputs(encoder.inputs, given)
    return encoder(inputs)[FEATURES] if inputs else None


def embedded(
    programs: Mapping[str, LoadedProgram], ids: torch.Tensor, features: torch.Tensor | None
) -> torch.Tensor:
    """The embeddings of tokens, with the ``features`` of pictures in place of image tokens."""
    found = programs[EMBED]({IDS: ids})[EMBEDS]
    if features is None:
        return found
    token = int(programs[VISION].metadata[IMAGE_TOKEN])
    return with_features(found, ids == token, features)


def begin(programs: Mapping[str, LoadedProgram], batch: Batch) -> Generation:
    """Run the encoder, if any, and take an empty cache; ``batch`` is for a whole model."""
    decoder = programs.get(MERGED) or programs[MODEL]
    known: Batch = {}
    encoded: Batch = {}
    if ENCODER in programs:
        states = programs[ENCODER](batch)[STATES]
        encoded = {ENCODED_OUTPUT: states}
        known = {ENCODED: states}
        if MASK in batch:
            known[ENCODED_MASK] = batch[MASK]
    parts: dict[str, Any] = {}
    if EMBED in programs:
        features = picture_features(programs, batch)
        parts = {"embed": programs[EMBED], "embedded": embedded(programs, batch[IDS], features)}
    if POSITIONS in batch and batch[POSITIONS].ndim > 2:
        parts["positions"] = batch[POSITIONS]
    if decoder.reset:
        decoder.reset()
    rows = len(batch[IDS] if IDS in batch else next(iter(batch.values())))
    known |= {name: decoder.empty(name, rows) for name in decoder.inputs if is_cached(name)}
    return Generation(decoder, known, encoded=encoded, **parts)


def greedy(programs: Mapping[str, LoadedProgram], batch: Batch, new: int) -> Iterator[torch.Tensor]:
    """The ``new`` most probable tokens after the tokens of each row, each of shape ``(rows, 1)``.

    ``batch`` has ``input_ids``, with a mask if they are padded, or ``decoder_input_ids`` and the
    inputs of the encoder.
    """
    generation = begin(programs, batch)
    prefix = DECODER if ENCODER in programs else ""
    ids, mask = batch[f"{prefix}{IDS}"], batch.get(f"{prefix}{MASK}")
    for _ in range(new):
        ids = generation.logits(ids, mask)[:, -1:].argmax(-1)
        yield ids
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(ids)], 1)


def whole_rows(programs: Mapping[str, LoadedProgram]) -> RunProgram:
    """The programs as a function of whole rows, which are read in several calls (see ``STEPS``).

    Programs without a cache are called once.
    """
    if not have_cache(programs):
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
