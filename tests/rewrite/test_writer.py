"""New shards hold ``P W``, rounded once, for edited tensors, and the old bytes elsewhere."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fold_cases import EDITS, centred, centring, same, state, store, written
from safetensors import safe_open
from safetensors.torch import load_file
from stored_files import opened

from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.errors import BadCheckpoint, OutputError
from enjoyln_cli.plan.axis import Axis, centre, feature_axis
from enjoyln_cli.plan.fold_options import WriteOptions
from enjoyln_cli.rewrite import edit_pieces, tensor_parts
from enjoyln_cli.rewrite.shard_layout import layout
from enjoyln_cli.rewrite.tensor_parts import TensorFiles, parts_of
from enjoyln_cli.rewrite.writer import write_shards


def centred_shards(
    source: Path,
    edits: dict[str, tuple[Axis, ...]] = EDITS,
    name: str = "out",
    progress: Any = None,
    **options: Any,
) -> tuple[Path, tuple[str, ...]]:
    """A new directory beside the source with its shards, centred, and the names of its files."""
    out = source.parent / name
    out.mkdir()
    return out, write_shards(
        opened(source), centring(edits), out, WriteOptions(**options), progress=progress
    )


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("single", torch.float32),
        ("sharded", torch.float16),
        ("bin", torch.bfloat16),
        ("sharded bin", torch.float32),
    ],
)
def test_edited_tensors_are_centred_and_others_keep_bytes(
    tmp_path: Path, dtype: torch.dtype, kind: str
) -> None:
    tensors = state(dtype)
    store(tmp_path / "model", tensors, kind)
    out, names = centred_shards(tmp_path / "model")
    assert sorted(names) == sorted(p.name for p in out.iterdir())
    found = written(out)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert same(found[name], centred(tensor, EDITS.get(name, ()))), name
        assert (name in EDITS) != same(found[name], tensor), name


def test_float64_is_centred_to_the_order_of_summation(tmp_path: Path) -> None:
    tensors = {name: t for name, t in state(torch.float64).items() if name in EDITS}
    store(tmp_path / "model", tensors, "single")
    for name, found in written(centred_shards(tmp_path / "model")[0]).items():
        torch.testing.assert_close(found, centred(tensors[name], EDITS[name]), rtol=0, atol=1e-15)


def test_a_file_that_is_cut_short_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading beyond the end of a mapped file would end the process."""
    monkeypatch.setattr(edit_pieces, "PIECE", 1000)
    monkeypatch.setattr(tensor_parts, "PART", 1000)
    monkeypatch.setattr(tensor_parts, "COPIED", 1000)
    made = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(48, 800, generator=made) + 0.2 for name in ("copied", "edited")}
    store(tmp_path / "model", tensors, "single")
    checkpoint = opened(tmp_path / "model")
    edits = centring({"edited": (feature_axis((48, 800), 0),)})
    (shard,) = layout(checkpoint, edits, None, None)
    path = tmp_path / "model" / "model.safetensors"
    new = tmp_path / "new.safetensors"
    new.write_bytes(bytes(shard.size))
    size = path.stat().st_size
    with path.open("rb") as source, new.open("r+b") as target:
        for slot in shard.slots:
            files = TensorFiles(slot, source.fileno(), target.fileno())
            first, *_, last = parts_of(
                files, edits.get(slot.name, Edit()), lambda edit: edit, False
            )
            first.write()
            os.truncate(path, slot.offset)
            with pytest.raises(BadCheckpoint, match=f"model.safetensors ends inside {slot.name}"):
                last.write()
            os.truncate(path, size)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSYS])
def test_bytes_do_not_depend_on_workers_or_copying(
    source: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Some systems and file systems cannot copy from file to file."""
    outs = [centred_shards(source, name=f"{jobs}", jobs=jobs)[0] for jobs in (1, 3)]

    def refuse(*_arguments: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(tensor_parts, "COPIED", 1000)
    outs.append(centred_shards(source, name="copied")[0])
    for path in outs[0].iterdir():
        assert all((out / path.name).read_bytes() == path.read_bytes() for out in outs)


def test_progress_counts_every_byte_of_the_tensors(source: Path) -> None:
    told: list[int] = []
    before = torch.get_num_threads()
    centred_shards(source, progress=told.append)
    assert sum(told) == sum(t.nbytes for t in state(torch.float32).values())
    assert min(told) > 0
    assert torch.get_num_threads() == before


# The files


def test_the_layout_stays(source: Path) -> None:
    out, _ = centred_shards(source)
    index = "model.safetensors.index.json"
    assert (out / index).read_bytes() == (source / index).read_bytes()
    for old in source.glob("*.safetensors"):
        a, b = old.read_bytes(), (out / old.name).read_bytes()
        header = 8 + int.from_bytes(a[:8], "little")
        assert a[:header] == b[:header]
        assert len(a) == len(b)
        with safe_open(out / old.name, "pt") as file:
            assert file.metadata()["format"] == "pt"
            assert file.metadata()["part"] == str(int(old.name[6:11]))


def test_bin_shards_come_out_as_safetensors_of_the_same_layout(tmp_path: Path) -> None:
    store(tmp_path / "model", state(torch.float32), "sharded bin")
    out, names = centred_shards(tmp_path / "model")
    shards = tuple(f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3))
    assert names == (*shards, "model.safetensors.index.json")
    old = json.loads((tmp_path / "model" / "pytorch_model.bin.index.json").read_text())
    new = json.loads((out / names[-1]).read_text())
    assert {name: file[-22:-4] for name, file in old["weight_map"].items()} == {
        name: file[-30:-12] for name, file in new["weight_map"].items()
    }
    assert new["metadata"]["total_size"] == sum(t.nbytes for t in state(torch.float32).values())
    with safe_open(out / shards[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_tensor_that_a_bin_file_stores_twice_is_written_twice(tmp_path: Path) -> None:
    shared = torch.randn(30, 24) + 0.4
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    twice = {"wte.weight": shared, "lm_head.weight": shared, "rotated": shared.t()}
    torch.save(twice, tmp_path / "model" / "pytorch_model.bin")
    axes = (Axis(1, 0, 1, 24, 1),)
    found = written(centred_shards(tmp_path / "model", {"wte.weight": axes})[0])
    assert same(found["wte.weight"], centred(shared, axes))
    assert same(found["lm_head.weight"], shared)
    assert same(found["rotated"], shared.t())


def test_resharding(source: Path) -> None:
    limit = 3_000_000
    out, names = centred_shards(source, max_shard_size=limit)
    many = len(names) - 1
    assert names[:-1] == tuple(f"model-{i + 1:05d}-of-{many:05d}.safetensors" for i in range(many))
    index = json.loads((out / names[-1]).read_text())
    for name in names[:-1]:
        held = load_file(out / name)
        assert sum(t.nbytes for t in held.values()) <= limit or len(held) == 1
        assert all(index["weight_map"][tensor] == name for tensor in held)
    for name, tensor in state(torch.float32).items():
        assert same(written(out)[name], centred(tensor, EDITS.get(name, ())))
    whole, names = centred_shards(source, {}, "whole", max_shard_size=10**9)
    assert names == ("model.safetensors",), "one file needs no index"
    assert all(same(written(whole)[n], t) for n, t in state(torch.float32).items())


@pytest.mark.parametrize(
    ("into", "kind"), [(torch.float16, "sharded"), (torch.float64, "bin")], ids=str
)
def test_another_dtype_on_the_way(tmp_path: Path, into: torch.dtype, kind: str) -> None:
    tensors = state(torch.float32)
    store(tmp_path / "model", tensors, kind)
    out, _ = centred_shards(tmp_path / "model", dtype=into)
    found = written(out)
    for name, tensor in tensors.items():
        wide = tensor
        for axis in EDITS.get(name, ()):
            wide = centre(wide.double(), axis)
        expected = wide.to(into) if tensor.is_floating_point() else tensor
        if into == torch.float64:
            torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-15)
        else:
            assert same(found[name], expected), name
    if kind == "sharded":
        index = json.loads((out / "model.safetensors.index.json").read_text())
        size = sum(t.nbytes for t in found.values())
        assert index["metadata"] == {"total_parameters": 7, "total_size": size}


# Refusals


def test_edits_that_make_no_sense(source: Path, tmp_path: Path) -> None:
    for edits, words in (
        ({"none": (Axis(0, 0, 1, 3, 1),)}, "none"),
        ({"ids": (Axis(0, 0, 1, 31, 1),)}, "I64"),
        ({"out.weight": (Axis(0, 1, 1, 24, 1),)}, "does not contain"),
    ):
        with pytest.raises(BadCheckpoint, match=words):
            write_shards(opened(source), centring(edits), tmp_path)
    with pytest.raises(OutputError, match="float8"):
        write_shards(opened(source), {}, tmp_path, WriteOptions(dtype=torch.float8_e4m3fn))
    assert list(tmp_path.glob("*.safetensors")) == []
