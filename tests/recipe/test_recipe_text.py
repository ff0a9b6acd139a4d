"""Recipes that were edited or are hostile: options that are kept, and errors of one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe_plans import gpt2_config, gpt2_plan

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.recipe.from_plan import recipe_of
from enjoyln_cli.recipe.read import load_recipe, parse_recipe
from enjoyln_cli.recipe.write import dump_recipe


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
