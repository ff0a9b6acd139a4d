"""Running a model to compare its outputs."""

from __future__ import annotations

import torch
import transformers
from tiny_models import live

from enjoyln_cli.comparison.run import run


def test_a_model_that_draws_random_numbers_is_compared() -> None:
    """ViTMAE masks three quarters of the patches at random; the caller's numbers stay apart."""
    config = transformers.ViTMAEConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
        image_size=32, patch_size=8,
    )  # fmt: skip
    model = live("ViTMAEModel", config)
    batch = {"pixel_values": torch.rand(2, 3, 32, 32)}
    drawn = torch.random.get_rng_state()
    outputs = run(model, [batch, batch])
    assert torch.equal(torch.random.get_rng_state(), drawn)
    exact = run(model.double(), [batch])[0]["last_hidden_state"]
    for output in outputs:
        torch.testing.assert_close(output["last_hidden_state"].double(), exact, rtol=0, atol=1e-4)
