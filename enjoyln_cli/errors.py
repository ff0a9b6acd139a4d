"""Everything that enjoyln refuses to do, as exceptions.

    EnjoyLNError                 one line for the user; the command exits with status 1
    ├── ModelNotFound            no such directory or repository, offline and not cached, gated
    ├── UnsupportedModel         no config, unknown architecture, custom code, quantised, no weights
    ├── BadCheckpoint            missing or truncated shard, wrong shape, lying header, NaN or Inf
    ├── TraceFailed              the model's graph could not be captured
    ├── AlreadyFolded            the checkpoint carries an enjoyln marker
    ├── NothingToFold            every LayerNorm has to stay; the reasons are in the message
    ├── RecipeError              a recipe that is malformed, stale, or asks for an unproven edit
    ├── NotCentred               weights of a folded model have moved, or cannot be looked at
    ├── OutputError              output exists, lies inside the source, disk full, read-only
    ├── PushRefused              a result that is not verified, or a Hub that does not take it
    └── VerificationFailed       the folded checkpoint does not compute the original function

A message names the invariant that does not hold, what arrived, where, and what to do next, in one
line. Library callers get the same exceptions.
"""

import re

MAX_MESSAGE_CHARS = 2000
"""Characters of a message."""


class EnjoyLNError(Exception):
    """Base of everything above."""

    def __str__(self) -> str:
        """The message in one line: what a file puts into it can neither steer nor fill a screen."""
        message = without_credentials(super().__str__())
        if len(message) > MAX_MESSAGE_CHARS:
            message = (
                f"{message[: MAX_MESSAGE_CHARS // 2]} [...] {message[-MAX_MESSAGE_CHARS // 4 :]}"
            )
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)


class ModelNotFound(EnjoyLNError):
    """The model id or path leads to nothing that can be read."""


class UnsupportedModel(EnjoyLNError):
    """The model exists, and is of a kind that cannot be converted."""


class UnprovenCall(UnsupportedModel):
    """A converted model is called in a way that its proof does not cover."""


class BadCheckpoint(EnjoyLNError):
    """The files of a checkpoint contradict each other or the model."""


class TraceFailed(EnjoyLNError):
    """No graph of the model could be captured."""


class AlreadyFolded(EnjoyLNError):
    """The checkpoint is a result of an earlier fold."""


class NothingToFold(EnjoyLNError):
    """No LayerNorm of the model can be folded."""


class RecipeError(EnjoyLNError):
    """A recipe cannot be read, or asks for something that is not proven."""


class NotCentred(EnjoyLNError):
    """A folded model's weights are not zero-mean any more, or nobody can tell."""


class OutputError(EnjoyLNError):
    """The output directory cannot be written as asked."""


class PushRefused(EnjoyLNError):
    """A result may not go to the Hub, or the Hub does not take it."""


class VerificationFailed(EnjoyLNError):
    """The result does not compute the same function as the original."""


def without_credentials(text: str) -> str:
    """Each URL without the name and password that it may hold."""
    return re.sub(r"(?<=://)[^/\s@]+@", "", text)
