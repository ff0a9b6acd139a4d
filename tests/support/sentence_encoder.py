"""A pipeline of sentence-transformers around the trained BERT."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import transformers
from live_models import CHECKPOINTS
from safetensors.torch import save_file


def sentence_encoder(folder: Path, inside: str = "") -> Path:
    """A sentence encoder: BERT, the mean over its tokens, and a dense layer.

    ``inside`` is the folder of BERT in ``folder``.
    """
    shutil.copytree(CHECKPOINTS / "bert", folder / inside)
    model = transformers.BertModel.from_pretrained(folder / inside)
    model.save_pretrained(folder / inside)
    kinds, types = ["Pooling", "Dense"], "sentence_transformers.models"
    listed = [{"idx": 0, "name": "0", "path": inside, "type": f"{types}.Transformer"}]
    listed += [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": f"{types}.{kind}"}
        for i, kind in enumerate(kinds, 1)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    width = model.config.hidden_size
    for i, kind in enumerate(kinds, 1):
        (folder / f"{i}_{kind}").mkdir()
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    dense = {"in_features": width, "out_features": 9, "bias": True}
    dense["activation_function"] = "torch.nn.modules.activation.Tanh"
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
    weights = {"linear.weight": torch.randn(9, width), "linear.bias": torch.randn(9)}
    save_file(weights, folder / "2_Dense" / "model.safetensors")
    return folder
