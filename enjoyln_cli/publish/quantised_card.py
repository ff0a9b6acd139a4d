"""The content of the model card of a result that ``quantize`` or ``export`` has written.

Its numbers are from the record of each precision, ``enjoyln_precisions.json``. The Hub filters by
the tags: the format, and ``transformers.js`` for the layout that it reads.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enjoyln_cli.checkpoint.file_roles import CONFIG
from enjoyln_cli.checkpoint.result_files import PRECISIONS_FILE, VERIFY_FILE
from enjoyln_cli.checkpoint.sentence_transformers import MODULES
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.fs.whole_file import read_object
from enjoyln_cli.publish.card import BEGIN, BESIDE, END, TAG, JsonValues, origin_of
from enjoyln_cli.publish.precisions import records
from enjoyln_cli.report.quantised_table import quantised_rows
from enjoyln_cli.report.verification_table import Texts
from enjoyln_cli.text import counted
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
    return [TAG, _format(out), *[JAVASCRIPT] * (out / ONNX_FOLDER).is_dir()]


def _format(out: Path) -> str:
    return next((str(entry.get("format")) for entry in records(out).values()), "")


def values(out: Path, source: Source, final: Path, card: str, state: str) -> JsonValues:
    """The values for the template ``quantised_card``.

    ``final`` is the path that ``out`` will be renamed to, ``card`` the text of the original's card,
    and ``state`` the text of the section that may change.
    """
    return {
        "title": final.name,
        "origin": origin_of(source),
        "program": PROGRAMS[_format(out)],
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
    found, verdict = records(out), read_object(out / VERIFY_FILE)
    name = place.rsplit("/", 1)[-1]
    place = json.dumps(place, ensure_ascii=False)[1:-1]  # escaped for use between quotes
    is_trusted = bool(read_object(out / CONFIG).get("auto_map"))
    call = loading(out, f'"{place}"', is_trusted)
    library = call.partition(".")[0]
    if library != "transformers" and "/" in place:
        library += "\nfrom huggingface_hub import snapshot_download"
        call = loading(out, f'snapshot_download("{place}")', is_trusted)
    load = f"import {library}\n\nmodel = {call}"
    return {
        "complaint": complaint,
        "precisions": [
            {"name": precision, **_precision(entry, name)} for precision, entry in found.items()
        ],
        "summary": str(verdict.get("summary", "")),
        "record": PRECISIONS_FILE,
        "load": load,
    }


def loading(out: Path, where: str, is_trusted: bool = False) -> str:
    """The call that loads the result in ``out``; ``where`` is Python code for its directory."""
    found, format_name = records(out), _format(out)
    suffix = str([*found.values()][-1].get("suffix", "")) if found else ""
    if format_name == "onnx" and (out / MODULES).is_file():
        options = {"file_name": f"{ONNX_FOLDER}/model{suffix}.onnx"}
        options["provider"] = "CPUExecutionProvider"
        given = f'backend="onnx", model_kwargs={json.dumps(options)}'
        return f"sentence_transformers.SentenceTransformer({where}, {given})"
    which = f', "{suffix[1:] or "fp32"}"' if len(found) > 1 else ""
    model_class = str(next(iter(found.values()), {}).get("model_class"))
    return loader(format_name, model_class, is_trusted).format(where + which)


def loader(format_name: str, model_class: str, is_trusted: bool = False) -> str:
    """The call that loads a result of a format, with ``{}`` for its directory.

    ``is_trusted`` says whether it may run code that comes with the result; OpenVINO runs none.
    """
    trust = ", trust_remote_code=True" if is_trusted else ""
    if format_name == "onnx":
        return f"enjoyln_cli.load_onnx({{}}{trust})"
    if format_name != "openvino":
        return f"transformers.{model_class}.from_pretrained({{}}{trust})"
    from transformers.models.auto import modeling_auto as auto

    pipelines = dict.fromkeys(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), "LLMPipeline")
    pipelines["WhisperForConditionalGeneration"] = "WhisperPipeline"
    if model_class in pipelines:
        return f'openvino_genai.{pipelines[model_class]}({{}}, "CPU")'
    has_encoder = model_class in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()
    file = "openvino_decoder_model" if has_encoder else "openvino_model"
    return f'openvino.Core().compile_model({{}} + "/{file}.xml")'


def _precision(entry: Mapping[str, Any], name: str) -> JsonValues:
    """The values for the part about one precision in the directory ``name``."""
    chosen, finer = str(entry.get("chosen")), entry.get("finer")
    layers = [one["layer"] for one in finer] if isinstance(finer, list) else []
    return {
        "command": command(entry, name),
        "rows": rows(entry),
        "inputs": counted(int(entry.get("inputs") or 0), "input"),
        "chosen": chosen,
        "is_rotated": not chosen.startswith("original"),
        "finer": [f"`{layer}`" for layer in dict.fromkeys(layers)],
        "checks": entry.get("checks", []),
    }


def command(entry: Mapping[str, Any], name: str) -> str:
    """The command that wrote a precision to the directory ``name``."""
    scheme = str(entry.get("scheme"))
    if exported := entry.get("exported"):
        return shlex.join(["enjoyln", "export", f"./{exported}", "-o", name, "--dtype", scheme])
    model, revision = str(entry.get("source")), entry.get("revision")
    place = model if revision else f"./{Path(model).name}"
    words = ["enjoyln", "quantize", place, "-o", name, "--scheme", scheme]
    words += ["--format", str(entry.get("format"))]
    words += ["--for", str(entry["target"])] if entry.get("target") else []
    kept = entry.get("kept")
    return shlex.join([*words, *(["--keep", ",".join(map(str, kept))] if kept else [])])


def rows(record: Mapping[str, Any]) -> list[Texts]:
    """The rows of the table, with the generated tokens.

    Empty for a model that was exported in floating point, and for an edited record that cannot be
    shown.
    """
    try:
        found = quantised_rows(record)
        if generated := record.get("generated"):
            same = f"{generated['same']} of {generated['tokens']}"
            found.append(("generated tokens as the original's", same, "", ""))
    except (KeyError, TypeError, ValueError, AttributeError):
        return []
    return found
