"""Recipes: one text for every size of a family, equal to the proof or refused by the line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from recipe_plans import bert_plan, gpt2_config, gpt2_plan, heads_config, heads_plan

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.edited_tensors import CentredWeight
from enjoyln_cli.plan.fold_options import CENTRING_ONLY, Options
from enjoyln_cli.plan.plan import Plan, Verdict
from enjoyln_cli.recipe.compare import differences, require_same
from enjoyln_cli.recipe.from_plan import recipe_of
from enjoyln_cli.recipe.model import Recipe
from enjoyln_cli.recipe.read import parse_recipe
from enjoyln_cli.recipe.write import dump_recipe


def through_text(recipe: Recipe) -> Recipe:
    return parse_recipe(dump_recipe(recipe), where="test.yaml")


def edited(recipe: Recipe, *changes: tuple[str, str]) -> Recipe:
    """The recipe after lines of its text were replaced."""
    text = dump_recipe(recipe)
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times in\n{text}"
        text = text.replace(old, new)
    return parse_recipe(text, where="mine.yaml")


def family(recipe: Recipe) -> str:
    """The text without the versions that made it."""
    return dump_recipe(replace(recipe, versions={}))


PLANS = {
    "tied": (gpt2_plan(), gpt2_config(3)),
    "untied": (gpt2_plan(tied=False), gpt2_config(3, tied=False)),
    "stored as the base model": (gpt2_plan(stored="base"), gpt2_config(3)),
    "post-LN": (bert_plan(), {"hidden_size": 32}),
    "heads": (heads_plan(), heads_config()),
    "one layer": (gpt2_plan(1), gpt2_config(1)),
    "no config": (heads_plan(), {}),
}


@pytest.mark.parametrize("name", PLANS)
def test_text_and_recipe_and_plan_agree(name: str) -> None:
    plan, config = PLANS[name]
    recipe = recipe_of(plan, config=config, options=Options(untie=True, seed=3))
    read = through_text(recipe)
    assert read == recipe
    assert dump_recipe(read) == dump_recipe(recipe)
    require_same(read, plan, config=config)


def test_one_text_for_every_size() -> None:
    small = recipe_of(gpt2_plan(2, 16), config=gpt2_config(2, 16))
    large = recipe_of(gpt2_plan(12, 48), config=gpt2_config(12, 48))
    assert family(small) == family(large)
    plan = gpt2_plan(12, 48)
    require_same(small, plan, config=gpt2_config(12, 48))


def test_one_text_for_every_number_of_heads() -> None:
    small = recipe_of(heads_plan(2, 4, 8, 2), config=heads_config(4, 8, 2))
    large = recipe_of(heads_plan(6, 16, 4, 16), config=heads_config(16, 4, 16))
    assert family(small) == family(large)
    assert "q_proj.weight: {dim: 0, groups: true}" in family(small)
    assert "qkv.weight: {dim: 0, groups: true, part: true}" in family(small)


def test_culprits_one_layer_below_take_one_line() -> None:
    small, large = (recipe_of(bert_plan(layers)) for layers in (3, 24))
    assert family(small) == family(large)
    assert len(large.norms) == 4
    assert "culprit: 'encoder.layer.{i-1}.output.LayerNorm'" in family(large)
    assert "encoder.layer.0.attention.output.LayerNorm:" in family(large)


def test_names_inside_a_reason_follow_the_layer() -> None:
    why = "seen by h.{}.mlp, 2.5 times, and by h.0.attn"
    norms = tuple(
        Verdict(
            f"h.{i}.ln",
            "stays_layernorm",
            reason=why.format(i),
            culprit=f"h.{i}.w, read by h.{i + 1}.q",
        )
        for i in range(5)
    )
    plan = Plan("toy", "Toy", ("Toy",), norms, (), ())
    text = dump_recipe(recipe_of(plan))
    assert "culprit: 'h.{i}.w, read by h.{i+1}.q'" in text
    entries = [line for line in text.splitlines() if not line.startswith("#")]
    assert sum("stays_layernorm: " in line for line in entries) == 3


def test_a_layer_that_differs_goes_before_the_rest() -> None:
    plan = gpt2_plan(4, tied=False)
    norms = [
        replace(v, status="stays_layernorm", reason="seen by a head", needs=())
        if ".2.ln_1" in v.norm
        else v
        for v in plan.norms
    ]
    writers = [w for w in plan.centred_weights if ".3.mlp" not in w.parameter]
    norms = [replace(v, needs=()) for v in norms]
    odd = replace(plan, norms=tuple(norms), centred_weights=tuple(writers))
    text = dump_recipe(recipe_of(odd))
    assert "transformer.h.2.ln_1:" in text
    assert "transformer.h.3.mlp.c_proj.weight: keep" in text
    require_same(through_text(recipe_of(odd)), odd)
    without = edited(recipe_of(odd), ("  transformer.h.3.mlp.c_proj.weight: keep\n", ""))
    with pytest.raises(RecipeError, match="c_proj.weight: the recipe has nothing, the proof keep"):
        require_same(without, odd)


def test_numbers_that_do_not_count_layers_stay() -> None:
    axis = Axis(0, 0, 1, 4, 1)
    writers = tuple(
        CentredWeight(name, axis, (4,)) for name in ("h.0.mlp.2.bias", "h.1.mlp.2.bias")
    )
    norms = (Verdict("h.0.norm", "in_weights"), Verdict("h.1.norm", "in_weights"))
    text = dump_recipe(recipe_of(Plan("toy", "Toy", ("Toy",), norms, writers, ())))
    assert "h.{i}.mlp.2.bias: {dim: 0}" in text


def test_a_recipe_works_whatever_the_names_on_disk() -> None:
    config = gpt2_config(3)
    base, head = gpt2_plan(stored="base"), gpt2_plan()
    require_same(through_text(recipe_of(base, config=config)), head, config=config)
    assert dump_recipe(recipe_of(base)) == dump_recipe(recipe_of(head))


def _gpt2(*changes: tuple[str, str]) -> tuple[Recipe, Plan, dict[str, Any]]:
    plan, config = gpt2_plan(), gpt2_config(3)
    return edited(recipe_of(plan, config=config), *changes), plan, config


LN_F = "transformer.ln_f: {with_subtraction: [transformer.wte]}"
PROVEN = "the proof {with_subtraction: [transformer.wte]}"
WPE = "  transformer.wpe.weight: {dim: 1}\n"

OTHER_EDITS = {
    "an op left out of the line": (
        _gpt2((LN_F, "transformer.ln_f: in_weights")),
        f"norms: transformer.ln_f: the recipe has in_weights, {PROVEN}; a recipe is compared with "
        "the proof: fold without --recipe, and choose the norms that stay with --keep-norms",
    ),
    "a norm that stays": (
        _gpt2((LN_F, "transformer.ln_f: stays_layernorm")),
        f"norms: transformer.ln_f: the recipe has stays_layernorm, {PROVEN}; ",
    ),
    "an op that is not proven": (
        _gpt2(("  transformer.wte:", "  transformer.drop:")),
        "subtractions: transformer.drop: the recipe has {place: output, dim: -1}, the proof "
        "nothing (and 1 more)",
    ),
    "a writer that a norm needs": (
        _gpt2((WPE, "")),
        "centred_weights: transformer.wpe.weight: the recipe has nothing, the proof {dim: 1}",
    ),
    "a writer that is not edited": (
        _gpt2((WPE, "  transformer.wpe.weight: keep\n")),
        "centred_weights: transformer.wpe.weight: the recipe has keep, the proof {dim: 1}",
    ),
    "a writer of a layer too many": (
        _gpt2((WPE, WPE + "  transformer.h.3.mlp.c_proj.bias: {dim: 1}\n")),
        "transformer.h.3.mlp.c_proj.bias: the recipe has {dim: 1}, the proof nothing",
    ),
    "a norm that is not there": (
        _gpt2((LN_F, "transformer.ln_g: in_weights")),
        "norms: transformer.ln_g: the recipe has in_weights, the proof nothing (and 1 more)",
    ),
    "layers that are not there": (
        _gpt2((LN_F, LN_F + "\n  encoder.layer.{i}.ln: keep")),
        "norms: encoder.layer.{i}.ln: the recipe has keep, the proof nothing",
    ),
    "a class without proof": (
        _gpt2(("[GPT2LMHeadModel, GPT2Model]", "[GPT2LMHeadModel, GPT2DoubleHeadsModel]")),
        "classes: the recipe has GPT2DoubleHeadsModel, GPT2LMHeadModel, the proof GPT2LMHeadModel,",
    ),
    "another class": (
        _gpt2(("model_class: GPT2LMHeadModel", "model_class: GPT2Model")),
        "made for GPT2Model, but the plan is for GPT2LMHeadModel",
    ),
    "another family": (_gpt2(("model_type: gpt2", "model_type: opt")), "made for opt, but the"),
    "an untied model": (
        _gpt2(("tie_word_embeddings: true", "tie_word_embeddings: false")),
        "made for models with tie_word_embeddings: False",
    ),
    "an input not centred on entry": (
        _gpt2(("entry_inputs: [inputs_embeds]\n", "")),
        "entry_inputs: the recipe has nothing, the proof inputs_embeds; ",
    ),
    "one norm under two templates": (
        _gpt2((LN_F, LN_F + "\n  transformer.h.{j}.ln_1: keep")),
        "norms: transformer.h.{j}.ln_1: the recipe has keep, the proof nothing",
    ),
}


@pytest.mark.parametrize("name", OTHER_EDITS)
def test_other_edits_than_the_proof_are_refused(name: str) -> None:
    (recipe, plan, config), message = OTHER_EDITS[name]
    with pytest.raises(RecipeError) as caught:
        require_same(recipe, plan, config=config)
    assert message in str(caught.value)
    assert str(caught.value).startswith("mine.yaml: ")
    assert "\n" not in str(caught.value)


def test_a_line_that_keeps_a_norm_the_proof_keeps_is_the_same() -> None:
    text = dump_recipe(recipe_of(bert_plan()))
    first = text.index("  encoder.layer.{i}.output.LayerNorm: {stays_layernorm:")
    line = text[first : text.index("\n", first)]
    bare = text.replace(line, "  encoder.layer.{i}.output.LayerNorm: stays_layernorm")
    require_same(parse_recipe(bare, where="mine.yaml"), bert_plan())
    asked = text.replace(line, "  encoder.layer.{i}.output.LayerNorm: in_weights")
    with pytest.raises(
        RecipeError,
        match="output.LayerNorm: the recipe has in_weights, the proof stays_layernorm",
    ):
        require_same(parse_recipe(asked, where="mine.yaml"), bert_plan())


def test_differences_name_every_edit() -> None:
    config = gpt2_config(3)
    tied, untied = gpt2_plan(), gpt2_plan(tied=False)
    norms = [f"transformer.h.{{i}}.{norm}" for norm in ("ln_1", "ln_2")]
    with_op = "the recipe has {with_subtraction: [transformer.wte]}, the proof in_weights"
    assert differences(recipe_of(tied, config=config, depends=()), untied) == [
        *(f"norms: {norm}: {with_op}" for norm in (*norms, "transformer.ln_f")),
        "centred_weights: transformer.wte.weight: the recipe has nothing, the proof {dim: 1}",
        "subtractions: transformer.wte: the recipe has {place: output, dim: -1}, the proof nothing",
    ]


def test_differences_see_axes_classes_and_inputs() -> None:
    plan, config = heads_plan(), heads_config()
    writers = tuple(
        replace(w, axis=Axis(0, 0, 1, 32, 1)) if ".0.q_proj" in w.parameter else w
        for w in plan.centred_weights
    )
    changed = replace(
        plan, centred_weights=writers, classes=("PhiForCausalLM", "PhiModel"), unproven=("mask",)
    )
    assert differences(recipe_of(plan, config=config), changed) == [
        "centred_weights: model.layers.0.q_proj.weight: the recipe has nothing, the proof {dim: 0}",
        "classes: the recipe has PhiForCausalLM, the proof PhiForCausalLM, PhiModel",
        "unproven: the recipe has nothing, the proof mask",
    ]


def test_a_reason_is_no_difference() -> None:
    plan = bert_plan()
    norms = tuple(replace(v, reason=v.reason and "another", culprit="") for v in plan.norms)
    assert differences(recipe_of(plan), replace(plan, norms=norms)) == []


def test_a_transformers_config_serves_as_well() -> None:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return gpt2_config(3)

    plan = gpt2_plan()
    assert recipe_of(plan, config=Config()) == recipe_of(plan, config=gpt2_config(3))
    require_same(recipe_of(plan, config=Config()), plan, config=Config())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (CENTRING_ONLY, ""),
        (Options(untie=True), "options: {untie: true}"),
        (Options(keep_norms=("*.ln_f", "h.0.ln")), "options: {keep_norms: ['*.ln_f', h.0.ln]}"),
        (
            Options(widen_mlp=True, widen_to=64, merge="affine"),
            "options: {widen_mlp: true, widen_to: 64, merge: affine}",
        ),
    ],
)
def test_a_recipe_remembers_the_options(options: Options, text: str) -> None:
    recipe = recipe_of(gpt2_plan(), config=gpt2_config(3), options=options)
    assert text in dump_recipe(recipe) and ("options" in dump_recipe(recipe)) == bool(text)
    assert through_text(recipe).options == options
