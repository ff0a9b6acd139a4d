"""Norms whose squares overflow in float16 are right where an engine takes them apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from commands import refused
from float16_programs import NORMS, parts_of, rounded_edges
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnxruntime import InferenceSession
from tiny_models import GPT2, PHI, live
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, PhiConfig

from enjoyln_cli import export, fold
from enjoyln_cli.comparison.data_files import UserData
from enjoyln_cli.errors import UnsupportedModel

LARGE = 450.0
TOKENS = ((3, 5, 7, 11, 13, 2), (17, 19, 23, 29, 31, 30))
CONFIGS: dict[str, Any] = {
    "PhiForCausalLM": PhiConfig(**PHI, resid_pdrop=0.0),
    "GPT2LMHeadModel": GPT2Config(**GPT2),
    "Gemma3ForCausalLM": Gemma3TextConfig(
        **{**PHI, "num_key_value_heads": 3}, head_dim=8, tie_word_embeddings=True),
}  # fmt: skip


def with_large_features(name: str, folder: Path) -> Path:
    """A model whose residual stream has two features near +-450 for every token."""
    model = live(name, CONFIGS[name]).float()
    with torch.no_grad():
        table = (
            model.get_input_embeddings().weight
            if name != "GPT2LMHeadModel"
            else model.transformer.wpe.weight
        )
        table[:, 3] += LARGE
        table[:, 5] -= LARGE
    model.save_pretrained(folder)
    return folder


def taken_apart(file: Path) -> onnx.ModelProto:
    """The program with its norms in single operators, and every edge in float16."""
    model = onnx.load(file)
    nodes = []
    for stored in model.graph.initializer:
        if stored.data_type == onnx.TensorProto.FLOAT:
            narrow = onnx.numpy_helper.to_array(stored).astype(np.float16)
            stored.CopyFrom(onnx.numpy_helper.from_array(narrow, stored.name))
    for node in model.graph.node:
        for given in node.attribute:
            if node.op_type == "Cast" and given.i == onnx.TensorProto.FLOAT:
                given.i = onnx.TensorProto.FLOAT16
            if node.op_type == "Constant" and given.t.data_type == onnx.TensorProto.FLOAT:
                narrow = onnx.numpy_helper.to_array(given.t).astype(np.float16)
                given.t.CopyFrom(onnx.numpy_helper.from_array(narrow))
    for node in model.graph.node:
        nodes += parts_of(node, np.float16) if node.op_type in NORMS else [node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def inputs_of(model: onnx.ModelProto) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for value in model.graph.input:
        sizes = [d.dim_value or d.dim_param for d in value.type.tensor_type.shape.dim]
        if value.name == "input_ids":
            given[value.name] = np.array(TOKENS)
        elif value.name == "attention_mask":
            given[value.name] = np.ones((2, 6), np.int64)
        elif value.name == "position_ids":
            given[value.name] = np.arange(6)[None].repeat(2, 0)
        else:
            kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            given[value.name] = np.zeros([2, sizes[1], 0, sizes[3]], kind)
    return given


def logits_in_float16(folder: Path) -> Any:
    """By ``onnx.reference``, which computes in numpy's own halves."""
    model = taken_apart(folder / "onnx" / "model_fp16.onnx")
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(model).run(["logits"], inputs_of(model))[0]


def logits_in_onnxruntime(folder: Path) -> Any:
    """With each result rounded to float16."""
    model = rounded_edges(folder / "onnx" / "model.onnx")
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["logits"], inputs_of(model))[0]


def exact_logits(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_logits_survive_float16(name: str, tmp_path: Path) -> None:
    """Phi's stream is scaled in its weights; the others' table is tied, so norms are scaled.

    Gemma's norms are several operators of the program.
    """
    source = with_large_features(name, tmp_path / "model")
    out = source if name == "Gemma3ForCausalLM" else tmp_path / "out"
    if out is not source:
        fold(source, out, verify=False)
    plain = export(out, tmp_path / "plain", dtype="float16", verify=False)
    safe = export(out, tmp_path / "safe", dtype="float16", fp16_data=UserData(tokens=TOKENS))
    assert not plain.overflowing
    assert len(safe.overflowing) == (3 if name == "PhiForCausalLM" else 5)
    exact = exact_logits(source)
    before, after = logits_in_float16(tmp_path / "plain"), logits_in_float16(tmp_path / "safe")
    pairs = [(before, after)]
    if name == "Gemma3ForCausalLM":
        export(out, tmp_path / "plain32", verify=False)
        export(out, tmp_path / "safe32", fp16_data=UserData(tokens=TOKENS), verify=False)
        pairs.append(tuple(logits_in_onnxruntime(tmp_path / of) for of in ("plain32", "safe32")))
    for before, after in pairs:
        assert np.abs(after - exact).max() < 0.05 * np.abs(exact).max()
        assert not np.abs(before - exact).max() < 0.2 * np.abs(exact).max()
    multiplications = [
        program.nodes.get("Mul", 0)
        for program in (*plain.programs.values(), *safe.programs.values())
    ]
    added = multiplications[1] - multiplications[0]
    assert added == (0 if name == "PhiForCausalLM" else 5)


@pytest.mark.slow
def test_a_model_that_does_not_overflow_is_left_alone(tmp_path: Path) -> None:
    live("PhiForCausalLM", CONFIGS["PhiForCausalLM"]).float().save_pretrained(tmp_path / "model")
    fold(tmp_path / "model", tmp_path / "out", verify=False)
    for name, data in (("plain", None), ("safe", UserData(tokens=TOKENS))):
        made = export(tmp_path / "out", tmp_path / name, verify=False, fp16_data=data)
        assert not made.overflowing
    files = [tmp_path / name / "onnx" / "model.onnx" for name in ("plain", "safe")]
    first, second = (onnx.load(file) for file in files)
    assert [n.op_type for n in first.graph.node] == [n.op_type for n in second.graph.node]
    for one, other in zip(first.graph.initializer, second.graph.initializer, strict=True):
        assert one.raw_data == other.raw_data


def test_data_and_the_option_need_each_other(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "out").mkdir()
    base = ["export", str(tmp_path / "out"), "-o", str(tmp_path / "onnx")]
    assert "--fp16-safe" in refused(*base, "--text", str(tmp_path / "text.txt"), status=2)
    assert "--text" in refused(*base, "--fp16-safe", status=2)


def test_no_data_is_refused(tmp_path: Path) -> None:
    live("PhiForCausalLM", CONFIGS["PhiForCausalLM"]).float().save_pretrained(tmp_path / "model")
    fold(tmp_path / "model", tmp_path / "out", verify=False)
    with pytest.raises(UnsupportedModel, match="no data: pass one of"):
        export(tmp_path / "out", tmp_path / "safe", verify=False, fp16_data=UserData())
    assert not (tmp_path / "safe").exists()
