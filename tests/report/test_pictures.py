"""Pictures: their content, their layout, and the files of each format."""

from __future__ import annotations

import io
import os
import random
import re
import shutil
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from live_models import CHECKPOINTS

from enjoyln_cli.analysis.analyze import Analysis, analyze_config
from enjoyln_cli.cli.main import main
from enjoyln_cli.conversion.inspect import Opening, inspect
from enjoyln_cli.errors import EnjoyLNError, OutputError
from enjoyln_cli.plan.plan import Options
from enjoyln_cli.proof.explain import Tree
from enjoyln_cli.report import render
from enjoyln_cli.report.graph_layout import (
    DOT,
    MAX_LINE_CHARS,
    Box,
    Graph,
    Link,
    Picture,
    layout,
    tones,
)
from enjoyln_cli.report.layer_groups import Part, addresses_of
from enjoyln_cli.report.model_graph import model_picture, norm_picture
from enjoyln_cli.report.render import COLOURS, as_html, as_png, as_svg

pytest.importorskip("grandalf")

SVG = "{http://www.w3.org/2000/svg}"
RUDE = 'a<script>alert("&")</script>\x00\ud800\u202e'


def analysis_of(name: str) -> Analysis:
    return inspect(str(CHECKPOINTS / name), Opening()).analysis


@pytest.fixture(scope="module")
def gpt2() -> Analysis:
    return analysis_of("gpt2")


def drawn(picture: Picture) -> dict[str, list[tuple[list[str], str]]]:
    """Texts and title of every box of an SVG, by tone."""
    found: dict[str, list[tuple[list[str], str]]] = {}
    for group in ET.fromstring(as_svg(picture)).iter(f"{SVG}g"):
        kind, _, tone = group.get("class", "").partition(" ")
        if kind == "box":
            texts = [text.text or "" for text in group.findall(f"{SVG}text")]
            found.setdefault(tone, []).append((texts, group.findtext(f"{SVG}title") or ""))
    return found


def names(boxes: list[tuple[list[str], str]]) -> list[str]:
    return [texts[0] for texts, _ in boxes]


# Content.


def test_a_picture_shows_the_stream_and_alike_layers_once(gpt2: Analysis) -> None:
    found = drawn(model_picture("gpt2", gpt2))
    assert names(found["group"]) == ["transformer.h.0-2 (3 layers)"]
    assert names(found["centred"]) == ["ln_1", "ln_2", "transformer.ln_f"]
    assert names(found["writer"]) == ["transformer.wpe", "attn.c_proj", "mlp.c_proj"]
    assert names(found["left"]) == ["transformer.wte"]
    assert [texts for texts, _ in found["observer"]] == [["lm_head", "sees its mean"]]
    assert found["op"][0][0] == ["centre", "transformer.wte"]
    assert len(found["zero"]) == 3, "one sum of embeddings, two in each layer"
    assert {"input_ids", "logits"} <= {texts[0] for texts, _ in found["plain"] if texts}


def test_classes_are_named_where_they_are_several() -> None:
    from transformers import GPT2Config

    found = analyze_config(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9))
    assert found.plan.classes == ("GPT2Model", "GPT2LMHeadModel")
    picture = model_picture("m", found)
    assert picture.title == "m (GPT2Model and 1 other class)"
    (head,) = drawn(picture)["observer"]
    assert head[0] == ["lm_head", "sees its mean", "in GPT2LMHeadModel"]
    for classes, more in ((("GPT2Model",), ""), (("GPT2Model", "A", "B"), " and 2 other classes")):
        other = replace(found, plan=replace(found.plan, classes=classes))
        assert model_picture("m", other).title == f"m (GPT2Model{more})"


def test_every_norm_is_in_some_box(gpt2: Analysis) -> None:
    titles = [title.split("\n")[0] for _, title in drawn(model_picture("m", gpt2))["centred"]]
    times = [int(m[1]) if (m := re.search(r"\((\d+) times\)", t)) else 1 for t in titles]
    assert sum(times) == len(gpt2.plan.norms) == 7


def test_the_stream_goes_from_the_input_through_the_op_to_the_output(gpt2: Analysis) -> None:
    links = {(link.start, link.end) for link in model_picture("m", gpt2).graph.links}
    layers = "transformer.h.0-2"
    assert ("op transformer.wte.(centre output)", "sum transformer.(add 0)") in links
    assert ("sum transformer.(add 0)", layers) in links
    assert (layers, "norm transformer.ln_f") in links
    assert ("writer transformer.wte", "sum transformer.(add 0)") not in links
    assert [link for link in model_picture("m", gpt2).graph.links if link.seen] == [
        Link("writer transformer.wte", "observer lm_head", True)
    ]


def test_a_kept_norm_says_why() -> None:
    bert = analysis_of("bert")
    kept = drawn(model_picture("bert", bert))["kept"]
    assert all(texts[1] == "stays LayerNorm" for texts, _ in kept)
    reasons = {verdict.reason for verdict in bert.plan.kept}
    assert all(any(reason in title for reason in reasons) for _, title in kept)


@pytest.mark.slow
def test_a_widened_mlp_says_that_it_subtracts() -> None:
    opening = Opening(options=Options(widen_mlp=True))
    wide = inspect(str(CHECKPOINTS / "bert"), opening).analysis
    found = drawn(model_picture("bert", wide))
    assert [texts for texts, _ in found["writer"]] == [
        ["output.dense", "centred, subtracts a mean"]
    ]
    assert names(found["static"]) == ["output.LayerNorm"]


def test_the_stream_goes_on_where_no_proof_does() -> None:
    """In Swin, only a concatenation reads the sum that the last block of a stage adds to."""
    from transformers import SwinConfig

    sizes = {"image_size": 16, "patch_size": 2, "window_size": 2, "embed_dim": 8, "num_labels": 2}
    config = SwinConfig(depths=[2, 2], num_heads=[2, 2], **sizes)
    found = drawn(model_picture("swin", analyze_config(config)))
    assert names(found["group"]).count("blocks.0-1 (2 layers)") == 2
    assert names(found["left"]) == ["attention.o_proj", "mlp.fc2", "downsample"]
    assert names(found["mean"]) == ["+"] * 2, "of the first stage"
    assert names(found["zero"]) == ["+"] * 2


def test_layers_that_differ_are_not_one() -> None:
    parts = [Part("norm", f"h.{i}.ln", "kept" if i == 1 else "static") for i in range(4)]
    parts += [Part("writer", f"h.{i}.proj", "writer") for i in range(4)]
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


def test_a_norm_is_its_zero_mean_graph_with_shared_values_once() -> None:
    shared = Tree("wte.weight: keeps", False)
    terms = [
        Tree(f"h.{i}.proj (linear): if", True, (Tree(f"h.{i}.proj.weight: in", True),))
        for i in (0, 1, 9, 10)
    ]
    tree = Tree("ln stays", False, (Tree("one", False, (shared, *terms)), shared))
    found = drawn(norm_picture("m", "ln", tree))
    assert sorted(names(found["mean"])) == ["ln stays", "one", "wte.weight"]
    assert sorted(names(found["zero"])) == ["h.0-1,9-10.proj (linear)", "h.0-1,9-10.proj.weight"]


def test_names_and_reasons_are_there_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PNG has no tooltips, so it must contain the whole text."""
    image = pytest.importorskip("PIL.ImageDraw")
    name = ".".join(f"block_{i}" for i in range(20)) + "x" * 100
    reason = " ".join(f"word{i}" for i in range(60))
    picture = norm_picture("m", "ln", Tree("ln stays", False, (Tree(f"{name}: {reason}", False),)))
    ((texts, title),) = [one for one in drawn(picture)["mean"] if one[0][0] != "ln stays"]
    assert max(map(len, texts)) <= MAX_LINE_CHARS and title == f"{name}: {reason}"
    at = texts.index(next(text for text in texts if text.startswith("word0")))
    assert "".join(texts[:at]) == name and " ".join(texts[at:]) == reason
    assert all(text in as_html(picture) for text in texts)
    written: list[str] = []
    monkeypatch.setattr(image.ImageDraw, "text", lambda pen, at, text, *how: written.append(text))
    as_png(picture)
    assert set(texts) <= set(written)


# Layout.


def dot(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a shell script ``text`` as ``dot``, the only program in the PATH."""
    folder.mkdir(exist_ok=True)
    (folder / "dot").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "dot").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.fixture(params=["grandalf", "graphviz"])
def pixels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> float:
    """The precision in pixels of the layout library; the other library is made unavailable."""
    if request.param == "grandalf":
        monkeypatch.setenv("PATH", str(tmp_path))
        return 0.0
    if shutil.which("dot") is None:
        pytest.skip("Graphviz is not installed")
    monkeypatch.setitem(sys.modules, "grandalf.layouts", None)
    return 1.5  # dot prints five digits of a length, and ends links at whole pixels


@pytest.mark.parametrize("seed", range(8))
def test_boxes_do_not_overlap_and_links_touch_them(seed: int, pixels: float) -> None:
    chance = random.Random(seed)
    keys = [str(n) for n in range(chance.randint(1, 14))]
    inside = Graph((Box("x", ("x" * 30,)), Box("y", ("y",))), (Link("x", "y"),))
    boxes = tuple(
        Box(
            key,
            ("n" * chance.randint(1, 30),) * chance.randint(1, 3),
            inside=None if n % 4 else inside,
        )
        for n, key in enumerate(keys)
    )
    links = {Link(chance.choice(keys), chance.choice(keys)) for _ in range(chance.randint(0, 24))}
    found = layout(Graph(boxes, tuple(sorted(links, key=repr))))
    outer = {p.box.key: p for p in found.boxes if p.box.key in keys}
    off = max(pixels, 0.01)
    for a in outer.values():
        assert a.x >= -off and a.x + a.width <= found.width + off
        assert a.y >= -off and a.y + a.height <= found.height + off
        for b in outer.values():
            apart = a.x + a.width <= b.x or b.x + b.width <= a.x
            assert a is b or apart or a.y + a.height <= b.y or b.y + b.height <= a.y
    routes = [route for route in found.routes if route.link.start in outer]
    assert {route.link for route in routes} == {link for link in links if link.start != link.end}
    for route in routes:
        for key, (x, y) in (
            (route.link.start, route.points[0]),
            (route.link.end, route.points[-1]),
        ):
            box = outer[key]
            assert box.x - pixels <= x <= box.x + box.width + pixels
            ends = (box.y, box.y + box.height)
            assert any(y == pytest.approx(end, abs=pixels or None) for end in ends)


def test_links_into_a_group_end_apart_and_those_into_a_sum_in_one_point(pixels: float) -> None:
    inside = Graph((Box("x", ("x" * 30,)),), ())
    boxes = tuple(Box(key, (key * 9,)) for key in "abc")
    group, total = Box("group", ("layers",), "group", inside=inside), Box("+", ("+",), shape="dot")
    links = tuple(Link(key, end) for key in "abc" for end in ("group", "+"))
    found = layout(Graph((*boxes, group, total), links))
    ends: dict[str, list[float]] = {"group": [], "+": []}
    place = {p.box.key: p for p in found.boxes}
    for route in sorted(found.routes, key=lambda r: place[r.link.start].x):
        x, y = route.points[-1]
        assert y == pytest.approx(place[route.link.end].y, abs=pixels or None)
        ends[route.link.end].append(x)
    first, second, third = ends["group"]
    assert second - first > DOT and third - second > DOT
    assert max(ends["+"]) - min(ends["+"]) <= pixels


@pytest.mark.parametrize(
    "text",
    [
        "exit 1",
        "echo 'There is no layout engine' >&2; exit 1",
        "echo graph 1 1 1; echo; echo stop",
        "echo graph 1 1 1; echo node 0 0.5 0.5 1 1; echo stop",
        "echo node 99 1 1; echo edge 0 1 9 1",
        "echo nothing of use",
        "printf '\\377\\376'",
        "kill -9 $$",
        "exec sleep 60",
    ],
)
def test_grandalf_is_used_if_graphviz_fails(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    graph = Graph((Box("a", ("a",)), Box("b", ("b",))), (Link("a", "b"),))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    expected = layout(graph)
    dot(tmp_path / "bin", f"PATH={os.defpath}; {text}", monkeypatch)
    monkeypatch.setattr("enjoyln_cli.report.graph_layout.PATIENCE", 0.5)
    assert layout(graph) == expected
    assert capfd.readouterr() == ("", "")


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
    assert min(contrast(fill, render.TEXT), contrast(fill, line)) >= 4.5
    assert min(contrast("#ffffff", render.TEXT), contrast("#ffffff", render.DIM)) >= 4.5


SIGHT = {
    "all": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    "no red": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "no green": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "no blue": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}
"""Maps of linear light that simulate colour vision deficiencies (Machado, Oliveira and Fernandes
2009)."""


def seen(colour: str, sight: str) -> torch.Tensor:
    """A colour as seen with ``sight``, in CIELAB, where distances are perceptual."""
    light = (torch.tensor(SIGHT[sight]) @ torch.tensor(linear(colour))).clamp(0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = torch.tensor(to_xyz) @ light / torch.tensor([0.9505, 1.0, 1.089])
    x, y, z = torch.where(xyz > 0.008856, xyz.clamp(min=1e-9) ** (1 / 3), 7.787 * xyz + 16 / 116)
    return torch.stack((116 * y - 16, 500 * (x - y), 200 * (y - z)))


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_of_different_meaning_look_different(sight: str) -> None:
    fills = {meaning: fill for fill, _, meaning in COLOURS.values() if meaning}
    assert len(fills) == 8
    for one, other in combinations(fills, 2):
        apart = (seen(fills[one], sight) - seen(fills[other], sight)).norm()
        assert apart >= 15, f"{one} / {other}"


def test_the_legend_says_what_every_colour_of_a_box_means(gpt2: Analysis) -> None:
    picture = model_picture("gpt2", gpt2)
    legend = as_svg(picture).partition('<g class="legend">')[2].partition("</g>")[0]
    shown = re.findall(r'fill="(#\w+)" stroke', legend)
    assert len(shown) == len(set(shown)) == legend.count("<text")
    assert set(shown) == {COLOURS[tone][0] for tone in tones(picture.graph) - {"group"}}


# Files.


def test_untrusted_names_are_escaped() -> None:
    picture = Picture(RUDE, (RUDE,), Graph((Box("1", (RUDE,), "kept", RUDE),), ()))
    texts, title = drawn(picture)["kept"][0]
    assert texts == [title] == ['a<script>alert("&")</script>???']
    assert "<script" not in as_html(picture)
    as_png(picture)


def test_a_page_needs_nothing_from_elsewhere(gpt2: Analysis) -> None:
    page = as_html(model_picture("gpt2", gpt2)).replace("http://www.w3.org/2000/svg", "")
    assert "<svg" in page and not re.search(r"https?:|src=|@import|url\((?!#)", page)


def test_a_png_has_the_colours_of_the_verdicts(gpt2: Analysis) -> None:
    image = pytest.importorskip("PIL.Image")
    found = image.open(io.BytesIO(as_png(model_picture("gpt2", gpt2)))).convert("RGB")
    pixels = {colour for _, colour in found.getcolors(1 << 20)}
    assert tuple(bytes.fromhex(COLOURS["centred"][0][1:])) in pixels
    assert tuple(bytes.fromhex(COLOURS["kept"][0][1:])) not in pixels


def said(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["report", str(CHECKPOINTS / "gpt2"), *map(str, arguments)])
    return result.exit_code, result.output


@pytest.mark.parametrize("extra", [(), ("--why", "transformer.h.1.ln_2")])
def test_report_saves(extra: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "it.SVG"
    assert said("--save", file, *extra) == (0, f"drew {file}\n")
    assert ET.parse(file).getroot().tag == f"{SVG}svg"


def test_what_cannot_be_saved_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "is.svg").mkdir()
    for name, hint in (("it.pdf", ".svg, .html, .png"), ("none/it.svg", "is not a directory")):
        status, text = said("--save", tmp_path / name)
        assert status == 1 and hint in text and text.count("\n") == 1
    with pytest.raises(OutputError, match="it is a directory"):
        render.check(tmp_path / "is.svg")
    assert said("--save", tmp_path / "is.svg")[0] == 2
    assert said("--save", tmp_path / "it.svg", CHECKPOINTS / "bert")[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["is.svg"]


@pytest.mark.parametrize(("library", "kind"), [("PIL", ".png"), ("grandalf", ".svg")])
def test_a_missing_library_is_a_hint(
    library: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    status, text = said("--save", tmp_path / f"it{kind}")
    package = {"PIL": "pillow"}.get(library, library)
    assert status == 1 and f"pip install {package}\n" in text and text.count("\n") == 1
