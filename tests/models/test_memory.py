"""A model that does not fit in memory runs from disk, with the same results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from live_models import CHECKPOINTS, shaken
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from enjoyln_cli.comparison import batches as inputs
from enjoyln_cli.comparison.run import run
from enjoyln_cli.conversion.fold import convert
from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel
from enjoyln_cli.models import load as compare
from enjoyln_cli.models.memory import bytes_for_weights, give_back, used_memory
from enjoyln_cli.models.offload import Offload, WeightsOnDemand, on_disk, reader_of
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.rewrite.opened_model import open_model
from enjoyln_cli.verification.verify import verify


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", Options(untie=True, merge="affine")),
        ("bert", Options(widen_mlp=True)),
    ],
)
def test_the_same_result_from_the_disk(name: str, options: Options, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(CHECKPOINTS / name, out, verify=False, options=options)
    found = verify(out, device_map="disk", write=False)
    assert found.passed, found.summary
    assert found == verify(out, device_map="cpu", write=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_weights_in_a_pickle(tmp_path: Path) -> None:
    """A single weight cannot be read from a pickle."""
    source = tmp_path / "source"
    config = GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=90, n_positions=40)
    model = shaken(GPT2LMHeadModel(config))
    source.mkdir()
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(source)
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    torch.save(state, source / "pytorch_model.bin")
    convert(source, tmp_path / "out", verify=False)
    found = verify(tmp_path / "out", device_map="disk", write=False)
    assert found.passed, found.summary
    assert found == verify(tmp_path / "out", device_map="cpu", write=False)


def test_experts_that_are_stacked(tmp_path: Path) -> None:
    config = MixtralConfig(
        hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=3, vocab_size=70, max_position_embeddings=64,
    )  # fmt: skip
    shaken(MixtralForCausalLM(config)).save_pretrained(tmp_path / "model")
    opened = open_model(str(tmp_path / "model")).as_class("MixtralForCausalLM")
    held = opened.load(torch.float64)
    batches = inputs.seeded_batches(held, 3, 0, torch.float32)
    read = opened.load(torch.float64, offload=Offload(tmp_path, 0))
    assert _same(run(read, batches), run(held, batches))


def test_weights_that_are_in_no_file(tmp_path: Path) -> None:
    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40,
        vocab_size=60,
    )  # fmt: skip
    model = shaken(BertModel(config))
    model.pooler = None
    model.save_pretrained(tmp_path / "model")
    opened = open_model(str(tmp_path / "model")).as_class("BertModel")
    held = opened.load(torch.float64)
    assert isinstance(held, BertModel)
    batches = inputs.seeded_batches(held, 2, 0, torch.float32)
    read = opened.load(torch.float64, offload=Offload(tmp_path, 0))
    assert "pooler_output" in run(held, batches)[0]
    assert _same(run(read, batches), run(held, batches))


def _same(got: compare.Outputs, expected: compare.Outputs) -> bool:
    assert expected and all(expected)
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)
        for a, b in zip(got, expected, strict=True)
    )


# Weights in memory and on disk.


@pytest.mark.parametrize("free_bytes", [0, 300_000])
def test_weights_stay_in_memory_if_there_is_room(free_bytes: int, tmp_path: Path) -> None:
    opened = open_model(str(CHECKPOINTS / "gpt2")).as_class("GPT2LMHeadModel")
    model = opened.load(torch.float64, offload=Offload(tmp_path, free_bytes))
    batches = inputs.seeded_batches(model, 2, 0, torch.float32)
    outputs = run(model, batches, tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())
    reader = reader_of(model)
    assert reader and bool(reader.kept) == bool(free_bytes)
    assert sum(value.nbytes for value in reader.kept.values()) <= free_bytes
    assert _same(run(model, batches), outputs)
    assert _same(outputs, run(opened.load(torch.float64), batches))


def test_a_weight_that_is_set_replaces_the_weight_in_memory() -> None:
    reader = WeightsOnDemand({"a": torch.ones(4), "b": torch.full((8,), 2.0)}, free_bytes=40)
    assert reader["a"] is reader["a"] and reader["b"] is not None
    assert set(reader.kept) == {"a"} and reader.free_bytes == 24
    before = reader.source("a")
    reader.make("a", lambda: before() + 1)
    assert torch.equal(reader["a"], torch.full((4,), 2.0))
    assert reader.free_bytes == 24 and list(reader) == ["a", "b"] and len(reader) == 2


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ValueError("too short\nand more"), "it fails: too short"),
        (KeyError("x"), "it fails: KeyError: 'x'"),
        (BadCheckpoint("a refusal of ours"), "a refusal of ours"),
        (MemoryError("none left"), "none left"),
    ],
)
def test_what_a_library_raises_is_a_refusal(raised: Exception, expected: str) -> None:
    kind = type(raised) if isinstance(raised, (BadCheckpoint, MemoryError)) else UnsupportedModel
    with (
        pytest.raises(kind, match=f"^{re.escape(expected)}$"),
        compare.refusing(UnsupportedModel, "it fails"),
    ):
        raise raised


def test_outputs_on_the_disk(tmp_path: Path) -> None:
    for value in (torch.randn(3, 5, dtype=torch.bfloat16), torch.zeros(2, 0), torch.tensor([1.5])):
        found = on_disk(value, tmp_path)
        assert torch.equal(found, value) and found.dtype == value.dtype
    assert not list(tmp_path.iterdir())


def test_the_bytes_for_weights() -> None:
    sizes = {"small": 10**6, "large": 10**8}
    give_back()
    used = used_memory()
    assert used > 0
    wide = torch.float64
    assert bytes_for_weights(sizes, wide, "auto", used + 2 * 10**9) is None
    assert bytes_for_weights(sizes, wide, "cpu", 1) is None
    assert bytes_for_weights(sizes, wide, "disk", None) == 0
    some = bytes_for_weights({**sizes, "more": 10**8}, wide, "auto", used + 1650 * 10**6)
    assert some is not None and 8 * 10**6 <= some < 8 * 10**8  # not a second large
    with pytest.raises(UnsupportedModel, match=r"large alone takes 800\.0 MB.*--max-memory \d"):
        bytes_for_weights(sizes, wide, "auto", used + 10**8)
    with pytest.raises(UnsupportedModel, match="'gpu', not one of auto"):
        bytes_for_weights(sizes, wide, "gpu", None)


def test_the_memory_named_in_the_message_is_enough() -> None:
    sizes = {"large": 10**8}
    with pytest.raises(UnsupportedModel) as caught:
        bytes_for_weights(sizes, torch.float64, "auto", used_memory() + 10**7)
    asked = re.search(r"--max-memory ([\d.]+)GB", str(caught.value))
    assert asked
    bytes_for_weights(sizes, torch.float64, "auto", int(float(asked[1]) * 1e9))


def test_a_fold_says_that_its_check_reads_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enjoyln_cli.models.memory.available_memory", lambda: 3_000_000)
    events: list[str] = []
    convert(CHECKPOINTS / "gpt2", tmp_path / "out", on_event=lambda _, text: events.append(text))
    assert any("reading weights from disk" in text for text in events)
