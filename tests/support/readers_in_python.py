"""python readers_in_python.py: answers each line of requests with a line of JSON.

A request is as for ``transformers_js.mjs``, with the ``folder`` and the ``suffix`` of its files.
Or it names sentence-transformers or fastembed, and has texts to embed.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch


def embeddings(request: dict[str, Any], name: str) -> Any:
    """The embeddings of texts, one row for each."""
    if request["class"] == "SentenceTransformer":
        from sentence_transformers import SentenceTransformer

        options = {"provider": "CPUExecutionProvider", "file_name": name}
        folder = request["folder"]
        model = SentenceTransformer(folder, backend="onnx", device="cpu", model_kwargs=options)
        return model.encode(request["texts"], convert_to_tensor=True)
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    own, folder = f"me/model{request['suffix']}", request["folder"]
    source, features = ModelSource(hf=own), request["features"]
    TextEmbedding.add_custom_model(own, PoolingType.MEAN, True, source, features, name)
    model = TextEmbedding(own, specific_model_path=folder)
    return torch.tensor([row.tolist() for row in model.embed(request["texts"])])


def computed(request: dict[str, Any]) -> Any:
    """What optimum computes, or generates if the request has options."""
    from optimum import onnxruntime
    from transformers import GenerationMixin

    suffix = request["suffix"]
    kind = request["class"].replace("AutoModel", "ORTModel")
    kind = "ORTModelForFeatureExtraction" if kind == "ORTModel" else kind
    is_pair = "Seq2Seq" in kind  # optimum finds the names of pairs itself
    files = {} if is_pair else {"file_name": f"model{suffix}.onnx"}
    load = getattr(onnxruntime, kind).from_pretrained
    model = load(request["folder"], subfolder="onnx", **files)
    inputs = {
        name: torch.tensor(one["data"], dtype=getattr(torch, one["type"])).reshape(one["dims"])
        for name, one in request["inputs"].items()
    }
    if "options" not in request:
        return model(**inputs)[request["output"]]
    options = dict(request["options"])
    if "decoder_input_ids" in options:
        options["decoder_input_ids"] = torch.tensor(options["decoder_input_ids"])
    return GenerationMixin.generate(model, **inputs, **options)


answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # libraries print as well
for line in sys.stdin:
    request = json.loads(line)
    if "texts" in request:
        found = embeddings(request, f"onnx/model{request['suffix']}.onnx")
    else:
        found = computed(request)
    answers.write(json.dumps({"dims": list(found.shape), "data": found.flatten().tolist()}) + "\n")
    answers.flush()
