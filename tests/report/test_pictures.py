"""Pictures: their content, their colours, and the files of each format."""

from __future__ import annotations

import io
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import enjoyln
from live_models import CHECKPOINTS

from enjoyln_cli.analysis.analyze import Analysis, analyze_config
from enjoyln_cli.conversion.open_and_analyse import open_and_analyse
from enjoyln_cli.errors import EnjoyLNError, OutputError
from enjoyln_cli.plan.fold_options import FoldOptions, Options
from enjoyln_cli.report import picture as drawing
from enjoyln_cli.report.layer_groups import MAX_LINE_CHARS, ModelPart, addresses_of, collapse_groups
from enjoyln_cli.report.model_graph import model_picture
from enjoyln_cli.report.picture import COLOURS, Box, Link, Picture, drawn

needs_graphviz = pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz")
SVG = "{http://www.w3.org/2000/svg}"


def analysis_of(name: str) -> Analysis:
    return open_and_analyse(str(CHECKPOINTS / name)).analysis


@pytest.fixture(scope="module")
def gpt2() -> Analysis:
    return analysis_of("gpt2")


def boxes_of(picture: Picture) -> dict[str, list[tuple[str, ...]]]:
    """The lines of every box, by tone."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for box in picture.boxes:
        found.setdefault(box.tone, []).append((*box.name, *box.lines))
    return found


def names(boxes: list[tuple[str, ...]]) -> list[str]:
    return [lines[0] for lines in boxes]


def frames_of(picture: Picture) -> set[tuple[str, ...]]:
    return {box.frames for box in picture.boxes if box.frames}


def texts_of(picture: Picture) -> list[str]:
    """The texts of a picture's SVG, in the order in which they are drawn."""
    root = ET.fromstring(drawn(picture, "svg"))
    return [text.text or "" for text in root.iter(f"{SVG}text")]


# Content.


def test_a_picture_shows_the_stream_and_alike_layers_once(gpt2: Analysis) -> None:
    picture = model_picture("gpt2", gpt2)
    found = boxes_of(picture)
    assert frames_of(picture) == {("transformer.h.0-2 (3 layers)",)}
    assert names(found["with_subtraction"]) == ["ln_1", "ln_2", "transformer.ln_f"]
    assert names(found["writer"]) == ["transformer.wpe", "attn.c_proj", "mlp.c_proj"]
    assert names(found["left"]) == ["transformer.wte"]
    assert found["observer"] == [("lm_head", "sees its mean")]
    assert found["op"] == [("centre", "transformer.wte")]
    assert len(found["zero"]) == 3, "one sum of embeddings, two in each layer"
    assert {"input_ids", "logits"} <= {lines[0] for lines in found["plain"] if lines}


def test_classes_are_named_where_they_are_several() -> None:
    from transformers import GPT2Config

    found = analyze_config(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9))
    assert found.plan.classes == ("GPT2Model", "GPT2LMHeadModel")
    picture = model_picture("m", found)
    assert picture.title == "m (GPT2Model and 1 other class)"
    (head,) = boxes_of(picture)["observer"]
    assert head == ("lm_head", "sees its mean", "in GPT2LMHeadModel")
    for classes, more in ((("GPT2Model",), ""), (("GPT2Model", "A", "B"), " and 2 other classes")):
        other = replace(found, plan=replace(found.plan, classes=classes))
        assert model_picture("m", other).title == f"m (GPT2Model{more})"


def test_the_stream_goes_from_input_through_op_to_output(gpt2: Analysis) -> None:
    picture = model_picture("m", gpt2)
    links = {(link.start, link.end) for link in picture.links}
    first, last = "sum transformer.(add 0)", "sum transformer.h.0-2.(add 1)"
    assert ("op transformer.wte.(centre output)", first) in links
    assert (first, "norm transformer.h.0-2.ln_1") in links
    assert (last, "norm transformer.ln_f") in links
    assert (last, "norm transformer.h.0-2.ln_1") not in links, "only the next layer reads it there"
    assert ("writer transformer.wte", first) not in links
    assert [link for link in picture.links if link.seen] == [
        Link("writer transformer.wte", "observer lm_head", True)
    ]


def test_a_kept_norm_says_why() -> None:
    bert = analysis_of("bert")
    kept = boxes_of(model_picture("bert", bert))["stays_layernorm"]
    assert len(kept) == 4 and all(lines[1] == "stays LayerNorm" for lines in kept)
    reasons = {verdict.reason for verdict in bert.plan.kept}
    assert all(any(reason in " ".join(lines) for reason in reasons) for lines in kept)


@pytest.mark.slow
def test_a_widened_mlp_says_that_it_subtracts() -> None:
    folding = FoldOptions(options=Options(widen_mlp=True))
    wide = open_and_analyse(str(CHECKPOINTS / "bert"), folding=folding).analysis
    found = boxes_of(model_picture("bert", wide))
    assert found["writer"] == [("output.dense", "centred, subtracts a mean")]
    assert names(found["in_weights"]) == ["output.LayerNorm"]


def test_the_stream_goes_on_where_no_proof_does() -> None:
    """In Swin, only a concatenation reads the sum that the last block of a stage adds to."""
    from transformers import SwinConfig

    sizes = {"image_size": 16, "patch_size": 2, "window_size": 2, "embed_dim": 8, "num_labels": 2}
    config = SwinConfig(depths=[2, 2], num_heads=[2, 2], **sizes)
    picture = model_picture("swin", analyze_config(config))
    found = boxes_of(picture)
    assert [frames[-1] for frames in frames_of(picture)].count("blocks.0-1 (2 layers)") == 2
    assert names(found["left"]) == ["attention.o_proj", "mlp.fc2", "downsample"]
    assert names(found["mean"]) == ["+"] * 2, "of the first stage"
    assert names(found["zero"]) == ["+"] * 2


def test_layers_that_differ_are_not_joined() -> None:
    parts = [
        ModelPart("norm", f"h.{i}.ln", "stays_layernorm" if i == 1 else "in_weights")
        for i in range(4)
    ]
    parts += [ModelPart("writer", f"h.{i}.proj", "writer") for i in range(4)]
    shown = addresses_of(parts)
    assert {shown[part].path for part in parts if part.kind == "norm"} == {
        "h.0.ln",
        "h.1.ln",
        "h.2-3.ln",
    }
    assert shown[parts[3]].layers == (("h.2-3", 3),)


def test_a_model_without_norms_has_no_picture() -> None:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 9}
    llama = analyze_config(LlamaConfig(num_hidden_layers=1, **sizes))
    with pytest.raises(EnjoyLNError, match="nothing to draw"):
        model_picture("llama", llama)


def test_names_and_reasons_are_there_as_a_whole() -> None:
    name = ".".join(f"block_{i}" for i in range(20)) + "x" * 100
    reason = " ".join(f"word{i}" for i in range(60))
    (box,), _ = collapse_groups([ModelPart("norm", name, "stays_layernorm", (), reason)], {})
    lines = (*box.name, *box.lines)
    assert max(map(len, lines)) <= MAX_LINE_CHARS
    assert "".join(box.name) == name and " ".join(box.lines) == reason
    text = drawn(Picture("m", "n", (box,), ()), "dot").decode()
    assert all(line in text for line in lines)


# Colours.


def linear(colour: str) -> list[float]:
    """The red, green and blue of a colour in linear light."""
    parts = [part / 255 for part in bytes.fromhex(colour[1:])]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, as defined by WCAG 2."""
    weights = torch.tensor([0.2126, 0.7152, 0.0722])
    dark, bright = sorted(float(weights @ torch.tensor(linear(c))) for c in (one, other))
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("tone", COLOURS)
def test_text_can_be_read_on_its_box(tone: str) -> None:
    fill, line, _ = next(found for key, found in COLOURS.items() if key == tone)
    assert min(contrast(fill, drawing.TEXT), contrast(fill, line)) >= 4.5
    assert min(contrast("#ffffff", drawing.TEXT), contrast("#ffffff", drawing.DIM)) >= 4.5


def test_the_legend_says_what_every_colour_of_a_box_means(gpt2: Analysis) -> None:
    picture = model_picture("gpt2", gpt2)
    meanings = {COLOURS[box.tone][2] for box in picture.boxes}
    text = drawn(picture, "dot").decode()
    assert all(text.count(f">{meaning}<") == 1 for meaning in meanings)
    others = {meaning for *_, meaning in COLOURS.values()} - meanings
    assert others == {"stays LayerNorm", "becomes RMSNorm, in the weights alone"}
    assert not any(f">{meaning}<" in text for meaning in others)


# Files.


@needs_graphviz
@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_untrusted_names_are_drawn_as_they_are(kind: str) -> None:
    """No text is markup, and a character that no font has is no error."""
    rude = 'a<script>alert("&")</script>\\N $\\frac{1}$\x00\ud800\u202e\U0001d7d8'
    boxes = (
        Box("1", (rude,), (rude,), "stays_layernorm", (rude,)),
        Box('"2"', ("+",), (), is_sum=True),
    )
    picture = Picture(rude, rude, boxes, (Link("1", '"2"'),))
    assert drawn(picture, kind)
    if kind == "svg":
        shown = rude.translate(dict.fromkeys((0, 0xD800, 0x202E), "?"))
        assert texts_of(picture).count(shown) == 5


@needs_graphviz
def test_frames_are_around_their_boxes_only() -> None:
    boxes = Box("a", ("in",), (), frames=("outer", "inner")), Box("b", ("out",), ())
    root = ET.fromstring(drawn(Picture("m", "n", boxes, (Link("a", "b"),)), "svg"))
    groups = [group for group in root.iter(f"{SVG}g") if group.get("class") == "cluster"]
    held = [[text.text for text in group.iter(f"{SVG}text")] for group in groups]
    assert held == [["outer"], ["inner"]]
    edges = [group for group in root.iter(f"{SVG}g") if group.get("class") == "edge"]
    assert len(edges) == 1


@needs_graphviz
def test_a_png_has_the_colours_of_the_verdicts(gpt2: Analysis) -> None:
    image = pytest.importorskip("PIL.Image")
    data = io.BytesIO(drawn(model_picture("gpt2", gpt2), "png"))
    pixels = {colour for _, colour in image.open(data).convert("RGB").getcolors(1 << 20)}
    assert tuple(bytes.fromhex(COLOURS["with_subtraction"][0][1:])) in pixels
    assert tuple(bytes.fromhex(COLOURS["stays_layernorm"][0][1:])) not in pixels


def said(*arguments: object) -> tuple[int, str]:
    result = enjoyln("report", CHECKPOINTS / "gpt2", *arguments)
    return result.exit_code, result.output


@pytest.mark.parametrize("suffix", [pytest.param("SVG", marks=needs_graphviz), "dot"])
def test_report_saves(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"it.{suffix}"
    stage = f"analysing {CHECKPOINTS / 'gpt2'}"
    assert said("--save", file) == (0, f"{stage}\ndrew {file}\n")
    if suffix == "SVG":
        assert ET.parse(file).getroot().tag == f"{SVG}svg"
    else:
        assert file.read_text().startswith("digraph {")


def test_what_cannot_be_saved_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "is.dot").mkdir()
    for name, hint in (("it.jpg", ".svg, .png, .pdf, .dot"), ("none/it.dot", "is not a directory")):
        status, text = said("--save", tmp_path / name)
        assert status == 1 and hint in text and text.count("\n") == 1
    with pytest.raises(OutputError, match="it is a directory"):
        drawing.check(tmp_path / "is.dot")
    assert said("--save", tmp_path / "is.dot")[0] == 2
    assert said("--save", tmp_path / "it.dot", CHECKPOINTS / "bert")[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["is.dot"]


def test_without_graphviz_the_text_can_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    status, text = said("--save", tmp_path / "it.svg")
    assert status == 1 and "needs Graphviz" in text and text.count("\n") == 1
    assert said("--save", tmp_path / "it.dot")[0] == 0


def test_what_graphviz_cannot_draw_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\necho 'Error: out\nof memory' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(OutputError, match="cannot draw this picture: Error: out of memory"):
        drawn(Picture("m", "n", (), ()), "svg")
