"""Weight files: every dtype and layout is read, wrong headers and unsafe pickles are refused."""

from __future__ import annotations

import json
import pickle
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from stored_files import opened, refused, tensors

from enjoyln_cli.checkpoint.headers import DTYPES
from enjoyln_cli.checkpoint.reader import read_tensor
from enjoyln_cli.errors import UnsupportedModel


def write_raw(folder: Path, header: Any, data: bytes, length: int | None = None) -> None:
    """Write a safetensors file with this header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + text + data)


def entry(start: int, stop: int, dtype: Any = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_reads_back(folder: Path, code: str) -> None:
    dtype = DTYPES[code]
    stored = {
        "matrix": (torch.arange(15) * 37 % 11 - 2 * dtype.is_signed).to(dtype).reshape(3, 5),
        "scalar": torch.tensor(1).to(dtype),
        "nothing": torch.empty(0, 4, dtype=dtype),
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt", "by": "test"})
    found = opened(folder)
    assert (found.format, found.shards, found.index) == (
        "safetensors",
        ("model.safetensors",),
        None,
    )
    assert found.metadata == {"model.safetensors": {"format": "pt", "by": "test"}}
    assert found.tensors.keys() == stored.keys()
    file = (folder / "model.safetensors").read_bytes()
    for name, tensor in stored.items():
        where = found.tensors[name]
        assert (where.dtype, where.shape) == (code, tuple(tensor.shape))
        raw = file[where.offset : where.offset + where.nbytes]
        assert raw == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        back = read_tensor(found, name)
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back, tensor)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_hold_tensors_of_every_layout(folder: Path, zipped: bool) -> None:
    base = torch.randn(4, 6, generator=torch.Generator().manual_seed(3)) + 1
    state = OrderedDict(a=base.t(), b=base[1:3, ::2], c=base, d=torch.nn.Parameter(base.half()))
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    found = opened(folder)
    assert list(found.tensors) == ["a", "b", "c", "d"]
    assert found.tensors["d"].dtype == "F16"
    assert {(stored.offset, stored.file) for stored in found.tensors.values()} == {
        (-1, "pytorch_model.bin")
    }
    for name, tensor in state.items():
        assert found.tensors[name].nbytes == tensor.numel() * tensor.element_size()
        assert torch.equal(read_tensor(found, name), tensor)
    read_tensor(found, "c").zero_()
    assert torch.equal(read_tensor(found, "c"), base)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_an_expanded_view(folder: Path, zipped: bool) -> None:
    """A file of two kilobytes, whose tensor would take eight gigabytes."""
    state = {"a": torch.zeros(1).expand(1 << 15, 1 << 16)}
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    refused(folder, "a in pytorch_model.bin is an expanded view")


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_named_and_not_run(
    folder: Path, tmp_path: Path, zipped: bool
) -> None:
    state = {**tensors("a"), "trap": Trap(tmp_path / "sprung")}
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    refused(folder, "pytorch_model.bin is a pickle with code in it .*which is not run")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "holds a list, not a state dict"),
        ({"state_dict": tensors("a")}, "keeps the tensors of the model in its entry 'state_dict'"),
        ({"a\n": torch.ones(2)}, r"names a tensor 'a\\n'"),
        ({1: torch.ones(2)}, "no state dict: 1 is a Tensor"),
        ({"a": torch.ones(2, 2).to_sparse()}, "a in .* is a torch.sparse_coo tensor"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "tensor of torch.complex128"),
    ],
)
def test_pickles_that_are_no_state_dict(folder: Path, content: Any, words: str) -> None:
    torch.save(content, folder / "pytorch_model.bin")
    refused(folder, words)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_pickle_of_a_model_without_weights(folder: Path, zipped: bool, name: str) -> None:
    """The model was saved while it, or a part of it, was on the meta device."""
    state = tensors("a", "b")
    state[name] = state[name].to("meta")
    path = folder / "pytorch_model.bin"
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    refused(folder, f"{name} in pytorch_model.bin is a meta tensor")


def test_a_pickle_with_a_nested_tensor(folder: Path) -> None:
    state = {**tensors("a"), "b": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}
    torch.save(state, folder / "pytorch_model.bin")
    refused(folder, "b in pytorch_model.bin is a nested tensor")


def test_damaged_pickles(folder: Path) -> None:
    path = folder / "pytorch_model.bin"
    torch.save(tensors("a", "b"), path)
    whole = path.read_bytes()
    for data in (
        whole[: len(whole) // 2],
        b"",
        b"no pickle at all",
        pickle.dumps([], protocol=2)[:-1],
    ):
        path.write_bytes(data)
        refused(folder, "pytorch_model.bin cannot be read, it is damaged or truncated")


F = entry(0, 8)
DATA = struct.pack("<2f", 1.0, -2.5)


@pytest.mark.parametrize(
    ("header", "data", "length", "words"),
    [
        ({"a": F}, DATA[:7], None, "truncated: its header promises"),
        ({"a": F}, DATA + b"x", None, "has 1 bytes that its header does not mention"),
        ({"a": F}, DATA, 10_000, "says its header takes 10000 bytes"),
        ({"a": F}, DATA, 2**64 - 1, "says its header takes 18446744073709551615 bytes"),
        ({"a": F, "b": entry(4, 12)}, DATA * 2, None, "b in model.safetensors overlaps a"),
        ({"a": F, "b": F}, DATA, None, "overlaps"),
        ({"a": F, "b": entry(12, 20)}, DATA * 3, None, "b in .* leaves a gap after a"),
        ({"a": entry(4, 12)}, DATA * 2, None, "leaves a gap after the header"),
        ({"a": entry(0, 800, shape=[200])}, DATA, None, "truncated"),
        ({"a": entry(8, 0)}, DATA, None, "a in .*takes 8 bytes, but its offsets"),
        ({"a": entry(-8, 0)}, DATA, None, "a in .*malformed"),
        ({"a": entry(0, 8, shape=[3])}, DATA, None, "takes 12 bytes, but .* hold 8"),
        ({"a": entry(0, 8, shape=[-1, -2])}, DATA, None, "malformed"),
        ({"a": entry(0, 8, shape=[2.0])}, DATA, None, "malformed"),
        ({"a": entry(0, 8, shape=[2, True])}, DATA, None, "malformed"),
        ({"a": entry(0, 8, shape="2")}, DATA, None, "malformed"),
        ({"a": F, "b": entry(8, 8, shape=[0, 2**70])}, DATA, None, "b in .* impossible shape"),
        ({"a": F, "b": entry(8, 8, shape=[2**63, 0])}, DATA, None, "b in .* impossible shape"),
        ({"a": F, "b": entry(8, 8, shape=[2**62, 0, 3])}, DATA, None, "b in .* impossible shape"),
        ({"a": entry(0, 8, shape=[2**40] * 99)}, DATA, None, "a in .* impossible shape"),
        ({"a": entry(0, 8, "F33")}, DATA, None, "unknown dtype 'F33'"),
        ({"a": entry(0, 8, 32)}, DATA, None, "malformed"),
        ({"a": [1, 2]}, DATA, None, "a in .*malformed"),
        ({"a": {"dtype": "F32", "shape": [2]}}, DATA, None, "malformed"),
        ({"a": F, "__metadata__": {"n": 1}}, DATA, None, "__metadata__ of model.safetensors"),
        ({"a": F, "__metadata__": [1]}, DATA, None, "__metadata__ of model.safetensors"),
        ({"a\nb\033[2J": F}, DATA, None, r"names a tensor 'a\\nb\\x1b\[2J'"),
        ([F], DATA, None, "is not a JSON object"),
        ({}, b"", None, "holds no tensors"),
        (b'{"a": 1, "a": 2}', b"", None, "'a' appears twice"),
        (b'{"a": \xff}', b"", None, "header of model.safetensors is not valid JSON"),
        (b"{", b"", None, "is not valid JSON"),
        (b"[" * 100_000, b"", None, "is not valid JSON"),
    ],
)
def test_lying_headers(
    folder: Path, header: Any, data: bytes, length: int | None, words: str
) -> None:
    write_raw(folder, header, data, length)
    refused(folder, words)


def test_a_name_twice_among_many(folder: Path) -> None:
    names = ",".join(f'"{name}": 0' for name in (*range(200_000), 199_999))
    write_raw(folder, f"{{{names}}}".encode(), b"", None)
    refused(folder, "'199999' appears twice")


def test_a_valid_header_written_in_the_same_way(folder: Path) -> None:
    write_raw(folder, {"__metadata__": None, "b": entry(8, 16), "a": F}, DATA + DATA[::-1])
    found = opened(folder)
    assert list(found.tensors) == ["a", "b"]
    assert read_tensor(found, "a").tolist() == [1.0, -2.5]


@pytest.mark.parametrize("shape", [[0], [3, 0, 2], [0, 2**63 - 1], [2**31, 0, 2**31]])
def test_an_empty_tensor_of_a_shape_that_torch_has(folder: Path, shape: list[int]) -> None:
    write_raw(folder, {"a": F, "b": entry(8, 8, shape=shape)}, DATA)
    assert list(read_tensor(opened(folder), "b").shape) == shape


def test_a_header_longer_than_the_format_allows(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(100_000_100)  # sparse
    refused(folder, "says its header takes 100000001 bytes")


@pytest.mark.parametrize("size", [0, 3, 8])
def test_files_too_short_for_a_header(folder: Path, size: int) -> None:
    (folder / "model.safetensors").write_bytes(b"\1" * size)
    refused(folder, "model.safetensors says its header takes")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_git_lfs_pointer(folder: Path, name: str) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    refused(folder, f"{name} is a Git LFS pointer.*git lfs pull")


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("h.0.weight", "F8_E4M3", [2, 4]),
        ("h.0.weight", "F4", [2, 8]),
        ("h.0.weight", "I8", [2, 4]),
        ("h.0.weight", "U8", [8, 1]),
        ("h.0.qweight", "I32", [2, 1]),
        ("h.0.weight_packed", "I32", [1, 2]),
    ],
)
def test_quantised_tensors_are_refused(folder: Path, name: str, dtype: str, shape: Any) -> None:
    write_raw(folder, {name: entry(0, 8, dtype, shape)}, DATA)
    refused(
        folder,
        f"{name} in model.safetensors is quantised .*then quantise the result",
        UnsupportedModel,
    )


def test_quantised_pickles_are_refused(folder: Path) -> None:
    torch.save({"a.weight": torch.ones(2, 2).to(torch.float8_e5m2)}, folder / "pytorch_model.bin")
    refused(folder, "a.weight in pytorch_model.bin is quantised", UnsupportedModel)


def test_integers_that_are_no_weights_are_kept(folder: Path) -> None:
    stored = {
        "h.0.attn.bias": torch.ones(4, 4, dtype=torch.uint8).tril(),
        "embeddings.position_ids": torch.arange(6)[None],
        "num_batches_tracked": torch.tensor(3),
    }
    save_file(stored, folder / "model.safetensors")
    assert opened(folder).tensors.keys() == stored.keys()
