"""Which files of a model's directory are weights, and which are copied to a converted checkpoint.

Decided by file names and the shard index. The weights are the files that transformers would load
(safetensors before pickles). All other files "come along": they are copied. The exception is the
same weights in other formats, since a result must not contain an unconverted copy of the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from enjoyln_cli.checkpoint.foreign_formats import foreign_format
from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel
from enjoyln_cli.text import matches

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Weight files or their indices, in the order in which transformers looks for them."""
LONGEST_NAME = 255
"""Maximum bytes of a file name."""

_AT_THE_TOP = ("*.safetensors", "pytorch_model*.bin", "*.index.json", "*.pt", "*.pth")
"""Weights of the model, if they lie in its own directory; in a subfolder, a pipeline module's."""
_FOREIGN = (
    *("*.h5", "*.ckpt", "*.ckpt.*", "*.ckpt-*", "*.tflite", "saved_model/*", "*.msgpack"),
    *("*.onnx", "*.onnx_data*", "onnx/*", "openvino/*", "openvino_model*", "*.ot"),
    *("coreml/*", "*.mlmodel", "*.mlpackage/*", "*.gguf", "*.ggml", "*.nemo"),
)
"""The same model for other frameworks. In these patterns ``*`` also matches ``/``."""
_LEFT_OUT = ("checkpoint-*/*", "global_step*/*", "original/*", "optimizer.bin")
"""Training states, and weights in the layout of the original publication."""
_HOUSEKEEPING = (
    *(".git/*", ".gitattributes", ".cache/*", "__pycache__/*", "*/__pycache__/*"),
    *(".DS_Store", "*/.DS_Store", "Thumbs.db", "*/Thumbs.db"),
)


def weights_among(names: Iterable[str], model: str) -> str:
    """The weight file, or index of weight files, that transformers would load.

    Raises ``UnsupportedModel`` if there is none; ``model`` is a name for messages.
    """
    names = list(names)
    for name in WEIGHTS:
        if name in names:
            return name
    if description := foreign_format(names):
        raise UnsupportedModel(f"{model} {description}")
    close = [name for name in names if name.endswith((".safetensors", ".bin", ".pt", ".pth"))]
    raise UnsupportedModel(
        f"{model} has no weights: neither {WEIGHTS[0]} nor {WEIGHTS[2]}, single or with an index"
        + (f" (but {', '.join(close[:3])})" if close else "")
        + "; save it with save_pretrained first"
    )


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises ``BadCheckpoint`` if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path} is not valid JSON ({error}); fetch it again") from error
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error


def shards_in_index(path: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """The shards named in an index file, sorted, and its ``weight_map`` (tensor name to shard).

    Raises ``BadCheckpoint`` if the index is malformed or names a file outside its directory.
    """
    content = read_json(path)
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise BadCheckpoint(f"{path} has no weight_map; fetch it again")
    metadata = content.get("metadata")
    if not isinstance(metadata, dict | None):
        raise BadCheckpoint(
            f"metadata in {path} is {metadata!r:.100}, not a JSON object; fetch it again"
        )
    kind = ".bin" if ".bin" in path.name else ".safetensors"
    for name, shard in weights.items():
        if not name.isprintable():
            raise BadCheckpoint(f"{path.name} names a tensor {name!r:.100}; fetch it again")
        if not isinstance(shard, str) or not is_file_name(shard, kind) or shard == kind:
            raise BadCheckpoint(
                f"{path.name} puts {name} into {shard!r:.100}, which is no {kind} file of its own "
                "directory; do not use this checkpoint"
            )
    if metadata is None:
        raise BadCheckpoint(
            f'{path} has no metadata, without which transformers cannot load it; add "metadata": '
            "{} to it, or fetch it again"
        )
    return tuple(sorted(set(weights.values()))), weights


def is_file_name(name: str, *ends: str) -> bool:
    """Whether ``name`` is a file name without a path, and ends with one of ``ends``."""
    fits = name.isprintable() and len(name.encode()) <= LONGEST_NAME
    return fits and not {"/", "\\"} & {*name} and name.endswith(ends)


def is_housekeeping(name: str) -> bool:
    """Whether a file belongs to a tool such as git, and not to the model."""
    return matches(name, _HOUSEKEEPING)


def comes_along(name: str) -> bool:
    """Whether a file is copied to a converted checkpoint; ``name`` is relative to the model."""
    patterns = [*_LEFT_OUT, *_HOUSEKEEPING, *_FOREIGN]
    if "/" not in name:
        patterns += _AT_THE_TOP
    return not matches(name, patterns)


CONFIG = "config.json"
ONNX_WEIGHTS = ".onnx_data"
"""The suffix of a file with the weights of an ONNX program, in place of ``.onnx``."""
