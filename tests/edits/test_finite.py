"""What an edit writes is finite in its dtype, or it is refused by name before anything changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from edit_cases import EDITS, IN, ROWS, tensors
from fold_cases import store, written
from stored_files import opened
from tiny_models import BERT, GPT2, PHI, live

from enjoyln_cli import analyze, fold_in_memory, refold, rotate
from enjoyln_cli.edits.baked_rows import EncodeRows, FillLevel, NormRows
from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.finite import require_finite
from enjoyln_cli.edits.linear_steps import AddProduct, CentreAxis, LayerScale, RotateAxis, Scale
from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.plan.axis import Axis, feature_axis
from enjoyln_cli.plan.fold_options import Options, WriteOptions
from enjoyln_cli.plan.orthogonal_matrices import Rotation, matrix
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.rewrite.writer import write_shards
from enjoyln_cli.runtime.modules import RMSNorm

Tensors = dict[str, torch.Tensor]
OUT = feature_axis((ROWS, IN), 0)
ROTATION = Edit((RotateAxis(OUT, Rotation(ROWS, 0, "w", fixes_ones=True)),))
NORM = ("w", "g", "v", 1e-5)
MERGE, SCALE, ADD = Scale("g", 1), LayerScale("s", 0), AddProduct("w", 1, "v")


def put(name: str, value: float, *at: Any) -> Callable[[Tensors], None]:
    """A change of one number of a tensor, or of all."""

    def change(held: Tensors) -> None:
        held[name][at or ...] = value

    return change


def both(*changes: Callable[[Tensors], None]) -> Callable[[Tensors], None]:
    def change(held: Tensors) -> None:
        for one in changes:
            one(held)

    return change


def along_a_row_of_the_matrix(held: Tensors) -> None:
    row = matrix(ROTATION.steps[0].rotation)[3]
    held["w"][:, 5] = 6e4 * row.sign()


BEYOND, HOLDS = "beyond", "holds NaN"
WRONG: dict[str, tuple[str, Edit, Callable[[Tensors], None], str]] = {
    "NaN is centred": ("w", Edit((CentreAxis(OUT),)), put("w", math.nan, 3, 4), f"w.* {HOLDS}"),
    "Inf is rotated": ("w", ROTATION, put("w", math.inf, 3, 4), f"w.* {HOLDS}"),
    "Inf in half a tensor": (
        "w", Edit((CentreAxis(Axis(0, 4, 2, 15, 1)),)), put("w", -math.inf, 5, 4), f"w.* {HOLDS}",
    ),
    "a mean of large numbers": (
        "w", Edit((CentreAxis(OUT),)), both(put("w", 6e4), put("w", -6e4, 0, 0)), f"w.* {BEYOND}",
    ),
    "a rotation": ("w", ROTATION, along_a_row_of_the_matrix, f"w.* {BEYOND}"),
    "a fused weight": (
        "w", Edit((MERGE,)), both(put("w", 300.0, 1, 2), put("g", 300.0, 2)), f"w.* {BEYOND}",
    ),
    "NaN in a fused weight": ("w", Edit((MERGE,)), put("g", math.nan, 5), f"g.* {HOLDS}"),
    "a LayerScale": (
        "w", Edit((SCALE, CentreAxis(OUT))), both(put("w", 4e3, 6, 7), put("s", 40.0, 6)),
        f"w.* {BEYOND}",
    ),
    "NaN in a LayerScale": ("w", Edit((SCALE,)), put("s", math.inf, 5), f"s.* {HOLDS}"),
    "a product": (
        "b", Edit((ADD,)), both(put("w", 400.0, 8), put("v", 400.0)), f"b.* {BEYOND}",
    ),
    "NaN in the matrix of a product": ("b", Edit((ADD,)), put("w", math.nan, 8, 3),
                                       f"w.* {HOLDS}"),
    "a bias divided by a small weight": (
        "v", Edit((Scale("g", 0, divides=True),)),
        both(put("v", 100.0, 3), put("g", 1e-3, 3)), f"v.* {BEYOND}",
    ),
    "the level of a baked norm": (
        "g", Edit((FillLevel(*NORM),)), put("v", 6e4, slice(13)), f"g.* {BEYOND}",
    ),
    "a table with NaN before a baked norm": (
        "w", Edit((NormRows(*NORM), EncodeRows(*NORM))), put("w", math.nan, 3, 3), f"w.* {HOLDS}",
    ),
}  # fmt: skip


def held(case: str, dtype: torch.dtype) -> Tensors:
    found = tensors(dtype)
    WRONG[case][2](found)
    return found


@pytest.mark.parametrize("case", WRONG)
def test_in_memory_it_is_refused_by_name(case: str) -> None:
    (name, edit, _, words), found = WRONG[case], held(case, torch.float16)
    read = found.__getitem__
    loaded = edit.loaded(read)
    with pytest.raises(BadCheckpoint, match=f"^{words}"):
        require_finite(name, found[name], loaded, read)
    if words.endswith(BEYOND):  # a wider dtype is a way out
        require_finite(name, found[name].float(), loaded, read)


@pytest.mark.parametrize("case", WRONG)
def test_in_files_it_is_refused_by_name(case: str, tmp_path: Path) -> None:
    (name, edit, _, words), found = WRONG[case], held(case, torch.float16)
    store(tmp_path / "model", found, "single")
    (tmp_path / "out").mkdir()
    with pytest.raises(BadCheckpoint, match=words.replace("beyond", "beyond F16")):
        write_shards(opened(tmp_path / "model"), {name: edit}, tmp_path / "out")
    if words.endswith(BEYOND):
        write_shards(
            opened(tmp_path / "model"), {name: edit}, tmp_path, WriteOptions(dtype=torch.float32)
        )
        assert all(tensor.isfinite().all() for tensor in written(tmp_path).values())


def test_the_reciprocal_of_a_number_near_zero_is_not_finite(tmp_path: Path) -> None:
    found = tensors(torch.float64)
    found["g"][3] = 1e-320
    edit = Edit((Scale("g", 0, divides=True),))
    with pytest.raises(BadCheckpoint, match="^g holds .* too small to divide by.* edit of v"):
        read = found.__getitem__
        require_finite("v", found["v"], edit.loaded(read), read)
    store(tmp_path / "model", found, "single")
    (tmp_path / "out").mkdir()
    with pytest.raises(BadCheckpoint, match="^g holds a number too small to divide by and cannot"):
        write_shards(opened(tmp_path / "model"), {"v": edit}, tmp_path / "out")


CASES = {**EDITS, "rotated": ("w", ROTATION), "rotated and fused": (
    "w", Edit((MERGE, SCALE, CentreAxis(OUT), *ROTATION.steps)),
)}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_bound_is_a_bound(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor whose results fit is accepted; any other is computed and refused."""
    (name, edit), found = CASES[case], tensors(torch.float64)
    x = found[edit.source or name]
    loaded = edit.loaded(found.__getitem__)
    for scale in (1.0, 30.0):
        largest = float(loaded.apply(x * scale).abs().max())
        for limit, fits in ((1.001 * largest, True), (0.999 * largest, False)):
            if not limit:
                continue
            monkeypatch.setattr(torch, "finfo", lambda dtype, limit=limit: Limit(limit))
            computed: list[str] = []
            monkeypatch.setattr(
                "enjoyln_cli.edits.finite.rounded", lambda *args, seen=computed: seen.append("")
            )
            require_finite(name, x * scale, loaded, found.__getitem__)
            assert fits or computed


class Limit:
    """The largest number of a made-up dtype."""

    def __init__(self, largest: float) -> None:
        self.max = largest


def unchanged(model: Any, before: Tensors) -> bool:
    now = model.state_dict()
    return before.keys() == now.keys() and all(
        torch.equal(now[name].nan_to_num(), before[name].nan_to_num()) for name in before
    )


def state_of(model: Any) -> Tensors:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def in_16_bits(model_class: str, config: Any) -> Any:
    return live(model_class, config).half()


def test_a_bias_that_cannot_be_divided_moves_in_memory_too() -> None:
    """As in files, where the values decide whether a norm's bias is divided by its weight."""
    model = in_16_bits("GPT2LMHeadModel", transformers.GPT2Config(**GPT2))
    norm = model.transformer.h[0].ln_1
    with torch.no_grad():
        norm.weight.fill_(1e-3)
        norm.bias.fill_(100.0)
        model.transformer.h[0].attn.c_attn.weight.mul_(1e-2)
    ids = torch.arange(3, 17).view(2, 7)
    with torch.no_grad():
        exact = model.double()(ids).logits
        before = (model.half()(ids).logits.double() - exact).norm()
        rotate(model)
        after = (model(ids).logits.double() - exact).norm()
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert after <= 20 * before.clamp_min(1e-3 * exact.norm())


def nan_in_a_writer(model: Any) -> str:
    model.transformer.h[0].mlp.c_proj.weight.data[3, 4] = math.nan
    return r"transformer.h.0.mlp.c_proj.weight holds NaN"


def large_rows(model: Any) -> str:
    model.transformer.h[1].mlp.c_proj.weight.data.fill_(6e4)
    model.transformer.h[1].mlp.c_proj.weight.data[:, 0] = -6e4
    return r"transformer.h.1.mlp.c_proj.weight: .* beyond the range of torch.float16; convert it"


@pytest.mark.parametrize("spoil", [nan_in_a_writer, large_rows])
@pytest.mark.parametrize("how", ["fold", "rotate", "centre"])
def test_nothing_is_changed_when_one_weight_is_refused(
    spoil: Callable[[Any], str], how: str
) -> None:
    model = in_16_bits("GPT2LMHeadModel", transformers.GPT2Config(**GPT2))
    plan = analyze(model).plan
    words, before = spoil(model), state_of(model)
    with pytest.raises(BadCheckpoint, match=words):
        if how == "rotate":
            rotate(model)
        elif how == "fold":
            fold_in_memory(model, plan)
        else:
            centre_parameters(model, plan)
    assert unchanged(model, before)
    assert not any(isinstance(module, RMSNorm) for module in model.modules())
    assert model.lm_head.weight is model.transformer.wte.weight


def test_nan_may_be_allowed_in_memory() -> None:
    model = in_16_bits("GPT2LMHeadModel", transformers.GPT2Config(**GPT2))
    plan = analyze(model).plan
    nan_in_a_writer(model)
    centre_parameters(model, plan, allow_nonfinite=True)
    weight = model.transformer.h[0].mlp.c_proj.weight
    assert weight[3].isnan().all() and weight[:3].isfinite().all()


def test_a_product_of_fused_weights_beyond_float16() -> None:
    model = in_16_bits("PhiForCausalLM", transformers.PhiConfig(**PHI))
    plan = analyze(model, options=Options(merge="affine")).plan
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.input_layernorm.weight.fill_(6e3)
        layer.self_attn.q_proj.weight.fill_(20.0)
    before = state_of(model)
    with pytest.raises(BadCheckpoint, match="0.self_attn.q_proj.weight: .* beyond the range"):
        fold_in_memory(model, plan)
    assert unchanged(model, before)
    fold_in_memory(model.float(), plan)
    assert all(weight.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize(
    ("value", "words"), [(math.nan, " holds NaN"), (6.5e4, ": .*beyond the range of torch.float16")]
)
def test_refold_refuses_what_it_cannot_centre(value: float, words: str, tmp_path: Path) -> None:
    import enjoyln_cli

    source = live("BertModel", transformers.BertConfig(**BERT)).half()
    source.save_pretrained(tmp_path / "source")
    enjoyln_cli.fold(tmp_path / "source", tmp_path / "out", verify=False)
    model = enjoyln_cli.from_pretrained(tmp_path / "out", transformers.BertModel)
    rows = model.embeddings.word_embeddings.weight
    with torch.no_grad():
        rows[4] = 6.5e4
        rows[4, 1] = -6.5e4 if math.isfinite(value) else value
    before = state_of(model)
    with pytest.raises(BadCheckpoint, match=f"word_embeddings.weight{words}"):
        refold(model)
    assert unchanged(model, before)
    with torch.no_grad():
        rows[4] = 1.0
        rows[4, 1] = -1.0
    refold(model)
    assert float(rows[4].detach().float().mean().abs()) < 1e-3


def test_an_empty_tensor_is_finite() -> None:
    edit = Edit((CentreAxis(feature_axis((0, 3), 1)),))
    require_finite("w", torch.empty(0, 3), edit, dict[str, torch.Tensor]().__getitem__)
