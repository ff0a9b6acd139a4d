"""Timing a folded checkpoint: what is run, and what the times are made to say. No times here."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from click.testing import Result
from commands import enjoyln
from live_models import CHECKPOINTS, moved
from rounding import IDENTITY, relative

from enjoyln_cli import analyze, fold
from enjoyln_cli.benchmark.baselines import COLUMNS, in_mode, share_weights, variants
from enjoyln_cli.benchmark.bench import bench
from enjoyln_cli.benchmark.cases import GRID, BenchOptions, planned_cases, time_cases
from enjoyln_cli.benchmark.speedups import Bench, Row
from enjoyln_cli.benchmark.timing import TimeIsUp
from enjoyln_cli.benchmark.workload import decode, prompt, sizes
from enjoyln_cli.checkpoint.config import MARKER
from enjoyln_cli.checkpoint.marker import marker, proof_of
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.cli.measure_commands import bench as bench_of_the_command
from enjoyln_cli.cli.measure_commands import pairs_to_time
from enjoyln_cli.clock import Clock
from enjoyln_cli.errors import ModelNotFound, UnsupportedModel
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.publish import push
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.runtime.loading import optimize
from enjoyln_cli.runtime.modules import Folded

SMALL = BenchOptions(((1, 8), (2, 8), (2, 12)), repeats=3)


def folded_of(original: Any, plan: Plan) -> Any:
    """Centre ``original`` in place. Returns a model with the same weights that runs RMSNorm."""
    centre_parameters(original, plan)
    folded = share_weights(original)
    setattr(folded.config, MARKER, marker(plan, SimpleNamespace(model="random", revision=None)))
    return optimize(folded)


CONFIGS = {
    "GPT2LMHeadModel": transformers.GPT2Config(
        n_embd=40, n_layer=2, n_head=4, vocab_size=101, n_positions=32
    ),
    "NemotronModel": transformers.NemotronConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=101, head_dim=12,
    ),
}  # fmt: skip
"""Nemotron has a norm class of its own, which adds one to its weight."""


def parts(name: str = "GPT2LMHeadModel") -> tuple[Any, Any, list[str]]:
    """A model with moved weights in float64, the folded one, and their norms."""
    plan = analyze(CONFIGS[name], model_class=name).plan
    original = moved(getattr(transformers, name)(CONFIGS[name]))
    return original, folded_of(original, plan), [verdict.norm for verdict in plan.norms]


@pytest.mark.one_case
@pytest.mark.parametrize("name", CONFIGS)
def test_the_variants_are_what_they_say(name: str) -> None:
    """``torch_rms_norm`` computes the same as the folded model; ``no_norm`` has no norms."""
    original, folded, norms = parts(name)
    found = variants(original, folded, norms)
    assert tuple(found) == COLUMNS and len(norms) == 5
    ids = torch.randint(0, 101, (2, 9))
    with torch.no_grad():
        exact, fast, by_torch, without = (found[column](ids)[0] for column in COLUMNS)
    for other in (fast, by_torch):
        assert relative(other, exact) <= IDENTITY
    assert (without - exact).norm() > 0.1 * exact.norm()
    x = torch.randn(2, 3, original.config.hidden_size, dtype=torch.float64) + 1
    for path in norms:
        assert torch.equal(found["no_norm"].get_submodule(path)(x), x)
        torch_norm, folded_norm = (
            found[column].get_submodule(path) for column in ("torch_rms_norm", "folded")
        )
        assert isinstance(folded_norm, Folded)
        x0 = x - x.mean(-1, keepdim=True)
        assert torch.allclose(torch_norm(x0), folded_norm(x0), rtol=1e-11)
        assert not torch.allclose(torch_norm(x), original.get_submodule(path)(x), rtol=1e-2)
    first, *others = ({p.data_ptr() for p in model.parameters()} for model in found.values())
    assert all(other == first for other in others), "no weight is held twice"


@pytest.mark.slow
def test_the_modes_run_the_same_models() -> None:
    original, folded, norms = parts()
    found = {"folded": variants(original, folded, norms)["folded"]}
    ids = torch.randint(0, 101, (2, 9))
    with torch.no_grad():
        for column, model in in_mode(found, "compile").items():
            expected = found[column](ids)[0]
            assert relative(model(ids)[0], expected) <= IDENTITY
    torch._dynamo.reset()


def test_decoding_goes_on_from_the_same_cache_every_time() -> None:
    original, _, _ = parts()
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
    original, _, _ = parts()
    found, left_out = sizes(original, [(1, 16), (1, 33), (3, 16), (3, 33), (3, 32)])
    assert [str(size) for size in found] == [
        "1 x 16 tokens",
        "3 x 16 tokens",
        "3 x 32 tokens",
    ]
    assert left_out == ["33 tokens: GPT2LMHeadModel takes at most 32"]
    with pytest.raises(UnsupportedModel, match="takes at most 32; use a smaller --seq-len"):
        sizes(original, [(1, 64), (1, 128)])


# From a checkpoint.


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "gpt2-rms"
    fold(CHECKPOINTS / "gpt2", folder, model_class="GPT2LMHeadModel")
    return folder


@pytest.fixture(scope="module")
def measured(out: Path) -> Bench:
    return bench(out, options=SMALL, device="cpu")


def test_every_case_is_measured(measured: Bench) -> None:
    assert [(r.batch_size, r.seq_len, r.phase, r.mode) for r in measured.rows] == [
        (*pair, phase, "eager") for pair in SMALL.pairs for phase in ("prefill", "decode")
    ]
    assert all(tuple(r.times) == COLUMNS for r in measured.rows)
    assert measured.left_out == ()
    for r in measured.to_json()["rows"]:
        assert r["rounds"] == 3 and r["speedup_interval"] is None, "too few for an interval"
        assert r["verdict"] == "no gain here" and r["reason"] == "3 rounds are too few to tell"
        for name in COLUMNS:
            assert r["models"][name]["median_ms"] > 0


def test_the_result_tells_where_it_was_measured(out: Path, measured: Bench) -> None:
    found = json.loads(json.dumps(measured.to_json()))
    assert found["versions"]["torch"] == torch.__version__
    assert found["hardware"] and found["device"] == "cpu" and found["dtype"] == "float32"
    assert found["threads"] == 1 and found["repeats"] == 3
    assert found["seconds"] > found["load_seconds"] > 0
    assert len(found["rows"]) == len(measured.rows)
    assert push.publishing_objection(open_source(str(out))) == "", "nothing is written"


@pytest.mark.slow
def test_a_model_without_a_cache_or_a_length_is_measured_as_it_is(tmp_path: Path) -> None:
    vit = tmp_path / "vit"
    fold(CHECKPOINTS / "vit", vit, model_class="ViTForImageClassification", verify=False)
    found = bench(vit, options=SMALL, device="cpu")
    assert [r.case for r in found.rows] == [
        "pixel_values 1 x 3 x 32 x 32, prefill, eager",
        "pixel_values 2 x 3 x 32 x 32, prefill, eager",
    ]
    assert [(r.seq_len, r.batch_size) for r in found.rows] == [(None, 1), (None, 2)]
    assert found.left_out == ("decode: ViTForImageClassification has no cache",)


def test_an_encoder_has_no_decoding(tmp_path: Path) -> None:
    """BERT's class takes a cache, for those who make a decoder of it."""
    fold(CHECKPOINTS / "bert", tmp_path / "out", model_class="BertModel", verify=False)
    found = bench(tmp_path / "out", options=replace(SMALL, pairs=((1, 8),)), device="cpu")
    assert {r.phase for r in found.rows} == {"prefill"}
    assert found.left_out == ("decode: BertModel has no cache",)


def test_a_single_token_is_read_and_not_decoded(out: Path) -> None:
    asked = BenchOptions(((1, 1),), repeats=3)
    found = bench(out, options=asked, device="cpu")
    assert [r.case for r in found.rows] == ["1 x 1 tokens, prefill, eager"]
    assert found.left_out == ("1 x 1 tokens, decode, eager: needs at least two tokens",)


def test_the_original_may_have_moved(tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINTS / "gpt2", tmp_path / "here")
    fold(tmp_path / "here", tmp_path / "out", model_class="GPT2LMHeadModel", verify=False)
    (tmp_path / "here").rename(tmp_path / "there")
    asked = BenchOptions(((1, 8),), phases=("prefill",), repeats=3)
    with pytest.raises(ModelNotFound, match="name the original with --against"):
        bench(tmp_path / "out", options=asked)
    found = bench(tmp_path / "out", against=tmp_path / "there", options=asked, device="cpu")
    assert found.source == str(tmp_path / "there") and len(found.rows) == 1


# The command.


def bench_command(*arguments: object) -> Result:
    return enjoyln("bench", *arguments)


QUICK = ("--batch-size", "1", "--seq-len", "8", "--repeats", "3", "--device", "cpu")


def test_the_command_prints_a_table(out: Path) -> None:
    plain = ("--dtype", "bfloat16", "--original", CHECKPOINTS / "gpt2")
    result = bench_command(out, *QUICK, *plain)
    assert result.exit_code == 0, result.output
    for words in ("1 x 8 tokens, prefill, eager", "1 x 8 tokens, decode, eager", "no norm"):
        assert words in result.stdout
    assert "bfloat16 on " in result.stdout
    assert "1 x 8 tokens, prefill, eager: " in result.stderr


@pytest.mark.slow
def test_by_default_the_usual_sizes_are_measured(out: Path) -> None:
    """The model has positions for 64 tokens, so the usual sizes are left out."""
    result = bench_command(out, "--repeats", "3", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "measuring 2 cases, at most 3 rounds; the run ends after 120 s" in result.stderr
    lines = [line for line in result.stdout.splitlines() if ": no gain here, " in line]
    assert [line.split(",")[0] for line in lines] == ["1 x 32 tokens"] * 2
    assert "left out: 1024 tokens: GPT2LMHeadModel takes at most 64" in result.stdout


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ((), {}),
        (("--seconds", "5"), {"seconds": 5.0}),
        (("--batch-size", "1,8", "--seq-len", "128,512,1024"), {"pairs": GRID}),
        (("--seq-len", "9"), {"pairs": ((1, 9),)}),
    ],
)
def test_what_the_options_ask_for(given: tuple[str, ...], asked: dict[str, Any]) -> None:
    params = bench_of_the_command.make_context("bench", ["out", *given]).params
    options = {name: params[name] for name in ("modes", "repeats", "seconds")}
    options |= pairs_to_time(params["batch_sizes"], params["seq_lens"])
    assert BenchOptions(**options) == BenchOptions(**asked)
    assert options["seconds"] == asked.get("seconds", 120)


def test_loading_that_takes_all_the_time_ends_the_run(out: Path) -> None:
    stages: list[str] = []
    words = "0.001 s are too short to load the models and measure a case; allow more with --seconds"
    with pytest.raises(UnsupportedModel, match=words):
        bench(
            out,
            options=BenchOptions(seconds=1e-3),
            on_event=lambda level, text: stages.append(text),
        )
    assert not any("measuring" in text for text in stages)


def test_no_case_begins_without_time(out: Path) -> None:
    original, folded, norms = parts()
    cases, _ = planned_cases(original, BenchOptions(((1, 8), (2, 8)), phases=("prefill",)))
    hands = iter([0.0, 0.0, 0.0, 0.0, 99.0])
    clock = Clock(lambda: next(hands), 60.0)
    timed = time_cases(original, folded, norms, cases, 3, torch.device("cpu"), clock)
    assert isinstance(next(timed), Row)
    with pytest.raises(TimeIsUp):
        next(timed)


def test_json_is_one_object_and_nothing_else(out: Path) -> None:
    result = bench_command(out, *QUICK, "--json")
    assert result.exit_code == 0 and result.stderr == ""
    found = json.loads(result.stdout)
    assert [r["phase"] for r in found["rows"]] == ["prefill", "decode"]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--seq-len", "0"], "'0' is not a list of positive whole numbers; write 1,8"),
        (["--mode", "eager,quick"], "known are eager, compile"),
        (["--mode", "eagre"], "'eagre' is not a mode; did you mean eager?"),
        (["--repeats", "0"], "--repeats"),
    ],
)
def test_usage_errors(out: Path, arguments: list[str], hint: str) -> None:
    result = bench_command(out, *arguments)
    assert result.exit_code == 2 and hint in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--device", "gpu"], "--device gpu is not supported; use cpu, cuda, mps"),
        (["--device", "cuda:x"], "--device cuda:x is not available: Invalid device string"),
        (["--original", CHECKPOINTS / "bert"], "is of type bert and"),
        (["--seq-len", "4096"], "GPT2LMHeadModel takes at most 64; use a smaller --seq-len"),
        (["--seconds", "0.01"], "are too short to load the models and measure a case"),
    ],
)
def test_refusals_are_one_line(out: Path, arguments: list[Any], line: str) -> None:
    result = bench_command(out, *arguments)
    assert result.exit_code == 1 and line in result.stderr.splitlines()[-1]
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_what_was_not_folded_is_refused_by_name() -> None:
    result = bench_command(CHECKPOINTS / "gpt2")
    assert result.exit_code == 1
    assert f"{CHECKPOINTS / 'gpt2'} was not folded: its config.json has no" in result.stderr


def test_a_marker_that_the_model_cannot_run_with(tmp_path: Path) -> None:
    """With its digest made right again."""
    fold(CHECKPOINTS / "gpt2", tmp_path / "out", model_class="GPT2LMHeadModel", verify=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["enjoyln"]["centering"][0]["axis"]["dim"] = 5
    config["enjoyln"]["proof"] = proof_of(config["enjoyln"])
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    result = bench_command(tmp_path / "out", *QUICK)
    assert result.exit_code == 1
    assert "GPT2LMHeadModel does not run with the norms and" in result.stderr.splitlines()[-1]
