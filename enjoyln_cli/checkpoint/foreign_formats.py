"""Recognise models in other formats than that of ``save_pretrained``, and say what to do with them.

Decided by names of files alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

_MADE_FROM = "pass the Hugging Face checkpoint that it was made from"


@dataclass(frozen=True)
class Format:
    """A format that is not read, and how to get from it to one that is."""

    name: str
    files: tuple[str, ...]
    """Patterns of files that only this format has. In patterns ``*`` also matches ``/``."""
    advice: str


FORMATS = (
    Format(
        "a PEFT adapter",
        ("adapter_config.json",),
        "merge it into its base model first, or edit it for a converted base model with `enjoyln "
        "fold --like`",
    ),
    Format("a diffusers pipeline", ("model_index.json",), "pass the folder of one of its models"),
    Format(
        "a GGUF model",
        ("*.gguf", "*.ggml"),
        f"{_MADE_FROM}, then convert the result to GGUF",
    ),
    Format(
        "a NeMo model",
        ("*.nemo", "model_config.yaml", "model_weights.ckpt"),
        "export it to Hugging Face's format with NeMo's checkpoint converters first",
    ),
    Format(
        "a DeepSpeed training state",
        ("zero_to_fp32.py",),
        "run its zero_to_fp32.py, and save the model with save_pretrained first",
    ),
    Format(
        "a Megatron-LM checkpoint",
        ("latest_checkpointed_iteration.txt", "mp_rank_0*"),
        "export it to Hugging Face's format with Megatron's converter first",
    ),
    Format(
        "an OpenCLIP model",
        ("open_clip_config.json", "open_clip_*"),
        "load it with open_clip, and pass the module to enjoyln_cli.analyze in Python",
    ),
    Format(
        "a fairseq model",
        ("dict.txt", "dict.*.txt", "checkpoint_best.pt", "checkpoint_last.pt"),
        "convert it with the script of its architecture in transformers "
        "(convert_*_to_pytorch.py) first",
    ),
    Format(
        "a model in Meta's original layout",
        ("consolidated.*", "params.json"),
        "convert it with the script of its architecture in transformers "
        "(convert_*_weights_to_hf.py) first",
    ),
    Format(
        "an MLX model",
        ("weights.npz", "weights.*.npz", "weights.safetensors", "*.npz"),
        f"{_MADE_FROM}, then convert the result to MLX",
    ),
    Format(
        "a CTranslate2 model",
        ("model.bin", "shared_vocabulary.*"),
        f"{_MADE_FROM}, then convert the result with ct2-transformers-converter",
    ),
    Format(
        "a TensorFlow model",
        ("*.h5", "*.ckpt", "*.ckpt.*", "*.ckpt-*", "*.tflite", "saved_model*", "*.keras"),
        "save it as safetensors with transformers 4 (from_pretrained with from_tf=True) first",
    ),
    Format(
        "a Flax model",
        ("*.msgpack",),
        "save it as safetensors with transformers 4 (from_pretrained with from_flax=True) first",
    ),
    Format("an ONNX model", ("*.onnx", "*.onnx_data*"), _MADE_FROM),
    Format("an OpenVINO model", ("openvino/*", "openvino_model*"), _MADE_FROM),
    Format("a Core ML model", ("coreml/*", "*.mlmodel", "*.mlpackage*"), _MADE_FROM),
    Format("a rust-bert model", ("*.ot",), _MADE_FROM),
)
"""In the order in which they are looked for."""


def foreign_format(names: Iterable[str]) -> str | None:
    """What the files ``names`` are, and what to do: ``holds a GGUF model (q4.gguf); ...``.

    ``None`` if no known format has such files.
    """
    names = sorted(names)
    for candidate in FORMATS:
        for name in names:
            if any(fnmatchcase(name, pattern) for pattern in candidate.files):
                return f"holds {candidate.name} ({name}); {candidate.advice}"
    return None
