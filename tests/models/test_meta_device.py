"""Models whose shapes depend on input values: they are recorded by a dry run, not exported."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from folding_live import Computing, error, randomised
from live_models import install
from tiny_models import converted
from torch import nn

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.calls.calls import Call
from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.models.classes import build
from enjoyln_cli.models.meta_device import (
    Memory,
    copy_without_weights,
    meta_weights,
    without_weights,
)
from enjoyln_cli.trace.capture import accepts

WIDTH = 12


def stream(m: Any, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Rows of patches, of images that have as many patches as ``sizes`` says."""
    parts = []
    for part in m.patches(x).split(sizes.tolist()):
        parts.append(part + m.mix(m.norm(part)).mean(0) if len(part) > 1 else part)
    return torch.cat(parts)


def plain(m: Any, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return m.out(m.last(stream(m, x, sizes)))


def judged(m: Any, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Branches on an activation."""
    rows = stream(m, x, sizes)
    return m.out(m.last(-rows if rows.mean() > 0 else rows))


def replaced(m: Any, x: torch.Tensor, sizes: torch.Tensor, views: bool = False) -> torch.Tensor:
    """Replaces rows of the stream by the output of another layer, and adds to rows."""
    rows, first = stream(m, x, sizes), torch.arange(int(sizes[0]))
    before = m.norm(rows)
    seen = rows.view(-1, WIDTH) if views else rows
    rows[first] = m.own(x[first])
    rows.index_add_(0, first, m.mix(before)[first])
    return m.out(m.last(seen))


def table(m: Any, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Normalises a parameter directly, before any other op reads it."""
    return plain(m, x, sizes) + m.out(m.of_table(m.table.weight)).sum(0)


def images(run: Callable[..., torch.Tensor], **more: nn.Module) -> Any:
    parts = {"patches": nn.Linear(5, WIDTH), "mix": nn.Linear(WIDTH, WIDTH)}
    norms = {"norm": nn.LayerNorm(WIDTH), "last": nn.LayerNorm(WIDTH)}
    return randomised(Computing(run, **parts, **norms, out=nn.Linear(WIDTH, 3), **more))


def out(stream: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(stream)
    view = result.view(-1)
    torch.add(stream, stream.exp(), out=result)
    return view.view(-1, WIDTH)


def out_of_another(stream: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
    summed = stream + side
    torch.sub(summed, summed.mean(-1, keepdim=True), out=torch.empty_like(summed))
    return summed


def foreach(stream: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(stream)
    torch._foreach_add_([result], [stream.exp()])
    return result


def dropout(stream: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
    kept = nn.functional.dropout(stream, 0.5, training=False)
    kept += side * torch.arange(float(WIDTH), dtype=side.dtype)
    return stream


def einsum(stream: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
    kept = torch.einsum("ij->ij", stream)
    stream += side * torch.arange(float(WIDTH), dtype=side.dtype)
    return kept


class Experts(nn.Module):
    """Routes each token to an expert by an activation, and runs only the selected experts."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.embed, self.gate = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.experts = nn.Parameter(torch.empty(3, WIDTH, WIDTH))
        self.out, self.reads = nn.Linear(WIDTH, 2), reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stream = self.embed(x)
        chosen = nn.functional.one_hot(self.gate(self.norm(stream)).argmax(-1), 3)
        result = torch.zeros(len(x), WIDTH, dtype=x.dtype)
        for expert in chosen.sum(0).gt(0).nonzero():
            (tokens,) = torch.where(chosen.T[expert[0]])
            if self.reads and int(expert[0]) == 1:
                continue
            given = self.norm(stream)[tokens] @ self.experts[expert[0]]
            result.index_add_(0, tokens, given)
        return self.out(self.last(result))


class Strided(nn.Module):
    """Keeps two numbers that Python reads: one in a tensor, one in a stored buffer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.own, self.norm = nn.Linear(5, WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("stride", torch.tensor(config.stride), persistent=False)
        self.register_buffer("stored", torch.tensor(config.stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stream = self.own(x)
        extra = torch.ceil(torch.tensor(len(x)) / self.stride) * self.stride - len(x)
        return self.norm(nn.functional.pad(stream, (0, 0, 0, int(extra))))


def example(*sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(sum(sizes), 5, dtype=torch.float64) + 0.3, torch.tensor(sizes)


def test_a_model_that_reads_sizes_folds_for_every_size() -> None:
    model = images(plain)
    found = analyze_module(model, *example(3, 4))
    assert found.problem.flow.traces[0].by_values
    assert [verdict.norm for verdict in found.plan.folded] == ["norm", "last"]
    folded = converted(model, found.plan, guarded=False)
    for sizes in ((3, 4), (1, 1, 5), (9,)):
        assert error(folded, model, *example(*sizes)) <= 1e-12


def test_rows_that_values_select_fold_for_any_number_of_rows() -> None:
    """Padding rows are removed, so that the number of normalised rows depends on values."""
    parts = {"own": nn.Linear(5, WIDTH), "norm": nn.LayerNorm(WIDTH), "out": nn.Linear(WIDTH, 3)}
    model = randomised(Computing(lambda m, x, mask: m.out(m.norm(m.own(x[mask]))), **parts))
    x, _ = example(8)
    found = analyze_module(model, x, torch.arange(8) % 3 > 0)
    assert not found.problem.flow.traces[0].by_values
    assert [verdict.norm for verdict in found.plan.folded] == ["norm"]
    folded = converted(model, found.plan, guarded=False)
    for kept in (2, 5, 8):
        assert error(folded, model, x, torch.arange(8) < kept) <= 1e-12


def test_a_model_that_reads_an_activation_is_refused() -> None:
    with pytest.raises(TraceFailed, match="could not be traced.*judged, line"):
        analyze_module(images(judged), *example(3, 4))


def test_all_experts_are_traced_if_an_activation_selects_them() -> None:
    model, x = randomised(Experts()), torch.randn(7, 5, dtype=torch.float64)
    found = analyze_module(model, x)
    assert found.problem.flow.traces[0].by_values
    assert [verdict.norm for verdict in found.plan.folded] == ["norm", "last"]
    folded = converted(model, found.plan, guarded=False)
    for rows in (1, 2, 30):  # of one row, two experts are not run
        assert error(folded, model, torch.randn(rows, 5, dtype=torch.float64)) <= 1e-12


def test_the_number_of_an_expert_is_not_read() -> None:
    with pytest.raises(TraceFailed, match="Experts could not be traced"):
        analyze_module(randomised(Experts(reads=True)), torch.randn(7, 5, dtype=torch.float64))


def test_a_constant_has_a_value_and_a_stored_buffer_none() -> None:
    bare = build(Strided, SimpleNamespace(stride=4))
    assert not bare.stride.is_meta and int(bare.stride) == 4
    assert bare.stored.is_meta and all(parameter.is_meta for parameter in bare.parameters())
    found = analyze_module(bare, torch.randn(6, 5))
    assert [verdict.norm for verdict in found.plan.folded] == ["norm"]


def test_a_norm_may_read_a_parameter_as_its_input() -> None:
    model = images(table, table=nn.Embedding(4, WIDTH), of_table=nn.LayerNorm(WIDTH))
    plan = analyze_module(model, *example(3, 4)).plan
    assert "of_table" in [verdict.norm for verdict in plan.folded]
    assert error(converted(model, plan, guarded=False), model, *example(2, 5)) <= 1e-12


@pytest.mark.parametrize(("rows", "fits"), [(3, True), (1, True), (2, False), (4, False)])
def test_rows_that_do_not_fit_their_places_are_refused(rows: int, fits: bool) -> None:
    def put(m: Any, x: torch.Tensor, given: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        stream = m.own(x)
        stream[mask] = m.own(given)
        return m.norm(stream)

    model = Computing(put, own=nn.Linear(5, WIDTH), norm=nn.LayerNorm(WIDTH))
    mask = torch.arange(8) % 3 == 0
    call = Call("rows", (((torch.randn(8, 5), torch.randn(rows, 5), mask), {}),))
    assert accepts(model, call) == fits
    raised = nullcontext() if fits else pytest.raises((RuntimeError, IndexError), match="shape")
    with raised:
        model(*call.steps[0][0])


def test_rows_that_are_written_in_place_are_traced() -> None:
    model = images(replaced, own=nn.Linear(5, WIDTH))
    found = analyze_module(model, *example(3, 4))
    assert found.problem.flow.traces[0].by_values
    assert {verdict.norm for verdict in found.plan.folded} == {"norm", "last"}
    folded = converted(model, found.plan, guarded=False)
    for sizes in ((3, 4), (2, 5), (1, 1)):
        assert error(folded, model, *example(*sizes)) <= 1e-12


def test_rows_that_a_view_sees_change_are_not() -> None:
    plan = analyze_module(
        images(partial(replaced, views=True), own=nn.Linear(5, WIDTH)), *example(3, 4)
    ).plan
    reasons = {verdict.norm: verdict.reason for verdict in plan.kept}
    assert reasons["last"] == "its memory is written in place"


@pytest.mark.parametrize("by_example", [False, True])
@pytest.mark.parametrize("change", [out, out_of_another, foreach, dropout, einsum])
def test_a_write_seen_through_shared_memory_keeps_the_norm(change: Any, by_example: bool) -> None:
    """The change is made through another tensor that shares its memory."""

    def run(m: Any, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        if by_example and int(sizes[0]) < 0:
            return x
        return m.norm(change(m.own(x), m.side(x)))

    parts = {"own": nn.Linear(5, WIDTH), "side": nn.Linear(5, 1), "norm": nn.LayerNorm(WIDTH)}
    model = randomised(Computing(run, **parts))
    plan = analyze_module(model, *example(3, 4)).plan
    assert [verdict.norm for verdict in plan.kept] == ["norm"]
    forced = converted(model, plan, guarded=False)
    install(forced, ["norm"], ())
    assert error(forced, model, *example(2, 5)) > 1e-3


def test_weights_of_a_live_model_are_not_copied_or_changed() -> None:
    model = images(plain)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    bare = without_weights(model)
    assert all(parameter.is_meta for parameter in bare.parameters())
    analyze_module(model, *example(3, 4))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_inputs_keep_their_values_and_activations_have_none() -> None:
    ids, real = torch.tensor([[3, 0, 2]]), torch.zeros(1, 3, 4, device="meta")
    with meta_weights():
        counted = (ids.to(real.device) > 0).sum(-1).tolist()
        chosen = real[ids > 0]
        positions = torch.arange(3, device=real.device) + torch.tensor(2, device=real.device)
        with pytest.raises(RuntimeError):
            real.sum().item()
    assert counted == [2] and chosen.shape == (2, 4) and positions.tolist() == [2, 3, 4]


def below(values: torch.Tensor) -> torch.Tensor:
    """Which are at most as large as each; of a transform, whose results no recording shows."""
    return torch.vmap(lambda one: torch.vmap(lambda other: one >= other)(values))(values)


def masked(mask: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """A LayerNorm between two layers, on rows that a mask selects."""

    def run(m: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        bounded = int(ids.max()) < 100  # a value is read, so the call is recorded by example
        y = m.last(m.norm(m.first(x))).masked_fill(~mask(x, ids), 0.0)
        return y if bounded else -y

    return Computing(run, **between_layers()).double()


def between_layers() -> dict[str, nn.Module]:
    return {"first": nn.Linear(6, 6), "norm": nn.LayerNorm(6), "last": nn.Linear(6, 6)}


@pytest.mark.parametrize(
    "mask",
    [lambda x, ids: below(torch.arange(6)), lambda x, ids: below(ids)],
    ids=["of positions", "of ids"],
)
def test_a_mask_of_whole_numbers_may_come_from_a_transform(mask: Any) -> None:
    model, x, ids = masked(mask), torch.randn(6, 6).double(), torch.arange(6)
    plan = analyze_module(model, x, ids).plan
    assert plan.by_example and [v.norm for v in plan.folded] == ["norm"]
    assert error(converted(model, plan, guarded=False), model, x, ids) < 1e-12


def test_a_mask_of_real_numbers_has_to_stand_in_the_graph() -> None:
    model = masked(lambda x, ids: below(x[0]))
    with pytest.raises(TraceFailed, match="leaves the graph as a parameter or a tensor of another"):
        analyze_module(model, torch.randn(6, 6).double(), torch.arange(6))


def test_a_write_that_no_recording_shows_is_refused() -> None:
    """A transform makes it; a value decides, so the call is recorded."""

    def run(m: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        h = m.first(x)
        torch.vmap(lambda row: row.mul_(row.sigmoid()))(h)
        y = m.last(m.norm(h))
        return y if int(ids.max()) < 100 else -y

    model = Computing(run, **between_layers()).double()
    with pytest.raises(TraceFailed, match="writes in place inside a transform"):
        analyze_module(model, torch.randn(6, 6).double(), torch.arange(6))


def test_what_a_real_number_is_written_into_is_not_whole() -> None:
    real, memory = torch.randn(3), Memory()
    mask, positive = torch.ones(3, dtype=torch.bool), real > 0
    memory.add(mask, (), writes=False)
    memory.add(positive, (real,), writes=False)
    assert memory.holds(mask) and not memory.holds_real(mask)
    assert memory.holds_real(positive) and memory.holds_real(positive[1:])
    memory.add(None, (mask, torch.tensor([1])), writes=True)
    assert not memory.holds_real(mask)
    memory.add(None, (mask, positive), writes=True)
    assert memory.holds_real(mask)


def test_a_model_whose_copy_is_itself_is_refused() -> None:
    class Itself(nn.Linear):
        def __deepcopy__(self, memo: object) -> nn.Module:
            return self

    with pytest.raises(TraceFailed, match="Itself: a copy of the model shares its weights"):
        without_weights(Itself(3, 3))


def test_a_copy_has_neither_weights_nor_what_they_gave() -> None:
    plain: Any = torch.nn.utils.weight_norm(nn.Linear(3, 4))
    assert not plain.weight.is_leaf
    originals: list[torch.Tensor] = []
    bare: Any = copy_without_weights(plain, copied=originals)
    assert any(one is plain.weight for one in originals)
    shapes = {name: p.shape for name, p in plain.named_parameters()}
    assert {name: p.shape for name, p in bare.named_parameters()} == shapes
    assert all(p.is_meta for p in bare.parameters())
    assert bare.weight is not plain.weight and torch.equal(bare.weight, plain.weight)


def test_what_cannot_be_copied_is_refused() -> None:
    plain: Any = nn.Linear(3, 4)
    plain.lock = threading.Lock()
    with pytest.raises(TraceFailed, match="Linear cannot be copied.*deepcopy refuses .*lock"):
        copy_without_weights(plain)


class Drawing(nn.Module):
    """Draws random values for two tensors; only ``in_memory`` has values."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 4))
        self.same = nn.init.normal_(self.weight, std=config.std) is self.weight
        self.held = nn.init.uniform_(torch.zeros(5, device="cpu"), 1, 2)


def test_random_values_are_drawn_only_where_values_are() -> None:
    model: Any = build(Drawing, SimpleNamespace(std=0.1))
    assert model.same and model.weight.is_meta
    assert model.held.min() >= 1
