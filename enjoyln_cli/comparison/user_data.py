"""The user's data for comparing two models: a running text, a file of texts, or images.

A running text (``--text``) is cut into windows. For a language model, its perplexity is computed. A
file of texts (``--samples FILE``) has one text on each line. The tokenizer turns each text into one
input, with special tokens. Other inputs that a model needs are generated (``complete_batch``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from enjoyln_cli.calls.input_forms import accepted_by
from enjoyln_cli.comparison.batches import (
    LONGEST_ROW,
    ROWS_AT_ONCE,
    WINDOW,
    Batch,
    complete_batch,
    positions,
    rows_at_once,
)
from enjoyln_cli.errors import EnjoyLNError, UnsupportedModel
from enjoyln_cli.text import first_line


@dataclass(frozen=True)
class UserData:
    """The inputs that a user wants models to be run on; generated inputs are added if needed."""

    text: str | None = None
    """A running text."""
    texts: tuple[str, ...] = ()
    """Texts that become one input each."""
    images: tuple[str | Path, ...] = ()
    """Image files."""
    number: int | None = None
    """Number of inputs; by default as many as a ratio of two rounding errors needs."""

    @property
    def is_given(self) -> bool:
        return self.text is not None or bool(self.texts or self.images)


def read_user_data(
    text: str | Path | None = None,
    images: Sequence[str | Path] = (),
    samples: int | str | Path | None = None,
) -> UserData:
    """Read the user's data. ``samples`` is a number, or a file with one text on each line.

    Raises ``UnsupportedModel`` if ``samples`` is neither, or if more than one source is given.
    """
    own = {"--text": text is not None, "--image": bool(images)}
    own["--samples with a file"] = isinstance(samples, str | Path)
    given = [name for name, is_given in own.items() if is_given]
    if len(given) > 1:
        raise UnsupportedModel(f"{given[0]} and {given[1]} cannot be combined: choose one of them")
    words = None if text is None else text_of(text)
    if not isinstance(samples, str | Path):
        is_number = isinstance(samples, int) and not isinstance(samples, bool) and samples > 0
        if samples is not None and not is_number:
            raise UnsupportedModel(
                f"samples={samples!r} is neither a positive number of inputs nor a file of texts"
            )
        return UserData(words, images=tuple(images), number=samples)
    if not Path(samples).is_file():
        raise UnsupportedModel(f"samples={str(samples)!r} is not a file of texts, one on each line")
    texts = tuple(line.strip() for line in text_of(samples).splitlines() if line.strip())
    if not texts:
        raise UnsupportedModel(f"{samples} contains no text; write one text on each line")
    return UserData(texts=texts, number=len(texts))


def seconds_of(seconds: float | None) -> float:
    """The time limit of a check in seconds; ``inf`` for ``None``.

    Raises ``UnsupportedModel`` if it is not a positive number.
    """
    if seconds is None:
        return math.inf
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not seconds > 0:
        raise UnsupportedModel(f"seconds={seconds!r} is not a positive number")
    return float(seconds)


def text_of(file: str | Path) -> str:
    """The content of a text file. Raises ``UnsupportedModel`` if it is not UTF-8."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UnsupportedModel(
            f"{file} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8 text"
        ) from error


def tokenizer_of(folder: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer saved in ``folder``. Raises ``UnsupportedModel`` if there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        first = first_line(error)
        raise UnsupportedModel(f"a text needs the tokenizer of {folder}: {first}") from error
    if not tokenizer.vocab_size:  # some classes load from a directory without tokenizer files
        raise UnsupportedModel(f"a text needs a tokenizer, and {folder} contains none")
    return tokenizer


def from_text(model: Any, tokenizer: Any, text: str, rows: int) -> list[Batch]:
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
    return [{"input_ids": part} for part in windows.split(rows_at_once(model))]


def from_texts(model: Any, tokenizer: Any, texts: Sequence[str]) -> list[Batch]:
    """Each text as one input, in batches, truncated to the number of tokens that the model takes.

    Raises ``UnsupportedModel`` if the tokenizer returns no tokens.
    """
    length = min(LONGEST_ROW, positions(model.config.get_text_config()))
    length = min(length, tokenizer.model_max_length)
    pads = tokenizer.pad_token_id is not None
    step = rows_at_once(model) if pads else 1
    accepted = accepted_by(model)
    batches = []
    for first in range(0, len(texts), step):
        found = tokenizer(
            list(texts[first : first + step]),
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


def from_images(
    model: nn.Module, files: Sequence[str | Path], folder: Path, dtype: torch.dtype
) -> list[Batch]:
    """The images as ``pixel_values`` in ``dtype``, prepared by the checkpoint's own processor.

    Raises ``UnsupportedModel`` if the model takes no images, the directory has no image processor,
    or a file is not an image.
    """
    if "pixel_values" not in accepted_by(model):
        main = getattr(model, "main_input_name", "input_ids")
        raise UnsupportedModel(f"{type(model).__name__} takes {main}, so it cannot run on images")
    from transformers import AutoImageProcessor
    from transformers.image_utils import load_image

    try:
        processor = AutoImageProcessor.from_pretrained(folder)
        images = [load_image(str(file)) for file in files]
        pixels = processor(images=images, return_tensors="pt")["pixel_values"].to(dtype)
    except (OSError, ValueError, ImportError) as error:
        first = first_line(error)
        raise UnsupportedModel(f"cannot prepare the images: {first}") from error
    return [{"pixel_values": part} for part in pixels.split(ROWS_AT_ONCE)]


def runnable(
    model: Any, batches: list[Batch], dtype: torch.dtype, try_run: Callable[[Batch], Any]
) -> list[Batch]:
    """``batches`` as the model accepts them: unchanged, or with generated values for other inputs.

    ``try_run`` runs the model on one row. Raises ``UnsupportedModel`` if the model accepts neither.
    """
    errors = []
    for complete in (False, True):
        try:
            made = [complete_batch(model, one, dtype) for one in batches] if complete else batches
            try_run({name: value[:1] for name, value in made[0].items()})
        except (EnjoyLNError, MemoryError):
            raise
        except Exception as error:  # any error of the model's code if an input is missing
            errors.append(error)
        else:
            return made
    first = first_line(errors[0])
    given = ", ".join(batches[0])
    raise UnsupportedModel(f"{type(model).__name__} cannot run on {given} alone: {first}")
