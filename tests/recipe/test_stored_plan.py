"""The plan in a result: it comes back whole, or is refused if it does not fit the tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from stored_files import stored_plan

from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.edited_tensors import (
    CentredWeight,
    GrownParameter,
    NamedParameter,
    RotatedTensor,
)
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
from enjoyln_cli.recipe.stored_plan import plan_text

HEADS = Axis(0, 5, 2, 3, 1, 7)
GAMMA = NamedParameter("b.gamma")
PLAN = Plan(
    model_type="toy",
    model_class="Toy",
    classes=("Toy", "ToyModel"),
    norms=(
        Verdict("a.norm", "in_weights"),
        Verdict("b.norm", "stays_layernorm", reason="why", culprit="b"),
        Verdict("c.norm", "with_subtraction", ("wte",)),
    ),
    centred_weights=(
        CentredWeight("a.weight", HEADS, (19, 5), "m.a.weight", Axis(1, 5, 2, 3, 1, 7)),
        CentredWeight("b.weight", Axis(0, 0, 1, 5, 1), (5, 7), scale=GAMMA),
        CentredWeight("down.weight", Axis(0, 0, 1, 5, 1), (5, 9)),
    ),
    subtractions=(MeanSubtraction("wte", "output", Axis(-1, 0, 1, 5, 1), "a head reads it"),),
    entry_inputs=("inputs_embeds",),
    other_norms=(("ToyRMSNorm", 2),),
    widened=(
        Widening(
            GrownParameter("up.weight"), None, GrownParameter("down.weight", dim=1),
            9, 17, 5, "n_inner", True,
        ),
    ),
    fused=(
        NormFusion(
            "a.norm", "a.norm.weight", "a.norm.bias",
            (NextLinear(NamedParameter("q.weight"), 1, NamedParameter("q.bias", "m.q.bias")),), 1.0,
        ),
    ),
    unfused=(UnfusedNorm("b.norm", "why"),),
    rotation_groups=(
        RotationGroup(
            "b.weight", "residual", 5, True,
            (RotatedTensor("b.weight", Axis(0, 0, 1, 5, 1), (5, 7)),),
        ),
        RotationGroup("q.weight", "values", 3, False, reason="it is read twice", culprit="q"),
    ),
    seed=7,
    untied=(UntiedParameter("head.weight", source="wte.weight", shape=(11, 5)),),
    settings=(Setting("n_inner", 17), Setting("tie_word_embeddings", False)),
    dropout_rates=(("drop.p", 0.125),),
    training=True,
)  # fmt: skip
SHAPES = {
    "m.a.weight": (19, 5), "b.weight": (5, 7), "b.gamma": (5,), "up.weight": (17, 5),
    "down.weight": (5, 17), "a.norm.weight": (5,), "a.norm.bias": (5,), "q.weight": (4, 5),
    "m.q.bias": (4,), "head.weight": (11, 5), "wte.weight": (11, 5),
}  # fmt: skip


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """A result with the tensors of ``SHAPES`` and ``PLAN``."""
    save_file({name: torch.randn(shape) for name, shape in SHAPES.items()},
              tmp_path / "model.safetensors")  # fmt: skip
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "enjoyln_plan.json").write_text(plan_text(PLAN))
    return tmp_path


def test_the_plan_comes_back_whole(result: Path) -> None:
    assert stored_plan(result) == PLAN


def test_what_only_a_proof_needs_is_left_out(result: Path) -> None:
    verdict = replace(PLAN.norms[1], needs=("a", "b"), mlps=("c",), path=("d",))
    text = plan_text(replace(PLAN, norms=(PLAN.norms[0], verdict, PLAN.norms[2])))
    assert text == (result / "enjoyln_plan.json").read_text()


CHANGES: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "an unknown key": (("note",), 1, "unknown key 'note'; "),
    "an unknown status": (("norms", "0", "status"), "gone", r"norms\[0\].status: 'gone' "),
    "another shape": (
        ("centred_weights", "1", "shape"),
        [5, 8],
        r"b.weight: shape \[5, 7\] before the edit",
    ),
    "no such dimension": (
        ("centred_weights", "1", "axis", "dim"),
        2,
        r"b.gamma: has 5 elements, too few or too many for b.weight",
    ),
    "a step too far": (
        ("centred_weights", "0", "axis", "step"),
        12,
        "m.a.weight: .* does not contain Axis",
    ),
    "a size of zero": (
        ("centred_weights", "1", "axis", "size"),
        0,
        "axis.size: 0 instead of a number",
    ),
    "a size that is true": (
        ("centred_weights", "1", "axis", "size"),
        True,
        "True instead of a whole",
    ),
    "no such tensor": (("centred_weights", "1", "tensor"), "no", "no: there is no such tensor"),
    "no such scale": (
        ("centred_weights", "1", "scale", "parameter"),
        "no",
        "no: .*there is no such tensor",
    ),
    "a scale that is a matrix": (
        ("centred_weights", "1", "scale", "parameter"),
        "q.weight",
        "q.weight: has 20 elements, too few or",
    ),
    "another number of units": (("widened", "0", "to"), 25, r"shape \[5, 1\] before the edit"),
    "too few units": (("widened", "0", "to"), 10, "to is 10, but must be at least 13"),
    "a reader over outputs": (
        ("fused", "0", "readers", "0", "dim"),
        0,
        "a.norm.weight: has 5 elements, too few or",
    ),
    "a bias of another size": (
        ("fused", "0", "readers", "0", "bias", "tensor"),
        "b.gamma",
        "b.gamma: .* does not fit the product",
    ),
    "an untied tensor of another shape": (
        ("untied", "0", "shape"),
        [11, 6],
        r"shape \[11, 5\] before the edit",
    ),
    "a copy that is not stored": (("untied", "0", "tensor"), "no", "no has not the shape"),
    "a rotated tensor of another shape": (
        ("rotation_groups", "0", "tensors", "0", "shape"),
        [7, 5],
        r"b.weight: shape \[5, 7\] before the edit",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_plan_that_does_not_fit_is_refused(result: Path, name: str) -> None:
    (*outer, last), value, words = CHANGES[name]
    data = json.loads((result / "enjoyln_plan.json").read_text())
    place = data
    for step in outer:
        place = place[int(step) if isinstance(place, list) else step]
    place[last] = value
    (result / "enjoyln_plan.json").write_text(json.dumps(data))
    with pytest.raises(BadCheckpoint, match=words) as caught:
        stored_plan(result)
    assert "enjoyln_plan.json: " in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).endswith("convert the source again")


@pytest.mark.parametrize("text", [None, "", "[1]", "{", "\x00", '{"norms": ' + "[" * 100_000])
def test_no_plan_at_all(result: Path, text: str | None) -> None:
    path = result / "enjoyln_plan.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadCheckpoint, match="cannot be read as the plan of this result") as caught:
        stored_plan(result)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
