"""The user's data as inputs of one row each: the first half to choose by, the second to measure on.

A language model reads windows of a running text; any other model reads each line as one text. The
inputs of a decoder are what the original itself generates for the inputs of its encoder. If inputs
are equal, only the first counts, so that the halves share none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.calls.generation import generated_positions
from enjoyln_cli.calls.input_sets import accepted_by
from enjoyln_cli.calls.processed_inputs import image_token
from enjoyln_cli.clock import Countdown, Progress, no_progress
from enjoyln_cli.comparison import user_data
from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.data_files import FEWEST, UserData, too_little
from enjoyln_cli.comparison.run import inputs_for, run
from enjoyln_cli.comparison.text_scores import head_kind, with_predicted_tokens
from enjoyln_cli.comparison.user_data import OwnInputs
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.events import Event, default_listener
from enjoyln_cli.fs.digests import digest_of_bytes
from enjoyln_cli.models.load import refusing
from enjoyln_cli.onnx_export.cached_calls import TYPES
from enjoyln_cli.onnx_export.cached_run import leaves_types_out
from enjoyln_cli.text import counted
from enjoyln_cli.verification.generated_tokens import decoded

TRACED_TOKENS = 12
"""Tokens in the call that is traced. A decoder gets fewer, so that their number is not taken for
the encoder's."""
DIGITS = 16
"""Digits of an input's digest: two inputs have the same digest with a chance of 1 in 10**19."""


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
    on_progress: Progress = no_progress,
    event: Event = default_listener,
) -> tuple[list[Example], list[Example]]:
    """Turn ``data`` into inputs for ``model``, at most ``most`` for each half.

    Candidates are compared on the first half, and the result is measured on the second.
    ``folder`` has the tokenizer or processor. Raises ``UnsupportedModel`` if there are fewer than
    ``FEWEST`` inputs for a half, or if the model cannot run on them.
    """
    kind = None if data.images else head_kind(model)
    own = _inputs(model, folder, data, 2 * most, kind, trust_remote_code)
    rows = own.batches[: 2 * most]
    examples = _distinct(rows, _names(data, kind, len(rows)))
    if len(examples) < 2 * FEWEST:
        longest = max((row["input_ids"].shape[1] for row in rows if "input_ids" in row), default=0)
        windows = f" (windows of up to {longest} tokens)" if data.text else ""
        repeated = len(rows) - len(examples)
        again = f", of which {repeated} repeat another" if repeated else ""
        raise too_little(f"{counted(len(rows), 'input')}{windows}{again}")
    rows = [_as_tokenized(model, example.batch, own.tokenizer) for example in examples]
    rows = [_with_places(model, row) for row in _with_decoder_inputs(model, rows, on_progress)]
    rows = user_data.runnable(model, rows, torch.float32, lambda row: run(model, [row]), event)
    scored = "input_ids" in rows[0] and "decoder_input_ids" not in rows[0]
    scored = scored and (kind == "causal" or own.mask_token is not None)
    for at, row in enumerate(rows):
        predicted = None
        if kind and scored:
            row, predicted = with_predicted_tokens(kind, row, own.mask_token, at)
        examples[at] = replace(examples[at], batch=row, predicted=predicted)
    middle = len(examples) // 2
    return examples[:middle], examples[middle:]


def require_every_input(model: Any, folder: Path, example: Example) -> None:
    """Raise ``UnsupportedModel`` if a program traced from the example would lack an input.

    A program has the inputs that it is traced with. It needs each input that ``forward`` takes and
    that the tokenizer or a processor in ``folder`` makes: without pictures in the example, the
    program of a model of text and pictures could never be given any.
    """
    accepted = accepted_by(model)
    for name, option in (("pixel_values", "--image"), ("input_ids", "--text")):
        if name in accepted and name not in example.batch and _is_prepared(name, folder):
            raise UnsupportedModel(
                f"{type(model).__name__} also takes {name}, and a program made from these data "
                f"would not: pass {option} as well, or --format torchao"
            )
    require_no_types(model, example)


def require_no_types(model: Any, example: Example) -> None:
    """Raise ``UnsupportedModel`` if a program would lack the types of tokens in the example.

    Programs that generate take none, as in the layout that clients read.
    """
    is_decoder = model.can_generate() and not model.config.is_encoder_decoder
    if is_decoder and TYPES in example.batch and not leaves_types_out(model.config):
        raise UnsupportedModel(
            f"the tokenizer returns {TYPES}, which {type(model).__name__} adds to its embeddings, "
            "and programs that generate take none; if the model was trained without them, take "
            "them out of model_input_names in tokenizer_config.json"
        )


def _is_prepared(name: str, folder: Path) -> bool:
    """Whether a file in ``folder`` says how the input ``name`` is made."""
    files = {
        "pixel_values": ("preprocessor_config.json", "processor_config.json"),
        "input_ids": ("tokenizer_config.json",),
    }
    return any((folder / file).is_file() for file in files[name])


def traced_batch(model: Any, example: Example) -> Batch:
    """Two short rows like ``example``, with which ``model`` can be traced.

    If pictures take the place of tokens, a program has a fixed number of rows: then it is one row,
    with all tokens.
    """
    batch = example.batch
    if image_token(model.config) is not None and not _is_text(batch):
        return batch
    return {name: _traced(name, value, batch) for name, value in batch.items()}


def _traced(name: str, value: torch.Tensor, batch: Batch) -> torch.Tensor:
    two, of_decoder = torch.cat([value, value]), name.startswith("decoder_")
    ids = batch.get("decoder_input_ids" if of_decoder else "input_ids")
    if ids is None or value.shape != ids.shape or not (of_decoder or _is_text(batch)):
        return two
    return two[:, : TRACED_TOKENS - 3 * of_decoder]


def _is_text(batch: Batch) -> bool:
    return not any(value.is_floating_point() for value in batch.values())


def _inputs(
    model: Any, folder: Path, data: UserData, most: int, kind: str | None, trust_remote_code: bool
) -> OwnInputs:
    """The data as batches of one row."""
    texts = data.texts[:most] if data.images else data.texts
    data = replace(data, images=data.images[:most], audio=data.audio[:most], texts=texts)
    if data.text is not None and kind is None:
        lines = (line.strip() for line in data.text.splitlines())
        data = replace(data, text=None, texts=tuple(line for line in lines if line)[:most])
    return user_data.batches_of(
        model, data, folder, torch.float32, most, at_once=1, trust_remote_code=trust_remote_code
    )


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
    """The rows as examples, equal rows once."""
    found: dict[str, Example] = {}
    for row, name in zip(rows, names, strict=True):
        tensors = ((key, row[key].contiguous().numpy()) for key in sorted(row))
        parts = (part for key, value in tensors for part in (key.encode(), value.tobytes()))
        digest = digest_of_bytes(parts)[:DIGITS]
        found.setdefault(digest, Example(row, name=name, digest=digest))
    return list(found.values())


def _as_tokenized(model: Any, row: Batch, tokenizer: Any) -> Batch:
    """The row with what the tokenizer returns besides the ids of one whole text.

    Without a tokenizer, this is the mask.
    """
    if "input_ids" not in row:
        return row
    returned = getattr(tokenizer, "model_input_names", ["input_ids", "attention_mask"])
    whole = {
        "attention_mask": torch.ones_like(row["input_ids"]),
        "token_type_ids": torch.zeros_like(row["input_ids"]),
    }
    names = accepted_by(model).intersection(returned)
    return {**{name: value for name, value in whole.items() if name in names}, **row}


def _with_places(model: Any, row: Batch) -> Batch:
    """The row with the positions of its tokens, if the tokens of a picture have several each.

    Programs do not compute them.
    """
    if "input_ids" not in row or _is_text(row) or not model.can_generate():
        return row
    found = generated_positions(model, row)
    return {**row, "position_ids": found} if found.ndim > 2 else row


def _with_decoder_inputs(model: Any, rows: list[Batch], on_progress: Progress) -> list[Batch]:
    """The rows with what the model generates for them, if it has a decoder of its own."""
    if not model.config.is_encoder_decoder or not model.can_generate():
        return rows
    countdown = Countdown(len(rows), on_progress)
    words = f"{type(model).__name__} generates no tokens for its decoder"
    with refusing(UnsupportedModel, words):
        for found in decoded(model, [inputs_for(model, row) for row in rows]):
            for at, tokens in found.items():
                rows[at] = {**rows[at], "decoder_input_ids": tokens}
            countdown.count(len(found))
    return rows
