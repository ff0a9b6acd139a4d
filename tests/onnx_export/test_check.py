"""Which error of an exported file passes, and which outputs it is relative to."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, MBartConfig, MBartForConditionalGeneration
from widening_cases import BART, BERT

from enjoyln_cli.comparison.metrics import distances
from enjoyln_cli.onnx_export.call import batches_of_other_sizes, call_to_export
from enjoyln_cli.onnx_export.check import (
    PROGRAM_RATIO,
    CheckedBatches,
    Reference,
    RuntimeCheck,
    batches_to_generate,
    check_in,
)
from enjoyln_cli.onnx_export.runtimes import RunProgram

SIZE = 1e-6
"""Relative rounding error of the original in torch."""


def with_error(exact: torch.Tensor, times: float, seed: int) -> dict[str, torch.Tensor]:
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(seed))
    return {"y": exact + times * SIZE * noise}


def check(file: float, original: float | None, in_torch: float) -> RuntimeCheck:
    """The result for a program that returns the exact outputs with errors of these sizes."""
    exact = torch.randn(64, 97, generator=torch.Generator().manual_seed(0)).double()
    own = distances([with_error(exact, in_torch, 3)], [{"y": exact}])
    inputs = CheckedBatches([{"x": torch.zeros(64, 3)}], ("y",))

    def in_program() -> RunProgram:
        assert original is not None
        return lambda batch: with_error(exact, original, 2)

    return check_in(
        "onnxruntime",
        lambda batch: with_error(exact, file, 1),
        in_program if original else None,
        Reference(inputs, [{"y": exact}], own),
        torch.float32,
        max_ratio=1.25,
    )


def test_an_original_that_overflows_passes_nothing() -> None:
    found = check(0.5, 0.5, float("inf"))
    assert "the original itself overflows" in found.failure


@pytest.mark.parametrize(
    ("file", "original", "measured_in", "passes"),
    [
        (1.1, 50.0, "torch", True),
        (3.0, 2.9, "onnxruntime", True),
        (3.0, 1.5, "onnxruntime", False),
        (0.9 * PROGRAM_RATIO, 0.9 * PROGRAM_RATIO, "onnxruntime", True),
        (300.0, 300.0, "torch", False),  # a program that computes something else
        (1.1, None, "torch", True),
        (3.0, None, "torch", False),  # the original itself
    ],
)
def test_a_program_may_round_more_than_torch_but_not_grossly(
    file: float, original: float | None, measured_in: str, passes: bool
) -> None:
    found = check(file, original, 1.0)
    assert found.original_ran_in == measured_in
    assert bool(found.failure) is not passes
    if not passes:
        assert "x the original's own (limit 1.25 x, or 1.3" in found.failure


def test_an_encoder_and_its_decoder_have_lengths_of_their_own() -> None:
    model = MBartForConditionalGeneration(MBartConfig(**BART)).eval()
    call = call_to_export(model, (), torch.float32)
    tokens = {0: "batch_size", 1: "sequence_length"}
    assert call.axes == {
        "input_ids": tokens,
        "attention_mask": tokens,
        "decoder_input_ids": {0: "batch_size", 1: "decoder_sequence_length"},
    }
    assert call.outputs == ("logits", "encoder_last_hidden_state")
    others = list(batches_of_other_sizes(model, call, torch.float32))
    assert all(batch.keys() == call.batch.keys() for batch in others)
    sizes = {batch["input_ids"].shape for batch in others}
    assert len(sizes) >= 3 and call.batch["input_ids"].shape not in sizes
    padded = others[-1]["attention_mask"]
    assert 0 < int(padded[-1].sum()) < padded.shape[1] and not padded[-1, 0] and padded[-1, -1]


def test_a_decoder_is_checked_without_token_types() -> None:
    """Its program takes none; with random types, BERT computes something else."""
    model = BertLMHeadModel(BertConfig(**BERT, is_decoder=True)).double().eval()
    call = call_to_export(model, (), torch.float64)
    assert "token_type_ids" in call.batch
    for batch in batches_to_generate(model, call, torch.float64, 0).batches:
        assert batch.keys() == {"input_ids", "attention_mask", "position_ids"}
