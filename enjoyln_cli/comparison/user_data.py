"""The user's data as batches that a model takes.

The tokenizer turns each text into one input, with special tokens; the checkpoint's own processors
prepare images and recordings. Other inputs that a model needs are generated (``complete_batch``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from enjoyln_cli.comparison.data_files import UserData
from enjoyln_cli.errors import EnjoyLNError, UnsupportedModel
from enjoyln_cli.text import first_line

READERS = ("librosa", "pillow", "soundfile", "soxr", "torchcodec", "torchvision")
"""Packages that transformers reads images and recordings by; its errors name them."""


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


def cannot_read(what: str, error: ImportError) -> UnsupportedModel:
    """The refusal for a library that transformers misses; which one depends on its version."""
    named = [name for name in READERS if name in str(error).lower()]
    if named:
        return UnsupportedModel(f"reading {what} needs: pip install {' '.join(named)}")
    return UnsupportedModel(f"reading {what} failed: {first_line(error)}")


def batches_of(
    model: Any,
    data: UserData,
    folder: Path,
    dtype: torch.dtype,
    windows: int,
    *,
    at_once: int | None = None,
    trust_remote_code: bool = False,
) -> tuple[list[Batch], int | None]:
    """``data`` as batches, and the mask token of the tokenizer if that was needed.

    ``folder`` has the tokenizer or processor. Floating inputs are in ``dtype``. A running text is
    cut into at most so many ``windows``. Texts are put into batches of ``at_once``, by default of
    as many as the model takes.
    """
    if data.images:
        return from_images(model, data.images, folder, dtype), None
    if data.audio:
        return from_audio(model, data.audio, folder, dtype), None
    if data.tokens:
        return from_tokens(model, data.tokens), None
    tokenizer = tokenizer_of(model, folder, trust_remote_code)
    if data.text is None:
        made = from_texts(model, tokenizer, data.texts, at_once)
    else:
        made = from_text(model, tokenizer, data.text, windows)
    return made, tokenizer.mask_token_id


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


def from_texts(
    model: Any, tokenizer: Any, texts: Sequence[str], at_once: int | None = None
) -> list[Batch]:
    """Each text as one input, in batches, truncated to the number of tokens that the model takes.

    Raises ``UnsupportedModel`` if the tokenizer returns no tokens.
    """
    length = min(LONGEST_ROW, positions(model.config.get_text_config()))
    length = min(length, tokenizer.model_max_length)
    pads = tokenizer.pad_token_id is not None
    step = at_once or (rows_at_once(model) if pads else 1)
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
    a file is not an image, or the library that reads images is missing.
    """
    require_input(model, "pixel_values", "images")
    from transformers import AutoImageProcessor
    from transformers.image_utils import load_image

    try:
        processor = AutoImageProcessor.from_pretrained(folder)
        images = []
        for file in files:
            try:
                images.append(load_image(str(file)))
            except (OSError, ValueError) as error:
                raise UnsupportedModel(f"{file} cannot be read: {first_line(error)}") from error
        pixels = processor(images=images, return_tensors="pt")["pixel_values"].to(dtype)
    except ImportError as error:
        raise cannot_read("images", error) from error
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"cannot prepare the images: {first_line(error)}") from error
    return [{"pixel_values": part} for part in pixels.split(ROWS_AT_ONCE)]


def from_audio(
    model: nn.Module, files: Sequence[str | Path], folder: Path, dtype: torch.dtype
) -> list[Batch]:
    """Each recording as one input in ``dtype``, prepared by the checkpoint's feature extractor.

    Raises ``UnsupportedModel`` if the directory has no feature extractor, the model does not take
    what it makes, a file is no recording, or the libraries that read recordings are missing.
    """
    from transformers import AutoFeatureExtractor
    from transformers.audio_utils import load_audio

    accepted, batches = accepted_by(model), []
    try:
        extractor = AutoFeatureExtractor.from_pretrained(folder)
    except ImportError as error:
        raise cannot_read("audio", error) from error
    except (OSError, ValueError) as error:
        text = f"recordings need a feature extractor, and {folder} contains none"
        raise UnsupportedModel(text) from error
    try:
        rate = extractor.sampling_rate
        for file in files:
            try:
                wave = load_audio(str(file), rate)
            except (OSError, ValueError, RuntimeError) as error:
                raise UnsupportedModel(f"{file} cannot be read: {first_line(error)}") from error
            features = extractor(wave, sampling_rate=rate, return_tensors="pt")
            batches.append(
                {
                    name: value.to(dtype) if value.is_floating_point() else value
                    for name, value in features.items()
                    if name in accepted
                }
            )
    except ImportError as error:
        raise cannot_read("audio", error) from error
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        raise UnsupportedModel(f"cannot prepare the recordings: {first_line(error)}") from error
    if not batches[0]:
        main = getattr(model, "main_input_name", "input_ids")
        raise UnsupportedModel(f"{type(model).__name__} takes {main}, so it cannot run on audio")
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
