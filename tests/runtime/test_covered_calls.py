"""Models outside of transformers: the proof covers traced calls, and other calls are refused."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from custom_code import custom_checkpoint
from folding_live import Computing
from live_models import computed_rms, moved
from rounding import IDENTITY, relative
from tiny_models import converted
from torch import nn
from transformers import AutoModelForCausalLM

import enjoyln_cli
from enjoyln_cli import EnjoyLNError, TraceFailed, UnsupportedModel, analyze, fold
from enjoyln_cli.analysis.analyze import analyze_calls
from enjoyln_cli.calls import call_text
from enjoyln_cli.calls.calls import Call
from enjoyln_cli.checkpoint.marker import proof_of, read_marker
from enjoyln_cli.errors import BadCheckpoint, UnprovenCall
from enjoyln_cli.plan import schema
from enjoyln_cli.plan.cache_argument import CACHE, cache_argument
from enjoyln_cli.plan.covered_calls import (
    CallSignature,
    Constant,
    CoveredCalls,
    Items,
    Length,
    TensorSpec,
    call_signature,
)
from enjoyln_cli.plan.size_conditions import holds, require_condition
from enjoyln_cli.plan.trusted_code import is_stock
from enjoyln_cli.report.model_report import ModelReport
from enjoyln_cli.report.notes import notes
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.runtime.install import install
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


def error(folded: Any, model: Any, *args: Any, **kwargs: Any) -> float:
    with torch.no_grad():
        got, expected = folded(*args, **kwargs), model(*args, **kwargs)
    return float((got - expected).norm() / expected.norm())


def computes_rms(model: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether every folded norm computes RMSNorm in this call."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = computed_rms(model, lambda: model(*args, **kwargs))
    return bool(found) and all(found)


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


def test_the_calls_have_to_be_passed_on() -> None:
    plan = analyze(moved(Labels()), x()).plan
    assert plan.unproven[0] == "any other call"
    with pytest.raises(UnsupportedModel, match=r"pass covered=plan\.covered"):
        install(Labels(), ["norm"], (), (), plan.unproven)


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


# As text and as data.

FORMS = {
    "Net()": CallSignature("Net", ()),
    "Net(int[()], x=float[a, 2, b])": CallSignature(
        "Net", (("*0", TensorSpec("int", ())), ("x", TensorSpec("float", ("a", 2, "b"))))
    ),
    "Net(x=bool[a]) if a * 3 % 4 > 0": CallSignature(
        "Net", (("x", TensorSpec("bool", ("a",))),), ("a * 3 % 4 > 0",)
    ),
    r"""Net(v0=None, v1=True, v2=0, v3=-3, v4=1.5, v5=inf, v6="it's \" if x\n")""": CallSignature(
        "Net",
        tuple(
            (f"v{i}", Constant(value))
            for i, value in enumerate((None, True, 0, -3, 1.5, float("inf"), "it's \" if x\n"))
        ),
    ),
    'Net(pair=(float[a],), both=[None, ()], batch={"a b": complex[2, a]}, cache=Cache(seen=a)) '
    "if (a - 1 == min(a, 9) or a // 2 <= max(a, 3)) and a != 4": CallSignature(
        "Net",
        (
            ("pair", Items("tuple", (TensorSpec("float", ("a",)),))),
            ("both", Items("list", (Constant(None), Items("tuple", ())))),
            ("batch", Items("dict", (TensorSpec("complex", (2, "a")),), ("a b",))),
            ("cache", Items("Cache", (Length("a"),), ("seen",))),
        ),
        ("a - 1 == min(a, 9) or a // 2 <= max(a, 3)", "a != 4"),
    ),
}


@pytest.mark.parametrize(("text", "signature"), FORMS.items(), ids=range(len(FORMS)))
def test_a_signature_survives_writing_and_reading(text: str, signature: CallSignature) -> None:
    assert call_text.to_text(signature) == text
    stored = json.loads(json.dumps(schema.plain(signature)))
    assert schema.read(CallSignature, stored) == signature


@pytest.mark.parametrize(
    "text",
    [
        "", "a.b", "f(a)", "a ** a", "a if a else a", "a = 1", "max(a, key=a)", "'a' < 1",
        "a < 1 < 2", "1.5 * a > 1", "(" * 1000, "-" * 1999 + "a", "1" * 5000, "a\0",
    ],
)  # fmt: skip
def test_other_text_is_no_condition(text: str) -> None:
    with pytest.raises(ValueError, match=r"condition|nested"):
        require_condition(text)


def test_a_condition_that_divides_by_zero_does_not_hold() -> None:
    condition = require_condition("a % (b - 1) == 0")
    assert condition == "a % (b - 1) == 0"
    assert holds(condition, {"a": 4, "b": 3})
    assert not holds(condition, {"a": 5, "b": 3}) and not holds(condition, {"a": 4, "b": 1})


# Custom code on disk.

OWN = """
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, hidden_size=16, loud=False, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size, self.hidden_size, self.loud = 50, hidden_size, loud


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 32), nn.Linear(32, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        d = config.hidden_size
        self.wte, self.style, self.head = nn.Embedding(50, d), nn.Embedding(4, d), nn.Linear(d, 50)
        self.h, self.norm = nn.ModuleList([Block(d), Block(d)]), nn.LayerNorm(d)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, SIGNATURE, labels=None, **kwargs):
        x = self.wte(input_ids)
        x = x.cumsum(-1) if self.config.loud else x
        BRANCH
        for block in self.h:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)
"""


def own_checkpoint(folder: Path, signature: str, branch: str) -> Path:
    code = OWN.replace("SIGNATURE", signature).replace("BRANCH", branch)
    return custom_checkpoint(folder, code, hidden_size=16)


IDS = torch.arange(27).reshape(3, 9)
READS = "if style_labels is not None: x = x * self.style(style_labels)[:, None]"


@pytest.fixture(scope="module")
def own_result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result of code that reads ``style_labels``; its checkpoint is ``source`` beside it."""
    folder = tmp_path_factory.mktemp("reads")
    source = own_checkpoint(folder / "source", "style_labels=None", READS)
    assert fold(source, folder / "out", trust_remote_code=True).plan.folded
    return folder / "out"


@pytest.mark.slow
def test_custom_code_on_disk_is_right_with_other_inputs(
    own_result: Path,
) -> None:
    given, out = {"style_labels": torch.tensor([1, 2, 3])}, own_result
    load: dict[str, Any] = {"trust_remote_code": True, "dtype": torch.float64}
    original: Any = AutoModelForCausalLM.from_pretrained(out.with_name("source"), **load)
    model = enjoyln_cli.from_pretrained(out, **load)
    masked = {"attention_mask": torch.ones_like(IDS)}
    for usual in ({}, masked, {"labels": IDS}, {**masked, "labels": IDS}):
        assert computes_rms(model, IDS, **usual)
    for named in ({}, given, {**masked, **given}):
        with torch.no_grad():
            got, expected = (one(IDS, **named).logits for one in (model, original))
        assert relative(got, expected) <= IDENTITY, sorted(named)


@pytest.mark.slow
def test_a_check_that_makes_calls_that_are_not_proven_says_so(tmp_path: Path) -> None:
    longer = "x = x.cumsum(-1) if input_ids.shape[1] > 9 else x"
    source = own_checkpoint(tmp_path / "source", "_=None", longer)
    with pytest.raises(UnprovenCall, match="OwnModel: its proof covers no call with"):
        fold(source, tmp_path / "out", trust_remote_code=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_call_of_custom_code_is_proven_when_handed_in(tmp_path: Path) -> None:
    branch = "x = x + self.style(kwargs['ids']) if 'ids' in kwargs else x"
    source = own_checkpoint(tmp_path / "source", "_=None", branch)
    given = {"ids": IDS % 4}
    calls = [((IDS,), given)]
    fold(source, tmp_path / "out", trust_remote_code=True, example_calls=calls, verify=False)
    load: dict[str, Any] = {"trust_remote_code": True, "dtype": torch.float64}
    original: Any = AutoModelForCausalLM.from_pretrained(source, **load)
    model = enjoyln_cli.from_pretrained(tmp_path / "out", **load)
    for named in (given, {"ids": given["ids"][:2, :4]}):
        ids = IDS[: len(named["ids"]), : named["ids"].shape[1]]
        assert computes_rms(model, ids, **named)
        with torch.no_grad():
            expected, got = (m(ids, **named).logits for m in (original, model))
        assert relative(got, expected) <= IDENTITY


CHAT = """
import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class ChatConfig(PretrainedConfig):
    model_type = "own_chat"

    def __init__(self, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, **kwargs):
        self.vocab_size, self.hidden_size = 50, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        super().__init__(**kwargs)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        d = config.hidden_size
        self.layer, self.heads = layer, config.num_attention_heads
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, mask, cache):
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        d = config.hidden_size
        self.ln_1, self.attn = nn.LayerNorm(d), Attention(config, layer)
        self.ln_2, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x, mask, cache):
        x = x + self.attn(self.ln_1(x), mask, cache)
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class ChatModel(PreTrainedModel, GenerationMixin):
    config_class = ChatConfig

    def __init__(self, config):
        super().__init__(config)
        d = config.hidden_size
        self.wte, self.wpe, self.head = nn.Embedding(50, d), nn.Embedding(64, d), nn.Linear(d, 50)
        self.h = nn.ModuleList([Block(config, i) for i in range(config.num_hidden_layers)])
        self.ln_f = nn.LayerNorm(d)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, position_ids=None, CACHE=None,
                use_cache=None, cache_position=None, labels=None, return_dict=None):
        if use_cache and CACHE is None:
            CACHE = DynamicCache()
        past = 0 if CACHE is None else CACHE.get_seq_length()
        if cache_position is None:
            cache_position = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)
        if position_ids is None:
            position_ids = cache_position[None]
        keys = torch.arange(past + input_ids.shape[1], device=input_ids.device)
        mask = (keys <= cache_position[:, None])[None, None]
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, :].bool()
        x = self.wte(input_ids) + self.wpe(position_ids)
        if past > 40:
            x = x * self.wpe.weight[0]
        for block in self.h:
            x = block(x, mask, CACHE)
        logits = self.head(self.ln_f(x))
        return CausalLMOutputWithPast(logits=logits, CACHE=CACHE)
""".replace("CACHE", cache_argument(transformers.GPT2LMHeadModel.forward) or CACHE)
"""Code whose ``forward`` takes the cache by the name that this release of transformers passes."""


@pytest.mark.slow
def test_generate_of_custom_code_runs_rms_norm(tmp_path: Path) -> None:
    source = custom_checkpoint(tmp_path / "source", CHAT, "Chat")
    plan = fold(source, tmp_path / "out", trust_remote_code=True, verify=False).plan
    assert len(plan.folded) == len(plan.norms) == 3
    load: dict[str, Any] = {"trust_remote_code": True, "dtype": torch.float64}
    original: Any = AutoModelForCausalLM.from_pretrained(source, **load)
    model: Any = enjoyln_cli.from_pretrained(tmp_path / "out", **load)
    counted: list[bool] = []
    for module in model.modules():
        if isinstance(module, Folded):
            module.register_forward_hook(lambda module, *_: counted.append(module.shifted))
    how: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
    padded = torch.ones(3, 9, dtype=torch.long)
    padded[0, :4] = 0
    for ids, given in (
        (IDS, {"attention_mask": padded}),
        (IDS[:1, :1], {"use_cache": False}),
        (IDS[:2], {"num_beams": 3}),
    ):
        counted.clear()
        torch.manual_seed(0)
        expected = original.generate(ids, max_new_tokens=5, **{"do_sample": False, **given}, **how)
        torch.manual_seed(0)
        found = model.generate(ids, max_new_tokens=5, **{"do_sample": False, **given}, **how)
        assert torch.equal(found.sequences, expected.sequences)
        for one, other in zip(found.logits, expected.logits, strict=True):
            assert (one - other).abs().max() <= 1e-10 * other.abs().max()
        assert len(counted) >= 15 and not any(counted)
    with pytest.raises(UnsupportedModel, match="ChatModel: its proof covers no call with"):
        model.generate(IDS[:, :2].repeat(1, 20), max_new_tokens=5)  # past 40, where it scales


@pytest.mark.slow
def test_a_config_that_says_something_else_is_refused(own_result: Path) -> None:
    out = own_result
    with pytest.raises(UnsupportedModel, match=r"OwnModel\.config\.loud was False and is now True"):
        enjoyln_cli.from_pretrained(out, loud=True, trust_remote_code=True)
    config = json.loads((out / "config.json").read_text())
    calls = read_marker(config).plan.covered
    assert calls is not None and any(
        signature.owner == "OwnModel" for signature in calls.signatures
    )
    entry = config["enjoyln"]
    signature = {
        "owner": "OwnModel",
        "arguments": [["input_ids", {"kind": "int", "sizes": ["a", "b"]}]],
    }
    assert signature in entry["plan"]["covered"]["signatures"]
    for condition, wrong in (("a.b", "a.b is no condition on sizes"), ("c > 1", "c > 1 is a")):
        covered = {"signatures": [{**signature, "conditions": [condition]}]}
        broken = {**entry, "plan": {**entry["plan"], "covered": covered}}
        broken["proof"] = proof_of(broken)
        where = r"malformed: plan.covered.signatures\[0\]"
        with pytest.raises(BadCheckpoint, match=f"{where}.*: {wrong}"):
            read_marker({"enjoyln": broken})


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
