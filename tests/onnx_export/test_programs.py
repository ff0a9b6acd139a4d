"""Programs are traced once, and any model of the same structure can fill them with its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir
import pytest
import torch
from live_models import shaken
from tiny_models import GPT2
from transformers import GPT2Config, GPT2LMHeadModel

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.onnx_export import programs as module
from enjoyln_cli.onnx_export.cached_run import load_programs, whole_rows
from enjoyln_cli.onnx_export.programs import Programs, programs_of, save, with_weights

pytestmark = pytest.mark.slow


def gpt2(seed: int, **changed: Any) -> Any:
    torch.manual_seed(seed)
    return shaken(GPT2LMHeadModel(GPT2Config(**{**GPT2, **changed})))


@pytest.fixture(scope="module")
def traced() -> Programs:
    return programs_of(gpt2(0), torch.float32)


def require_same(programs: Programs, model: Any, folder: Path) -> None:
    """The programs compute the logits of ``model``."""
    save(programs, folder)
    ids = torch.arange(3, 33).reshape(2, 15)
    with torch.no_grad():
        expected = model(ids).logits
    found = whole_rows(load_programs(folder))({"input_ids": ids})["logits"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert found.std() > 0.1


def stored(programs: Programs) -> dict[str, Any]:
    return dict(programs.models["model"].graph.initializers)


def test_the_traced_model_fills_its_programs(traced: Programs, tmp_path: Path) -> None:
    require_same(traced, gpt2(0), tmp_path)
    names = stored(traced)
    assert {"transformer.wte.weight", "transformer.h.1.attn.c_attn.weight"} <= names.keys()
    assert "lm_head.weight" not in names


@pytest.mark.parametrize("tied", [True, False])
def test_another_model_fills_them_too(tied: bool, traced: Programs, tmp_path: Path) -> None:
    model = gpt2(1)
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    filled = with_weights(traced, model)
    require_same(filled, model, tmp_path)
    names = stored(filled)
    assert ("lm_head.weight.transposed" in names) is not tied
    kinds = [node.op_type for node in filled.models["model"].graph]
    heads = [node for node in filled.models["model"].graph if node.op_type == "Transpose"]
    reads = {value.name for node in heads for value in node.inputs}
    assert ("transformer.wte.weight" in reads) is tied and "MatMul" in kinds
    assert stored(traced)["transformer.wte.weight"].const_value is not None


def test_a_model_of_another_structure_is_refused(traced: Programs) -> None:
    with pytest.raises(UnsupportedModel, match=r"has no transformer\.h\.1\.\S+, .* and \d+ more"):
        with_weights(traced, gpt2(0, n_layer=1))
    with pytest.raises(UnsupportedModel, match=r"wpe.weight has shape \(17, 21\) in float32"):
        with_weights(traced, gpt2(0, n_positions=17))
    with pytest.raises(UnsupportedModel, match="in float16, but its program reads .* in float32"):
        with_weights(traced, gpt2(0).half())


def test_large_weights_are_a_file_of_their_own(
    traced: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGEST", 1000)
    files = save(traced, tmp_path, "_fp16")
    assert [file.name for file in files] == ["model_fp16.onnx", "model_fp16.onnx_data"]
    assert all(file.parent == tmp_path / "onnx" for file in files)
    assert files[1].stat().st_size > 1000
    model = onnx_ir.load(files[0])
    assert not any(node.metadata_props for node in model.graph.all_nodes())
