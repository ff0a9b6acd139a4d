"""Timing a folded checkpoint: what is run, and what the times are made to say. No times here."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from live_models import CHECKPOINTS, moved
from rounding import IDENTITY, relative

from enjoyln_cli import analyze, fold, kernels
from enjoyln_cli.benchmark import cases, machine, plot
from enjoyln_cli.benchmark.baselines import COLUMNS, in_mode, share_weights, variants
from enjoyln_cli.benchmark.bench import bench
from enjoyln_cli.benchmark.budget import Calls, Case, Choice, Cost, choose, cost, describe, just_one
from enjoyln_cli.benchmark.cases import GRID, BenchOptions
from enjoyln_cli.benchmark.results import Bench, Row
from enjoyln_cli.benchmark.timing import (
    ENOUGH,
    FEWEST,
    SHORTEST,
    Limit,
    Quartiles,
    Task,
    median_interval,
    quartiles,
    ratios,
    time_rounds,
)
from enjoyln_cli.benchmark.workload import Size, decode, decode_steps, prompt, sizes
from enjoyln_cli.checkpoint.config import MARKER, load_config
from enjoyln_cli.checkpoint.marker import marker, proof_of
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.cli import options as arguments
from enjoyln_cli.cli.console import write_bench
from enjoyln_cli.cli.main import main
from enjoyln_cli.clock import Clock
from enjoyln_cli.errors import ModelNotFound, OutputError, UnsupportedModel
from enjoyln_cli.models.load import load
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.publish import card, push
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.runtime.loading import optimize
from enjoyln_cli.runtime.modules import Folded

SMALL = BenchOptions(((1, 8), (2, 8), (2, 12)), repeats=3)


FASTER = (1.2, 1.21, 1.23, 1.24, 1.25, 1.26, 1.27, 1.28, 1.3)
"""Original / folded in nine rounds: the 95 % interval of the median is 1.21 to 1.28."""
COST = (0.22, 0.23, 0.24, 0.245, 0.25, 0.255, 0.26, 0.265, 0.27)
NOISE = (0.9, 0.95, 1.0, 1.1, 1.25, 1.26, 1.27, 1.28, 1.3)
SLOWER = (0.8, 0.81, 0.85, 0.88, 0.9, 0.91, 0.92, 0.95, 1.1)
NO_COST = (-0.1, -0.02, 0.0, 0.05, 0.1, 0.12, 0.15, 0.2, 0.3)


def row(
    faster: Sequence[float] = FASTER, cost: Sequence[float] = COST, before: float = 0.02, **new: Any
) -> Row:
    """A case whose rounds have these original / folded, and these shares of norms."""
    made = Row(
        size="2 x 512 tokens",
        batch_size=2,
        seq_len=512,
        phase="prefill",
        mode="eager",
        items=1024,
        times={
            "original": [before] * len(faster),
            "folded": [before / ratio for ratio in faster],
            "torch_rms_norm": [1.05 * before] * len(faster),
            "no_norm": [before * (1 - share) for share in cost[: len(faster)]],
        },
    )
    return replace(made, **new)


# What the times say.


def test_the_interval_of_a_median_needs_six_values() -> None:
    """At 95 %: the known table of ranks for small samples."""
    for count, rank in {6: 1, 8: 1, 9: 2, 11: 2, 12: 3, 15: 4, 20: 6, 25: 8}.items():
        values = [float(number) for number in range(1, count + 1)]
        found = median_interval([*reversed(values)])
        assert found == (values[rank - 1], values[-rank]), count
    for count in range(6):
        assert median_interval([1.0] * count) is None


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    """Of a skewed distribution, as times are."""
    drawn = torch.empty(2000, 11, dtype=torch.float64)
    drawn.exponential_(generator=torch.Generator().manual_seed(0))
    held = 0
    for values in drawn.tolist():
        low, high = median_interval(values) or (0.0, 0.0)
        held += low <= math.log(2) <= high
    assert 0.94 < held / 2000 < 1 and held < 2000


def test_a_row_says_what_its_times_say() -> None:
    found = row().to_json(fold_seconds=2.0)
    assert found["case"] == "2 x 512 tokens, prefill, eager" and found["rounds"] == 9
    assert found["speedup"] == pytest.approx(1.25) and found["verdict"] == "faster"
    assert found["speedup_interval"] == pytest.approx([1.21, 1.28])
    assert found["norm_cost"] == pytest.approx(0.25)
    assert found["norm_cost_interval"] == pytest.approx([0.23, 0.265])
    assert found["saved_share"] == pytest.approx(0.8) and found["reason"] == ""
    assert found["break_even_runs"] == pytest.approx(500)
    assert list(found["models"]) == ["original", "folded", "torch_rms_norm", "no_norm"]
    folded = found["models"]["folded"]
    assert folded["items_per_second"] == pytest.approx(64_000)
    assert folded["quartiles_ms"] == pytest.approx([20 / 1.27, 16, 20 / 1.23], abs=1e-6)
    assert folded["times_as_fast"] == found["speedup"]
    assert folded["times_as_fast_interval"] == found["speedup_interval"]
    assert found["models"]["original"]["times_as_fast_interval"] == [1, 1]
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("faster", "cost", "verdict", "reason"),
    [
        (FASTER, COST, "faster", ""),
        (NOISE, COST, "no gain here", ""),
        (SLOWER, COST, "slower", ""),
        (SLOWER, NO_COST, "slower", ""),
        (FASTER, NO_COST, "no gain here", "noise, as the norm cost is too small to measure"),
        (
            FASTER,
            [0.19 / 0.25 * share for share in COST],
            "no gain here",
            "more than norms cost, so the measurement is not consistent",
        ),
        (FASTER[:5], COST[:5], "no gain here", "5 rounds are too few to tell"),
        ([1.25] * 6, [0.25] * 6, "faster", ""),
        ([0.8] * 5, [0.25] * 5, "no gain here", "5 rounds are too few to tell"),
    ],
)
def test_a_gain_is_claimed_where_the_interval_and_the_norm_cost_allow_it(
    faster: Sequence[float], cost: Sequence[float], verdict: str, reason: str
) -> None:
    found = row(faster, cost)
    assert (found.verdict, found.reason) == (verdict, reason)
    for value in (found.break_even(2.0), found.recovered):
        assert (value is not None) == (verdict == "faster")
    assert found.recovered is None or 0 < found.recovered <= 1
    assert found.break_even(None) is None


def test_what_is_told_lies_within_its_interval() -> None:
    """A clock that slows down in the middle sets the medians of the times apart from the rounds."""
    original = [1.0, 1.0, 1.0, 1.0, 2.0, 2.2, 2.4, 2.4, 2.4]
    folded = [0.8, 0.85, 0.9, 0.93, 0.95, 2.0, 2.2, 2.2, 2.2]
    times = {"original": original, "folded": folded, "torch_rms_norm": original}
    found = row(times=times | {"no_norm": [0.7 * value for value in original]}).to_json()
    medians = {name: one["median_ms"] for name, one in found["models"].items()}
    outside = medians["original"] / medians["folded"]
    low, high = found["speedup_interval"]
    assert outside > high, "as it was made"
    assert low <= found["speedup"] <= high
    rates = {name: one["items_per_second"] for name, one in found["models"].items()}
    assert rates["folded"] / rates["original"] == pytest.approx(found["speedup"])


def test_medians_are_those_of_the_ratios_within_a_round() -> None:
    """Both double from round to round; the ratio does not."""
    times = {"a": [2.0, 4.0, 8.0, 16.0, 32.0], "b": [1.0, 2.0, 4.0, 8.0, 16.0]}
    assert quartiles(ratios(times, "a", "b")) == Quartiles(2.0, 2.0, 2.0)
    assert quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == Quartiles(2.0, 3.0, 4.0)


# What is timed.


def test_every_task_runs_in_every_round_and_the_order_changes() -> None:
    calls: list[str] = []

    def task(name: str) -> Task:
        def run(given: str) -> None:
            assert given == f"for {name}"
            calls.append(name)
            time.sleep(1.1 * SHORTEST)  # so that it runs once per round

        return Task(run, lambda: f"for {name}", steps=1)

    times = time_rounds({name: task(name) for name in "abc"}, repeats=4)
    assert {name: len(values) for name, values in times.items()} == {"a": 4, "b": 4, "c": 4}
    assert all(value > 0 for values in times.values() for value in values)
    assert "".join(dict.fromkeys(calls[:9])) == "abc", "warmed up in their order"
    goes = [name for name, _ in itertools.groupby(calls[9:])]
    assert "".join(goes) == "abcbabcba", "an even turn ends with what the next begins with"


class Hands:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at

    def taking(self, seconds: float) -> Task:
        """A task that takes so long."""

        def run(given: Any) -> None:
            self.at += seconds

        return Task(run)


@pytest.mark.parametrize(
    ("limit", "rounds"),
    [
        (Limit(), 20),
        (Limit(seconds=60.0), 20),
        (Limit(seconds=22.0), 10),
        (Limit(seconds=0.0), ENOUGH),
        (Limit(seconds=0.0, at_most=10.0), 4),
        (Limit(seconds=0.0, at_most=0.0), FEWEST),
    ],
)
def test_a_limit_in_seconds_leaves_fewer_rounds(limit: Limit, rounds: int) -> None:
    """A round of two tasks takes two seconds, as does warming up."""
    hands = Hands()
    tasks = {name: hands.taking(1.0) for name in "ab"}
    told: list[int] = []
    times = time_rounds(tasks, 20, limit=limit, on_round=told.append, now=hands)
    assert times == {"a": [1.0] * rounds, "b": [1.0] * rounds}
    assert told == list(range(rounds + 1))


def test_a_long_call_warms_up_once_and_a_short_one_is_repeated() -> None:
    hands = Hands()
    time_rounds({"long": hands.taking(5.0)}, FEWEST, now=hands)
    assert hands.at == 5.0 * (1 + FEWEST)
    hands = Hands()
    time_rounds({"short": hands.taking(SHORTEST / 3.5)}, FEWEST, now=hands)
    assert hands.at == pytest.approx(SHORTEST / 3.5 * (3 + 4 * FEWEST))


# What there is time for.


def case(rows: int, tokens: int, phase: str = "prefill", mode: str = "eager") -> Case:
    return Case(Size({}, rows, tokens), phase, mode)


GRID_CASES = [case(*pair) for pair in GRID]
SECOND = Calls({128: 1.0})
"""A machine on which the original reads 128 tokens in a second."""


def names(cases: Iterable[Case]) -> list[str]:
    return [str(one) for one in cases]


def test_calls_lie_on_a_line_between_those_measured_and_grow_beyond() -> None:
    calls = Calls({8: 1.0, 128: 2.0, 512: 5.0})
    assert [calls.seconds(n) for n in (1, 8, 68, 128, 320, 512)] == [1, 1, 1.5, 2, 3.5, 5]
    assert calls.seconds(1024) == 10


def test_a_cost_counts_the_four_models() -> None:
    each = 4 * 1.1
    assert cost(case(1, 512), SECOND) == Cost(pytest.approx(each * 4), pytest.approx(each * 4))
    brief = Calls({128: SHORTEST / 10})
    assert cost(case(1, 128), brief).one_round == pytest.approx(each * SHORTEST)
    steps = Calls({1: 0.1, 128: 1.0})
    found = cost(replace(case(1, 128, "decode"), steps=16), steps)
    assert found.one_round == pytest.approx(each * 16 * 0.1)
    assert found.before == pytest.approx(1 + each * 16 * 0.1)


def test_slow_decoding_has_fewer_tokens() -> None:
    long, short = Size({}, 1, 128), Size({}, 1, 6)
    assert [decode_steps(long, seconds) for seconds in (0.01, 0.05, 0.1, 9.0)] == [16, 10, 5, 4]
    assert [decode_steps(short, seconds) for seconds in (0.01, 9.0)] == [3, 3]


def test_the_cheapest_cases_are_chosen_and_the_others_named() -> None:
    costs = {one: cost(one, SECOND) for one in GRID_CASES}
    choice = choose(costs, 100.0, repeats=15)
    assert names(choice.cases) == ["1 x 128 tokens, prefill, eager"]
    assert choice.rounds == 15 and choice.seconds <= 100
    assert len(choice.left_out) == 5 and all(value > 50 for value in choice.left_out.values())
    fast = Calls({128: 0.1})
    choice = choose({one: cost(one, fast) for one in GRID_CASES}, 120.0, repeats=15)
    assert names(choice.cases) == [
        "1 x 128 tokens, prefill, eager",
        "1 x 512 tokens, prefill, eager",
        "1 x 1024 tokens, prefill, eager",
        "8 x 128 tokens, prefill, eager",
    ]
    assert 9 <= choice.rounds < 15 and choice.seconds <= 120
    brief = Calls({128: 0.01})
    choice = choose({one: cost(one, brief) for one in GRID_CASES}, 100.0, repeats=15)
    assert (len(choice.cases), choice.rounds, choice.left_out) == (6, 15, {})


@pytest.mark.parametrize("left", [40.0, 60.0, 100.0, 250.0, 1000.0, math.inf])
@pytest.mark.parametrize("speed", [0.001, 0.03, 1.0, 20.0])
def test_what_is_chosen_fits(left: float, speed: float) -> None:
    costs = {one: cost(one, Calls({128: speed})) for one in GRID_CASES}
    choice = choose(costs, left, repeats=15)
    assert choice.seconds <= left and {*choice.cases, *choice.left_out} == {*GRID_CASES}
    assert not choice.cases or ENOUGH <= choice.rounds <= 15
    assert left < math.inf or (len(choice.cases), choice.rounds) == (6, 15)


def test_a_case_that_has_no_time_for_good_rounds_gets_enough() -> None:
    costs = {one: cost(one, SECOND) for one in GRID_CASES}
    assert choose(costs, 35.0, repeats=15).rounds == 6
    assert choose(costs, 30.0, repeats=15).cases == ()
    assert choose(costs, 30.0, repeats=3).rounds == 3, "no more than asked for"
    assert names(just_one(costs, 15).cases) == ["1 x 128 tokens, prefill, eager"]


def test_sizes_that_were_asked_for_get_fewer_rounds() -> None:
    costs = {one: cost(one, SECOND) for one in GRID_CASES[:3]}
    for left, rounds in ((math.inf, 15), (600.0, 9), (10.0, 3)):
        choice = choose(costs, left, repeats=15, all_of_them=True)
        assert (len(choice.cases), choice.rounds, choice.left_out) == (3, rounds, {})


def test_what_is_chosen_is_said_in_a_line() -> None:
    costs = {one: cost(one, SECOND) for one in GRID_CASES}
    choice = choose(costs, 100.0, repeats=15)
    assert describe(choice, 12.0, 120.0, 15) == (
        "measuring 1 of 6 cases, 15 rounds each; the whole run takes about 82 s, as it should end "
        "within 120 s; --seconds gives it more time, --full no limit"
    )
    forced = choose(costs, 10.0, repeats=15, all_of_them=True)
    assert describe(forced, 12.0, 120.0, 15) == (
        "measuring all 6 cases, 3 rounds each instead of 15; the whole run takes about 34 min, "
        "more than 120 s: these are the fewest rounds possible"
    )
    every = choose(costs, math.inf, repeats=15)
    assert describe(every, 12.0, math.inf, 15) == (
        "measuring all 6 cases, 15 rounds each; the whole run takes about 2 h 17 min"
    )


@pytest.mark.parametrize("slow", [1.0, 30.0])
def test_a_slow_model_gets_shorter_inputs_and_never_nothing(slow: float) -> None:
    """By default; what there is no time for is named, the usual sizes too."""
    every = [case(*pair) for pair in (*cases.SHORT, *GRID)]
    costs = {one: cost(one, Calls({8: slow, 128: 10 * slow})) for one in every}
    choice = cases.choose_cases(costs, BenchOptions(), Clock(Hands(), 120.0))
    assert names(choice.cases) == ["1 x 8 tokens, prefill, eager"]
    assert choice.rounds == (15 if slow == 1 else ENOUGH)
    assert (choice.seconds > 120) == (slow > 1)
    assert {*choice.cases, *choice.left_out} == {*every} and len(choice.left_out) == 8
    if slow > 1:
        words = "no case fits into 50 s: 1 x 8 tokens, prefill, eager alone needs about 15 min"
        with pytest.raises(
            UnsupportedModel, match=f"{words} with loading; allow it with --seconds 9"
        ):
            cases.choose_cases(costs, BenchOptions(seconds=50.0), Clock(Hands(), 50.0))


def test_sizes_that_do_not_fit_into_the_seconds_asked_for_are_left_out() -> None:
    costs = {one: cost(one, SECOND) for one in GRID_CASES}
    for seconds, count in ((None, 6), (100.0, 1), (math.inf, 6)):
        asked = BenchOptions(GRID, seconds=seconds)
        choice = cases.choose_cases(costs, asked, Clock(Hands(), asked.limit))
        assert (len(choice.cases), len(choice.left_out)) == (count, 6 - count)


def run_cases(
    hands: Hands, slower: float, asked: BenchOptions, choice: Choice, costs: dict[Case, Cost]
) -> tuple[dict[Case, Row], list[str], list[tuple[float, float]]]:
    """As if every case took ``slower`` times as long as planned."""
    progress: list[tuple[float, float]] = []
    clock = Clock(hands, asked.limit, lambda done, total: progress.append((done, total)))

    def run(one: Case, rounds: int, seconds: float, on_round: Callable[[int], None]) -> Row:
        hands.at += slower * costs[one].before
        on_round(0)
        until, done = hands.at + seconds, 0
        while done < rounds and (done < ENOUGH or hands.at < until):
            hands.at += slower * costs[one].one_round
            done += 1
            on_round(done)
        return row([1.0] * done, [0.1] * done)

    found, left_out = cases.run_each(run, choice, costs, asked, clock, lambda level, text: None)
    return found, left_out, progress


@pytest.mark.parametrize("slower", [0.5, 1.0, 1.4, 3.0])
def test_a_run_ends_in_time_whatever_it_was_planned_by(slower: float) -> None:
    costs = {one: cost(one, Calls({128: 0.1})) for one in GRID_CASES}
    choice = choose(costs, 120.0, repeats=15)
    hands = Hands()
    found, left_out, progress = run_cases(hands, slower, BenchOptions(seconds=120.0), choice, costs)
    assert hands.at <= 122 and found
    assert len(found) + len(left_out) == len(choice.cases) == 4
    assert (slower < 3) == (left_out == [])
    assert all(one.rounds >= ENOUGH for one in found.values())
    assert progress[-1][0] == pytest.approx(progress[-1][1], abs=25)
    done = [seconds for seconds, _ in progress]
    assert done == sorted(done)
    if left_out:
        assert left_out[-1].startswith("8 x 128 tokens, prefill, eager: needs about ")


def test_sizes_that_were_asked_for_are_measured_though_the_time_is_over() -> None:
    costs = {one: cost(one, SECOND) for one in GRID_CASES}
    choice = choose(costs, 100.0, repeats=15, all_of_them=True)
    found, left_out, _ = run_cases(Hands(), 1.0, BenchOptions(GRID), choice, costs)
    assert len(found) == 6 and left_out == []


@pytest.mark.parametrize(
    ("load", "own", "threads", "count", "warned"),
    [
        (None, 0, 2, 2, False),
        (0.3, 0, 2, 2, False),
        (1.2, 0, 2, 2, True),
        (1.2, 0, 1, 2, False),
        (2.2, 0, 1, 2, True),
        (2.1, 2, 2, 2, False),
        (3.4, 2, 2, 2, True),
        (10.0, 0, 32, 64, False),
        (40.0, 0, 32, 64, True),
    ],
)
def test_a_machine_that_others_use_is_noticed(
    load: float | None, own: float, threads: int, count: int, warned: bool
) -> None:
    text = machine.busy(load, own, threads, count)
    assert bool(text) == warned and ("other programs use about" in text) == warned


def test_calls_that_take_different_times_are_noticed() -> None:
    assert machine.unsteady([0.030, 0.031, 0.033, 0.031, 0.040]) == ""
    assert machine.unsteady([0.030, 0.060]) == "", "too few"
    found = machine.unsteady([0.030, 0.031, 0.033, 0.031, 0.062])
    assert found.startswith("the same call took 31 ms at one time and 62 ms at another")


def folded_of(original: Any, plan: Plan) -> Any:
    """Centre ``original`` in place. Returns a model with the same weights that runs RMSNorm."""
    centre_parameters(original, plan)
    folded = share_weights(original)
    setattr(folded.config, MARKER, marker(plan, SimpleNamespace(model="random", revision=None)))
    return optimize(folded)


def parts(name: str, **settings: Any) -> tuple[Any, Any, list[str]]:
    """A model with moved weights in float64, the folded one, and their norms."""
    cls = {"gpt2": "GPT2LMHeadModel", "nemotron": "NemotronModel"}[name]
    config = transformers.CONFIG_MAPPING[name](**settings)
    plan = analyze(config, model_class=cls).plan
    original = moved(getattr(transformers, cls)(config))
    return original, folded_of(original, plan), [verdict.norm for verdict in plan.norms]


GPT2 = {"n_embd": 40, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 32}
NEMOTRON = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 101, "head_dim": 12,
}  # fmt: skip


@pytest.mark.one_case
@pytest.mark.parametrize(("name", "settings"), [("gpt2", GPT2), ("nemotron", NEMOTRON)])
def test_the_variants_are_what_they_say(name: str, settings: dict[str, Any]) -> None:
    """``torch_rms_norm`` computes the same as the folded model; ``no_norm`` has no norms."""
    original, folded, norms = parts(name, **settings)
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
    original, folded, norms = parts("gpt2", **GPT2)
    found = variants(original, folded, norms)
    ids = torch.randint(0, 101, (2, 9))
    with torch.no_grad():
        for column, model in in_mode(found, "compile").items():
            expected = found[column](ids)[0]
            assert relative(model(ids)[0], expected) <= IDENTITY
    torch._dynamo.reset()


def test_decoding_goes_on_from_the_same_cache_every_time() -> None:
    original, _, _ = parts("gpt2", **GPT2)
    (size,), _ = sizes(original, [(2, 10)])
    assert (size.rows, size.tokens, size.items) == (2, 10, 20)
    with torch.no_grad():
        text = prompt(original, size, decode_steps(size, 0.001))
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
        text = prompt(model, size, 4)
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
    return bench(out, asked=SMALL, device="cpu")


@pytest.mark.slow
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
        assert r["rounds"] == 3 and r["speedup_interval"] is None, "too few for an interval"
        assert r["verdict"] == "no gain here" and r["reason"] == "3 rounds are too few to tell"
        before = r["models"]["original"]
        items = r["batch_size"] * (r["seq_len"] if r["phase"] == "prefill" else 1)
        assert before["items_per_second"] == pytest.approx(1e3 * items / before["median_ms"])
        for name in COLUMNS:
            one = r["models"][name]
            low, middle, high = one["quartiles_ms"]
            assert 0 < low <= middle <= high and one["median_ms"] == pytest.approx(middle, abs=1e-6)
            rate = before["items_per_second"] * one["times_as_fast"]
            assert one["items_per_second"] == pytest.approx(rate)


def test_the_file_tells_where_it_was_measured(out: Path, measured: Bench) -> None:
    found = json.loads((out / "enjoyln_bench.json").read_text())
    assert found["versions"]["torch"] == torch.__version__
    assert found["hardware"] and found["device"] == "cpu" and found["dtype"] == "float32"
    assert found["threads"] == 1 and found["repeats"] == 3
    assert found["fold_seconds"] > 0 and found["load_seconds"] > 0
    assert found["seconds"] > found["load_seconds"] + found["fold_seconds"]
    assert isinstance(found["warnings"], list)
    weights = found["weight_bytes"]
    header = (out / "model.safetensors").stat().st_size - weights["folded"]
    assert weights["original"] == weights["folded"] and 0 < header < 20_000
    assert len(found["rows"]) == len(measured.rows)


def test_a_result_stays_fit_to_be_pushed(out: Path, measured: Bench) -> None:
    assert push.publishing_objection(open_source(str(out))) == ""
    section = push.section(out, "", "me/x", ["GPT2LMHeadModel"])
    assert f"## Measured speed\n\n{measured.hardware}, float32, 20" in section
    assert ", medians of at most 3 rounds.\n" in section
    assert section.count("tokens, prefill, eager |") == 3


def test_the_card_says_whether_there_is_a_gain(tmp_path: Path) -> None:
    rows = [row(NOISE), row(SLOWER), row(), row(), row(FASTER[:5])]
    written = [one.to_json() for one in rows]
    written[3] |= {"verdict": "anything | else", "speedup": 2, "speedup_interval": [1, 3]}
    written.append({"case": "somebody's", "speedup_interval": "none"})
    (tmp_path / "enjoyln_bench.json").write_text(json.dumps({"rows": written}))
    (tmp_path / "config.json").write_text("{}")
    speeds = card.state(tmp_path, "", "me/x", ["GPT2Model"])["speeds"]
    assert [line[-2:] for line in speeds] == [
        ("1.250 (0.950 to 1.280)", "no gain here"),
        ("0.900 (0.810 to 0.950)", "slower"),
        ("1.250 (1.210 to 1.280)", "faster"),
        ("2.000 (1.000 to 3.000)", "anything \\| else"),
        ("1.230", "no gain here"),
    ]
    assert {line[1] for line in speeds} == {"20 ms"}


@pytest.mark.slow
def test_a_model_without_a_cache_or_a_length_is_measured_as_it_is(tmp_path: Path) -> None:
    vit = tmp_path / "vit"
    fold(CHECKPOINTS / "vit", vit, model_class="ViTForImageClassification", verify=False)
    found = bench(vit, asked=SMALL, device="cpu", write=False)
    assert [r.case for r in found.rows] == [
        "pixel_values 1 x 3 x 32 x 32, prefill, eager",
        "pixel_values 2 x 3 x 32 x 32, prefill, eager",
    ]
    assert [(r.seq_len, r.items) for r in found.rows] == [(None, 1), (None, 2)]
    assert found.left_out == ("decode: ViTForImageClassification has no cache",)
    assert not (vit / "enjoyln_bench.json").exists()


def test_an_encoder_has_no_decoding(tmp_path: Path) -> None:
    """BERT's class takes a cache, for those who make a decoder of it."""
    fold(CHECKPOINTS / "bert", tmp_path / "out", model_class="BertModel", verify=False)
    found = bench(tmp_path / "out", asked=replace(SMALL, pairs=((1, 8),)), device="cpu")
    assert {r.phase for r in found.rows} == {"prefill"}
    assert found.left_out == ("decode: BertModel has no cache",)


def test_the_original_may_have_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(CHECKPOINTS / "gpt2", tmp_path / "here")
    fold(tmp_path / "here", tmp_path / "out", model_class="GPT2LMHeadModel", verify=False)
    (tmp_path / "here").rename(tmp_path / "there")
    asked = BenchOptions(((1, 8),), phases=("prefill",), repeats=3)
    with pytest.raises(ModelNotFound, match="name the original with --against"):
        bench(tmp_path / "out", asked=asked)
    monkeypatch.setattr(kernels, "torch_fuses", lambda device: device == "cpu")  # as on a GPU
    found = bench(tmp_path / "out", against=tmp_path / "there", asked=asked, device="cpu")
    assert found.source == str(tmp_path / "there") and len(found.rows) == 1
    assert "7 folded norms with a bias" in str(found.warnings)
    assert "fold with --merge bias" in str(found.warnings)


def test_folded_means_optimized(out: Path) -> None:
    """What is timed is what ``optimize`` makes, not a model that only has the weights."""
    config = load_config(open_source(str(out)))
    model = optimize(load(out, "GPT2LMHeadModel", config, torch.float32))
    assert sum(isinstance(module, Folded) for module in model.modules()) == 7


# The command.


def enjoyln(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


QUICK = ("--batch-size", "1", "--seq-len", "8", "--repeats", "3", "--device", "cpu")


def test_the_command_prints_a_table_and_draws(out: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plain = ("--dtype", "bfloat16", "--original", CHECKPOINTS / "gpt2")
    result = enjoyln(out, *QUICK, *plain, "--plot", tmp_path / "a.svg")
    assert result.exit_code == 0, result.output
    for words in ("1 x 8 tokens, prefill, eager", "1 x 8 tokens, decode, eager", "no norm"):
        assert words in result.stdout
    assert "bfloat16 on " in result.stdout and "folding takes " in result.stdout
    assert "1 x 8 tokens, prefill, eager: " in result.stderr
    assert "1 x 8 tokens, decode, eager" in (tmp_path / "a.svg").read_text()


def test_the_lines_below_say_what_the_times_do(capsys: pytest.CaptureFixture[str]) -> None:
    less = [0.6 * share for share in COST]
    rows = (
        row(),
        row(NOISE, phase="decode", items=2, before=1.6),
        row(SLOWER, seq_len=None, items=2),
        row(cost=NO_COST),
        row(cost=less),
        row(FASTER[:4]),
    )
    weights = {"original": 5 * 10**8, "folded": 5 * 10**8}
    found = Bench(rows, ("one thing",), "m", "M", "bfloat16", "cpu", 9, 2.0, 1.0, weights)
    write_bench(found)
    lines = capsys.readouterr().out.splitlines()
    table, lines = "\n".join(lines[:-8]), lines[-8:]
    for head in ("case", "original", "folded", "torch's RMSNorm", "no norm"):
        assert head in table
    for shown in row().to_json()["models"].values():
        text = f"{shown['times_as_fast']:.3f}x"
        assert text in table or text == "1.000x", "the medians of the lines below"
    assert lines[:6] == [
        "2 x 512 tokens, prefill, eager: faster, 1.250 times as fast (1.210 to 1.280); norms cost "
        "25.0%, of which 80% is saved; 51,200 tokens a second, folded 64,000; pays for folding "
        "after 500 runs",
        "2 x 512 tokens, decode, eager: no gain here, 1.250 times as fast (0.950 to 1.280); norms "
        "cost 25.0%; 1.25 tokens a second, folded 1.562",
        "2 x 512 tokens, prefill, eager: slower, 0.900 times as fast (0.810 to 0.950); norms cost "
        "25.0%; 100 rows a second, folded 90",
        "2 x 512 tokens, prefill, eager: no gain here, 1.250 times as fast (1.210 to 1.280): "
        "noise, as the norm cost is too small to measure; 51,200 tokens a second, folded 64,000",
        "2 x 512 tokens, prefill, eager: no gain here, 1.250 times as fast (1.210 to 1.280): more "
        "than norms cost, so the measurement is not consistent; norms cost 15.0%; 51,200 tokens a "
        "second, folded 64,000",
        "2 x 512 tokens, prefill, eager: no gain here, 1.220 times as fast: 4 rounds are too few "
        "to tell; 51,200 tokens a second, folded 62,464",
    ]
    assert "500.0 MB before, 500.0 MB after; folding takes 2.0 s" in lines[6]
    assert lines[7] == "left out: one thing"


@pytest.mark.slow
def test_by_default_the_sizes_are_chosen(out: Path) -> None:
    """The model has positions for 64 tokens, so shorter sizes stand in for the usual ones."""
    result = enjoyln(out, "--repeats", "3", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "measuring all 6 cases, 3 rounds each; the whole run takes about" in result.stderr
    lines = [line for line in result.stdout.splitlines() if ": no gain here, " in line]
    assert [line.split(",")[0] for line in lines[::2]] == [
        "1 x 8 tokens",
        "1 x 32 tokens",
        "8 x 32 tokens",
    ]
    assert "left out: 1024 tokens: GPT2LMHeadModel takes at most 64" in result.stdout


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ((), {"seconds": None}),
        (("--seconds", "5"), {"seconds": 5.0}),
        (("--full",), {"seconds": math.inf, "pairs": GRID}),
        (("--full", "--seconds", "60"), {"seconds": 60.0, "pairs": GRID}),
        (("--batch-size", "2,3"), {"seconds": None, "pairs": ((2, 128), (3, 128))}),
        (("--seq-len", "9"), {"seconds": None, "pairs": ((1, 9),)}),
    ],
)
def test_what_the_options_ask_for(given: tuple[str, ...], asked: dict[str, Any]) -> None:
    @click.command()
    @arguments.bench_options
    def command(asked: dict[str, Any]) -> None:
        found.append(BenchOptions(**asked))

    found: list[BenchOptions] = []
    result = CliRunner().invoke(command, [*given], standalone_mode=False)
    assert result.exception is None
    assert found == [BenchOptions(**asked)]
    assert found[0].keeps_all == ("pairs" in asked and asked["seconds"] is None)
    assert found[0].limit == (asked["seconds"] or 120)


def test_loading_that_takes_all_the_time_ends_the_run(out: Path) -> None:
    stages: list[tuple[str, str]] = []
    words = "loading the models alone takes .*; allow it with --seconds "
    with pytest.raises(UnsupportedModel, match=words):
        bench(out, asked=BenchOptions(seconds=1e-3), on_event=lambda *event: stages.append(event))
    (loading,) = (text for level, text in stages if level == "stage")
    assert loading.startswith("loading "), "no analysis, and no first calls"


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
        (["--seq-len", "0"], "'0' is not a list of positive whole numbers; write 1,8"),
        (["--mode", "eager,quick"], "known are eager, compile"),
        (["--mode", "eagre"], "'eagre' is not a mode; did you mean eager?"),
        (["--repeats", "1"], "--repeats"),
        (["--seconds", "0"], "--seconds"),
        (["--full", "--seq-len", "8"], "--full sets the sizes; drop --batch-size and --seq-len"),
    ],
)
def test_usage_errors(out: Path, arguments: list[str], hint: str) -> None:
    result = enjoyln(out, *arguments)
    assert result.exit_code == 2 and hint in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--device", "gpu"], "--device gpu is not supported; use cpu, cuda, mps"),
        (["--device", "cuda:x"], "--device cuda:x is not available: Invalid device string"),
        (["--device", "meta"], "--device meta is not supported; use cpu, cuda, mps"),
        (["--original", CHECKPOINTS / "bert"], "is of type bert and"),
        (["--device", "xla:0"], "--device xla:0 is not supported; use cpu, cuda, mps"),
        (["--seq-len", "4096"], "GPT2LMHeadModel takes at most 64; use a smaller --seq-len"),
        (["--plot", "x.bmp"], "unsupported picture format '.bmp'; use .png or .svg"),
        (["--seconds", "0.01"], "loading the models alone takes "),
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


@pytest.mark.one_case
@pytest.mark.parametrize("measure", ["bench", "verify"])
def test_what_cannot_be_kept_is_shown_all_the_same(
    out: Path, measure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a directory where nobody may write."""

    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("enjoyln_cli.events.write_whole", refuse)
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
        ({"faster": SLOWER}, "no gain, of 25.0 %"),
        ({"cost": NO_COST}, "too small to measure"),
        ({"faster": FASTER[:5]}, "too few rounds"),
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
    found = figures(cost=NO_COST)
    rows = found["rows"][:count]
    for one in rows:
        one["seq_len"] = None
    plot.save({**found, "rows": rows}, tmp_path / "a.PNG")
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")


@needs_matplotlib
def test_a_picture_that_cannot_be_written_leaves_the_times(out: Path, tmp_path: Path) -> None:
    result = enjoyln(out, *QUICK, "--plot", tmp_path / f"{'a' * 300}.svg")
    assert result.exit_code == 1
    assert "cannot be written: File name too long" in result.stderr.splitlines()[-1]
    assert "1 x 8 tokens, prefill, eager" in result.stdout


def test_what_cannot_be_drawn_is_refused_before_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OutputError, match="use .png or .svg"):
        plot.check(tmp_path / "a.pdf")
    with pytest.raises(OutputError, match="no is not a directory"):
        plot.check(tmp_path / "no" / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("enjoyln_cli.benchmark.plot.find_spec", lambda name: None)
    with pytest.raises(OutputError, match="matplotlib; pip install matplotlib"):
        plot.check(tmp_path / "a.png")
