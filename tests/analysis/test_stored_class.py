"""The stored tensors decide which class a checkpoint belongs to, before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import BERT, GPT2, live

from enjoyln_cli import analyze, fold
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.conversion.fold import FoldJob, prepare
from enjoyln_cli.conversion.open_and_analyse import open_and_analyse
from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel
from enjoyln_cli.plan.fold_options import FoldOptions

CONFIGS: dict[str, Any] = {
    "MPNet": transformers.MPNetConfig(**BERT),
    "Bert": transformers.BertConfig(**BERT),
    "GPT2": transformers.GPT2Config(**GPT2),
    "OPT": transformers.OPTConfig(**BERT, ffn_dim=33, word_embed_proj_dim=21),
}


def stored(folder: Path, model_class: str, architectures: Any = (), prefix: str = "") -> Path:
    """A checkpoint of ``model_class`` whose config names other classes, or whose names differ."""
    family = next(name for name in CONFIGS if model_class.startswith(name))
    live(model_class, CONFIGS[family]).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if architectures != ():
        config["architectures"] = architectures
    (folder / "config.json").write_text(json.dumps(config))
    if prefix:
        path = folder / "model.safetensors"
        named = {prefix + name: tensor for name, tensor in load_file(path).items()}
        save_file(named, path, {"format": "pt"})
    return folder


def prepared(source: Path, warnings: list[str] | None = None, **folding: Any) -> FoldJob:
    def on_event(kind: str, text: str) -> None:
        if kind == "warning" and warnings is not None:
            warnings.append(text)

    return prepare(source, None, folding=FoldOptions(**folding), on_event=on_event)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("model_class", "named"),
    [
        ("MPNetModel", ["MPNetForMaskedLM"]),
        ("BertModel", ["BertForPreTraining", "BertForMaskedLM"]),
    ],
)
def test_a_class_with_an_unstored_head_gives_way(
    model_class: str, named: list[str], tmp_path: Path
) -> None:
    """The result folds as much as with ``--model-class``, and computes what its original does."""
    source, warnings = stored(tmp_path / "source", model_class, named), list[str]()
    plan = prepared(source, warnings).plan
    assert plan.model_class == model_class and not set(named) & set(plan.classes)
    expected = f"names {', '.join(sorted(named))}, but not all of its weights"
    assert [w for w in warnings if expected in w]
    alone = prepared(source, model_class=model_class).plan
    assert len(plan.folded) == len(alone.folded) > 0
    assert fold(source, tmp_path / "out").verification.passed


@pytest.mark.parametrize("of_weights", [True, False])
def test_a_report_on_a_directory_plans_what_a_fold_does(of_weights: bool, tmp_path: Path) -> None:
    source = stored(tmp_path, "MPNetModel", ["MPNetForMaskedLM"])
    planned = prepared(source).plan
    if not of_weights:
        (source / "model.safetensors").unlink()
    for found in (open_and_analyse(str(source)).analysis, analyze(source)):
        assert (found.plan == planned) is of_weights
        assert found.plan.model_class == ("MPNetModel" if of_weights else "MPNetForMaskedLM")


@pytest.mark.parametrize(
    ("model_class", "architectures"),
    [
        ("GPT2LMHeadModel", ()),  # the head is tied, and not stored
        ("OPTForCausalLM", ()),
        ("BertForSequenceClassification", ()),
        ("BertModel", None),
        ("GPT2Model", ["GPT2LMHeadModel"]),  # a base model fills a class with a tied head
    ],
)
def test_a_class_that_needs_nothing_more_stays(
    model_class: str, architectures: Any, tmp_path: Path
) -> None:
    source, warnings = stored(tmp_path / "source", model_class, architectures), list[str]()
    expected = (architectures or [model_class])[0]
    assert prepared(source, warnings).plan.model_class == expected
    assert not [text for text in warnings if "not stored" in text]


def test_an_encoder_without_its_pooler_is_still_the_encoder(tmp_path: Path) -> None:
    for named in (["BertModel"], ["BertForSequenceClassification"]):
        source = stored(tmp_path / named[0], "BertModel", named)
        tensors = load_file(source / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if "pooler" not in name}
        save_file(kept, source / "model.safetensors", {"format": "pt"})
        assert prepared(source).plan.model_class == "BertModel"


def test_a_weight_that_every_class_needs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = stored(tmp_path / "source", "GPT2LMHeadModel")
    tensors = load_file(source / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"does not store transformer\.h\.1\.mlp\.c_fc\.weight"):
        prepared(source)


@pytest.mark.parametrize(
    ("model_class", "named", "usable"),
    [
        ("GPT2LMHeadModel", ["MyRanker"], "GPT2Model"),
        ("BertForSequenceClassification", ["MyRanker"], "BertForSequenceClassification"),
        ("BertModel", ["BertModel", "MyRanker"], "BertModel"),
    ],
)
def test_a_class_that_transformers_lacks_is_refused(
    model_class: str, named: list[str], usable: str, tmp_path: Path
) -> None:
    source = stored(tmp_path / "source", model_class, named)
    with pytest.raises(
        UnsupportedModel, match=f"no model class MyRanker; .*--model-class {usable}"
    ):
        prepared(source)
    assert prepared(source, model_class=usable).plan.folded


def test_a_misspelled_class_is_refused_with_the_right_class(tmp_path: Path) -> None:
    source = stored(tmp_path / "source", "GPT2LMHeadModel", ["GPT2LMHeadModle"])
    with pytest.raises(UnsupportedModel, match="did you mean GPT2LMHeadModel?"):
        prepared(source)


@pytest.mark.parametrize(
    ("model_class", "prefix"),
    [
        ("GPT2LMHeadModel", "module."),
        ("BertModel", "module._orig_mod."),
        ("BertForSequenceClassification", "encoder.net."),
    ],
)
def test_a_prefix_of_all_names_is_named_with_the_way_out(
    model_class: str, prefix: str, tmp_path: Path
) -> None:
    source = stored(tmp_path / "source", model_class, prefix=prefix)
    with pytest.raises(BadCheckpoint, match=f"begin with '{prefix}'.* remove it: ") as caught:
        prepared(source)
    path = source / "model.safetensors"
    exec(str(caught.value).partition("remove it: ")[2], {**globals(), "path": path})
    assert prepared(source).plan.folded


@pytest.mark.parametrize("entry", ["state_dict", "model"])
def test_a_pickle_with_its_tensors_in_an_entry(entry: str, tmp_path: Path) -> None:
    source = stored(tmp_path / "source", "GPT2LMHeadModel")
    tensors, path = load_file(source / "model.safetensors"), source / "pytorch_model.bin"
    (source / "model.safetensors").unlink()
    torch.save({"epoch": 3, entry: tensors}, path)
    with pytest.raises(BadCheckpoint, match=f"in its entry '{entry}'; save .* alone: ") as caught:
        prepared(source)
    exec(str(caught.value).partition("alone: ")[2], {**globals(), "path": path})
    assert prepared(source).plan.folded


FOREIGN = [
    (["model.bin", "vocabulary.json"], "CTranslate2"),
    (["q4_k_m.gguf"], "GGUF"),
    (["weights.npz"], "MLX"),
    (["model_config.yaml", "model_weights.ckpt"], "NeMo"),
    (["stt_en.nemo"], "NeMo"),
    (["model.pt", "dict.txt"], "fairseq"),
    (["checkpoint_best.pt", "dict.en.txt"], "fairseq"),
    (["open_clip_config.json", "open_clip_pytorch_model.bin"], "OpenCLIP"),
    (["params.json", "consolidated.00.pth"], "Meta's original"),
    (["zero_to_fp32.py", "latest"], "DeepSpeed"),
]


@pytest.mark.parametrize("config", [None, {"layer_norm_epsilon": 1e-5}, {"model_type": "gpt2"}])
@pytest.mark.parametrize(("files", "what"), FOREIGN)
def test_a_folder_in_another_format_is_named(
    files: list[str], what: str, config: dict[str, Any] | None, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=f"holds an? .*{what}.*; ") as caught:
        prepared(tmp_path)
    assert "model_type" not in str(caught.value)


def test_a_config_of_timm_is_named(tmp_path: Path) -> None:
    config = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"num_classes": 10}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="holds a timm model; create it with timm"):
        prepared(tmp_path)


@pytest.mark.parametrize(("name", "what"), [("a.gguf", "GGUF"), ("b.nemo", "NeMo")])
def test_a_file_in_another_format_is_named(name: str, what: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UnsupportedModel, match=f"holds a {what} model"):
        open_source(str(tmp_path / name))
