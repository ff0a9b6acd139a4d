"""Which MLPs can subtract the mean of their residual input, and why others cannot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from widening_cases import WIDEN

from enjoyln_cli.analysis.analyze import Analysis, analyze_module
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.plan.mean_units import UNITS, read_by_units, written_by_units
from enjoyln_cli.plan.plan import Setting

D, SIZE = 12, 20


# The units themselves.


@pytest.mark.parametrize("features", [1, 2, 3, 21, 64, 80, 768, 1000, 16384, 12289])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_units_subtract_the_mean_in_every_dtype(features: int, dtype: torch.dtype) -> None:
    read = torch.tensor(read_by_units(features), dtype=torch.float64)
    written = torch.tensor(written_by_units(features), dtype=torch.float64)
    assert len(read) == len(written) == UNITS
    assert torch.equal(read.to(dtype).double(), read)
    assert float((read * features).abs().max()) <= 1
    stored = written.to(dtype).double()
    lost = abs(float((stored * read.clamp_min(0)).sum()) * features + 1)
    assert lost <= 2**-8 * torch.finfo(dtype).eps + 1e-15
    h = torch.randn(features, dtype=torch.float64) + 0.3
    hidden = F.gelu(read * h.sum())
    torch.testing.assert_close((written * hidden).sum(), -h.mean(), rtol=1e-12, atol=1e-15)


# A small network of one MLP, and variations that must be refused.


Act = Callable[[torch.Tensor], torch.Tensor]
Run = Callable[[Any, torch.Tensor], Any]


def mlp(m: Any, h: torch.Tensor, act: Act = F.gelu) -> torch.Tensor:
    return m.second(act(m.first(h)))


def post_norm(m: Any, h: torch.Tensor, act: Act = F.gelu) -> torch.Tensor:
    return m.head(m.after(h + mlp(m, h, act)))


class Toy(nn.Module):
    """``run`` of ``LN(embed(x))``, with parts for an MLP and a norm after it."""

    run: Run
    size_of: Callable[[Any], int]
    more: dict[str, Callable[[int], Any]]

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config, size = config, self.size_of(config)
        self.embed, self.before = nn.Linear(7, D), nn.LayerNorm(D)
        self.first, self.second = nn.Linear(D, size), nn.Linear(size, D)
        self.after, self.head = nn.LayerNorm(D), nn.Linear(D, 3)
        for name, make in self.more.items():
            setattr(self, name, make(size))

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, self.before(self.embed(x)))


def toy(
    run: Run = post_norm, size_of: Callable[[Any], int] = lambda config: config.size, **more: Any
) -> type[Toy]:
    """A class, which is built for configs of other sizes too; ``more`` makes parts for a size."""
    settings = {"run": staticmethod(run), "size_of": staticmethod(size_of), "more": more}
    return type("Toy", (Toy,), settings)


def planned(kind: type[Toy], options: Options = WIDEN, **config: Any) -> Analysis:
    torch.manual_seed(0)
    model = kind(SimpleNamespace(**{"size": SIZE, **config}))
    return analyze_module(model, torch.randn(2, 5, 7), options=options)


def status(found: Analysis, norm: str = "after") -> str:
    return next(v.status for v in found.plan.norms if v.norm == norm)


def reason(found: Analysis, norm: str = "after") -> str:
    verdict = next(v for v in found.plan.norms if v.norm == norm)
    assert verdict.status == "stays_layernorm", f"{norm} folds"
    assert not found.plan.widened and not found.plan.settings
    return verdict.reason


def test_the_norm_after_an_mlp_folds_only_when_asked_for() -> None:
    plain, wider = planned(toy(), Options()), planned(toy())
    assert status(plain) == "stays_layernorm" and not plain.plan.widened
    assert status(wider) == "in_weights" and not wider.plan.subtractions
    (one,) = wider.plan.widened
    names = [(part.parameter, part.dim) for part in one.parts]
    assert names == [("first.weight", 0), ("first.bias", 0), ("second.weight", 1)]
    assert (one.size, one.to, one.features, one.subtracts) == (SIZE, 24, D, True)
    assert wider.plan.settings == (Setting("size", 24),)
    verdict = next(v for v in wider.plan.norms if v.norm == "after")
    assert verdict.mlps == ("second.weight",)
    assert "second.weight" in verdict.needs and "second.bias" in verdict.needs


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("multiple", "size", "to"),
    [(8, 20, 24), (8, 21, 32), (64, 20, 64), (64, 64, 128), (8, 64, 72), (1, 20, 24)],
)
def test_the_wider_size_is_a_multiple(multiple: int, size: int, to: int) -> None:
    found = planned(toy(), Options(widen_mlp=True, widen_to=multiple), size=size)
    assert [one.to for one in found.plan.widened] == [to]


def test_why_names_the_mlp() -> None:
    tree = planned(toy()).why("after")
    texts = [child.text for child in tree.children[0].children]
    assert tree.zero_mean
    assert any("its mean is subtracted by hidden units of second.weight" in text for text in texts)


ACTIVATIONS: dict[str, Act] = {
    "gelu": F.gelu,
    "gelu spelled out": lambda u: 0.5 * u * (1 + torch.tanh(0.8 * (u + 0.04 * torch.pow(u, 3)))),
    "relu": F.relu,
    "silu": F.silu,
    "in another dtype": lambda u: F.dropout(F.silu(u.float()).to(u.dtype), 0.1, False),
}
OTHERS: dict[str, tuple[Act, str]] = {
    "relu6": (F.relu6, "relu6"),
    "clipped gelu": (lambda u: F.gelu(u).clamp(-10, 10), "gelu, clamp"),
    "clipped far away": (lambda u: F.gelu(u).clamp(-3e4, 3e4), "gelu, clamp"),
    "not near zero": (lambda u: u.clamp_min(1e-5), "clamp_min"),
    "tanh": (torch.tanh, "tanh"),
    "none": (lambda u: u, "no activation"),
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_that_pass(name: str) -> None:
    assert status(planned(toy(partial(post_norm, act=ACTIVATIONS[name])))) == "in_weights"


@pytest.mark.one_case
@pytest.mark.parametrize("name", OTHERS)
def test_activations_that_do_not(name: str) -> None:
    act, named = OTHERS[name]
    found = reason(planned(toy(partial(post_norm, act=act))))
    assert "the MLP cannot subtract it: " in found
    assert "act(u) - act(-u) = " in found and named in found


def gated(m: Any, h: torch.Tensor) -> Any:
    return m.head(m.after(h + m.second(F.silu(m.gate(h)) * m.first(h))))


def gated_in_one(m: Any, h: torch.Tensor) -> Any:
    gate, up = m.both(h).chunk(2, -1)
    return m.head(m.after(h + m.second(F.silu(gate) * up)))


def hidden_values_that_are_read(m: Any, h: torch.Tensor) -> Any:
    hidden = F.gelu(m.first(h))
    return m.head(m.after(h + m.second(hidden))), hidden.amax(-1)


def a_sum_that_is_returned(m: Any, h: torch.Tensor) -> Any:
    total = h + mlp(m, h)
    return m.head(m.after(total)), total


COUNTED = "no attribute of the config sets its number of hidden units and nothing else"
REFUSED: dict[str, tuple[type[Toy], str]] = {
    "gated": (toy(gated, gate=lambda size: nn.Linear(D, size)), "it is gated"),
    "gated, in one": (toy(gated_in_one, both=lambda size: nn.Linear(D, 2 * size)), "it is gated"),
    "its hidden values are read": (
        toy(hidden_values_that_are_read), "its hidden values are read by amax too",
    ),
    "its weight is read": (
        toy(lambda m, h: (post_norm(m, h), m.first.weight.sum())),
        "one of its weights is also read by sum",
    ),
    "its sum is seen": (
        toy(a_sum_that_is_returned),
        "its output has another reader, which uses its mean (the model returns it)",
    ),
    "not counted": (toy(size_of=lambda config: SIZE), COUNTED),
    "the attribute counts something else, too": (
        toy(head=lambda size: nn.Linear(D, size)), COUNTED,
    ),
}  # fmt: skip


@pytest.mark.one_case
@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_reason(case: str) -> None:
    kind, why = REFUSED[case]
    assert f"and the MLP cannot subtract it: {why}" in reason(planned(kind))


def normed_by_itself(m: Any, h: torch.Tensor) -> Any:
    """The units would give the MLP's output a mean."""
    value = mlp(m, h)
    return m.head(m.after(h + value)), m.alone(value)


def rows_in_another_order(m: Any, h: torch.Tensor) -> Any:
    return m.head(m.after(h.transpose(0, 1) + mlp(m, h).view(5, 2, D)))


NO_MLP: dict[str, type[Toy]] = {
    "an activation with a weight of its own": toy(
        lambda m, h: post_norm(m, h, lambda u: F.gelu(u) * m.slope),
        slope=lambda size: nn.Parameter(torch.ones(size)),
    ),
    "normed by itself, too": toy(normed_by_itself, alone=lambda size: nn.LayerNorm(D)),
    "half of it is added": toy(lambda m, h: m.head(m.after(h + 0.5 * mlp(m, h)))),
    "of another value": toy(lambda m, h: m.head(m.after(h + mlp(m, h.tanh())))),
    "rows in another order": toy(rows_in_another_order),
}


@pytest.mark.one_case
@pytest.mark.parametrize("case", NO_MLP)
def test_what_is_no_mlp_that_is_added_to_what_it_reads(case: str) -> None:
    found = reason(planned(NO_MLP[case]))
    assert found == "the output of a LayerNorm with weights is not zero-mean"


def test_a_pre_norm_block_needs_no_wider_mlp() -> None:
    """The MLP is not added to the value that it reads, and the norm folds without it."""
    kind = toy(
        lambda m, h: m.head(m.after(h + mlp(m, m.inner(h)))),
        before=lambda size: nn.Identity(),
        inner=lambda size: nn.LayerNorm(D),
    )
    found = planned(kind).plan
    assert len(found.folded) == 2 and not found.widened and not found.settings


def shared(m: Any, h: torch.Tensor, last: bool) -> Any:
    """One MLP, called three times; ``after`` sees its sums, and with ``last`` nothing else does."""
    for _ in range(2):
        h = m.after(h + mlp(m, h))
    return m.head(m.after(h + mlp(m, h)) if last else h + mlp(m, h))


def test_all_calls_of_a_shared_mlp_count_as_one_mlp() -> None:
    found = planned(toy(partial(shared, last=True))).plan
    assert len(found.folded) == 2 and len(found.widened) == 1
    seen = reason(planned(toy(partial(shared, last=False))))
    assert "its output has another reader" in seen


def test_all_mlps_that_the_attribute_counts_grow() -> None:
    """A second MLP of the same size, whose norm folds without it."""
    kind = toy(
        lambda m, h: m.outer(torch.tanh(m.inner(m.after(h + mlp(m, h))))),
        inner=lambda size: nn.Linear(D, size),
        outer=lambda size: nn.Linear(size, 3),
    )
    first, second = planned(kind).plan.widened
    assert (first.second.parameter, first.subtracts) == ("second.weight", True)
    assert (second.second.parameter, second.subtracts) == ("outer.weight", False)
    assert {one.to for one in (first, second)} == {24}


def test_a_nested_config() -> None:
    kind = toy(size_of=lambda config: config.parts["mlp"])
    found = planned(kind, size=1, parts={"mlp": SIZE, "other": D})
    assert found.plan.settings == (Setting("parts.mlp", 24),)


COMPUTES: dict[str, type[Toy]] = {
    "as many are read": toy(partial(post_norm, act=lambda u: F.gelu(u)[..., :SIZE])),
    "divides by it": toy(lambda m, h: post_norm(m, h) * m.config.size**-0.5),
}


@pytest.mark.one_case
@pytest.mark.parametrize("case", COMPUTES)
def test_what_computes_with_the_number_of_hidden_units(case: str) -> None:
    """The model computes with the number of hidden units, so more of them change the result."""
    found = planned(COMPUTES[case])
    assert status(found) == "stays_layernorm" and not found.plan.widened


def test_a_size_in_a_shape() -> None:
    """The hidden size occurs in a shape only, and not in the computation."""

    def act(u: torch.Tensor) -> torch.Tensor:
        return F.gelu(u.reshape(-1, u.shape[-1])).view(u.shape)

    found = planned(toy(partial(post_norm, act=act)))
    assert status(found) == "in_weights" and found.plan.widened


@pytest.mark.parametrize("in_place", [True, False])
def test_an_input_that_is_changed_in_place_before_it_is_added(in_place: bool) -> None:
    """Its shapes depend on values, so it was recorded by example: units subtract another mean."""

    class Changed(toy()):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> Any:
            if x.abs().sum().item() < 1e-9:
                return x
            h = self.before(self.embed(x))
            added = mlp(self, h)
            if in_place:
                h[:, :, :1].mul_(2)
            return self.head(self.after(h + added))

    found = planned(Changed)
    assert status(found) == ("stays_layernorm" if in_place else "in_weights")
    assert bool(found.plan.widened) is not in_place
