"""Checkpoints that are rotated: written, verified from their recipe, loaded by the stock class."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import enjoyln, good, refused
from fold_cases import written
from live_models import CHECKPOINTS
from rounding import as_exact
from safetensors.torch import save_file
from tiny_models import TOKENS, live

from enjoyln_cli import verify
from enjoyln_cli.analysis.analyze import analyze_config
from enjoyln_cli.checkpoint.marker import read_marker
from enjoyln_cli.checkpoint.reader import open_checkpoint
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.conversion.fold import convert
from enjoyln_cli.edits import linear_steps
from enjoyln_cli.errors import (
    BadCheckpoint,
    EnjoyLNError,
    NothingToFold,
    RecipeError,
    VerificationFailed,
)
from enjoyln_cli.plan import orthogonal_matrices
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.plan.orthogonal_matrices import Rotation
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.recipe.compare import require_same
from enjoyln_cli.recipe.read import parse_recipe
from enjoyln_cli.rewrite import edit_pieces, tensor_parts
from enjoyln_cli.rotation.given_matrices import give_matrices

ROTATED = Options(fold=False, rotate=True, untie=True)
IDS = torch.tensor([[3, 14, 15, 9, 2, 6], [5, 3, 5, 8, 9, 7]])


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rotated") / "gpt2"
    good("rotate", CHECKPOINTS / "gpt2", "-o", folder, "--untie", "--seed", 3)
    return folder


@cache
def plan_of(name: str, options: Options = ROTATED) -> Plan:
    source = open_source(str(CHECKPOINTS / name), weights=True)
    config = transformers.AutoConfig.from_pretrained(CHECKPOINTS / name)
    return analyze_config(config, checkpoint=open_checkpoint(source), options=options).plan


def test_the_result_says_what_rotated(out: Path) -> None:
    live = read_marker(json.loads((out / "config.json").read_text())).plan
    assert live.folded == () and len(live.rotated) == 4
    plan = json.loads((out / "enjoyln_plan.json").read_text())
    assert plan["seed"] == 3
    assert [group["kind"] for group in plan["rotation_groups"]] == ["residual"] + 3 * ["values"]


def test_it_is_verified_by_its_stored_plan(out: Path) -> None:
    found = verify(out)
    assert found.passed, found.failures
    assert found.identity_error <= 1e-12 and found.max_ratio == 2.0
    card = (out / "README.md").read_text()
    assert "rotated by `enjoyln` for quantisation" in card
    assert "enjoyln rotate ./gpt2 -o gpt2 --untie --seed 3" in card


def test_a_rotated_result_is_not_rotated_again(out: Path, tmp_path: Path) -> None:
    said = refused("rotate", out, "-o", tmp_path / "out")
    assert "is the result of an earlier rotation; convert its source" in said


def test_rotating_into_16_bits_says_what_to_quantise_from(tmp_path: Path) -> None:
    words = ("rotate", CHECKPOINTS / "phi", "-o", tmp_path / "out", "--samples", 1)
    result = enjoyln(*words, "--untie", "--dtype", "bfloat16")
    said, warned = result.stdout, result.stderr
    assert (
        "--untie changes nothing here: nothing that is rotated depends on a tied weight" in warned
    )
    assert "rounded every weight to bfloat16 once more; rotate with --dtype float32" in said
    assert "to see whether rotating helps on your data: `enjoyln rotate`" in said


def test_a_recipe_with_another_rotation_is_refused(out: Path) -> None:
    plan = plan_of("gpt2", replace(ROTATED, seed=3))
    config = transformers.AutoConfig.from_pretrained(CHECKPOINTS / "gpt2")
    text = (out / "enjoyln_recipe.yaml").read_text()
    require_same(parse_recipe(text, where="same.yaml"), plan, config=config)
    wrong = parse_recipe(text.replace("kind: residual", "kind: sideways"), where="wrong.yaml")
    with pytest.raises(
        RecipeError,
        match=r"transformer.wte.weight: the recipe has {kind: sideways, .* {kind: residual",
    ):
        require_same(wrong, plan, config=config)


def test_a_file_is_the_same_in_small_pieces(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_parts, "PART", 1000)
    monkeypatch.setattr(edit_pieces, "PIECE", 300)
    options = replace(ROTATED, seed=3)
    convert(CHECKPOINTS / "gpt2", tmp_path / "out", options=options, verify=False)
    whole, pieces = written(out), written(tmp_path / "out")
    assert whole.keys() == pieces.keys()
    for name, tensor in whole.items():  # sums of other lengths may round in another order
        exact = tensor.double()
        assert as_exact(pieces[name], tensor, exact)


def transposed(x: torch.Tensor, axis: Axis, q: Rotation) -> torch.Tensor:
    """``Qᵀ`` where a tensor is rotated over its first dimension."""
    if axis.dim:
        return orthogonal_matrices.rotate(x, axis, q)
    inverse = orthogonal_matrices.matrix(q).T
    part = x.narrow(0, axis.start, axis.length).unflatten(0, (axis.outer, axis.size, axis.inner))
    rotated = torch.einsum("ij,oj...->oi...", inverse, part).flatten(0, 2)
    return torch.cat([x[: axis.start], rotated, x[axis.stop :]])


def signed(x: torch.Tensor, axis: Axis, q: Rotation) -> torch.Tensor:
    """An orthogonal matrix that does not fix the vector of ones."""
    return orthogonal_matrices.rotate(x, axis, replace(q, fixes_ones=False))


@pytest.mark.one_case
@pytest.mark.parametrize("wrong", [transposed, signed])
def test_a_wrong_matrix_does_not_pass(
    wrong: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_steps, "rotate", wrong)
    with pytest.raises(VerificationFailed, match="the edits change the function: identity error"):
        convert(CHECKPOINTS / "gpt2", tmp_path / "out", options=ROTATED, samples=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_cannot_be_rotated_is_refused(tmp_path: Path) -> None:
    tied = Options(fold=False, rotate=True, values=False)
    with pytest.raises(NothingToFold, match=r"nothing of .* can be rotated: 1 x the weight of a "):
        convert(CHECKPOINTS / "gpt2", tmp_path / "out", options=tied)
    text = refused("rotate", CHECKPOINTS / "gpt2", "-o", tmp_path / "out", "--no-values")
    hint = "weights are tied; --untie may also rotate the residual stream of transformer.wte.weight"
    assert hint in text
    text = refused("fold", CHECKPOINTS / "phi", "--dry-run", "--seed", 3, status=2)
    assert "--seed needs --rotate." in text
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_dry_run_and_a_report_say_what_rotates_and_what_stays() -> None:
    text = good("rotate", CHECKPOINTS / "bert", "--dry-run")
    assert "rotate the values of 3 attentions" in text
    assert (
        "not rotated: 1 residual stream of 80 features" in text
        and "gelu acts on single features" in text
    )
    text = good("report", CHECKPOINTS / "phi", "--rotate")
    assert "rotate 1 residual stream of 64 features (model.embed_tokens.weight)" in text
    assert "not rotated: the heads of" in text


def test_a_recipe_has_the_seed(out: Path, tmp_path: Path) -> None:
    recipe = out / "enjoyln_recipe.yaml"
    call = ["rotate", CHECKPOINTS / "gpt2", "-o", tmp_path / "out", "--untie"]
    good(*call, "--recipe", recipe, "--no-verify")
    one, same = (folder / "model.safetensors" for folder in (out, tmp_path / "out"))
    assert one.read_bytes() == same.read_bytes()


def orthogonal(size: int, seed: int, fixes_ones: bool) -> torch.Tensor:
    """A random orthogonal float64 matrix, with ``Q 1 = 1`` if asked."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(size, size, dtype=torch.float64, generator=generator)
    if not fixes_ones:
        return torch.linalg.qr(found)[0].contiguous()
    ones = torch.full((size, 1), size**-0.5, dtype=torch.float64)
    basis = torch.linalg.qr(torch.cat([ones, found[:, 1:]], 1))[0][:, 1:]
    rest = torch.linalg.qr(found[1:, 1:])[0]
    return (basis @ rest @ basis.T + 1 / size).contiguous()


STREAM, VALUES = "transformer.wte.weight", "transformer.h.1.attn.c_attn.weight"


@pytest.mark.slow
def test_matrices_of_a_file_are_used_kept_and_verified(tmp_path: Path) -> None:
    stream, values = orthogonal(96, 0, True), orthogonal(24, 1, False)
    save_file({STREAM: stream.float(), VALUES: values}, tmp_path / "own.safetensors")
    out, again = tmp_path / "out", tmp_path / "again"
    how = ("--untie", "--matrix", tmp_path / "own.safetensors", "--no-verify")
    good("rotate", CHECKPOINTS / "gpt2", "-o", out, *how)
    before, after = (
        transformers.GPT2LMHeadModel.from_pretrained(path, dtype=torch.float64)
        for path in (CHECKPOINTS / "gpt2", out)
    )
    expected = before.transformer.wte.weight @ stream.T
    found = after.transformer.wte.weight  # the matrix and the result are stored in float32
    assert as_exact(found, expected, expected, torch.float32)
    assert verify(out).passed
    recipe = out / "enjoyln_recipe.yaml"
    call = ["rotate", CHECKPOINTS / "gpt2", "-o", again, "--untie", "--recipe", recipe]
    good(*call, "--no-verify")
    same = transformers.GPT2LMHeadModel.from_pretrained(again, dtype=torch.float64)
    assert torch.equal(same.transformer.wte.weight, after.transformer.wte.weight)


def test_learned_matrices_are_known_by_spinquants_names(tmp_path: Path) -> None:
    """``R1`` and ``R2`` multiply rows from the right."""
    plan = plan_of("gpt2")
    learned = {"R1": orthogonal(96, 2, True), "transformer.h.0.attn.R2": orthogonal(24, 3, False)}
    torch.save(learned, tmp_path / "R.bin")
    given = {one.name: one.given for one in give_matrices(plan, tmp_path / "R.bin").rotation_groups}
    rotated = given.pop(STREAM)
    assert rotated is not None
    torch.testing.assert_close(rotated.values, learned["R1"].T, rtol=0, atol=1e-13)
    first = given.pop("transformer.h.0.attn.c_attn.weight")
    assert first is not None
    assert set(given.values()) == {None}


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({STREAM: torch.eye(95)}, "has shape [95, 95], but needs [96, 96]"),
        ({STREAM: 1.01 * torch.eye(96)}, "is not orthogonal"),
        ({STREAM: orthogonal(96, 4, False)}, "moves the vector of ones"),
        ({STREAM: torch.full((96, 96), torch.nan)}, "is not orthogonal"),
    ],
)
def test_wrong_matrices_are_refused_by_name(
    tmp_path: Path, tensors: dict[str, torch.Tensor], reason: str
) -> None:
    save_file(tensors, tmp_path / "own.safetensors")
    with pytest.raises(EnjoyLNError, match=re.escape(reason)):
        give_matrices(plan_of("gpt2"), tmp_path / "own.safetensors")


def test_a_matrix_of_no_group_is_refused(tmp_path: Path) -> None:
    save_file({"R3": torch.eye(96)}, tmp_path / "own.safetensors")
    call = ["rotate", CHECKPOINTS / "gpt2", "-o", tmp_path / "out", "--untie"]
    assert "R3 names nothing that is rotated" in refused(
        *call, "--matrix", tmp_path / "own.safetensors"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "kind",
    [
        torch.nn.Parameter, torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr,
        lambda q: q.T.contiguous().T, lambda q: q.clone().requires_grad_(),
    ],
    ids=["parameter", "sparse", "csr", "transposed", "with gradients"],
)  # fmt: skip
def test_a_matrix_may_be_any_tensor_of_real_numbers(
    kind: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    matrix = orthogonal(96, 2, True)
    torch.save({STREAM: kind(matrix), "R1": kind(matrix.T)}, tmp_path / "R.bin")
    whole = torch.eye(24, dtype=torch.int64).roll(5, 0)
    torch.save({VALUES: whole}, tmp_path / "W.bin")
    for file, expected in (("R.bin", matrix), ("W.bin", whole.double())):
        rotation_groups = give_matrices(plan_of("gpt2"), tmp_path / file).rotation_groups
        (given,) = (group.given for group in rotation_groups if group.given)
        torch.testing.assert_close(given.values, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (lambda: torch.eye(96, device="meta"), "is on the meta device and has no values"),
        (lambda: torch.eye(96, dtype=torch.complex64), "is complex"),
        (lambda: torch.quantize_per_tensor(torch.eye(96), 0.1, 0, torch.qint8), "is quantised"),
        (lambda: torch.ones(96, 96, 96), "has shape [96, 96, 96], but needs [96, 96]"),
        (lambda: torch.ones(96), "has shape [96], but needs [96, 96]"),
    ],
    ids=["meta", "complex", "quantised", "of rank 3", "of rank 1"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*[qQ]uantiz.*deprecated")
def test_other_tensors_are_refused_by_name(
    tensor: Callable[[], torch.Tensor], reason: str, tmp_path: Path
) -> None:
    for key in (STREAM, "R1"):
        torch.save({key: tensor()}, tmp_path / "R.bin")
        with pytest.raises(BadCheckpoint, match=re.escape(f"R.bin: {key} {reason}")):
            give_matrices(plan_of("gpt2"), tmp_path / "R.bin")


def test_a_tied_model_whose_norms_have_no_weight_stays_tied(tmp_path: Path) -> None:
    config = transformers.OlmoConfig(
        **TOKENS, hidden_size=24, num_attention_heads=4, num_hidden_layers=2, intermediate_size=33,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    original = live("OlmoForCausalLM", config)
    original.save_pretrained(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", options=ROTATED, verify=False)
    found = open_checkpoint(open_source(str(tmp_path / "out"), weights=True))
    before = open_checkpoint(open_source(str(tmp_path / "in"), weights=True))
    assert found.tensors.keys() == before.tensors.keys()
    rotated = type(original).from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert rotated.get_input_embeddings().weight is rotated.get_output_embeddings().weight
    assert not torch.allclose(rotated.get_input_embeddings().weight,
                              original.get_input_embeddings().weight, atol=1e-2)  # fmt: skip
    with torch.no_grad():
        expected = original(IDS).logits
        far = (rotated.eval()(IDS).logits - expected).abs().max() / expected.abs().max()
    assert far <= 1e-5  # OLMo's norms compute in float32


def test_a_file_without_matrices_is_refused(tmp_path: Path) -> None:
    plan = plan_of("gpt2")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(BadCheckpoint, match=r"text: neither a safetensors file .* nor one that"):
        give_matrices(plan, tmp_path / "text")
    for name in ("own.safetensors", "R.bin"):
        with pytest.raises(BadCheckpoint, match="no such file"):
            give_matrices(plan, tmp_path / name)
        (tmp_path / name).write_bytes(b"not tensors")
        with pytest.raises(BadCheckpoint, match=name):
            give_matrices(plan, tmp_path / name)
    torch.save([1, 2], tmp_path / "R.bin")
    with pytest.raises(BadCheckpoint, match="not a dictionary"):
        give_matrices(plan, tmp_path / "R.bin")


@pytest.mark.slow
def test_token_ids_of_the_user_are_what_the_result_is_checked_on(tmp_path: Path) -> None:
    ids = tmp_path / "ids.jsonl"
    ids.write_text("".join(f"{[*range(at + 3, at + 20 + at)]}\n" for at in range(5)))
    found = json.loads(
        good("rotate", CHECKPOINTS / "gpt2", "-o", tmp_path / "out", "--tokens", ids, "--json")
    )
    assert found["verification"]["passed"] and found["verification"]["own_rows"] == 5
    both = ("--tokens", ids, "--text", ids)
    line = refused("rotate", CHECKPOINTS / "gpt2", "-o", tmp_path / "no", *both, status=2)
    assert "--text and --tokens cannot be combined" in line
