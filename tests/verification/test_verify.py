"""``verify``: a correct fold passes, a wrong one fails, and the reported numbers are right."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rounding import TIMES
from safetensors.torch import load_file
from stored_files import changed, with_marker
from verify_cases import LAYERS, VOCABULARY, D, feature_axis, folded, gpt2, right_plan

import enjoyln_cli
from enjoyln_cli.checkpoint.reader import open_checkpoint
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.errors import AlreadyFolded, BadCheckpoint, ModelNotFound, UnsupportedModel
from enjoyln_cli.models.load import silent
from enjoyln_cli.plan.edited_tensors import CentredWeight
from enjoyln_cli.rewrite.directory import fold_checkpoint
from enjoyln_cli.verification.verify import Verification, verify

DTYPES = ["float32", "float16", "bfloat16"]
LAST = f"transformer.h.{LAYERS - 1}.mlp.c_proj"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One GPT-2 in three dtypes."""
    root = tmp_path_factory.mktemp("sources")
    model = gpt2()
    for dtype in DTYPES:
        model.to(getattr(torch, dtype)).save_pretrained(root / dtype)
    return {dtype: root / dtype for dtype in DTYPES}


@pytest.fixture(scope="module")
def outs(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("outs")
    return {dtype: folded(sources[dtype], root / dtype, right_plan()) for dtype in DTYPES}


# Correct folds.


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_fold_passes(outs: dict[str, Path], dtype: str) -> None:
    found = verify(outs[dtype], write=False)
    assert found.passed, found.summary
    assert found.failures == ()
    assert found.compute_dtype == dtype
    assert 0 < found.identity_error < 1e-14
    eps = torch.finfo(getattr(torch, dtype)).eps
    assert 0 < found.storage_error < eps
    assert found.ratio <= 1.15 and found.stock_ratio <= 1.15
    assert 0 <= found.kl < 10 * eps and found.top1_agreement > 0.95
    assert len(found.norm_input_mean) == 2 * LAYERS + 1
    assert list(found.norm_input_mean.values())[0] < eps


def test_the_plan_can_be_handed_over(outs: dict[str, Path], tmp_path: Path) -> None:
    moved = tmp_path / ".staged.x"
    shutil.copytree(outs["float32"], moved)
    (moved / "enjoyln_plan.json").unlink()
    found = verify(moved, plan=right_plan(), write=False)
    assert found.passed
    assert found == verify(outs["float32"], write=False)


def test_the_seed_decides_the_inputs(outs: dict[str, Path]) -> None:
    one, other = (verify(outs["float32"], seed=seed, write=False) for seed in (1, 2))
    assert one.runtime_error != other.runtime_error
    assert verify(outs["float32"], seed=1, write=False) == one


def test_a_fold_to_another_dtype_passes(sources: dict[str, Path], tmp_path: Path) -> None:
    out = folded(sources["float32"], tmp_path / "out", right_plan(), torch.bfloat16)
    found = verify(out, write=False)
    assert found.passed, found.summary
    assert found.compute_dtype == "bfloat16"


def test_the_report_beside_the_weights(outs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(outs["float32"], out)
    found = verify(out, seed=3)
    report = json.loads((out / "enjoyln_verify.json").read_text())
    assert report["passed"] is True and report["seed"] == 3
    for name in (
        "identity_error", "storage_error", "runtime_error", "original_error", "ratio", "kl",
        "top1_agreement", "stock_error", "norm_input_mean",
    ):  # fmt: skip
        assert report[name] == getattr(found, name)
    assert set(report["versions"]) == {"enjoyln", "torch", "transformers", "python"}
    files = {p.name for p in out.iterdir()} - {"enjoyln_verify.json"}
    assert set(report["sha256"]) == files
    weights = (out / "model.safetensors").read_bytes()
    assert report["sha256"]["model.safetensors"] == hashlib.sha256(weights).hexdigest()
    verify(out, seed=3)
    assert json.loads((out / "enjoyln_verify.json").read_text()) == report


def test_no_infinity_in_json() -> None:
    values: dict[str, Any] = {f.name: None for f in dataclasses.fields(Verification)}
    values.update(passed=False, failures=("x",), ratio=math.inf, norm_input_mean={"a": math.nan})
    values.update(rows=2, full_rows=2, inputs_are="images")
    found = Verification(**values).to_json()
    assert found["ratio"] is None and found["norm_input_mean"] == {"a": None}
    assert found["count"] == "2 images"
    json.dumps(found, allow_nan=False)


# Wrong folds.


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "weight"), ("float16", "bias")])
def test_a_writer_that_the_plan_leaves_out(
    sources: dict[str, Path], tmp_path: Path, dtype: str, kind: str
) -> None:
    plan = right_plan()
    left = tuple(w for w in plan.centred_weights if w.parameter != f"{LAST}.{kind}")
    out = folded(sources[dtype], tmp_path / "out", replace(plan, centred_weights=left))
    found = verify(out, write=False)
    assert not found.passed
    assert found.identity_error > 1e-6
    assert "the edits change the function" in found.summary
    worst, mean = list(found.norm_input_mean.items())[0]
    assert worst == "transformer.ln_f" and mean > 1e-3


def test_a_writer_that_the_weights_leave_out(
    sources: dict[str, Path], outs: dict[str, Path], tmp_path: Path
) -> None:
    original = load_file(sources["bfloat16"] / "model.safetensors")
    name = f"{LAST}.weight"
    out = changed(outs["bfloat16"], tmp_path / "out", lambda t: t.update({name: original[name]}))
    found = verify(out, write=False)
    assert not found.passed
    assert name in found.summary
    assert found.identity_error < 1e-14
    assert list(found.writer_drift)[0] == name
    assert list(found.norm_input_mean)[0] == "transformer.ln_f"


def test_a_tied_embedding_centred(sources: dict[str, Path], tmp_path: Path) -> None:
    plan = right_plan()
    name, shape = "transformer.wte.weight", (VOCABULARY, D)
    wrong = replace(
        plan,
        centred_weights=(
            *plan.centred_weights,
            CentredWeight(name, feature_axis(shape), shape),
        ),
        subtractions=(),
    )
    found = verify(folded(sources["float16"], tmp_path / "out", wrong), write=False)
    assert not found.passed
    assert found.identity_error > 1e-4


@pytest.mark.parametrize(
    ("dtype", "kind", "factor"),
    [("float32", "bias", 0.0), ("bfloat16", "weight", 1.02)],
)
def test_a_changed_affine(
    outs: dict[str, Path], tmp_path: Path, dtype: str, kind: str, factor: float
) -> None:
    name = f"transformer.h.1.ln_2.{kind}"
    out = changed(outs[dtype], tmp_path / "out", lambda t: t[name].mul_(factor))
    found = verify(out, write=False)
    assert not found.passed
    assert name in found.summary
    assert found.storage_error > torch.finfo(getattr(torch, dtype)).eps


def test_a_marker_that_forgets_the_centring(outs: dict[str, Path], tmp_path: Path) -> None:
    out = with_marker(
        outs["float32"], tmp_path / "out", lambda m: m["plan"]["subtractions"].clear()
    )
    found = verify(out, write=False)
    assert not found.passed
    assert found.identity_error > 1e-4 and found.ratio > 100
    assert found.stock_ratio < 1.25
    assert list(found.norm_input_mean.values())[0] > 0.01


@pytest.mark.parametrize(
    "change",
    [
        lambda ops: ops[0]["axis"].update(dim=5),
        lambda ops: ops[0]["axis"].update(outer=10**12),
        lambda ops: ops.append({**ops[0], "module": "transformer"}),
    ],
    ids=["no such dimension", "endless", "no tensor"],
)
def test_a_marker_with_a_centring_that_does_not_fit(
    outs: dict[str, Path], tmp_path: Path, change: Callable[[list[Any]], object]
) -> None:
    out = with_marker(
        outs["float32"], tmp_path / "out", lambda m: change(m["plan"]["subtractions"])
    )
    with pytest.raises(BadCheckpoint, match="does not run with .* convert the source") as caught:
        verify(out, write=False)
    assert "\n" not in str(caught.value)


def test_a_tensor_too_many_or_too_few(outs: dict[str, Path], tmp_path: Path) -> None:
    name = "transformer.h.0.ln_1.bias"
    less = changed(outs["float32"], tmp_path / "less", lambda t: t.pop(name))
    assert name in verify(less, write=False).summary
    more = changed(outs["float32"], tmp_path / "more", lambda t: t.update(x=torch.ones(2)))
    assert "x is stored in one" in verify(more, write=False).summary


def test_a_strict_ratio_fails(outs: dict[str, Path]) -> None:
    found = verify(outs["bfloat16"], max_ratio=0.1, write=False)
    assert not found.passed
    error = f"error {found.runtime_error:.1e} as RMSNorm, 0."
    assert found.summary.startswith(f"not verified: too far from the exact function: {error}")
    assert found.summary.endswith(f"the original's error is {found.original_error:.1e}")
    assert "(limit 0.1 x, or 0.1" in found.summary


def test_storage_shows_in_a_wider_dtype(outs: dict[str, Path]) -> None:
    found = verify(outs["bfloat16"], dtype="float32", write=False)
    assert not found.passed and found.ratio > 100
    assert "storing the weights in bfloat16 adds an error" in found.summary
    own = TIMES * found.original_error
    assert found.runtime_error == pytest.approx(found.storage_error, abs=own)


# What cannot be verified.


def test_a_checkpoint_that_was_not_folded(sources: dict[str, Path]) -> None:
    with pytest.raises(BadCheckpoint, match="enjoyln fold"):
        verify(sources["float32"])


def test_the_original_is_gone(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "source")
    out = folded(tmp_path / "source", tmp_path / "out", right_plan())
    (tmp_path / "source").rename(tmp_path / "moved")
    with pytest.raises(ModelNotFound, match="--against"):
        verify(out)
    assert verify(out, against=tmp_path / "moved", write=False).passed


def test_no_such_dtype(outs: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModel, match="int8"):
        verify(outs["float32"], dtype="int8")


CUSTOM = """
from transformers import GPT2Config, GPT2LMHeadModel

class OwnConfig(GPT2Config):
    model_type = "own"

class OwnModel(GPT2LMHeadModel):
    config_class = OwnConfig
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 2 * output.logits
        return output
"""


def test_a_class_that_comes_with_the_model(sources: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(sources["float32"], source)
    config = json.loads((source / "config.json").read_text())
    config["model_type"] = "own"
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (source / "config.json").write_text(json.dumps(config))
    (source / "own.py").write_text(CUSTOM)
    plan = replace(right_plan(), model_class="OwnModel", classes=("OwnModel",), model_type="own")
    opened = open_source(str(source), weights=True)
    out = tmp_path / "out"
    fold_checkpoint(open_checkpoint(opened), plan, out, recipe_text="")
    with pytest.raises(UnsupportedModel, match="--trust-remote-code"):
        verify(out, plan=plan)
    found = verify(out, plan=plan, trust_remote_code=True, write=False)
    assert found.passed, found.summary
    assert found.model_class == "OwnModel"


@pytest.mark.parametrize("refuses", [False, True])
def test_a_model_that_refuses_float64_leaves_nothing(
    refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XGLM makes numbers of torch's default dtype, which is float64 too in an exact run."""
    sizes = {"d_model": 20, "ffn_dim": 33, "attention_heads": 4, "num_layers": 1}
    config = transformers.XGLMConfig(**sizes, vocab_size=37, max_position_embeddings=31)
    transformers.XGLMForCausalLM(config).save_pretrained(tmp_path / "source")
    if not refuses:
        enjoyln_cli.fold(tmp_path / "source", tmp_path / "out")
        return

    def refuse(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        if x.dtype == torch.float64:
            raise RuntimeError("not implemented for Double")
        return bmm(x, *args, **options)

    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", refuse)
    with pytest.raises(UnsupportedModel, match="does not run in float64.*fold --no-verify"):
        enjoyln_cli.fold(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_result_is_not_its_own_original(outs: dict[str, Path]) -> None:
    with pytest.raises(AlreadyFolded):
        verify(outs["float32"], against=outs["float32"])


@pytest.mark.parametrize("hidden", [True, False])
def test_progress_bars_of_the_hub_are_left_as_they_were(hidden: bool) -> None:
    from huggingface_hub import utils

    before = utils.are_progress_bars_disabled()
    switch = {True: utils.disable_progress_bars, False: utils.enable_progress_bars}
    try:
        switch[hidden]()
        with silent():
            assert utils.are_progress_bars_disabled()
        assert utils.are_progress_bars_disabled() == hidden
    finally:
        switch[before]()
