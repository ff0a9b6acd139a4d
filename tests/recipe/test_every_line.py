"""A recipe with every kind of line: read, written, compared with its plan, and followed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.covered_calls import CallSignature, Constant, CoveredCalls, TensorSpec
from enjoyln_cli.plan.edited_tensors import (
    CentredWeight,
    GrownParameter,
    NamedParameter,
    RotatedTensor,
    ScaledEps,
    ScaledTensor,
    StreamScale,
)
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.plan.mean_units import Widening
from enjoyln_cli.plan.plan import (
    MeanSubtraction,
    NextLinear,
    NormFusion,
    Plan,
    RotationGroup,
    Setting,
    UnfusedNorm,
    UntiedParameter,
    Verdict,
)
from enjoyln_cli.recipe.compare import require_same
from enjoyln_cli.recipe.from_plan import recipe_of
from enjoyln_cli.recipe.read import load_recipe, parse_recipe
from enjoyln_cli.recipe.write import dump_recipe

FILE = Path(__file__).parent / "every_line.yaml"
CONFIG = {"depth": 3, "n_embd": 32, "n_head": 4, "tie_word_embeddings": True}
OPTIONS = Options(widen_mlp=True, merge="affine", untie=True, rotate=True, seed=3)
VERSIONS = {"enjoyln": "0.1.0", "torch": "2.13.0", "transformers": "5.17.0"}
LAYERS = range(3)
BLOCKS = ("stages.0.blocks.0", "stages.1.blocks.0", "stages.1.blocks.1")


def norms() -> tuple[Verdict, ...]:
    found = [Verdict("embed.norm", "in_weights")]
    for i in LAYERS:
        ops = ("embed.tokens", *([f"h.{i - 1}.attn"] if i else []))
        found.append(Verdict(f"h.{i}.ln_1", "with_subtraction", ops))
    why = "the output of h.{}.ln_1 is not zero-mean"
    found += [
        Verdict("h.0.ln_2", "stays_layernorm", reason="seen by a head"),
        Verdict("h.1.ln_2", "stays_layernorm", reason=why.format(1), culprit="h.0.ln_2"),
        Verdict("h.2.ln_2", "stays_layernorm", reason=why.format(2), culprit="h.1.ln_2"),
    ]
    found += [Verdict(f"h.{i}.q_norm", "in_weights") for i in LAYERS]
    found += [Verdict(f"{block}.norm", "in_weights") for block in BLOCKS]
    return (*found, Verdict("final", "in_weights", mlps=("h.2.mlp.down.weight",)))


def writers() -> tuple[CentredWeight, ...]:
    def whole(parameter: str, tensor: str, shape: tuple[int, ...], dim: int) -> CentredWeight:
        return CentredWeight(parameter, Axis(dim, 0, 1, shape[dim], 1), shape, tensor)

    found = [whole("embed.positions.weight", "toy.embed.positions.weight", (99, 32), 1)]
    for i in LAYERS:
        name = f"h.{i}.attn.out.weight"
        scale = NamedParameter(f"h.{i}.gamma", f"toy.h.{i}.gamma")
        found.append(replace(whole(name, name, (32, 32), 0), scale=scale))
    for i in (0, 1):
        name = f"h.{i}.attn.out.bias"
        scale = NamedParameter(f"h.{i}.gamma", f"toy.h.{i}.gamma")
        found.append(replace(whole(name, name, (32,), 0), scale=scale))
    for i in (0, 2):
        name = f"h.{i}.mlp.out.weight"
        stored = whole(name, f"toy.{name}", (64, 32), 1)
        found.append(replace(stored, module_axis=Axis(0, 0, 1, 32, 1)))
    for i in LAYERS:
        stacked = (f"h.{i}.experts.{j}.w2.weight" for j in (0, 1))
        found += [whole(f"h.{i}.experts.down", tensor, (32, 16), 0) for tensor in stacked]
    parts = {
        "qkv": ((96, 32), (Axis(0, 0, 4, 8, 1, 24), Axis(0, 8, 4, 8, 1, 24))),
        "fused": ((96, 32), (Axis(0, 32, 4, 8, 1),)),
        "tail": ((64, 32), (Axis(0, 19, 1, 32, 1),)),
        "strided": ((32, 8), (Axis(0, 0, 4, 4, 2),)),
    }
    for name, (shape, axes) in parts.items():
        names = (f"h.{i}.{name}.weight" for i in LAYERS)
        found += [CentredWeight(one, axis, shape) for one in names for axis in axes]
    blocks = (f"{block}.out.weight" for block in BLOCKS)
    return (*found, *(whole(name, name, (32, 8), 0) for name in blocks))


def fused() -> tuple[NormFusion, ...]:
    def fusion(i: int) -> NormFusion:
        readers = (
            NextLinear(NamedParameter(f"h.{i}.q.weight"), 1, NamedParameter(f"h.{i}.q.bias")),
            NextLinear(
                NamedParameter(f"h.{i}.k.weight", f"toy.h.{i}.k.weight"),
                0,
                NamedParameter(f"h.{i}.k.bias", f"toy.h.{i}.k.bias"),
                outputs=(8, 24),
            ),
        )
        return NormFusion(f"h.{i}.q_norm", f"h.{i}.q_norm.weight", f"h.{i}.q_norm.bias", readers)

    head = NextLinear(NamedParameter("head.weight", "head.weight"), 1)
    return (*map(fusion, LAYERS), NormFusion("final", "final.weight", "", (head,), 1.0))


def widened() -> tuple[Widening, ...]:
    def mlp(i: int) -> Widening:
        first, bias, second = (
            f"h.{i}.mlp.{name}" for name in ("up.weight", "up.bias", "down.weight")
        )
        return Widening(
            GrownParameter(first, f"toy.{first}", 0), GrownParameter(bias, f"toy.{bias}", 0),
            GrownParameter(second, f"toy.{second}", 1), 64, 72, 32, "n_inner", True,
        )  # fmt: skip

    other = Widening(
        GrownParameter("other.up.weight", dim=1), None, GrownParameter("other.down.weight"),
        60, 64, 16, "text_config.n_inner", False,
    )  # fmt: skip
    return (*map(mlp, LAYERS), other)


def plan() -> Plan:
    axis = Axis(1, 0, 1, 32, 1)
    rotated = [RotatedTensor("embed.tokens.weight", axis, (99, 32))]
    mixes = (f"h.{i}.mix.weight" for i in LAYERS)
    rotated += [RotatedTensor(name, replace(axis, dim=0), (32, 16)) for name in mixes]
    stream = RotationGroup(
        "embed.tokens.weight", "residual", 32, True, tuple(rotated),
        tuple(f"h.{i}.q_norm" for i in LAYERS), ("inputs_embeds",),
    )  # fmt: skip
    why = "embed.tokens.weight cannot be centred, since head uses its mean"
    heads = Axis(-1, 0, 4, 8, 1)
    attention = (
        MeanSubtraction(f"h.{i}.attn", "input", heads, f"read by h.{i + 1}.ln_1") for i in LAYERS
    )
    unread = "it is read by something that is not linear"
    arguments = (("input_ids", TensorSpec("int", ("a", "b"))), ("flag", Constant(True)))
    form = CallSignature("ToyModel", arguments, ("b <= 64",))
    return Plan(
        model_type="toy",
        model_class="ToyModel",
        classes=("ToyModel", "ToyForMaskedLM"),
        norms=norms(),
        centred_weights=writers(),
        subtractions=(
            MeanSubtraction("embed.tokens", "output", Axis(-1, 0, 1, 32, 1), why),
            *attention,
        ),
        entry_inputs=("inputs_embeds",),
        unproven=("cross_attn_head_mask", "any other call"),
        outputs=("logits",),
        widened=widened(),
        fused=fused(),
        unfused=(
            *(UnfusedNorm(f"h.{i}.ln_1", unread, f"h.{i}.act") for i in (1, 2)),
            UnfusedNorm("h.0.ln_1", "it is read twice"),
            UnfusedNorm("embed.norm", ""),
        ),
        rotation_groups=(stream,),
        seed=3,
        scaled=(
            StreamScale(
                "embed.tokens.weight",
                2,
                (ScaledTensor("embed.tokens.weight", power=-2),),
                (ScaledEps("final", 1e-5, -4),),
            ),
        ),
        untied=(
            UntiedParameter("head.weight", source="embed.tokens.weight", shape=(99, 32)),
            UntiedParameter(
                "decoder.weight", "toy.decoder.weight", "embed.weight", "toy.embed.weight", (9, 32)
            ),
        ),
        settings=(
            Setting("n_inner", 72),
            Setting("text_config.n_inner", 64),
            Setting("n_kept", 3),
            Setting("text_config.tie_word_embeddings", False),
        ),
        covered=CoveredCalls((form,)),
    )


def test_it_is_written_as_it_was() -> None:
    assert dump_recipe(load_recipe(FILE)) == FILE.read_text(encoding="utf-8")


def test_the_plan_gives_the_recipe() -> None:
    recipe = recipe_of(plan(), config=CONFIG, options=OPTIONS, depends=tuple(CONFIG)[::3])
    assert dump_recipe(replace(recipe, versions=VERSIONS)) == FILE.read_text(encoding="utf-8")


def test_the_recipe_says_the_whole_plan() -> None:
    found, recipe = plan(), load_recipe(FILE)
    assert recipe.options == OPTIONS and recipe.versions == VERSIONS
    require_same(recipe, found, config=CONFIG)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("decoder.weight: {source: embed.weight", "decoder.weight: {source: embed.tokens.weight",
         "untied: decoder.weight: the recipe has {source: embed.tokens.weight}, the proof {source: "
         "embed.weight}"),
        ("n_kept: 3", "n_kept: 4", "settings: n_kept: the recipe has 4, the proof 3"),
        ("to: 64,", "to: 72,", "widened: other.down.weight: .*to: 72.*, the proof .*to: 64"),
        ("first: {parameter: other.up.weight, dim: 1}", "first: other.up.weight",
         "other.down.weight: .*first: other.up.weight,.* the proof {first: {parameter: .*dim: 1}"),
        (", offset: 1.0", "", "fused: final: the recipe has {.*, the proof .*offset"),
        ("fused.weight: {dim: 0, groups: true, part", "fused.weight: {dim: 0, groups: true, start",
         "h.{i}.fused.weight: the recipe has .*start: true}, the proof .*part: true}"),
        ("place: input", "place: output",
         "subtractions: h.{i}.attn: the recipe has {place: output, .* the proof {place: input"),
        ("weight: {dim: 0, scale: 'h.{i}.gamma'}", "weight: {dim: 0, scale: 'g.{i}.gamma'}",
         "h.{i}.attn.out.weight: the recipe has .*g.{i}.gamma'}, the proof .*'h.{i}.gamma'}"),
        ("bias: {dim: 0, scale: 'h.{i}.gamma'}", "bias: {dim: 0}",
         "h.{i}.attn.out.bias: the recipe has {dim: 0}, the proof {dim: 0, scale: 'h.{i}.gamma'}"),
        ("shift: 2", "shift: 3",
         "scaled: embed.tokens.weight: the recipe has {shift: 3}, the proof {shift: 2}"),
        (", fixes_ones: true", "",
         "rotation_groups: embed.tokens.weight: .* the proof .*fixes_ones: true"),
        ("outputs: [logits]", "outputs: [mems]",
         "outputs: the recipe has mems, the proof logits; a recipe is compared with the proof"),
        ("  h.{i}.mlp.down.weight: {first", "  h.{i}.mlp.up.weight: {first",
         "widened: h.{i}.mlp.up.weight: the recipe has {first.*, the proof nothing"),
    ],
)  # fmt: skip
def test_a_change_of_any_line_is_refused(old: str, new: str, message: str) -> None:
    text = FILE.read_text(encoding="utf-8")
    assert text.count(old) == 1
    changed = parse_recipe(text.replace(old, new), where="mine.yaml")
    with pytest.raises(RecipeError, match=f"mine.yaml: .*{message}"):
        require_same(changed, plan(), config=CONFIG)
