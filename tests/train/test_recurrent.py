"""Recurrent layers (Enjoy-LN, appendix C.2.1) while training.

A norm of the pre-activations ``W_v x + W_h h`` of a recurrent cell is trained as RMSNorm. A norm of
what ``nn.RNN``, ``nn.LSTM`` or ``nn.GRU`` returns is not: that has passed an activation function.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from live_models import moved
from torch import nn
from training import differences, square_loss

from enjoyln_cli.errors import NothingToFold
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.train import reparametrize

EXACT = 1e-11


class Cell(nn.Module):
    """A recurrent layer with the weights ``W_v`` and ``W_h`` of all gates, and a head."""

    def __init__(self, gates: int, norm: int) -> None:
        super().__init__()
        self.reads = nn.Linear(5, gates * 6)
        self.recurs = nn.Linear(6, gates * 6, bias=False)
        self.norm, self.head = nn.LayerNorm(norm), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[:, 0, :1]).expand(-1, 6)
        memory = state
        for step in x.unbind(1):
            state, memory = self.step(self.reads(step), self.recurs(state), state, memory)
        return self.head(state)

    def step(
        self, read: torch.Tensor, recurrent: torch.Tensor, state: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError


class Lstm(Cell):
    """One norm for all gates together."""

    def step(self, read: Any, recurrent: Any, state: Any, memory: Any) -> Any:
        i, f, g, o = self.norm(read + recurrent).chunk(4, -1)
        memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
        return o.sigmoid() * memory.tanh(), memory


class Gru(Cell):
    """What is read and what recurs are normed apart, as the reset gate needs it."""

    def step(self, read: Any, recurrent: Any, state: Any, memory: Any) -> Any:
        one, other = (self.norm(part.unflatten(-1, (3, 6))) for part in (read, recurrent))
        r, z = (one[:, :2] + other[:, :2]).sigmoid().unbind(1)
        n = (one[:, 2] + r * other[:, 2]).tanh()
        return (1 - z) * n + z * state, memory


@pytest.fixture(scope="module")
def sequences() -> list[torch.Tensor]:
    torch.manual_seed(6)
    return [torch.randn(3, 3, 5, dtype=torch.float64) + 0.3 for _ in range(3)]


@pytest.mark.parametrize(
    ("cell", "axis"),
    [(Lstm(4, 24), Axis(0, 0, 1, 24, 1)), (Gru(3, 6), Axis(0, 0, 3, 6, 1))],
    ids=["lstm, all gates", "gru, gate by gate"],
)
def test_norms_of_pre_activations_train_as_with_layer_norm(
    cell: Cell, axis: Axis, sequences: list[torch.Tensor]
) -> None:
    losses, weights, plan = differences(
        moved(cell), square_loss, sequences, "AdamW", example=sequences[0]
    )
    assert [verdict.status for verdict in plan.norms] == ["in_weights"]
    centred = {writer.parameter: writer.axis for writer in plan.centred_weights}
    assert centred == dict.fromkeys(["reads.weight", "reads.bias", "recurs.weight"], axis)
    assert losses < EXACT and weights < EXACT


class Behind(nn.Module):
    """A norm behind one of torch's recurrent layers."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.recurrent = getattr(nn, kind)(5, 6, batch_first=True, **options)
        self.norm = nn.LayerNorm(options.get("proj_size", 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.recurrent(x)[0])


@pytest.mark.parametrize(
    ("kind", "options", "op"),
    [("RNN", {}, "rnn_tanh"), ("LSTM", {"proj_size": 4}, "lstm"), ("GRU", {}, "gru")],
)
def test_norms_of_what_a_recurrent_layer_returns_are_refused(
    kind: str, options: dict[str, Any], op: str, sequences: list[torch.Tensor]
) -> None:
    with pytest.raises(NothingToFold, match=rf"norm: {op} does not keep .* \(recurrent\)"):
        reparametrize(moved(Behind(kind, **options)), example=sequences[0])
