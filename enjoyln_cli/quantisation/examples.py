"""The user's data as inputs of one row each: the first half to choose by, the second to measure on.

A language model reads windows of a running text; any other model reads each line as one text. The
inputs of a decoder are what the original itself generates for the inputs of its encoder. Of equal
inputs, the first counts, so that the halves share none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.calls.input_forms import accepted_by
from enjoyln_cli.clock import Countdown, Progress, no_progress
from enjoyln_cli.comparison import user_data
from enjoyln_cli.comparison.batches import Batch, positions
from enjoyln_cli.comparison.data_files import UserData
from enjoyln_cli.comparison.run import inputs_for, run
from enjoyln_cli.comparison.text_scores import head_kind, with_predicted_tokens
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.fs.digests import digest_of_bytes
from enjoyln_cli.models.load import silent
from enjoyln_cli.text import counted

FEWEST = 4
"""Fewest inputs in each half."""
MOST_GENERATED = 48
"""Most tokens that the original generates for its decoder."""
TRACED_TOKENS = 12
"""Tokens in the call that is traced."""
DIGITS = 16
"""Digits of an input's digest: two inputs have the same with a chance of one in 10**19."""


@dataclass(frozen=True)
class Example:
    """One input of one row."""

    batch: Batch
    predicted: torch.Tensor | None = None
    """For a language model, the token that each logit predicts (see ``with_predicted_tokens``)."""
    name: str = ""
    """Where the input comes from: a file, or a part of the text."""
    digest: str = ""
    """Of what the user's data became, before other inputs were added."""


def split(
    model: Any,
    folder: Path,
    data: UserData,
    most: int,
    trust_remote_code: bool,
    seed: int = 0,
    on_progress: Progress = no_progress,
) -> tuple[list[Example], list[Example]]:
    """Turn ``data`` into inputs for ``model``, at most ``most`` for each half.

    Candidates are compared on the first half, and the result is measured on the second.
    ``folder`` has the tokenizer or processor. Raises ``UnsupportedModel`` if there are fewer than
    ``FEWEST`` inputs for a half, if an input has NaN in it, or if the model cannot run on them.
    """
    kind = head_kind(model)
    batches, mask_token = _batches(model, folder, data, 2 * most, kind, trust_remote_code)
    rows = [row for batch in batches for row in _rows(batch)][: 2 * most]
    examples = _distinct(rows, _names(data, kind, len(rows)))
    if len(examples) < 2 * FEWEST:
        longest = max((row["input_ids"].shape[1] for row in rows if "input_ids" in row), default=0)
        windows = f" (windows of up to {longest} tokens)" if data.text else ""
        repeated = len(rows) - len(examples)
        again = f", of which {repeated} repeat another" if repeated else ""
        raise UnsupportedModel(
            f"too little data: {counted(len(rows), 'input')}{windows}{again}, but {2 * FEWEST} are "
            "needed: one half to choose by, the other to measure on"
        )
    countdown, rows = Countdown(len(examples), on_progress), []
    for example in examples:
        rows.append(_with_decoder_inputs(model, _with_masks(model, example.batch)))
        countdown.count()
    rows = user_data.runnable(model, rows, torch.float32, lambda batch: run(model, [batch]))
    scored = kind and "input_ids" in rows[0] and "decoder_input_ids" not in rows[0]
    for at, row in enumerate(rows):
        predicted = None
        if kind and scored:
            row, predicted = with_predicted_tokens(kind, row, mask_token, seed + at)
        examples[at] = replace(examples[at], batch=row, predicted=predicted)
    middle = len(examples) // 2
    return examples[:middle], examples[middle:]


def traced_batch(example: Example) -> Batch:
    """Two short rows like ``example``, with which a model can be traced."""
    return {
        name: torch.cat([value, value])[:, : _traced_tokens(name)]
        if value.ndim == 2 and not value.is_floating_point()
        else torch.cat([value, value])
        for name, value in example.batch.items()
    }


def _traced_tokens(name: str) -> int:
    """A decoder gets fewer tokens, so that their number is not taken for the encoder's."""
    return TRACED_TOKENS - 3 if name.startswith("decoder_") else TRACED_TOKENS


def _batches(
    model: Any, folder: Path, data: UserData, most: int, kind: str | None, trust_remote_code: bool
) -> tuple[list[Batch], int | None]:
    """The data as batches, and the mask token of the tokenizer."""
    data = replace(data, images=data.images[:most], audio=data.audio[:most])
    if data.text is not None and kind is None:
        lines = (line.strip() for line in data.text.splitlines())
        data = replace(data, text=None, texts=tuple(line for line in lines if line)[:most])
    return user_data.batches_of(
        model, data, folder, torch.float32, most, at_once=1, trust_remote_code=trust_remote_code
    )


def _rows(batch: Batch) -> Iterator[Batch]:
    for at in range(len(next(iter(batch.values())))):
        yield {name: value[at : at + 1] for name, value in batch.items()}


def _names(data: UserData, kind: str | None, count: int) -> list[str]:
    """Where each of ``count`` rows comes from, in words for a message."""
    files = [*map(str, data.images or data.audio)]
    if len(files) >= count:
        return files[:count]
    if data.text is not None and kind is None:
        lines = data.text.splitlines()
        return [f"line {at} of the text" for at, line in enumerate(lines, 1) if line.strip()][
            :count
        ]
    part = "window" if data.text is not None else "input"
    return [f"{part} {at} of your data" for at in range(1, count + 1)]


def _distinct(rows: Sequence[Batch], names: Sequence[str]) -> list[Example]:
    """The rows as examples, equal ones once. Raises ``UnsupportedModel`` for NaN, by its name."""
    found: dict[str, Example] = {}
    for row, name in zip(rows, names, strict=True):
        if any(value.is_floating_point() and value.isnan().any() for value in row.values()):
            raise UnsupportedModel(f"{name} has NaN in it; leave it out")
        parts = (part for key in sorted(row) for part in (key.encode(), _bytes_of(row[key])))
        digest = digest_of_bytes(parts)[:DIGITS]
        found.setdefault(digest, Example(row, name=name, digest=digest))
    return list(found.values())


def _bytes_of(value: torch.Tensor) -> bytes:
    return value.contiguous().numpy().tobytes()


def _with_masks(model: Any, row: Batch) -> Batch:
    """The row with the mask and the token types that stand for one whole text."""
    if "input_ids" not in row:
        return row
    accepted, added = accepted_by(model), {}
    if "attention_mask" in accepted:
        added["attention_mask"] = torch.ones_like(row["input_ids"])
    if "token_type_ids" in accepted and getattr(model.config, "type_vocab_size", 0) > 1:
        added["token_type_ids"] = torch.zeros_like(row["input_ids"])
    return {**added, **row}


def _with_decoder_inputs(model: Any, row: Batch) -> Batch:
    """The row with what the model generates for it, if it has a decoder of its own."""
    if not model.config.is_encoder_decoder or not model.can_generate():
        return row
    from transformers import GenerationMixin

    with torch.no_grad(), silent():
        ids = GenerationMixin.generate(
            model,
            **inputs_for(model, row),
            do_sample=False,
            num_beams=1,
            max_new_tokens=min(
                MOST_GENERATED, positions(model.config.get_text_config(decoder=True))
            ),
        )
    return {**row, "decoder_input_ids": ids.cpu()}
