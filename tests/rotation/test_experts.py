"""Norms whose weight is fused into a mixture of experts, whose streams can then be rotated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers.integrations.moe  # noqa: F401  (registers its grouped product)
from folding_live import Computing
from live_models import moved
from rounding import as_exact
from stored_files import stored_plan
from tiny_models import TOKENS, converted, error, live, rotated
from torch import nn
from torch.nn import functional as F
from transformers import CONFIG_MAPPING

from enjoyln_cli.analysis.analyze import analyze_config, analyze_module
from enjoyln_cli.conversion.fold import convert
from enjoyln_cli.edits.planned_edits import edits_of
from enjoyln_cli.models.arithmetic import Float64
from enjoyln_cli.models.classes import apply_experts
from enjoyln_cli.plan.fold_options import Options

ROTATED = Options(fold=False, rotate=True)
AFFINE = Options(merge="affine")
SMALL = {
    **TOKENS, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 24, "intermediate_size": 17, "head_dim": 6, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("mixtral", "MixtralForCausalLM", {**SMALL, "num_local_experts": 3}),
    ("gpt_oss", "GptOssForCausalLM", {**SMALL, "num_local_experts": 3}),
    ("llama4_text", "Llama4ForCausalLM", {**SMALL, "num_local_experts": 3}),
    ("phimoe", "PhimoeForCausalLM", {**SMALL, "num_local_experts": 3, "attention_bias": True}),
]


@pytest.mark.one_case
@pytest.mark.parametrize(("kind", "name", "settings"), MODELS, ids=[one[0] for one in MODELS])
def test_the_stream_rotates_with_router_and_experts(
    kind: str, name: str, settings: dict[str, Any]
) -> None:
    config = CONFIG_MAPPING[kind](**settings)
    plan = analyze_config(config, model_class=name, options=ROTATED).plan
    (stream, *_) = plan.rotated
    assert stream.kind == "residual" and stream.size == 24
    changed = {one.parameter for one in stream.tensors}
    assert any(word in parameter for parameter in changed for word in ("router", "gate.weight"))
    assert any(parameter.endswith("experts.gate_up_proj") for parameter in changed)
    assert any(parameter.endswith("experts.down_proj") for parameter in changed)
    original = live(name, config)
    apply_experts(original)
    result, ids = rotated(original, plan), torch.randint(3, 37, (3, 7))
    with torch.no_grad(), Float64():  # most of these norms compute in float32
        expected, found = original(ids).logits, result(ids).logits
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-12
    norm = result.model.layers[0].post_attention_layernorm.weight
    assert torch.equal(norm, torch.ones_like(norm))


def test_a_layer_norm_fuses_its_weight_and_keeps_its_bias() -> None:
    """The experts have no biases that the norm's could move into."""
    kind, name, settings = MODELS[-1]
    config = CONFIG_MAPPING[kind](**settings)
    plan = analyze_config(config, model_class=name, options=AFFINE).plan
    before = "model.layers.0.post_attention_layernorm"
    (fusion,) = [one for one in plan.fused if one.norm == before]
    assert fusion.divided == f"{before}.bias" and not fusion.bias
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    parts = [one for one in fusion.readers if one.weight.parameter == experts]
    assert len(parts) == 6  # two projections of three experts are stored one by one
    assert {(one.dim, one.module_dim) for one in parts} == {(1, 2)}
    original = live(name, config)
    apply_experts(original)
    given = {"input_ids": torch.randint(3, 37, (2, 7))}
    assert error(converted(original, plan), original, given) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_are_rotated_on_disk(kind: str, tmp_path: Path) -> None:
    """Mixtral's file has a tensor for each expert, GPT-OSS's has stacks of transposed tensors."""
    name, settings = next((name, found) for one, name, found in MODELS if one == kind)
    config = CONFIG_MAPPING[kind](**settings)
    live(name, config).save_pretrained(tmp_path / "in")
    result = convert(
        tmp_path / "in", tmp_path / "out", options=ROTATED, model_class=name, verify=False
    )
    before, after = (
        getattr(transformers, name).from_pretrained(tmp_path / part, dtype=torch.float64).eval()
        for part in ("in", "out")
    )
    ids = torch.randint(3, 37, (3, 7))
    with torch.no_grad(), Float64():
        apply_experts(before)
        apply_experts(after)
        expected, found = before(ids).logits, after(ids).logits
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-12
    again = stored_plan(tmp_path / "out")
    assert edits_of(again) == edits_of(result.plan)
    assert edits_of(again, in_memory=True) == edits_of(result.plan, in_memory=True)


# One norm, and what stands between it and a stack of matrices.

D, WIDE, OFFSETS = 12, 8, torch.tensor([2, 5, 6], dtype=torch.int32)


Read = Callable[[Any, torch.Tensor, torch.Tensor], Any]


def routed(read: Read) -> Any:
    """A norm, and ``read`` applied to its result and to the experts that are chosen for it."""

    def run(m: Any, x: torch.Tensor) -> Any:
        y = m.norm(m.enter(x))
        return read(m, y, m.router(y).topk(1, -1).indices[..., 0])

    layers = {"enter": nn.Linear(7, D), "back": nn.Linear(WIDE, D), "router": nn.Linear(D, 3)}
    shapes = {"stack": (3, WIDE, D), "square": (3, D, D), "halves": (3, WIDE, 2 * D)}
    stacks = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    return moved(Computing(run, **layers, **stacks, norm=nn.LayerNorm(D)))


def one_by_one(weight: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.bmm(weight, y.unsqueeze(-1)).squeeze(-1)


def grouped(m: Any, y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(y, m.stack.mT, offsets)
    return found


TAKES: dict[str, Read] = {
    "a matrix for each row": lambda m, y, chosen: one_by_one(m.stack[chosen], y),
    "all experts": lambda m, y, chosen: torch.matmul(y, m.stack.transpose(1, 2)),
    "one expert by its number": lambda m, y, chosen: F.linear(y, m.stack[1]) + y @ m.stack[0].T,
    "rows that are repeated": lambda m, y, chosen: one_by_one(
        m.stack[chosen.repeat_interleave(2)], y.repeat_interleave(2, 0)
    ),
    "a share of each expert": lambda m, y, chosen: torch.einsum(
        "ne,nd,ewd->nw", m.router(y).softmax(-1), y, m.stack
    ),
    "matrices of which something else reads the shape": lambda m, y, chosen: (
        lambda w: one_by_one(w, y) + torch.zeros_like(w * 2).sum()
    )(m.stack[chosen]),
    "matrices that are chosen once and used twice": lambda m, y, chosen: (
        lambda w: one_by_one(w, y) + one_by_one(w.flip(0), y)
    )(m.stack[chosen]),
}
READ = "its result is read by {}, which is not a linear layer"
COMPUTED = "its result is read by linear, whose weight or bias is computed"
ALSO_READ = (
    "a parameter of a linear layer after it is also read by {} (--untie separates tied weights)"
)
REFUSES: dict[str, tuple[Read, str]] = {
    "a weight that is used again": (
        lambda m, y, chosen: one_by_one(m.stack[chosen], y) + m.stack.sum(),
        ALSO_READ.format("sum"),
    ),
    "chosen matrices that are used again": (
        lambda m, y, chosen: (lambda w: one_by_one(w, y) + w.sum((1, 2), True)[0])(m.stack[chosen]),
        ALSO_READ.format("sum"),
    ),
    "a weight twice in one product, once as chosen": (
        lambda m, y, chosen: (lambda w: torch.einsum("nd,ndf,nhf->nh", y, w, w))(m.square[chosen]),
        READ.format("einsum"),
    ),
    "a weight twice in one product": (
        lambda m, y, chosen: torch.einsum("nd,edf,ehf->neh", y, m.square, m.square),
        READ.format("einsum"),
    ),
    "two dimensions of one weight": (
        lambda m, y, chosen: one_by_one(m.square[chosen], y) + one_by_one(m.square.mT[chosen], y),
        "linear layers that read it share a parameter",
    ),
    "a part of the features of a weight": (
        lambda m, y, chosen: one_by_one(m.halves[..., :D][chosen], y),
        "a linear layer that reads it also reads other features",
    ),
    "a weight that is computed": (
        lambda m, y, chosen: F.linear(y, m.stack.mean(0).tanh()), COMPUTED,
    ),
    "a weight with another factor for each feature": (
        lambda m, y, chosen: one_by_one(m.stack[chosen] * m.back.weight[:, 0], y),
        READ.format("bmm"),
    ),
    "a product over another dimension": (
        lambda m, y, chosen: torch.einsum("nd,ewf->ndwf", y, m.stack).relu(), READ.format("relu"),
    ),
}  # fmt: skip


def rows(seed: int = 3) -> torch.Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("case", TAKES)
def test_experts_take_the_weight_of_a_norm(case: str) -> None:
    model = routed(TAKES[case])
    plan = analyze_module(model, rows(), options=AFFINE).plan
    assert [one.norm for one in plan.fused] == ["norm"], plan.unfused
    folded = converted(model, plan)
    assert torch.equal(folded.norm.weight, torch.ones_like(folded.norm.weight))
    torch.testing.assert_close(folded(rows(4)), model(rows(4)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", REFUSES)
def test_experts_that_cannot_take_the_weight_of_a_norm(case: str) -> None:
    read, reason = REFUSES[case]
    model = routed(read)
    plan = analyze_module(model, rows(), options=AFFINE).plan
    assert not plan.fused
    assert [one.reason for one in plan.unfused] == [reason]
    folded = converted(model, plan)
    torch.testing.assert_close(folded(rows(4)), model(rows(4)), rtol=1e-12, atol=1e-12)


def apart(m: Any, y: torch.Tensor) -> torch.Tensor:
    """The grouped product, expert by expert."""
    parts = y.tensor_split(OFFSETS[:-1].long())
    return torch.cat([part @ weight.T for part, weight in zip(parts, m.stack, strict=True)])


def test_a_grouped_product_takes_the_weight_of_a_norm() -> None:
    """The product does not exist in float64, so the results are compared in float32."""
    model = routed(lambda m, y, chosen: grouped(m, y, OFFSETS.to(y.device)))
    plan = analyze_module(model.float(), rows().float(), options=AFFINE).plan
    assert [one.norm for one in plan.fused] == ["norm"], plan.unfused
    folded, x = converted(model, plan), rows(4).float()
    same = routed(lambda m, y, chosen: apart(m, y)).double()
    same.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert as_exact(folded(x), model(x), same(x.double()))
