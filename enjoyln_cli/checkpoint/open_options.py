"""How a model is opened: its revision, access to the Hub, and whether its own code may run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enjoyln_cli.errors import ModelNotFound
from enjoyln_cli.plan.option_field import hub_option


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """How a model is opened. Its text does not show the token, and nothing writes it to a file."""

    revision: str | None = hub_option(
        None, "Branch, tag or commit on the Hub.", metavar="REV", is_in_card=False
    )
    token: str | None = hub_option(
        None,
        "Hub token, for gated and private models.",
        metavar="TOKEN",
        is_in_card=False,
        repr=False,
    )
    """``None``: use the token stored by ``hf auth login``, if any."""
    cache_dir: str | Path | None = hub_option(
        None,
        "Where files from the Hub are stored.",
        metavar="DIR",
        path="folder",
        is_in_card=False,
    )
    """``None`` for the default cache of ``huggingface_hub``."""
    trust_remote_code: bool = hub_option(False, "Run code that comes with MODEL.")


OPENED_PLAINLY = OpenOptions()
"""The token stored by ``hf auth login``, the default cache, and no code of the model."""


def access_keywords(opening: OpenOptions) -> dict[str, Any]:
    """``token`` and ``cache_dir`` as keyword arguments for functions of ``huggingface_hub``."""
    return {"token": opening.token, "cache_dir": opening.cache_dir}


def require_token(opening: OpenOptions) -> None:
    """Raise ``ModelNotFound`` if the token cannot be valid.

    A token consists of printable ASCII characters without spaces. For anything else, such as a
    line break at the end, libraries would raise an error that quotes the token.
    """
    token = opening.token
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        problem = "has characters that no token has, such as a line break" if token else "is empty"
        raise ModelNotFound(f"the --token {problem}; copy it again, or run `hf auth login` instead")
