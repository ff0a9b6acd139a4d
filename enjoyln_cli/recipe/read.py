"""Read recipes from YAML text: the edits made to a checkpoint, or those to make.

    version: 1
    model_type: gpt2
    variants:
    - model_class: GPT2LMHeadModel
      classes: [GPT2LMHeadModel, GPT2Model]
      outputs: [logits]                          # outputs that stay unchanged; without it, all
      when: {tie_word_embeddings: true}          # required values of config attributes
      norms:                                     # fold, keep, fold_with: [modules], keep: reason
        transformer.h.{i}.ln_1: {fold_with: [transformer.wte]}
        transformer.h.{i}.ln_2: {keep: why, culprit: where}
      centre:                                    # parameters: W <- W - mean(W)
        transformer.wpe.weight: {dim: 1}
        transformer.h.{i}.attn.c_proj.weight: {dim: 1}
      centring_ops:
      - {module: transformer.wte, place: output, dim: -1, size: n_embd, reason: why}
      merge:                                     # norms merged into linear layers; or keep: reason
        transformer.h.{i}.ln_2:                  # its weight becomes ones, its bias zeros
          weight: transformer.h.{i}.ln_2.weight
          bias: transformer.h.{i}.ln_2.bias
          readers:
          - {weight: {parameter: transformer.h.{i}.mlp.fc.weight}, dim: 0,
            bias: {parameter: transformer.h.{i}.mlp.fc.bias}}
      rotate:                                    # values that an orthogonal matrix turns, by name
        transformer.wte.weight:
          kind: stream                           # or values, of one attention
          size: n_embd
          fixes_ones: true                       # there is a LayerNorm inside
          norms: [transformer.h.{i}.ln_2]        # their weights are merged
          inputs: [inputs_embeds]
          tensors: {transformer.wte.weight: {dim: 1}}
      widen:                                     # MLPs that grow
      - {first: {parameter: encoder.layer.{i}.inter.weight, dim: 0},
        bias: {parameter: encoder.layer.{i}.inter.bias, dim: 0},
        second: {parameter: encoder.layer.{i}.output.dense.weight, dim: 1},
        size: 3072, to: 3080, features: 768, attribute: intermediate_size, subtracts: true}
      untie:                                     # tied parameters that are stored as copies
        lm_head.weight: {source: transformer.wte.weight}
      config: {tie_word_embeddings: false}       # entries of config.json that change
      entry_inputs: [inputs_embeds]
      unproven: [cross_attn_head_mask]
      calls: ["Net(x=float[a, b])"]              # for custom code: the only proven calls
    options: {widen_mlp: true}                   # those of ``plan.Options``
    versions: {torch: 2.13.0}

The keys are the fields of ``recipe.model`` and of the plan's dataclasses, and so are the checks;
``SHORT_FORMS`` says what is written in another way. A name with ``{i}`` stands for every layer; a
line with a layer number overrides it. Parameters have their names in the model class; ``tensor``
is the stored name, if that differs. An axis has the fields of ``spans.Span``. A parameter with
several centred parts has a list of axes, and ``leave`` instead of an axis leaves one as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enjoyln_cli.checkpoint.result_files import RECIPE_FILE
from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan import schema
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.recipe.model import Recipe, prefix_errors, variant_for
from enjoyln_cli.recipe.templates import NAMES, problem_with
from enjoyln_cli.recipe.yaml_text import MAX_CHARS, load, one_line

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

KEYED = {
    "norms": "norm",
    "centre": "parameter",
    "merge": "norm",
    "rotate": "parameter",
    "tensors": "parameter",
    "untie": "parameter",
}
"""Lists of dataclasses that a file has as a mapping, and the field that is the key there."""

SHORT_FORMS: dict[str, dict[str, dict[str, Any]]] = {
    "norms": {"fold": {"status": "static"}, "keep": {"status": "kept"}},
    "merge": {"keep": {"reason": ""}},
    "centre": {"leave": {}},
}
"""Words in place of the fields of a line."""

_VALID = {
    "norms": "fold, keep, fold_with: [modules], or keep: reason",
    "merge": "weight and readers, keep, or keep: reason",
    "centre": "an axis, for example {dim: 0}, or leave",
    "tensors": "an axis, for example {dim: 0}",
}
"""What can be written for a name."""

_TEXT_CHARS = 1000


def tried_to_merge(folder: Path) -> bool:
    """Whether the checkpoint in ``folder`` was converted with ``--merge``, by its recipe.

    A norm of it that still has a weight or a bias cannot be merged.
    """
    try:
        return load_recipe(folder / RECIPE_FILE).options.merge is not None
    except RecipeError:
        return False


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe file. Raises ``RecipeError`` if it cannot be read or is not a recipe."""
    try:
        with open(path, encoding="utf-8") as file:
            found = file.read(MAX_CHARS + 1)
    except (OSError, ValueError) as error:  # a name with a NUL character, or no text
        raise RecipeError(f"{path}: cannot be read as text: {one_line(error)}") from None
    return parse_recipe(found, where=str(path))


def shipped_recipe(plan: Plan, config: Any = None) -> Recipe | None:
    """The recipe shipped with enjoyln for a plan's model type, class and config, if any.

    ``config`` is a mapping or a transformers config.
    """
    file = _shipped() / f"{plan.model_type}.yaml"
    if not re.fullmatch(r"[\w-]+", plan.model_type) or not file.is_file():
        return None
    recipe = parse_recipe(file.read_text(encoding="utf-8"), where=f"recipes/{file.name}")
    try:
        variant = variant_for(recipe, plan.model_type, plan.model_class, config)
    except RecipeError:
        return None
    return replace(recipe, variants=(variant,))


def _shipped() -> Traversable:
    """Where the shipped recipes are: in the package, or in a checkout that is not installed."""
    try:
        return resources.files("enjoyln_cli.recipes")
    except ModuleNotFoundError:
        return Path(__file__).parents[2] / "recipes"


def parse_recipe(text: str, *, where: str) -> Recipe:
    """A recipe from its text; ``where`` names the text in messages.

    Raises ``RecipeError``: one line with the key, the value found, and what is valid there.
    """
    with prefix_errors(where):
        data = _in_full(load(text))
        try:
            recipe = schema.read(Recipe, data, keys=KEYED)
        except ValueError as error:
            raise RecipeError(str(error)) from None
        return replace(recipe, where=where)


def _in_full(data: Any, at: str = "", field: str = "") -> Any:
    """The data with lists for the mappings of ``KEYED``, and without short forms.

    ``at`` is its place in the file. Raises ``RecipeError`` for text that is not one line, and for
    names that are no dotted names.
    """
    if isinstance(data, str):
        _require_text(data, at, field)
    if isinstance(data, list):
        return [_in_full(item, f"{at}[{index}]", field) for index, item in enumerate(data)]
    if not isinstance(data, Mapping):
        if data is not None and not isinstance(data, (str, int, float)):
            raise RecipeError(f"{at}: {schema.quote(data)}; write it in quotes")
        return data
    for key in data:
        if not isinstance(key, str):
            raise RecipeError(f"{at}: {schema.quote(key)} instead of one line of text as a key")
        _require_text(key, at, KEYED.get(field, ""))
    places = {key: f"{at}.{key:.120}" if at else key for key in data}
    if field in KEYED:
        return [
            {KEYED[field]: key, **line}
            for key, item in data.items()
            for line in _lines(item, places[key], field)
        ]
    return {key: _in_full(item, places[key], key) for key, item in data.items()}


def _lines(value: Any, at: str, field: str) -> Iterator[dict[str, Any]]:
    """The lines for one name of a section; several if ``value`` is a list."""
    short = SHORT_FORMS.get(field, {})
    for item in value if isinstance(value, list) else [value]:
        line = short.get(item) if isinstance(item, str) else _in_full(item, at)
        if not isinstance(line, dict):
            known = _VALID.get(field, "a mapping")
            raise RecipeError(f"{at}: {schema.quote(item)} is not valid there; write {known}")
        if KEYED[field] in line:
            raise RecipeError(f"{at}: the name stands before the colon; remove {KEYED[field]}")
        words = [key for key in ("fold_with", "keep", "status", "reason") if key in line]
        if len(words) > 1 and words[0] in ("fold_with", "keep"):
            raise RecipeError(f"{at}: {' and '.join(words)} exclude each other; remove one")
        if "fold_with" in line and field == "norms":
            line["ops"] = line.pop("fold_with")
            line["status"] = "centred" if line["ops"] else "static"
        if "keep" in line and field in ("norms", "merge"):
            line["reason"] = line.pop("keep")
            line |= {"status": "kept"} if field == "norms" else {}
        yield line


def _require_text(text: str, at: str, field: str) -> None:
    near = field == "fold_with"
    if near or field in NAMES:
        if problem := problem_with(text, near=near):
            raise RecipeError(f"{at}: {problem}")
    elif len(text) > _TEXT_CHARS or not text.isprintable():
        raise RecipeError(f"{at}: {schema.quote(text)} instead of one line of text")
