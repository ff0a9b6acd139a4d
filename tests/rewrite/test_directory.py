"""A converted directory is complete or does not exist; a model in memory is edited in place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fold_cases import CONFIG, EDITS, centred, fold, plan_for, same, state, store, written
from stored_files import contents, opened
from torch import nn

from enjoyln_cli.checkpoint.config import raw_config
from enjoyln_cli.checkpoint.marker import read_marker
from enjoyln_cli.checkpoint.result_files import REPORTS
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.errors import (
    AlreadyFolded,
    BadCheckpoint,
    EnjoyLNError,
    NothingToFold,
    VerificationFailed,
)
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.edited_tensors import CentredWeight
from enjoyln_cli.plan.plan import MeanSubtraction, Plan, Verdict
from enjoyln_cli.rewrite.directory import fold_checkpoint
from enjoyln_cli.rewrite.in_memory import centre_parameters


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A path for the result; after the test, no unfinished work may be left beside it."""
    yield tmp_path / "out"
    assert [p.name for p in tmp_path.iterdir() if p.name not in ("model", "out")] == []


# A whole directory


def test_a_folded_directory(source: Path, out: Path) -> None:
    result = fold(source, out)
    assert sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()) == [
        "README.md",
        "config.json",
        "custom/code.py",
        "enjoyln_plan.json",
        "enjoyln_recipe.yaml",
        "enjoyln_verify.json",
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
    plan = fold(source, out).plan
    text = (out / "config.json").read_text()
    assert text.startswith((source / "config.json").read_text().rstrip("}\n"))
    found = read_marker(json.loads(text))
    assert found.source == str(source.resolve())
    assert found.revision is None
    live = found.plan
    assert (live.model_class, live.classes) == (
        "GPT2LMHeadModel",
        ("GPT2LMHeadModel", "GPT2Model"),
    )
    assert [verdict.norm for verdict in live.folded] == ["transformer.ln_1", "transformer.ln_2"]
    assert live.kept == (Verdict("transformer.ln_f", "stays_layernorm"),)
    assert live.subtractions == (
        MeanSubtraction("transformer.wte", "output", Axis(-1, 0, 1, 24, 1), ""),
    )
    assert (live.entry_inputs, live.unproven) == (("inputs_embeds",), ("encoder_hidden_states",))
    assert found.tool.startswith("enjoyln ")
    assert {(one.parameter, one.axis) for one in live.centred_weights} == {
        (writer.parameter, writer.axis) for writer in plan.centred_weights
    }


def test_a_new_dtype_is_named_in_the_config(source: Path, out: Path) -> None:
    config = {**CONFIG, "text_config": {"torch_dtype": "float32", "dtype": None}}
    (source / "config.json").write_text(json.dumps(config))
    fold(source, out, dtype=torch.bfloat16)
    found = json.loads((out / "config.json").read_text())
    assert found["dtype"] == "bfloat16"
    assert found["text_config"] == {"torch_dtype": "bfloat16", "dtype": None}
    assert list(found) == [*config, "enjoyln"]


def test_the_check_sees_the_finished_directory(source: Path, out: Path) -> None:
    def check(folded: Path) -> SimpleNamespace:
        assert not out.exists()
        read_marker(raw_config(open_source(str(folded))))
        assert not (folded / "enjoyln_verify.json").exists()
        return SimpleNamespace(passed=True, summary="fine", to_json=lambda: {"passed": True})

    result = fold(source, out, check=check)
    assert result.verification.summary == "fine"
    record = json.loads((out / "enjoyln_verify.json").read_text())
    assert record["passed"] and set(record["sha256"]) == {*contents(out)} - {*REPORTS}


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
    kept = [
        Verdict(f"h.{i}.ln", "stays_layernorm", reason="its gamma is not constant")
        for i in range(3)
    ]
    plan = Plan("bert", "BertModel", ("BertModel",), tuple(kept), (), ())
    with pytest.raises(NothingToFold, match="3 x its gamma is not constant.*--why h.0.ln"):
        fold_checkpoint(opened(source), plan, out, recipe_text="")
    llama = Plan("llama", "L", ("L",), (), (), (), other_norms=(("LlamaRMSNorm", 9),))
    with pytest.raises(NothingToFold, match="its 9 norms are RMSNorm already"):
        fold_checkpoint(opened(source), llama, out, recipe_text="")
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere.weight", r"nowhere\.weight: there is no such tensor"),
        ("out.weight", r"shape \[24, 96\] before the edit, but the plan has \[24, 95\]"),
    ],
)
def test_a_writer_that_is_not_stored_so(source: Path, out: Path, name: str, words: str) -> None:
    plan = plan_for({name: torch.empty(24, 95)}, {name: (Axis(0, 0, 1, 24, 1),)})
    with pytest.raises(BadCheckpoint, match=words):
        fold_checkpoint(opened(source), plan, out, recipe_text="")
    assert not out.exists()


WHERE = [("out.weight", float("nan")), ("big.weight", float("inf")), ("qkv.weight", -float("inf"))]


@pytest.mark.parametrize(("name", "value"), WHERE)
def test_nan_and_infinity_in_an_edited_tensor(
    tmp_path: Path, out: Path, name: str, value: float
) -> None:
    tensors = state(torch.bfloat16)
    tensors[name][1, 7] = value
    store(tmp_path / "model", tensors, "sharded")
    refused(
        BadCheckpoint, f"{name} in .* holds NaN or Inf .*--allow-nonfinite", tmp_path / "model", out
    )


@pytest.mark.parametrize(("name", "value"), WHERE)
def test_nan_and_infinity_spread_over_their_group_where_they_may(
    tmp_path: Path, out: Path, name: str, value: float
) -> None:
    """A LayerNorm over that group makes the same elements NaN, folded or not."""
    tensors = state(torch.float32)
    clean = {key: tensor.clone() for key, tensor in tensors.items()}
    tensors[name][1, 7] = value
    tensors["ln.weight"][3] = value
    store(tmp_path / "model", tensors, "sharded")
    fold(tmp_path / "model", out, allow_nonfinite=True)
    found = written(out)
    spoilt = ~same_elements(found[name], centred(clean[name], EDITS[name]))
    expected = torch.zeros_like(clean[name], dtype=torch.bool)
    expected[1, 7] = True
    for axis in EDITS[name]:
        expected |= touched(expected, axis)
    assert torch.equal(spoilt, expected)
    assert not found[name][spoilt].isfinite().any()
    assert torch.equal(found["ln.weight"].view(torch.int32), tensors["ln.weight"].view(torch.int32))
    lost = [[spoilt_norms(w, axis) for axis in EDITS[name]] for w in (tensors[name], found[name])]
    assert all(torch.equal(*pair) for pair in zip(*lost, strict=True))
    assert sum(int(norms.sum()) for norms in lost[0]) == 1


def spoilt_norms(weight: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Which groups a LayerNorm over them makes NaN; it makes all elements of a group NaN."""
    groups = weight.narrow(axis.dim, axis.start, axis.length).double()
    groups = groups.unflatten(axis.dim, (axis.outer, axis.size, axis.inner))
    apart = groups - groups.mean(axis.dim + 1, keepdim=True)
    lost = (apart / apart.pow(2).mean(axis.dim + 1, keepdim=True).sqrt()).isnan()
    assert torch.equal(lost.any(axis.dim + 1), lost.all(axis.dim + 1))
    return lost.any(axis.dim + 1)


def same_elements(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.view(torch.int32) == b.view(torch.int32)


def touched(spoilt: torch.Tensor, axis: Axis) -> torch.Tensor:
    """All elements of each group that contains one of ``spoilt``."""
    found = spoilt.clone()
    part = found.narrow(axis.dim, axis.start, axis.length)
    groups = part.unflatten(axis.dim, (axis.outer, axis.size, axis.inner))
    groups.copy_(groups.any(axis.dim + 1, keepdim=True).expand_as(groups))
    return found


def test_an_overflow_beside_nan_is_no_nan(tmp_path: Path, out: Path) -> None:
    tensors = state(torch.float32)
    tensors["out.weight"][1, 7] = float("inf")
    tensors["out.weight"][3, 4] = 1e6
    store(tmp_path / "model", tensors, "single")
    words = r"out\.weight in model\.safetensors has values beyond F16"
    options = {"dtype": torch.float16, "allow_nonfinite": True}
    refused(BadCheckpoint, words, tmp_path / "model", out, **options)
    fold(tmp_path / "model", out, dtype=torch.bfloat16, allow_nonfinite=True)


def test_what_is_copied_may_hold_anything(tmp_path: Path, out: Path) -> None:
    tensors = state(torch.float32)
    tensors["ln.weight"][:2] = torch.tensor([float("-inf"), float("nan")])
    store(tmp_path / "model", tensors, "single")
    fold(tmp_path / "model", out)
    assert same_elements(written(out)["ln.weight"], tensors["ln.weight"]).all()
    fold(tmp_path / "model", out, dtype=torch.float16, force=True)
    narrow = written(out)["ln.weight"]
    torch.testing.assert_close(narrow, tensors["ln.weight"].half(), equal_nan=True, rtol=0, atol=0)


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


def test_an_interrupt_leaves_nothing_to_keep(source: Path, out: Path) -> None:
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
    writers = tuple(CentredWeight(n, axis, tuple(held[n].shape)) for n, axis in edits.items())
    return Plan("x", "Small", ("Small",), (Verdict("ln", "in_weights"),), writers, ())


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
