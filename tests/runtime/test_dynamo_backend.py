"""The torch.compile backend: residual additions are fused with the norms after them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import inductor
import pytest
import torch
from live_models import CHECKPOINTS
from rounding import InFloat64, as_exact, in_float64
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
)

from enjoyln_cli import EnjoyLNError, from_pretrained, kernels
from enjoyln_cli.runtime.dynamo_backend import fuse, write_over
from enjoyln_cli.runtime.modules import Folded, rms_norm

ADDITIONS = {"gpt2": 6, "opt": 9, "bloom": 8, "phi": 4, "vit": 6, "bert": 6}
"""Fused additions, counted by hand: two for each block (Phi's parallel blocks have one). The sum
before the first norm does not count where its operands have two shapes; in OPT they have one."""
D = 24


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Counting:
    """The backend, recording fused additions, overwritten operands and the functions called."""

    def __init__(self) -> None:
        self.fused: list[int] = []
        self.over: list[int] = []
        self.called: list[Any] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.fused.append(fuse(gm))
        self.over.append(write_over(gm))
        gm.graph.lint()
        self.called += [node.target for node in gm.graph.nodes]
        return gm.forward

    def count(self, *targets: Any) -> int:
        return sum(target in targets for target in self.called)


def loaded(outs: dict[str, Path], name: str, dtype: torch.dtype) -> Any:
    if name == "bert":
        return AutoModelForMaskedLM.from_pretrained(CHECKPOINTS / name, dtype=dtype)
    return from_pretrained(outs[name], dtype=dtype)


def original(name: str, dtype: torch.dtype) -> Any:
    auto = {"bert": AutoModelForMaskedLM, "vit": AutoModelForImageClassification}
    cls = auto.get(name, AutoModelForCausalLM)
    return cls.from_pretrained(CHECKPOINTS / name, dtype=dtype)


def inputs(name: str, dtype: torch.dtype, length: int = 9) -> dict[str, torch.Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32, dtype=dtype)}
    return {"input_ids": torch.randint(3, 500, (2, length))}


def logits(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**given).logits


def same(
    compiled: Any, model: Any, given: dict[str, torch.Tensor], stored: torch.dtype | None = None
) -> bool:
    """Whether both compute the same, up to a few times what rounding costs ``model``."""
    exact = logits(in_float64(model), in_float64(given))
    return as_exact(logits(compiled, given), logits(model, given), exact, stored)


# Whole models.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in ADDITIONS), ("gpt2", torch.float64),
     ("bert", torch.bfloat16)],
)  # fmt: skip
def test_a_model_computes_the_same(outs: dict[str, Path], name: str, dtype: torch.dtype) -> None:
    model, given, backend = loaded(outs, name, dtype), inputs(name, dtype), Counting()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert same(compiled, model, given)
    assert backend.fused == [ADDITIONS[name]]
    # OPT's first addition has no operand to overwrite: the positions may be a view of other memory
    assert backend.over == [ADDITIONS[name] - (name == "opt")]
    post = backend.count(kernels.sum_layer_norm_over, kernels.sum_rms_norm_over)
    assert post == (6 if name == "bert" else 1)  # the last sum of a pre-LN model is read once
    stored = torch.float32 if dtype == torch.float64 else dtype
    assert same(compiled, original(name, dtype), given, stored)


@pytest.mark.slow
def test_the_backend_by_its_name(outs: dict[str, Path]) -> None:
    model, given = loaded(outs, "gpt2", torch.float32), inputs("gpt2", torch.float32)
    compiled = torch.compile(model, backend="enjoyln", fullgraph=True)
    assert "enjoyln" in torch._dynamo.list_backends()
    assert same(compiled, model, given)


@pytest.mark.slow
@pytest.mark.skipif(not inductor.WORKS, reason="Inductor's own code does not compile here")
def test_inductor_inside() -> None:
    """Inductor compiles a graph in which sums and norms are calls of kernels."""
    first, second = norm("rms_norm"), norm("layer_norm")

    def blocks(a: Any, b: Any) -> Any:
        stream = a + b
        stream = stream + F.gelu(first(stream))
        return second(stream + b), stream

    compiled = torch.compile(blocks, backend="enjoyln", options={"inner": "inductor"})
    require_same(compiled, blocks, centred(2, 3, D), centred(2, 3, D))
    assert counters["inductor"], "it compiled nothing"


def test_another_option_is_refused() -> None:
    compiled = torch.compile(nn.LayerNorm(D), backend="enjoyln", options={"outer": "inductor"})
    with pytest.raises((EnjoyLNError, torch._dynamo.exc.BackendCompilerFailed), match="'outer'"):
        compiled(torch.randn(2, D))


@pytest.mark.slow
def test_dynamic_shapes(outs: dict[str, Path]) -> None:
    model, backend = loaded(outs, "opt", torch.float64), Counting()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for length in (5, 9, 12, 17):
        given = inputs("opt", torch.float64, length)
        assert same(compiled, model, given)
    assert backend.fused == [9]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [("gpt2", {}), ("gpt2", {"cache_implementation": "static"}), ("bloom", {})],
    ids=str,
)
def test_generation_compiles_nothing_anew_for_each_token(
    outs: dict[str, Path], name: str, settings: dict[str, Any]
) -> None:
    model = loaded(outs, name, torch.float64)
    ids = inputs(name, torch.float64)["input_ids"]
    asked = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, max_new_tokens=24, **asked, **settings)
    model.compile(backend="enjoyln")
    model.generate(ids, max_new_tokens=4, **asked, **settings)
    graphs = counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= 4
    assert torch.equal(model.generate(ids, max_new_tokens=24, **asked, **settings), expected)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


@pytest.mark.slow
def test_training_fuses_layer_norms_and_has_gradients(outs: dict[str, Path]) -> None:
    grads = []
    for compiling in (False, True):
        model = loaded(outs, "gpt2", torch.float64).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        torch.manual_seed(1)
        given, backend = inputs("gpt2", torch.float64), Counting()
        call = torch.compile(model, backend=backend) if compiling else model
        call(**given, labels=given["input_ids"]).loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    # active dropout (here with p = 0) stays in the graph
    assert sum(backend.fused) == 6
    assert backend.count(kernels.add_layer_norm, kernels.sum_layer_norm) == 6
    assert not backend.count(kernels.add_rms_norm, kernels.rms_norm, rms_norm)
    for one, other in zip(*grads, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


# One rule at a time.


class Folded32(Folded, nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.bias, self.eps, len(self.normalized_shape))


def norm(kind: str, shape: Any = D) -> Any:
    module = (nn.LayerNorm if kind == "layer_norm" else Folded32)(shape).eval()
    with torch.no_grad():
        module.weight.normal_(1, 0.3)
        module.bias.normal_(0.2, 0.3)
    return module


def centred(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(*shape, dtype=dtype)
    return x - x.mean(-1, keepdim=True)


def outcome(function: Callable[..., Any], *given: Any) -> Counting:
    """Compiles ``function``, and compares the result with that of a plain call."""
    backend = Counting()
    require_same(torch.compile(function, backend=backend, fullgraph=True), function, *given)
    return backend


def require_same(compiled: Callable[..., Any], function: Callable[..., Any], *given: Any) -> None:
    """Both return the same, up to a few times what rounding costs, and do the same to ``given``."""
    copies = [one.clone() if isinstance(one, torch.Tensor) else one for one in given]
    with torch.no_grad():
        with InFloat64():
            exact = function(*in_float64(copies))
        expected = function(*copies)
        got = compiled(*given)
    for one, other, truth in zip(_flat(got), _flat(expected), _flat(exact), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert as_exact(one, other, truth)
    for one, copy in zip(given, copies, strict=True):
        assert not isinstance(one, torch.Tensor) or torch.equal(one, copy)


def _flat(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("shape", [(D,), (5, D), (2, 3, D), (0, D)])
def test_a_sum_that_is_read_again_is_handed_on(kind: str, shape: tuple[int, ...]) -> None:
    one = norm(kind)
    found = outcome(lambda a, b: (one(a + b), a + b), centred(*shape), centred(*shape))
    assert found.fused == [1]
    found = outcome(lambda a, b: (one(s := a + b), s), centred(*shape), centred(*shape))
    assert found.fused == [1]
    assert found.count(getattr(kernels, f"add_{kind}")) == 1
    assert found.count(operator.add, F.layer_norm, rms_norm) == 0


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_a_sum_that_nobody_else_reads_is_not_kept(kind: str) -> None:
    one = norm(kind)
    found = outcome(lambda a, b: one(torch.add(a, b)), centred(2, 3, D), centred(2, 3, D))
    assert found.fused == [1] and found.count(getattr(kernels, f"sum_{kind}")) == 1


def test_parallel_blocks_and_two_norms_of_one_sum() -> None:
    first, second = norm("rms_norm"), norm("layer_norm")

    def block(a: Any, b: Any, c: Any) -> Any:
        stream = a + b + c
        return first(stream), second(stream), stream

    found = outcome(block, *(centred(2, 3, D) for _ in range(3)))
    assert found.fused == [1] and found.count(kernels.add_rms_norm_) == 1
    assert found.count(operator.add) == 1 and found.count(F.layer_norm) == 1


def test_a_view_of_the_sum() -> None:
    one = norm("rms_norm")

    def block(a: Any, b: Any) -> Any:
        stream = (a + b).reshape(-1, D)
        return one(stream), stream.view(2, 3, D)

    found = outcome(block, centred(2, 3, D), centred(2, 3, D))
    assert found.fused == [1] and found.count(kernels.add_rms_norm) == 1


def test_weights_that_are_made_after_the_sum() -> None:
    def late(a: Any, b: Any, scale: Any) -> Any:
        stream = a + b
        return F.layer_norm(stream, (D,), scale * 2), stream

    def too_late(a: Any, b: Any, scale: Any) -> Any:
        stream = a + b
        scale = scale * stream[0].exp()
        return F.layer_norm(stream, (D,), scale), stream

    assert outcome(late, centred(2, D), centred(2, D), torch.rand(D)).fused == [1]
    assert outcome(too_late, centred(2, D), centred(2, D), torch.rand(D)).fused == [0]


def test_dropout_that_drops_nothing_is_left_out() -> None:
    one = norm("rms_norm")
    found = outcome(
        lambda a, b: one(F.dropout(a, 0.5, False) + F.dropout(b, training=False)),
        centred(2, D),
        centred(2, D),
    )
    assert found.fused == [1] and found.count(F.dropout) == 0


def test_dropout_that_drops_stays() -> None:
    one, backend = norm("rms_norm"), Counting()
    compiled = torch.compile(lambda a: one(F.dropout(a, 0.5, True) + a), backend=backend)
    compiled(centred(4, D))
    assert backend.count(F.dropout) == 1 and backend.fused == [1]


def test_a_norm_without_an_addition_goes_to_its_kernel() -> None:
    one = norm("rms_norm")
    found = outcome(lambda a: one(a * 2), centred(2, D))
    assert found.fused == [0]
    assert found.count(kernels.rms_norm) == 1 and found.count(rms_norm) == 0


def test_a_stream_in_which_something_is_written() -> None:
    one = norm("layer_norm")

    def between(a: Any, b: Any) -> Any:
        stream = a + b
        stream.mul_(3)
        return one(stream), stream

    def operand(a: Any, b: Any) -> Any:
        stream = a + b
        a += 1
        return one(stream), stream, a

    def weights(a: Any, b: Any, scale: Any) -> Any:
        stream = a + b
        scale.add_(1)
        return F.layer_norm(stream, (D,), scale), stream

    for function in (between, operand):
        assert outcome(function, centred(2, D), centred(2, D)).fused == [0]
    assert outcome(weights, centred(2, D), centred(2, D), torch.rand(D)).fused == [0]


def test_a_sum_that_is_written_afterwards() -> None:
    one = norm("layer_norm")

    def after(a: Any, b: Any) -> Any:
        stream = a + b
        y = one(stream)
        stream.mul_(3)
        return y, stream

    assert outcome(after, centred(2, D), centred(2, D)).fused == [1]


@pytest.mark.parametrize(
    "what, function, given",
    [
        ("two shapes", lambda n, a, b: n(a + b), (centred(2, 3, D), centred(1, 3, D))),
        ("fewer dimensions", lambda n, a, b: n(a + b), (centred(2, D), centred(D))),
        ("two dtypes", lambda n, a, b: n(a + b), (centred(2, D), centred(2, D).bfloat16())),
        ("a number", lambda n, a, b: n(a + 1), (centred(2, D), centred(2, D))),
        ("a factor", lambda n, a, b: n(torch.add(a, b, alpha=2)), (centred(2, D), centred(2, D))),
        ("a difference", lambda n, a, b: n(a - b), (centred(2, D), centred(2, D))),
        ("written in place", lambda n, a, b: n(operator.iadd(a * 1, b)), (centred(2, D),) * 2),
        ("other rows", lambda n, a, b: n((a + b).view(-1, D)), (centred(2, 2 * D),) * 2),
        ("its weight", lambda n, a, b: F.layer_norm(s := a + b, (D,), s[0]), (centred(2, D),) * 2),
        ("two dimensions", lambda n, a, b: F.layer_norm(a + b, (3, D)), (centred(2, 3, D),) * 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_not_fused(what: str, function: Any, given: tuple[torch.Tensor, ...]) -> None:
    one = norm("layer_norm")
    found = outcome(lambda a, b: function(one, a, b), *(value.clone() for value in given))
    assert found.fused == [0]


A, B = torch.randn(2, D, D, generator=torch.Generator().manual_seed(1)) / D


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_a_sum_is_written_over_what_nobody_reads_later(kind: str, returned: bool) -> None:
    one, two = norm(kind), norm(kind)

    def block(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = x + F.linear(x, centre(A))
        s = s + F.linear(one(s), centre(B)).view(3, 2, D).reshape(2, 3, D)
        y = two(s)
        return (y, s) if returned else (F.linear(y, A), F.linear(s, A))

    found = outcome(block, centred(2, 3, D))
    assert (found.fused, found.over) == ([2], [2])
    # x is an input, so it stays; a view is not overwritten if the graph returns it
    assert found.count(getattr(kernels, f"add_{kind}_")) == 1 + returned
    assert found.count(getattr(kernels, f"add_{kind}_over")) == 1 - returned


def test_what_is_returned_can_be_written_to_with_gradients() -> None:
    one = norm("layer_norm")

    def block(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = x + F.linear(x, A).view(1, 5, D).view(5, D)
        return one(s), s

    with torch.no_grad():
        y, s = torch.compile(block, backend="enjoyln", fullgraph=True)(centred(5, D))
    for result in (y, s):
        result.add_(nn.Parameter(torch.ones(D)))
        assert result.requires_grad


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_a_result_is_written_over_what_nobody_reads_later(kind: str) -> None:
    one, two = norm(kind), norm(kind)

    def block(x: torch.Tensor) -> torch.Tensor:
        y = one(x + F.linear(x, centre(A)))
        return two(y * 0.5 + F.linear(y, centre(B)) + centre(B)[0])

    found = outcome(block, centred(2, 3, D))
    assert (found.fused, found.over) == ([1], [1])
    assert found.count(getattr(kernels, f"sum_{kind}_over")) == 1


def centre(weight: torch.Tensor) -> torch.Tensor:
    return weight - weight.mean(0)


def _read_again(x: torch.Tensor) -> Any:
    s = (a := F.linear(x, A)) + x
    return s, a


def _read_again_as_a_view(x: torch.Tensor) -> Any:
    view = (a := F.linear(x, A)).view(-1)
    return a + x, view


def _read_again_as_a_part(x: torch.Tensor) -> Any:
    part = (a := F.linear(x, A))[:1]
    return a + x, part


def _read_again_behind_what_may_hand_it_on(x: torch.Tensor) -> Any:
    same = (a := F.linear(x, A)).to(x.dtype)
    return a + x, same * 2


def _added_to_itself(x: torch.Tensor) -> Any:
    a = F.linear(x, A)
    return a + a, x


def _added_to_a_view_of_itself(x: torch.Tensor) -> Any:
    a = F.linear(x, A)
    return a.view(-1, D) + a, x


def _an_input(x: torch.Tensor) -> Any:
    return x + x[:], x


def _a_view_of_an_input(x: torch.Tensor) -> Any:
    return x.view(1, -1, D).view(-1, D) + x, x


def _not_contiguous(x: torch.Tensor) -> Any:
    return (x[:4, :4].t() + x[:4, 4:8].t()) + x[:4, :4], x


def _given_the_memory(x: torch.Tensor) -> Any:
    memory = torch.zeros_like(x)
    return torch.matmul(x, A, out=memory) + x, memory


@pytest.mark.parametrize("place", ["weight", "bias"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_norm_whose_parameter_is_a_part_of_the_sum(place: str, kept: bool) -> None:
    def block(x: torch.Tensor) -> Any:
        a = F.linear(x, A)
        s = a + x
        y = F.layer_norm(s, (D,), **{place: a[0]})
        return (y, s) if kept else y

    found = outcome(block, centred(5, D))
    assert (found.fused, found.over) == ([1], [0])


@pytest.mark.parametrize("way", ["set_", "data"])
def test_memory_that_a_buffer_is_given(way: str) -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm("layer_norm")
            self.register_buffer("last", torch.zeros(5, D))

        def forward(self, x: torch.Tensor) -> Any:
            a = F.linear(x, A)
            if way == "data":
                self.last.data = a
            else:
                self.last.set_(a)
            s = a + x
            return self.norm(s), s

    model, x = Keeping(), centred(5, D)
    with torch.no_grad():
        y, s = torch.compile(model, backend="enjoyln")(x)
        assert torch.allclose(model.last, F.linear(x, A))
        with InFloat64():
            exact = model.norm(F.linear(x, A) + x)
        assert as_exact(y, model.norm(F.linear(x, A) + x), exact)


def test_a_batched_operand() -> None:
    one, x = norm("layer_norm"), torch.randn(3, 5, D)

    def block(x: torch.Tensor) -> Any:
        a = F.linear(B[:5], A)
        s = a + x
        return one(s), s

    with torch.no_grad():
        expected = [torch.stack(each) for each in zip(*map(block, x), strict=True)]
        with InFloat64():
            exact = [torch.stack(each) for each in zip(*map(block, x), strict=True)]
        got = torch.compile(torch.vmap(block), backend="enjoyln")(x)
    assert all(map(as_exact, got, expected, exact))


def test_an_operand_of_two_tensors() -> None:
    one, x = norm("layer_norm"), torch.randn(5, D)
    two = TwoTensor(torch.randn(5, D), torch.randn(5, D))

    def block(x: torch.Tensor, t: Any) -> Any:
        s = F.linear(x, A) + t
        return one(s), s

    with torch.no_grad():
        for got in torch.compile(block, backend="enjoyln")(x, two):
            assert isinstance(got, TwoTensor)


@pytest.mark.parametrize(
    "what",
    [_read_again, _read_again_as_a_view, _read_again_as_a_part]
    + [_read_again_behind_what_may_hand_it_on, _added_to_itself, _added_to_a_view_of_itself]
    + [_an_input, _a_view_of_an_input, _not_contiguous, _given_the_memory],
)
def test_what_is_not_written_over(what: Callable[..., Any]) -> None:
    one = norm("layer_norm", D if what is not _not_contiguous else 4)

    def block(x: torch.Tensor) -> Any:
        s, also = what(x)
        return one(s), s, also

    found = outcome(block, centred(5, D))
    assert (found.fused, found.over) == ([1], [0])


def test_nothing_is_written_over_where_a_gradient_is_wanted() -> None:
    one, two, x = norm("layer_norm"), norm("layer_norm"), torch.randn(5, D)

    def block(x: torch.Tensor, on: bool) -> Any:
        with torch.set_grad_enabled(on):
            s = F.linear(x, A) + F.linear(x, B)
            s = s + F.linear(one(s), A)
            return two(s).square(), s

    for outside in (True, False):
        backend, gradients = Counting(), []
        compiled = torch.compile(block, backend=backend, fullgraph=True)
        for call, mode in ((compiled, nullcontext), (block, nullcontext), (block, InFloat64)):
            with mode():
                with torch.set_grad_enabled(outside):
                    y, s = call(x, True)
                total = y.sum() + s.sum()
            gradients += torch.autograd.grad(total, one.weight)
        assert as_exact(*gradients)
        assert (backend.fused, backend.over) == ([2], [0])


def test_nothing_is_fused_under_autocast() -> None:
    one, backend = norm("layer_norm"), Counting()
    a, b = centred(2, D), centred(2, D)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = one(F.linear(a, torch.eye(D)) + b)
        got = torch.compile(lambda x, y: one(F.linear(x, torch.eye(D)) + y), backend=backend)(a, b)
    assert backend.fused == [0]
    assert got.dtype == expected.dtype and torch.equal(got, expected)
