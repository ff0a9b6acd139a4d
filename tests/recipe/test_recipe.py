"""Recipes: one text for every size of a family, equal to the proof or refused by the line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.edited_tensors import CentredWeight
from enjoyln_cli.plan.fold_options import CENTRING_ONLY, Options
from enjoyln_cli.plan.plan import MeanSubtraction, Plan, Verdict
from enjoyln_cli.recipe.compare import differences, require_same
from enjoyln_cli.recipe.from_plan import recipe_of
from enjoyln_cli.recipe.model import Recipe
from enjoyln_cli.recipe.read import load_recipe, parse_recipe
from enjoyln_cli.recipe.write import dump_recipe

AFFINE = "its input holds the output of a LayerNorm with weight and bias, whose mean is not zero"


def gpt2_config(layers: int, width: int = 48, tied: bool = True) -> dict[str, Any]:
    return {
        "n_embd": width,
        "n_head": 4,
        "n_layer": layers,
        "n_positions": 32,
        "tie_word_embeddings": tied,
    }


def gpt2_plan(layers: int = 3, width: int = 48, tied: bool = True, stored: str = "") -> Plan:
    """A pre-LN plan; with ``tied``, an operation centres the embedding's output.

    ``stored="base"``: the tensors are stored without the prefix ``transformer.``.
    """

    def writer(name: str, *shape: int) -> CentredWeight:
        tensor = name.removeprefix("transformer.") if stored == "base" else name
        dim = len(shape) - 1
        return CentredWeight(name, Axis(dim, 0, 1, width, 1), shape, tensor)

    writers = [writer("transformer.wpe.weight", 32, width)]
    if not tied:
        writers.append(writer("transformer.wte.weight", 99, width))
    ops = ("transformer.wte",) if tied else ()
    status = "with_subtraction" if tied else "in_weights"
    norms: list[Verdict] = []
    for i in range(layers):
        h = f"transformer.h.{i}"
        norms.append(Verdict(f"{h}.ln_1", status, ops, tuple(w.parameter for w in writers)))
        writers.append(writer(f"{h}.attn.c_proj.weight", width, width))
        writers.append(writer(f"{h}.attn.c_proj.bias", width))
        norms.append(Verdict(f"{h}.ln_2", status, ops, tuple(w.parameter for w in writers)))
        writers.append(writer(f"{h}.mlp.c_proj.weight", 4 * width, width))
        writers.append(writer(f"{h}.mlp.c_proj.bias", width))
    norms.append(Verdict("transformer.ln_f", status, ops, tuple(w.parameter for w in writers)))
    centring = MeanSubtraction(
        "transformer.wte", "output", Axis(-1, 0, 1, width, 1), "the head reads it"
    )
    return Plan(
        "gpt2",
        "GPT2LMHeadModel",
        ("GPT2LMHeadModel", "GPT2Model"),
        tuple(norms),
        tuple(writers),
        (centring,) if tied else (),
        ("inputs_embeds",),
        ("cross_attn_head_mask",),
    )


def bert_plan(layers: int = 3) -> Plan:
    """A post-LN plan: each kept norm names the norm before it, often one layer below."""
    norms = [
        Verdict("embeddings.LayerNorm", "in_weights", (), ("embeddings.word_embeddings.weight",))
    ]
    before = "embeddings.LayerNorm"
    for i in range(layers):
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            norm = f"encoder.layer.{i}.{name}"
            norms.append(Verdict(norm, "stays_layernorm", reason=AFFINE, culprit=before))
            before = norm
    writer = CentredWeight(
        "embeddings.word_embeddings.weight",
        Axis(1, 0, 1, 32, 1),
        (99, 32),
        "bert.embeddings.word_embeddings.weight",
    )
    return Plan("bert", "BertModel", ("BertModel",), tuple(norms), (writer,), ())


def heads_plan(layers: int = 2, heads: int = 4, head_dim: int = 8, groups: int = 2) -> Plan:
    """Query and key norms over each head: split and fused projections, grouped keys."""
    norms: list[Verdict] = []
    writers: list[CentredWeight] = []
    width = heads * head_dim
    for i in range(layers):
        q, k = f"model.layers.{i}.q_proj.weight", f"model.layers.{i}.k_proj.weight"
        fused = f"model.layers.{i}.cross.qkv.weight"
        writers += [
            CentredWeight(q, Axis(0, 0, heads, head_dim, 1), (width, width)),
            CentredWeight(k, Axis(0, 0, groups, head_dim, 1), (groups * head_dim, width)),
            CentredWeight(fused, Axis(0, width, heads, head_dim, 1), (3 * width, width)),
        ]
        norms += [
            Verdict(f"model.layers.{i}.q_norm", "in_weights", (), (q,)),
            Verdict(f"model.layers.{i}.k_norm", "in_weights", (), (k, fused)),
        ]
    return Plan("phi", "PhiForCausalLM", ("PhiForCausalLM",), tuple(norms), tuple(writers), ())


def heads_config(heads: int = 4, head_dim: int = 8, groups: int = 2) -> dict[str, Any]:
    return {
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": heads * head_dim,
    }


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


# Differences.


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


# Hostile text.


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


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("unty: true", "options: unknown key 'unty'; did you mean untie?"),
        ("untie: 1", "options.untie: 1 instead of true or false"),
        ("merge: both", "options.merge: 'both' instead of 'bias' or 'affine'"),
        ("widen_to: 0", "options.widen_to: 0 instead of a number from 1 to"),
        ("widen_mlp: null", "options.widen_mlp: nothing instead of true or false"),
    ],
)
def test_an_option_that_nobody_knows_is_refused(option: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(GOOD + f"options: {{{option}}}\n", where="mine.yaml")
    assert str(caught.value).startswith(f"mine.yaml: {message}")


GOOD = dump_recipe(recipe_of(gpt2_plan(), config=gpt2_config(3)))
BODY = "version: 1\nmodel_type: gpt2\nmodel_class: A\nnorms: "
HOSTILE = {
    "nothing": ("", "nothing instead of a mapping with version, model_type"),
    "not a mapping": ("[1]", "a list instead of a mapping"),
    "not YAML": ("a: [1", "not YAML: "),
    "control characters": ("a: \x00", "not YAML"),
    "too long": ("a" * 1_000_001, "longer than"),
    "too deep": ("[" * 5000, "nest"),
    "an anchor": ("a: &x 1\nb: *x", "anchors"),
    "a tag": (
        "a: !!python/object/apply:os.system [ls]",
        "not YAML: could not determine a constructor",
    ),
    "a tag of YAML": (GOOD + "outputs: !!set {logits}\n", "a value that JSON does not have"),
    "a key twice": ("version: 1\nversion: 1", "'version' occurs twice"),
    "a fusion": ("<<: {version: 1}", "unknown key '<<'"),
    "an unknown key": (GOOD + "optons: {}\n", "unknown key 'optons'; did you mean options?"),
    "another version": (
        GOOD.replace("version: 1", "version: 2"),
        "version: 2 is not 1, the only version",
    ),
    "a version that is true": (
        GOOD.replace("version: 1", "version: true"),
        "version: True instead of a whole number",
    ),
    "a huge number": (
        f"version: 0x{'f' * 9000}\nmodel_type: a\nmodel_class: A\nnorms: {{}}",
        "thousands of digits",
    ),
    "no norms": ("version: 1\nmodel_type: gpt2\nmodel_class: A", "the key norms is missing"),
    "lines in a key": (BODY + '{"a\\nb": fold}', "'a\\nb' instead of one line of text"),
    "a long name": (BODY + "{" + "a" * 1010 + ": fold}", "instead of one line of text"),
    "a name for messages": (GOOD + "where: elsewhere\n", "where: 'elsewhere'"),
    "lines in a reason": (
        BODY + '{a: {keep: "a\\nb"}}',
        "norms.a: 'a\\nb' instead of one line",
    ),
    "no version": ("model_type: gpt2\nmodel_class: A\nnorms: {}", "the key version is missing"),
    "a nested condition": (
        GOOD.replace("tie_word_embeddings: true", "tie_word_embeddings: [1]"),
        "when.tie_word_embeddings: [1] instead of one line of text",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_gets_one_line(name: str) -> None:
    text, message = HOSTILE[name]
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, where="bad.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("bad.yaml: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_load_recipe(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD, encoding="utf-8")
    assert load_recipe(path) == parse_recipe(GOOD, where="x")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="mine.yaml: cannot be read as text"):
        load_recipe(path)
    with pytest.raises(RecipeError, match="cannot be read as text"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match="cannot be read as text"):
        load_recipe(tmp_path)
