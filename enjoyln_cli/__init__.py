"""Turn LayerNorm checkpoints into RMSNorm checkpoints that compute the same function.

    analyze(model)     which LayerNorms can become RMSNorm, and why others stay
    fold(model, out)   write the converted checkpoint
    verify(out)        measure that it computes the original function
    export(out, dir)   write it as ONNX
    push(out, "me/x")  upload it to the Hub
    quantize(model, out, data)   quantise it, rotated if that is better on the data
    load_recipe(file)  read what was done, or what to do

    load_onnx(dir)         an exported or quantised model, which generates and goes into pipelines
    from_pretrained(out)   the converted checkpoint, running RMSNorm
    optimize(model)        the same for a model that is loaded already
    rotate(model)          rotate the features of a loaded model, so that it quantises better
    refold(model)          centre its weights again after training
    EnjoyLNConfig()        the same as a ``quantization_config`` of transformers

    Options(untie=True)    what a fold may do besides centring
    read_user_data(text="book.txt")   the data that ``quantize`` takes
    fold_in_memory(model, plan)   a fold of a live model

Every refusal is an ``EnjoyLNError``. Names are looked up on first use: importing this package
imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
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
from enjoyln_cli.version import __version__ as __version__

if TYPE_CHECKING:
    from enjoyln_cli.comparison.data_files import read_user_data
    from enjoyln_cli.conversion.fold import convert as fold
    from enjoyln_cli.conversion.open_and_analyse import analyze
    from enjoyln_cli.conversion.rotate import rotate
    from enjoyln_cli.onnx_export.export import export
    from enjoyln_cli.plan.fold_options import Options
    from enjoyln_cli.publish.push import push
    from enjoyln_cli.quantisation.load_onnx import load_onnx
    from enjoyln_cli.quantisation.quantize import quantize
    from enjoyln_cli.recipe.read import load_recipe
    from enjoyln_cli.rewrite.in_memory import centre_parameters
    from enjoyln_cli.runtime.install import fold_in_memory
    from enjoyln_cli.runtime.loading import from_pretrained, optimize, refold
    from enjoyln_cli.runtime.quantizer import EnjoyLNConfig
    from enjoyln_cli.verification.verify import verify


__all__ = [
    "AlreadyFolded",
    "BadCheckpoint",
    "EnjoyLNConfig",
    "EnjoyLNError",
    "ModelNotFound",
    "NotCentred",
    "NothingToFold",
    "Options",
    "OutputError",
    "PushRefused",
    "RecipeError",
    "TraceFailed",
    "UnprovenCall",
    "UnsupportedModel",
    "VerificationFailed",
    "analyze",
    "centre_parameters",
    "export",
    "fold",
    "fold_in_memory",
    "from_pretrained",
    "load_onnx",
    "load_recipe",
    "optimize",
    "push",
    "quantize",
    "read_user_data",
    "refold",
    "rotate",
    "verify",
]

_LAZY = {
    "EnjoyLNConfig": ("enjoyln_cli.runtime.quantizer", "EnjoyLNConfig"),
    "Options": ("enjoyln_cli.plan.fold_options", "Options"),
    "analyze": ("enjoyln_cli.conversion.open_and_analyse", "analyze"),
    "centre_parameters": ("enjoyln_cli.rewrite.in_memory", "centre_parameters"),
    "export": ("enjoyln_cli.onnx_export.export", "export"),
    "fold": ("enjoyln_cli.conversion.fold", "convert"),
    "fold_in_memory": ("enjoyln_cli.runtime.install", "fold_in_memory"),
    "from_pretrained": ("enjoyln_cli.runtime.loading", "from_pretrained"),
    "load_onnx": ("enjoyln_cli.quantisation.load_onnx", "load_onnx"),
    "load_recipe": ("enjoyln_cli.recipe.read", "load_recipe"),
    "optimize": ("enjoyln_cli.runtime.loading", "optimize"),
    "push": ("enjoyln_cli.publish.push", "push"),
    "quantize": ("enjoyln_cli.quantisation.quantize", "quantize"),
    "read_user_data": ("enjoyln_cli.comparison.data_files", "read_user_data"),
    "refold": ("enjoyln_cli.runtime.loading", "refold"),
    "rotate": ("enjoyln_cli.conversion.rotate", "rotate"),
    "verify": ("enjoyln_cli.verification.verify", "verify"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(import_module(module), attribute)
