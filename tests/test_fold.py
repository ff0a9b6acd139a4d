"""Folded files hold ``P W`` rounded once where the plan says so, and the old bytes elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from enjoyln_cli import blocks
from enjoyln_cli.axis import Axis, centre, feature_axis
from enjoyln_cli.checkpoint import Checkpoint, open_checkpoint, open_source, raw_config
from enjoyln_cli.errors import (
    AlreadyFolded,
    BadCheckpoint,
    EnjoyLNError,
    NothingToFold,
    OutputError,
    VerificationFailed,
)
from enjoyln_cli.fold import centre_parameters, fold_checkpoint, marker, read_marker
from enjoyln_cli.plan import Centring, Plan, Verdict, Writer
from enjoyln_cli.stream import write_shards

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CONFIG = {"model_type": "gpt2", "n_embd": 24, "dtype": "float32", "zebra": [1, {"a": None}]}

SHAPES: dict[str, tuple[int, ...]] = {
    "wte.weight": (301, 24),
    "c_attn.weight": (24, 72),
    "c_attn.bias": (72,),
    "out.weight": (24, 96),
    "out.bias": (24,),
    "conv.weight": (24, 3, 5, 5),
    "big.weight": (521, 1031),
    "wide.weight": (3, 1100, 700),
    "qkv.weight": (750, 1000),
    "ln.weight": (24,),
    "scalar": (),
    "empty": (0, 24),
}
"""``big``, ``wide`` and ``qkv`` are larger than a block, at odd sizes."""

EDITS: dict[str, tuple[Axis, ...]] = {
    "wte.weight": (Axis(1, 0, 1, 24, 1),),
    "c_attn.weight": (Axis(1, 0, 4, 6, 1), Axis(1, 48, 2, 6, 2)),
    "c_attn.bias": (Axis(0, 48, 1, 24, 1),),
    "out.weight": (Axis(0, 0, 1, 24, 1),),
    "out.bias": (Axis(0, 0, 1, 24, 1),),
    "conv.weight": (Axis(0, 0, 1, 24, 1),),
    "big.weight": (Axis(0, 0, 1, 521, 1),),
    "wide.weight": (Axis(1, 100, 2, 450, 1),),
    "qkv.weight": (Axis(0, 250, 5, 50, 1), Axis(0, 0, 1, 50, 5)),
}


def state(dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        **{n: (torch.randn(s, generator=made) * 0.4 + 0.3).to(dtype) for n, s in SHAPES.items()},
        "ids": torch.arange(31).reshape(31, 1),
        "mask": torch.tensor([True, False, True]),
    }


def centred(tensor: torch.Tensor, axes: tuple[Axis, ...]) -> torch.Tensor:
    """What the definition says: float64, then rounded once."""
    wide = tensor.double()
    for axis in axes:
        wide = centre(wide, axis)
    return wide.to(tensor.dtype)


def store(folder: Path, tensors: dict[str, torch.Tensor], kind: str) -> None:
    """One of the four ways in which a checkpoint is stored."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    suffix, stem = (".bin", "pytorch_model") if "bin" in kind else (".safetensors", "model")
    names = list(tensors)
    parts = [names] if "sharded" not in kind else [names[:3], names[3:8], names[8:]]
    weight_map = {}
    for i, part in enumerate(parts, 1):
        many = f"-{i:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
        file = folder / f"{stem}{many}{suffix}"
        held = {name: tensors[name] for name in part}
        if suffix == ".bin":
            torch.save(held, file)
        else:
            save_file(held, file, metadata={"format": "pt", "part": str(i)})
        weight_map |= dict.fromkeys(part, file.name)
    if len(parts) > 1:
        index = {"metadata": {"total_parameters": 7}, "weight_map": weight_map}
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index, indent=1))


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(open_source(str(folder)))


def written(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in the safetensors files of ``folder``, read with the library."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def plan_for(tensors: dict[str, torch.Tensor], edits: dict[str, tuple[Axis, ...]]) -> Plan:
    writers = [
        Writer(f"transformer.{name}", name, axis, tuple(tensors[name].shape))
        for name, axes in edits.items()
        for axis in axes
    ]
    norms = (
        Verdict("transformer.ln_1", "static"),
        Verdict("transformer.ln_2", "centred", ops=("transformer.wte",)),
        Verdict("transformer.ln_f", "kept", reason="the head reads it", culprit="lm_head"),
    )
    op = Centring("transformer.wte", "output", Axis(-1, 0, 1, 24, 1), "tied to lm_head.weight")
    return Plan(
        "gpt2",
        "GPT2LMHeadModel",
        ("GPT2LMHeadModel", "GPT2Model"),
        norms,
        tuple(writers),
        (op,),
        ("inputs_embeds",),
        ("encoder_hidden_states",),
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    store(folder, state(torch.float32), "sharded")
    (folder / "tokenizer.json").write_text('{"a": "é"}')
    (folder / "README.md").write_text("# A model\n")
    (folder / "custom").mkdir()
    (folder / "custom" / "code.py").write_bytes(b"x = 1\r\n")
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A place for the result; whatever the test did, nothing half-written lies beside it."""
    yield tmp_path / "out"
    assert [p.name for p in tmp_path.iterdir() if p.name not in ("model", "out")] == []


def fold(source: Path, out: Path, edits: Any = None, **options: Any) -> Any:
    checkpoint = opened(source)
    tensors = {n: torch.empty(s.shape, device="meta") for n, s in checkpoint.tensors.items()}
    plan = plan_for(tensors, EDITS if edits is None else edits)
    return fold_checkpoint(checkpoint, plan, out, recipe_text="a: recipe\n", **options)


# The edits


@pytest.mark.parametrize("kind", ["single", "sharded", "bin", "sharded bin"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edited_tensors_are_centred_and_the_others_keep_their_bytes(
    tmp_path: Path, dtype: torch.dtype, kind: str
) -> None:
    tensors = state(dtype)
    store(tmp_path / "model", tensors, kind)
    (tmp_path / "out").mkdir()
    names = write_shards(opened(tmp_path / "model"), EDITS, tmp_path / "out")
    assert sorted(names) == sorted(p.name for p in (tmp_path / "out").iterdir())
    found = written(tmp_path / "out")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert same(found[name], centred(tensor, EDITS.get(name, ()))), name
        assert (name in EDITS) != same(found[name], tensor), name


def test_float64_is_centred_to_the_order_of_summation(tmp_path: Path) -> None:
    tensors = {name: t for name, t in state(torch.float64).items() if name in EDITS}
    store(tmp_path / "model", tensors, "single")
    (tmp_path / "out").mkdir()
    write_shards(opened(tmp_path / "model"), EDITS, tmp_path / "out")
    for name, found in written(tmp_path / "out").items():
        torch.testing.assert_close(found, centred(tensors[name], EDITS[name]), rtol=0, atol=1e-15)


def test_a_tensor_larger_than_one_transfer_and_a_row_larger_than_a_block(tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(1)
    shapes = {"tall": (3001, 801), "flat": (3, blocks.BLOCK + 5), "long": (blocks.BLOCK * 2 + 3,)}
    tensors = {n: torch.randn(s, generator=made).add(0.2).half() for n, s in shapes.items()}
    assert tensors["tall"].nbytes > blocks.TRANSFER
    edits = {name: (feature_axis(shape, 0),) for name, shape in shapes.items()}
    store(tmp_path / "model", tensors, "single")
    (tmp_path / "out").mkdir()
    write_shards(opened(tmp_path / "model"), edits, tmp_path / "out")
    for name, found in written(tmp_path / "out").items():
        assert same(found, centred(tensors[name], edits[name])), name


@pytest.mark.parametrize(
    "axes",
    [
        (Axis(0, 0, 1, 24, 1), Axis(1, 0, 1, 72, 1)),
        (Axis(1, 0, 3, 24, 1), Axis(1, 12, 1, 24, 1)),
    ],
    ids=["two dimensions", "overlapping"],
)
def test_axes_that_touch_are_applied_one_after_the_other(
    source: Path, tmp_path: Path, axes: tuple[Axis, ...]
) -> None:
    (tmp_path / "out").mkdir()
    write_shards(opened(source), {"c_attn.weight": axes}, tmp_path / "out")
    expected = centred(state(torch.float32)["c_attn.weight"], axes)
    assert same(written(tmp_path / "out")["c_attn.weight"], expected)


def test_bytes_do_not_depend_on_the_number_of_workers(source: Path, tmp_path: Path) -> None:
    for jobs in (1, 3):
        (tmp_path / f"{jobs}").mkdir()
        write_shards(opened(source), EDITS, tmp_path / f"{jobs}", jobs=jobs)
    for path in (tmp_path / "1").iterdir():
        assert path.read_bytes() == (tmp_path / "3" / path.name).read_bytes()


def test_bytes_do_not_depend_on_writing_past_the_cache(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    write_shards(opened(source), EDITS, tmp_path / "a")
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    (tmp_path / "b").mkdir()
    write_shards(opened(source), EDITS, tmp_path / "b")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_the_number_of_torch_threads_survives(source: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    (tmp_path / "out").mkdir()
    write_shards(opened(source), EDITS, tmp_path / "out")
    assert torch.get_num_threads() == before


def test_progress_counts_every_byte_of_the_tensors(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    told: list[int] = []
    write_shards(opened(source), EDITS, tmp_path / "out", progress=told.append)
    assert sum(told) == sum(t.nbytes for t in state(torch.float32).values())
    assert min(told) > 0


# The files


def test_the_layout_stays(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_shards(opened(source), EDITS, tmp_path / "out")
    index = "model.safetensors.index.json"
    assert (tmp_path / "out" / index).read_bytes() == (source / index).read_bytes()
    for old in source.glob("*.safetensors"):
        a, b = old.read_bytes(), (tmp_path / "out" / old.name).read_bytes()
        header = 8 + int.from_bytes(a[:8], "little")
        assert a[:header] == b[:header]
        assert len(a) == len(b)
        with safe_open(tmp_path / "out" / old.name, "pt") as file:
            assert file.metadata()["format"] == "pt"
            assert file.metadata()["part"] == str(int(old.name[6:11]))


def test_bin_shards_come_out_as_safetensors_of_the_same_layout(tmp_path: Path) -> None:
    store(tmp_path / "model", state(torch.float32), "sharded bin")
    (tmp_path / "out").mkdir()
    names = write_shards(opened(tmp_path / "model"), EDITS, tmp_path / "out")
    shards = tuple(f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3))
    assert names == (*shards, "model.safetensors.index.json")
    old = json.loads((tmp_path / "model" / "pytorch_model.bin.index.json").read_text())
    new = json.loads((tmp_path / "out" / names[-1]).read_text())
    assert {name: file[-22:-4] for name, file in old["weight_map"].items()} == {
        name: file[-30:-12] for name, file in new["weight_map"].items()
    }
    assert new["metadata"]["total_size"] == sum(t.nbytes for t in state(torch.float32).values())
    with safe_open(tmp_path / "out" / shards[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_tensor_that_a_bin_file_stores_twice_is_written_twice(tmp_path: Path) -> None:
    shared = torch.randn(30, 24) + 0.4
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    twice = {"wte.weight": shared, "lm_head.weight": shared, "turned": shared.t()}
    torch.save(twice, tmp_path / "model" / "pytorch_model.bin")
    (tmp_path / "out").mkdir()
    axes = (Axis(1, 0, 1, 24, 1),)
    write_shards(opened(tmp_path / "model"), {"wte.weight": axes}, tmp_path / "out")
    found = written(tmp_path / "out")
    assert same(found["wte.weight"], centred(shared, axes))
    assert same(found["lm_head.weight"], shared)
    assert same(found["turned"], shared.t())


def test_resharding(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    limit = 3_000_000
    names = write_shards(opened(source), EDITS, tmp_path / "out", max_shard_size=limit)
    many = len(names) - 1
    assert names[:-1] == tuple(f"model-{i + 1:05d}-of-{many:05d}.safetensors" for i in range(many))
    index = json.loads((tmp_path / "out" / names[-1]).read_text())
    for name in names[:-1]:
        held = load_file(tmp_path / "out" / name)
        assert sum(t.nbytes for t in held.values()) <= limit or len(held) == 1
        assert all(index["weight_map"][tensor] == name for tensor in held)
    for name, tensor in state(torch.float32).items():
        assert same(written(tmp_path / "out")[name], centred(tensor, EDITS.get(name, ())))


def test_resharding_into_one_file_needs_no_index(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    names = write_shards(opened(source), {}, tmp_path / "out", max_shard_size=10**9)
    assert names == ("model.safetensors",)
    assert all(same(written(tmp_path / "out")[n], t) for n, t in state(torch.float32).items())


@pytest.mark.parametrize("kind", ["sharded", "bin"])
@pytest.mark.parametrize("into", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_another_dtype_on_the_way(tmp_path: Path, into: torch.dtype, kind: str) -> None:
    tensors = state(torch.float32)
    store(tmp_path / "model", tensors, kind)
    (tmp_path / "out").mkdir()
    write_shards(opened(tmp_path / "model"), EDITS, tmp_path / "out", dtype=into)
    found = written(tmp_path / "out")
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
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        size = sum(t.nbytes for t in found.values())
        assert index["metadata"] == {"total_parameters": 7, "total_size": size}


def test_infinity_is_kept_where_nobody_centres(tmp_path: Path) -> None:
    held = {"mask": torch.tensor([0.5, float("-inf"), float("nan")]), "w": torch.randn(4, 6)}
    store(tmp_path / "model", held, "single")
    (tmp_path / "out").mkdir()
    edits = {"w": (Axis(0, 0, 1, 4, 1),)}
    write_shards(opened(tmp_path / "model"), edits, tmp_path / "out", dtype=torch.float16)
    torch.testing.assert_close(
        written(tmp_path / "out")["mask"], held["mask"].half(), equal_nan=True, rtol=0, atol=0
    )


# A whole directory


def test_a_folded_directory(source: Path, out: Path) -> None:
    result = fold(source, out)
    assert sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()) == [
        "README.md",
        "config.json",
        "custom/code.py",
        "enjoyln_recipe.yaml",
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    for name in ("README.md", "custom/code.py", "tokenizer.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert (out / "enjoyln_recipe.yaml").read_text() == "a: recipe\n"
    assert result.bytes_written == sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    assert (result.out, result.verification) == (out, None)
    assert result.seconds > 0


def test_config_keeps_its_text_and_gains_the_marker(source: Path, out: Path) -> None:
    fold(source, out)
    text = (out / "config.json").read_text()
    assert text.startswith((source / "config.json").read_text().rstrip("}\n"))
    found = read_marker(json.loads(text))
    assert found.source == str(source.resolve())
    assert found.revision is None
    assert (found.model_class, found.classes) == (
        "GPT2LMHeadModel",
        ("GPT2LMHeadModel", "GPT2Model"),
    )
    assert found.rmsnorm == ("transformer.ln_1", "transformer.ln_2")
    assert found.layernorm == ("transformer.ln_f",)
    assert found.centering == (Centring("transformer.wte", "output", Axis(-1, 0, 1, 24, 1), ""),)
    assert (found.entry_inputs, found.unproven) == (("inputs_embeds",), ("encoder_hidden_states",))
    assert found.tool.startswith("enjoyln ")


def test_a_new_dtype_is_named_in_the_config(source: Path, out: Path) -> None:
    config = {**CONFIG, "text_config": {"torch_dtype": "float32", "dtype": None}}
    (source / "config.json").write_text(json.dumps(config))
    fold(source, out, dtype=torch.bfloat16)
    found = json.loads((out / "config.json").read_text())
    assert found["dtype"] == "bfloat16"
    assert found["text_config"] == {"torch_dtype": "bfloat16", "dtype": None}
    assert list(found) == [*config, "enjoyln"]


def test_bin_in_safetensors_out(tmp_path: Path, out: Path) -> None:
    store(tmp_path / "model", state(torch.float16), "bin")
    fold(tmp_path / "model", out)
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        "enjoyln_recipe.yaml",
        "model.safetensors",
    ]


def test_the_check_sees_the_finished_directory(source: Path, out: Path) -> None:
    def check(folded: Path) -> SimpleNamespace:
        assert not out.exists()
        read_marker(raw_config(open_source(str(folded))))
        (folded / "enjoyln_verify.json").write_text("{}")
        return SimpleNamespace(passed=True, summary="fine")

    result = fold(source, out, check=check)
    assert result.verification.summary == "fine"
    assert (out / "enjoyln_verify.json").exists()


def test_an_existing_output_is_replaced_when_asked(source: Path, out: Path) -> None:
    out.mkdir()
    (out / "old").write_text("")
    with pytest.raises(OutputError, match="--force"):
        fold(source, out)
    fold(source, out, force=True)
    assert not (out / "old").exists()
    assert (out / "config.json").exists()


# Refusals: one line, and nothing left behind


def refused(kind: type[EnjoyLNError], words: str, source: Path, out: Path, **options: Any) -> None:
    with pytest.raises(kind, match=words) as caught:
        fold(source, out, **options)
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_folded_already(source: Path, out: Path, tmp_path: Path) -> None:
    fold(source, out)
    refused(AlreadyFolded, "an earlier fold", out, tmp_path / "again")


def test_nothing_to_fold(source: Path, out: Path) -> None:
    kept = [Verdict(f"h.{i}.ln", "kept", reason="its gamma is not constant") for i in range(3)]
    plan = Plan("bert", "BertModel", ("BertModel",), tuple(kept), (), ())
    with pytest.raises(NothingToFold, match="3 x its gamma is not constant; --model-class"):
        fold_checkpoint(opened(source), plan, out, recipe_text="")
    llama = Plan("llama", "L", ("L",), (), (), (), other_norms=(("LlamaRMSNorm", 9),))
    with pytest.raises(NothingToFold, match="9 LlamaRMSNorm"):
        fold_checkpoint(opened(source), llama, out, recipe_text="")
    assert not out.exists()


def test_a_writer_that_is_not_stored(source: Path, out: Path) -> None:
    plan = plan_for(
        {"nowhere.weight": torch.empty(4, 4)}, {"nowhere.weight": (Axis(0, 0, 1, 4, 1),)}
    )
    with pytest.raises(BadCheckpoint, match=r"nowhere\.weight: .* does not store"):
        fold_checkpoint(opened(source), plan, out, recipe_text="")
    assert not out.exists()


def test_a_writer_of_another_shape(source: Path, out: Path) -> None:
    plan = plan_for({"out.weight": torch.empty(24, 95)}, {"out.weight": (Axis(0, 0, 1, 24, 1),)})
    with pytest.raises(BadCheckpoint, match=r"\[24, 96\].*holds \[24, 95\]"):
        fold_checkpoint(opened(source), plan, out, recipe_text="")
    assert not out.exists()


@pytest.mark.parametrize("name", ["out.weight", "big.weight", "qkv.weight", "wte.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_in_an_edited_tensor(
    tmp_path: Path, out: Path, name: str, value: float
) -> None:
    tensors = state(torch.bfloat16)
    tensors[name][1, 7] = value
    store(tmp_path / "model", tensors, "sharded")
    refused(BadCheckpoint, f"{name} in .* holds NaN or Inf", tmp_path / "model", out)


@pytest.mark.parametrize("edits", [{}, EDITS], ids=["copied", "centred"])
def test_values_out_of_the_range_of_the_new_dtype(
    tmp_path: Path, out: Path, edits: dict[str, tuple[Axis, ...]]
) -> None:
    tensors = state(torch.float32)
    tensors["out.weight"][3, 4] = 1e6
    store(tmp_path / "model", tensors, "single")
    words = r"out\.weight in model\.safetensors has values beyond F16"
    refused(BadCheckpoint, words, tmp_path / "model", out, edits=edits, dtype=torch.float16)
    fold(tmp_path / "model", out, edits, dtype=torch.bfloat16)


def test_the_difference_leaves_the_range_of_the_stored_dtype(tmp_path: Path, out: Path) -> None:
    tensors = {"w": torch.tensor([[-65000.0], [30000.0], [65000.0]]).half()}
    store(tmp_path / "model", tensors, "single")
    edits = {"w": (Axis(0, 0, 1, 3, 1),)}
    refused(BadCheckpoint, "values beyond F16", tmp_path / "model", out, edits=edits)


def test_edits_that_make_no_sense(source: Path, tmp_path: Path) -> None:
    for edits, words in (
        ({"none": (Axis(0, 0, 1, 3, 1),)}, "none"),
        ({"ids": (Axis(0, 0, 1, 31, 1),)}, "I64"),
        ({"out.weight": (Axis(0, 1, 1, 24, 1),)}, "does not hold"),
        ({"out.weight": (Axis(-1, 0, 1, 24, 1),)}, "does not hold"),
    ):
        with pytest.raises(BadCheckpoint, match=words):
            write_shards(opened(source), edits, tmp_path)
    with pytest.raises(OutputError, match="float8"):
        write_shards(opened(source), {}, tmp_path, dtype=torch.float8_e4m3fn)
    assert list(tmp_path.glob("*.safetensors")) == []


def test_a_file_that_shrinks_while_it_is_read(source: Path, out: Path) -> None:
    checkpoint = opened(source)
    shard = source / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    plan = plan_for(state(torch.float32), EDITS)
    with pytest.raises(BadCheckpoint, match="00002-of-00003.safetensors ends inside"):
        fold_checkpoint(checkpoint, plan, out, recipe_text="")
    assert not out.exists()


def test_a_failed_check_publishes_nothing(source: Path, out: Path) -> None:
    failed = SimpleNamespace(passed=False, summary="the outputs differ by 3e-1")
    refused(VerificationFailed, "differ by 3e-1", source, out, check=lambda folded: failed)


def test_an_interrupt_leaves_nothing(source: Path, out: Path) -> None:
    def interrupt(nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fold(source, out, progress=interrupt)
    assert not out.exists()


def test_a_failed_fold_keeps_what_was_there(source: Path, out: Path) -> None:
    fold(source, out)
    before = {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}
    failed = SimpleNamespace(passed=False, summary="no")
    with pytest.raises(VerificationFailed):
        fold(source, out, force=True, check=lambda folded: failed)
    assert {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()} == before


# A model in memory


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 8)
        self.proj = nn.Linear(5, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("table", torch.randn(3, 8) + 1)


def small_plan(model: nn.Module, edits: dict[str, Axis]) -> Plan:
    held = {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}
    writers = tuple(Writer(n, n, axis, tuple(held[n].shape)) for n, axis in edits.items())
    return Plan("x", "Small", ("Small",), (Verdict("ln", "static"),), writers, ())


def test_parameters_are_centred_in_place() -> None:
    model = Small().bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    identity = model.wte.weight
    row = Axis(1, 0, 1, 8, 1)
    edits = {
        "wte.weight": row,
        "head.weight": row,
        "proj.weight": Axis(0, 0, 1, 8, 1),
        "table": row,
    }
    centre_parameters(model, small_plan(model, edits))
    assert model.wte.weight is identity and model.head.weight is identity
    for name, axis in edits.items():
        assert same(model.state_dict()[name], centred(before[name], (axis,))), name
    assert same(model.proj.bias, before["proj.bias"])


def test_parameters_of_another_model_are_refused_before_anything_changes() -> None:
    model = Small()
    plan = small_plan(
        model, {"wte.weight": Axis(1, 0, 1, 8, 1), "proj.weight": Axis(0, 0, 1, 8, 1)}
    )
    model.proj = nn.Linear(6, 8)
    before = model.wte.weight.clone()
    with pytest.raises(BadCheckpoint, match=r"proj\.weight: .*\[8, 5\], Small has \[8, 6\]"):
        centre_parameters(model, plan)
    assert same(model.wte.weight, before)


# The marker


def test_a_hub_id_is_remembered_with_its_commit(source: Path) -> None:
    hub = SimpleNamespace(model="org/model", revision="abc", path=source)
    entry = marker(plan_for({}, {}), hub)  # type: ignore[arg-type]
    assert (entry["source"], entry["revision"]) == ("org/model", "abc")
    assert read_marker({"enjoyln": json.loads(json.dumps(entry))}).revision == "abc"


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"source": None},
        {"revision": 3},
        {"classes": "GPT2Model"},
        {"rmsnorm": [1]},
        {"layernorm": None},
        {"centering": [{"module": "a", "place": "between", "axis": [-1, 0, 1, 8, 1]}]},
        {"centering": [{"module": "a", "place": "output", "axis": [-1, 0, 1, 8]}]},
        {"centering": [{"module": "a", "place": "output", "axis": [-1, 0, 1, 8, True]}]},
        {"centering": ["a"]},
    ],
    ids=str,
)
def test_a_malformed_marker_is_refused(source: Path, change: dict[str, Any]) -> None:
    entry = marker(plan_for({}, {}), opened(source).source)
    read_marker({"enjoyln": entry})
    with pytest.raises(BadCheckpoint) as caught:
        read_marker({"enjoyln": {**entry, **change}})
    assert "\n" not in str(caught.value)


def test_no_marker() -> None:
    with pytest.raises(BadCheckpoint, match="no enjoyln entry"):
        read_marker(dict(CONFIG))
