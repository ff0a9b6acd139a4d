"""Which MLPs can subtract the mean of their residual input, and why others cannot."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from widening_cases import WIDEN

from enjoyln_cli.analysis.analyze import Analysis, analyze_module
from enjoyln_cli.plan.mean_units import UNITS, read_by_units, written_by_units
from enjoyln_cli.plan.plan import Options, Setting

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


class Toy(nn.Module):
    """``head(LN(h + second(act(first(h)))))`` of ``h = LN(embed(x))``, or a variation."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Linear(7, D)
        self.before = nn.LayerNorm(D)
        self.first = nn.Linear(D, config.size)
        self.second = nn.Linear(config.size, D)
        self.after = nn.LayerNorm(D)
        self.head = nn.Linear(D, 3)

    def act(self, u: torch.Tensor) -> torch.Tensor:
        return F.gelu(u)

    def mlp(self, h: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(self.first(h)))

    def forward(self, x: torch.Tensor) -> Any:
        h = self.before(self.embed(x))
        return self.head(self.after(h + self.mlp(h)))


def planned(kind: type[Toy], options: Options = WIDEN, **config: Any) -> Analysis:
    torch.manual_seed(0)
    model = kind(SimpleNamespace(**{"size": SIZE, **config}))
    return analyze_module(model, torch.randn(2, 5, 7), options=options)


def status(found: Analysis, norm: str = "after") -> str:
    return next(v.status for v in found.plan.norms if v.norm == norm)


def reason(found: Analysis, norm: str = "after") -> str:
    verdict = next(v for v in found.plan.norms if v.norm == norm)
    assert verdict.status == "kept", f"{norm} folds"
    assert not found.plan.widened and not found.plan.settings
    return verdict.reason


def test_the_norm_after_an_mlp_folds_only_when_asked_for() -> None:
    plain, wider = planned(Toy, Options()), planned(Toy)
    assert status(plain) == "kept" and not plain.plan.widened
    assert status(wider) == "static" and not wider.plan.ops
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
    found = planned(Toy, Options(widen_mlp=True, widen_to=multiple), size=size)
    assert [one.to for one in found.plan.widened] == [to]


def test_why_names_the_mlp() -> None:
    tree = planned(Toy).why("after")
    texts = [child.text for child in tree.children[0].children]
    assert tree.zero_mean
    assert any("its mean is subtracted by hidden units of second.weight" in text for text in texts)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu spelled out": lambda u: 0.5 * u * (1 + torch.tanh(0.8 * (u + 0.04 * torch.pow(u, 3)))),
    "relu": F.relu,
    "silu": F.silu,
    "in another dtype": lambda u: F.dropout(F.silu(u.float()).to(u.dtype), 0.1, False),
}
OTHERS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
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
    kind = type("Other", (Toy,), {"act": lambda self, u: ACTIVATIONS[name](u)})
    assert status(planned(kind)) == "static"


@pytest.mark.one_case
@pytest.mark.parametrize("name", OTHERS)
def test_activations_that_do_not(name: str) -> None:
    act, named = OTHERS[name]
    kind = type("Other", (Toy,), {"act": lambda self, u: act(u)})
    found = reason(planned(kind))
    assert "the MLP cannot subtract it: " in found
    assert "act(u) - act(-u) = " in found and named in found


class Learned(Toy):
    """An activation with its own weight does not treat all elements alike."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(config)
        self.slope = nn.Parameter(torch.ones(config.size))

    def act(self, u: torch.Tensor) -> torch.Tensor:
        return F.gelu(u) * self.slope


class Gated(Toy):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(config)
        self.gate = nn.Linear(D, config.size)

    def mlp(self, h: torch.Tensor) -> torch.Tensor:
        return self.second(F.silu(self.gate(h)) * self.first(h))


class GatedInOne(Toy):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(config)
        self.first = nn.Linear(D, 2 * config.size)

    def mlp(self, h: torch.Tensor) -> torch.Tensor:
        gate, up = self.first(h).chunk(2, -1)
        return self.second(F.silu(gate) * up)


class ReadHidden(Toy):
    def forward(self, x: torch.Tensor) -> Any:
        h = self.before(self.embed(x))
        hidden = F.gelu(self.first(h))
        return self.head(self.after(h + self.second(hidden))), hidden.amax(-1)


class ReadWeight(Toy):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.first.weight.sum()


class Seen(Toy):
    def forward(self, x: torch.Tensor) -> Any:
        h = self.before(self.embed(x))
        total = h + self.mlp(h)
        return self.head(self.after(total)), total


class SeenElsewhere(Toy):
    """The MLP's output is also normalised by itself, and the units would give it a mean."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(config)
        self.alone = nn.LayerNorm(D)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.before(self.embed(x))
        value = self.mlp(h)
        return self.head(self.after(h + value)), self.alone(value)


class Uncounted(Toy):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(SimpleNamespace(size=SIZE))
        self.config = SimpleNamespace(other=SIZE)


class CountedTwice(Toy):
    """The attribute is also the size of something else."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(config)
        self.head = nn.Linear(D, config.size)


class Scaled(Toy):
    """Half of the MLP's output is added, so half of the mean would be subtracted."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.before(self.embed(x))
        return self.head(self.after(h + 0.5 * self.mlp(h)))


class Elsewhere(Toy):
    """The MLP is added to another value than the one that it reads."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.before(self.embed(x))
        return self.head(self.after(h + self.mlp(h.tanh())))


class Turned(Toy):
    """Added to the same value with its rows in another order."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.before(self.embed(x))
        return self.head(self.after(h.transpose(0, 1) + self.mlp(h).view(5, 2, D)))


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Gated, "it is gated"),
        (GatedInOne, "it is gated"),
        (ReadHidden, "its hidden values are read by amax too"),
        (ReadWeight, "one of its weights is also used elsewhere"),
        (Seen, "a shift of its output would be noticed (the model returns it)"),
        (Uncounted, "no attribute of the config sets its number of hidden units and nothing else"),
        (
            CountedTwice,
            "no attribute of the config sets its number of hidden units and nothing else",
        ),
    ],
)
def test_refused_with_the_reason(kind: type[Toy], why: str) -> None:
    assert f"and the MLP cannot subtract it: {why}" in reason(planned(kind))


@pytest.mark.one_case
@pytest.mark.parametrize("kind", [Learned, SeenElsewhere, Scaled, Elsewhere, Turned])
def test_what_is_no_mlp_that_is_added_to_what_it_reads(kind: type[Toy]) -> None:
    assert reason(planned(kind)) == "the output of a LayerNorm with weights is not zero-mean"


class PreNorm(Toy):
    """The MLP is not added to the value that it reads, and the norm folds without it."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.embed(x)
        return self.head(self.after(h + self.mlp(self.before(h))))


def test_a_pre_norm_block_needs_no_wider_mlp() -> None:
    found = planned(PreNorm).plan
    assert len(found.folded) == 2 and not found.widened and not found.settings


class Shared(Toy):
    """One MLP, called three times; ``after`` sees its sums and nothing else."""

    last = True

    def forward(self, x: torch.Tensor) -> Any:
        h = self.before(self.embed(x))
        for _ in range(2):
            h = self.after(h + self.mlp(h))
        return self.head(self.after(h + self.mlp(h)) if self.last else h + self.mlp(h))


class SharedAndSeen(Shared):
    last = False


def test_all_calls_of_a_shared_mlp_are_one() -> None:
    found = planned(Shared).plan
    assert len(found.folded) == 2 and len(found.widened) == 1
    assert "a shift of its output would be noticed" in reason(planned(SharedAndSeen))


class Two(Toy):
    """A second MLP of the same size, whose norm folds without it."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(config)
        self.inner, self.outer = nn.Linear(D, config.size), nn.Linear(config.size, 3)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.before(self.embed(x))
        h = self.after(h + self.mlp(h))
        return self.outer(torch.tanh(self.inner(h)))


def test_all_mlps_that_the_attribute_counts_grow() -> None:
    first, second = planned(Two).plan.widened
    assert (first.second.parameter, first.subtracts) == ("second.weight", True)
    assert (second.second.parameter, second.subtracts) == ("outer.weight", False)
    assert {one.to for one in (first, second)} == {24}


def test_a_nested_config() -> None:
    class Nested(Toy):
        def __init__(self, config: SimpleNamespace) -> None:
            super().__init__(SimpleNamespace(size=config.parts["mlp"]))
            self.config = config

    found = planned(Nested, size=1, parts={"mlp": SIZE, "other": D})
    assert found.plan.settings == (Setting("parts.mlp", 24),)


class Cut(Toy):
    def act(self, u: torch.Tensor) -> torch.Tensor:
        return F.gelu(u)[..., :SIZE]


class Divided(Toy):
    """The config's number of hidden units also sets something else."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.config.size**-0.5


class Viewed(Toy):
    """The hidden size occurs in a shape only, and not in the computation."""

    def act(self, u: torch.Tensor) -> torch.Tensor:
        return F.gelu(u.reshape(-1, u.shape[-1])).view(u.shape)


@pytest.mark.one_case
@pytest.mark.parametrize("kind", [Cut, Divided])
def test_what_computes_with_the_number_of_hidden_units(kind: type[Toy]) -> None:
    """The model computes with the number of hidden units, so more of them change the result."""
    found = planned(kind)
    assert status(found) == "kept" and not found.plan.widened


def test_a_size_in_a_shape() -> None:
    found = planned(Viewed)
    assert status(found) == "static" and found.plan.widened


@pytest.mark.parametrize("in_place", [True, False])
def test_an_input_that_is_changed_in_place_before_it_is_added(in_place: bool) -> None:
    """Its shapes depend on values, so it was recorded by example: units subtract another mean."""

    class Changed(Toy):
        def forward(self, x: torch.Tensor) -> Any:
            if x.abs().sum().item() < 1e-9:
                return x
            h = self.before(self.embed(x))
            added = self.mlp(h)
            if in_place:
                h[:, :, :1].mul_(2)
            return self.head(self.after(h + added))

    found = planned(Changed)
    assert status(found) == ("kept" if in_place else "static")
    assert bool(found.plan.widened) is not in_place
