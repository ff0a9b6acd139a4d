"""A LayerNorm is recognised by its results, not by its name or its looks."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from folding_live import Computing
from live_models import install, literally
from rounding import as_exact, exactly
from spelled_norms import WIDTH, Block, Formula, Spelled, eps_outside, normed, plain
from torch import nn

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.models.norm_probe import LayerNormSpec, computes_rms_norm, examine
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.rewrite.in_memory import centre_parameters


def layer_norm_spec(module: nn.Module) -> LayerNormSpec | None:
    """How ``module`` computes LayerNorm; ``None`` if it does not, or not for all inputs."""
    found = examine(module, {})
    return found if isinstance(found, LayerNormSpec) else None


FORMULAS: dict[str, Formula] = {
    "last": plain,
    "channels": lambda m, x: m.weight[:, None, None] * normed(m, x, 1) + m.bias[:, None, None],
    "one plus": lambda m, x: plain(m, x, weight=lambda w: 1 + w),
    "rms": lambda m, x: m.weight * x / (x.pow(2).mean(-1, keepdim=True) + m.tiny).sqrt() + m.bias,
    "sample variance": lambda m, x: plain(m, x, variance=lambda v: v * WIDTH / (WIDTH - 1)),
    "eps outside": eps_outside,
    "clipped": lambda m, x: plain(m, x).clamp(-2, 2),
}


def spelled(kind: str, eps: float = 1e-6) -> Spelled:
    return Spelled(FORMULAS[kind], eps)


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
    ("module", "spec"),
    [
        (spelled("last"), LayerNormSpec(-1, "weight", True, 1e-6, (2, 3, 4, 5))),
        (spelled("last", eps=1e-12), LayerNormSpec(-1, "weight", True, 1e-12, (2, 3, 4, 5))),
        (spelled("channels"), LayerNormSpec(1, "weight", True, 1e-6, (4,))),
        (spelled("one plus"), LayerNormSpec(-1, "1 + weight", True, 1e-6, (2, 3, 4, 5))),
        (nn.GroupNorm(1, WIDTH), LayerNormSpec(-1, "weight", True, 1e-5, (2,))),
        (Channels(WIDTH), LayerNormSpec(1, "weight", True, 1e-5, (3,))),
        (Either(WIDTH), LayerNormSpec(-1, "weight", True, 1e-5, (3,))),
        (Wide(), LayerNormSpec(-1, "1", False, 1e-5, (2, 3, 4, 5))),
        (nn.LayerNorm(WIDTH, bias=False), LayerNormSpec(-1, "weight", False, 1e-5, (2, 3, 4, 5))),
    ],
)
def test_a_layer_norm_is_recognised_however_it_is_written(
    module: nn.Module, spec: LayerNormSpec
) -> None:
    for example in (module, copy.deepcopy(module).to("meta")):
        found = layer_norm_spec(example)
        assert found is not None and replace(found, takes_other_dtypes=False) == spec
    assert not computes_rms_norm(module)


@pytest.mark.parametrize(
    "module",
    [
        spelled("rms"),
        spelled("sample variance"),
        spelled("eps outside"),
        spelled("clipped"),
        nn.RMSNorm(WIDTH),
        nn.BatchNorm2d(WIDTH),
        nn.GroupNorm(3, WIDTH - 1),
        nn.Linear(WIDTH, WIDTH),
        nn.Embedding(WIDTH, WIDTH),
        nn.Identity(),
    ],
)
def test_modules_that_compute_something_else_are_no_layer_norms(module: nn.Module) -> None:
    assert layer_norm_spec(module) is None


class Casting(nn.LayerNorm):
    """Torch's LayerNorm in float32, as libraries write it for models in 16 bits."""

    def __init__(self, kind: str) -> None:
        super().__init__(WIDTH, eps=3e-6)
        self.formula = CASTS.get(kind, (ROUNDING.get(kind), False))[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.formula(self, x)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def without_autocast(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return m.own(x.float()).to(x.dtype)


def by_hand(m: Any, x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + m.eps)
    return y.to(x.dtype) * m.weight + m.bias


layer_norm, ROW = nn.functional.layer_norm, (WIDTH,)
CASTS: dict[str, tuple[Formula, bool]] = {
    "input": (lambda m, x: m.own(x.float()).type(x.dtype), True),  # OpenAI's Whisper
    "input, by type": (lambda m, x: m.own(x.type(torch.float32)).type(x.dtype), True),  # its CLIP
    "input, by to": (  # open_clip
        lambda m, x: layer_norm(x.to(torch.float32), ROW, m.weight, m.bias, m.eps).to(x), True,
    ),
    "everything": (  # fairseq
        lambda m, x: (
            layer_norm(x.float(), ROW, m.weight.float(), m.bias.float(), m.eps).type_as(x)
        ),
        True,
    ),
    "no autocast": (without_autocast, True),
    "no cast back": (lambda m, x: m.own(x.float()), False),
    "by hand": (by_hand, False),
}  # fmt: skip
"""Ways to cast, and whether inputs of another dtype than the weights' are normalised as such."""
ROUNDING: dict[str, Formula] = {
    "to half": lambda m, x: m.own(x.half().float()).type(x.dtype),
    "to integers": lambda m, x: m.own((x * 1e9).long() / 1e9).type(x.dtype),
}


@pytest.mark.parametrize("kind", CASTS)
def test_a_layer_norm_that_casts_is_recognised(kind: str) -> None:
    spec = LayerNormSpec(-1, "weight", True, 3e-6, (2, 3, 4, 5), takes_other_dtypes=CASTS[kind][1])
    assert examine(Casting(kind), {}) == spec


@pytest.mark.parametrize("kind", ROUNDING)
def test_a_module_that_rounds_its_input_is_none(kind: str) -> None:
    """In float16, inputs beyond 65,504 are infinite."""
    assert layer_norm_spec(Casting(kind)) is None


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("everything", torch.bfloat16), ("no autocast", torch.float16),
        ("no cast back", torch.float32), ("by hand", torch.bfloat16),
    ],
)  # fmt: skip
def test_a_layer_norm_that_casts_folds_in_all_its_dtypes(kind: str, dtype: torch.dtype) -> None:
    """The norm keeps its float32 weights in a model of 16 bits, as in Whisper."""
    torch.manual_seed(0)
    model = Block(Casting(kind)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.7, 0.4)
    model.to(dtype).norm.float()
    if not CASTS[kind][1]:
        model.read.to(torch.float32)
    x = torch.randn(2, 5, WIDTH).to(dtype)
    plan = analyze_module(model, x).plan
    assert [v.status for v in plan.norms] == ["in_weights"]
    folded, exact = copy.deepcopy(model), exactly(model, x)
    centre_parameters(folded, plan)
    install(folded, ["norm"], plan.subtractions)
    with torch.no_grad():
        expected, found = model(x), folded(x)
        assert found.dtype == expected.dtype
        assert as_exact(found, expected, exact, dtype)
        install(model, ["norm"], plan.subtractions)  # the weights as they were: RMSNorm sees a mean
        computes_rms_norm = CASTS[kind][1] or dtype == torch.float32
        with literally():
            assert torch.allclose(model(x), expected, rtol=0.1, atol=0.1) != computes_rms_norm


def test_an_rms_norm_is_found_by_its_values() -> None:
    assert computes_rms_norm(nn.RMSNorm(WIDTH, eps=1e-6))
    assert not computes_rms_norm(nn.LayerNorm(WIDTH, bias=False))


def test_a_norm_may_be_a_layer_norm_for_some_ranks_only() -> None:
    torch.manual_seed(0)
    model = Block(Either(WIDTH)).double().eval()
    nn.init.normal_(model.norm.bias, 0.7, 0.4)
    images, tokens = torch.randn(2, 3, 5, WIDTH).double(), torch.randn(2, 5, WIDTH).double()
    assert analyze_module(model, images).plan.norms == ()
    plan = analyze_module(model, tokens).plan
    folded = copy.deepcopy(model)
    centre_parameters(folded, plan)
    plain = copy.deepcopy(folded)
    install(folded, ["norm"], plan.subtractions)
    with torch.no_grad():
        assert torch.equal(folded(images), plain(images))  # as before, where it is not proven


def test_a_norm_that_is_also_called_where_it_is_none_stays() -> None:
    parts = {"write": nn.Linear(WIDTH, WIDTH), "norm": Either(WIDTH)}
    both = Computing(lambda m, x: (m.norm(m.write(x)), m.norm(m.write(x)[:, None])), **parts)
    (verdict,) = analyze_module(both, torch.randn(2, 5, WIDTH)).plan.norms
    assert verdict.status == "stays_layernorm" and "4 dimensions" in verdict.reason


@pytest.mark.parametrize(("groups", "listed"), [(1, "in_weights"), (3, "stays_layernorm")])
def test_a_group_norm_of_rows_normalises_each_alone(groups: int, listed: str) -> None:
    """With one group it is a LayerNorm; for several groups there is no RMSNorm here."""
    width = 12
    rows = nn.Sequential(nn.Linear(5, width), nn.GroupNorm(groups, width), nn.Linear(width, 2))
    (verdict,) = analyze_module(rows, torch.randn(7, 5)).plan.norms
    assert verdict.status == listed and ("groups" in verdict.reason) == (groups > 1)
    images = nn.Sequential(nn.Conv2d(5, width, 1), nn.GroupNorm(groups, width))
    assert analyze_module(images, torch.randn(2, 5, 4, 4)).plan.norms == ()  # over positions too


VALUES, ROWS = "reads values of its input", "branches on the number of rows"


class Gain(Spelled):
    """Computes as an attribute of its class says, which may change later."""

    limit: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if self.limit is None else y.clamp(-self.limit, self.limit)


def test_a_verdict_is_forgotten_where_code_may_have_changed() -> None:
    norm = Gain(plain)
    assert layer_norm_spec(norm) is not None
    Gain.limit = 2.0
    assert layer_norm_spec(norm) is None


class Limits:
    def __init__(self, *bounds: float) -> None:
        self.bounds = bounds

    def __repr__(self) -> str:
        return "Limits"


class Limited(nn.LayerNorm):
    """Has an attribute that looks like a plain value, but is none."""

    def __init__(self, *bounds: float) -> None:
        super().__init__(WIDTH)
        self.limits = (Limits(*bounds),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, bounds = super().forward(x), self.limits[0].bounds
        return y.clamp(*bounds) if bounds else y


def test_norms_that_only_look_alike_are_examined_one_by_one() -> None:
    model = nn.Sequential(Block(Limited()), Block(Limited(-2.0, 2.0))).double()
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


def swapped() -> nn.Module:
    """Has its parameters under other names, in another order."""
    parts = {"offset": nn.Parameter(torch.zeros(WIDTH)), "factor": nn.Parameter(torch.ones(WIDTH))}
    return Computing(lambda m, x: layer_norm(x, (WIDTH,), m.factor, m.offset), **parts)


def shift() -> nn.Module:
    """Adds a bias and has no gain."""
    beta = nn.Parameter(torch.zeros(1, 1, WIDTH))
    return Computing(lambda m, x: layer_norm(x, (WIDTH,)) + m.beta, beta=beta)


TOKENS, SIGNAL, IMAGE = (2, 5, WIDTH), (2, WIDTH, 7), (2, WIDTH, 3, 5)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (spelled("channels"), IMAGE),
        (nn.GroupNorm(1, WIDTH), (7, WIDTH)),
        (spelled("one plus"), TOKENS),
        (Wide(), TOKENS),
        (Custom(kind="stored buffer"), TOKENS),
        (Custom((1, WIDTH, 1), 1, "plus buffer"), SIGNAL),
        (Custom((1, WIDTH, 1, 1), 1, "unbiased"), IMAGE),
        (swapped(), TOKENS),
        (shift(), TOKENS),
        (nn.LayerNorm((1, WIDTH), bias=False), (2, 5, 1, WIDTH)),
    ],
)
def test_a_norm_of_another_spec_folds(norm: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Block(copy.deepcopy(norm), len(shape) - 2 if shape[1] == WIDTH else 0).double().eval()
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.normal_(tensor, 0.7, 0.4)
    plan = analyze_module(model, torch.randn(shape, dtype=torch.float64)).plan
    assert [v.status for v in plan.norms] == ["in_weights"]
    assert {writer.parameter for writer in plan.centred_weights} == {"write.weight", "write.bias"}
    folded, x = copy.deepcopy(model), 3 * torch.randn(shape, dtype=torch.float64) + 1
    centre_parameters(folded, plan)
    install(folded, ["norm"], plan.subtractions)
    with torch.no_grad(), literally():
        inside = torch.float32 if isinstance(norm, Wide) else torch.float64
        assert as_exact(folded(x), model(x), exactly(model, x), inside)
        install(model, ["norm"], plan.subtractions)  # the weights as they were: RMSNorm sees a mean
        assert not torch.allclose(folded(x), model(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["", "buffer", "unbiased"])
def test_parameters_of_other_names_are_not_fused(kind: str) -> None:
    torch.manual_seed(0)
    model = Block(Custom(kind=kind)).double()
    x = torch.randn(2, 5, WIDTH).double()
    plan = analyze_module(model, x, options=Options(merge="affine")).plan
    assert len(plan.folded) == 1 and plan.fused == ()
    assert "other names than weight and bias" in plan.unfused[0].reason


def test_a_layer_norm_over_several_dimensions_stays() -> None:
    pairs = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm((2, WIDTH)))
    (verdict,) = analyze_module(pairs, torch.randn(5, 2, WIDTH)).plan.norms
    assert verdict.status == "stays_layernorm" and "several dimensions" in verdict.reason
