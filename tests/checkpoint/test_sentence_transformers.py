"""sentence-transformers pipelines: the transformer is folded, everything else is copied."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import enjoyln
from live_models import CHECKPOINTS
from rounding import as_exact
from sentence_encoder import sentence_encoder

from enjoyln_cli import analyze, fold, verify
from enjoyln_cli.checkpoint.sentence_transformers import transformer_folder
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel
from enjoyln_cli.publish.push import publishing_objection

RECORDS = {"enjoyln_plan.json", "enjoyln_recipe.yaml", "enjoyln_verify.json"}
CHANGED = {"config.json", "model.safetensors"} | RECORDS


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2))


def files(root: Path) -> dict[str, bytes]:
    found = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


@pytest.mark.one_case
@pytest.mark.parametrize("inside", ["0_Transformer", ""])
def test_the_transformer_is_folded_and_the_rest_comes_along(inside: str, tmp_path: Path) -> None:
    source, out = sentence_encoder(tmp_path / "source", inside), tmp_path / "out"
    plan = fold(source, out, verify=False).plan
    assert [verdict.norm for verdict in plan.folded] == ["embeddings.LayerNorm"]
    assert verify(out).passed
    before, after = files(source), files(out)
    changed = {str(Path(inside, name)) for name in CHANGED} | {"README.md"}
    assert set(after) == set(before) | changed
    assert {name for name in before if before[name] != after[name]} <= changed
    assert "enjoyln" in json.loads(after[str(Path(inside, "config.json"))])


def test_a_verification_holds_for_the_whole_pipeline(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fold(sentence_encoder(tmp_path / "source"), out)

    def complaint(name: str) -> str:
        """What is said after a space was written to the end of the file."""
        before = (out / name).read_bytes() if (out / name).exists() else None
        (out / name).write_bytes((before or b"") + b" ")
        said = publishing_objection(open_source(str(out)))
        (out / name).unlink() if before is None else (out / name).write_bytes(before)
        return said

    dense = "2_Dense/model.safetensors"
    assert complaint("README.md") == ""
    assert f"{dense} has changed since" in complaint(dense)
    assert "modules.py was added" in complaint("modules.py")


@pytest.mark.slow
def test_every_command_takes_the_whole_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence_encoder(tmp_path / "source", "0_Transformer")
    monkeypatch.chdir(tmp_path)
    done = enjoyln("report", "source", "--json")
    assert json.loads(done.output)["become_rmsnorm"] == 1, done.output
    monkeypatch.chdir(tmp_path / "source")
    done = enjoyln("fold", ".", "-o", "../out", "--json")
    assert done.exit_code == 0, done.output
    done = enjoyln("verify", "../out")
    assert done.exit_code == 0, done.output
    done = enjoyln("fold", "../out", "-o", "../again", "-q")
    assert (done.exit_code, done.output.count("\n")) == (1, 1)
    assert "result of an earlier fold" in done.output
    done = enjoyln("fold", ".", "-o", "new")
    assert done.exit_code == 1 and "lies inside the source" in done.output


def test_the_embeddings_are_the_same(tmp_path: Path) -> None:
    loaded = pytest.importorskip("sentence_transformers").SentenceTransformer
    source, out = sentence_encoder(tmp_path / "source"), tmp_path / "out"
    fold(source, out)
    sentences = ["a short one", "another sentence, somewhat longer than the first", "x"]
    settings = {"device": "cpu", "model_kwargs": {"dtype": torch.float64}}
    expected, got = (
        loaded(str(folder), **settings).double().encode(sentences, convert_to_tensor=True)
        for folder in (source, out)
    )
    assert expected.shape == (3, 9) and as_exact(got, expected, expected, torch.float32)


@pytest.mark.slow
def test_hidden_states_that_a_pipeline_reads_are_outputs(tmp_path: Path) -> None:
    """GPT-2's base model folds in its weights alone. Where the streams into both of its blocks are
    read, only what the second block adds may change: behind a centring of its input its two norms
    fold, and the last.
    """
    settings = {"model_type": "gpt2", "n_layer": 2, "n_embd": 24, "n_head": 3}
    write(tmp_path / "config.json", settings)
    plan = analyze(tmp_path, model_class="GPT2Model").plan
    assert [v.status for v in plan.norms] == ["in_weights"] * 5
    read = {"config_args": {"output_hidden_states": True}}
    write(tmp_path / "sentence_bert_config.json", read)
    plan = analyze(tmp_path, model_class="GPT2Model").plan
    assert [v.status for v in plan.norms] == ["stays_layernorm"] * 2 + ["with_subtraction"] * 3
    assert [(op.module, op.place) for op in plan.subtractions] == [("h.1", "input")]
    assert all(writer.parameter.startswith("h.1.") for writer in plan.centred_weights)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("../source", "which is not a folder"),
        ("0_Transformer/../../source", "which is not a folder"),
        ("/etc", "which is not a folder"),
        ("C:/models", "which is not a folder"),
        ("..\\source", "which is not a folder"),
        ("link", "which is not a folder"),
        ("a\nb", "names no path in"),
        (7, "names no path in"),
        (None, "names no path in"),
        ("1_Other", "1_Other is missing in"),
    ],
)
def test_a_path_that_leads_nowhere(path: Any, words: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(CHECKPOINTS / "bert", source / "0_Transformer")
    (source / "link").symlink_to(tmp_path)
    write(source / "modules.json", [{"idx": 0, "name": "0", "path": path, "type": "T"}])
    done = enjoyln("fold", source, "-o", tmp_path / "out", "-q")
    assert (done.exit_code, done.output.count("\n")) == (1, 1), done.output
    assert words in done.output
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_a_later_module_that_leads_out_is_refused_too(tmp_path: Path) -> None:
    listed = [{"path": "0_Transformer"}, {"path": "../1_Pooling"}]
    write(tmp_path / "modules.json", listed)
    (tmp_path / "0_Transformer").mkdir()
    with pytest.raises(BadCheckpoint, match=r"\.\./1_Pooling"):
        transformer_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "{}", "[]", "null", '["0_Transformer"]'])
def test_a_list_of_modules_that_is_damaged(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(BadCheckpoint, match=r"modules\.json.*fetch it again"):
        transformer_folder(tmp_path)


def test_a_pipeline_without_a_transformer(tmp_path: Path) -> None:
    write(tmp_path / "modules.json", [{"path": "0_WordEmbeddings"}, {"path": "1_Pooling"}])
    (tmp_path / "0_WordEmbeddings").mkdir()
    with pytest.raises(UnsupportedModel, match=r"the first module of its modules\.json"):
        analyze(tmp_path)
