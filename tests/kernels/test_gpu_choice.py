"""What computes a norm on a GPU: when it is measured, and what is chosen.

The measurements are handed in. What the kernel computes is in ``test_triton_norm``, and on a real
GPU in ``test_gpu``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from enjoyln_cli import from_pretrained, kernels
from enjoyln_cli.kernels import formula, gpu
from enjoyln_cli.kernels.gpu import Choice, Norms, Times, fastest
from enjoyln_cli.runtime.neutral import kinds_of_norms

KIND = Norms(torch.float32, torch.float32, True, True, 24)
SLOW, FAST = Times(10.0, 20.0), Times(5.0, 20.0)


def test_the_fastest_is_chosen_if_it_is_clearly_so() -> None:
    assert fastest({"layer_norm": SLOW, "kernel": FAST}) == "kernel"
    assert fastest({"layer_norm": FAST, "kernel": SLOW}) == "layer_norm"
    assert fastest({"layer_norm": SLOW, "kernel": Times(9.6, 20.0)}) == "layer_norm", "a margin"
    assert fastest({"layer_norm": SLOW, "rms_norm": FAST, "kernel": Times(4.9, 20)}) == "rms_norm"
    assert fastest({"layer_norm": SLOW, "kernel": Times(5.0, 22.0)}) == "layer_norm", "slow to call"
    assert fastest({}) == "layer_norm"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Norms, int]]:
    """A GPU on which the kernel is the fastest from 32 rows on; what was measured on it."""
    kinds: list[tuple[Norms, int]] = []

    def measure(device: torch.device, norms: Norms, rows: int) -> Choice:
        kinds.append((norms, rows))
        times = {"layer_norm": SLOW, "kernel": FAST if rows >= 32 else SLOW}
        left_out = {"rms_norm": "RuntimeError: not here"}
        return Choice(norms, rows, fastest(times), times, left_out)

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(gpu, "measured", {})
    monkeypatch.setattr(gpu, "fewest", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    return kinds


def on_gpu(*kinds: Norms) -> list[tuple[torch.device, Norms]]:
    return [(torch.device("cuda", 0), kind) for kind in kinds]


def test_each_kind_is_measured_once(asked: list[tuple[Norms, int]]) -> None:
    other = KIND._replace(width=32)
    kernels.prepare(on_gpu(KIND, KIND))
    kernels.prepare(on_gpu(KIND, other))
    assert asked == [(kind, rows) for kind in (KIND, other) for rows in gpu.ROWS]


def test_nothing_is_measured_where_it_should_not(
    asked: list[tuple[Norms, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.prepare([(torch.device(name), KIND) for name in ("cpu", "meta", "mps")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENJOYLN_KERNELS", "0")
        assert gpu.why_not_measured() == "switched off by ENJOYLN_KERNELS=0"
        kernels.prepare(on_gpu(KIND))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.why_not_measured() == "torch sees no GPU"
    kernels.prepare(on_gpu(KIND))
    assert not asked and not gpu.measured


def test_where_the_memory_is_not_enough_nothing_changes(
    asked: list[tuple[Norms, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = gpu.measure

    def full(device: torch.device, norms: Norms, rows: int) -> Choice:
        if rows > 32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(device, norms, rows)

    monkeypatch.setattr(gpu, "measure", full)
    kernels.prepare(on_gpu(KIND))
    (choices,) = gpu.measured.values()
    assert [choice.rows for choice in choices] == [1, 32]


def test_rows_use_the_measurement_of_as_many_or_fewer(
    asked: list[tuple[Norms, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, as if it were the GPU: the choice depends on a tensor's device and sizes."""
    kernels.prepare(on_gpu(KIND))
    monkeypatch.setattr(
        gpu, "measured", {(torch.device("cpu"), KIND): gpu.measured[on_gpu(KIND)[0]]}
    )
    weight, bias = torch.ones(24), torch.zeros(24)
    for rows, candidate in (
        (1, formula.layer_norm),
        (31, formula.layer_norm),
        (32, gpu.kernel_norm),
    ):
        assert gpu.fastest_for(torch.ones(rows, 24), weight, bias) is candidate
    assert gpu.fastest_for(torch.ones(10**5, 24), weight, bias) is gpu.kernel_norm
    assert gpu.fastest_for(torch.ones(5, 24), weight, None) is None, "another kind"


def test_tensors_too_small_for_any_choice_are_not_looked_up(
    asked: list[tuple[Norms, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.prepare(on_gpu(KIND, KIND._replace(width=48)))
    assert gpu.fewest == 32 * 24
    looked_up: list[int] = []

    def fastest_for(x: torch.Tensor, *parameters: object) -> gpu.Norm:
        looked_up.append(x.numel())
        return formula.layer_norm

    monkeypatch.setattr(gpu, "fastest_for", fastest_for)
    weight = torch.ones(24, device="meta")
    for rows in (31, 32):
        kernels.rms_norm(torch.ones(rows, 24, device="meta"), weight, weight, 1e-5)
    assert looked_up == [32 * 24]


def test_the_kinds_of_norms_of_a_model(outs: dict[str, Path]) -> None:
    model = from_pretrained(outs["phi merge bias"], dtype=torch.bfloat16)
    width = model.config.hidden_size
    found = kinds_of_norms(model)
    assert {device for device, _ in found} == {torch.device("cpu")}
    kinds = [kind for _, kind in found]
    biasless = Norms(torch.bfloat16, torch.bfloat16, True, False, width)
    assert kinds.count(biasless) == len(model.config.enjoyln["plan"]["fused"])
    heads = biasless._replace(bias=True, width=width // model.config.num_attention_heads)
    assert set(kinds) <= {biasless, biasless._replace(bias=True), heads} and heads in kinds
