"""A recording gives the graph of torch's own tracer, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from folding_live import Computing
from tiny_models import GPT2, VIT, WHISPER
from torch import nn
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.calls.calls import Call
from enjoyln_cli.graph.in_place import replace_private_writes
from enjoyln_cli.models import classes
from enjoyln_cli.trace.capture import Captures, accepts, record_call
from enjoyln_cli.trace.graph_builder import NotRecorded
from enjoyln_cli.trace.recorder import record
from enjoyln_cli.trace.steps import Steps, quiet
from enjoyln_cli.trace.trace import Trace
from enjoyln_cli.trace.traced_calls import accepted_calls

CONFIGS = {"gpt2": GPT2, "vit": VIT, "whisper": WHISPER}
FROM_EXPORT_ALONE = {"aten._assert_tensor_metadata.default", "aten.detach_.default"}
"""Checks of a tensor's dtype, and a no-op in ``torch.tensor``."""


def stock(model_type: str) -> tuple[nn.Module, list[Call]]:
    config = transformers.CONFIG_MAPPING[model_type](**CONFIGS[model_type])
    model = classes.build(classes.classes_for(config)[0], config)
    calls = accepted_calls(Captures(model))
    assert calls
    return model, [call for call in calls if call.required or accepts(model, call)]


def traced(model: nn.Module, call: Call) -> Trace:
    with quiet():
        return record_call(Captures(model).prepared(call))


def written(graph: Graph) -> list[Any]:
    """Every operation in order, with its operands and results; a mark of a place is its operand."""
    names: dict[Node, Any] = {}
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or str(node.target) in FROM_EXPORT_ALONE:
            continue
        if node.target is torch.ops.aten.alias.default:
            names[node] = names.get(node.args[0], "given")
            continue
        names[node] = len(found)
        reads = [names.get(operand, "given") for operand in node.all_input_nodes]
        plain = [a for a in node.args if isinstance(a, (int, float))]
        if node.target is torch.ops.aten.layer_norm.default:
            plain = []  # export says whether cuDNN may be used, which changes nothing
        values = node.meta["val"]
        results = values if isinstance(values, (list, tuple)) else [values]
        shapes = [(tuple(value.shape), value.dtype) for value in results]
        found.append((str(node.target), reads, plain, shapes))
    return found


@pytest.mark.one_case
@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_recording_is_the_graph_of_export(model_type: str) -> None:
    model, calls = stock(model_type)
    for call in calls:
        steps = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), call.steps)
        runner = Steps(model, call.flags, None, cache=call.cache)
        with quiet():
            exported = torch.export.export(runner, steps, strict=False)
            replace_private_writes(exported.graph)
        assert written(traced(model, call).graph) == written(exported.graph)


CONSTANT = torch.zeros(())


def code(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> Computing:
    """A linear layer, then ``change``, then a norm; with a buffer."""
    parts = {"linear": nn.Linear(8, 8), "norm": nn.LayerNorm(8)}
    model = Computing(lambda m, x: m.norm(change(m, m.linear(x))), **parts)
    model.register_buffer("seen", torch.zeros(8))
    return model


def read(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h + h.mean().item()


def read_and_go_on(m: Any, h: torch.Tensor) -> torch.Tensor:
    try:
        return h + 1 if h.sum() > 0 else h
    except (RuntimeError, NotRecorded):
        return h - h.relu()


def list_and_go_on(m: Any, h: torch.Tensor) -> torch.Tensor:
    try:
        return h + h[0, 0].tolist()[0]
    except (RuntimeError, NotImplementedError):
        return h - h.relu()


def choose(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h[h.sum(-1) > 0]


def choose_by_a_listed_mask(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h[:, [True, False, True]]


def write(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h.mul_(2)


def write_into_buffer(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.seen[1:].mul_(2)
    return h + m.seen


def write_into_constant(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h + CONSTANT.add_(1)


def write_beside_a_view(m: Any, h: torch.Tensor) -> torch.Tensor:
    first = h[:1]
    h.mul_(2)
    return h - first


def replace_buffer(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.seen = h.mean((0, 1))
    return h


def copy_past_the_graph(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h + torch.tensor(m.linear.bias)


def take_data(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h + m.linear.bias.data


def branch(m: Any, h: torch.Tensor) -> torch.Tensor:
    return torch.cond(h.sum() > 0, lambda x: x + 1, lambda x: x - 1, (h,))  # type: ignore


def mix(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h + torch.arange(8)


REFUSED = [
    read, read_and_go_on, list_and_go_on, choose, choose_by_a_listed_mask, replace_buffer,
    copy_past_the_graph, take_data, branch, mix, write_into_buffer, write_into_constant,
    write_beside_a_view,
]  # fmt: skip


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_calls_that_cannot_be_recorded_are_refused(change: Any) -> None:
    model = code(change).to("meta").eval()
    with pytest.raises(Exception):  # noqa: B017
        traced(model, Call("x", (((torch.ones(2, 3, 8),), {}),)))
    assert float(CONSTANT) == 0.0


def scale(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h * torch.tensor(3.0, device=h.device) * torch.tensor(2).item()


def take_a_row(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h[:, torch.tensor([0, 2], device=h.device)] + h.split(1, dim=1)[0]


def take_listed_rows(m: Any, h: torch.Tensor) -> torch.Tensor:
    rows = h[:, [2, -3]] + h[[1, 0], 0].unsqueeze(1)
    copied = h.clone()
    copied[:, [0]] = h[:, [[1]]].squeeze(1)
    return copied + rows.sum(1, keepdim=True)


RECORDED = [scale, take_a_row, take_listed_rows]


@pytest.mark.one_case
@pytest.mark.parametrize("change", [*RECORDED, write, *REFUSED], ids=lambda c: c.__name__)
def test_verdicts_without_weights_are_those_of_the_live_module(change: Any) -> None:
    def verdicts(model: nn.Module) -> Any:
        try:
            plan = analyze_module(model, torch.ones(2, 3, 8)).plan
        except Exception as error:
            return type(error)
        return plan.norms, plan.writers, plan.unproven, plan.by_example

    torch.manual_seed(0)
    found = verdicts(code(change).to("meta"))
    if change not in (mix, copy_past_the_graph):  # which need all tensors on one device
        assert found == verdicts(code(change))


@pytest.mark.parametrize("change", RECORDED, ids=lambda change: change.__name__)
def test_constants_in_the_code_are_recorded(change: Any) -> None:
    model = code(change).to("meta").eval()
    with quiet():
        found = record(Steps(model, {}, None), (((torch.ones(2, 3, 8),), {}),))
    assert len(found.parameters) == 5 and len(found.constants) >= 1


@pytest.mark.parametrize(
    "index", [[1], [-2], (slice(None), [0, 2]), (0, slice(None), [-1]), (..., [1, 4, 7])]
)
def test_a_list_of_numbers_gives_a_copy(index: Any) -> None:
    """Written in place, the copy leaves alone what it was taken from."""

    def change(m: Any, h: torch.Tensor) -> torch.Tensor:
        taken = h[index]
        taken *= 3.0
        return h + taken.sum()

    torch.manual_seed(0)
    model, x = code(change).eval(), torch.randn(2, 3, 8)
    trace = traced(model, Call("x", (((x,), {}),)))
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    values = [
        weights[trace.parameters[node][0]] if node in trace.parameters else x
        for node in trace.graph.nodes
        if node.op == "placeholder"
    ]
    found = torch.fx.Interpreter(nn.Module(), graph=trace.graph).run(*values)
    torch.testing.assert_close(found[0], model(x))


def test_a_write_that_no_other_op_sees_is_recorded() -> None:
    model = code(write).to("meta").eval()
    found = traced(model, Call("x", (((torch.ones(2, 3, 8),), {}),)))
    targets = {node.target for node in found.graph.nodes}
    assert torch.ops.aten.mul.Tensor in targets and torch.ops.aten.mul_.Tensor not in targets
