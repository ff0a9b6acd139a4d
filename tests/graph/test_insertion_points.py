"""Where a mean can be subtracted: behind a leaf, in front of a block, or in front of any call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from folding_live import Computing
from live_models import install, literally, moved
from rounding import as_exact
from tiny_models import converted
from torch import nn

from enjoyln_cli.analysis.analyze import analyze_module

WIDTH, TOKENS = 14, 9


class Attention(nn.Module):
    """Has its own norm, and heads that are spelled out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return self.out((q @ k.mT / WIDTH**0.5).softmax(-1) @ v)


class Transformer(nn.Module):
    """Calls the parts of its layer, and not the layer as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        mlp = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 17), nn.GELU(), nn.Linear(17, WIDTH)]
        self.layer = nn.ModuleList([Attention(), nn.Sequential(*mlp)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.layer:
            x = part(x) + x
        return self.norm(x)


def positions(count: int) -> torch.Tensor:
    angles = torch.arange(count)[:, None] / torch.arange(1, WIDTH // 2 + 1)
    return torch.cat((angles.sin(), angles.cos()), dim=1)


class Encoder(nn.Module):
    """Adds a table of positions in ``forward``, which has a mean over the features."""

    def __init__(self, table: str, embed: nn.Module) -> None:
        super().__init__()
        self.table, self.embed, self.encode = table, embed, Transformer()
        self.head = nn.Linear(WIDTH, 3)
        if table == "constant":
            self.positions = positions(TOKENS)
        elif table != "computed":
            self.register_buffer("positions", positions(TOKENS), persistent=table == "stored")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        table = positions(x.shape[1]) if self.table == "computed" else self.positions
        return self.head(self.encode(x + table.to(x.device, dtype=x.dtype)).mean(1))


@pytest.mark.parametrize(
    ("table", "normed"),
    [("not stored", False), ("computed", True), ("stored", True)],
)
def test_a_mean_is_subtracted_before_a_call_of_no_block(table: str, normed: bool) -> None:
    embed = nn.Linear(5, WIDTH)
    stem = nn.Sequential(embed, nn.LayerNorm(WIDTH)) if normed else embed
    model, x = moved(Encoder(table, stem)), torch.randn(2, TOKENS, 5, dtype=torch.float64)
    plan = analyze_module(model, x).plan
    ops = [("encode", "input")]
    if table == "stored":  # and so centred in the file
        ops = [("embed.1", "output")] if normed else []
    assert [(op.module, op.place) for op in plan.subtractions] == ops
    assert len(plan.folded) == len(plan.norms) == 3 + normed
    folded = converted(model, plan)
    with torch.no_grad(), literally():
        expected = model(x)
        assert as_exact(folded(x), expected, expected)
        install(model, [v.norm for v in plan.folded], (), covered=plan.covered)  # no subtraction
        assert not torch.allclose(model(x), expected, rtol=1e-3)


@pytest.mark.parametrize("table", ["constant", "stored"])
def test_without_a_call_only_a_stored_table_is_centred(table: str) -> None:
    """No module gets the whole sum, so there is no place for a subtraction."""

    class Flat(Encoder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            x = x + self.positions.to(x.device, dtype=x.dtype)
            for part in self.encode.layer:
                x = part(x) + x
            return self.head(self.encode.norm(x).mean(1))

    model, x = moved(Flat(table, nn.Linear(5, WIDTH))), torch.randn(2, TOKENS, 5).double()
    plan = analyze_module(model, x).plan
    assert not plan.subtractions and len(plan.folded) == (3 if table == "stored" else 0)
    assert all(v.reason.startswith("it is an input or a constant") for v in plan.kept)


def test_a_leaf_or_a_block_is_preferred() -> None:
    """The same value leaves a leaf, enters a wrapper, and enters the wrapper's first block."""

    def block() -> nn.Module:
        def run(m: Any, x: torch.Tensor) -> torch.Tensor:
            x = x + m.attention(x)
            return x + m.mlp(m.norm(x))

        mlp = nn.Linear(WIDTH, WIDTH)
        return Computing(run, attention=Attention(), norm=nn.LayerNorm(WIDTH), mlp=mlp)

    def model(run: Any, stem: nn.Module) -> nn.Module:
        encode = Computing(lambda m, x: m.blocks(x), blocks=nn.Sequential(block(), block()))
        return moved(Computing(run, stem=stem, encode=encode, norm=nn.LayerNorm(WIDTH)))

    def gated(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.norm(m.encode(m.stem(x) * m.stem(x).sigmoid()))

    def leaf(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.norm(m.encode(m.stem(x)))

    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    (op,) = analyze_module(model(gated, nn.Linear(WIDTH, WIDTH)), x).plan.subtractions
    assert (op.module, op.place) == ("encode.blocks.0", "input")
    (op,) = analyze_module(model(leaf, nn.LayerNorm(WIDTH)), x).plan.subtractions
    assert (op.module, op.place) == ("stem", "output")
