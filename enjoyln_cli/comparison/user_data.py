"""The user's data for comparing two models: a text, a file of texts, images, recordings, or ids.

A running text (``--text``) is cut into windows. For a language model, its perplexity is computed. A
file of texts (``--samples FILE``) has one text on each line. The tokenizer turns each text into one
input, with special tokens. ``--tokens FILE`` has a JSON list of token ids on each line, for a model
without a tokenizer. Other inputs that a model needs are generated (``complete_batch``).
"""

from __future__ import annotations

import json
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

READERS = ("librosa", "pillow", "soundfile", "soxr", "torchcodec", "torchvision")
"""Packages that transformers reads images and recordings by; its errors name them."""


@dataclass(frozen=True)
class UserData:
    """The inputs that a user wants models to be run on; generated inputs are added if needed."""

    text: str | None = None
    """A running text."""
    texts: tuple[str, ...] = ()
    """Texts that become one input each."""
    images: tuple[str | Path, ...] = ()
    """Image files."""
    audio: tuple[str | Path, ...] = ()
    """Audio files."""
    tokens: tuple[tuple[int, ...], ...] = ()
    """Token ids, one tuple for each text."""
    number: int | None = None
    """Number of inputs; by default as many as a ratio of two rounding errors needs."""

    @property
    def is_given(self) -> bool:
        return self.text is not None or any((self.texts, self.images, self.audio, self.tokens))


def read_user_data(
    text: str | Path | None = None,
    images: str | Path | Sequence[str | Path] = (),
    samples: int | str | Path | None = None,
    audio: str | Path | None = None,
    tokens: str | Path | None = None,
) -> UserData:
    """Read the user's data.

    ``images`` is a file or a directory, or several of them; ``audio`` is a directory, ``text`` and
    ``tokens`` are files. ``samples`` is a number, or a file with one text on each line.

    Raises ``UnsupportedModel`` if ``samples`` is neither, if a file cannot be read, or if more than
    one source is given.
    """
    own = {"--text": text is not None, "--image": bool(images)}
    own |= {"--audio": audio is not None, "--tokens": tokens is not None}
    own["--samples with a file"] = isinstance(samples, str | Path)
    given = [name for name, is_given in own.items() if is_given]
    if len(given) > 1:
        raise UnsupportedModel(f"{given[0]} and {given[1]} cannot be combined: choose one of them")
    words = None if text is None else text_of(text)
    files = [
        file
        for place in ([images] if isinstance(images, str | Path) else images)
        for file in (files_of(Path(place), "images") if Path(place).is_dir() else [place])
    ]
    if not isinstance(samples, str | Path):
        is_number = isinstance(samples, int) and not isinstance(samples, bool) and samples > 0
        if samples is not None and not is_number:
            raise UnsupportedModel(
                f"samples={samples!r} is neither a positive number of inputs nor a file of texts"
            )
        return UserData(
            words,
            images=tuple(files),
            audio=() if audio is None else files_of(Path(audio), "recordings"),
            tokens=() if tokens is None else token_lists(tokens),
            number=samples,
        )
    if not Path(samples).is_file():
        raise UnsupportedModel(f"samples={str(samples)!r} is not a file of texts, one on each line")
    texts = tuple(line.strip() for line in text_of(samples).splitlines() if line.strip())
    if not texts:
        raise UnsupportedModel(f"{samples} contains no text; write one text on each line")
    return UserData(texts=texts, number=len(texts))


def require_data(data: UserData) -> None:
    """Raise ``UnsupportedModel`` if there is none."""
    if not data.is_given:
        raise UnsupportedModel("no data: pass one of --text, --image, --audio, --tokens")


def files_of(folder: Path, what: str) -> tuple[Path, ...]:
    """The files in a directory that are no hidden files, sorted by name.

    Raises ``UnsupportedModel`` if there are none; ``what`` is the word for them.
    """
    if not folder.is_dir():
        raise UnsupportedModel(f"there is no directory {folder} with {what}")
    files = (path for path in folder.iterdir() if path.is_file() and path.suffix != ".json")
    found = tuple(sorted(path for path in files if not path.name.startswith(".")))
    if not found:
        raise UnsupportedModel(f"{folder} contains no {what}")
    return found


def token_lists(file: str | Path) -> tuple[tuple[int, ...], ...]:
    """The token ids in a file that has a JSON list of them on each line.

    Raises ``UnsupportedModel`` for a line that is something else, and for a file without ids.
    """
    lists = []
    for number, line in enumerate(text_of(file).splitlines(), 1):
        if not line.strip():
            continue
        try:
            ids = json.loads(line)
        except (ValueError, RecursionError):
            ids = None
        if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
            raise UnsupportedModel(f"{file}, line {number}: not a JSON list of token ids")
        lists.append(tuple(ids))
    if not any(lists):
        raise UnsupportedModel(f"{file} contains no token ids; write a JSON list on each line")
    return tuple(lists)


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
    """The content of a text file. Raises ``UnsupportedModel`` if it cannot be read as UTF-8."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UnsupportedModel(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UnsupportedModel(
            f"{file} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8 text"
        ) from error


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
        images = [load_image(str(file)) for file in files]
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
            wave = load_audio(str(file), rate)
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
