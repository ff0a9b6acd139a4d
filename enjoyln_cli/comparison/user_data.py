"""The user's data as batches that a model takes.

The tokenizer turns each text into one input, with special tokens; the checkpoint's own processors
prepare images and recordings. Other inputs that a model needs are generated (``complete_batch``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.calls.input_sets import accepted_by
from enjoyln_cli.calls.processed_inputs import from_audio, from_images, joined
from enjoyln_cli.comparison.batches import (
    LONGEST_ROW,
    ROWS_AT_ONCE,
    WINDOW,
    Batch,
    complete_batch,
    first_rows,
    positions,
    rows_at_once,
)
from enjoyln_cli.comparison.data_files import UserData
from enjoyln_cli.errors import EnjoyLNError, UnsupportedModel
from enjoyln_cli.events import Event, default_listener
from enjoyln_cli.text import first_line

PAIRED = ("ForSequenceClassification", "ForQuestionAnswering", "ForNextSentencePrediction")
"""Ends of the names of classes that can read two texts at once, such as rerankers."""


def require_input(model: Any, name: str, data: str) -> None:
    """Raise ``UnsupportedModel`` if ``model`` has no input ``name``, which ``data`` become."""
    if name not in accepted_by(model):
        main = getattr(model, "main_input_name", "input_ids")
        raise UnsupportedModel(f"{type(model).__name__} takes {main}, so it cannot run on {data}")


def tokenizer_of(model: Any, folder: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer saved in ``folder``.

    Raises ``UnsupportedModel`` if there is none, or if ``model`` takes no token ids.
    """
    from transformers import AutoTokenizer

    require_input(model, "input_ids", "texts")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        first = first_line(error)
        raise UnsupportedModel(f"a text needs the tokenizer of {folder}: {first}") from error
    if not tokenizer.vocab_size:  # some classes load from a directory without tokenizer files
        raise UnsupportedModel(f"a text needs a tokenizer, and {folder} contains none")
    return tokenizer


@dataclass(frozen=True)
class OwnInputs:
    """The user's data as inputs."""

    batches: list[Batch]
    tokenizer: Any = None
    """The stored tokenizer, for texts and token ids; ``None`` if there is none."""

    @property
    def mask_token(self) -> int | None:
        """The token that stands for a hidden token."""
        token: int | None = getattr(self.tokenizer, "mask_token_id", None)
        return token


def batches_of(
    model: Any,
    data: UserData,
    folder: Path,
    dtype: torch.dtype,
    windows: int,
    *,
    at_once: int | None = None,
    trust_remote_code: bool = False,
) -> OwnInputs:
    """``data`` as batches of ``at_once`` rows, by default of as many as the model takes.

    ``folder`` has the tokenizer or processor. Floating inputs are in ``dtype``. A running text is
    cut into at most so many ``windows``.
    """
    code = {"trust_remote_code": trust_remote_code}
    if data.images:
        made = from_images(model, data.images, data.texts, folder, dtype, **code)
        return OwnInputs(joined(made, at_once or rows_at_once(model)))
    if data.audio:
        return OwnInputs(from_audio(model, data.audio, folder, dtype, **code))
    if data.tokens:
        stored = None
        with suppress(UnsupportedModel):
            stored = tokenizer_of(model, folder, **code)
        return OwnInputs(from_tokens(model, data.tokens), stored)
    tokenizer = tokenizer_of(model, folder, **code)
    step = at_once or rows_at_once(model)
    if data.text is None:
        return OwnInputs(from_texts(model, tokenizer, data.texts, step), tokenizer)
    return OwnInputs(from_text(model, tokenizer, data.text, windows, step), tokenizer)


def from_text(
    model: Any, tokenizer: Any, text: str, rows: int, at_once: int = ROWS_AT_ONCE
) -> list[Batch]:
    """The first ``rows`` windows of the text, of at most 256 tokens each, without padding.

    Raises ``UnsupportedModel`` if the text has fewer than two tokens.
    """
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)[
        "input_ids"
    ][0]
    length = min(WINDOW, positions(model.config.get_text_config()))
    whole = len(ids) // length
    if whole == 0:
        if len(ids) < 2:
            raise UnsupportedModel("the text has fewer than two tokens: pass a longer one")
        return [{"input_ids": ids[None]}]
    windows = ids[: whole * length].view(whole, length)[:rows]
    return [{"input_ids": part} for part in windows.split(at_once)]


def from_texts(
    model: Any, tokenizer: Any, texts: Sequence[str], at_once: int = ROWS_AT_ONCE
) -> list[Batch]:
    """Each text as one input, in batches, truncated to the number of tokens that the model takes.

    A class of ``PAIRED`` reads each text as two if all have one tab, which stands between them.

    Raises ``UnsupportedModel`` if the tokenizer returns no tokens.
    """
    length = min(LONGEST_ROW, positions(model.config.get_text_config()))
    length = min(length, tokenizer.model_max_length)
    pads = tokenizer.pad_token_id is not None
    step = at_once if pads else 1
    accepted = accepted_by(model)
    is_paired = type(model).__name__.endswith(PAIRED) and all(t.count("\t") == 1 for t in texts)
    batches = []
    for first in range(0, len(texts), step):
        part = [text.split("\t") if is_paired else [text] for text in texts[first : first + step]]
        found = tokenizer(
            *map(list, zip(*part, strict=True)),
            truncation=True,
            max_length=length,
            padding=pads and step > 1,
            return_tensors="pt",
            verbose=False,
        )
        if found["input_ids"].shape[1] == 0:
            raise UnsupportedModel(f"the tokenizer returns no tokens for {texts[first]!r:.60}")
        batches.append({name: ids for name, ids in found.items() if name in accepted})
    return batches


def from_tokens(model: Any, lists: Sequence[Sequence[int]]) -> list[Batch]:
    """The token ids cut into windows of at most 256, one window in each batch.

    Raises ``UnsupportedModel`` for an id that the model has no embedding for, and if the model
    takes no token ids.
    """
    require_input(model, "input_ids", "token ids")
    length = min(WINDOW, positions(model.config.get_text_config()))
    vocabulary = len(model.get_input_embeddings().weight)
    largest = max(map(max, filter(None, lists)))
    if largest >= vocabulary:
        raise UnsupportedModel(f"token id {largest}: the model has ids up to {vocabulary - 1}")
    windows = (ids[at : at + length] for ids in lists for at in range(0, len(ids), length))
    return [{"input_ids": torch.tensor([window])} for window in windows if len(window) > 1]


def runnable(
    model: Any,
    batches: list[Batch],
    dtype: torch.dtype,
    try_run: Callable[[Batch], Any],
    event: Event = default_listener,
) -> list[Batch]:
    """``batches`` as the model accepts them: unchanged, or completed by generated inputs.

    ``try_run`` runs the model on one row, of pictures and recordings on one of each shape. What is
    generated is a warning. Raises ``UnsupportedModel`` if the model accepts neither.
    """
    errors = []
    for complete in (False, True):
        try:
            made = [complete_batch(model, one, dtype) for one in batches] if complete else batches
            for batch in _of_each_shape(made):
                try_run(first_rows(batch, 1))
        except (EnjoyLNError, MemoryError):
            raise
        except Exception as error:  # any error of the model's code if an input is missing
            errors.append(error)
        else:
            invented = ", ".join(name for name in made[0] if name not in batches[0])
            if invented:
                event("warning", f"your data do not have {invented}: made-up values are used")
            return made
    first = first_line(errors[0])
    given = ", ".join(batches[0])
    raise UnsupportedModel(f"{type(model).__name__} cannot run on {given} alone: {first}")


def _of_each_shape(batches: Sequence[Batch]) -> list[Batch]:
    """The first batch; of pictures and recordings the first of each shape."""
    if not any(value.is_floating_point() for value in batches[0].values()):
        return [*batches[:1]]
    found: dict[tuple[torch.Size, ...], Batch] = {}
    for batch in batches:
        shapes = (value.shape[1:] for value in batch.values() if value.is_floating_point())
        found.setdefault(tuple(shapes), batch)
    return [*found.values()]
