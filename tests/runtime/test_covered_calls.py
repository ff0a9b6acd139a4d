"""Models outside of transformers: the proof covers traced calls, and other calls are refused."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from folding_live import Computing, error
from live_models import computes_rms, install, moved
from tiny_models import converted
from torch import nn

import enjoyln_cli
from enjoyln_cli import EnjoyLNError, TraceFailed, UnsupportedModel, analyze
from enjoyln_cli.analysis.analyze import analyze_calls
from enjoyln_cli.calls.calls import Call
from enjoyln_cli.checkpoint.marker import read_marker
from enjoyln_cli.plan.covered_calls import CoveredCalls, call_signature
from enjoyln_cli.plan.trusted_code import is_stock
from enjoyln_cli.report.model_report import ModelReport
from enjoyln_cli.report.notes import notes
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.runtime.modules import Folded

D = 12


class Net(nn.Module):
    """A residual stream before a norm; with ``more``, something is added that has a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.extra = nn.Linear(5, D), nn.Linear(5, D)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 3)

    def stream(self, x: torch.Tensor, more: bool) -> torch.Tensor:
        stream = self.own(x)
        stream = stream + self.extra(x).square() if more else stream
        return self.head(self.norm(stream))


class Labels(Net):
    def forward(self, x: torch.Tensor, style_labels: Any = None) -> torch.Tensor:
        return self.stream(x, style_labels is not None)


KINDS: dict[str, Callable[..., torch.Tensor]] = {
    "Shift": lambda self, x, *, output_shift=0.0: self.stream(x, output_shift != 0),
    "Positional": lambda self, *args: self.stream(args[0], len(args) > 1),
    "Keywords": lambda self, x, **kwargs: self.stream(x, bool(kwargs)),
    "Keys": lambda self, batch: self.stream(batch["x"], "mask" in batch),
    "Nested": lambda self, pair: self.stream(pair[0], len(pair[1]) > 1),
    "Kind": lambda self, x, mode="plain": self.stream(x, mode == "loud"),
    "Truth": lambda self, x, gain=1: self.stream(x, gain is True),
    "Ranked": lambda self, x, mask: self.stream(x, mask.ndim > 2 or mask.dtype == torch.bool),
    "Long": lambda self, x: self.stream(x, x.shape[1] > 9),
    "Even": lambda self, x: self.stream(x, x.shape[1] % 2 == 0),
    "Counted": lambda self, x: self.stream(x, len(x) != 2),
    "Together": lambda self, x, y: self.stream(x, x.shape[1] == y.shape[1]),
    "Spelled": lambda self, x: self.stream(x, str(x.shape[1]) in ("8", "10")),
    "Valued": lambda self, x, ids: self.stream(x, int(ids[0]) == 3),
}
"""The ``forward`` of a model of each kind."""


def of_kind(kind: str) -> Any:
    if kind == "Labels":
        return moved(Labels())
    return moved(type(kind, (Net,), {"forward": KINDS[kind]})())


def x(rows: int = 2, tokens: int = 7) -> torch.Tensor:
    return torch.randn(rows, tokens, 5, dtype=torch.float64)


CASES: list[tuple[str, tuple[Any, ...], dict[str, Any], list[Any], list[Any]]] = [
    # a kind, its example call, other calls that are proven, calls that are not proven
    ("Labels", (x(),), {}, [((x(3, 4),), {"style_labels": None})],
     [((x(),), {"style_labels": torch.ones(2)}), ((x(), torch.ones(2)), {})]),
    ("Shift", (x(),), {}, [((x(3),), {"output_shift": 0.0})], [((x(),), {"output_shift": 0.1})]),
    ("Positional", (x(),), {}, [((x(5, 2),), {})], [((x(), x()), {})]),
    ("Keywords", (x(),), {}, [((x(5, 2),), {})], [((x(),), {"bump": None})]),
    ("Keys", ({"x": x()},), {}, [(({"x": x(4)},), {})], [(({"x": x(), "mask": x()},), {})]),
    ("Nested", ((x(), [x()]),), {}, [(((x(4), [x(4)]),), {})], [(((x(), [x(), x()]),), {})]),
    ("Kind", (x(), "quiet"), {}, [((x(3),), {"mode": "quiet"})], [((x(), "loud"), {})]),
    ("Truth", (x(), 1), {}, [((x(),), {})], [((x(), True), {})]),
    ("Ranked", (x(), x()[..., 0]), {}, [((x(3), x(3)[..., 0]), {})],
     [((x(), x()), {}), ((x(), torch.ones(2, 7, dtype=torch.bool)), {})]),
    ("Long", (x(),), {}, [((x(1, 9),), {}), ((x(3, 2),), {})], [((x(2, 10),), {})]),
    ("Even", (x(),), {}, [((x(3, 9),), {})], [((x(2, 10),), {})]),
    ("Counted", (x(),), {}, [((x(2, 9),), {})], [((x(3),), {})]),
    ("Together", (x(), x(2, 6)), {}, [((x(2, 3), x(2, 4)), {})], [((x(2, 3), x(2, 3)), {})]),
    ("Spelled", (x(),), {}, [((x(),), {})], [((x(2, 10),), {})]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "args", "kwargs", "proven", "others"), CASES, ids=[case[0] for case in CASES]
)
def test_a_call_with_another_signature_is_refused(
    kind: str, args: Any, kwargs: Any, proven: list[Any], others: list[Any]
) -> None:
    model = of_kind(kind)
    plan = analyze(model, *args, **kwargs).plan
    assert [verdict.status for verdict in plan.norms] == ["in_weights"]
    folded = converted(model, plan)
    for given, named in ((args, kwargs), *proven):
        assert error(folded, model, *given, **named) <= 1e-12
        assert computes_rms(folded, *given, **named)
    for given, named in others:
        for folded.training in (False, True):
            with pytest.raises(UnsupportedModel, match=rf"{kind}: its proof covers no call"):
                folded(*given, **named)
        folded.eval()
    assert computes_rms(folded, *args, **kwargs)  # a refused call has no effect on later calls


@pytest.mark.parametrize(("kind", "args", "kwargs", "proven", "others"), CASES[:1])
def test_a_call_with_another_signature_is_proven_if_handed_in(
    kind: str, args: Any, kwargs: Any, proven: list[Any], others: list[Any]
) -> None:
    model = of_kind(kind)
    plan = analyze(model, *args, **kwargs, example_calls=others).plan
    folded = converted(model, plan)
    for given, named in ((args, kwargs), *proven, *others):
        assert error(folded, model, *given, **named) <= 1e-12
        assert computes_rms(folded, *given, **named) == bool(plan.folded)
    assert not plan.folded  # refusing was right: these calls add a square, which cannot be centred


def test_an_example_that_is_no_call_is_refused() -> None:
    model = moved(Labels())
    for wrong in ([x()], [(x(), x())], [((x(),), {}, {})], [{"x": x()}]):
        with pytest.raises(EnjoyLNError, match=r"example_calls: number 1 is not a pair of"):
            analyze(model, x(), example_calls=wrong)
    with pytest.raises(TraceFailed, match=r"Labels could not be traced \(example call 2\)"):
        analyze(model, x(), example_calls=[((x(),), {}), ((torch.ones(2, 7, 3),), {})])


def test_examples_alone_are_the_calls_that_are_proven() -> None:
    model = moved(Labels())
    folded = converted(model, analyze(model, example_calls=[((x(),), {}), ((), {"x": x()})]).plan)
    assert computes_rms(folded, x(4))


def test_a_call_whose_path_values_decide_is_not_proven() -> None:
    model = of_kind("Valued")
    plan = analyze(model, x(), torch.tensor([1, 2])).plan
    assert plan.by_example and plan.covered == CoveredCalls((), plan.covered.attributes)  # type: ignore
    before = copy.deepcopy(model.state_dict())
    for carry_out in (
        centre_parameters,
        lambda *_: install(model, ["norm"], (), covered=plan.covered),
    ):
        with pytest.raises(
            UnsupportedModel, match="Valued: no call could be proven, since its code"
        ):
            carry_out(model, plan)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


READ_OF_SIZES: dict[str, Callable[[torch.Tensor], Any]] = {
    "tolist": lambda sizes: sizes.tolist()[0],
    "an array": lambda sizes: numpy.asarray(sizes)[0],
    "text": lambda sizes: int(str(sizes)[8]),
    "a mask": lambda sizes: len(sizes[sizes == 1]),
    "shape": lambda sizes: sizes.shape[0] + 1,
}


@pytest.mark.parametrize("how", READ_OF_SIZES)
def test_a_call_is_not_proven_where_values_are_read_in_any_way(how: str) -> None:
    """A mean is added to one row if the value that is read from ``sizes`` is 1."""

    def run(m: Any, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        stream = m.own(x)
        return m.norm(stream + stream.exp() if READ_OF_SIZES[how](sizes) == 1 else stream)

    model = moved(Computing(run, own=nn.Linear(5, D), norm=nn.LayerNorm(D)))
    plan = analyze(model, x(), torch.tensor([3, 4])).plan
    assert plan.folded and plan.covered is not None
    assert bool(plan.covered.signatures) == (how == "shape")


def test_an_example_of_one_row_is_traced_with_two() -> None:
    model = of_kind("Long")
    folded = converted(model, analyze(model, x(1, 7)).plan)
    for rows in (1, 2, 5):
        assert computes_rms(folded, x(rows, 4)) and error(folded, model, x(rows, 4)) <= 1e-12
        with pytest.raises(UnsupportedModel, match="covers no call with x"):
            folded(x(rows, 10))


def test_signatures_are_proven_one_by_one_and_not_mixed() -> None:
    class Both(Net):
        def forward(self, x: torch.Tensor, a: Any = None, b: Any = None) -> torch.Tensor:
            return self.stream(x, a is not None and b is not None)

    model = moved(Both())
    calls = [Call(str(n), (((x(),), {n: torch.ones(2)}),)) for n in ("a", "b")]
    folded = converted(model, analyze_calls(model, calls).plan)
    one = torch.ones(2)
    assert computes_rms(folded, x(), a=one) and computes_rms(folded, x(), b=one)
    for named, missing in (({"a": one, "b": one}, "b"), ({}, "a")):
        with pytest.raises(UnsupportedModel, match=f"its proof covers no call with {missing};"):
            folded(x(), **named)


class Flagged(Net):
    def __init__(self) -> None:
        super().__init__()
        self.loud, self.inner = False, nn.ModuleDict({"part": of_kind("Long")})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stream(x, self.loud)


def test_a_flag_that_was_set_since_is_refused_by_name() -> None:
    model = moved(Flagged())
    plan = analyze(model, x()).plan
    assert converted(model, plan) is not None
    model.loud = True
    with pytest.raises(UnsupportedModel, match=r"Flagged\.loud was False and is now True"):
        converted(model, plan)
    del model.loud
    with pytest.raises(UnsupportedModel, match=r"Flagged\.loud was False and is now gone"):
        converted(model, plan)


def test_attributes_may_be_set_in_any_order_and_keys_not() -> None:
    class State:
        def __init__(self, **attributes: Any) -> None:
            vars(self).update(attributes)

    class Stateful(Net):
        def forward(self, x: torch.Tensor, state: Any) -> torch.Tensor:
            return self.stream(x, False)

    def uncovered(proven: Any, passed: Any) -> list[str]:
        signature = call_signature(Stateful(), (x(),), {"state": proven})
        assert signature is not None
        return CoveredCalls((signature,)).calls_of(Stateful()).uncovered((x(),), {"state": passed})

    State.__module__ = "transformers.states"
    one, two = {"seen": 3, "values": torch.ones(2)}, {"values": torch.zeros(2), "seen": 3}
    assert uncovered(State(**one), State(**two)) == []
    assert uncovered(State(**one, dtype=torch.half), State(**two)) == []
    assert uncovered(one, {**one, "values": torch.zeros(2)}) == []
    for proven, passed in (
        (one, two),
        (State(**one), one),
        (State(**one), State(**{**two, "seen": 4})),
        (State(**one), State(**two, more=None)),
        (State(**one), State(seen=3, values=torch.ones(3))),
        (State(**one), State(seen=3, values=object())),
    ):
        assert uncovered(proven, passed) == ["state"]


def test_proven_calls_are_listed_in_one_line() -> None:
    def line(model: nn.Module, *given: Any, **named: Any) -> str:
        return notes(ModelReport("it", analyze(model, *given, **named).plan))[-1].strip()

    falls_back = "any other call is refused"
    assert line(Labels(), x().float()) == f"proven for calls with x; {falls_back}"
    said = line(of_kind("Kind").float(), x().float(), mode="quiet")
    assert said == f'proven for calls with x and mode="quiet"; {falls_back}'
    assert (
        line(of_kind("Positional").float(), x().float())
        == f"proven for calls with 1 by position; {falls_back}"
    )
    assert "no call could be proven" in line(
        of_kind("Valued").float(), x().float(), torch.tensor([1, 2])
    )


def test_one_compiled_graph_and_a_pickle() -> None:
    model = moved(Labels())
    folded = converted(model, analyze(model, x()).plan)
    whole = torch.compile(folded, backend="eager", fullgraph=True)
    assert error(whole, model, x(), style_labels=None) <= 1e-12
    again = pickle.loads(pickle.dumps(folded))
    assert computes_rms(again, x())
    for one in (torch.compile(folded, backend="eager"), again):
        with pytest.raises(UnsupportedModel, match="covers no call with style_labels"):
            one(x(), style_labels=torch.ones(2, dtype=torch.float64))


# Classes of transformers.


def test_stock_code_is_known_by_where_it_comes_from() -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2))
    assert is_stock(model) and not is_stock(nn.LayerNorm(3))

    class Mine(transformers.GPT2LMHeadModel):
        pass

    class Replaced(transformers.GPT2LMHeadModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    assert not is_stock(Mine(model.config)) and not is_stock(Replaced(model.config))
    backbone = type("Backbone", (nn.Linear,), {"__module__": "timm.models.resnet"})
    model.transformer.h[0].mlp = backbone(8, 8)
    assert is_stock(model)
    model.transformer.h[0].mlp = Labels()
    assert not is_stock(model)


def test_usual_calls_of_stock_models_keep_rms_norm(outs: dict[str, Path]) -> None:
    model: Any = enjoyln_cli.from_pretrained(outs["gpt2"], dtype=torch.float64)
    assert read_marker(model.config.to_dict()).plan.covered is None
    ids = torch.randint(5, 40, (2, 6))
    usual: list[dict[str, Any]] = [
        {}, {"labels": ids}, {"output_attentions": True}, {"output_hidden_states": True},
        {"attention_mask": torch.ones_like(ids)}, {"use_cache": True}, {"logits_to_keep": 1},
        {"labels": ids, "num_items_in_batch": torch.tensor(9)}, {"return_dict": True},
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in usual:
            assert computes_rms(model, ids, **given), sorted(given)
        seen: list[int] = []
        last = [module for module in model.modules() if isinstance(module, Folded)][-1]
        last.register_forward_hook(lambda module, *_: seen.append(getattr(module, "shifted", 0)))
        model.generate(ids, max_new_tokens=3, do_sample=False)
    assert len(seen) == 3 and not any(seen)
