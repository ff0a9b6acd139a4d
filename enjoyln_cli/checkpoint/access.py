"""Access to the Hub: the token, and the cache directory.

Commands pass both to the download functions as one ``HubAccess``, whose text does not show the
token. So the token is never printed or stored by accident.
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
    """``None``: use the token stored by ``hf auth login``, if there is one."""
    cache_dir: str | Path | None = None
    """Where downloads are stored; ``None`` for the default cache of ``huggingface_hub``."""


DEFAULT_ACCESS = HubAccess()
"""The token stored by ``hf auth login``, and the default cache."""


def access_keywords(access: HubAccess) -> dict[str, Any]:
    """``token`` and ``cache_dir`` as keyword arguments for functions of ``huggingface_hub``."""
    return {"token": access.token, "cache_dir": access.cache_dir}


def require_token(access: HubAccess) -> None:
    """Raise ``ModelNotFound`` if the token cannot be valid.

    A token consists of printable ASCII characters without spaces. For any other, for example one
    that ends in a line break, libraries would raise an error that quotes the token.
    """
    token = access.token
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        problem = "has characters that no token has, such as a line break" if token else "is empty"
        raise ModelNotFound(f"the --token {problem}; copy it again, or run `hf auth login` instead")
