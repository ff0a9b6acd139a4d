"""Rounding weights by the error that it makes in the outputs."""

from __future__ import annotations

import copy
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from live_models import shaken
from tiny_models import CHECKPOINTS
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoModel,
    DPTConfig,
    DPTForDepthEstimation,
    GPT2Config,
    GPT2LMHeadModel,
    PretrainedConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from enjoyln_cli.comparison.simulated_rounding import linear_layers
from enjoyln_cli.onnx_export.cached_run import load_programs, whole_rows
from enjoyln_cli.onnx_export.programs import programs_of, save
from enjoyln_cli.quantisers.gptq import RoundedWeight, Squares, rounded
from enjoyln_cli.quantisers.integer_products import write_rounded
from enjoyln_cli.quantisers.sequential_gptq import round_model


def correlated(width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight with means, and ``H`` of inputs that are correlated and differ in size."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(37, width, generator=generator) + 0.3
    mixing = torch.randn(width, width, generator=generator) * torch.linspace(0.1, 3, width)
    x = torch.randn(20 * width, width, generator=generator) @ mixing
    return weight, x.T @ x


def output_error(weight: torch.Tensor, result: RoundedWeight, inputs: torch.Tensor) -> float:
    difference = weight - result.matrix
    return float((difference @ inputs * difference).sum() / (weight @ inputs * weight).sum())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("width", [64, 75])
def test_outputs_lose_less_than_by_the_nearest_integer(width: int, symmetric: bool) -> None:
    weight, inputs = correlated(width)
    nearest = rounded(weight, None, 32, symmetric)
    by_error = rounded(weight, Squares(inputs, 20 * width), 32, symmetric)
    assert output_error(weight, by_error, inputs) < 0.6 * output_error(weight, nearest, inputs)
    assert by_error.scales.shape == by_error.zero_points.shape == (37, -(-width // 32))
    assert int(by_error.integers.max()) == 15


def test_few_inputs_decide_less() -> None:
    """As if they were many, they would be fitted too closely, and other inputs would lose more."""
    weight, inputs = correlated(64)
    draw = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    x = draw @ torch.linalg.cholesky(inputs).T
    few, many = (rounded(weight, Squares(x.T @ x, count), 32) for count in (40, 64000))
    assert output_error(weight, few, inputs) < 0.9 * output_error(weight, many, inputs)
    assert output_error(weight, few, x.T @ x) > output_error(weight, many, x.T @ x)


def test_inputs_that_are_alike_and_apart_change_nothing() -> None:
    weight, _ = correlated(64)
    alike = Squares(5 * torch.eye(64), 320)
    nearest, by_error = (rounded(weight, h, 32) for h in (None, alike))
    assert torch.equal(nearest.integers, by_error.integers)
    steps = (weight - nearest.matrix).unflatten(1, (2, 32)).abs().amax(-1) / nearest.scales
    assert float(steps.max()) <= 0.5 + 1e-4


def test_the_last_column_makes_up_for_the_first() -> None:
    """Of two equal inputs, the sum of both weights is what the outputs see."""
    weight = torch.tensor([[0.30, 0.30, 1.5, -1.5]])
    inputs = torch.diag(torch.tensor([4.0, 4.0, 9.0, 9.0]))
    inputs[0, 1] = inputs[1, 0] = 3.999
    nearest, by_error = (rounded(weight, h, 4) for h in (None, Squares(inputs, 1000)))
    lost = [abs(float(one.matrix[0, :2].sum()) - 0.6) for one in (nearest, by_error)]
    assert lost[1] < 0.6 * lost[0]


@pytest.mark.parametrize("symmetric", [False, True])
def test_rows_of_zeros_and_inputs_that_never_come(symmetric: bool) -> None:
    weight, inputs = correlated(64)
    weight[3] = 0
    inputs[5] = inputs[:, 5] = 0
    for h in (inputs, torch.zeros(64, 64)):
        result = rounded(weight, Squares(h, 1280), 32, symmetric)
        assert bool(result.matrix.isfinite().all()) and not result.matrix[3].any()


@pytest.mark.parametrize("family", ["gpt2", "bert", "phi"])
def test_a_whole_model_is_closer_to_its_original(family: str) -> None:
    model = AutoModel.from_pretrained(CHECKPOINTS / family, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    vocabulary = model.config.vocab_size
    batches = [
        {"input_ids": torch.randint(vocabulary, (1, 24), generator=generator)} for _ in range(9)
    ]
    layers = [*linear_layers(model)]
    apart = {}
    for name, data in {"nearest": [], "by error": batches[:8]}.items():
        small = copy.deepcopy(model)
        found = round_model(small, dict.fromkeys(layers, 16), data)
        assert found.keys() == set(layers)
        for path, weight in found.items():
            layer = small.get_submodule(path)
            flat = isinstance(layer, nn.Linear)
            assert torch.equal(layer.weight, weight.matrix if flat else weight.matrix.T)
        with torch.no_grad():
            exact, got = (one(**batches[8])[0] for one in (model, small))
        apart[name] = float((got - exact).norm() / exact.norm())
    assert apart["by error"] < apart["nearest"]


class Positions(nn.Module):
    """Each block calls a layer that belongs to no block, between its own layers."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.shared = nn.Linear(32, 48)
        self.blocks = nn.ModuleList(Feedforward() for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.sin(input_ids[..., None] * torch.arange(1.0, 33.0))
        for block in self.blocks:
            x = block(x, self.shared)
            x += x.roll(1, -1)  # writes to what the block returned
        return {"logits": x}


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: torch.Tensor, shared: nn.Linear) -> torch.Tensor:
        return x + self.second((self.first(x) + shared(x)).relu())


SIZES = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
BLOCKS = {
    "calling a layer outside": (Positions, PretrainedConfig()),
    "shared": (
        AlbertModel,
        AlbertConfig(**SIZES, num_hidden_layers=4, num_hidden_groups=2, vocab_size=67),
    ),
    "read by later layers": (
        DPTForDepthEstimation,
        DPTConfig(
            **SIZES, num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3], image_size=16,
            patch_size=8, is_hybrid=False, neck_hidden_sizes=[8] * 4, fusion_hidden_size=8,
        ),
    ),
    "a decoder": (
        T5ForConditionalGeneration,
        T5Config(d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, vocab_size=67),
    ),
}  # fmt: skip

ROUNDED_BEFORE_THEIR_INPUT = {"blocks.0.second", "shared"}
"""Layers that read what a layer of a later block returns."""


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_is_rounded_on_what_rounded_blocks_return(kind: str, tmp_path: Path) -> None:
    """All other layers are rounded, and whatever comes before it is computed anew."""
    cls, config = BLOCKS[kind]
    original = shaken(cls(config).eval(), 0.3)
    generator = torch.Generator().manual_seed(2)
    batches = []
    for _ in range(3):
        ids = torch.randint(67, (1, 12), generator=generator)
        picture = {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}
        text = {"input_ids": ids}
        batches.append(picture if kind == "read by later layers" else text)
        if kind == "a decoder":
            batches[-1]["decoder_input_ids"] = ids[:, :5]
    small, calls = copy.deepcopy(original), Counter[str]()
    layers = [*linear_layers(small)]
    for path in layers:
        counting = lambda *_, at=path: calls.update([at])  # noqa: E731
        small.get_submodule(path).register_forward_pre_hook(counting)
    found = round_model(small, dict.fromkeys(layers, 16), batches, folder=tmp_path)
    for one in found.values():  # the result takes no memory
        for part in (one.integers, one.scales, one.zero_points):
            assert str(part.untyped_storage().filename).startswith(str(tmp_path))
    assert not any("forward" in vars(module) for module in small.modules())
    if kind in ("read by later layers", "a decoder"):  # an order, then before and after rounding
        assert max(calls.values()) <= 1 + 2 * len(batches)
    for block in {re.sub(r"(\d+)\..*", r"\1.", path) for path in layers}:
        inside = [path for path in layers if path.startswith(block)]
        model, seen = copy.deepcopy(small), {path: [] for path in inside}
        for path in inside:
            layer = model.get_submodule(path)
            layer.load_state_dict(original.get_submodule(path).state_dict())
            see = lambda _, args, found=seen[path]: found.append(args[0].flatten(0, -2))  # noqa: E731
            layer.register_forward_pre_hook(see)
        with torch.no_grad():
            for batch in batches:
                model(**batch, use_cache=False) if kind == "a decoder" else model(**batch)
        for path in filter(seen.get, {*inside} - ROUNDED_BEFORE_THEIR_INPUT):
            x = torch.cat(seen[path])
            squares = Squares(x.T @ x, len(x))
            again = rounded(original.get_submodule(path).weight.detach(), squares, 16)
            assert float((again.integers == found[path].integers).float().mean()) > 0.999, path


@pytest.mark.one_case
@pytest.mark.parametrize(("width", "accuracy"), [(40, 0), (40, 4), (96, 0)])
def test_onnxruntime_computes_with_the_integers_as_they_are(
    width: int, accuracy: int, tmp_path: Path
) -> None:
    """Widths that end in a whole group or in a part; rounded inputs are less exact."""
    config = GPT2Config(n_embd=width, n_head=2, n_layer=2, vocab_size=67, n_positions=16)
    model = shaken(GPT2LMHeadModel(config).eval(), 0.3)
    ids = torch.randint(67, (2, 9), generator=torch.Generator().manual_seed(1))
    layers = [*linear_layers(model)]
    weights = round_model(model, dict.fromkeys(layers, 32), [{"input_ids": ids}])
    programs = programs_of(model, torch.float32)
    write_rounded(programs.models["model"], weights, accuracy)
    kinds = [node.op_type for node in programs.models["model"].graph]
    assert kinds.count("MatMulNBits") == len(layers) == 8
    save(programs, tmp_path)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    got = whole_rows(load_programs(tmp_path, threads=1))(given)["logits"]
    with torch.no_grad():
        exact = model(**given).logits
    assert float((got - exact).norm() / exact.norm()) < (1e-5 if accuracy == 0 else 0.03)


def test_layers_called_by_name_and_layers_never_called() -> None:
    """Weights of a layer that no input reaches are rounded to the nearest integers."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = PretrainedConfig()
            self.first, self.second, self.idle = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.second(input=self.first(input=x).relu())}

    torch.manual_seed(0)
    model, x = Named(), torch.randn(400, 32) @ torch.randn(32, 32)
    exact, weight = model(x)["logits"], model.idle.weight.detach().clone()
    found = round_model(model, {"first": 32, "second": 32, "idle": 8}, [{"x": x}])
    assert torch.equal(found["idle"].integers, rounded(weight, None, 8).integers)
    for name in ("first", "second"):
        assert torch.equal(model.get_submodule(name).weight, found[name].matrix)
    assert float((model(x)["logits"] - exact).norm() / exact.norm()) < 0.1
