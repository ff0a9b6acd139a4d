"""The exceptions that enjoyln raises.

    EnjoyLNError                 one line for the user; the command exits with status 1
    ├── ModelNotFound            no such directory or repository, offline and not cached, gated
    ├── UnsupportedModel         no config, unknown architecture, custom code, quantised, no weights
    ├── BadCheckpoint            missing or truncated shard, wrong shape, lying header, NaN or Inf
    ├── TraceFailed              the model's graph could not be captured
    ├── AlreadyFolded            the checkpoint carries an enjoyln marker
    ├── NothingToFold            no LayerNorm can be converted; the message gives the reasons
    ├── RecipeError              a recipe is malformed, out of date, or asks for an unproven edit
    ├── NotCentred               a folded model's weights have changed, or cannot be checked
    ├── OutputError              output exists, lies inside the source, disk full, read-only
    ├── PushRefused              the result is not verified, or the Hub rejects the upload
    └── VerificationFailed       the folded checkpoint does not compute the original function

A message has one line. It says what was expected, what was found, where, and what to do next.
Library functions raise the same exceptions as the command line.
"""

import re

MAX_MESSAGE_CHARS = 2000
"""Longer messages are shortened in the middle."""


class EnjoyLNError(Exception):
    """Base of everything above."""

    def __str__(self) -> str:
        """The message as one line that is safe to print.

        It may quote text from a file, so unprintable characters (terminal control codes among
        them) are escaped, credentials in URLs are removed, and a long message is shortened.
        """
        message = without_credentials(super().__str__())
        if len(message) > MAX_MESSAGE_CHARS:
            message = (
                f"{message[: MAX_MESSAGE_CHARS // 2]} [...] {message[-MAX_MESSAGE_CHARS // 4 :]}"
            )
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)


class ModelNotFound(EnjoyLNError):
    """There is no readable model at this Hub id or path."""


class UnsupportedModel(EnjoyLNError):
    """The model exists, but models of its kind cannot be converted."""


class UnprovenCall(UnsupportedModel):
    """A converted model is called in a way that its proof does not cover."""


class BadCheckpoint(EnjoyLNError):
    """The files of a checkpoint contradict each other or the model."""


class TraceFailed(EnjoyLNError):
    """No graph of the model could be captured."""


class AlreadyFolded(EnjoyLNError):
    """The checkpoint was already converted by enjoyln."""


class NothingToFold(EnjoyLNError):
    """No LayerNorm of the model can be folded."""


class RecipeError(EnjoyLNError):
    """A recipe cannot be read, or asks for something that is not proven."""


class NotCentred(EnjoyLNError):
    """A folded model's weights are no longer centred, or this cannot be checked."""


class OutputError(EnjoyLNError):
    """The output directory or file cannot be written."""


class PushRefused(EnjoyLNError):
    """A result must not be uploaded to the Hub, or the Hub rejects it."""


class VerificationFailed(EnjoyLNError):
    """The result does not compute the same function as the original."""


def without_credentials(text: str) -> str:
    """``text`` without the user names and passwords in its URLs (``https://user:pw@host``)."""
    return re.sub(r"(?<=://)[^/\s@]+@", "", text)
