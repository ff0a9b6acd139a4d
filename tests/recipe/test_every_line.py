"""A recipe with every kind of line, as version 0.1 wrote it: read, written and carried out."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.covered_calls import CoveredCalls
from enjoyln_cli.plan.plan import (
    Centring,
    GrownParameter,
    Merge,
    NamedParameter,
    Plan,
    Reader,
    Scale,
    Setting,
    UnmergedNorm,
    UntiedParameter,
    Verdict,
    Widening,
    Writer,
)
from enjoyln_cli.recipe.compare import differences
from enjoyln_cli.recipe.follow import follow
from enjoyln_cli.recipe.from_plan import recipe_of
from enjoyln_cli.recipe.read import load_recipe, parse_recipe
from enjoyln_cli.recipe.to_plan import to_plan
from enjoyln_cli.recipe.write import dump_recipe

FILE = Path(__file__).parent / "every_line.yaml"
CONFIG = {"depth": 3, "n_embd": 32, "n_head": 4, "tie_word_embeddings": True}


def shapes() -> dict[str, tuple[int, ...]]:
    """The stored tensors of the result."""
    found: dict[str, tuple[int, ...]] = {
        "toy.embed.positions.weight": (99, 32),
        "embed.tokens.weight": (99, 32),
        "toy.embed.weight": (9, 32),
        "toy.decoder.weight": (9, 32),
        "final.weight": (32,),
        "head.weight": (99, 32),
        "other.down.weight": (64, 16),
        "other.up.weight": (16, 64),
    }
    layer = {
        "h.{}.attn.out.weight": (32, 32),
        "h.{}.attn.out.bias": (32,),
        "h.{}.gamma": (32,),
        "toy.h.{}.gamma": (32,),
        "toy.h.{}.mlp.out.weight": (64, 32),
        "h.{}.experts.0.w2.weight": (32, 16),
        "h.{}.experts.1.w2.weight": (32, 16),
        "h.{}.qkv.weight": (96, 32),
        "h.{}.fused.weight": (96, 32),
        "h.{}.tail.weight": (64, 32),
        "h.{}.strided.weight": (32, 8),
        "h.{}.q_norm.weight": (32,),
        "h.{}.q_norm.bias": (32,),
        "h.{}.q.weight": (48, 32),
        "h.{}.q.bias": (48,),
        "toy.h.{}.k.weight": (32, 16),
        "toy.h.{}.k.bias": (16,),
        "toy.h.{}.mlp.down.weight": (32, 72),
        "toy.h.{}.mlp.up.weight": (72, 32),
        "toy.h.{}.mlp.up.bias": (72,),
    }
    found |= {name.format(i): shape for i in range(3) for name, shape in layer.items()}
    blocks = ("stages.0.blocks.0", "stages.1.blocks.0", "stages.1.blocks.1")
    return found | {f"{block}.out.weight": (32, 8) for block in blocks}


def plan() -> Plan:
    return to_plan(load_recipe(FILE), shapes(), config=CONFIG)


def test_it_is_written_as_it_was() -> None:
    assert dump_recipe(load_recipe(FILE)) == FILE.read_text(encoding="utf-8")


def test_norms() -> None:
    norms = {verdict.norm: verdict for verdict in plan().norms}
    assert norms["embed.norm"] == Verdict("embed.norm", "static")
    assert norms["h.0.ln_1"] == Verdict("h.0.ln_1", "centred", ("embed.tokens",))
    assert norms["h.2.ln_1"].ops == ("embed.tokens", "h.1.attn")
    assert norms["h.0.ln_2"].reason == "the output of h.0.ln_1 is not zero-mean"
    assert norms["h.1.ln_2"] == Verdict("h.1.ln_2", "kept", reason="the recipe keeps it")
    assert norms["h.2.ln_2"] == Verdict("h.2.ln_2", "kept", reason="seen by a head")
    assert {name for name in norms if name.startswith("stages")} == {
        "stages.0.blocks.0.norm", "stages.1.blocks.0.norm", "stages.1.blocks.1.norm",
    }  # fmt: skip


def test_what_is_centred() -> None:
    writers: defaultdict[str, list[Writer]] = defaultdict(list)
    for writer in plan().writers:
        writers[writer.parameter].append(writer)
    assert writers["embed.positions.weight"] == [
        Writer("embed.positions.weight", "toy.embed.positions.weight",
               Axis(1, 0, 1, 32, 1), (99, 32)),
    ]  # fmt: skip
    assert writers["h.1.attn.out.weight"][0].scale == Scale("h.1.gamma", "toy.h.1.gamma")
    assert writers["h.1.attn.out.bias"][0].scale == Scale("h.1.gamma", "h.1.gamma")
    assert "h.2.attn.out.bias" not in writers and "h.1.mlp.out.weight" not in writers
    assert writers["h.2.mlp.out.weight"][0].tensor == "toy.h.2.mlp.out.weight"
    assert writers["h.2.mlp.out.weight"][0].held == Axis(0, 0, 1, 32, 1)
    assert [one.tensor for one in writers["h.2.experts.down"]] == [
        "h.2.experts.0.w2.weight", "h.2.experts.1.w2.weight",
    ]  # fmt: skip
    assert [one.axis for one in writers["h.0.qkv.weight"]] == [
        Axis(0, 0, 4, 8, 1, 24), Axis(0, 8, 4, 8, 1, 24),
    ]  # fmt: skip
    assert writers["h.0.fused.weight"][0].axis == Axis(0, 32, 4, 8, 1)
    assert writers["h.0.tail.weight"][0].axis == Axis(0, 16, 1, 32, 1)
    assert writers["h.0.strided.weight"][0].axis == Axis(0, 0, 4, 4, 2)
    assert plan().ops[0].axis == Axis(-1, 0, 1, 32, 1)
    assert plan().ops[2] == Centring("h.1.attn", "input", Axis(-1, 0, 4, 8, 1), "read by h.2.ln_1")


def test_what_is_merged_widened_and_untied() -> None:
    found = plan()
    readers = (
        Reader(
            NamedParameter("h.2.q.weight", "h.2.q.weight"),
            1,
            NamedParameter("h.2.q.bias", "h.2.q.bias"),
        ),
        Reader(
            NamedParameter("h.2.k.weight", "toy.h.2.k.weight"),
            0,
            NamedParameter("h.2.k.bias", "toy.h.2.k.bias"),
        ),
    )
    head = Reader(NamedParameter("head.weight", "head.weight"), 1)
    assert found.merged[2:] == (
        Merge("h.2.q_norm", "h.2.q_norm.weight", "h.2.q_norm.bias", readers),
        Merge("final", "final.weight", "", (head,), 1.0),
    )
    assert set(found.unmerged) == {
        UnmergedNorm("h.0.ln_1", "it is read twice"),
        UnmergedNorm("h.1.ln_1", "it is read by something that is not linear", "h.1.act"),
        UnmergedNorm("h.2.ln_1", "it is read by something that is not linear", "h.2.act"),
        UnmergedNorm("embed.norm", ""),
    }
    assert found.widened[1] == Widening(
        GrownParameter("h.1.mlp.up.weight", "toy.h.1.mlp.up.weight", 0),
        GrownParameter("h.1.mlp.up.bias", "toy.h.1.mlp.up.bias", 0),
        GrownParameter("h.1.mlp.down.weight", "toy.h.1.mlp.down.weight", 1),
        64, 72, 32, "n_inner", True,
    )  # fmt: skip
    assert found.widened[3] == Widening(
        GrownParameter("other.up.weight", "other.up.weight", 1), None,
        GrownParameter("other.down.weight", "other.down.weight", 0),
        60, 64, 16, "text_config.n_inner", False,
    )  # fmt: skip
    assert len(found.widened) == 4
    assert found.untied == (
        UntiedParameter("head.weight", "head.weight", "embed.tokens.weight", "embed.tokens.weight",
               (99, 32)),
        UntiedParameter("decoder.weight", "toy.decoder.weight", "embed.weight", "toy.embed.weight",
               (9, 32)),
    )  # fmt: skip
    assert found.settings == (
        Setting("n_inner", 72), Setting("text_config.n_inner", 64), Setting("n_kept", 3),
        Setting("text_config.tie_word_embeddings", False),
    )  # fmt: skip


def test_the_rest() -> None:
    found, variant = plan(), load_recipe(FILE).variants[0]
    assert (found.model_type, found.classes) == ("toy", ("ToyModel", "ToyForMaskedLM"))
    assert (found.outputs, found.entry_inputs) == (("logits",), ("inputs_embeds",))
    assert found.covered == CoveredCalls(variant.calls) and len(variant.calls) == 1
    assert found.other_norms == (("ToyRMSNorm", 2),)
    assert variant.when == {"depth": 3, "tie_word_embeddings": True}
    assert load_recipe(FILE).options["merge"] == "affine"


def test_its_plan_is_followed_and_written_the_same_again() -> None:
    found = plan()
    recipe = recipe_of(found, config=CONFIG, depends=tuple(CONFIG))
    read = parse_recipe(dump_recipe(recipe), where="again")
    assert read == recipe
    for one in (recipe, load_recipe(FILE)):
        assert follow(one, found, config=CONFIG) == found
        assert differences(one, found, config=CONFIG) == ()
    assert to_plan(read, shapes(), config=CONFIG).writers == found.writers


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("copy_of: toy.embed.weight", "copy_of: embed.tokens.weight",
         "toy.decoder.weight: the recipe unties it: {copy_of: embed.tokens.weight"),
        ("n_kept: 3", "n_kept: 4", "n_kept: the recipe sets it to 4, the proof sets it to 3"),
        ("from: 60, to: 64", "from: 60, to: 72",
         "other.down.weight: the recipe widens its MLP: .*to: 72.*, the proof .*to: 64"),
        ("      one_plus: true\n", "", "final: the recipe merges it: .*, the proof .*one_plus"),
        ("part: 2 of 3", "part: 3 of 3",
         "h.0.fused.weight: the recipe centres it over .*element 64, the proof .*element 32"),
        ("place: input", "place: output",
         "centres the output of h.0.attn, which is not part of the proof; proven are input of h.0"),
        ("'toy.h.{i}.gamma', ", "'h.{i}.gamma', ",
         "the recipe merges h.0.gamma into it .*, the proof merges h.0.gamma .stored as toy.h.0"),
    ],
)  # fmt: skip
def test_a_change_of_any_line_is_refused(old: str, new: str, message: str) -> None:
    text = FILE.read_text(encoding="utf-8")
    assert text.count(old) == 1
    changed = parse_recipe(text.replace(old, new), where="mine.yaml")
    with pytest.raises(RecipeError, match=f"mine.yaml: .*{message}"):
        follow(changed, plan(), config=CONFIG)
    assert differences(changed, plan(), config=CONFIG)
