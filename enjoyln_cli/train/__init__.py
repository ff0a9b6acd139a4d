"""Training with RMSNorm: weights that a parametrisation keeps centred.

    reparametrize(model)     training computes RMSNorm too, on ``V = P W``
    merge(model)             keep the centred weights, and end the parametrisation
    compress(model)          streams of ``d - 1`` features (Pre-CRMSNorm), for training too
    decompress(model, done)  the LayerNorm model again

Names are looked up on first use: importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enjoyln_cli.train.compressed_stream import compress, decompress
    from enjoyln_cli.train.parametrize import merge, reparametrize

__all__ = [
    "compress",
    "decompress",
    "merge",
    "reparametrize",
]

_LAZY = {
    "compress": "enjoyln_cli.train.compressed_stream",
    "decompress": "enjoyln_cli.train.compressed_stream",
    "merge": "enjoyln_cli.train.parametrize",
    "reparametrize": "enjoyln_cli.train.parametrize",
}
"""Each public name with the module that defines it."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
