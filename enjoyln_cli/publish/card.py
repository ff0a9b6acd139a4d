"""The content of a converted checkpoint's model card.

Decides its metadata and the values that fill the templates. They come from the plan,
``enjoyln_verify.json``, and the card of the original.

Metadata of the original is copied if it stays true (``METADATA_OF_ORIGINAL``). ``base_model`` is
the Hub id of the original. The Hub knows four values of ``base_model_relation``: ``adapter``,
``finetune``, ``merge`` and ``quantized``. None of them means "the same function". We use
``quantized``, under which the Hub lists conversions of a model's own weights (for example to GGUF
in full precision). Without a value, the Hub would list the result as a fine-tune.

One section, between ``BEGIN`` and ``END``, contains what may change after the fold: where the model
is, and its verification. ``enjoyln push`` rewrites this section; the rest belongs to the owner.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from enjoyln_cli.checkpoint.config import MARKER, names_folded_norms
from enjoyln_cli.checkpoint.file_roles import CONFIG
from enjoyln_cli.checkpoint.result_files import RECIPE_FILE, VERIFY_FILE
from enjoyln_cli.checkpoint.sentence_transformers import MODULES
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.fs.whole_file import read_object
from enjoyln_cli.plan.fold_options import FoldOptions, WriteOptions
from enjoyln_cli.plan.option_field import changed_options, flag_for
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.report.model_report import ModelReport
from enjoyln_cli.report.notes import UNTIED, counts, notes, verbs
from enjoyln_cli.report.verification_table import (
    Texts,
    verification_heads,
    verification_rows,
)
from enjoyln_cli.version import versions

BEGIN = "<!-- enjoyln: this section is written anew by `enjoyln push` -->"
END = "<!-- enjoyln: end of the section -->"

TAG = "enjoyln"
FOLDED_TAG = "rmsnorm"
"""The tag of a model in which some norms can compute RMSNorm."""
RELATION = "quantized"
METADATA_OF_ORIGINAL = (
    "license",
    "license_name",
    "license_link",
    "language",
    "pipeline_tag",
    "library_name",
    "datasets",
    "tags",
)

BESIDE = ("torch", "transformers", "safetensors", "huggingface_hub")
"""The libraries whose versions a card names."""

MAX_LIST_ENTRIES = 1000
"""Longest list that is copied from the original's metadata."""

JsonValues = dict[str, Any]


def template(name: str) -> str:
    """The Jinja template ``name`` of this package."""
    return resources.files("enjoyln_cli").joinpath("templates", f"{name}.md").read_text("utf-8")


def metadata(
    existing: Mapping[str, Any], source: Source, folder: Path, own_tags: Sequence[str]
) -> JsonValues:
    """The card's metadata; ``existing`` is the metadata of the original's card.

    ``own_tags`` are the tags that enjoyln adds to the original's tags.
    """
    texts = {key: _texts(value) for key, value in existing.items()}
    copied = {key: texts[key] for key in METADATA_OF_ORIGINAL if texts.get(key)}
    tags = copied.get("tags") or []
    tags = [tags] if isinstance(tags, str) else tags
    copied["tags"] = list(dict.fromkeys([*tags, *own_tags]))
    library = "sentence-transformers" if (folder / MODULES).is_file() else "transformers"
    copied.setdefault("library_name", library)
    if source.revision is not None:
        return {"base_model": source.model, "base_model_relation": RELATION, **copied}
    base = ("base_model", "base_model_relation")  # a local original: keep the base that it names
    return {**{key: texts[key] for key in base if texts.get(key)}, **copied}


def _texts(value: Any) -> str | list[str] | None:
    """``value`` if it is a text, the texts in it if it is a list, else ``None``.

    YAML reads the language code ``no`` (Norwegian) as false; this restores it.
    """
    if isinstance(value, list):
        texts = ["no" if entry is False else entry for entry in value[:MAX_LIST_ENTRIES]]
        return [text for text in texts if isinstance(text, str)]
    return value if isinstance(value, str) else None


def display_name(source: Source) -> str:
    """The original's name: its Hub id, or the name of its directory without the path."""
    return source.model if source.revision else Path(source.model).expanduser().resolve().name


def origin_of(source: Source) -> str:
    """The original in words, with a link and its revision if it is on the Hub."""
    name = display_name(source)
    if not source.revision:
        return f"A local directory named `{name}`"
    return f"[{name}](https://huggingface.co/{name}) at revision `{source.revision}`"


def command(source: Source, out: Path, options: Sequence[Any], *, scaled: bool = False) -> str:
    """The command that reproduces the result; ``options`` are the dataclasses with its options.

    ``scaled`` says whether its streams were scaled for float16, on data that the user has.
    """
    place = display_name(source) if source.revision else f"./{display_name(source)}"
    changed = {
        flag_for(name, value, text): value
        for each in options
        for name, value, text in changed_options(each)
        if text.is_in_card
    }
    verb = "fold"
    if any(isinstance(each, FoldOptions) and not each.options.fold for each in options):
        verb = "rotate"
        changed.pop("--rotate", None)
    if source.revision:
        changed["--revision"] = source.revision
    words = ["enjoyln", verb, place, "-o", out.name]
    for flag, value in changed.items():
        words += [flag] if isinstance(value, bool) else [flag, _word(value)]
    return shlex.join(words) + (" --fp16-safe DATA" if scaled else "")


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return value.name if isinstance(value, Path) else str(value)


def values(
    plan: Plan, source: Source, out: Path, options: Sequence[Any], card: str, state: str
) -> JsonValues:
    """The values for the template ``card``.

    ``options`` are the dataclasses with the options of the fold, ``card`` is the text of the
    original's card, ``state`` the text of the section that may change.
    """
    dtype = next((each.dtype for each in options if isinstance(each, WriteOptions)), None)
    name = display_name(source)
    return {
        "title": out.name,
        "origin": origin_of(source),
        "model_class": plan.model_class,
        "inputs": ", ".join(f"`{name}`" for name in plan.entry_inputs),
        "folded": len(plan.folded),
        "norms": len(plan.norms),
        "done": _plan_lines(ModelReport(name, plan), str(dtype or "")),
        "recipe": RECIPE_FILE,
        "outputs": ", ".join(f"`{key}`" for key in plan.outputs),
        "classes": ", ".join(f"`{cls}`" for cls in plan.classes),
        "relation": RELATION if source.revision else "",
        "fused": bool(plan.fused),
        "rotated": bool(plan.rotated),
        "unproven": bool(plan.unproven),
        "untied": ", ".join(f"`{copy.tensor}`" for copy in plan.untied),
        "begin": BEGIN,
        "end": END,
        "state": state,
        "command": command(source, out, options, scaled=bool(plan.scaled)),
        "versions": ", ".join(f"{name} {version}" for name, version in versions(*BESIDE).items()),
        "card": card.strip(),
    }


def _plan_lines(report: ModelReport, dtype: str) -> list[str]:
    """The lines that ``enjoyln fold`` prints for a plan."""
    further = (line for line in notes(report)[1:] if UNTIED not in line)  # the card has a section
    lines = [f"{verbs(report.plan)[1]} {counts(report.plan)}", *further]
    return [*lines, f"  all floating weights were converted to {dtype}"] if dtype else lines


def state(
    root: Path, folder: str, place: str, names: Sequence[str], complaint: str = ""
) -> JsonValues:
    """The values for the template ``state``.

    ``folder`` in ``root`` contains the result's config and verification. ``place`` is the name by
    which users load the model, ``names`` are the classes that can load it. ``complaint`` is the
    reason why the push had to be forced, if any.
    """
    inner = root / folder
    place = json.dumps(place, ensure_ascii=False)[1:-1]  # escaped for use between quotes
    config, checked = read_object(inner / CONFIG), read_object(inner / VERIFY_FILE)
    summary = str(checked.get("summary", ""))
    is_pipeline = (root / MODULES).is_file()
    stock, fast = _of_pipeline(place) if is_pipeline else _of_model(inner, place, names)
    return {
        "complaint": complaint,
        "heads": verification_heads(checked),
        "checks": _checks(checked),
        "summary": summary[:1].upper() + summary[1:],
        "inputs": str(checked.get("count", ""))[:100],
        "verify": VERIFY_FILE,
        "stock": stock,
        "fast": fast if names_folded_norms(config.get(MARKER)) else "",
    }


def _checks(verification: JsonValues) -> list[Texts]:
    """The rows of a verification; empty if there is none, or if an edit prevents showing it."""
    try:
        return verification_rows(verification)
    except (KeyError, TypeError, ValueError, AttributeError):
        return []


def replace_section(text: str, section: str) -> str:
    """A card with its enjoyln section replaced; unchanged if the owner has removed that section."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n{section}\n{END}", text, count=1)


def _of_pipeline(place: str) -> tuple[str, str]:
    """Python code that loads a sentence encoder in the stock class, and code that adds RMSNorm."""
    imports = "from sentence_transformers import SentenceTransformer\n"
    load = f'\nmodel = SentenceTransformer("{place}")'
    fast = f"{imports}from enjoyln_cli import optimize\n{load}\noptimize(model[0].auto_model)"
    return imports + load, fast


def _of_model(inner: Path, place: str, names: Sequence[str]) -> tuple[str, str]:
    """Python code that loads a model in the stock class, and code that loads it with RMSNorm."""
    config = read_object(inner / CONFIG)
    custom = ", trust_remote_code=True" if config.get("auto_map") else ""
    saved = next(iter(config.get("architectures") or ()), None)
    name = saved if saved in names or not names else names[0]
    imports = f"from transformers import {'AutoModel' if custom else name}\n"
    load = f'\nmodel = {"AutoModel" if custom else name}.from_pretrained("{place}"{custom})'
    fast = "from enjoyln_cli import from_pretrained\n"
    if name == saved:
        return imports + load, f'{fast}\nmodel = from_pretrained("{place}"{custom})'
    return imports + load, f'{fast}{imports}\nmodel = from_pretrained("{place}", {name}{custom})'
