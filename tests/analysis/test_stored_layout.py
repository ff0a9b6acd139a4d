"""Parameters that are stored in another layout: which tensors to centre, and whole folds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from live_models import moved
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    PermuteForRope,
    Transpose,
    WeightConverter,
)

from enjoyln_cli import fold
from enjoyln_cli.analysis.stored_layout import Conversion, conversion
from enjoyln_cli.analysis.stored_names import candidate, saved_shapes
from enjoyln_cli.models.arithmetic import Float64
from enjoyln_cli.models.classes import apply_experts, build, classes_for
from enjoyln_cli.plan.axis import Axis, centre
from enjoyln_cli.proof.pullback import Opaque

EXPERTS = {f"e.{i}.w": (12, 8) for i in range(11)}
GATED = EXPERTS | {f"e.{i}.v": (12, 8) for i in range(11)}

CASES: dict[str, tuple[Any, dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]] = {
    "transposed": (("w", "p", [Transpose(0, 1)]), {"w": (6, 8)}, {"p": (8, 6)}),
    "stacked": (("e.*.w", "p", [MergeModulelist(0)]), EXPERTS, {"p": (11, 12, 8)}),
    "stacked and joined": (
        (["e.*.w", "e.*.v"], "p", [MergeModulelist(0), Concatenate(1)]), GATED, {"p": (11, 24, 8)},
    ),
    "split": (("w", ["q", "k"], [Chunk(0)]), {"w": (12, 8)}, {"q": (6, 8), "k": (6, 8)}),
    "joined": ((["a", "b"], "p", [Concatenate(0)]), {"a": (6, 8), "b": (6, 8)}, {"p": (12, 8)}),
    "interleaved": (("w", "p", [Interleave(0)]), {"w": (12, 8)}, {"p": (12, 8)}),
    "split and rotated": (
        ("w", ["q", "k"], [Chunk(0), PermuteForRope(permute_layer_names=["w", "q", "k"])]),
        {"w": (24, 8)},
        {"q": (12, 8), "k": (12, 8)},
    ),
}  # fmt: skip


def made(name: str) -> tuple[Conversion, dict[str, tuple[int, ...]]]:
    (patterns, targets, ops), stored, shapes = CASES[name]
    converter = WeightConverter(patterns, targets, ops)
    model = SimpleNamespace(config=SimpleNamespace(num_attention_heads=3))
    state = {n: torch.empty(s, device="meta") for n, s in shapes.items()}
    listed = [patterns] if isinstance(patterns, str) else patterns
    sources = {n: (next(p for p in listed if p[-1] == n[-1]), s) for n, s in stored.items()}
    found = conversion(converter, next(iter(shapes)), sources, model, state)
    assert found is not None
    return found, shapes


def axes(shape: tuple[int, ...]) -> list[Axis]:
    whole = [Axis(dim, 0, 1, n, 1) for dim, n in enumerate(shape)]
    heads = [Axis(len(shape) - 2, 0, 3, shape[-2] // 3, 1)] if shape[-2] % 3 == 0 else []
    return whole + heads


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"split and rotated"}))
def test_centring_stored_tensors_centres_their_parameter(name: str) -> None:
    found, shapes = made(name)
    torch.manual_seed(0)
    before = {n: torch.randn(s, dtype=torch.float64) + 0.5 for n, s in found.sources.items()}
    results = dict(zip(found.targets, found.run(*before.values()), strict=True))
    accepted = 0
    for parameter, shape in shapes.items():
        for axis in axes(shape):
            stored = found.stored(parameter, axis)
            if isinstance(stored, Opaque):
                assert "stored in" in stored.reason
                continue
            accepted += 1
            after = dict(before)
            for tensor, on_disk in stored:
                after[tensor] = centre(after[tensor], on_disk)
            again = dict(zip(found.targets, found.run(*after.values()), strict=True))
            expected = {**results, parameter: centre(results[parameter], axis)}
            torch.testing.assert_close(again, expected, rtol=0, atol=1e-14)
    assert accepted


@pytest.mark.parametrize(
    ("name", "parameter", "axis", "reason"),
    [
        ("joined", "p", Axis(0, 0, 1, 12, 1), "concatenation along the features"),
        ("stacked", "p", Axis(0, 0, 1, 11, 1), "stack along the features"),
        ("split", "q", Axis(1, 0, 1, 8, 1), "together with other weights"),
        ("split and rotated", "q", Axis(0, 0, 3, 4, 1), "mixes the features with other dimensions"),
    ],
)
def test_what_cannot_be_centred_on_disk_says_why(
    name: str, parameter: str, axis: Axis, reason: str
) -> None:
    found = made(name)[0].stored(parameter, axis)
    assert isinstance(found, Opaque)
    assert reason in found.reason


def test_experts_are_stacked_in_the_order_of_their_numbers() -> None:
    found, _ = made("stacked")
    tensors = [torch.full((12, 8), float(i)) for i in range(11)]
    assert found.run(*tensors)[0][:, 0, 0].tolist() == list(range(11))


def test_what_does_not_fit_the_model_is_no_conversion() -> None:
    model, state = SimpleNamespace(config=None), {"p": torch.empty(11, 12, 8, device="meta")}
    converter = WeightConverter("e.*.w", "p", [MergeModulelist(0)])
    few = {name: ("e.*.w", shape) for name, shape in list(EXPERTS.items())[:9]}
    assert conversion(converter, "p", few, model, state) is None
    odd = {name: ("e.*.w", shape) for name, shape in {**EXPERTS, "e.3.w": (5,)}.items()}
    assert conversion(converter, "p", odd, model, state) is None


TOKENS = {"vocab_size": 37, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {
    **TOKENS,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
PHIMOE = {**SMALL, "num_local_experts": 4, "attention_bias": True, "lm_head_bias": True}


def saved(model_type: str, model_class: str, settings: dict[str, Any], folder: Path) -> None:
    """A checkpoint whose gammas, betas and biases are random and whose weights have means."""
    model = moved(getattr(transformers, model_class)(CONFIG_MAPPING[model_type](**settings)))
    model.save_pretrained(folder)


def loaded(model_class: str, folder: Path) -> Any:
    model = getattr(transformers, model_class).from_pretrained(folder, dtype=torch.float64)
    model.set_experts_implementation("eager")  # the grouped product does not support float64
    return model.eval()


COHERE = {
    **SMALL, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 6, "first_k_dense_replace": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "model_class", "settings", "expert"),
    [
        ("phimoe", "PhimoeForCausalLM", PHIMOE, "model.layers.1.block_sparse_moe.experts.3.w2"),
        ("cohere2_moe", "Cohere2MoeModel", COHERE, "layers.1.mlp.experts.3.down_proj"),
    ],
)
def test_a_model_of_experts_folds_on_disk(
    model_type: str, model_class: str, settings: dict[str, Any], expert: str, tmp_path: Path
) -> None:
    saved(model_type, model_class, settings, tmp_path / "source")
    options = {"model_class": model_class, "verify": False}
    plan = fold(tmp_path / "source", tmp_path / "out", **options).plan
    assert {v.status for v in plan.norms} == {"in_weights"}
    assert f"{expert}.weight" in {w.tensor for w in plan.centred_weights}
    original, result = (loaded(model_class, tmp_path / name) for name in ("source", "out"))
    means = input_means([result.get_submodule(v.norm) for v in plan.norms])
    ids = torch.randint(3, 37, (2, 9))
    with torch.no_grad(), Float64():  # Cohere's norms compute in float32
        expected, got = original(ids)[0], result(ids)[0]
    assert (got - expected).norm() / expected.norm() <= 1e-12
    assert len(means) == len(plan.norms) and max(means) <= 1e-12


def input_means(norms: list[nn.Module]) -> list[float]:
    """A dict that the next call fills: the largest input mean of each norm of the stock class."""
    means: list[float] = []

    def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        means.append(float(args[0].mean(-1).abs().max() / args[0].abs().max()))

    for module in norms:
        module.register_forward_pre_hook(hook)
    return means


def test_experts_of_a_part_are_applied_as_in_the_whole() -> None:
    """A class without experts of its own says so, even if its parts have experts."""
    part = build(transformers.PhimoeModel, transformers.PhimoeConfig(**PHIMOE))
    whole = nn.ModuleDict({"text": nn.Sequential(part), "tower": nn.Linear(2, 2)})
    for way in ("eager", "batched_mm"):
        apply_experts(whole, way)
        assert part.config._experts_implementation == way


@pytest.mark.parametrize("model_type", ["maskformer", "clip", "phimoe"])
def test_what_a_class_saves_loads_without_missing_weights(model_type: str) -> None:
    """MaskFormer's backbone keeps names that are renamed in other Swin models."""
    config = CONFIG_MAPPING[model_type]()
    model = build(classes_for(config)[0], config)
    found = candidate(model, saved_shapes(model), None)
    assert found.missing == ()
    assert all(name in found.stored or name in found.converted for name in model.state_dict())
