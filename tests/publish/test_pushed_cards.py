"""What a push says of where a result came from: in its card, and before it publishes a path."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from commands import good, refused
from hub_repositories import TOKEN, Hub
from huggingface_hub import ModelCard
from live_models import CHECKPOINTS

from enjoyln_cli.text import number

pytestmark = pytest.mark.usefixtures("quiet_hub")
GPT2 = CHECKPOINTS / "gpt2"
CARD = b"---\nlicense: mit\ntags: [tiny]\n---\n# A tiny model\n\nTrained on a licence.\n"
push = partial(good, "push", HF_TOKEN=TOKEN)


@pytest.fixture(scope="module")
def hub(hub_server: Hub) -> Hub:
    hub_server.tokens[TOKEN] = "me"
    files = {path.name: path.read_bytes() for path in GPT2.iterdir()}
    hub_server.add("org/carded", {**files, "README.md": CARD})
    return hub_server


@pytest.mark.slow
def test_a_push_tells_where_a_local_source_lay(tmp_path: Path) -> None:
    good("fold", GPT2, "-o", tmp_path / "out", "--samples", 1)
    words = (tmp_path / "out", "me/local", "--dry-run", "--json")
    (warning,) = json.loads(push(*words))["warnings"]
    files = "config.json, enjoyln_verify.json"
    assert warning == f"{files} would publish the path {GPT2}"
    telling = [
        path for path in (tmp_path / "out").iterdir() if str(GPT2).encode() in path.read_bytes()
    ]
    assert sorted(path.name for path in telling) == files.split(", "), "no other file tells it"
    (tmp_path / "out" / "enjoyln_verify.json").write_text('{"source": "~/secret/gpt2"}')
    assert json.loads(push(*words, "--force"))["warnings"] == [
        f"config.json would publish the path {GPT2}",
        "enjoyln_verify.json would publish the path ~/secret/gpt2",
    ]
    assert str(GPT2.parent) not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_a_quantised_result_has_a_card_and_is_pushed(hub: Hub, home: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "gpt2-int8", ("--text", GPT2.parents[2] / "LICENSE")
    few = ("--rotations", 0, "--inputs", 4, "--token", TOKEN, "--quiet")
    good("quantize", "org/carded", "-o", out, *text, *few)
    card = ModelCard.load(out / "README.md")
    assert card.data.base_model == "org/carded" and card.data.license == "mit"
    assert card.data.base_model_relation == "quantized"
    assert card.data.tags == ["tiny", "enjoyln", "onnx", "transformers.js"]
    record = json.loads((out / "enjoyln_precisions.json").read_text())["w8a8"]
    measured = f"| error | {number(record['held_out']['error'])} |"
    for words in (measured, "on 4 inputs", '"gpt2-int8")', "--scheme w8a8", "Trained on a licence"):
        assert words in card.text, words
    push(out, "me/gpt2-int8", "--yes")
    there = hub.repositories["me/gpt2-int8"].files()
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert set(there) - {".gitattributes"} == written
    assert '"me/gpt2-int8")' in there["README.md"].decode()
    (out / "tokenizer.json").write_text("{}")
    error = refused("push", out, "me/forced-int8", "--yes", HF_TOKEN=TOKEN)
    assert "tokenizer.json has changed since it was written; run `enjoyln verify" in error
    assert "with your data, or push it anyway with --force" in error
    push(out, "me/forced-int8", "--yes", "--force")
    there = hub.repositories["me/forced-int8"].files()
    assert "--force`**: tokenizer.json has changed" in there["README.md"].decode()
