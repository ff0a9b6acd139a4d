"""A recording gives the graph of torch's own tracer, or is refused; folds by it are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from folding_live import floats, fold_in_place, randomised
from tiny_models import GPT2, VIT, WHISPER
from torch import nn
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.calls.calls import Call
from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.graph.in_place import replace_private_writes
from enjoyln_cli.models import classes
from enjoyln_cli.trace.capture import Recorder, accepts, record_call
from enjoyln_cli.trace.graph_builder import NotRecorded
from enjoyln_cli.trace.steps import Steps, quiet
from enjoyln_cli.trace.trace import Trace
from enjoyln_cli.trace.traced_calls import accepted_calls

CONFIGS = {"gpt2": GPT2, "vit": VIT, "whisper": WHISPER}
FROM_EXPORT_ALONE = {"aten._assert_tensor_metadata.default", "aten.detach_.default"}
"""Checks of a tensor's dtype, and a no-op in ``torch.tensor``."""


def stock(model_type: str) -> tuple[nn.Module, list[Call]]:
    config = transformers.CONFIG_MAPPING[model_type](**CONFIGS[model_type])
    model = classes.build(classes.classes_for(config)[0], config)
    calls = accepted_calls(Recorder(model))
    assert calls
    return model, [call for call in calls if call.required or accepts(model, call)]


def traced(model: nn.Module, call: Call) -> Trace:
    with quiet():
        return record_call(Recorder(model).prepared(call))


def written(graph: Graph) -> list[Any]:
    """Every operation in order, with its operands and results.

    A mark of a place, and a copy of a constant in the code, are their operands.
    """
    names: dict[Node, Any] = {}
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or str(node.target) in FROM_EXPORT_ALONE:
            continue
        if node.target in (torch.ops.aten.alias.default, torch.ops.aten.lift_fresh_copy.default):
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


class Code(nn.Module):
    """A linear layer, then ``change``, then a norm."""

    def __init__(self, change: Callable[[Code, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.norm, self.change = nn.Linear(8, 8), nn.LayerNorm(8), change
        self.register_buffer("state", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.change(self, self.linear(x)))

    def forget(self) -> None:
        self.state = torch.linspace(-1, 2, 8, dtype=torch.float64)


def read(code: Code, h: torch.Tensor) -> torch.Tensor:
    return h + h.mean().item()


def read_and_go_on(code: Code, h: torch.Tensor) -> torch.Tensor:
    try:
        return h.relu() if h.sum() > -1e9 else h
    except (RuntimeError, NotRecorded):
        return 2 * h


def list_and_go_on(code: Code, h: torch.Tensor) -> torch.Tensor:
    try:
        return h.abs() + h[0, 0].tolist()[0]
    except (RuntimeError, NotImplementedError):
        return 2 * h


def choose(code: Code, h: torch.Tensor) -> torch.Tensor:
    return h[h.sum(-1) > 0]


def choose_by_a_listed_mask(code: Code, h: torch.Tensor) -> torch.Tensor:
    return h[:, [True, False, True]]


def write(code: Code, h: torch.Tensor) -> torch.Tensor:
    return h.mul_(2)


def write_into_buffer(code: Code, h: torch.Tensor) -> torch.Tensor:
    code.state[1:].mul_(2)
    return h + code.state


def write_beside_a_view(code: Code, h: torch.Tensor) -> torch.Tensor:
    first = h[:1]
    h.mul_(2)
    return h - first


def replace_buffer(code: Code, h: torch.Tensor) -> torch.Tensor:
    code.state = h.mean((0, 1))
    return h


def copy_past_the_graph(code: Code, h: torch.Tensor) -> torch.Tensor:
    return h + torch.tensor(code.linear.bias)


def take_data(code: Code, h: torch.Tensor) -> torch.Tensor:
    return h + code.linear.bias.data


def branch(code: Code, h: torch.Tensor) -> torch.Tensor:
    return torch.cond(h.sum() > 0, lambda x: x + 1, lambda x: x - 1, (h,))  # type: ignore


def mix(code: Code, h: torch.Tensor) -> torch.Tensor:
    return h + torch.arange(8)


REFUSED = [read, read_and_go_on, list_and_go_on, branch]


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_calls_that_cannot_be_recorded_are_refused(change: Any) -> None:
    """Also if the code catches the exception, since it goes on otherwise than with values."""
    with pytest.raises(TraceFailed):
        analyze_module(randomised(Code(change)), floats(2, 3, 8))


def scale(code: Code, h: torch.Tensor) -> torch.Tensor:
    return h * torch.tensor(3.0, device=h.device) * torch.tensor(2).item()


def take_a_row(code: Code, h: torch.Tensor) -> torch.Tensor:
    return h[:, torch.tensor([0, 2], device=h.device)] + h.split(1, dim=1)[0]


def take_listed_rows(code: Code, h: torch.Tensor) -> torch.Tensor:
    rows = h[:, [2, -3]] + h[[1, 0], 0].unsqueeze(1)
    copied = h.clone()
    copied[:, [0]] = h[:, [[1]]].squeeze(1)
    return copied + rows.sum(1, keepdim=True)


FOLDS = [
    scale, take_a_row, take_listed_rows, choose_by_a_listed_mask, write, copy_past_the_graph,
    take_data,
]  # fmt: skip
STAYS = [choose, replace_buffer, mix, write_into_buffer, write_beside_a_view]


@pytest.mark.parametrize("change", [*FOLDS, *STAYS], ids=lambda change: change.__name__)
def test_what_is_folded_by_a_recording_is_the_same_function(change: Any) -> None:
    others = [(floats(2, 3, 8, seed=seed),) for seed in (2, 3)]
    found = fold_in_place(randomised(Code(change)), floats(2, 3, 8), others=others)
    assert found.error < 1e-12
    assert found.folded == ({"norm"} if change in FOLDS else frozenset())


@pytest.mark.parametrize(
    "index", [[1], [-2], (slice(None), [0, 2]), (0, slice(None), [-1]), (..., [1, 4, 7])]
)
def test_a_list_of_numbers_gives_a_copy(index: Any) -> None:
    """Written in place, the copy leaves its source alone."""

    def change(code: Code, h: torch.Tensor) -> torch.Tensor:
        taken = h[index]
        taken *= 3.0
        return h + taken.sum()

    torch.manual_seed(0)
    model, x = Code(change).eval(), torch.randn(2, 3, 8)
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
    model = Code(write).to("meta").eval()
    found = traced(model, Call("x", (((torch.ones(2, 3, 8),), {}),)))
    targets = {node.target for node in found.graph.nodes}
    assert torch.ops.aten.mul.Tensor in targets and torch.ops.aten.mul_.Tensor not in targets


ONE_DEVICE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "multi_dot": lambda x, w: torch.linalg.multi_dot([x, w, w]),
    "take_along_dim": lambda x, w: torch.take_along_dim(x, (x @ w).argmax(-1, keepdim=True), 1),
    "lstm": lambda x, w: torch.lstm(
        x[None], (w[None, :1], w[None, :1]), [w.repeat(4, 1)] * 2, False, 1, 0.0, False, False, True
    )[0][0],
}


@pytest.mark.parametrize("op", ONE_DEVICE)
def test_an_op_that_wants_operands_on_one_device(op: str) -> None:
    class Reading(Code):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.linear(ONE_DEVICE[op](x, self.linear.weight).sum(-1) + x))

    model = randomised(Reading(write))
    found = fold_in_place(model, floats(8, 8), others=[(floats(8, 8, seed=3),)])
    assert not found.refused and found.error < 1e-12
