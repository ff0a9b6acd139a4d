"""Pictures and recordings as inputs, each prepared alone by the checkpoint's own processor.

Everything that the processor returns and ``forward`` takes is an input. A model that reads pictures
and text gets both from its processor, by its chat template if there is a template. So the text has
as many placeholders as the picture needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.calls.input_sets import accepted_by
from enjoyln_cli.errors import EnjoyLNError, UnsupportedModel
from enjoyln_cli.text import first_line

READERS = ("librosa", "pillow", "soundfile", "soxr", "torchcodec", "torchvision")
"""Packages that transformers reads images and recordings by; its errors name them."""

Prepared = dict[str, torch.Tensor]
"""The inputs of a call, by name."""
Prepare = Callable[[Any, str], Mapping[str, Any]]
"""Turns a picture and its text into inputs."""


def cannot_read(what: str, error: ImportError) -> UnsupportedModel:
    """The refusal for a missing library; the version of transformers decides which it needs."""
    named = [name for name in READERS if name in str(error).lower()]
    if named:
        return UnsupportedModel(f"reading {what} needs: pip install {' '.join(named)}")
    return UnsupportedModel(f"reading {what} failed: {first_line(error)}")


def from_images(
    model: Any,
    files: Sequence[str | Path],
    texts: Sequence[str],
    folder: Path,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
) -> list[Prepared]:
    """Each picture as one input: everything that the processor makes of it and ``forward`` takes.

    ``texts`` are empty, one text for all pictures, or a text for each. Floating inputs are in
    ``dtype``.

    Raises ``UnsupportedModel`` if the model takes no pictures, the directory has no processor for
    what is given, a file is not a picture, the numbers of texts and pictures differ, or the library
    that reads pictures is missing.
    """
    if not any("pixel" in name or "patches" in name for name in accepted_by(model)):
        raise _cannot_run_on("images", model)
    if len(texts) not in (0, 1, len(files)):
        raise UnsupportedModel(
            f"{len(texts)} lines of text for {len(files)} images: write one line for all images, "
            "or one for each in the order of their names"
        )
    said = [*texts] * len(files) if len(texts) == 1 else [*texts] or [""] * len(files)
    from transformers.image_utils import load_image

    try:
        prepare = _preparation(model, folder, bool(texts), trust_remote_code)
    except ImportError as error:
        raise cannot_read("images", error) from error
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"cannot prepare the images: {first_line(error)}") from error
    pairs = dict(zip(files, said, strict=True))
    return _prepared(
        model,
        files,
        "images",
        dtype,
        lambda file: load_image(str(file)),
        lambda image, file: prepare(image, pairs[file]),
    )


def from_audio(
    model: Any,
    files: Sequence[str | Path],
    folder: Path,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
) -> list[Prepared]:
    """Each recording as one input in ``dtype``, prepared by the checkpoint's feature extractor.

    Raises ``UnsupportedModel`` if the directory has no feature extractor, the model does not take
    its features, a file is no recording, or the libraries that read recordings are missing.
    """
    from transformers import AutoFeatureExtractor
    from transformers.audio_utils import load_audio

    try:
        extractor = AutoFeatureExtractor.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
    except ImportError as error:
        raise cannot_read("audio", error) from error
    except (OSError, ValueError) as error:
        text = f"recordings need a feature extractor, and {folder} contains none"
        raise UnsupportedModel(text) from error
    rate = getattr(extractor, "sampling_rate", None)
    if rate is None:
        raise _cannot_run_on("audio", model)

    return _prepared(
        model,
        files,
        "audio",
        dtype,
        lambda file: load_audio(str(file), rate),
        lambda wave, _: extractor(wave, sampling_rate=rate, return_tensors="pt"),
    )


def _prepared(
    model: Any,
    files: Sequence[str | Path],
    what: str,
    dtype: torch.dtype,
    load: Callable[[str | Path], Any],
    prepare: Callable[[Any, str | Path], Mapping[str, Any]],
) -> list[Prepared]:
    """The inputs that ``prepare`` makes of each loaded file, as far as ``forward`` takes them.

    Raises ``UnsupportedModel``, which names the file, if that fails or has NaN in it.
    """
    accepted, batches = accepted_by(model), []
    for file in files:
        step = "read"
        try:
            loaded, step = load(file), "prepared"
            made = prepare(loaded, file)
        except (EnjoyLNError, MemoryError):
            raise
        except ImportError as error:
            raise cannot_read(what, error) from error
        except Exception as error:  # each processor has code of its own
            raise UnsupportedModel(f"{file} cannot be {step}: {first_line(error)}") from error
        batch = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in made.items()
            if name in accepted and isinstance(value, torch.Tensor)
        }
        if any(value.isnan().any() for value in batch.values()):
            raise UnsupportedModel(f"{file} has NaN in it; leave it out")
        batches.append(batch)
    if not batches[0]:
        raise _cannot_run_on(what, model)
    return batches


def _cannot_run_on(what: str, model: Any) -> UnsupportedModel:
    main = getattr(model, "main_input_name", "input_ids")
    return UnsupportedModel(f"{type(model).__name__} takes {main}, so it cannot run on {what}")


def joined(batches: Sequence[Prepared], at_once: int) -> list[Prepared]:
    """Inputs of one row as batches of up to ``at_once`` rows.

    Neighbours are joined if all of their tensors have one row and the same shape.
    """
    groups: list[list[Prepared]] = []
    for batch in batches:
        shapes = {name: value.shape for name, value in batch.items()}
        last = groups[-1] if groups else []
        fits = bool(last) and len(last) < at_once and all(len(v) == 1 for v in batch.values())
        if fits and shapes == {name: value.shape for name, value in last[0].items()}:
            last.append(batch)
        else:
            groups.append([batch])
    return [
        {name: torch.cat([batch[name] for batch in group]) for name in group[0]} for group in groups
    ]


def _preparation(model: Any, folder: Path, has_texts: bool, trusted: bool) -> Prepare:
    """How the checkpoint prepares a picture, or a picture with a text.

    A processor that cuts a person out of the picture (of a pose model) gets the whole picture.
    """
    from transformers import AutoImageProcessor, AutoProcessor

    if has_texts or ("input_ids" in accepted_by(model) and image_token(model.config) is not None):
        processor: Any = AutoProcessor.from_pretrained(folder, trust_remote_code=trusted)
        if hasattr(processor, "image_processor") and hasattr(processor, "tokenizer"):
            return _with_text(processor)
        if has_texts:
            raise UnsupportedModel(
                f"images with text need a processor of both, and {folder} contains none"
            )
    images: Any = AutoImageProcessor.from_pretrained(folder, trust_remote_code=trusted)
    if "boxes" not in inspect.signature(images.preprocess).parameters:
        return lambda image, _: images(images=[image], return_tensors="pt")
    return lambda image, _: images([image], [[(0, 0, *image.size)]], return_tensors="pt")


def image_token(config: Any) -> int | None:
    """The token in whose place pictures are read; ``None`` if there is none."""
    values = (getattr(config, f"image_token_{end}", None) for end in ("id", "index"))
    return next((value for value in values if isinstance(value, int)), None)


def _with_text(processor: Any) -> Prepare:
    if not getattr(processor, "chat_template", None):
        token = getattr(processor, "image_token", None) or ""

        def plain(image: Any, text: str) -> Mapping[str, Any]:
            said = text if token in text else f"{token}{text}"
            made: Mapping[str, Any] = processor(images=[image], text=[said], return_tensors="pt")
            return made

        return plain

    def in_chat(image: Any, text: str) -> Mapping[str, Any]:
        content = [{"type": "image", "image": image}]
        content += [{"type": "text", "text": text}] if text else []
        made: Mapping[str, Any] = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
        )
        return made

    return in_chat
