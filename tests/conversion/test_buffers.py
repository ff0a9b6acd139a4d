"""A checkpoint that stores a buffer which is added to the stream, folded on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from custom_code import custom_checkpoint
from live_models import literally
from rounding import relative
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import enjoyln_cli

OWN = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, hidden_size=18, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size, self.hidden_size = 50, hidden_size

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        d = config.hidden_size
        self.embed, self.head, self.batch = nn.Embedding(50, d), nn.Linear(d, 50), nn.BatchNorm1d(d)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 21), nn.GELU(), nn.Linear(21, d))
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(d)
        self.register_buffer("positions", torch.zeros(40, d))
        self.post_init()

    def forward(self, input_ids, attention_mask=None, **kwargs):
        x = self.embed(input_ids) + self.positions[: input_ids.shape[1]]
        for layer in self.layers:
            x = x + layer(x)
        return CausalLMOutput(logits=self.head(self.batch(self.norm(x).mT).mT))
"""


def checkpoint(folder: Path) -> Path:
    """The model in bfloat16."""

    def fill(model: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if tensor.is_floating_point():
                    tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator) + 0.2)
                    if name.endswith("running_var"):
                        tensor.abs_()
        return model.bfloat16()

    return custom_checkpoint(folder, OWN, fill=fill)


@pytest.mark.slow
def test_the_buffer_in_the_file_is_centred_and_checked(tmp_path: Path) -> None:
    source, out = checkpoint(tmp_path / "source"), tmp_path / "out"
    result = enjoyln_cli.fold(source, out, trust_remote_code=True)
    assert len(result.plan.folded) == len(result.plan.norms) == 3 and not result.plan.subtractions
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    table = before["positions"].double()
    assert torch.equal(after["positions"], (table - table.mean(-1, keepdim=True)).bfloat16())
    assert torch.equal(after["batch.running_mean"], before["batch.running_mean"])
    assert enjoyln_cli.verify(out, trust_remote_code=True, write=False).passed

    load: dict[str, Any] = {"trust_remote_code": True, "dtype": torch.float64}
    original: Any = AutoModelForCausalLM.from_pretrained(source, **load)
    model, ids = enjoyln_cli.from_pretrained(out, **load), torch.arange(24).reshape(3, 8)
    with torch.no_grad(), literally():
        error = relative(model(ids).logits, original(ids).logits)
        assert error < 0.02
        model.positions += 1.5  # a mean: the output is still right, since norms are LayerNorm now
        with pytest.warns(UserWarning, match="positions: its mean is"):
            assert relative(model(ids).logits, original(ids).logits) <= error + 1e-9
