"""python readers_in_python.py: answers each line of requests with a line of JSON.

A request is as for ``transformers_js.mjs``, with the ``folder`` and the ``suffix`` of its files.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch


def computed(request: dict[str, Any]) -> Any:
    """What optimum computes, or generates if the request has options."""
    from optimum import onnxruntime
    from transformers import GenerationMixin

    suffix = request["suffix"]
    kind = request["class"].replace("AutoModel", "ORTModel")
    kind = "ORTModelForFeatureExtraction" if kind == "ORTModel" else kind
    load = getattr(onnxruntime, kind).from_pretrained
    model = load(request["folder"], subfolder="onnx", file_name=f"model{suffix}.onnx")
    inputs = {
        name: torch.tensor(one["data"], dtype=getattr(torch, one["type"])).reshape(one["dims"])
        for name, one in request["inputs"].items()
    }
    if "options" not in request:
        return model(**inputs)[request["output"]]
    return GenerationMixin.generate(model, **inputs, **request["options"])


answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # libraries print as well
for line in sys.stdin:
    request = json.loads(line)
    found = computed(request)
    answers.write(json.dumps({"dims": list(found.shape), "data": found.flatten().tolist()}) + "\n")
    answers.flush()
