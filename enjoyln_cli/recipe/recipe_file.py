"""Recipes as YAML text: what was done to a checkpoint, or what is asked to be done.

    version: 1
    model_type: gpt2
    variants:
    - model_class: GPT2LMHeadModel
      classes: [GPT2LMHeadModel, GPT2Model]
      outputs: [logits]                          # what stays the same; without it, every output
      when: {tie_word_embeddings: true}          # config attributes, all of which have to agree
      norms:                                     # fold, keep, fold_with: [modules], keep: reason
        transformer.h.{i}.ln_1: {fold_with: [transformer.wte]}
        transformer.h.{i}.ln_2: {keep: why, culprit: where}
      centre:                                    # stored tensors: W <- W - mean(W)
        transformer.wpe.weight: {dim: 1}
        transformer.h.{i}.attn.c_proj.weight: {dim: 1}
      centring_ops:
      - {module: transformer.wte, place: output, dim: -1, size: n_embd, reason: why}
      merge:                                     # what norms hand on to linears; or keep: reason
        transformer.h.{i}.ln_2:                  # its weight becomes ones, its bias zeros
          weight: transformer.h.{i}.ln_2.weight
          bias: transformer.h.{i}.ln_2.bias
          into:
          - {weight: transformer.h.{i}.mlp.fc.weight, dim: 0, bias: transformer.h.{i}.mlp.fc.bias}
      widen:                                     # MLPs with new hidden units, by what reads them
        encoder.layer.{i}.output.dense.weight: {dim: 1, first: encoder.layer.{i}.inter.weight,
          bias: encoder.layer.{i}.inter.bias, attribute: intermediate_size, from: 3072, to: 3080}
      untie:                                     # stored anew, as copies of what they shared
        lm_head.weight: {copy_of: transformer.wte.weight}
      config: {tie_word_embeddings: false}       # entries of config.json that change
      entry_inputs: [inputs_embeds]
      unproven: [cross_attn_head_mask]
      calls: ["Net(x=float[a, b])"]              # with code of others: all that is proven
    options: {}
    record: {layers: {transformer.h: 12}, config: {n_embd: 768}, versions: {torch: 2.13.0}}

Names with ``{i}`` hold for every layer, a name with a number goes before them, ``leave`` in place
of an axis takes one tensor out. ``parameter`` gives the name in the model class where a tensor is
stored under another, ``held`` the axis there where the class holds it in another layout, ``scale``
a stored vector that is merged in before and becomes ones (``scale_parameter`` its name in the
class), ``source`` the name in the class of what a tensor is a ``copy_of``. An axis has the fields
of ``templates.Span``; a tensor of which several parts are centred has a list of these. ``options``
are those of ``plan.Options``. All else in a file is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan import call_text
from enjoyln_cli.plan.covered_calls import CallForm
from enjoyln_cli.plan.plan import Plan, Scale
from enjoyln_cli.recipe import merges, validation, widening
from enjoyln_cli.recipe.follow import differences, follow, to_plan
from enjoyln_cli.recipe.from_plan import (
    CopyLine,
    NormLine,
    OpLine,
    Recipe,
    Record,
    Variant,
    WriterLine,
    merged,
    options_asked,
    options_data,
    outputs_asked,
    recipe_of,
    variant_for,
)
from enjoyln_cli.recipe.merges import MergeLine
from enjoyln_cli.recipe.templates import Span, parted, written

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = [
    "Recipe",
    "differences",
    "dump_recipe",
    "follow",
    "load_recipe",
    "merged",
    "options_asked",
    "options_data",
    "outputs_asked",
    "parse_recipe",
    "recipe_of",
    "shipped_recipe",
    "to_plan",
]

VERSION = 1
LONGEST = 1_000_000
"""Characters of a recipe. Those of real models have a few thousand."""
DEEPEST = 12
"""Levels of nesting. A recipe has five."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The safe loader, in C where that was built: a megabyte takes half a minute without."""

_HEAD = """\
# The LayerNorms of {model_type} that become RMSNorm, and the edits that keep the function the same.
# {{i}} stands for every layer; a line with the number of a layer overrides it.
# fold: in the weights alone; fold_with: with the named mean subtractions; keep: stays LayerNorm.
# To leave a norm as it is, write keep for it and pass this file with --recipe.
"""


# Writing.


class _Inline(dict[str, Any]):
    """A mapping on one line."""


class _Row(list[Any]):
    """A list on one line."""


class _Dumper(yaml.SafeDumper):
    """Plain YAML without anchors, over several lines but for ``_Inline`` and ``_Row``."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _inline(dumper: yaml.SafeDumper, data: _Inline) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", data, flow_style=True)


def _row(dumper: yaml.SafeDumper, data: _Row) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


_Dumper.add_representer(_Inline, _inline)
_Dumper.add_representer(_Row, _row)


def dump_recipe(recipe: Recipe) -> str:
    """The canonical text: the same recipe always gives the same bytes."""
    data: dict[str, Any] = {"version": VERSION, "model_type": recipe.model_type}
    data["variants"] = [_variant_data(variant) for variant in recipe.variants]
    if recipe.options:
        data["options"] = dict(sorted(recipe.options.items()))
    if recipe.record:
        sections = vars(recipe.record).items()
        data["record"] = {key: _Inline(sorted(value.items())) for key, value in sections if value}
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
    return _HEAD.format(model_type=recipe.model_type) + text


def _variant_data(variant: Variant) -> dict[str, Any]:
    data: dict[str, Any] = {
        "model_class": variant.model_class,
        "classes": _Row(variant.classes),
        "outputs": _Row(variant.outputs),
        "when": _Inline(sorted(variant.when.items())),
        "norms": {line.name: _norm_data(line) for line in variant.norms},
        "centre": _writers_data(variant.writers),
        "centring_ops": [
            {"module": op.module, "place": op.place, **written(op.span), "reason": op.reason}
            for op in variant.ops
        ],
        "merge": {line.norm: _merge_data(line) for line in variant.merged},
        "widen": {line.second.tensor: _Inline(widening.written(line)) for line in variant.widened},
        "untie": {line.tensor: _copy_data(line) for line in variant.untied},
        "config": _Inline(sorted(variant.settings.items())),
        "entry_inputs": _Row(variant.entry_inputs),
        "unproven": _Row(variant.unproven),
        "calls": [call_text.written(form) for form in variant.calls],
    }
    return {key: value for key, value in data.items() if value or key == "norms"}


def _merge_data(line: MergeLine) -> Any:
    data = merges.written(line)
    if line.merge is not None:
        data["into"] = [_Inline(reader) for reader in data["into"]]
    return data


def _copy_data(line: CopyLine) -> Any:
    name = {} if line.parameter == line.tensor else {"parameter": line.parameter}
    source = {} if line.source == line.stored else {"source": line.source}
    return _Inline({"copy_of": line.stored} | name | source)


def _norm_data(line: NormLine) -> Any:
    if line.fold:
        return _Inline({"fold_with": _Row(line.ops)}) if line.ops else "fold"
    if not line.reason:
        return "keep"
    return {"keep": line.reason} | ({"culprit": line.culprit} if line.culprit else {})


def _writers_data(lines: Iterable[WriterLine]) -> dict[str, Any]:
    """One entry for each tensor: its axis, or a list where several parts of it are centred."""
    found: dict[str, list[Any]] = {}
    for line in lines:
        found.setdefault(line.tensor, []).append(_writer_data(line))
    return {name: data[0] if len(data) == 1 else data for name, data in found.items()}


def _writer_data(line: WriterLine) -> Any:
    name = {} if line.parameter == line.tensor else {"parameter": line.parameter}
    if line.span is None:
        return _Inline({"leave": True} | name) if name else "leave"
    held = {"held": _Inline(written(line.held))} if line.held else {}
    return _Inline(written(line.span) | name | held | _scale_data(line.scale))


def _scale_data(scale: Scale | None) -> dict[str, Any]:
    if scale is None:
        return {}
    same = scale.parameter == scale.tensor
    return {"scale": scale.tensor} | ({} if same else {"scale_parameter": scale.parameter})


# Reading.


def load_recipe(path: str | Path) -> Recipe:
    """The recipe in a file. Raises ``RecipeError`` where it cannot be read or is not one."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(LONGEST + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read as text: {validation.one_line(error)}") from None
    return parse_recipe(text, where=str(path))


def shipped_recipe(plan: Plan, config: Any = None) -> Recipe | None:
    """The recipe that comes with enjoyln for a plan's family, class and config, if there is one.

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
        return Path(__file__).parent.parent / "recipes"


def parse_recipe(text: str, *, where: str) -> Recipe:
    """A recipe from its text; ``where`` names the text in messages.

    Raises ``RecipeError``: one line with the key, what arrived, and what belongs there.
    """
    data = validation.mapping(
        _yaml(text, where), where, ("version", "model_type", "variants"), ("options", "record")
    )
    if data["version"] != VERSION or type(data["version"]) is not int:
        raise RecipeError(
            f"{where}: version is {validation.shown(data['version'])}, known is {VERSION}"
        )
    model_type = validation.word(data["model_type"], f"{where}: model_type")
    variants = validation.items(data["variants"], f"{where}: variants", _variant)
    if not variants:
        raise RecipeError(f"{where}: variants is empty; a recipe has at least one")
    options = validation.entries(data.get("options", {}), f"{where}: options", validation.plain)
    record = _record(data["record"], f"{where}: record") if "record" in data else None
    return Recipe(model_type, variants, options, record, where)


def _yaml(text: str, where: str) -> Any:
    if len(text) > LONGEST:
        raise RecipeError(f"{where}: longer than {LONGEST} characters, which no recipe is")
    try:
        _require_tame(text, where)
        return yaml.load(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise RecipeError(f"{where}: {line}not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{where}: not YAML: {validation.one_line(error)}") from None


def _require_tame(text: str, where: str) -> None:
    """No anchors, tags, deep nesting or repeated keys: a recipe needs none, and YAML hides them."""
    keys: list[set[str] | None] = []
    at_key: list[bool] = []
    event: Any
    for event in yaml.parse(text, Loader=_LOADER):
        line = f"{where}: line {event.start_mark.line + 1}"
        if getattr(event, "anchor", None) or isinstance(event, yaml.AliasEvent):
            raise RecipeError(f"{line}: anchors and aliases are not allowed; write the value out")
        if getattr(event, "tag", None):
            raise RecipeError(f"{line}: tags are not allowed; write the value without {event.tag}")
        if isinstance(event, yaml.CollectionEndEvent):
            keys.pop()
            at_key.pop()
            continue
        if isinstance(event, yaml.ScalarEvent) and keys and at_key[-1]:
            seen = keys[-1]
            if seen is not None and event.value in seen:
                raise RecipeError(f"{line}: the key {event.value!r:.80} is there twice; keep one")
            if event.value == "<<":
                raise RecipeError(f"{line}: merging with << is not allowed; write the keys out")
            if seen is not None:
                seen.add(event.value)
        if keys and isinstance(event, yaml.NodeEvent):
            at_key[-1] = keys[-1] is not None and not at_key[-1]
        if isinstance(event, yaml.CollectionStartEvent):
            is_map = isinstance(event, yaml.MappingStartEvent)
            keys.append(set() if is_map else None)
            at_key.append(is_map)
            if len(keys) > DEEPEST:
                raise RecipeError(f"{line}: nested more than {DEEPEST} levels deep")


def _variant(value: Any, at: str) -> Variant:
    data = validation.mapping(
        value,
        at,
        ("model_class", "norms"),
        (
            "classes",
            "outputs",
            "when",
            "centre",
            "centring_ops",
            "merge",
            "widen",
            "untie",
            "config",
            "entry_inputs",
            "unproven",
            "calls",
        ),
    )
    model_class = validation.word(data["model_class"], f"{at}.model_class")
    return Variant(
        model_class,
        validation.items(data.get("classes", [model_class]), f"{at}.classes", validation.word),
        validation.entries(data.get("when", {}), f"{at}.when", validation.plain),
        tuple(validation.entries(data["norms"], f"{at}.norms", _norm).values()),
        tuple(
            line
            for lines in validation.entries(
                data.get("centre", {}), f"{at}.centre", _writers
            ).values()
            for line in lines
        ),
        validation.items(data.get("centring_ops", []), f"{at}.centring_ops", _op),
        validation.items(data.get("entry_inputs", []), f"{at}.entry_inputs", validation.word),
        validation.items(data.get("unproven", []), f"{at}.unproven", validation.text),
        validation.items(data.get("outputs", []), f"{at}.outputs", validation.text),
        tuple(validation.entries(data.get("widen", {}), f"{at}.widen", widening.read).values()),
        tuple(validation.entries(data.get("merge", {}), f"{at}.merge", merges.read).values()),
        tuple(validation.entries(data.get("untie", {}), f"{at}.untie", _copy).values()),
        validation.entries(data.get("config", {}), f"{at}.config", _entry),
        validation.items(data.get("calls", []), f"{at}.calls", _call),
    )


def _call(value: Any, at: str) -> CallForm:
    try:
        return call_text.read(str(value))
    except ValueError as error:
        raise RecipeError(f"{at}: {error}") from error


def _copy(name: str, value: Any, at: str) -> CopyLine:
    validation.name(name, at)
    data = validation.mapping(value, at, ("copy_of",), ("parameter", "source"))
    stored = validation.name(data["copy_of"], f"{at}.copy_of")
    parameter = validation.name(data.get("parameter", name), f"{at}.parameter")
    return CopyLine(
        name, parameter, stored, validation.name(data.get("source", stored), f"{at}.source")
    )


def _entry(name: str, value: Any, at: str) -> bool | int:
    validation.name(name, at)
    return value if isinstance(value, bool) else validation.number(value, at, 1)


def _norm(name: str, value: Any, at: str) -> NormLine:
    validation.name(name, at)
    if value in ("fold", "keep"):
        return NormLine(name, value == "fold")
    if not isinstance(value, Mapping):
        raise RecipeError(
            f"{at}: {validation.shown(value)} is nothing a norm can become; write fold, keep, "
            "fold_with: [modules], or keep: reason"
        )
    if "fold_with" in value:
        data = validation.mapping(value, at, ("fold_with",))
        ops = validation.items(data["fold_with"], f"{at}.fold_with", validation.near_name)
        return NormLine(name, True, ops)
    data = validation.mapping(value, at, ("keep",), ("culprit",))
    reason = validation.text(data["keep"], f"{at}.keep")
    return NormLine(
        name, False, (), reason, validation.text(data.get("culprit", ""), f"{at}.culprit")
    )


def _writers(name: str, value: Any, at: str) -> tuple[WriterLine, ...]:
    if isinstance(value, list):
        return validation.items(value, at, lambda item, where: _writer(name, item, where))
    return (_writer(name, value, at),)


def _writer(name: str, value: Any, at: str) -> WriterLine:
    validation.name(name, at)
    if value == "leave":
        return WriterLine(name, name, None)
    if not isinstance(value, Mapping):
        raise RecipeError(
            f"{at}: {validation.shown(value)} is no axis; write {{dim: 0}} or so, or leave"
        )
    if "leave" in value:
        data = validation.mapping(value, at, ("leave", "parameter"))
        if data["leave"] is not True:
            raise RecipeError(
                f"{at}.leave: {validation.shown(data['leave'])}; only true has a meaning here"
            )
        return WriterLine(name, validation.name(data["parameter"], f"{at}.parameter"), None)
    data = validation.mapping(value, at, ("dim",), (*_AXIS, "parameter", "held", *_SCALE))
    parameter, held = validation.name(data.get("parameter", name), f"{at}.parameter"), None
    if "held" in data:
        axis = validation.mapping(data["held"], f"{at}.held", ("dim",), _AXIS)
        held = _span(axis, f"{at}.held", lowest=0)
    return WriterLine(name, parameter, _span(data, at, lowest=0), held, _scale(data, at))


def _scale(data: Mapping[str, Any], at: str) -> Scale | None:
    if "scale" not in data:
        if "scale_parameter" in data:
            raise RecipeError(f"{at}: scale_parameter stands beside scale; add it")
        return None
    tensor = validation.name(data["scale"], f"{at}.scale")
    parameter = validation.name(data.get("scale_parameter", tensor), f"{at}.scale_parameter")
    return Scale(parameter, tensor)


def _op(value: Any, at: str) -> OpLine:
    data = validation.mapping(value, at, ("module", "place", "dim"), (*_AXIS, "reason"))
    place = data["place"]
    if place != "output" and place != "input":
        raise RecipeError(f"{at}.place: {validation.shown(place)} is neither output nor input")
    module = validation.name(data["module"], f"{at}.module")
    reason = validation.text(data.get("reason", ""), f"{at}.reason")
    return OpLine(module, place, _span(data, at, lowest=-8), reason)


_SCALE = ("scale", "scale_parameter")
_AXIS = ("part", "start", "length", "size", "inner", "step")


def _span(data: Mapping[str, Any], at: str, lowest: int) -> Span:
    if "part" in data and ("start" in data or "length" in data):
        raise RecipeError(f"{at}: part stands in place of start and length; write one or the other")
    if "step" in data and ("part" in data or "size" not in data):
        raise RecipeError(f"{at}: a step stands with a size, and not with a part")
    part = data.get("part")
    if part is not None:
        try:
            parted(validation.text(part, f"{at}.part"))
        except RecipeError as error:
            raise RecipeError(f"{at}.part: {error}") from None
    return Span(
        validation.number(data["dim"], f"{at}.dim", lowest, 7),
        validation.size(data["size"], f"{at}.size") if "size" in data else None,
        validation.number(data.get("inner", 1), f"{at}.inner", 1),
        validation.number(data.get("start", 0), f"{at}.start", 0),
        validation.size(data["length"], f"{at}.length") if "length" in data else None,
        part,
        validation.number(data["step"], f"{at}.step", 1) if "step" in data else 0,
    )


def _record(value: Any, at: str) -> Record:
    data = validation.mapping(value, at, (), ("layers", "config", "other_norms", "versions"))
    return Record(
        validation.entries(data.get("layers", {}), f"{at}.layers", _count),
        validation.entries(data.get("config", {}), f"{at}.config", _count),
        validation.entries(data.get("other_norms", {}), f"{at}.other_norms", _count),
        validation.entries(data.get("versions", {}), f"{at}.versions", _version),
    )


def _count(name: str, value: Any, at: str) -> int:
    return validation.number(value, at, 1)


def _version(name: str, value: Any, at: str) -> str:
    return validation.text(value, at)
