"""Large weights are stored as products need them, unless something else reads them as well."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir
import onnxruntime
import torch
from torch import nn

from enjoyln_cli.onnx_export.onnx_program import fold_transposed_weights

WIDTH = 96


class Tied(nn.Module):
    """Two layers of their own, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3000, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4096, bias=False), nn.Linear(4096, WIDTH)
        self.head = nn.Linear(WIDTH, 3000, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.table(ids))))


def test_only_the_weights_of_one_layer_are_stored_transposed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, ids = Tied().eval(), torch.arange(12).reshape(2, 6)
    made: Any = torch.onnx.export(model, (ids,), dynamo=True, verbose=False, optimize=False)
    program = made.model
    before = Counter(node.op_type for node in program.graph)
    fold_transposed_weights(program)
    after = Counter(node.op_type for node in program.graph)
    assert (before["Transpose"], after["Transpose"]) == (3, 1)
    assert before - Counter(Transpose=3) == after - Counter(Transpose=1)
    onnx_ir.save(program, tmp_path / "folded.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "folded.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model(ids), rtol=1e-4, atol=1e-4)
