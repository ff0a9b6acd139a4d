"""In-place writes: values that a write may change are not used in a proof."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding_live import VOCAB, Computing, D, fold_in_place, ids, randomised
from torch import nn

from enjoyln_cli.analysis.analyze import analyze_module

SEEN: list[torch.Tensor] = []


class Recorded(nn.Module):
    """A model whose shapes depend on input values, so that it is recorded and not exported."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.emb, self.norm, self.how = nn.Embedding(VOCAB, D), nn.LayerNorm(D), how
        self.gain = nn.Parameter(torch.zeros(D))
        self.table = nn.Parameter(torch.zeros(VOCAB, D))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = int((tokens >= 0).sum(-1).max())
        x = self.emb(tokens[:, :length])
        return self.norm(getattr(self, self.how)(x, tokens))

    def nothing(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return x

    def residual(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        y = F.embedding(tokens, self.table)
        y += x
        return y

    def into_the_only_view(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        y = F.embedding(tokens, self.table).unsqueeze(-1).squeeze(-1)
        y += x
        return y

    def into_one_of_two_views(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        whole = x.clone()
        view = whole.unsqueeze(-1).squeeze(-1)
        view += self.gain.square()
        return whole.detach() + self.gain * view

    def ids_before(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        cleaned = tokens.clone()
        cleaned[cleaned == 3] = 0
        return x + F.embedding(cleaned, self.table)

    def into_parts(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(x.shape)
        y[:, 1:] = x[:, 1:]
        y[:, 0] = x[:, 0]
        return y

    def onto_a_part(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        y = F.embedding(tokens, self.table)
        y[:, 1:-1:2] += x[:, 1:-1:2]
        return y + x

    def after_a_view(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        first = y[:, :1] + x[:, :1]
        y[:, torch.arange(x.shape[1])] = x
        return y + first

    def masked(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        y = F.embedding(tokens, self.table) + x
        y.masked_fill_((tokens == 3)[..., None], 0.0)
        return y

    def onto_a_part_of_the_features(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[..., 1:] += x[..., :-1]
        return y

    def onto_a_part_that_an_earlier_view_shows(
        self, x: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        y = x.clone()
        view = y[:, 1:]
        y[:, 2:] *= self.gain
        return torch.cat((x[:, :1], view), 1)

    def onto_a_part_of_a_part(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        part = y[:, 1:]
        part[:, 0] *= self.gain
        return y

    def onto_a_part_that_is_written_again(
        self, x: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        y = x.clone()
        part = y[:, 1:]
        part += x[:, :-1]
        part *= self.gain
        return y

    def between(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = x.tanh()
        mean = x.mean(-1, keepdim=True)
        x.mul_(self.gain)
        return x - mean

    def between_by_another_view(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        whole = x.tanh()
        x, other = whole.view(-1, D), whole.flatten()
        mean = x.mean(-1, keepdim=True)
        other[::2] = 1.0
        return (x - mean).view_as(whole)

    def between_by_out(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = x.tanh()
        mean = x.mean(-1, keepdim=True)
        torch.mul(x, self.gain, out=x)
        return x - mean

    def written_mean(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = x.tanh()
        mean = x.mean(-1, keepdim=True)
        mean[:, 0] += 1.0
        return torch.cat([x, x], -1)[..., :D] - mean + x.detach() * self.gain

    def index(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        places = (tokens % 2).unsqueeze(-1).repeat(1, 1, D)
        places[..., 0] = 2
        return x.gather(1, places)

    def mask(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        places = (tokens > 4).unsqueeze(-1).repeat(1, 1, D)
        places[..., 1:3] = True
        return x.masked_scatter(places, self.table[:, None].expand(-1, 9, -1).reshape(-1, 1, D))

    def parameter(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        self.emb.weight[2].fill_(0.3)
        return x

    def kept(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        self.norm(x)
        SEEN[:] = [x]
        x.mul_(self.gain)
        return x

    def through_a_list(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        parts = list(x.unbind(1))
        y = x + F.embedding(tokens, self.table)
        parts[1].mul_(self.gain)
        return x + y

    def forget(self) -> None:
        SEEN.clear()


FOLDING = [
    "nothing", "residual", "into_the_only_view", "ids_before", "into_parts", "onto_a_part",
    "after_a_view", "masked",
]  # fmt: skip
WRITING = [
    "onto_a_part_of_the_features", "onto_a_part_that_an_earlier_view_shows",
    "onto_a_part_of_a_part", "onto_a_part_that_is_written_again",
    "between", "between_by_another_view", "between_by_out", "into_one_of_two_views",
    "written_mean", "index", "mask", "parameter", "kept", "through_a_list",
]  # fmt: skip


@pytest.mark.parametrize("how", FOLDING)
def test_writes_without_effect_on_the_norm_do_not_matter(how: str) -> None:
    model = randomised(Recorded(how))
    assert analyze_module(model, ids()).plan.by_example
    found = fold_in_place(model, ids())
    assert found.folded == {"norm"} and found.error < 1e-12


def test_padding_makes_a_tensor_of_its_own() -> None:
    """What the norm returns is shifted by one token, and the first is written (as RWKV does)."""

    def run(m: Any, tokens: torch.Tensor) -> torch.Tensor:
        normed = m.norm(m.emb(tokens))
        shifted = F.pad(normed, (0, 0, 1, -1))
        shifted[:, 0] = 0.5
        return normed * shifted

    model = Computing(run, emb=nn.Embedding(VOCAB, D), norm=nn.LayerNorm(D))
    found = fold_in_place(randomised(model), ids())
    assert found.folded == {"norm"} and found.error < 1e-12


@pytest.mark.parametrize("how", WRITING)
def test_a_written_value_is_not_used_in_a_proof(how: str) -> None:
    model = randomised(Recorded(how))
    with torch.no_grad():
        model(ids())  # its first call writes once and for all
    found = fold_in_place(model, ids())
    assert found.error < 1e-12 and not found.folded


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_parameter_that_is_written_under_another_name(dynamic: bool) -> None:
    """Two parameters share one memory, and a call writes to one of them."""

    def run(m: Any, tokens: torch.Tensor) -> torch.Tensor:
        length = int((tokens >= 0).sum(-1).max()) if dynamic else tokens.shape[1]
        m.other[1:4, :3] = 0.7
        return m.norm(m.emb(tokens[:, :length]))

    parts = {"emb": nn.Embedding(VOCAB, D), "norm": nn.LayerNorm(D)}
    other = nn.Parameter(torch.zeros(VOCAB, D))
    model: Any = randomised(Computing(run, **parts, other=other))
    model.other.data = model.emb.weight.data
    found = fold_in_place(model, ids())
    assert found.error < 1e-12 and not found.folded


class Copying(nn.Module):
    """Copies something over rows of another tensor: ``what`` is copied, or written into.

    A "result" is copied after the norm, a "source" is the norm's input, and the memory of an
    "operand" is returned by an einsum, and written.
    """

    def __init__(self, how: str, dynamic: bool, what: str) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(VOCAB, D), nn.LayerNorm(D)
        self.weight, self.store = nn.Parameter(torch.zeros(D, D)), nn.Parameter(torch.zeros(D))
        self.how, self.dynamic, self.what = how, dynamic, what

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = int((tokens >= 0).sum(-1).max()) if self.dynamic else tokens.shape[1]
        x = self.emb(tokens[:, :length])
        if self.what == "operand":
            self.copy(torch.einsum("btd->btd", x), x.tanh())
            return self.norm(x)
        store = self.store.expand(len(x), length + 1, -1).clone()
        y = self.norm(x)
        self.copy(
            store, x if self.what == "source" else torch.einsum("btd,de->bte", y, self.weight)
        )
        return store * 2

    def copy(self, into: torch.Tensor, rows: torch.Tensor) -> None:
        if self.how == "copy":
            into[:, : rows.shape[1]].copy_(rows)
        else:
            into[:, torch.arange(rows.shape[1])] = rows


COPIES = [("copy", False), ("index_put", False), ("copy", True)]
"""Two in an exported graph, and one in a recorded graph, where the same code finds it."""


@pytest.mark.parametrize(("how", "dynamic"), COPIES)
def test_what_is_copied_elsewhere_is_not_written(how: str, dynamic: bool) -> None:
    model = randomised(Copying(how, dynamic, "result"))
    assert bool(analyze_module(model, ids()).plan.by_example) == dynamic
    found = fold_in_place(model, ids())
    assert found.folded == {"norm"} and found.error < 1e-12


@pytest.mark.parametrize(("how", "dynamic"), COPIES)
@pytest.mark.parametrize("what", ["source", "operand"])
def test_what_is_seen_in_a_copy_or_written_stays(how: str, dynamic: bool, what: str) -> None:
    found = fold_in_place(randomised(Copying(how, dynamic, what)), ids())
    assert found.error < 1e-12 and not found.folded


class CastBack(nn.Module):
    """A norm that computes in float32; in a float32 model its casts change nothing."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given, x = x.dtype, x.to(torch.float32)
        mean = x.mean(-1, keepdim=True)
        x = (x - mean) * torch.rsqrt((x - mean).pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight.to(torch.float32) * x).to(given)


def test_a_norm_that_casts_back_is_found_in_a_decomposed_graph() -> None:
    """A write to memory that two tensors share has to be decomposed."""

    def run(m: Any, ids: torch.Tensor) -> torch.Tensor:
        result = torch.zeros(*ids.shape, 5)
        result.transpose(0, 1).copy_(m.head(m.norm(m.emb(ids))).transpose(0, 1))
        result.view(-1).add_(1.0)
        return result

    parts = {"emb": nn.Embedding(20, 12), "norm": CastBack(12), "head": nn.Linear(12, 5)}
    plan = analyze_module(Computing(run, **parts).eval(), torch.arange(12).reshape(2, 6)).plan
    assert [verdict.norm for verdict in plan.folded] == ["norm"]
