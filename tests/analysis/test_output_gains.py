"""Outputs that a user does not need may change, and all others stay the same.

CLIP's vision tower returns its last hidden state before the final norm. By default, every norm of
the tower but the first therefore stays.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import good, refused
from stored_files import with_marker
from tiny_models import GPT2, calls, converted, error, live
from torch import nn
from transformers import CLIPConfig, GPT2Config

from enjoyln_cli import EnjoyLNError, RecipeError, analyze, fold, load_recipe, verify
from enjoyln_cli.checkpoint.marker import read_marker
from enjoyln_cli.comparison.run import choose_outputs, tensors
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.outputs import by_field, is_fed_back, match_names
from enjoyln_cli.recipe.read import parse_recipe
from enjoyln_cli.recipe.write import dump_recipe

TOWER = {
    "hidden_size": 21,
    "intermediate_size": 33,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "projection_dim": 10,
}
TEXT = {"vocab_size": 37, "max_position_embeddings": 31, "bos_token_id": 1, "eos_token_id": 2}
CLIP = CLIPConfig(
    text_config={**TOWER, **TEXT, "pad_token_id": 0},
    vision_config={**TOWER, "image_size": 15, "patch_size": 5},
    projection_dim=10,
    architectures=["CLIPModel"],
)
WANTED = ("logits_per_image", "image_embeds", "text_embeds")
UNREAD = "vision_model_output.last_hidden_state"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip") / "source"
    live("CLIPModel", CLIP).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def out(source: Path) -> Path:
    """The source, folded and verified for chosen outputs."""
    good("fold", source, "-o", source.parent / "out", "--outputs", ",".join(WANTED))
    return source.parent / "out"


def clip_outputs(model: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    ids = torch.randint(3, 37, (2, 7))
    ids[:, -1] = 2
    pixels = torch.randn(2, 3, 15, 15, dtype=torch.float64)
    with torch.no_grad():
        return dict(tensors(model(input_ids=ids, pixel_values=pixels)))


def test_more_norms_fold_and_the_wanted_outputs_stay() -> None:
    plan = analyze(CLIP, outputs=WANTED).plan
    assert (plan.outputs, plan.classes) == (WANTED, ("CLIPModel",))
    assert len(analyze(CLIP).plan.folded) == 6 and len(plan.folded) == len(plan.norms) == 11
    original = live("CLIPModel", CLIP)
    before, after = clip_outputs(original), clip_outputs(converted(original, plan))
    worst = {
        name: float((after[name] - b).abs().max() / b.abs().max()) for name, b in before.items()
    }
    changed = {name for name, value in worst.items() if value > 1e-12}
    assert changed == {UNREAD} and worst[UNREAD] > 1e-3


def test_by_default_every_output_stays() -> None:
    original = live("CLIPModel", CLIP)
    before, after = clip_outputs(original), clip_outputs(converted(original, analyze(CLIP).plan))
    assert {"text_model_output.last_hidden_state", UNREAD} <= set(before)
    for name, value in before.items():
        assert torch.allclose(after[name], value, rtol=1e-11, atol=1e-12), name


@pytest.mark.slow
def test_marker_recipe_and_check_carry_the_choice(out: Path) -> None:
    assert read_marker(json.loads((out / "config.json").read_text())).plan.outputs == WANTED
    recipe = load_recipe(out / "enjoyln_recipe.yaml")
    assert recipe.outputs == WANTED
    assert parse_recipe(dump_recipe(recipe), where="again") == recipe
    found = verify(out)
    assert found.passed and found.outputs == WANTED
    assert "in the outputs logits_per_image, image_embeds, text_embeds" in found.summary
    assert json.loads((out / "enjoyln_verify.json").read_text())["outputs"] == list(WANTED)


def test_hidden_states_stay_where_they_are_named(tmp_path: Path) -> None:
    """The hidden states of a GPT-2 of two blocks, whose last norms fold."""
    original = live("GPT2LMHeadModel", GPT2Config(**GPT2))
    original.save_pretrained(tmp_path / "source")
    wanted = ("logits", "hidden_states.*")
    result = fold(tmp_path / "source", tmp_path / "out", outputs=wanted)
    assert len(result.plan.folded) == 3
    found = verify(tmp_path / "out")
    assert found.passed and found.outputs == wanted

    ids = torch.randint(3, 37, (2, 7))
    folded = converted(original, result.plan)
    with torch.no_grad():
        before, after = (m(ids, output_hidden_states=True) for m in (original, folded))
    for a, b in zip(before.hidden_states[:2], after.hidden_states[:2], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(after.logits, before.logits, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_verify_compares_what_the_marker_says(out: Path, tmp_path: Path) -> None:
    found = verify(with_marker(out, tmp_path / "edited", lambda m: m["plan"].pop("outputs")))
    assert not found.passed and "the edits change the function" in found.summary


@pytest.mark.slow
def test_a_recipe_brings_its_outputs(source: Path, out: Path, tmp_path: Path) -> None:
    recipe = out / "enjoyln_recipe.yaml"
    again = fold(source, tmp_path / "again", recipe=recipe)
    assert again.plan.outputs == WANTED and len(again.plan.folded) == 11
    assert (tmp_path / "again" / recipe.name).read_text() == recipe.read_text()
    bare = tmp_path / "bare.yaml"
    lines = recipe.read_text().splitlines(keepends=True)
    bare.write_text("".join(line for line in lines if not line.startswith("outputs:")))
    with pytest.raises(
        RecipeError, match="layer_norm1: the recipe has {with_subtraction: .*, the proof"
    ):
        fold(source, tmp_path / "bare", recipe=bare)


@pytest.mark.slow
def test_report_says_what_each_choice_would_gain() -> None:
    (gain,) = analyze(CLIP).gains()
    assert (gain.without, gain.norms) == ((UNREAD,), 5)
    assert "text_model_output" in gain.outputs and "logits_per_text" in gain.outputs
    more = analyze(CLIP, outputs=gain.outputs)
    assert len(more.plan.folded) == 6 + gain.norms and more.gains() == ()
    assert analyze(GPT2Config(**GPT2)).gains() == ()


@pytest.mark.slow
def test_report_prints_the_gain_and_the_choice(source: Path) -> None:
    gain = f"if {UNREAD} may change: 5 more LayerNorms become RMSNorm (--outputs image_embeds,"
    assert gain in good("report", source)
    text = good("report", source, "--outputs", "logits_*,*_embeds")
    assert (
        "only these outputs stay the same: logits_*, *_embeds" in text and "may change" not in text
    )
    found = json.loads(good("report", source, "--json"))
    assert found["gains"][0]["without"] == [UNREAD] and "outputs" not in found["plan"]


@pytest.mark.parametrize("command", [["report"], ["fold", "--dry-run"]], ids=lambda c: c[0])
def test_a_misspelled_output_is_one_line(source: Path, command: list[str]) -> None:
    line = refused(*command, source, "--outputs", "image_embeds,logit_per_image")
    assert "no output of CLIPModel is called logit_per_image; did you mean logits_per_image" in line
    assert "is empty" in refused(*command, source, "--outputs", ",", status=2)


def test_the_class_is_the_first_that_has_the_outputs() -> None:
    config = GPT2Config(**GPT2, architectures=["GPT2LMHeadModel"])
    assert analyze(config, outputs=["logits"]).plan.classes == ("GPT2LMHeadModel",)
    plan = analyze(config, outputs=["last_hidden_state"]).plan
    assert (plan.model_class, plan.classes, plan.subtractions) == ("GPT2Model", ("GPT2Model",), ())
    original = live("GPT2Model", config)
    assert error(converted(original, plan), original, calls(original)[0]) <= 1e-12
    with pytest.raises(EnjoyLNError, match="no output of GPT2LMHeadModel is called last_hidden"):
        analyze(config, model_class="GPT2LMHeadModel", outputs=["last_hidden_state"])


class Returning(nn.Module):
    """A norm whose input is returned under several names; ``forward`` also takes one of them."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.into, self.norm, self.names = nn.Linear(5, 13), nn.LayerNorm(13), names

    def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> Any:
        h = self.into(x if state is None else x + state.mean())
        forms = {"nested": {"a": h}, "view": (h[:1],)}
        return {"logits": self.norm(h), **{name: forms.get(name, h) for name in self.names}}


@pytest.mark.parametrize(
    ("names", "wanted", "folds"),
    [
        (("extra",), "logits", True),
        (("extra",), "extra", False),
        (("extra", "other"), "logits", True),
        (("extra", "other"), "logits,other", False),
        (("nested",), "logits", True),
        (("nested",), "logits,nested", False),
        (("nested",), "logits,nested.a", False),
        (("nested",), "logits,*.a", False),
        (("view",), "view", False),
        (("view",), "logits", True),
        (("past_key_values",), "logits", False),
        (("state",), "logits", False),
    ],
)
def test_a_returned_tensor_stays_if_any_of_its_names_is_wanted(
    names: tuple[str, ...], wanted: str, folds: bool
) -> None:
    model = Returning(*names).double().eval()
    x = torch.randn(2, 5, dtype=torch.float64)
    plan = analyze(model, x, outputs=wanted.split(",")).plan
    assert bool(plan.folded) is folds
    assert torch.allclose(converted(model, plan)(x)["logits"], model(x)["logits"], rtol=1e-12)


def test_one_tensor_under_two_names_is_one_gain() -> None:
    (gain,) = analyze(Returning("extra", "other"), torch.randn(2, 5)).gains()
    assert (gain.without, gain.norms, gain.outputs) == (("extra", "other"), 1, ("logits",))
    assert analyze(Returning("past_key_values"), torch.randn(2, 5)).gains() == ()


def test_every_tensor_has_the_names_under_which_it_is_returned() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    shared = {"x": a}
    assert by_field(a) == {"output": [a]}
    assert by_field((a, None, [b])) == {"0": [a], "2.0": [b]}
    assert list(by_field({"p": shared, "q": shared})) == ["p.x", "q.x"]
    looped: dict[str, Any] = {"x": a}
    looped["again"] = looped
    assert list(by_field(looped)) == ["x"]
    assert is_fed_back("decoder.past_key_values.0", ()) and is_fed_back("mems.1", ("mems",))
    assert not is_fed_back("logits", ("labels",))


def test_a_name_covers_what_it_holds() -> None:
    fields = ["logits", "vision.last", "vision.pooled", "hidden.0"]
    assert match_names(["vision"], fields) == {"vision.last", "vision.pooled"}
    assert match_names(["*.last", "hid*"], fields) == {"vision.last", "hidden.0"}
    assert match_names(["vis"], fields) == frozenset()


def test_nothing_to_compare_is_no_pass() -> None:
    with pytest.raises(UnsupportedModel, match="nothing to compare: the model returns logits"):
        choose_outputs([{"logits": torch.zeros(1)}], ["logit"])


def test_a_string_is_one_name() -> None:
    config = GPT2Config(**GPT2, architectures=["GPT2LMHeadModel"])
    assert analyze(config, outputs="logits").plan.outputs == ("logits",)
    with pytest.raises(EnjoyLNError, match="no output of GPT2LMHeadModel is called l"):
        analyze(config, outputs="l")


def test_an_analysis_prints_as_a_summary() -> None:
    config = GPT2Config(**GPT2, architectures=["GPT2LMHeadModel"])
    shown = str(analyze(config)).splitlines()
    assert shown[0].endswith("LayerNorms become RMSNorm") and "GPT2LMHeadModel" in shown[0]
    assert shown[1:] == ["  subtracts the mean from the output of transformer.wte"]
