"""A captured graph is translated as it is, or traced again if it has to be; both compute right."""

from __future__ import annotations

import onnxruntime
import pytest
import torch
from torch import nn

from enjoyln_cli.onnx_export.exporting import captured, translated


class ByPosition(nn.Module):
    """Takes its inputs as one tuple, as the modules do that are exported."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(*inputs)  # type: ignore[no-any-return]


class Casts(nn.Module):
    """Casts, conjunctions and detached values, in operators that ``torch.onnx`` does not know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x.to(torch.float64) > 0) & (x.long() < 2) | (x == 0)
        fixed = torch.tensor([1.5]).detach_()
        return (x.detach().to("cpu") * fixed).to(x) + chosen.to(x.dtype)


class Differences(nn.Module):
    """Subtracts whole numbers from a number with a fraction, as masks are inverted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x > 0).long()
        return (1.0 - mask) * -1e4 + (2 - mask) + (0.5 - x)


class Writes(nn.Module):
    """Writes in place, into a value that others read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(x.dtype, copy=True)
        first = y[:, 0]
        y[:, 1:].add_(1)
        first.mul_(3)
        return y + first[:, None] + x.detach()


class Composed(nn.Module):
    """Is written in operators that are composed of others, which ``torch.onnx`` does not know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.tensor_split((2,), dim=1)
        return (first.swapaxes(0, 1).T @ second[:, :2].T.movedim(0, 1).mT).reshape_as(x @ x.T)


class Returns(nn.Module):
    """Returns what is renamed or left out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).to(torch.float32).detach()


class Branches(nn.Module):
    """Has a part of its graph in a module of its own, because of the gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = x.exp()
        return x.addcmul(y, x, value=0.5)


@pytest.mark.parametrize(
    ("module", "is_as_captured"),
    [
        (Casts(), True),
        (Returns(), True),
        (Composed(), True),
        (Differences(), True),
        (Writes(), False),
        (Branches(), False),
    ],
)
def test_the_program_computes_what_the_module_does(module: nn.Module, is_as_captured: bool) -> None:
    x = torch.randn(3, 5)
    with torch.no_grad():
        program = captured(ByPosition(module), (x,), ({0: "rows"},))
        assert (program.run_decompositions({}) is program) == is_as_captured
        written = translated(
            program,
            input_names=["x"],
            output_names=["y"],
            dynamic_shapes=(({0: "rows"},),),
            verbose=False,
        )
    assert written is not None
    session = onnxruntime.InferenceSession(written.model_proto.SerializeToString())
    for rows in (1, 3, 7):
        x = torch.randn(rows, 5).round(decimals=1)
        (found,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), module(x))
