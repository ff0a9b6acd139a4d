"""The user's data for comparing two models: a text, a file of texts, images, recordings, or ids.

A running text (``--text``) is cut into windows. For a language model, its perplexity is computed. A
file of texts (``--samples FILE``) has one text on each line. ``--tokens FILE`` has a JSON list of
token ids on each line, for a model without a tokenizer. Nothing slow is imported here, so that a
command can refuse wrong files at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.plan.option_field import data_option, keywords_of, measuring_option
from enjoyln_cli.text import counted

SAMPLES_FILE = "--samples with a file"
FEWEST = 4
"""Fewest inputs in each half, where one half chooses and the other measures."""


@dataclass(frozen=True)
class UserData:
    """The inputs that a user wants models to be run on; generated inputs are added if needed."""

    text: str | None = None
    """A running text."""
    texts: tuple[str, ...] = ()
    """Texts that become one input each; with images, one text for all or a text for each."""
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


NO_DATA = UserData()


def number_or_file(text: str) -> int | Path:
    """``8`` as a number of inputs, anything else as a file with one text on each line.

    Raises ``ValueError`` for a number that is not positive, and if there is no such file.
    """
    try:
        number = int(text)
    except ValueError:
        if not Path(text).is_file():
            raise ValueError(
                f"{text!r} is neither a number of inputs nor a file of texts"
            ) from None
        return Path(text)
    if number < 1:
        raise ValueError(f"{text} is not a positive number of inputs")
    return number


@dataclass(frozen=True)
class DataFiles:
    """Where the user's data are. If there are images, ``text`` has a text for each, or for all."""

    text: str | Path | None = data_option(
        None, "Running text; a language model is scored on it.", path="file"
    )
    images: str | Path | Sequence[str | Path] = data_option(
        (),
        "Image, or directory of images; may be repeated, and combined with --text.",
        flags=("--image",),
        metavar="FILE|DIR",
        path="old path",
        may_be_repeated=True,
    )
    samples: int | str | Path | None = measuring_option(
        None,
        "Run on N inputs, or on a FILE of texts, one on each line.",
        metavar="N|FILE",
        parse=number_or_file,
    )
    audio: str | Path | None = data_option(
        None, "Directory of recordings.", metavar="DIR", path="old folder"
    )
    tokens: str | Path | None = data_option(
        None, "Token ids: a JSON list of them on each line.", path="file"
    )

    @property
    def sources(self) -> list[str]:
        """The options that are given and name data."""
        own = {"--text": self.text is not None, "--image": bool(self.images)}
        own |= {"--audio": self.audio is not None, "--tokens": self.tokens is not None}
        own[SAMPLES_FILE] = isinstance(self.samples, str | Path)
        return [name for name, is_given in own.items() if is_given]

    @property
    def conflict(self) -> tuple[str, str] | None:
        """Two options that cannot be combined, if they are given; only images with a text can."""
        given = self.sources
        return (given[0], given[1]) if given[1:] and given != ["--text", "--image"] else None

    def read(self) -> UserData:
        """The data in the files (see ``read_user_data``)."""
        if self.conflict:
            raise UnsupportedModel(
                f"{' and '.join(self.conflict)} cannot be combined: choose one of them"
            )
        words = None if self.text is None else text_of(self.text)
        if words is not None and not words.strip():
            raise UnsupportedModel(f"{self.text} contains no text")
        images, samples = self.images, self.samples
        files = [
            file
            for place in ([images] if isinstance(images, str | Path) else images)
            for file in (files_of(Path(place), "images") if Path(place).is_dir() else [place])
        ]
        if isinstance(samples, str | Path):
            texts = texts_in(samples)
            return UserData(texts=texts, number=len(texts))
        is_number = isinstance(samples, int) and not isinstance(samples, bool) and samples > 0
        if samples is not None and not is_number:
            raise UnsupportedModel(
                f"samples={samples!r} is neither a positive number of inputs nor a file of texts"
            )
        lines = (line.strip() for line in (words or "").splitlines()) if files else ()
        return UserData(
            None if files else words,
            texts=tuple(line for line in lines if line),
            images=tuple(files),
            audio=() if self.audio is None else files_of(Path(self.audio), "recordings"),
            tokens=() if self.tokens is None else token_lists(self.tokens),
            number=samples,
        )


@keywords_of(files=DataFiles)
def read_user_data(*, files: DataFiles) -> UserData:
    """Read the user's data: from one source, or images with a text.

    Raises ``UnsupportedModel`` if ``samples`` is neither a number nor a file, if a file cannot be
    read, or if sources are given that cannot be combined. The keywords:
    """
    return files.read()


def texts_in(file: str | Path) -> tuple[str, ...]:
    """The texts of a file, a text on each line. Raises ``UnsupportedModel`` if it has no text."""
    if not Path(file).is_file():
        raise UnsupportedModel(f"samples={str(file)!r} is not a file of texts, one on each line")
    texts = tuple(line.strip() for line in text_of(file).splitlines() if line.strip())
    if not texts:
        raise UnsupportedModel(f"{file} contains no text; write one text on each line")
    return texts


def require_readable(data: UserData) -> None:
    """Refuse images and recordings by their first bytes, before a model is loaded for them.

    Raises ``UnsupportedModel`` if no package that reads them is installed, or for a file that is
    no image or recording. Files that torchcodec reads are left to torchcodec.
    """
    if data.images:
        _require_package("images", ("PIL",), "pillow")
        from PIL import Image

        for file in data.images:
            try:
                Image.open(file).close()
            except OSError as error:
                why = error.strerror or "it is no image that pillow knows"
                raise UnsupportedModel(f"{file} cannot be read: {why}") from error
    if data.audio:
        _require_package("recordings", ("soundfile", "torchcodec", "librosa"), "soundfile soxr")
        if find_spec("soundfile") is None or find_spec("torchcodec") is not None:
            return
        import soundfile

        for file in data.audio:
            try:
                soundfile.info(str(file))
            except soundfile.LibsndfileError as error:
                raise UnsupportedModel(f"{file} cannot be read: {error.error_string}") from error


def _require_package(what: str, names: Sequence[str], to_install: str) -> None:
    """Raise ``UnsupportedModel`` if none of the modules ``names``, which read ``what``, exists."""
    if all(find_spec(name) is None for name in names):
        raise UnsupportedModel(f"reading {what} needs: pip install {to_install}")


def require_data(data: UserData) -> None:
    """Raise ``UnsupportedModel`` if there is none."""
    if not data.is_given:
        raise UnsupportedModel("no data: pass one of --text, --image, --audio, --tokens")


def require_halves(data: UserData) -> None:
    """Raise ``UnsupportedModel`` if there are no data, or too few files for two halves."""
    require_data(data)
    files = len(data.images or data.audio)
    if 0 < files < 2 * FEWEST:
        raise too_little(counted(files, "input"))


def too_little(what: str) -> UnsupportedModel:
    """The refusal of too few inputs for two halves; ``what`` says how many there are."""
    return UnsupportedModel(
        f"too little data: {what}, but {2 * FEWEST} are needed: one half to choose by, the other "
        "to measure on"
    )


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
