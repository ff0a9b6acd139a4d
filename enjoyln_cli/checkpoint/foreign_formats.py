"""Recognise models that ``save_pretrained`` did not write, and say what to do with them.

Decided by names of files alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from enjoyln_cli.text import matches

_MADE_FROM = "pass the Hugging Face checkpoint that it was made from"
_CONVERT = "save it in Hugging Face's format first, with"
_FORMATS = (
    ("a PEFT adapter", "adapter_config.json", "merge it into its base model first, or edit it for "
     "a converted base model with `enjoyln fold --like`"),
    ("a diffusers pipeline", "model_index.json", "pass the folder of one of its models"),
    ("a GGUF model", "*.gguf *.ggml", _MADE_FROM),
    ("a NeMo model", "*.nemo model_config.yaml model_weights.ckpt", f"{_CONVERT} NeMo's converter"),
    ("a DeepSpeed training state", "zero_to_fp32.py",
     f"{_CONVERT} its zero_to_fp32.py and save_pretrained"),
    ("a Megatron-LM checkpoint", "latest_checkpointed_iteration.txt mp_rank_0*",
     f"{_CONVERT} Megatron's converter"),
    ("an OpenCLIP model", "open_clip_config.json open_clip_*",
     "load it with open_clip, and pass the module to enjoyln_cli.analyze in Python"),
    ("a fairseq model", "dict.txt dict.*.txt checkpoint_best.pt checkpoint_last.pt",
     f"{_CONVERT} the convert_*_to_pytorch.py of its architecture in transformers"),
    ("a model in Meta's original layout", "consolidated.* params.json",
     f"{_CONVERT} the convert_*_weights_to_hf.py of its architecture in transformers"),
    ("an MLX model", "weights.npz weights.*.npz weights.safetensors *.npz", _MADE_FROM),
    ("a CTranslate2 model", "model.bin shared_vocabulary.*", _MADE_FROM),
    ("a TensorFlow model", "*.h5 *.ckpt *.ckpt.* *.ckpt-* *.tflite saved_model* *.keras",
     f"{_CONVERT} from_pretrained(..., from_tf=True) of transformers 4"),
    ("a Flax model", "*.msgpack",
     f"{_CONVERT} from_pretrained(..., from_flax=True) of transformers 4"),
    ("an ONNX model", "*.onnx *.onnx_data*", _MADE_FROM),
    ("an OpenVINO model", "openvino/* openvino_model*", _MADE_FROM),
    ("a Core ML model", "coreml/* *.mlmodel *.mlpackage*", _MADE_FROM),
    ("a rust-bert model", "*.ot", _MADE_FROM),
)  # fmt: skip
"""Each format that is not read, in the order in which it is looked for: its name, patterns of files
that only this format has (``*`` also matches ``/``), and what to do."""


def foreign_format(names: Iterable[str]) -> str | None:
    """What the files ``names`` are, and what to do: ``holds a GGUF model (q4.gguf); ...``.

    ``None`` if no known format has such files.
    """
    names = sorted(names)
    for format_name, patterns, advice in _FORMATS:
        for name in names:
            if matches(name, patterns.split()):
                return f"holds {format_name} ({name}); {advice}"
    return None
