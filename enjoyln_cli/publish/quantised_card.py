"""The content of the model card of a result that ``enjoyln quantize`` has written.

Its numbers are those of the result's record, ``enjoyln_quantisation.json``. The tags are those that
the Hub filters by: the format, and ``transformers.js`` for the layout that it reads.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enjoyln_cli.checkpoint.file_roles import CONFIG
from enjoyln_cli.checkpoint.result_files import QUANTISATION_FILE, VERIFY_FILE
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.fs.whole_file import read_object
from enjoyln_cli.publish.card import BEGIN, BESIDE, END, TAG, JsonValues, display_name, origin_of
from enjoyln_cli.text import counted, number, size
from enjoyln_cli.version import versions

PROGRAMS = {
    "onnx": "onnxruntime",
    "openvino": "OpenVINO",
    "torchao": "transformers and torchao",
    "compressed-tensors": "vLLM",
}
"""Each format, which is a tag as well, and the program that runs it."""
JAVASCRIPT = "transformers.js"
ONNX_FOLDER = "onnx"
"""The folder in which transformers.js looks for programs."""


def tags(out: Path) -> list[str]:
    """The tags of the result in ``out``."""
    form = str(read_object(out / QUANTISATION_FILE).get("format"))
    return [TAG, form, *[JAVASCRIPT] * (out / ONNX_FOLDER).is_dir()]


def values(out: Path, source: Source, final: Path, card: str, state: str) -> JsonValues:
    """The values for the template ``quantised_card``.

    ``final`` is the path that ``out`` will be renamed to, ``card`` the text of the original's card,
    and ``state`` the text of the section that may change.
    """
    record = read_object(out / QUANTISATION_FILE)
    form, scheme = str(record["format"]), str(record["scheme"])
    place = display_name(source) if source.revision else f"./{display_name(source)}"
    words = ["enjoyln", "quantize", place, "-o", final.name, "--scheme", scheme, "--format", form]
    words += ["--for", str(record["target"])] if record["target"] else []
    kept = [*map(str, record["kept"])]
    return {
        "title": final.name,
        "origin": origin_of(source),
        "scheme": scheme,
        "program": PROGRAMS[form],
        "chosen": str(record["chosen"]),
        "is_original": str(record["chosen"]).startswith("original"),
        "finer": [f"`{layer}`" for layer in dict.fromkeys(one["layer"] for one in record["finer"])],
        "command": shlex.join([*words, *(["--keep", ",".join(kept)] if kept else [])]),
        "versions": ", ".join(f"{name} {version}" for name, version in versions(*BESIDE).items()),
        "begin": BEGIN,
        "end": END,
        "state": state,
        "card": card.strip(),
    }


def state(out: Path, place: str, complaint: str = "") -> JsonValues:
    """The values for the template ``quantised_state``: the numbers, and how to load the result.

    ``place`` is the name by which users load it. ``complaint`` is the reason why the push had to be
    forced, if any.
    """
    record, verdict = read_object(out / QUANTISATION_FILE), read_object(out / VERIFY_FILE)
    place = json.dumps(place, ensure_ascii=False)[1:-1]  # escaped for use between quotes
    is_trusted = bool(read_object(out / CONFIG).get("auto_map"))
    call = loader(str(record.get("format")), str(record.get("model_class")), is_trusted)
    library, where = call.partition(".")[0], f'"{place}"'
    if library != "transformers" and "/" in place:
        library += "\nfrom huggingface_hub import snapshot_download"
        where = f"snapshot_download({where})"
    load = f"import {library}\n\nmodel = {call.format(where)}"
    return {
        "complaint": complaint,
        "rows": rows(record),
        "inputs": counted(int(record.get("inputs") or 0), "input"),
        "summary": str(verdict.get("summary", "")),
        "record": QUANTISATION_FILE,
        "load": load,
    }


def loader(form: str, model_class: str, is_trusted: bool = False) -> str:
    """The call that loads a result of a format, with ``{}`` for its directory.

    ``is_trusted`` says whether it may run code that comes with the result; OpenVINO runs none.
    """
    trust = ", trust_remote_code=True" if is_trusted else ""
    if form == "onnx":
        return f"enjoyln_cli.load_onnx({{}}{trust})"
    if form != "openvino":
        return f"transformers.{model_class}.from_pretrained({{}}{trust})"
    from transformers.models.auto import modeling_auto as auto

    pipelines = dict.fromkeys(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), "LLMPipeline")
    pipelines["WhisperForConditionalGeneration"] = "WhisperPipeline"
    if model_class in pipelines:
        return f'openvino_genai.{pipelines[model_class]}({{}}, "CPU")'
    has_encoder = model_class in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()
    file = "openvino_decoder_model" if has_encoder else "openvino_model"
    return f'openvino.Core().compile_model({{}} + "/{file}.xml")'


def rows(record: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """What was measured: of the result, of the original quantised as it is, and in float32.

    Empty for an edited record that cannot be shown.
    """
    try:
        held_out, plain = _measures(record["held_out"]), _measures(record["plain"])
        found = [(name, number(held_out[name]), number(plain.get(name)), "") for name in held_out]
        scores = [record["held_out"]["perplexity"], record["plain"]["perplexity"]]
        if record["perplexity"] is not None:
            found.append(
                ("perplexity", *map(number, scores), number(record["perplexity"]))  # type: ignore[arg-type]
            )
        found.append(("size", size(record["size"]), "", size(record["float_size"])))
        if record["speed"] is not None:
            both = (record["speed"]["milliseconds"], record["float_speed"]["milliseconds"])
            quantised, exact = (f"{number(time)} ms" for time in both)
            what = f"{record['speed']['what']}, {counted(record['threads'], 'thread')}"
            found.append((what, quantised, "", exact))
    except (KeyError, TypeError, ValueError, AttributeError):
        return []
    return found


def _measures(differences: Mapping[str, Any]) -> dict[str, float]:
    """All measures of all outputs, by their names in the table."""
    outputs = differences["outputs"]
    return {
        f"{output}: {measure}" if len(outputs) > 1 else measure: float(value)
        for output, measured in outputs.items()
        for measure, value in measured.items()
    }
