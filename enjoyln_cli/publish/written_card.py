"""Writes model cards: above the original's card, and the section that a push writes anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from enjoyln_cli.checkpoint.result_files import CARD_FILE
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.fs.whole_file import write_whole
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.publish import card, quantised_card
from enjoyln_cli.publish.precisions import records

MAX_METADATA_CHARS = 100_000
"""Longest metadata of a card that is parsed, in characters."""


def write_card(
    out: Path,
    plan: Plan,
    source: Source,
    options: Sequence[Any],
    final: Path,
    *,
    stored_as: str = "",
) -> None:
    """Write the card of a fold to ``out``, above the text of the original's card if that is there.

    ``final`` is the path that ``out`` will be renamed to. ``options`` are the dataclasses with the
    options of the command. ``stored_as`` is the class that it is stored as, if that is another.
    """
    data, text = _parse_card(out / CARD_FILE)
    checked = section(out, source.folder, final.name, (stored_as,) if stored_as else plan.classes)
    tags = [card.TAG, *[card.FOLDED_TAG] * bool(plan.folded)]
    values = card.values(plan, source, final, options, text, checked) | {"stored_as": stored_as}
    _write(out, card.metadata(data, source, out, tags), "card", values)


def write_quantised_card(
    out: Path, source: Source, final: Path, converted: Path | None = None
) -> None:
    """Write the card of ONNX files or a quantised result, as ``write_card`` does for a fold.

    If the files come from ``converted``, its card gives the metadata.
    Of a result that has a card because it had other precisions before, the section is renewed.
    """
    if len(records(out)) > 1 and (out / CARD_FILE).is_file():
        content = (out / CARD_FILE).read_bytes().decode("utf-8", errors="replace")
        renewed = card.replace_section(content, quantised_section(out, final.name))
        write_whole(out / CARD_FILE, renewed)
        return
    data, text = _parse_card(out / CARD_FILE)
    if converted:
        data, _ = _parse_card(converted / CARD_FILE)
    measured = quantised_section(out, final.name)
    values = quantised_card.values(out, source, final, text, measured)
    tags = quantised_card.tags(out)
    _write(out, card.metadata(data, source, out, tags), "quantised_card", values)


def _write(out: Path, metadata: Mapping[str, Any], template: str, values: card.JsonValues) -> None:
    from huggingface_hub import ModelCard, ModelCardData

    written = ModelCard.from_template(
        ModelCardData(**metadata), template_str=card.template(template), **values
    )
    write_whole(out / CARD_FILE, f"{written}\n")


def section(root: Path, folder: str, place: str, names: Sequence[str], complaint: str = "") -> str:
    """The text of the card's section that may change. The arguments are as for ``card.state``."""
    return _section("state", card.state(root, folder, place, names, complaint))


def quantised_section(out: Path, place: str, complaint: str = "") -> str:
    """The same for a quantised result. The arguments are as for ``quantised_card.state``."""
    return _section("quantised_state", quantised_card.state(out, place, complaint))


def _section(template: str, values: card.JsonValues) -> str:
    from huggingface_hub import ModelCard, ModelCardData

    return ModelCard.from_template(
        ModelCardData(), template_str="---\n{}\n---\n" + card.template(template), **values
    ).text.strip()


def _parse_card(path: Path) -> tuple[dict[str, Any], str]:
    """A card's metadata and text; the whole card as text if the metadata cannot be parsed.

    Uses ``RepoCard``, since ``ModelCard`` compares tags, which may be deeply nested in an untrusted
    file.
    """
    from huggingface_hub import RepoCard

    if not path.is_file():
        return {}, ""
    content = path.read_bytes().decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    if content.find("\n---", 1) > MAX_METADATA_CHARS:
        return {}, content
    try:
        card = RepoCard(content)
        return card.data.to_dict(), card.text
    except Exception:  # any error of the YAML parser on an untrusted file
        return {}, content
