"""Turn LayerNorm checkpoints into RMSNorm checkpoints that compute the same function.

    analyze(model)     which LayerNorms can go, and why the others stay
    fold(model, out)   write the converted checkpoint
    verify(out)        measure that it computes the original function
    push(out, "me/x")  upload it to the Hub
    bench(out)         time it beside the original
    unfold(out, back)  the way back, to the original bit for bit where its means were kept
    load_recipe(file)  read what was done, or what to do

    from_pretrained(out)   the converted checkpoint, running RMSNorm
    optimize(model)        the same for a model that is loaded already
    refold(model)          centre its weights again after training
    EnjoyLNConfig()        the same as a ``quantization_config`` of transformers

Every refusal is an ``EnjoyLNError``. Names are looked up on first use: importing this package
imports neither torch nor transformers.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from enjoyln_cli.errors import (
    AlreadyFolded,
    BadCheckpoint,
    EnjoyLNError,
    ModelNotFound,
    NotCentred,
    NothingToFold,
    OutputError,
    PushRefused,
    RecipeError,
    TraceFailed,
    UnprovenCall,
    UnsupportedModel,
    VerificationFailed,
)

if TYPE_CHECKING:
    from enjoyln_cli.bench import bench
    from enjoyln_cli.convert import analyze
    from enjoyln_cli.convert import convert as fold
    from enjoyln_cli.hub import push
    from enjoyln_cli.loading import from_pretrained, optimize, refold
    from enjoyln_cli.quantizer import EnjoyLNConfig
    from enjoyln_cli.recipe import load_recipe
    from enjoyln_cli.unfold import unfold
    from enjoyln_cli.verify import verify

__version__ = "0.1.0"

__all__ = [
    "AlreadyFolded",
    "BadCheckpoint",
    "EnjoyLNConfig",
    "EnjoyLNError",
    "ModelNotFound",
    "NotCentred",
    "NothingToFold",
    "OutputError",
    "PushRefused",
    "RecipeError",
    "TraceFailed",
    "UnprovenCall",
    "UnsupportedModel",
    "VerificationFailed",
    "analyze",
    "bench",
    "fold",
    "from_pretrained",
    "load_recipe",
    "optimize",
    "push",
    "refold",
    "unfold",
    "verify",
]

_LAZY = {
    "EnjoyLNConfig": ("enjoyln_cli.quantizer", "EnjoyLNConfig"),
    "analyze": ("enjoyln_cli.convert", "analyze"),
    "bench": ("enjoyln_cli.bench", "bench"),
    "fold": ("enjoyln_cli.convert", "convert"),
    "from_pretrained": ("enjoyln_cli.loading", "from_pretrained"),
    "load_recipe": ("enjoyln_cli.recipe", "load_recipe"),
    "optimize": ("enjoyln_cli.loading", "optimize"),
    "push": ("enjoyln_cli.hub", "push"),
    "refold": ("enjoyln_cli.loading", "refold"),
    "unfold": ("enjoyln_cli.unfold", "unfold"),
    "verify": ("enjoyln_cli.verify", "verify"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(import_module(module), attribute)


class _Package(ModuleType):
    """``fold``, ``verify`` and their like are functions, whichever module is imported when."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _LAZY and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
