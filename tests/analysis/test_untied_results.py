"""Tied weights get separate copies, and the embedding is centred in the weights.

With an untied head, nothing notices a shift of the embedding, so the counts are higher.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from commands import good
from live_models import CHECKPOINTS, moved
from rounding import as_exact
from safetensors.torch import load_file, save_file
from stored_files import opened
from torch import nn

from enjoyln_cli import analyze, optimize
from enjoyln_cli.analysis.analyze import analyze_config
from enjoyln_cli.analysis.stored_names import StoredClass
from enjoyln_cli.analysis.untying import find_untied_classes
from enjoyln_cli.checkpoint.marker import read_marker
from enjoyln_cli.conversion.fold import convert, prepare
from enjoyln_cli.errors import EnjoyLNError, NotCentred, UnsupportedModel
from enjoyln_cli.plan.fold_options import FoldOptions, Options
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.report.model_report import ModelReport
from enjoyln_cli.report.notes import UNTIED, notes

UNTIE = Options(untie=True)
SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 61}
VISION = {k: v for k, v in SMALL.items() if k != "vocab_size"} | {"image_size": 16, "patch_size": 8}
GPT2 = tf.GPT2Config(
    n_layer=2, n_embd=24, n_head=2, vocab_size=61, n_positions=40, bos_token_id=0, eos_token_id=0
)
BART = tf.BartConfig(
    vocab_size=61, d_model=24, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=40, decoder_ffn_dim=40, max_position_embeddings=40,
)  # fmt: skip
BLIP = tf.BlipConfig(
    text_config={**SMALL, "intermediate_size": 40, "encoder_hidden_size": 24},
    vision_config={**VISION, "intermediate_size": 40},
    projection_dim=8,
)
NESTED = tf.VisionEncoderDecoderConfig(
    encoder=tf.ViTConfig(**VISION, intermediate_size=40).to_dict(),
    decoder={**GPT2.to_dict(), "add_cross_attention": True, "is_decoder": True},
)

HEAD = {"lm_head.weight": "transformer.wte.weight"}
CASES: dict[str, tuple[Any, str, tuple[int, int, int], dict[str, str], tuple[str, ...]]] = {
    "gpt2": (GPT2, "GPT2LMHeadModel", (5, 5, 0), HEAD, ("tie_word_embeddings",)),
    "bart": (
        BART,
        "BartForConditionalGeneration",
        (7, 2, 0),
        dict.fromkeys(
            [
                "model.encoder.embed_tokens.weight",
                "model.decoder.embed_tokens.weight",
                "lm_head.weight",
            ],
            "model.shared.weight",
        ),
        ("tie_word_embeddings",),
    ),
    "a nested config": (
        NESTED,
        "VisionEncoderDecoderModel",
        (12, 12, 0),
        {"decoder.lm_head.weight": "decoder.transformer.wte.weight"},
        ("decoder.tie_word_embeddings",),
    ),
    "two configs": (
        BLIP,
        "BlipForConditionalGeneration",
        (13, 5, 0),
        {
            "text_decoder.cls.predictions.decoder.weight": (
                "text_decoder.bert.embeddings.word_embeddings.weight"
            ),
            "text_decoder.cls.predictions.decoder.bias": "text_decoder.cls.predictions.bias",
        },
        ("tie_word_embeddings", "text_config.tie_word_embeddings"),
    ),
}
"""Config, class, (norms, folded, ops), the copies, and the changed entries of the config."""


@pytest.mark.one_case
@pytest.mark.parametrize("case", CASES)
def test_the_plan_treats_tied_weights_as_separate(case: str) -> None:
    config, name, counts, copies, entries = CASES[case]
    plan = analyze_config(config, model_class=name, options=UNTIE).plan
    assert (len(plan.norms), len(plan.folded), len(plan.subtractions)) == counts
    assert {one.tensor: one.stored for one in plan.untied} == copies
    assert {one.parameter: one.source for one in plan.untied} == copies
    assert tuple((s.name, s.value) for s in plan.settings) == tuple((n, False) for n in entries)
    centred = {writer.parameter for writer in plan.centred_weights}
    assert centred.isdisjoint({"lm_head.weight", "decoder.lm_head.weight"})
    tied = analyze_config(config, model_class=name).plan
    assert set(plan.unproven) == set(tied.unproven)
    assert (tied.untied, tied.settings) == ((), ())
    static = [sum(v.status == "in_weights" for v in p.norms) for p in (plan, tied)]
    assert static[0] > static[1]


def stored(config: Any, name: str, folder: Path, **saving: Any) -> Path:
    """A checkpoint of random weights and biases, so that nothing passes by chance."""
    model = moved(getattr(tf, name)(copy.deepcopy(config))).float()
    model.save_pretrained(folder, **saving)
    return folder


@pytest.mark.one_case
@pytest.mark.parametrize("case", ["gpt2", "two configs"])
def test_files_load_in_stock_transformers_and_agree(case: str, tmp_path: Path) -> None:
    config, name, _, copies, entries = CASES[case]
    source = stored(config, name, tmp_path / "model")
    before = load_file(source / "model.safetensors")
    result = convert(source, tmp_path / "out", options=UNTIE)
    assert result.verification.passed and result.verification.identity_error < 1e-12
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert set(after) == set(before) | set(copies)
    centred = {writer.tensor for writer in result.plan.centred_weights}
    for tensor, shared in copies.items():
        assert torch.equal(after[tensor], before[shared]) == (tensor not in centred)
    for tensor in set(before) - centred:
        assert torch.equal(after[tensor], before[tensor])
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    for entry in entries:
        value = written
        for part in entry.split("."):
            value = value[part]
        assert value is False
    model, info = getattr(tf, name).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert not model.all_tied_weights_keys
    for tensor in copies:
        assert torch.equal(model.get_parameter(tensor), after[tensor])


@pytest.mark.slow
def test_a_base_model_is_untied_for_the_head_that_loads_it(tmp_path: Path) -> None:
    source = stored(GPT2, "GPT2Model", tmp_path / "model")
    result = convert(source, tmp_path / "out", options=UNTIE)
    assert result.plan.classes == ("GPT2Model", "GPT2LMHeadModel")
    assert [(u.tensor, u.stored) for u in result.plan.untied] == [("lm_head.weight", "wte.weight")]
    assert result.plan.subtractions == ()
    original = tf.GPT2LMHeadModel.from_pretrained(source, dtype=torch.float64).eval()
    head, info = tf.GPT2LMHeadModel.from_pretrained(
        tmp_path / "out", dtype=torch.float64, output_loading_info=True
    )
    assert not info["missing_keys"]
    ids = torch.randint(0, 61, (3, 17))
    with torch.no_grad():
        exact, found = original(ids).logits, head.eval()(ids).logits
    assert as_exact(found, exact, exact, torch.float32)
    optimize(tf.GPT2Model.from_pretrained(tmp_path / "out"))
    optimize(head)


@pytest.mark.slow
def test_a_tensor_stored_in_two_files_stays_in_both(tmp_path: Path) -> None:
    source = stored(GPT2, "GPT2LMHeadModel", tmp_path / "model")
    held = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    name = "lm_head.weight"
    held[name] = held["transformer.wte.weight"].clone()
    places = {n: f"model-0000{1 + (n == name)}-of-00002.safetensors" for n in held}
    for file in set(places.values()):
        part = {n: t for n, t in held.items() if places[n] == file}
        save_file(part, source / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert prepare(source, None, folding=FoldOptions(options=UNTIE)).bytes_added() == 0
    result = convert(source, tmp_path / "out", options=UNTIE)
    assert [one.tensor for one in result.plan.untied] == [name]
    assert result.verification.passed
    after = load_file(tmp_path / "out" / places[name])
    assert torch.equal(after[name], held[name])


@pytest.mark.slow
def test_a_head_that_is_stored_in_the_place_of_the_embedding(tmp_path: Path) -> None:
    source = stored(GPT2, "GPT2LMHeadModel", tmp_path / "model")
    held = load_file(source / "model.safetensors")
    held["lm_head.weight"] = held.pop("transformer.wte.weight")
    save_file(held, source / "model.safetensors", metadata={"format": "pt"})
    result = convert(source, tmp_path / "out", options=UNTIE)
    assert [(u.tensor, u.stored) for u in result.plan.untied] == [
        ("transformer.wte.weight", "lm_head.weight")
    ]
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(after["lm_head.weight"], held["lm_head.weight"])
    rows = after["transformer.wte.weight"].double()  # centred, then rounded once
    assert float(rows.mean(1).abs().max()) <= torch.finfo(torch.float32).eps * rows.abs().max() / 2


@pytest.mark.slow
def test_a_head_that_a_norm_is_fused_into_is_untied(
    tmp_path: Path,
) -> None:
    config = tf.CTRLConfig(vocab_size=31, n_positions=12, n_embd=12, dff=20, n_layer=2, n_head=3)
    source = stored(config, "CTRLLMHeadModel", tmp_path / "model")
    only, fusing = {"model_class": "CTRLLMHeadModel"}, Options(untie=True, merge="affine")
    assert analyze_config(config, options=UNTIE, **only).plan.untied == ()
    result = convert(source, tmp_path / "out", options=fusing, **only)
    assert [one.tensor for one in result.plan.untied] == ["lm_head.weight"]
    readers = {reader.weight.tensor for m in result.plan.fused for reader in m.readers}
    assert "lm_head.weight" in readers
    assert result.verification.passed and result.verification.identity_error < 1e-12


@pytest.mark.parametrize("differ", [True, False])
def test_a_config_may_claim_a_tie_that_the_tensors_contradict(tmp_path: Path, differ: bool) -> None:
    config = copy.deepcopy(GPT2)
    config.tie_word_embeddings = False
    model = tf.GPT2LMHeadModel(config)
    if not differ:
        with torch.no_grad():
            model.lm_head.weight.copy_(model.transformer.wte.weight)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    plan = prepare(tmp_path, None).plan
    centred = {writer.parameter for writer in plan.centred_weights}
    assert ("transformer.wte.weight" in centred) is differ
    assert len(plan.subtractions) == (0 if differ else 1)
    assert len(plan.folded) == 5


# Refusals, and models that need no copies


def test_a_config_class_that_always_ties(tmp_path: Path) -> None:
    config = tf.ViltConfig(**SMALL, intermediate_size=40, image_size=16, patch_size=8)
    with pytest.raises(UnsupportedModel, match=r"ViltConfig loads tie_word_embeddings as true"):
        analyze_config(config, model_class="ViltForMaskedLM", options=UNTIE)


class Joined(tf.GPT2PreTrainedModel):
    """Ties weights in its own code, and ignores its config."""

    _tied_weights_keys = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.inside = nn.Embedding(config.vocab_size, config.n_embd)
        self.outside = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.outside.weight = self.inside.weight
        self.post_init()


def test_a_tie_that_the_config_does_not_decide() -> None:
    model = Joined(GPT2)
    found = StoredClass(model, {"inside.weight": ("inside.weight",)}, {}, ())
    shapes = {"inside.weight": (61, 24)}
    with pytest.raises(UnsupportedModel, match=r"ties outside\.weight to inside\.weight even if"):
        find_untied_classes(GPT2, [found], shapes, None)


@pytest.mark.slow
def test_a_class_that_settles_its_attention_stays_the_same() -> None:
    config = tf.BigBirdConfig(
        vocab_size=31, hidden_size=12, num_hidden_layers=1, num_attention_heads=3,
        intermediate_size=20, max_position_embeddings=64,
    )  # fmt: skip
    plan = analyze_config(config, model_class="BigBirdForMaskedLM", options=UNTIE).plan
    assert "cls.predictions.decoder.weight" in {one.tensor for one in plan.untied}


@pytest.mark.parametrize("options", [{"merge": "both"}, {"widen_to": 0}])
def test_an_invalid_option(options: dict[str, Any]) -> None:
    with pytest.raises(EnjoyLNError, match="but must be"):
        Options(**options)


def test_a_model_in_memory_is_not_untied() -> None:
    with pytest.raises(EnjoyLNError, match="pass its config"):
        analyze(tf.GPT2LMHeadModel(GPT2), options=UNTIE)


def test_nothing_is_copied_where_nothing_is_tied(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    for name, options in (("plain", Options()), ("out", UNTIE)):
        convert(
            CHECKPOINTS / "phi",
            tmp_path / name,
            options=options,
            verify=False,
            on_event=lambda *event: told.append(event),
        )
    warnings = [text for level, text in told if level == "warning"]
    assert warnings == ["--untie changes nothing here: no LayerNorm depends on a tied weight"]
    for name in ("model.safetensors", "config.json"):
        plain, out = ((tmp_path / kind / name).read_bytes() for kind in ("plain", "out"))
        assert plain == out


# Marker and report


def gpt2_plan() -> Plan:
    return analyze_config(GPT2, model_class="GPT2LMHeadModel", options=UNTIE).plan


@pytest.mark.slow
@pytest.mark.parametrize("same_object", [True, False])
def test_the_marker_tells_what_was_untied_and_a_tie_is_noticed(
    tmp_path: Path, same_object: bool
) -> None:
    out = convert(CHECKPOINTS / "gpt2", tmp_path / "out", options=UNTIE, verify=False).out
    config = json.loads((out / "config.json").read_text())
    assert config["enjoyln"]["version"] == 1
    (untied,) = read_marker(config).plan.untied
    assert (untied.parameter, untied.source) == ("lm_head.weight", "transformer.wte.weight")
    model = tf.GPT2LMHeadModel.from_pretrained(out)
    table = model.transformer.wte.weight
    model.lm_head.weight = table if same_object else torch.nn.Parameter(table.data)
    with pytest.raises(
        NotCentred, match="lm_head.weight and transformer.wte.weight are tied again"
    ):
        optimize(model)


@pytest.mark.slow
def test_the_command_line_says_what_is_untied_and_what_it_costs() -> None:
    source = CHECKPOINTS / "gpt2"
    size = opened(source).tensors["transformer.wte.weight"].nbytes
    found = json.loads(good("fold", source, "--untie", "--dry-run", "--json"))
    plain = json.loads(good("fold", source, "--dry-run", "--json"))
    assert found["bytes_written"] - plain["bytes_written"] == found["bytes_added"] == size
    assert (found["in_weights"], found["tensors"]) == (7, plain["tensors"] + 1)
    assert (plain["in_weights"], plain["bytes_added"]) == (0, 0)
    text = good("fold", source, "--untie", "--dry-run")
    assert "store lm_head.weight separately, as a copy of transformer.wte.weight" in text
    assert UNTIED in text and UNTIED not in good("fold", source, "--dry-run")
    assert f"{size / 1000:.1f} kB more than the original" in text
    why = good("report", source, "--untie", "--why", "transformer.h.0.ln_1")
    assert "transformer.wte.weight (dimension 1, 96 elements): centred in the weights" in why


def test_the_report_counts_the_copy() -> None:
    report = ModelReport("x", gpt2_plan())
    assert f"  {61 * 24:,} parameters more than the original" in notes(report)
    plan = report.to_json()["plan"]
    copied = {"parameter": "lm_head.weight", "source": "transformer.wte.weight"}
    assert plan["untied"] == [copied | {"shape": [61, 24]}]
    assert plan["settings"] == [{"name": "tie_word_embeddings", "value": False}]
