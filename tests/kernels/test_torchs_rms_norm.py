"""Where torch computes RMSNorm in one kernel, a norm without a bias is that, as on a GPU.

The device is simulated: the CPU is said to have such a kernel.
Rows with a mean tell RMSNorm and LayerNorm apart.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from live_models import CHECKPOINTS
from rounding import as_exact, in_float64
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from enjoyln_cli import from_pretrained, kernels
from enjoyln_cli.kernels import formula, norms
from enjoyln_cli.runtime.modules import Folded

WIDTH, EPS = 33, 1e-5


@pytest.fixture
def fusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is a device where torch fuses RMSNorm."""
    monkeypatch.setattr(norms, "torch_fuses", lambda device: device == "cpu")


def affine(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(WIDTH).to(dtype), torch.randn(WIDTH).to(dtype)


def computed(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> str:
    """Which of the two norms ``kernels.rms_norm`` computes of rows with a mean."""
    x = x + 2
    found = kernels.rms_norm(x, weight, bias, EPS).double()
    wide = [None if t is None else t.double() for t in (weight, bias)]
    norm = F.layer_norm(x.double(), (WIDTH,), *wide, EPS)
    rms = F.rms_norm(x.double(), (WIDTH,), wide[0], EPS) + (0 if bias is None else wide[1])
    names = {"LayerNorm": norm, "RMSNorm": rms}
    (name,) = (n for n, y in names.items() if (found - y).abs().max() < 0.05 * y.abs().max())
    return name


@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_norm_without_a_bias_is_torchs_rms_norm(dtype: torch.dtype) -> None:
    weight, _ = affine(dtype)
    x = torch.randn(5, WIDTH).to(dtype)
    assert computed(x, weight, None) == computed(x, None, None) == "RMSNorm"


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu"])
def test_each_type_of_gpu_takes_the_same_path(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a device that is not here; torch calls ROCm's ``cuda``, too."""
    monkeypatch.setattr(norms, "torch_fuses", lambda found: found == device)
    with FakeTensorMode():
        x, half = (torch.empty(5, WIDTH, device=device, dtype=t) for t in (None, torch.half))
        weight, bias = (torch.empty(WIDTH, device=device) for _ in range(2))
        other = torch.empty(5, WIDTH, device="meta")
        for parameter in (weight, None):
            assert norms._chosen(x, parameter, None, False) is formula.torch_rms_norm
        assert norms._chosen(x, weight, bias, False) is formula.layer_norm
        assert norms._chosen(half, weight, None, False) is formula.layer_norm
        assert norms._chosen(other, None, None, False) is formula.layer_norm


@pytest.mark.parametrize("fuses", [True, False])
def test_in_training_it_has_the_gradient_of_rms_norm(
    fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows with a mean, for which it is taken literally."""
    monkeypatch.setattr(norms, "torch_fuses", lambda device: fuses)
    weight, bias = (t.requires_grad_() for t in affine())
    x = (torch.randn(5, WIDTH) + 2).requires_grad_()
    dy = torch.randn(5, WIDTH)
    with Norms() as counted:
        y = kernels.rms_norm(x, weight, bias, EPS, literal=True)
        found = torch.autograd.grad(y, (x, weight, bias), dy)
    assert counted.count == 0
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    exact = torch.autograd.grad(F.rms_norm(wide[0], (WIDTH,), wide[1], EPS) + wide[2], wide, dy)
    torchs = torch.autograd.grad(F.rms_norm(x, (WIDTH,), weight, EPS) + bias, (x, weight, bias), dy)
    assert all(map(as_exact, found, torchs, exact))


@pytest.mark.usefixtures("fusing")
def test_where_torch_has_no_single_kernel_it_stays_layer_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, bias = affine()
    x = torch.randn(5, WIDTH)
    assert computed(x, weight, bias) == "LayerNorm"
    assert computed(x.half(), weight, None) == "LayerNorm"
    assert computed(x.clone().requires_grad_(), weight, None) == "LayerNorm"
    with torch.no_grad():
        assert computed(x.clone().requires_grad_(), weight, None) == "RMSNorm"
    monkeypatch.setattr(norms, "torch_fuses", lambda device: device == "cuda")
    assert computed(x, weight, None) == "LayerNorm"


@pytest.mark.usefixtures("fusing")
def test_under_autocast_it_stays_layer_norm() -> None:
    weight, _ = affine()
    with torch.autocast("cpu", torch.bfloat16):
        assert computed(torch.randn(5, WIDTH), weight, None) == "LayerNorm"
        with Norms() as counted:
            kernels.rms_norm(torch.randn(5, WIDTH), weight, None, EPS, literal=True)
        assert counted.count == 0, "in training never LayerNorm"


class Norms(TorchDispatchMode):
    """Counts torch's LayerNorms, and the parameters that they read."""

    count = read = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.native_layer_norm.default:
            self.count += 1
            self.read += sum(parameter is not None for parameter in args[2:4])
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("fusing")
def test_a_fused_model_computes_no_layer_norm(outs: dict[str, Path]) -> None:
    inputs = {"input_ids": torch.arange(3, 21).reshape(2, 9)}
    for case, own in (("phi", True), ("phi merge bias", False)):
        model = from_pretrained(outs[case])
        folded = [module for module in model.modules() if isinstance(module, Folded)]
        with torch.no_grad(), Norms() as counted:
            logits = model(**inputs).logits
        fused = len(folded) - (0 if own else len(model.config.enjoyln["plan"]["fused"]))
        assert counted.count == fused
        plain = type(model).from_pretrained(CHECKPOINTS / "phi").eval()
        with torch.no_grad():
            expected, exact = plain(**inputs).logits, in_float64(plain)(**inputs).logits
        assert as_exact(logits, expected, exact)


@pytest.mark.parametrize(("merge", "read"), [("bias", 1), ("affine", 0)])
def test_the_fastest_layer_norm_reads_no_neutral_parameter(
    merge: str, read: int, outs: dict[str, Path]
) -> None:
    model = from_pretrained(outs[f"phi merge {merge}"])
    inputs = {"input_ids": torch.arange(3, 21).reshape(2, 9)}
    folded = [norm for norm in model.modules() if isinstance(norm, Folded)]
    with torch.no_grad():
        model(**inputs)
        with Norms() as counted:
            model(**inputs)
    neutral = sum(norm.biasless for norm in folded)
    assert neutral and counted.count == len(folded)
    assert counted.read == 2 * (len(folded) - neutral) + read * neutral
    with Norms() as counted:
        model(**inputs)
    assert counted.read == 2 * len(folded), "with gradients, all of them are read"


def test_the_kernel_is_looked_for_in_torch_itself() -> None:
    for device, has in (("cpu", False), ("meta", False), ("cuda", torch.version.cuda is not None)):
        assert norms.torch_fuses(device) is has
