"""Timing a folded checkpoint: what is run, and what the times are made to say. No times here."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bench_models import folded_of, norms_of
from click.testing import CliRunner, Result
from live_models import CHECKPOINTS, moved

from enjoyln_cli import analyze, arguments, card, fold, hub, plot
from enjoyln_cli.bench import Asked, bench
from enjoyln_cli.checkpoint import load_config, open_source
from enjoyln_cli.cli import main
from enjoyln_cli.compare import load
from enjoyln_cli.errors import ModelNotFound, OutputError, UnsupportedModel
from enjoyln_cli.loading import optimize
from enjoyln_cli.marker import proof_of
from enjoyln_cli.norms import Folded
from enjoyln_cli.report import write_bench
from enjoyln_cli.speeds import Bench, Row
from enjoyln_cli.timing import FEWEST, SHORTEST, Quartiles, Task, quartiles, ratios, turns
from enjoyln_cli.variants import COLUMNS, MODES, in_mode, variants
from enjoyln_cli.workload import decode, prompt, sizes

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = Asked(((1, 8), (2, 8), (2, 12)), repeats=3)


def row(original: float = 20.0, folded: float = 16.0, bare: float = 15.0, **changed: Any) -> Row:
    ms = {"original": original, "folded": folded, "stock": 21.0, "bare": bare}
    made = Row(
        size="2 x 512 tokens",
        batch_size=2,
        seq_len=512,
        phase="prefill",
        mode="eager",
        items=1024,
        ms={name: Quartiles(0.9 * v, v, 1.1 * v) for name, v in ms.items()},
        speedup=Quartiles(1.2, 1.25, 1.3),
        norm_tax=Quartiles(0.23, 0.25, 0.26),
    )
    return replace(made, **changed)


# What the times say.


def test_a_row_says_what_its_times_say() -> None:
    found = row().to_json(fold_seconds=2.0)
    assert found["case"] == "2 x 512 tokens, prefill, eager"
    assert found["speedup"] == 1.25 and found["verdict"] == "faster"
    assert found["norm_tax"] == pytest.approx(0.25)
    assert found["tax_recovered"] == pytest.approx(0.8)
    assert found["per_second"]["folded"] == pytest.approx(64_000)
    assert found["break_even_runs"] == pytest.approx(500)
    assert found["quartiles_ms"]["folded"] == [14.4, 16.0, 17.6]
    assert found["speedup_quartiles"] == [1.2, 1.25, 1.3]
    assert found["norm_tax_quartiles"] == [0.23, 0.25, 0.26]
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("low", "middle", "high", "verdict"),
    [
        (1.01, 1.25, 1.3, "faster"),
        (0.99, 1.25, 1.3, "no gain here"),
        (0.98, 1.005, 1.02, "no gain here"),
        (0.8, 0.9, 0.95, "slower"),
        (0.8, 0.9, 1.01, "no gain here"),
    ],
)
def test_a_difference_within_the_spread_is_none(
    low: float, middle: float, high: float, verdict: str
) -> None:
    found = row(speedup=Quartiles(low, middle, high))
    assert found.verdict == verdict
    assert (found.break_even(2.0) is not None) == (verdict == "faster")
    assert found.break_even(None) is None


def test_what_is_told_lies_between_its_quartiles() -> None:
    """A clock that slows down in the middle sets the medians of the times apart from the turns."""
    times = {"original": [1.0, 1.0, 2.0, 2.2, 2.4], "folded": [0.8, 0.9, 0.95, 2.0, 2.2]}
    times["bare"] = [0.7, 0.8, 0.9, 1.9, 2.1]
    ms = {n: quartiles(v).times(1e3) for n, v in (times | {"stock": times["original"]}).items()}
    speedup = quartiles(ratios(times, "original", "folded"))
    outside = ms["original"].median / ms["folded"].median
    assert outside > speedup.high, "as it was made"
    found = row(ms=ms, speedup=speedup).to_json()
    low, _, high = found["speedup_quartiles"]
    assert low <= found["speedup"] <= high


def test_a_tax_within_the_spread_has_no_share() -> None:
    assert row(norm_tax=Quartiles(-0.01, 0.25, 0.3)).recovered is None
    assert row(norm_tax=Quartiles(0.0, 0.0, 0.0)).recovered is None


def test_a_loss_is_no_share_of_the_tax() -> None:
    slight = Quartiles(0.001, 0.014, 0.02)
    lost = row(norm_tax=slight, speedup=Quartiles(0.8, 0.86, 0.9))
    assert lost.verdict == "slower" and lost.taxed
    assert lost.recovered is None and lost.to_json()["tax_recovered"] is None
    assert row(speedup=Quartiles(0.9, 1.0, 1.1)).recovered == 0.0


def test_quartiles_are_those_of_the_ratios_within_a_turn() -> None:
    """Both double from turn to turn; the ratio does not."""
    times = {"a": [2.0, 4.0, 8.0, 16.0, 32.0], "b": [1.0, 2.0, 4.0, 8.0, 16.0]}
    assert quartiles(ratios(times, "a", "b")) == Quartiles(2.0, 2.0, 2.0)
    assert quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == Quartiles(2.0, 3.0, 4.0)


# What is timed.


def test_every_task_has_a_go_in_every_turn_and_the_order_changes() -> None:
    calls: list[str] = []

    def task(name: str) -> Task:
        def run(given: str) -> None:
            assert given == f"for {name}"
            calls.append(name)
            time.sleep(1.1 * SHORTEST)  # so that it is run once a go

        return Task(run, lambda: f"for {name}", steps=1)

    times = turns({name: task(name) for name in "abc"}, repeats=4)
    assert {name: len(values) for name, values in times.items()} == {"a": 4, "b": 4, "c": 4}
    assert all(value > 0 for values in times.values() for value in values)
    assert "".join(dict.fromkeys(calls[:9])) == "abc", "warmed up in their order"
    goes = [name for name, _ in itertools.groupby(calls[9:])]
    assert "".join(goes) == "abcbabcba", "an even turn ends with what the next begins with"


def test_a_limit_in_seconds_leaves_the_fewest_turns() -> None:
    calls: list[str] = []

    def run(given: Any) -> None:
        calls.append("x")
        time.sleep(1.1 * SHORTEST)

    times = turns({"x": Task(run)}, repeats=50, seconds=0.0)
    assert len(times["x"]) == FEWEST and len(calls) == 1 + FEWEST


def parts(name: str, **settings: Any) -> tuple[Any, Any, list[str]]:
    """A model with moved weights in float64, the folded one, and their norms."""
    cls = {"gpt2": "GPT2LMHeadModel", "nemotron": "NemotronModel"}[name]
    config = transformers.CONFIG_MAPPING[name](**settings)
    plan = analyze(config, model_class=cls).plan
    original = moved(getattr(transformers, cls)(config))
    return original, folded_of(original, plan), norms_of(plan)


GPT2 = {"n_embd": 40, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 32}
NEMOTRON = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 101, "head_dim": 12,
}  # fmt: skip


@pytest.mark.parametrize(("name", "settings"), [("gpt2", GPT2), ("nemotron", NEMOTRON)])
def test_the_variants_are_what_they_say(name: str, settings: dict[str, Any]) -> None:
    """``stock`` computes the same as the folded model; ``bare`` is without norms altogether."""
    original, folded, norms = parts(name, **settings)
    found = variants(original, folded, norms)
    assert tuple(found) == COLUMNS and len(norms) == 5
    ids = torch.randint(0, 101, (2, 9))
    with torch.no_grad():
        exact, fast, stock, bare = (found[column](ids)[0] for column in COLUMNS)
    for other in (fast, stock):
        assert (other - exact).norm() < 1e-6 * exact.norm()
    assert (bare - exact).norm() > 0.1 * exact.norm()
    x = torch.randn(2, 3, original.config.hidden_size, dtype=torch.float64) + 1
    for path in norms:
        assert torch.equal(found["bare"].get_submodule(path)(x), x)
        stock_norm, folded_norm = (
            found[column].get_submodule(path) for column in ("stock", "folded")
        )
        assert isinstance(folded_norm, Folded)
        x0 = x - x.mean(-1, keepdim=True)
        assert torch.allclose(stock_norm(x0), folded_norm(x0), rtol=1e-4)
        assert not torch.allclose(stock_norm(x), original.get_submodule(path)(x), rtol=1e-2)
    first, *others = ({p.data_ptr() for p in model.parameters()} for model in found.values())
    assert all(other == first for other in others), "no weight is held twice"


def test_the_modes_run_the_same_models() -> None:
    original, folded, norms = parts("gpt2", **GPT2)
    found = variants(original, folded, norms)
    ids = torch.randint(0, 101, (2, 9))
    with torch.no_grad():
        for column, model in in_mode(found, "fused").items():
            expected = found[column](ids)[0]
            assert (model(ids)[0] - expected).norm() < 1e-6 * expected.norm()
    torch._dynamo.reset()


def test_decoding_goes_on_from_the_same_cache_every_time() -> None:
    original, _, _ = parts("gpt2", **GPT2)
    (size,), _ = sizes(original, [(2, 10)])
    assert (size.rows, size.tokens, size.items) == (2, 10, 20)
    with torch.no_grad():
        text = prompt(original, size)
        assert text is not None and (text.steps, text.cache.get_seq_length()) == (5, 5)
        task = decode(original, text)
        for _ in range(2):
            cache = task.prepare()
            task.run(cache)
            assert (cache.get_seq_length(), text.cache.get_seq_length()) == (10, 5)
    assert task.steps == 5


def test_an_encoder_is_not_run_again_for_every_token() -> None:
    config = transformers.BartConfig(
        vocab_size=101, d_model=24, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
    )  # fmt: skip
    model = moved(transformers.BartForConditionalGeneration(config))
    (size,), _ = sizes(model, [(1, 8)])
    calls: list[int] = []
    with torch.no_grad():
        text = prompt(model, size)
        assert text is not None
        task = decode(model, text)
        model.model.encoder.register_forward_hook(lambda *_: calls.append(1))
        task.run(task.prepare())
    assert calls == []


def test_a_size_that_a_model_does_not_have_is_left_out() -> None:
    original, _, _ = parts("gpt2", **GPT2)
    found, left_out = sizes(original, [(1, 16), (1, 33), (3, 16), (3, 33), (3, 32)])
    assert [str(size) for size in found] == [
        "1 x 16 tokens",
        "3 x 16 tokens",
        "3 x 32 tokens",
    ]
    assert left_out == ["33 tokens: GPT2LMHeadModel has positions for 32"]
    with pytest.raises(UnsupportedModel, match="positions for 32; shorten --seq-len"):
        sizes(original, [(1, 64), (1, 128)])


# From a checkpoint.


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "gpt2-rms"
    fold(CHECKPOINTS / "gpt2", folder, model_class="GPT2LMHeadModel")
    return folder


@pytest.fixture(scope="module")
def measured(out: Path) -> Bench:
    return bench(out, asked=SMALL, device="cpu")


def test_every_case_is_measured(measured: Bench) -> None:
    assert [(r.batch_size, r.seq_len, r.phase, r.mode) for r in measured.rows] == [
        (*pair, phase, "eager") for pair in SMALL.pairs for phase in ("prefill", "decode")
    ]
    assert all(tuple(r.ms) == COLUMNS for r in measured.rows)
    items = {(r.batch_size, r.seq_len, r.phase): r.items for r in measured.rows}
    assert items[2, 12, "prefill"] == 24 and items[2, 12, "decode"] == 2
    assert measured.left_out == ()


def test_columns_fit_together(measured: Bench) -> None:
    for r in measured.to_json()["rows"]:
        for name in ("speedup", "norm_tax"):
            low, middle, high = r[f"{name}_quartiles"]
            assert low <= middle <= high and r[name] == pytest.approx(middle, abs=1e-6)
        saved = 1 - 1 / r["speedup"]
        if r["tax_recovered"] is not None:
            assert r["tax_recovered"] * r["norm_tax"] == pytest.approx(saved)
        items = r["batch_size"] * (r["seq_len"] if r["phase"] == "prefill" else 1)
        for name in COLUMNS:
            low, middle, high = r["quartiles_ms"][name]
            assert 0 < low <= middle <= high
            assert r["per_second"][name] == pytest.approx(1e3 * items / r[f"{name}_ms"])
        if r["break_even_runs"] is not None:
            gained = r["original_ms"] * saved / 1e3
            assert r["break_even_runs"] * gained == pytest.approx(measured.fold_seconds)


def test_the_file_tells_where_it_was_measured(out: Path, measured: Bench) -> None:
    found = json.loads((out / "enjoyln_bench.json").read_text())
    assert found["versions"]["torch"] == torch.__version__
    assert found["hardware"] and found["device"] == "cpu" and found["dtype"] == "float32"
    assert found["threads"] == 1 and found["repeats"] == 3
    assert found["fold_seconds"] > 0 and found["load_seconds"] > 0
    weights = found["weight_bytes"]
    header = (out / "model.safetensors").stat().st_size - weights["folded"]
    assert weights["original"] == weights["folded"] and 0 < header < 20_000
    assert len(found["rows"]) == len(measured.rows)


def test_a_result_stays_fit_to_be_pushed(out: Path, measured: Bench) -> None:
    assert hub.standing_against(open_source(str(out))) == ""
    section = hub.section(out, "", "me/x", ["GPT2LMHeadModel"])
    assert f"## Measured speed\n\n{measured.hardware}, float32, 20" in section
    assert ", medians of 3 turns.\n" in section
    assert section.count("tokens, prefill, eager |") == 3


def test_the_card_says_whether_there_is_a_gain(tmp_path: Path) -> None:
    none, lost = Quartiles(0.9, 1.25, 1.3), Quartiles(0.8, 0.9, 0.95)
    rows = [row(speedup=none), row(speedup=lost), row(), row()]
    written = [one.to_json() for one in rows]
    written[3] |= {"verdict": "anything | else", "speedup_quartiles": [1, 2, 3]}
    written.append({"case": "somebody's", "speedup_quartiles": "none"})
    (tmp_path / "enjoyln_bench.json").write_text(json.dumps({"rows": written}))
    (tmp_path / "config.json").write_text("{}")
    speeds = card.state(tmp_path, "", "me/x", ["GPT2Model"])["speeds"]
    assert [line[-2:] for line in speeds] == [
        ("1.250 (0.900 to 1.300)", "no gain here"),
        ("0.900 (0.800 to 0.950)", "slower"),
        ("1.250 (1.200 to 1.300)", "faster"),
        ("2.000 (1.000 to 3.000)", "anything \\| else"),
    ]


def test_a_model_without_a_cache_or_a_length_is_measured_as_it_is(tmp_path: Path) -> None:
    vit = tmp_path / "vit"
    fold(CHECKPOINTS / "vit", vit, model_class="ViTForImageClassification", verify=False)
    found = bench(vit, asked=SMALL, device="cpu", write=False)
    assert [r.case for r in found.rows] == [
        "pixel_values 1 x 3 x 32 x 32, prefill, eager",
        "pixel_values 2 x 3 x 32 x 32, prefill, eager",
    ]
    assert [(r.seq_len, r.items) for r in found.rows] == [(None, 1), (None, 2)]
    assert found.left_out == ("decode: ViTForImageClassification keeps no cache",)
    assert not (vit / "enjoyln_bench.json").exists()


def test_an_encoder_has_no_decoding(tmp_path: Path) -> None:
    """BERT's class takes a cache, for those who make a decoder of it."""
    fold(CHECKPOINTS / "bert", tmp_path / "out", model_class="BertModel", verify=False)
    found = bench(tmp_path / "out", asked=replace(SMALL, pairs=((1, 8),)), device="cpu")
    assert {r.phase for r in found.rows} == {"prefill"}
    assert found.left_out == ("decode: BertModel keeps no cache",)


def test_the_original_may_have_moved(tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINTS / "gpt2", tmp_path / "here")
    fold(tmp_path / "here", tmp_path / "out", model_class="GPT2LMHeadModel", verify=False)
    (tmp_path / "here").rename(tmp_path / "there")
    asked = Asked(((1, 8),), phases=("prefill",), repeats=3)
    with pytest.raises(ModelNotFound, match="name the original with --against"):
        bench(tmp_path / "out", asked=asked)
    found = bench(tmp_path / "out", against=tmp_path / "there", asked=asked, device="cpu")
    assert found.source == str(tmp_path / "there") and len(found.rows) == 1


def test_folded_means_optimized(out: Path) -> None:
    """What is timed is what ``optimize`` makes, not a model that only has the weights."""
    config = load_config(open_source(str(out)))
    model = optimize(load(out, "GPT2LMHeadModel", config, torch.float32))
    assert sum(isinstance(module, Folded) for module in model.modules()) == 7


# The command.


def enjoyln(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


QUICK = ("--batch-size", "1", "--seq-len", "8", "--repeats", "3", "--device", "cpu")


def test_the_command_prints_a_table(out: Path) -> None:
    result = enjoyln(out, *QUICK, "--dtype", "bfloat16", "--original", CHECKPOINTS / "gpt2")
    assert result.exit_code == 0, result.output
    for words in ("1 x 8 tokens, prefill, eager", "1 x 8 tokens, decode, eager", "no norm"):
        assert words in result.stdout
    assert "bfloat16 on " in result.stdout and "folding takes " in result.stdout
    assert "1 x 8 tokens, prefill, eager: " in result.stderr


def test_the_lines_below_say_what_the_times_do(capsys: pytest.CaptureFixture[str]) -> None:
    none = row(speedup=Quartiles(0.9, 1.25, 1.3), phase="decode", items=2)
    lost = row(folded=22.0, speedup=Quartiles(0.8, 0.9, 0.95), seq_len=None, items=2)
    noisy = row(norm_tax=Quartiles(-0.1, 0.1, 0.2))
    weights = {"original": 5 * 10**8, "folded": 5 * 10**8}
    write_bench(
        Bench(
            (row(), none, lost, noisy),
            ("one thing",),
            "m",
            "M",
            "bfloat16",
            "cpu",
            9,
            2.0,
            1.0,
            weights,
        )  # fmt: skip
    )
    lines = capsys.readouterr().out.splitlines()[-6:]
    assert lines[:4] == [
        "2 x 512 tokens, prefill, eager: 1.250 times as fast (1.200 to 1.300); norms cost 25.0%, "
        "of which 80% is saved; 51,200 to 64,000 tokens a second; pays after 500 runs",
        "2 x 512 tokens, decode, eager: no gain here, 1.250 times as fast (0.900 to 1.300); norms "
        "cost 25.0%, of which 80% is saved; 100 to 125 tokens a second",
        "2 x 512 tokens, prefill, eager: slower, 0.900 times as fast (0.800 to 0.950); norms cost "
        "25.0%; 100 to 91 rows a second",
        "2 x 512 tokens, prefill, eager: 1.250 times as fast (1.200 to 1.300); what norms cost is "
        "within the spread; 51,200 to 64,000 tokens a second; pays after 500 runs",
    ]
    assert "500.0 MB before, 500.0 MB after; folding takes 2.0 s" in lines[4]
    assert lines[5] == "left out: one thing"


def test_json_is_one_object_and_nothing_else(out: Path) -> None:
    result = enjoyln(out, *QUICK, "--json")
    assert result.exit_code == 0 and result.stderr == ""
    found = json.loads(result.stdout)
    assert [r["phase"] for r in found["rows"]] == ["prefill", "decode"]
    assert found == json.loads((out / "enjoyln_bench.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--batch-size", "1,x"], "write 1,8"),
        (["--seq-len", "0"], "'0' is no list of whole numbers from 1 on; write 1,8"),
        (["--mode", "eager,quick"], "known are eager, fused, compile, cudagraphs"),
        (["--mode", "eagre"], "'eagre' is no mode; did you mean eager?"),
        (["--repeats", "1"], "--repeats"),
    ],
)
def test_usage_errors(out: Path, arguments: list[str], hint: str) -> None:
    result = enjoyln(out, *arguments)
    assert result.exit_code == 2 and hint in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--mode", "cudagraphs", "--device", "cpu"], "cudagraphs needs a GPU, and this is cpu"),
        (["--device", "gpu"], "--device gpu cannot be timed; take cpu, cuda, mps"),
        (["--device", "cuda:x"], "--device cuda:x is not there: Invalid device string"),
        (["--device", "meta"], "--device meta cannot be timed; take cpu, cuda, mps"),
        (["--original", CHECKPOINTS / "bert"], "is of type bert and"),
        (["--device", "xla:0"], "--device xla:0 cannot be timed; take cpu, cuda, mps"),
        (["--seq-len", "4096"], "GPT2LMHeadModel has positions for 64; shorten --seq-len"),
        (["--plot", "x.bmp"], "end it in .png or .svg"),
    ],
)
@pytest.mark.usefixtures("measured")
def test_refusals_are_one_line(out: Path, arguments: list[Any], line: str) -> None:
    before = (out / "enjoyln_bench.json").read_bytes()
    result = enjoyln(out, *arguments)
    assert result.exit_code == 1 and line in result.stderr.splitlines()[-1]
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert (out / "enjoyln_bench.json").read_bytes() == before


def test_what_was_not_folded_is_refused_by_name() -> None:
    result = enjoyln(CHECKPOINTS / "gpt2")
    assert result.exit_code == 1
    assert f"{CHECKPOINTS / 'gpt2'} was not folded: its config.json has no" in result.stderr


@pytest.mark.parametrize("measure", ["bench", "verify"])
def test_what_cannot_be_kept_is_shown_all_the_same(
    out: Path, measure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a directory where nobody may write."""

    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("enjoyln_cli.news.write_whole", refuse)
    command = [measure, str(out), *(QUICK if measure == "bench" else ())]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0 and "original" in result.stdout
    warning = f"warning: {out / f'enjoyln_{measure}.json'} is not written: Permission denied"
    assert warning in result.stderr.splitlines()


def test_quiet_is_quiet(out: Path) -> None:
    result = enjoyln(out, *QUICK, "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_a_marker_that_the_model_cannot_run_with(tmp_path: Path) -> None:
    """With its digest made right again."""
    fold(CHECKPOINTS / "gpt2", tmp_path / "out", model_class="GPT2LMHeadModel", verify=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["enjoyln"]["centering"][0]["axis"][0] = 5
    config["enjoyln"]["proof"] = proof_of(config["enjoyln"])
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    result = enjoyln(tmp_path / "out", *QUICK)
    assert result.exit_code == 1
    assert "GPT2LMHeadModel does not run with the norms and" in result.stderr.splitlines()[-1]


# Pictures.

needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")


def figures(**changed: Any) -> dict[str, Any]:
    made = [row(seq_len=n, size=f"2 x {n} tokens", **changed).to_json() for n in (128, 512)]
    return {
        "rows": made,
        "model_class": "A <b> & c",
        "dtype": "bfloat16",
        "hardware": "a CPU",
        "source": "me/m",
    }


@needs_matplotlib
def test_a_picture_shows_every_case(tmp_path: Path) -> None:
    plot.save(figures(), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    ET.fromstring(text)
    for words in (
        "2 x 128 tokens, prefill, eager",
        "2 x 512 tokens, prefill, eager",
        "80% of 25.0 %",
        "Speed-up by sequence length: prefill, eager",
        "me/m (A &lt;b&gt; &amp; c), bfloat16 on a CPU",
    ):
        assert words in text
    assert "Speed-up by batch size" not in text, "there is one"


@needs_matplotlib
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"speedup": Quartiles(0.8, 0.9, 0.95)}, "none of 25.0 %"),
        ({"norm_tax": Quartiles(-0.1, 0.1, 0.2)}, "within the spread"),
    ],
)
def test_a_picture_says_what_is_not_saved(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    plot.save(figures(**changed), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert words in text and ("of 25.0 %" in text) == ("of 25.0 %" in words)


@needs_matplotlib
@pytest.mark.parametrize("count", [1, 2])
def test_a_picture_of_anything_is_a_png(tmp_path: Path, count: int) -> None:
    found = figures(norm_tax=Quartiles(-0.1, 0.1, 0.2))
    rows = found["rows"][:count]
    for one in rows:
        one["seq_len"] = None
    plot.save({**found, "rows": rows}, tmp_path / "a.PNG")
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")


@needs_matplotlib
def test_the_command_draws(out: Path, tmp_path: Path) -> None:
    result = enjoyln(out, *QUICK, "--plot", tmp_path / "a.svg")
    assert result.exit_code == 0, result.output
    assert "1 x 8 tokens, decode, eager" in (tmp_path / "a.svg").read_text()


@needs_matplotlib
def test_a_picture_that_cannot_be_written_leaves_the_times(out: Path, tmp_path: Path) -> None:
    result = enjoyln(out, *QUICK, "--plot", tmp_path / f"{'a' * 300}.svg")
    assert result.exit_code == 1
    assert "cannot be written: File name too long" in result.stderr.splitlines()[-1]
    assert "1 x 8 tokens, prefill, eager" in result.stdout


def test_what_cannot_be_drawn_is_refused_before_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OutputError, match="end it in .png or .svg"):
        plot.check(tmp_path / "a.pdf")
    with pytest.raises(OutputError, match="no is no directory"):
        plot.check(tmp_path / "no" / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("enjoyln_cli.plot.find_spec", lambda name: None)
    with pytest.raises(OutputError, match=r"matplotlib; pip install 'enjoyln\[pictures\]'"):
        plot.check(tmp_path / "a.png")


def test_the_modes_are_those_of_the_command() -> None:
    assert arguments.MODES == MODES
