"""The parts of an edit (fuse, scale, centre, append) apply in one order and round once."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from edit_cases import EDITS, IN, NEW, tensors
from fold_cases import same, store, written
from stored_files import opened

from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.linear_steps import AddProduct, CentreAxis, LayerScale, RotateAxis, Scale
from enjoyln_cli.edits.new_values import Append, Fill
from enjoyln_cli.edits.step import Step
from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.plan.axis import Axis, blocks
from enjoyln_cli.plan.fold_options import WriteOptions
from enjoyln_cli.plan.orthogonal_matrices import Rotation
from enjoyln_cli.plan.orthogonal_matrices import matrix as dense
from enjoyln_cli.rewrite import edit_pieces, tensor_parts
from enjoyln_cli.rewrite.shard_layout import bytes_to_write
from enjoyln_cli.rewrite.writer import write_shards
from enjoyln_cli.verification.stored_tensors import check_tensors


def inside(outputs: tuple[int, int], length: int) -> torch.Tensor:
    at = torch.arange(length)
    return (outputs[0] <= at) & (at < outputs[1])


def by_definition(held: dict[str, torch.Tensor], name: str, edit: Edit) -> torch.Tensor:
    """The edited tensor, from the formulas in the docstrings of the steps."""
    x = held[edit.source or name].double()
    for step in edit.steps:
        x = after(step, x, held)
    return x


def after(step: Step, x: torch.Tensor, held: dict[str, torch.Tensor]) -> torch.Tensor:
    match step:
        case Fill():
            return torch.full_like(x, step.number)
        case Scale():
            gain = held[step.vector].double() + step.offset
            gain = gain[[at // step.inner % len(gain) for at in range(x.shape[step.dim])]]
            scaled = x * gain.reshape([-1 if d == step.dim else 1 for d in range(x.ndim)])
            if not step.outputs:
                return scaled
            among = inside(step.outputs, x.shape[1 - step.dim])
            return torch.where(among.unsqueeze(step.dim), scaled, x)
        case AddProduct():
            matrix, by = held[step.matrix].double(), held[step.by].double()
            by = by[[at // step.inner % len(by) for at in range(matrix.shape[step.dim])]]
            added = matrix @ by if step.dim == 1 else by @ matrix
            return x + (added * inside(step.outputs, len(added)) if step.outputs else added)
        case CentreAxis():
            dim, x = step.axis.dim, x.clone()
            size = step.axis.size
            q = torch.eye(size, dtype=torch.float64) - 1 / size
            if isinstance(step, RotateAxis):
                q = dense(step.rotation)
            for axis in blocks(step.axis):
                part = x.narrow(dim, axis.start, axis.length)
                groups = part.unflatten(dim, (axis.outer, size, axis.inner)).movedim(dim + 1, -1)
                part.copy_((groups @ q.T).movedim(-1, dim + 1).flatten(dim, dim + 2))
            return x
        case Append():
            for value in step.values:
                x = torch.cat([x, torch.full_like(x.narrow(step.dim, 0, 1), value)], step.dim)
            return x
    raise AssertionError(step)


@pytest.fixture(params=[(1 << 22, 1 << 16), (200, 50), (4000, 40)], ids=["whole", "cut", "pieces"])
def divided(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with each tensor in one piece, and divided into many parts and pieces."""
    monkeypatch.setattr(tensor_parts, "PART", request.param[0])
    monkeypatch.setattr(edit_pieces, "PIECE", request.param[1])
    monkeypatch.setattr(edit_pieces, "SINGLE_PASS", 10 * request.param[1])
    monkeypatch.setattr(edit_pieces, "RUN", min(edit_pieces.RUN, request.param[1] // 10))


@pytest.mark.parametrize("kind", ["single", "bin"])
@pytest.mark.parametrize("case", EDITS)
def test_files_hold_what_the_definition_says(
    tmp_path: Path, case: str, kind: str, divided: None
) -> None:
    name, edit = EDITS[case]
    held = tensors(torch.bfloat16)
    store(tmp_path / "model", held, kind)
    (tmp_path / "out").mkdir()
    checkpoint = opened(tmp_path / "model")
    told: list[int] = []
    write_shards(checkpoint, {name: edit}, tmp_path / "out", progress=told.append)
    found = written(tmp_path / "out")
    assert same(found[name], by_definition(held, name, edit).bfloat16())
    assert all(same(found[n], tensor) for n, tensor in held.items() if n != name)
    assert sum(told) == sum(t.nbytes for t in found.values())
    assert sum(told) == bytes_to_write(checkpoint, {name: edit})


@pytest.mark.parametrize("case", EDITS)
def test_another_dtype_and_memory(tmp_path: Path, case: str, divided: None) -> None:
    """Edits also hold when files are written in another dtype, and for tensors in memory."""
    name, edit = EDITS[case]
    held = tensors(torch.float32)
    store(tmp_path / "model", held, "single")
    (tmp_path / "out").mkdir()
    write_shards(
        opened(tmp_path / "model"),
        {name: edit},
        tmp_path / "out",
        WriteOptions(dtype=torch.float16),
    )
    exact = by_definition(held, name, edit)
    assert same(written(tmp_path / "out")[name], exact.half())
    source = held[edit.source or name].double()
    in_memory = edit.loaded(held.__getitem__).apply(source)
    torch.testing.assert_close(in_memory, exact, rtol=0, atol=1e-14)


def rotating(axis: Axis, fixes_ones: bool = True) -> RotateAxis:
    return RotateAxis(axis, Rotation(axis.size, 1, "a rotation group", fixes_ones))


INPUTS, OUTPUTS = rotating(Axis(1, 0, 1, 26, 1)), rotating(Axis(0, 0, 1, 37, 1))
HEADS = rotating(Axis(0, 4, 4, 4, 1, 8))
ROTATIONS = {
    "inputs": ("w", Edit((Scale("g", 1), INPUTS))),
    "inputs, by signs": ("w", Edit((rotating(Axis(1, 0, 1, 26, 1), False),))),
    "outputs": ("w", Edit((LayerScale("s", 0), CentreAxis(OUTPUTS.axis), OUTPUTS))),
    "outputs of a transposed weight": ("t", Edit((rotating(Axis(1, 0, 1, 37, 1), False),))),
    "heads apart": ("w", Edit((HEADS,))),
    "heads apart that are not multiples": ("w", Edit((rotating(Axis(0, 4, 3, 5, 1, 12)),))),
    "heads side by side": ("w", Edit((rotating(Axis(0, 1, 2, 16, 1)),))),
    "heads and inputs": ("w", Edit((Scale("g", 1), HEADS, INPUTS))),
    "inputs, then heads": ("w", Edit((INPUTS, HEADS))),
    "tokens that alternate": ("w", Edit((rotating(Axis(1, 0, 1, 13, 2)),))),
    "experts": ("e", Edit((rotating(Axis(1, 0, 1, 37, 1)), rotating(Axis(2, 0, 1, 26, 1), False)))),
    "a bias": ("b", Edit((OUTPUTS,))),
}


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", ROTATIONS)
def test_rotated_files_hold_what_the_dense_matrix_says(
    tmp_path: Path, case: str, stored: torch.dtype, divided: None
) -> None:
    name, edit = ROTATIONS[case]
    held = tensors(stored)
    store(tmp_path / "model", held, "single")
    (tmp_path / "out").mkdir()
    write_shards(opened(tmp_path / "model"), {name: edit}, tmp_path / "out")
    exact, found = by_definition(held, name, edit), written(tmp_path / "out")
    assert same(found[name], exact.to(stored))
    in_memory = edit.loaded(held.__getitem__).apply(held[name].double())
    torch.testing.assert_close(in_memory, exact, rtol=0, atol=1e-14)
    assert in_memory.is_contiguous()
    held[name].view(-1)[(9 * IN + 7) % held[name].numel()] = float("nan")
    store(tmp_path / "damaged", held, "single")
    (tmp_path / "none").mkdir()
    if case.startswith("heads apart"):  # the element lies between two of them
        write_shards(opened(tmp_path / "damaged"), {name: edit}, tmp_path / "none")
        return
    with pytest.raises(BadCheckpoint, match="holds NaN or Inf"):
        write_shards(opened(tmp_path / "damaged"), {name: edit}, tmp_path / "none")


@pytest.mark.parametrize("case", EDITS)
def test_the_check_of_stored_tensors_knows_every_edit(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from enjoyln_cli.verification import stored_tensors

    monkeypatch.setattr(stored_tensors, "SLICE", 100)
    name, edit = EDITS[case]
    store(tmp_path / "model", tensors(torch.bfloat16), "single")
    (tmp_path / "out").mkdir()
    original = opened(tmp_path / "model")
    write_shards(original, {name: edit}, tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text("{}")
    folded = opened(tmp_path / "out")
    drift, failures = check_tensors(original, folded, {name: edit})
    assert failures == []
    centred = any(isinstance(step, CentreAxis) for step in edit.steps)
    assert set(drift) == ({name} if centred else set())
    if name in original.tensors:
        _, failures = check_tensors(original, folded, {})
        assert len(failures) == 1 and name in failures[0]
    else:
        _, failures = check_tensors(original, folded, {})
        assert failures == [f"{name} is stored in one of the two checkpoints only"]
    if edit.append:
        other = replace(edit.append, values=(0.25, *NEW[1:]))
        wrong = edit.without_append.adding(other)
        _, failures = check_tensors(original, folded, {name: wrong})
        assert len(failures) == 1 and name in failures[0]


def centred_length(edit: Edit, dim: int) -> int:
    """How many slices are centred along other dimensions than ``dim``."""
    axes = (step.axis for step in edit.steps if isinstance(step, CentreAxis))
    return sum(axis.length for axis in axes if axis.dim != dim)


@pytest.mark.parametrize(
    ("shape", "edit"),
    [
        ((4096, 1024), Edit((Scale("g", 1), CentreAxis(Axis(0, 0, 1, 4096, 1))))),
        ((1024, 4096), Edit((Scale("g", 0), CentreAxis(Axis(1, 0, 1, 4096, 1))))),
        ((4096, 1024), Edit((Scale("g", 1),))),
        (
            (1024, 4096),
            Edit((CentreAxis(Axis(0, 0, 1, 1024, 1)), CentreAxis(Axis(1, 0, 32, 128, 1)))),
        ),
        ((3072, 1024), Edit((Scale("g", 1), CentreAxis(Axis(0, 2048, 1, 1024, 1))))),
        ((50_000, 64), Edit((CentreAxis(Axis(1, 0, 1, 64, 1)),))),
        ((1 << 22,), Edit((CentreAxis(Axis(0, 0, 1 << 12, 1 << 10, 1)),))),
    ],
)
def test_large_tensors_are_divided(shape: tuple[int, ...], edit: Edit) -> None:
    parts = list(edit_pieces.divide(edit, shape, 1 << 18))
    assert len(parts) > 2
    (dim,) = {dim for dim, _, _ in parts}
    ends = [first + count for _, first, count in parts]
    assert [0, *ends[:-1]] == [first for _, first, _ in parts] and ends[-1] == shape[dim]
    for _, first, count in parts:
        assert count * math.prod(shape) // shape[dim] <= 1 << 18
        centring = edit.only(lambda step: isinstance(step, CentreAxis))
        assert centred_length(centring.part(dim, first, count), dim) == (
            centred_length(centring, dim)
        )


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        ("w", Edit((Scale("g", 0),)), "too few or too many"),
        ("w", Edit((Scale("none", 1),)), "none: there is no such tensor, .* for w"),
        ("w", Edit((Scale("ids", 1),)), "I64"),
        ("b", Edit((AddProduct("w", 0, "v"),)), "cannot be multiplied"),
        ("s", Edit((AddProduct("e", 2, "v"),)), "does not fit"),
        ("copy", Edit(source="none"), "none: there is no such tensor, .* for copy"),
        ("copy", Edit(), "copy: there is no such tensor"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, name: str, edit: Edit, words: str) -> None:
    held = tensors(torch.float32) | {"ids": torch.arange(IN)}
    store(tmp_path / "model", held, "single")
    (tmp_path / "out").mkdir()
    with pytest.raises(BadCheckpoint, match=words):
        write_shards(opened(tmp_path / "model"), {name: edit}, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_new_tensor_lies_beside_its_source_and_in_the_index(tmp_path: Path) -> None:
    held = tensors(torch.float32)
    store(tmp_path / "model", held, "sharded")
    (tmp_path / "out").mkdir()
    names = write_shards(opened(tmp_path / "model"), {"copy": Edit(source="t")}, tmp_path / "out")
    index = json.loads((tmp_path / "out" / names[-1]).read_text())
    assert index["weight_map"]["copy"] == index["weight_map"]["t"]
    before = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == before["weight_map"] | {"copy": before["weight_map"]["t"]}
    size = sum(t.nbytes for t in held.values()) + held["t"].nbytes
    assert index["metadata"] == {"total_parameters": 7 + held["t"].numel(), "total_size": size}
    assert same(written(tmp_path / "out")["copy"], held["t"])


def test_nan_that_spreads_and_overflow_are_refused(tmp_path: Path) -> None:
    held = tensors(torch.float32)
    held["w"][3, 5] = float("nan")
    held["t"][2, 1] = 6e4
    store(tmp_path / "model", held, "single")
    (tmp_path / "out").mkdir()
    checkpoint = opened(tmp_path / "model")
    with pytest.raises(BadCheckpoint, match="NaN or Inf"):
        write_shards(checkpoint, {"w": Edit((Scale("g", 1),))}, tmp_path / "out")
    for file in (tmp_path / "out").iterdir():
        file.unlink()
    big = Edit((Scale("g", 0, 9.0),))
    with pytest.raises(BadCheckpoint, match="beyond F16"):
        write_shards(checkpoint, {"t": big}, tmp_path / "out", WriteOptions(dtype=torch.float16))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("where", "name", "edit"),
    [
        ("g", "w", Edit((Scale("g", 1),))),
        ("v", "b", Edit((AddProduct("w", 1, "v"),))),
        ("w", "b", Edit((AddProduct("w", 1, "v"),))),
        ("s", "b", Edit((LayerScale("s", 0),))),
    ],
)
def test_an_error_about_nan_names_the_fused_tensor(
    tmp_path: Path, where: str, name: str, edit: Edit, bad: float
) -> None:
    """Not the tensor that it is fused into. With ``allow_nonfinite``, NaN and Inf spread."""
    held = tensors(torch.float32)
    held[where].view(-1)[2] = bad
    store(tmp_path / "model", held, "single")
    checkpoint = opened(tmp_path / "model")
    for out in ("refused", "allowed"):
        (tmp_path / out).mkdir()
    with pytest.raises(BadCheckpoint, match=f"^{where} holds NaN or Inf and cannot be fused"):
        write_shards(checkpoint, {name: edit}, tmp_path / "refused")
    write_shards(checkpoint, {name: edit}, tmp_path / "allowed", WriteOptions(allow_nonfinite=True))
    assert not written(tmp_path / "allowed")[name].isfinite().all()
