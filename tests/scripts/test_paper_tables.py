"""The papers' tables of times: the printed figures are what was printed, ours stand beside them."""

from __future__ import annotations

import json
import re
from typing import Any

import paper_figures
import paper_tables
import paper_times
import pytest
import torch
from paper_times import CPU, GPU, PAPER_MODELS, VITS, Measured, Scale

from enjoyln_cli.benchmark.results import Row

CPU_DEVICE = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


def near(a: float, b: float, digits: float) -> bool:
    return abs(a - b) <= digits


# The figures of a paper follow from one another, up to the digits that it prints.


@pytest.mark.parametrize("where", paper_figures.OVERHEAD)
def test_overhead_as_printed(where: str) -> None:
    for fold, init, share, before, after, saved, runs in paper_figures.OVERHEAD[where].values():
        assert near(100 * fold / (fold + init), share, 0.03)
        assert near(100 * (before - after) / before, saved, 1.0)
        assert near(fold / (before - after), runs, 0.05 * runs)


def test_latency_and_throughput_as_printed() -> None:
    for key, (before, after, saved) in paper_figures.TABLE_10.items():
        assert near(100 * (before - after) / before, saved, 1.0)
        for seconds, rate in zip((before, after), paper_figures.TABLE_11[key], strict=True):
            assert near(2 * 256 / seconds, rate, 0.015 * rate)


@pytest.mark.parametrize("table", ["BATCHES", "GPTJ"])
def test_sizes_as_printed(table: str) -> None:
    for key, figures in getattr(paper_figures, table).items():
        if figures is None:
            continue
        tokens = key * 256 if isinstance(key, int) else key[0] * key[1]
        before, after, saved, *rates = figures
        assert near(100 * (before - after) / before, saved, 0.6)
        for seconds, rate in zip((before, after), rates, strict=True):
            assert near(tokens / seconds, rate, 0.01 * rate)


def test_lengths_as_printed() -> None:
    for index, (before, after) in enumerate(paper_figures.TABLE_14.values()):
        assert near(after - before, paper_figures.TABLE_15["Bert"][index], 0.2)
        assert near(100 * (1 - before / after), paper_figures.TABLE_16["Bert"][index], 0.01)


# What is run.


def test_a_gpu_runs_all_of_the_tables_and_a_cpu_a_part() -> None:
    for name in ("Bert", "GPT2", "OPT"):
        wanted = {(1, 256), (2, 256), *((4, n) for n in paper_figures.LENGTHS)}
        assert wanted <= {*GPU.pairs[name]} and {*CPU.pairs[name]} < {*GPU.pairs[name]}
    assert {(n, 256) for n in paper_figures.BATCHES} <= {*GPU.pairs["Bert"]}
    assert {n for n, figures in paper_figures.GPTJ.items() if figures} == {*GPU.pairs["GPTJ"]}
    assert {"Phi"} <= GPU.pairs.keys() and set(GPU.pairs) == set(PAPER_MODELS)
    assert set(GPU.vits) == set(VITS) > set(CPU.vits)
    longest = max(tokens for pairs in GPU.pairs.values() for _, tokens in pairs)
    for kind, _, settings in (PAPER_MODELS[name] for name in ("Bert", "GPT2", "OPT")):
        positions = settings.get("max_position_embeddings", settings.get("n_positions"))
        assert positions >= longest, kind


def test_the_sizes_are_those_of_the_papers() -> None:
    """Parameters without position tables, in millions, as the models are known by."""
    import transformers

    for name, millions in {"Bert": 109, "GPT2": 124, "OPT": 124, "Phi": 2649, "GPTJ": 5844}.items():
        kind, cls, settings = PAPER_MODELS[name]
        with torch.device("meta"):
            model = getattr(transformers, cls)(transformers.CONFIG_MAPPING[kind](**settings))
        tables = ("wpe", "position_embeddings", "embed_positions")
        count = sum(
            p.numel() for n, p in model.named_parameters() if not any(t in n for t in tables)
        )
        assert near(count / 1e6, millions, 1.0), (name, count)


@pytest.fixture(scope="module")
def small() -> Any:
    """Two small models and a small ViT, measured as the real ones are."""
    bert = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 40}  # fmt: skip
    gpt2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 256}
    scale = Scale(
        pairs={"Bert": [(2, 256)], "GPT2": [(1, 256), (4, 64), (4, 1024)]},
        fused=((2, 256),),
        vits=("Tiny-16",),
        vit_batches={"": (1,)},
        folding=((4, 64),),
        repeats=3,
        seconds=0.0,
    )
    with pytest.MonkeyPatch.context() as patch:
        models = {"Bert": ("bert", "BertModel", bert), "GPT2": ("gpt2", "GPT2Model", gpt2)}
        patch.setattr(paper_times, "PAPER_MODELS", models)
        patch.setattr(paper_times, "VITS", {"Tiny-16": (32, 1, 2, 40, 16)})
        found = paper_times.measure(scale, "float32", CPU_DEVICE)
        results = paper_times.as_json(found, "the command", "float32", CPU_DEVICE, scale)
        return found, paper_tables.page(json.loads(json.dumps(results)))


@pytest.mark.slow
def test_every_case_is_measured_once(small: tuple[Measured, str]) -> None:
    found, _ = small
    assert list(found.rows) == [
        ("Bert", 2, 256, "eager"),
        ("Bert", 2, 256, "fused"),
        ("GPT2", 1, 256, "eager"),
        ("GPT2", 4, 64, "eager"),
    ]
    assert found.left_out == ["GPT2: 1024 tokens: GPT2Model takes at most 256"]
    assert [len(rows) for rows in found.vits.values()] == [1]
    assert found.folded == {"Bert": "1 of 3", "GPT2": "3 of 3"}
    assert found.folding[4, 64] > 0 and all(min(pair) > 0 for pair in found.overhead.values())


@pytest.mark.slow
def test_ours_stand_beside_the_papers(small: tuple[Measured, str]) -> None:
    found, text = small
    row = found.rows["GPT2", 1, 256, "eager"]
    before = f"{row.ms['original'].median / 1e3:.4f}"
    (line,) = re.findall(r"\| \*\*GPT2, here\*\* .*", text)
    assert f"| 3 of 3 | {found.overhead['GPT2'][0]:.4f} |" in line and f"| {before} |" in line
    rate = f"{found.rows['GPT2', 4, 64, 'eager'].throughput('original'):.1f}"
    assert f"| GPT2 | 64 |  | +1193.0 | 4.23 % | {rate} |" in text
    assert f"132.3 > {found.folding[4, 64]:.1f} |" in text
    assert "| 128 x 256 | 0.5092 | 0.4763 | 6.45 % | 64357.4 | 68792.8 | - | - |" in text
    assert "* left out: GPT2: 1024 tokens" in text
    assert "OOM" in text and "| A100, amp | 0.8567 | 1.0000 | 0.9699 |" in text


@pytest.mark.slow
def test_results_are_the_same_after_they_were_stored(small: tuple[Measured, str]) -> None:
    found, _ = small
    results = paper_times.as_json(found, "the command", "float32", CPU_DEVICE, CPU)
    again = paper_times.from_json(json.loads(json.dumps(results)))
    assert again.rows.keys() == found.rows.keys() and again.folding == found.folding
    assert [row.to_json() for row in again.rows.values()] == [
        row.to_json() for row in found.rows.values()
    ]
    assert again.vits.keys() == found.vits.keys() and again.overhead == found.overhead


def test_each_model_gets_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, shares = [0.0], []

    def analysed(*_: Any) -> None:
        now[0] += 1.0

    def model(found: Any, name: str, *rest: Any) -> None:
        shares.append((name, rest[-1]))
        now[0] += 50.0
        if name == "GPT2":
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(paper_times.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(paper_times, "analyze", analysed)
    monkeypatch.setattr(paper_times, "_measure_model", model)
    monkeypatch.setattr(paper_times, "_measure_vit", model)
    pairs = {"Bert": [(4, 64)] * 3, "GPT2": [(4, 64)], "OPT": [(4, 64)]}
    scale = Scale(pairs, (), ("Tiny-16",), {"": (1, 4, 8)}, ((4, 64),) * 30, 3, 0.0)
    written: list[int] = []
    found = paper_times.measure(
        scale, "float32", CPU_DEVICE, lambda some: written.append(len(some.left_out)), seconds=160
    )
    assert shares == [("Bert", 143 * 3 / 8), ("GPT2", 93 / 5), ("OPT", 43 / 4)]
    assert found.left_out == [
        "folding for inputs of 4 x 64 and more: no time",
        "GPT2: does not fit in the memory of cpu",
        "ViT Tiny-16 float32: no time",
    ]
    assert written == [1, 2, 2], "what is known is stored after each model"


@pytest.mark.slow
def test_every_line_of_a_table_is_as_long_as_its_head(small: tuple[Measured, str]) -> None:
    _, text = small
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) == 8
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1


def made(faster: float, cost: float, spread: float) -> Row:
    """Nine rounds around these; the gain has a spread of its own."""
    around = [spread * (number - 4) for number in range(9)]
    times = {
        "original": [0.01] * 9,
        "folded": [0.01 / (faster + shift) for shift in around],
        "torch_rms_norm": [0.011] * 9,
        "no_norm": [0.01 * (1 - cost - shift) for shift in around],
    }
    return Row("s", 4, 64, "prefill", "eager", 256, times)


def test_a_gain_that_may_be_noise_is_called_none() -> None:
    noise = made(1.25, 0.1, 0.1)
    assert paper_tables.gain(noise) == "20.00 % (no gain here)"
    assert paper_tables.tax(noise) == "10.00 % (too small to measure)"
    assert paper_tables._normalised([noise]) == ["0.9000", "1.0000", "0.8000", "1.1000"]
    lost = made(0.8, 0.15, 0.01)
    assert paper_tables.gain(lost) == "-25.00 % (slower)" and paper_tables.tax(lost) == "15.00 %"
    assert paper_tables.gain(made(1.25, 0.3, 0.01)) == "20.00 %"
