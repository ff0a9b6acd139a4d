"""Stored tensors are exactly what their edits make of the original's, whoever computes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from enjoyln_cli.checkpoint.reader import Checkpoint, open_checkpoint
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.linear_steps import AddProduct, CentreAxis, RotateAxis, Scale
from enjoyln_cli.edits.new_values import Fill
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.fold_options import WriteOptions
from enjoyln_cli.plan.orthogonal_matrices import GivenMatrix, Rotation, matrix
from enjoyln_cli.rewrite.writer import write_shards
from enjoyln_cli.verification.stored_tensors import check_tensors

LOW = {"float16": torch.float16, "bfloat16": torch.bfloat16}
ROWS = 37


def whole(dim: int, size: int) -> Axis:
    return Axis(dim, 0, 1, size, 1)


def rotated(dim: int, rotation: Rotation) -> Edit:
    return Edit((RotateAxis(whole(dim, rotation.size), rotation),))


def tensors(size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights with a mean and with outliers, a norm, and a bias; all of them random."""
    torch.manual_seed(size)
    found = {
        "table": torch.randn(ROWS, size) * 0.02 + 0.002,
        "writer": torch.randn(size, ROWS) * torch.randn(size, 1).exp(),
        "reader": torch.randn(ROWS, size) * torch.randn(size).exp(),
        "bias": torch.randn(ROWS),
        "gamma": 1 + 0.3 * torch.randn(size),
        "beta": torch.randn(size),
    }
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def edits_for(size: int, rotation: Rotation) -> dict[str, Edit]:
    """The edits of a stream: what writes it, and what reads it behind a norm."""
    return {
        "table": rotated(1, rotation),
        "writer": rotated(0, rotation).adding(CentreAxis(whole(0, size))),
        "reader": rotated(1, rotation).adding(Scale("gamma", 1)),
        "bias": Edit((AddProduct("reader", 1, "beta"),)),
        "gamma": Edit((Fill(1.0),)),
        "beta": rotated(0, rotation).adding(Scale("gamma", 0, divides=True)),
    }


def is_nearest(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether ``found`` is ``exact`` rounded once; of two nearest neighbours it may be either."""
    info = torch.finfo(found.dtype)
    step = info.eps * 2.0 ** (torch.frexp(exact)[1] - 1).double()
    step = step.clamp(min=info.smallest_normal * info.eps)
    return bool(((found.double() - exact).abs() <= 0.5002 * step).all())


def stored(folder: Path, held: dict[str, torch.Tensor]) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    save_file(held, folder / "model.safetensors")
    return open_checkpoint(open_source(str(folder), weights=True))


def converted(
    original: Checkpoint, folder: Path, edits: dict[str, Edit], **options: object
) -> Checkpoint:
    folder.mkdir()
    write_shards(original, edits, folder, WriteOptions(**options))  # type: ignore[arg-type]
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return open_checkpoint(open_source(str(folder), weights=True))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (192, "float32"), (768, "float16"), (1023, "bfloat16"),
        pytest.param(2560, "bfloat16", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_rotated_checkpoint_is_what_its_edits_say(size: int, dtype: str, tmp_path: Path) -> None:
    rotation = Rotation(size, 0, "stream", fixes_ones=size != 2560)
    edits = edits_for(size, rotation)
    original = stored(tmp_path / "in", tensors(size, getattr(torch, dtype)))
    result = converted(original, tmp_path / "out", edits, jobs=3)
    assert check_tensors(original, result, edits)[1] == []
    held = load_file(tmp_path / "in" / "model.safetensors")
    q, table = matrix(rotation), held["table"].double()
    assert is_nearest(load_file(tmp_path / "out" / "model.safetensors")["table"], table @ q.T)


@pytest.mark.parametrize("dtype", LOW)
def test_float32_becomes_16_bits_in_one_rounding(dtype: str, tmp_path: Path) -> None:
    edits = edits_for(768, Rotation(768, 1, "stream", fixes_ones=True))
    original = stored(tmp_path / "in", tensors(768, torch.float32))
    result = converted(original, tmp_path / "out", edits, dtype=LOW[dtype])
    assert check_tensors(original, result, edits)[1] == []


@pytest.mark.parametrize("dtype", LOW)
def test_a_tensor_rotated_along_both_dimensions(dtype: str, tmp_path: Path) -> None:
    """A projection of values: the stream along one dimension, three heads along another."""
    stream, heads = Rotation(576, 0, "stream", True), Rotation(64, 0, "values", False)
    rotations = (RotateAxis(whole(0, 576), stream), RotateAxis(Axis(1, 64, 3, 64, 1), heads))
    edits = {"weight": Edit((Scale("gamma", 0), *rotations))}
    torch.manual_seed(0)
    held = {"weight": torch.randn(576, 330).to(LOW[dtype]), "gamma": torch.rand(576) + 0.5}
    original = stored(tmp_path / "in", held)
    result = converted(original, tmp_path / "out", edits)
    assert check_tensors(original, result, edits)[1] == []
    exact = matrix(stream) @ (held["gamma"].double().unsqueeze(1) * held["weight"].double())
    for first in (64, 128, 192):
        exact[:, first : first + 64] = exact[:, first : first + 64] @ matrix(heads).T
    assert is_nearest(load_file(tmp_path / "out" / "model.safetensors")["weight"], exact)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("table", "float32"), ("table", "bfloat16"), ("writer", "float16"), ("reader", "bfloat16"),
        ("bias", "float32"), ("bias", "float16"), ("beta", "bfloat16"),
    ],
)  # fmt: skip
def test_a_single_weight_that_is_one_step_off_is_found(
    name: str, dtype: str, tmp_path: Path
) -> None:
    edits = edits_for(768, Rotation(768, 0, "stream", fixes_ones=True))
    original = stored(tmp_path / "in", tensors(768, getattr(torch, dtype)))
    converted(original, tmp_path / "out", edits)
    right = load_file(tmp_path / "out" / "model.safetensors")
    torch.manual_seed(1)
    for at in torch.randint(0, right[name].numel(), (3,)).tolist():
        for towards in (torch.inf, -torch.inf):
            wrong = right[name].clone()
            value = wrong.view(-1)[at]
            wrong.view(-1)[at] = torch.nextafter(value, torch.full_like(value, towards))
            changed = stored(tmp_path / "wrong", right | {name: wrong})
            failures = check_tensors(original, changed, edits)[1]
            assert failures == [f"{name}: not the original's tensor, edited as the plan says"]


def test_another_seed_another_matrix_and_none_are_found(tmp_path: Path) -> None:
    rotation = Rotation(192, 0, "stream", fixes_ones=True)
    original = stored(tmp_path / "in", tensors(192, torch.bfloat16))
    q = matrix(rotation)
    q[[0, 1]] = q[[1, 0]]
    others = [
        replace(rotation, seed=1), replace(rotation, label="values"),
        replace(rotation, given=GivenMatrix("", q)),
    ]  # fmt: skip
    for number, other in enumerate(others):
        folder = tmp_path / str(number)
        result = converted(original, folder, {"table": rotated(1, other)})
        assert check_tensors(original, result, {"table": rotated(1, rotation)})[1]
        assert not check_tensors(original, result, {"table": rotated(1, other)})[1]
    assert check_tensors(original, original, {"table": rotated(1, rotation)})[1]


def test_a_sum_in_another_order_may_fall_beyond_a_tie(tmp_path: Path) -> None:
    """``1 + 2**-9`` is halfway between two bfloat16 numbers, and rounding makes it either."""
    half = Rotation(4, 0, "stream", fixes_ones=True)
    q = matrix(half)
    wanted = torch.tensor([[1 + 2**-8, 0.5, -0.25, 0.125]], dtype=torch.float64)
    x = wanted @ q  # exact in float64: the entries of q are halves
    original = stored(tmp_path / "in", {"table": x})
    edits = {"table": rotated(1, half)}
    for value, right in ((1.0, True), (1 + 2**-7, True), (1 + 2**-6, False), (1 - 2**-8, False)):
        new = wanted.bfloat16()
        new[0, 0] = value
        result = stored(tmp_path / "out", {"table": new})
        assert (check_tensors(original, result, edits)[1] == []) == right, value


def test_cancelling_sums_have_a_margin_of_their_terms(tmp_path: Path) -> None:
    """A bias is the sum of products near 1e8 that cancel up to 1e-8 of them."""
    torch.manual_seed(2)
    weight, beta = torch.randn(8, 4000, dtype=torch.float64), torch.randn(4000) * 1e8
    weight[:, 0] -= (weight @ beta.double()) / beta[0].double()
    held = {"weight": weight, "beta": beta.double(), "bias": torch.ones(8, dtype=torch.float64)}
    original = stored(tmp_path / "in", held)
    edits = {"bias": Edit((AddProduct("weight", 1, "beta"),))}
    backwards = (weight.flip(1) * beta.double().flip(0)).cumsum(1)[:, -1]
    result = stored(tmp_path / "out", held | {"bias": held["bias"] + backwards})
    assert check_tensors(original, result, edits)[1] == []
    wrong = held | {"bias": held["bias"] + backwards + 1}
    assert check_tensors(original, stored(tmp_path / "wrong", wrong), edits)[1]
