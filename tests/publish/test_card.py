"""The model card: its content, also from the original's card, and what a push changes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from live_models import CHECKPOINTS
from sentence_encoder import sentence_encoder
from stored_files import stored_plan

from enjoyln_cli import fold
from enjoyln_cli.checkpoint.open_options import OpenOptions
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.plan.fold_options import FoldOptions, Options, WriteOptions
from enjoyln_cli.publish import card
from enjoyln_cli.publish.written_card import section, write_card
from enjoyln_cli.report.notes import UNTIED
from enjoyln_cli.verification.verify_options import CheckOptions

OWN = """\
---
license: other
license_name: tiny-1
license_link: LICENSE
language: [en, de]
pipeline_tag: text-generation
tags: tiny
datasets: [me/text]
base_model: me/teacher
base_model_relation: finetune
model-index:
- name: x
  results: []
---

# A tiny model

A table of {{ braces }} and {% tags %} that are no template.
"""


def folded(tmp_path: Path, own: str = "", name: str = "gpt2", **options: Any) -> Path:
    """Fold a checkpoint that has the model card ``own``; returns the result's directory."""
    source, out = tmp_path / "tiny", tmp_path / "tiny-rms"
    shutil.copytree(CHECKPOINTS / name, source)
    if own:
        (source / "README.md").write_text(own)
    fold(source, out, **options)
    return out


def made(out: Path) -> ModelCard:
    return ModelCard.load(out / "README.md")


def made_from(own: bytes, out: Path, folder: Path) -> ModelCard:
    """The card that the result ``out`` would have if its original had the card ``own``."""
    copied = Path(shutil.copytree(out, folder))
    (copied / "README.md").write_bytes(own)
    source = Source("org/model", Path("x"), "c0ffee")
    write_card(copied, stored_plan(out), source, (), copied)
    return made(copied)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verified result whose original has a card; tests only read it."""
    return folded(tmp_path_factory.mktemp("card"), OWN, dtype="bfloat16")


def test_the_originals_metadata_comes_along(out: Path) -> None:
    found = made(out).data.to_dict()
    assert found == {
        "license": "other",
        "license_name": "tiny-1",
        "license_link": "LICENSE",
        "language": ["en", "de"],
        "pipeline_tag": "text-generation",
        "library_name": "transformers",
        "tags": ["tiny", "enjoyln", "rmsnorm"],
        "datasets": ["me/text"],
        "base_model": "me/teacher",
        "base_model_relation": "finetune",
    }, "results of the original are its own"
    assert "where the Hub lists" not in made(out).text, "its own relation was carried over"


def test_a_model_of_the_hub_is_the_base_model() -> None:
    source = Source("org/model", Path("x"), "c0ffee")
    own = {"base_model": "org/teacher", "tags": ["a", "rmsnorm"], "language": ["sv", False]}
    found = card.metadata(own, source, Path("x"), [card.TAG, card.FOLDED_TAG])
    assert found["language"] == ["sv", "no"], "YAML reads Norwegian as false"
    assert (found["base_model"], found["base_model_relation"]) == ("org/model", "quantized")
    assert found["tags"] == ["a", "rmsnorm", "enjoyln"]


def test_the_originals_card_is_kept_below(out: Path) -> None:
    text = made(out).text
    own = OWN.rpartition("---\n")[2].strip()
    assert text.rstrip().endswith(own) and text.index(card.END) < text.index(own)


@pytest.mark.parametrize(
    "own",
    [b"---\nlicense: [mit\n---\n# Mine \xff\n", b"---\n- a list\n---\n# Mine\n"],
)
def test_a_card_that_is_damaged_is_kept_as_text(out: Path, tmp_path: Path, own: bytes) -> None:
    found = made_from(own, out, tmp_path / "copy")
    assert found.data.to_dict()["tags"] == ["enjoyln", "rmsnorm"]
    assert found.text.rstrip().endswith(own.decode(errors="replace").strip())


def test_a_rotated_model_is_not_called_an_rmsnorm_model(tmp_path: Path) -> None:
    options = Options(fold=False, rotate=True, untie=True)
    out = folded(tmp_path, options=options, verify=False)
    found = made(out)
    assert found.data.to_dict()["tags"] == ["enjoyln"]
    later = section(out, "", "me/rotated", ("GPT2LMHeadModel",))
    for text in (found.text, later):
        assert "RMSNorm" not in text.partition("bibtex")[0] and "compute LayerNorm" not in text
        assert "from_pretrained" in text and "enjoyln_cli" not in text


def test_huge_metadata_is_not_expanded(out: Path, tmp_path: Path) -> None:
    """YAML aliases that expand to 10^9 texts, and metadata longer than the limit."""
    levels = [f"- &{a}0 [x, x, x, x, x, x, x, x, x, x]" for a in "ab"]
    levels += [f"- &{a}{i} [{f'*{a}{i - 1}, ' * 10}]" for i in range(1, 10) for a in "ab"]
    listed = "\n".join(levels)
    own = f"---\nlicense: mit\ndatasets:\n{listed}\ntags: [*a9, *b9, tiny]\n---\n# Mine\n"
    found = made_from(own.encode(), out, tmp_path / "one").data.to_dict()
    assert (found["license"], found["tags"]) == ("mit", ["tiny", "enjoyln", "rmsnorm"])
    assert "datasets" not in found
    long = "---\nlicense: mit\ntags:\n" + "- x\n" * 100_000 + "---\n# Mine\n"
    other = made_from(long.encode(), out, tmp_path / "two")
    assert other.data.license is None and other.text.rstrip().endswith("# Mine")


def test_line_ends_and_a_byte_order_mark_are_no_obstacle(out: Path, tmp_path: Path) -> None:
    own = ("\ufeff" + OWN.replace("\n", "\r\n")).encode()
    found = made_from(own, out, tmp_path / "copy")
    assert found.data.license_name == "tiny-1"
    assert "\r" not in str(found)


def test_the_card_says_what_was_done(out: Path) -> None:
    text = made(out).text
    assert "# tiny-rms\n" in text and "`tiny`, in which 7 of 7 LayerNorms" in text
    assert "converted 7 of 7 LayerNorms, using 1 added mean subtraction; 13 tensors centred" in text
    assert "  mean subtraction added at the output of transformer.wte: " in text
    assert "  all floating weights were converted to bfloat16\n" in text
    assert "All outputs stay the same. " in text
    assert "The proof holds for `GPT2LMHeadModel`, `GPT2Model`. Called with an input that" in text
    assert (
        "  LayerNorm is used in calls with encoder_attention_mask, encoder_hidden_states\n" in text
    )
    assert "enjoyln fold ./tiny -o tiny-rms --dtype bfloat16\n" in text
    assert re.search(r"enjoyln \d+\.\d+.*torch \d+.*transformers \d+", text)
    assert text.count("```bibtex") == 1 and "Pre-{RMSNorm}" in text and "2605.14521" in text
    assert str(out.parent) not in str(made(out))


def test_kept_norms_have_their_reasons(tmp_path: Path) -> None:
    text = made(folded(tmp_path, name="bert", model_class="BertModel", verify=False)).text
    assert re.search(r"\n  6 stay LayerNorm: .*not zero-mean\n    encoder.layer.0-2.att", text)
    assert "--model-class BertModel --no-verify" in text
    assert "has not been verified" in text and "identity error" not in text
    assert 'BertModel.from_pretrained("tiny-rms")' in text, "the saved class is not proven"
    assert 'from_pretrained("tiny-rms", BertModel)' in text


def test_the_card_says_what_an_engine_may_do_to_an_untied_head(tmp_path: Path, out: Path) -> None:
    text = made(folded(tmp_path, options=Options(untie=True), verify=False)).text
    assert "`lm_head.weight` was tied to another weight" in text and "untied_heads.md" in text
    assert "store lm_head.weight separately" in text and UNTIED not in text
    assert "untied_heads.md" not in made(out).text


def test_the_card_has_the_numbers_of_the_verification(out: Path) -> None:
    found = json.loads((out / "enjoyln_verify.json").read_text())
    text = made(out).text
    summary = found["summary"]
    assert summary[0].upper() + summary[1:] + "." in text
    assert f"| identity error | {found['identity_error']:.1e} |  | " in text
    assert f"| ratio | {found['ratio']:.3g} | 1 | limit 1.25 (" in text
    assert f"over {found['rows']} inputs" in text


def test_the_examples_of_the_card_run(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(out.parent)
    stock, fast = re.findall(r"```python\n(.*?)```", made(out).text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(stock, names)
    assert type(names["model"].transformer.h[0].ln_1).__name__ == "LayerNorm"
    exec(fast, names)
    assert type(names["model"].transformer.h[0].ln_1).__name__ == "RMSNorm"


def test_a_push_renews_its_section_and_no_more(out: Path) -> None:
    text = (out / "README.md").read_text()
    mine = text.replace("# tiny-rms", "# My title").replace("How it was made", "My heading")
    found = card.replace_section(mine, "NEW \\1 SECTION")
    assert "# My title" in found and "My heading" in found and "NEW \\1 SECTION" in found
    assert "identity error" not in found and "A tiny model" in found
    taken_out = mine.replace(card.BEGIN, "")
    assert card.replace_section(taken_out, "NEW") == taken_out
    again = card.replace_section(found, "NEW \\1 SECTION")
    assert again == found


def test_code_of_its_own_is_asked_for_by_name(tmp_path: Path) -> None:
    config = {"architectures": ["Own"], "auto_map": {"AutoModel": "modeling_own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = section(tmp_path, "", "me/x", ["Own"])
    assert 'AutoModel.from_pretrained("me/x", trust_remote_code=True)' in text


@pytest.mark.slow
def test_a_sentence_encoder_is_loaded_as_a_sentence_encoder(tmp_path: Path) -> None:
    fold(sentence_encoder(tmp_path / "encoder"), tmp_path / "out", model_class="BertModel")
    found = made(tmp_path / "out")
    assert "identity error" in found.text
    assert found.data.library_name == "sentence-transformers"
    assert 'SentenceTransformer("out")' in found.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], []),
        ([FoldOptions(outputs=("logits", "*_embeds"))], ["--outputs", "logits,*_embeds"]),
        ([FoldOptions(recipe=Path("/home/me/my recipe.yaml"))], ["--recipe", "my recipe.yaml"]),
        ([OpenOptions(trust_remote_code=True), FoldOptions()], ["--trust-remote-code"]),
        (
            [WriteOptions(max_shard_size=5 * 10**9, jobs=2, force=True)],
            ["--max-shard-size", "5000000000"],
        ),
        (
            [
                FoldOptions(options=Options(widen_mlp=True, values=False)),
                CheckOptions(verify=False),
            ],
            ["--widen-mlp", "--no-values", "--no-verify"],
        ),
    ],
)
def test_the_command_can_be_given_again(options: list[Any], words: list[str]) -> None:
    source = Source("org/model", Path("x"), "c0ffee")
    found = shlex.split(card.command(source, Path("/tmp/out"), options))
    assert found == ["enjoyln", "fold", "org/model", "-o", "out", *words, "--revision", "c0ffee"]
