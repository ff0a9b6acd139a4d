"""A LayerNorm is recognised by what it computes, not by its name or its looks."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from live_models import literally
from rounding import as_exact, exactly
from torch import nn

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.norm_probe import LayerNormForm, computes_rms_norm, examine, layer_norm_form
from enjoyln_cli.plan.plan import Options
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.runtime.install import install

WIDTH = 13


class Spelled(nn.Module):
    """A custom LayerNorm, with options that make it differ slightly from LayerNorm."""

    def __init__(self, kind: str = "last", eps: float = 1e-6) -> None:
        super().__init__()
        self.kind, self.tiny = kind, eps
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dim = 1 if self.kind == "channels" else -1
        centred = x - x.mean(dim, keepdim=True)
        variance = centred.pow(2).mean(dim, keepdim=True)
        weight, bias = self.weight, self.bias
        if dim == 1:
            weight, bias = weight[:, None, None], bias[:, None, None]
        if self.kind == "rms":
            return weight * x / torch.sqrt(x.pow(2).mean(dim, keepdim=True) + self.tiny) + bias
        if self.kind == "sample variance":
            variance = variance * WIDTH / (WIDTH - 1)
        if self.kind == "eps outside":
            return weight * centred / (variance.sqrt() + self.tiny) + bias
        if self.kind == "clipped":
            return (weight * centred / (variance + self.tiny).sqrt() + bias).clamp(-2, 2)
        gain = 1 + weight if self.kind == "one plus" else weight
        return gain * centred / (variance + self.tiny).sqrt() + bias


class Wide(nn.Module):
    """Casts to float32, has no parameters, and has no attribute for its eps."""

    normalized_shape = (WIDTH,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.layer_norm(x.float(), self.normalized_shape, eps=1e-5)
        return y.to(x.dtype)


class Channels(nn.LayerNorm):
    """Normalises the channels of (N, C, tokens)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 1)).permute(0, 2, 1)


class Either(nn.LayerNorm):
    """A LayerNorm for (batch, tokens, features) that computes something else for images."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.ndim == 3 else x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(
    ("module", "form"),
    [
        (Spelled("last"), LayerNormForm(-1, "weight", True, 1e-6, (2, 3, 4, 5))),
        (Spelled("last", eps=1e-12), LayerNormForm(-1, "weight", True, 1e-12, (2, 3, 4, 5))),
        (Spelled("channels"), LayerNormForm(1, "weight", True, 1e-6, (4,))),
        (Spelled("one plus"), LayerNormForm(-1, "1 + weight", True, 1e-6, (2, 3, 4, 5))),
        (nn.GroupNorm(1, WIDTH), LayerNormForm(-1, "weight", True, 1e-5, (2,))),
        (Channels(WIDTH), LayerNormForm(1, "weight", True, 1e-5, (3,))),
        (Either(WIDTH), LayerNormForm(-1, "weight", True, 1e-5, (3,))),
        (Wide(), LayerNormForm(-1, "1", False, 1e-5, (2, 3, 4, 5))),
        (nn.LayerNorm(WIDTH, bias=False), LayerNormForm(-1, "weight", False, 1e-5, (2, 3, 4, 5))),
    ],
)
def test_a_layer_norm_is_recognised_in_any_form(module: nn.Module, form: LayerNormForm) -> None:
    for example in (module, copy.deepcopy(module).to("meta")):
        found = layer_norm_form(example)
        assert found is not None and replace(found, takes_other_dtypes=False) == form
    assert not computes_rms_norm(module)


@pytest.mark.parametrize(
    "module",
    [
        Spelled("rms"),
        Spelled("sample variance"),
        Spelled("eps outside"),
        Spelled("clipped"),
        nn.RMSNorm(WIDTH),
        nn.BatchNorm2d(WIDTH),
        nn.GroupNorm(3, WIDTH - 1),
        nn.Linear(WIDTH, WIDTH),
        nn.Embedding(WIDTH, WIDTH),
        nn.Identity(),
    ],
    ids=lambda module: getattr(module, "kind", type(module).__name__),
)
def test_modules_that_compute_something_else_are_no_layer_norms(module: nn.Module) -> None:
    assert layer_norm_form(module) is None


class Casting(nn.LayerNorm):
    """Torch's LayerNorm in float32, as libraries write it for models in 16 bits."""

    def __init__(self, kind: str) -> None:
        super().__init__(WIDTH, eps=3e-6)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        function, shape, kind = nn.functional.layer_norm, self.normalized_shape, self.kind
        if kind == "input":  # OpenAI's Whisper
            return super().forward(x.float()).type(x.dtype)
        if kind == "input, by type":  # OpenAI's CLIP
            dtype = x.dtype
            return super().forward(x.type(torch.float32)).type(dtype)
        if kind == "input, by to":  # open_clip
            return function(x.to(torch.float32), shape, self.weight, self.bias, self.eps).to(x)
        if kind == "everything":  # fairseq
            y = function(x.float(), shape, self.weight.float(), self.bias.float(), self.eps)
            return y.type_as(x)
        if kind == "no autocast":
            with torch.autocast(x.device.type, enabled=False):
                return super().forward(x.float()).to(x.dtype)
        if kind == "no cast back":
            return super().forward(x.float())
        if kind == "by hand":
            wide = x.float()
            centred = wide - wide.mean(-1, keepdim=True)
            y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)
            return y.to(x.dtype) * self.weight + self.bias
        if kind == "to half":
            return super().forward(x.half().float()).type(x.dtype)
        assert kind == "to integers"
        return super().forward((x * 1e9).long() / 1e9).type(x.dtype)


CASTS = {
    "input": True,
    "input, by type": True,
    "input, by to": True,
    "everything": True,
    "no autocast": True,
    "no cast back": False,
    "by hand": False,
}
"""Ways to cast, and whether inputs of another dtype than the weights' are normalised as such."""


@pytest.mark.parametrize("kind", CASTS)
def test_a_layer_norm_that_casts_is_recognised(kind: str) -> None:
    form = LayerNormForm(-1, "weight", True, 3e-6, (2, 3, 4, 5), takes_other_dtypes=CASTS[kind])
    assert examine(Casting(kind), {}) == form


@pytest.mark.parametrize("kind", ["to half", "to integers"])
def test_a_module_that_rounds_its_input_is_none(kind: str) -> None:
    """In float16, inputs beyond 65,504 are infinite."""
    assert layer_norm_form(Casting(kind)) is None


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("everything", torch.bfloat16), ("no autocast", torch.float16),
        ("no cast back", torch.float32), ("by hand", torch.bfloat16),
    ],
)  # fmt: skip
def test_a_layer_norm_that_casts_folds_in_every_dtype_that_it_takes(
    kind: str, dtype: torch.dtype
) -> None:
    """The norm keeps its float32 weights in a model of 16 bits, as in Whisper."""
    torch.manual_seed(0)
    model = Block(Casting(kind)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.7, 0.4)
    model.to(dtype).norm.float()
    if not CASTS[kind]:
        model.read.to(torch.float32)
    x = torch.randn(2, 5, WIDTH).to(dtype)
    plan = analyze_module(model, x).plan
    assert [v.status for v in plan.norms] == ["static"]
    folded, exact = copy.deepcopy(model), exactly(model, x)
    centre_parameters(folded, plan)
    install(folded, ["norm"], plan.ops)
    with torch.no_grad():
        expected, found = model(x), folded(x)
        assert found.dtype == expected.dtype
        assert as_exact(found, expected, exact, dtype)
        install(model, ["norm"], plan.ops)  # the weights as they were: RMSNorm sees a mean
        computes_rms_norm = CASTS[kind] or dtype == torch.float32
        with literally():
            assert torch.allclose(model(x), expected, rtol=0.1, atol=0.1) != computes_rms_norm


def test_an_rms_norm_is_found_by_its_values() -> None:
    assert computes_rms_norm(nn.RMSNorm(WIDTH, eps=1e-6))
    assert not computes_rms_norm(nn.LayerNorm(WIDTH, bias=False))


class Block(nn.Module):
    """A writer, a norm and a reader, with features last, or with channels before positions."""

    def __init__(self, norm: nn.Module, positions: int = 0) -> None:
        super().__init__()
        kind: Any = (nn.Linear, nn.Conv1d, nn.Conv2d)[positions]
        more = (1,) if positions else ()
        self.norm = norm
        self.write, self.read = kind(WIDTH, WIDTH, *more), kind(WIDTH, WIDTH, *more)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.norm(self.write(x)))


def test_a_norm_is_one_only_for_inputs_of_as_many_dimensions() -> None:
    torch.manual_seed(0)
    model = Block(Either(WIDTH)).double().eval()
    nn.init.normal_(model.norm.bias, 0.7, 0.4)
    images, tokens = torch.randn(2, 3, 5, WIDTH).double(), torch.randn(2, 5, WIDTH).double()
    assert analyze_module(model, images).plan.norms == ()
    plan = analyze_module(model, tokens).plan
    folded = copy.deepcopy(model)
    centre_parameters(folded, plan)
    plain = copy.deepcopy(folded)
    install(folded, ["norm"], plan.ops)
    with torch.no_grad():
        assert torch.equal(folded(images), plain(images))  # as before, where it is not proven


class Both(nn.Module):
    """Calls one norm both with tokens and with images."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.write, self.norm = nn.Linear(WIDTH, WIDTH), norm

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(self.write(x)), self.norm(self.write(x)[:, None])


def test_a_norm_that_is_also_called_where_it_is_none_stays() -> None:
    (verdict,) = analyze_module(Both(Either(WIDTH)), torch.randn(2, 5, WIDTH)).plan.norms
    assert verdict.status == "kept" and "4 dimensions" in verdict.reason


@pytest.mark.parametrize(("groups", "listed"), [(1, "static"), (3, "kept")])
def test_a_group_norm_of_rows_normalises_each_alone(groups: int, listed: str) -> None:
    """With one group it is a LayerNorm; for several groups there is no RMSNorm here."""
    width = 12
    rows = nn.Sequential(nn.Linear(5, width), nn.GroupNorm(groups, width), nn.Linear(width, 2))
    (verdict,) = analyze_module(rows, torch.randn(7, 5)).plan.norms
    assert verdict.status == listed and ("groups" in verdict.reason) == (groups > 1)
    images = nn.Sequential(nn.Conv2d(5, width, 1), nn.GroupNorm(groups, width))
    assert analyze_module(images, torch.randn(2, 5, 4, 4)).plan.norms == ()  # over positions too


class Trap(Spelled):
    """Computes LayerNorm for common inputs, and something else for others."""

    def __init__(self, kind: str, eps: float = 1e-6) -> None:
        super().__init__("last", eps)
        self.trap = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given, trap = x, self.trap
        if trap == "by value" and x.max() > 1e9:
            return x
        if trap == "by item" and float(x.sum()) == 12345.0:
            return x
        if trap == "by length" and x.ndim > 2 and x.shape[1] > 512:
            return x
        if trap == "by rows" and x.numel() > 1_000_000:
            return x
        if trap == "one token" and x.ndim > 2 and x.shape[1] == 1:
            return x * 2
        if trap == "half" and x.dtype == torch.bfloat16:
            return x.clamp(-3, 3)
        if trap == "input clamped":
            x = x.clamp(-1e7, 1e7)
        if trap == "finite":
            x = torch.nan_to_num(x)
        if trap == "loop" and x.ndim > 2:
            x = torch.stack([x[:, i] for i in range(x.shape[1])], 1)
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        if trap == "rows together":
            variance = variance + 1e-13 * variance.mean()
        if trap == "no small variance":
            variance = variance.clamp_min(1e-14)
        if trap == "chosen variance":
            variance = torch.where(variance > 1e-20, variance, torch.ones_like(variance))
        y = centred / (variance + self.tiny).sqrt()
        if trap == "eps outside":
            y = centred / (variance.sqrt() + 1e-12)
        weight, bias = self.weight, self.bias
        if trap == "weight clamped":
            weight = weight.clamp(-50, 50)
        if trap == "weight absolute":
            weight = weight.square().sqrt()
        if trap == "weight relu":
            weight = (weight + weight.square().sqrt()) / 2
        if trap == "weight shifted":
            weight = weight + 1e-8
        if trap == "constant":
            bias = bias + 1e-8
        if trap == "scaled":
            y = y * (1 + 3e-6)
        y = weight * y + bias
        if trap == "saturates":
            y = 1e12 * (y / 1e12).tanh()
        if trap == "writes":
            given.copy_(y)
        return y


MORE = "which is not part of a LayerNorm"


TRAPS = [
    ("by value", "reads values of its input"),
    ("by item", "reads values of its input"),
    ("by length", "branches on the number of rows"),
    ("by rows", "branches on the number of rows"),
    ("one token", "branches on the number of rows"),
    ("loop", "branches on the number of rows"),
    ("half", "computes clamp, " + MORE),
    ("input clamped", "computes clamp, " + MORE),
    ("finite", "computes nan_to_num, " + MORE),
    ("no small variance", "computes clamp_min, " + MORE),
    ("chosen variance", MORE),
    ("rows together", "not compute LayerNorm of rows that are tiny, huge or constant"),
    ("eps outside", "not compute LayerNorm of rows that are tiny, huge or constant"),
    ("weight clamped", "computes clamp, " + MORE),
    ("weight absolute", ""),
    ("weight relu", ""),
    ("weight shifted", "where its parameters are"),
    ("constant", "where its parameters are"),
    ("scaled", "not compute LayerNorm of"),
    ("saturates", "computes tanh, " + MORE),
    ("writes", "computes copy_, " + MORE),
]


@pytest.mark.parametrize(("kind", "reason"), TRAPS)
def test_a_layer_norm_for_common_inputs_only_is_none(kind: str, reason: str) -> None:
    torch.manual_seed(0)
    found = examine(Trap(kind, 0.0 if kind == "eps outside" else 1e-6), {})
    assert not isinstance(found, LayerNormForm) and reason in (found or "")


OF_EVERY_ANSWER = {
    "by value", "one token", "half", "rows together", "weight absolute", "weight shifted",
    "writes",
}  # fmt: skip
"""An analysis and an installation read no more than what is asserted above."""


@pytest.mark.parametrize(("kind", "reason"), [one for one in TRAPS if one[0] in OF_EVERY_ANSWER])
def test_a_layer_norm_for_common_inputs_only_is_kept(kind: str, reason: str) -> None:
    torch.manual_seed(0)
    norm = Trap(kind, 0.0 if kind == "eps outside" else 1e-6)
    model = Block(norm).double()
    if kind != "by value":  # with which no graph can be captured
        norms = analyze_module(model, torch.randn(2, 5, WIDTH).double()).plan.norms
        assert [v.status for v in norms] == ["kept"] * bool(reason)
        assert all(reason in v.reason for v in norms)
    with pytest.raises(UnsupportedModel, match="norm: Trap does not compute LayerNorm"):
        install(model, ["norm"], ())


class Gain(Spelled):
    """Computes as an attribute of its class says, which may change later."""

    limit: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if self.limit is None else y.clamp(-self.limit, self.limit)


def test_a_verdict_is_forgotten_where_code_may_have_changed() -> None:
    norm = Gain()
    assert layer_norm_form(norm) is not None
    Gain.limit = 2.0
    assert layer_norm_form(norm) is None


class Fields(Spelled):
    """Has attributes that look like plain values, but are not."""

    def __init__(self, limits: tuple[Any, ...]) -> None:
        super().__init__()
        self.limits = limits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y.clamp(*self.limits[0].bounds) if self.limits[0].bounds else y


class Limits:
    def __init__(self, *bounds: float) -> None:
        self.bounds = bounds

    def __repr__(self) -> str:
        return "Limits"


def test_norms_that_only_look_alike_are_examined_one_by_one() -> None:
    model = nn.Sequential(Block(Fields((Limits(),))), Block(Fields((Limits(-2.0, 2.0),)))).double()
    plan = analyze_module(model, torch.randn(2, 5, WIDTH).double()).plan
    assert [v.norm for v in plan.folded] == ["0.norm"]


class Custom(nn.Module):
    """LayerNorm whose parameters have other names, shapes and kinds."""

    def __init__(self, shape: tuple[int, ...] = (WIDTH,), dim: int = -1, kind: str = "") -> None:
        super().__init__()
        self.dim, self.kind = dim, kind
        self.gamma = nn.Parameter(torch.ones(shape))
        if "buffer" in kind:
            self.register_buffer("beta", torch.zeros(shape), persistent="stored" in kind)
        elif "unbiased" not in kind:
            self.beta = nn.Parameter(torch.zeros(shape))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        centred = hidden - hidden.mean(self.dim, keepdim=True)
        y = centred / torch.sqrt(centred.pow(2).mean(self.dim, keepdim=True) + 1e-5)
        gamma = self.gamma + 1 if "plus" in self.kind else self.gamma
        return y * gamma if "unbiased" in self.kind else y * gamma + self.beta


class Swapped(nn.Module):
    """Multiplies by its ``bias``."""

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.factor = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, (WIDTH,), self.factor, self.offset)


class Shift(nn.Module):
    """Adds a bias and has no gain."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.zeros(1, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, (WIDTH,)) + self.beta


TOKENS, ROW, IMAGE = (2, 5, WIDTH), (2, WIDTH, 7), (2, WIDTH, 3, 5)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (Spelled("channels"), IMAGE),
        (nn.GroupNorm(1, WIDTH), (7, WIDTH)),
        (Spelled("one plus"), TOKENS),
        (Wide(), TOKENS),
        (Custom(kind="stored buffer"), TOKENS),
        (Custom((1, WIDTH, 1), 1, "plus buffer"), ROW),
        (Custom((1, WIDTH, 1, 1), 1, "unbiased"), IMAGE),
        (Swapped(), TOKENS),
        (Shift(), TOKENS),
        (nn.LayerNorm((1, WIDTH), bias=False), (2, 5, 1, WIDTH)),
    ],
)
def test_a_norm_of_another_form_folds(norm: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Block(copy.deepcopy(norm), len(shape) - 2 if shape[1] == WIDTH else 0).double().eval()
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.normal_(tensor, 0.7, 0.4)
    plan = analyze_module(model, torch.randn(shape, dtype=torch.float64)).plan
    assert [v.status for v in plan.norms] == ["static"]
    assert {writer.parameter for writer in plan.writers} == {"write.weight", "write.bias"}
    folded, x = copy.deepcopy(model), 3 * torch.randn(shape, dtype=torch.float64) + 1
    centre_parameters(folded, plan)
    install(folded, ["norm"], plan.ops)
    with torch.no_grad(), literally():
        inside = torch.float32 if isinstance(norm, Wide) else torch.float64
        assert as_exact(folded(x), model(x), exactly(model, x), inside)
        install(model, ["norm"], plan.ops)  # the weights as they were: RMSNorm sees a mean
        assert not torch.allclose(folded(x), model(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["", "buffer", "unbiased"])
def test_parameters_of_other_names_are_not_merged(kind: str) -> None:
    torch.manual_seed(0)
    model = Block(Custom(kind=kind)).double()
    x = torch.randn(2, 5, WIDTH).double()
    plan = analyze_module(model, x, options=Options(merge="affine")).plan
    assert len(plan.folded) == 1 and plan.merged == ()
    assert "other names than weight and bias" in plan.unmerged[0].reason


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.write, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm((2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.write(x))


def test_a_layer_norm_over_several_features_is_none_over_one_dimension() -> None:
    (verdict,) = analyze_module(Pairs(), torch.randn(5, 2, WIDTH)).plan.norms
    assert verdict.status == "kept" and "several dimensions" in verdict.reason
