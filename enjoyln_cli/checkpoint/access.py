"""How the Hub is reached: with whose token, and through which cache.

One value that every function between a command and a download hands on, so that a token is never
taken apart from it, printed or stored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enjoyln_cli.errors import ModelNotFound


@dataclass(frozen=True, kw_only=True)
class HubAccess:
    """Access to the Hub. Its text does not show the token, and nothing writes it to a file."""

    token: str | None = field(default=None, repr=False)
    """``None`` for the one that ``hf auth login`` has stored, if it has."""
    cache_dir: str | Path | None = None
    """Where downloads are stored; ``None`` for the usual place."""


DEFAULT_ACCESS = HubAccess()
"""What ``hf auth login`` has stored, and the usual cache."""


def access_keywords(access: HubAccess) -> dict[str, Any]:
    """``token`` and ``cache_dir``, as documented functions and ``huggingface_hub`` take them."""
    return {"token": access.token, "cache_dir": access.cache_dir}


def require_token(access: HubAccess) -> None:
    """Raises ``ModelNotFound`` for a token that is none, before a library can quote it in an error.

    A token is printable ASCII without spaces: one that ends in a line break cannot be sent.
    """
    token = access.token
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        what = "has characters that no token has, such as a line break" if token else "is empty"
        raise ModelNotFound(f"the --token {what}; copy it anew, or run `hf auth login` instead")
