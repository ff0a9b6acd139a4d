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
      centre:                                    # stored tensors: W <- W - mean(W)
        transformer.wpe.weight: {dim: 1}
        transformer.h.{i}.attn.c_proj.weight: {dim: 1}
      centring_ops:
      - {module: transformer.wte, place: output, dim: -1, size: n_embd, reason: why}
      merge:                                     # norms merged into linear layers; or keep: reason
        transformer.h.{i}.ln_2:                  # its weight becomes ones, its bias zeros
          weight: transformer.h.{i}.ln_2.weight
          bias: transformer.h.{i}.ln_2.bias
          into:
          - {weight: transformer.h.{i}.mlp.fc.weight, dim: 0, bias: transformer.h.{i}.mlp.fc.bias}
      rotate:                                    # values that an orthogonal matrix turns, by name
        transformer.wte.weight:
          kind: stream                           # or values, of one attention
          size: n_embd
          fixes_ones: true                       # there is a LayerNorm inside
          norms: [transformer.h.{i}.ln_2]        # their weights are merged
          inputs: [inputs_embeds]
          tensors: {transformer.wte.weight: {dim: 1}}
      widen:                                     # MLPs that grow, by their second weight
        encoder.layer.{i}.output.dense.weight: {dim: 1, first: encoder.layer.{i}.inter.weight,
          bias: encoder.layer.{i}.inter.bias, attribute: intermediate_size, from: 3072, to: 3080}
      untie:                                     # tied tensors that are stored as copies
        lm_head.weight: {copy_of: transformer.wte.weight}
      config: {tie_word_embeddings: false}       # entries of config.json that change
      entry_inputs: [inputs_embeds]
      unproven: [cross_attn_head_mask]
      calls: ["Net(x=float[a, b])"]              # for custom code: the only proven calls
    options: {}
    record: {layers: {transformer.h: 12}, config: {n_embd: 768}, versions: {torch: 2.13.0}}

A name with ``{i}`` stands for every layer; a line with a layer number overrides it. An axis has
the fields of ``templates.Span``. A tensor with several centred parts has a list of axes, and
``leave`` instead of an axis leaves one tensor as it is. ``options`` are those of ``plan.Options``.

Optional keys of a tensor:

* ``parameter``: its name in the model class, if it is stored under another name;
* ``held``: the axis (of a merged layer: the dimension) on the parameter, if its layout is another;
* ``scale``: a stored vector that is merged into it before centring and becomes ones
  (``scale_parameter``: the vector's name in the class);
* ``source``: beside ``copy_of``, the name in the class of the parameter that is copied.

Anything else in a file is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from enjoyln_cli.checkpoint.result_files import RECIPE_FILE
from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan import call_text
from enjoyln_cli.plan.covered_calls import CallForm
from enjoyln_cli.plan.mean_units import UNITS
from enjoyln_cli.plan.plan import (
    BasisKind,
    GrownParameter,
    Merge,
    NamedParameter,
    Place,
    Plan,
    Reader,
    Scale,
    UnmergedNorm,
    UntiedParameter,
    Verdict,
    Widening,
)
from enjoyln_cli.recipe.model import (
    VERSION,
    CentredTensor,
    CentredValue,
    Recipe,
    Record,
    TurnedBasis,
    Variant,
    options_asked,
    prefix_errors,
    variant_for,
)
from enjoyln_cli.recipe.templates import Span, parse_part
from enjoyln_cli.recipe.validation import (
    by_name,
    entries,
    fields,
    items,
    name,
    near_name,
    number,
    only_true,
    plain,
    quote,
    refusal,
    size,
    text,
    word,
)
from enjoyln_cli.recipe.yaml_text import MAX_CHARS, load, one_line

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


def tried_to_merge(folder: Path) -> bool:
    """Whether the checkpoint in ``folder`` was converted with ``--merge``, by its recipe.

    A norm of it that still has a weight or a bias cannot be merged.
    """
    try:
        return options_asked(load_recipe(folder / RECIPE_FILE)).merge is not None
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
        return replace(_recipe(load(text)), where=where)


def _recipe(value: Any) -> Recipe:
    needed = {"version": _version, "model_type": word, "variants": items(_variant)}
    data = fields(value, "", needed, {"options": entries(plain), "record": _record})
    if not data["variants"]:
        raise RecipeError("variants is empty; a recipe has at least one")
    del data["version"]
    return Recipe(**data)


def _version(value: Any, at: str) -> None:
    if value != VERSION or type(value) is not int:
        raise RecipeError(f"{at} is {quote(value)}, but must be {VERSION}")


def _record(value: Any, at: str) -> Record:
    counts = entries(number(1))
    known = {"layers": counts, "config": counts, "other_norms": counts, "versions": entries(text)}
    return Record(**fields(value, at, {}, known))


def _variant(value: Any, at: str) -> Variant:
    optional = {
        "classes": items(word),
        "outputs": items(text),
        "when": entries(plain),
        "centre": by_name(_writers),
        "centring_ops": items(_op),
        "merge": by_name(_merge),
        "rotate": by_name(_basis),
        "widen": by_name(_widening),
        "untie": by_name(_untied),
        "config": by_name(_setting),
        "entry_inputs": items(word),
        "unproven": items(text),
        "calls": items(_call),
    }
    data = fields(value, at, {"model_class": word, "norms": by_name(_norm)}, optional)
    writers = data.pop("centre", {}).values()
    return Variant(
        norms=tuple(data.pop("norms").values()),
        classes=data.pop("classes", (data["model_class"],)),
        writers=tuple(line for lines in writers for line in lines),
        ops=data.pop("centring_ops", ()),
        merged=tuple(data.pop("merge", {}).values()),
        bases=tuple(data.pop("rotate", {}).values()),
        widened=tuple(data.pop("widen", {}).values()),
        untied=tuple(data.pop("untie", {}).values()),
        settings=data.pop("config", {}),
        **data,
    )


def _norm(norm: str, value: Any, at: str) -> Verdict:
    if value == "fold":
        return Verdict(norm, "static")
    if isinstance(value, Mapping) and "fold_with" in value:
        ops = fields(value, at, {"fold_with": items(near_name)})["fold_with"]
        return Verdict(norm, "centred" if ops else "static", ops)
    if value == "keep" or isinstance(value, Mapping):
        reason, culprit = _why_kept(value, at)
        return Verdict(norm, "kept", reason=reason, culprit=culprit)
    known = "fold, keep, fold_with: [modules], or keep: reason"
    raise refusal(at, f"{quote(value)} is not a valid entry for a norm; write {known}")


def _why_kept(value: Any, at: str) -> tuple[str, str]:
    """The reason and the culprit; each is empty if not given."""
    if value == "keep":
        return "", ""
    data = fields(value, at, {"keep": text}, {"culprit": text})
    return data["keep"], data.get("culprit", "")


# What is centred.


def _part(value: Any, at: str) -> str | None:
    if value is None:
        return None
    part = text(value, at)
    try:
        parse_part(part)
    except RecipeError as error:
        raise refusal(at, str(error)) from None
    return part


_AXIS = {
    "part": _part,
    "start": number(0),
    "length": size,
    "size": size,
    "inner": number(1),
    "step": number(1),
}


def _axis(data: Mapping[str, Any], at: str) -> Span:
    if "part" in data and ("start" in data or "length" in data):
        raise refusal(at, "part replaces start and length; write one or the other")
    if "step" in data and ("part" in data or "size" not in data):
        raise refusal(at, "step needs size, and cannot be combined with part")
    return Span(**{key: data[key] for key in ("dim", *_AXIS) if key in data})


def _held(value: Any, at: str) -> Span:
    return _axis(fields(value, at, {"dim": number(0, 7)}, _AXIS), at)


def _writers(tensor: str, value: Any, at: str) -> tuple[CentredTensor, ...]:
    if isinstance(value, list):
        return items(lambda item, place: _writer(tensor, item, place))(value, at)
    return (_writer(tensor, value, at),)


def _writer(tensor: str, value: Any, at: str) -> CentredTensor:
    if value == "leave":
        return CentredTensor(tensor, tensor)
    if not isinstance(value, Mapping):
        raise refusal(at, f"{quote(value)} is not an axis; write for example {{dim: 0}}, or leave")
    if "leave" in value:
        data = fields(value, at, {"leave": only_true, "parameter": name})
        return CentredTensor(data["parameter"], tensor)
    beside = {"parameter": name, "held": _held, "scale": name, "scale_parameter": name}
    data = fields(value, at, {"dim": number(0, 7)}, {**_AXIS, **beside})
    _require_beside("scale", data, at)
    scale = Scale(*_named(data, "scale")) if "scale" in data else None
    parameter = data.get("parameter", tensor)
    return CentredTensor(parameter, tensor, _axis(data, at), data.get("held"), scale)


def _op(value: Any, at: str) -> CentredValue:
    needed = {"module": name, "place": _place, "dim": number(-8, 7)}
    data = fields(value, at, needed, {**_AXIS, "reason": text})
    return CentredValue(data["module"], data["place"], _axis(data, at), data.get("reason", ""))


def _place(value: Any, at: str) -> Place:
    if value == "output" or value == "input":
        return value  # type: ignore[no-any-return]
    raise refusal(at, f"{quote(value)} is neither output nor input")


# What else changes.


def _merge(norm: str, value: Any, at: str) -> Merge | UnmergedNorm:
    if value == "keep" or isinstance(value, Mapping) and "keep" in value:
        return UnmergedNorm(norm, *_why_kept(value, at))
    optional = {"weight": name, "one_plus": only_true, "bias": name, "divided": name}
    data = fields(value, at, {"into": items(_reader)}, optional)
    weight, bias, readers = data.get("weight", ""), data.get("bias", ""), data["into"]
    if not weight and not bias:
        raise refusal(at, "has neither weight nor bias, so nothing is merged; write keep")
    if "divided" in data and (bias or not weight):
        raise refusal(at, "divided is a bias that stays while the weight moves; remove bias")
    if "one_plus" in data and not weight:
        raise refusal(at, "one_plus needs weight; add it")
    if not readers or any(bool(reader.bias) != bool(bias) for reader in readers):
        problem = "needs linear layers, each with a bias if and only if the norm's bias is merged"
        raise refusal(f"{at}.into", problem)
    offset = 1.0 if "one_plus" in data else 0.0
    return Merge(norm, weight, bias, readers, offset, data.get("divided", ""))


def _basis(parameter: str, value: Any, at: str) -> TurnedBasis:
    needed = {"kind": _kind_of_basis, "size": size, "tensors": by_name(_writers)}
    optional = {"fixes_ones": only_true, "norms": items(name), "inputs": items(text)}
    data = fields(value, at, needed, optional)
    tensors = tuple(line for lines in data["tensors"].values() for line in lines)
    if not tensors or any(line.axis is None for line in tensors):
        raise refusal(f"{at}.tensors", "needs tensors, each with an axis")
    return TurnedBasis(
        parameter, data["kind"], data["size"], "fixes_ones" in data, tensors,
        data.get("norms", ()), data.get("inputs", ()),
    )  # fmt: skip


def _kind_of_basis(value: Any, at: str) -> Any:
    if value not in get_args(BasisKind):
        raise refusal(at, f"{quote(value)} is none of {', '.join(get_args(BasisKind))}")
    return value


def _reader(value: Any, at: str) -> Reader:
    dim = number(0, 7)
    optional = {"weight_parameter": name, "bias": name, "bias_parameter": name, "held": dim}
    data = fields(value, at, {"weight": name, "dim": dim}, optional)
    _require_beside("bias", data, at)
    bias = NamedParameter(*_named(data, "bias")) if "bias" in data else None
    return Reader(NamedParameter(*_named(data, "weight")), data["dim"], bias, data.get("held"))


def _widening(tensor: str, value: Any, at: str) -> Widening:
    counts = {"from": number(1), "to": number(1 + UNITS)}
    needed = {"dim": number(0, 1), "first": name, "attribute": text, **counts}
    names = ("parameter", "first_parameter", "bias", "bias_parameter")
    data = fields(value, at, needed, {**dict.fromkeys(names, name), "zeros": only_true})
    dim, before = data["dim"], data["from"]
    return Widening(
        first=GrownParameter(*_named(data, "first"), 1 - dim),
        bias=GrownParameter(*_named(data, "bias"), 0) if "bias" in data else None,
        second=GrownParameter(data.get("parameter", tensor), tensor, dim),
        size=before,
        to=number(before + UNITS)(data["to"], f"{at}.to"),
        features=0,
        attribute=data["attribute"],
        subtracts="zeros" not in data,
    )


def _untied(tensor: str, value: Any, at: str) -> UntiedParameter:
    data = fields(value, at, {"copy_of": name}, {"parameter": name, "source": name})
    stored = data["copy_of"]
    parameter, source = data.get("parameter", tensor), data.get("source", stored)
    return UntiedParameter(parameter, tensor, source, stored, shape=())


def _setting(_: str, value: Any, at: str) -> bool | int:
    return value if isinstance(value, bool) else number(1)(value, at)


def _call(value: Any, at: str) -> CallForm:
    try:
        return call_text.from_text(str(value))
    except ValueError as error:
        raise refusal(at, str(error)) from error


def _named(data: Mapping[str, Any], key: str) -> tuple[str, str]:
    """The parameter name and the stored name of the tensor under ``key``."""
    return data.get(f"{key}_parameter", data[key]), data[key]


def _require_beside(key: str, data: Mapping[str, Any], at: str) -> None:
    if f"{key}_parameter" in data and key not in data:
        raise refusal(at, f"{key}_parameter needs {key}; add it")
