"""An ONNX file computes the original's function, with one node for each folded norm."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from commands import good, refused
from live_models import CHECKPOINTS
from stored_files import shallow
from tiny_models import BERT, live
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MPNetConfig,
    OPTConfig,
)

from enjoyln_cli import export, fold, from_pretrained, load_onnx
from enjoyln_cli.checkpoint.marker import read_marker
from enjoyln_cli.checkpoint.open_options import OPENED_PLAINLY
from enjoyln_cli.comparison.run import run
from enjoyln_cli.errors import (
    BadCheckpoint,
    EnjoyLNError,
    UnsupportedModel,
    VerificationFailed,
)
from enjoyln_cli.models.classes import class_named
from enjoyln_cli.onnx_export import onnx_program
from enjoyln_cli.onnx_export.export import Exported
from enjoyln_cli.onnx_export.programs import programs_of
from enjoyln_cli.onnx_export.requirements import require_packages
from enjoyln_cli.onnx_export.runtimes import RUNTIMES
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.verification.model_to_export import open_to_export
from enjoyln_cli.verification.verify_options import ExportOptions

Outs = dict[str, Path]
Converted = Callable[[str], Path]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "bert widened": ("bert", {"widen_mlp": True}),
    "vit": ("vit", {}),
}
"""For each case: a checkpoint, and how it is converted. They have two layers each."""


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Converts the checkpoint of a case, once."""
    folder = tmp_path_factory.mktemp("converted")

    @cache
    def one(case: str) -> Path:
        name, options = CASES[case]
        source = shallow(name, folder / f"source of {case}")
        fold(source, folder / case, verify=False, options=Options(**options))
        return folder / case

    return one


@pytest.fixture(scope="module")
def gpt2(converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """GPT-2 without its head, with its norms' biases, exported and verified."""
    folder = tmp_path_factory.mktemp("onnx") / "gpt2"
    return export(converted("gpt2"), folder, model_class="GPT2Model")


def file_of(found: Exported) -> Path:
    """The file of an export of one program."""
    return Path(found.folder, found.files[0])


def batches(found: Exported) -> list[dict[str, torch.Tensor]]:
    """Inputs of several sizes, with padding on the right and on the left."""
    torch.manual_seed(5)
    inputs = found.programs["model"].inputs
    if "pixel_values" in inputs:
        shape = inputs["pixel_values"][1:]
        return [{"pixel_values": torch.randn(rows, *map(int, shape))} for rows in (1, 4)]
    made = []
    for rows, tokens, padded in ((1, 1, 0), (1, 23, 0), (4, 9, 3), (4, 9, -3)):
        ids = torch.randint(3, 500, (rows, tokens))
        mask = torch.ones_like(ids)
        if padded:
            mask[-1, slice(-padded, None) if padded > 0 else slice(None, -padded)] = 0
        batch = {"input_ids": ids, "attention_mask": mask}
        if "token_type_ids" in inputs:
            batch["token_type_ids"] = torch.randint(0, 2, ids.shape)
        made.append(batch)
    return made


def errors(found: Exported, runtime: str, original: Path) -> tuple[float, float]:
    """The relative errors over all batches: the file's, and the original's in its dtype.

    Padding is left out of the comparison.
    """
    dtype = getattr(torch, found.dtype)
    cls: Any = class_named(found.model_class)
    compute = RUNTIMES[runtime](file_of(found))
    exact = cls.from_pretrained(original).eval().double()
    rounded = cls.from_pretrained(original, dtype=dtype).eval()
    off, own, size = 0.0, 0.0, 0.0
    for batch in batches(found):
        batch = {n: v.to(dtype) if v.is_floating_point() else v for n, v in batch.items()}
        real = batch.get("attention_mask", torch.ones(())).bool()
        for name in found.programs["model"].outputs:
            target = run(exact, [batch])[0][name][real]
            off += float((compute(batch)[name][real].double() - target).square().sum())
            own += float((run(rounded, [batch])[0][name][real].double() - target).square().sum())
            size += float(target.square().sum())
    return (off / size) ** 0.5, (own / size) ** 0.5


def added_zeros(model: onnx.ModelProto) -> list[str]:
    zeros = {
        one.name for one in model.graph.initializer if not onnx.numpy_helper.to_array(one).any()
    }
    return [
        node.name for node in model.graph.node if node.op_type == "Add" and zeros & {*node.input}
    ]


def count(model: onnx.ModelProto, kind: str) -> int:
    return sum(node.op_type == kind for node in model.graph.node)


def source_of(out: Path) -> Path:
    return Path(read_marker(json.loads((out / "config.json").read_text())).source)


def require_right(found: Exported, out: Path, runtimes: tuple[str, ...] = ("onnxruntime",)) -> None:
    """The file has one node for each norm, and computes the function of the original."""
    plan = read_marker(json.loads((out / "config.json").read_text())).plan
    model = onnx.load(file_of(found))
    onnx.checker.check_model(file_of(found), full_check=True)
    assert [entry.version for entry in model.opset_import if not entry.domain] == [23]
    assert count(model, "RMSNormalization") == len(plan.folded)
    assert count(model, "LayerNormalization") == len(plan.kept)
    assert count(model, "ReduceMean") == len(plan.subtractions) == found.centrings
    assert not added_zeros(model)
    assert not any(node.metadata_props for node in model.graph.node)
    for runtime in runtimes:
        error, own = errors(found, runtime, source_of(out))
        assert 0 < error <= 2 * own, (runtime, error, own)


@pytest.mark.slow
def test_names_and_axes_are_as_clients_expect_them(gpt2: Exported) -> None:
    axes = ["batch_size", "sequence_length"]
    (program,) = gpt2.programs.values()
    assert program.inputs == {"input_ids": axes, "attention_mask": axes}
    assert program.outputs == ("last_hidden_state",) and gpt2.model_class == "GPT2Model"
    model = onnx.load(file_of(gpt2))

    def shape(value: Any) -> list[Any]:
        return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]

    assert {one.name: shape(one) for one in model.graph.input} == program.inputs
    outputs = {one.name: shape(one) for one in model.graph.output}
    assert outputs == {"last_hidden_state": [*axes, 96]}
    assert gpt2.files == ("onnx/model.onnx",)
    assert gpt2.bytes_written == file_of(gpt2).stat().st_size
    config = json.loads(Path(gpt2.folder, "config.json").read_text())
    assert config["architectures"] == ["GPT2Model"] and "enjoyln" not in config


@pytest.mark.slow
def test_a_model_that_was_not_converted_is_exported(tmp_path: Path) -> None:
    """With its tied head and random norms, stored in 16 bits; the file has 32."""
    sizes = {**BERT, "word_embed_proj_dim": BERT["hidden_size"], "ffn_dim": 72}
    model = live("OPTForCausalLM", OPTConfig(**sizes))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "opt")
    shown = good("export", tmp_path / "opt", "-o", tmp_path / "onnx", "--dtype", "float32")
    assert "exported OPTForCausalLM (float32, opset 20): 5 LayerNormalization\n" in shown
    file = tmp_path / "onnx" / "onnx" / "model.onnx"
    loaded = load_onnx(tmp_path / "onnx")
    ids = torch.randint(3, 37, (2, 11))
    exact = type(model).from_pretrained(tmp_path / "opt", dtype=torch.float64).eval()
    rounded = loaded(ids).logits.double() - exact(ids).logits
    assert 0 < rounded.norm() < 1e-5 * exact(ids).logits.norm()
    assert count(onnx.load(file), "RMSNormalization") == 0
    wrong = (
        (
            {"dtype": "float32", "against": tmp_path / "opt"},
            UnsupportedModel,
            "was not converted: drop --against",
        ),
        ({"dtype": "bfloat16"}, UnsupportedModel, "pass --dtype float32 or float16"),
        ({"dtype": "float32", "max_ratio": 1e-3}, VerificationFailed, "too far from the exact"),
    )
    for options, error, text in wrong:
        with pytest.raises(error, match=text):
            export(tmp_path / "opt", tmp_path / "other", **options)
        assert not (tmp_path / "other").exists()
    said = refused("export", tmp_path / "onnx", "-o", tmp_path / "other")
    assert "was written by `enjoyln quantize` or `export`; pass its original" in said


@pytest.mark.slow
def test_the_result_is_plain_data(gpt2: Exported) -> None:
    found = json.loads(json.dumps(gpt2.to_json()))
    assert found["programs"]["model"]["nodes"]["RMSNormalization"] == 5
    assert [check["failure"] for check in found["checks"]] == ["", ""]


@pytest.mark.slow
def test_it_computes_the_function_of_the_original(gpt2: Exported, converted: Converted) -> None:
    require_right(gpt2, converted("gpt2"))
    assert gpt2.biased == 5 and gpt2.opset == 23
    assert [check.runtime.split()[0] for check in gpt2.checks] == ["onnxruntime", "openvino"]
    for check in gpt2.checks:
        assert not check.failure and check.ratio is not None and 0 < check.ratio <= 1.25


@pytest.mark.slow
def test_an_older_opset_has_no_rms_normalization(converted: Converted, tmp_path: Path) -> None:
    found = export(converted("vit"), tmp_path / "onnx", opset=20)
    assert found.opset == 20 and len(found.checks) == len(RUNTIMES)
    nodes = found.programs["model"].nodes
    assert "RMSNormalization" not in nodes and nodes["LayerNormalization"] == 5
    model = onnx.load(file_of(found))
    assert [entry.version for entry in model.opset_import if not entry.domain] == [20]


@pytest.mark.slow
def test_a_widened_model_in_both_programs(converted: Converted, tmp_path: Path) -> None:
    out = converted("bert widened")
    found = export(out, tmp_path / "onnx")
    require_right(found, out, tuple(RUNTIMES))
    assert found.biased == 2
    assert os.listdir(tmp_path) == ["onnx"]


@pytest.mark.slow
def test_the_command_in_float16(converted: Converted, tmp_path: Path) -> None:
    out = converted("vit")
    shown = good("export", out, "-o", tmp_path / "onnx", "--dtype", "float16")
    assert "exported ViTForImageClassification (float16, opset 23): 5 RMSNormalization\n" in shown
    assert "model: from pixel_values [batch_size, 3, 32, 32] to logits\n" in shown
    assert "5 RMSNorms add a bias in a second node; fold with --merge bias\n" in shown
    assert shown.count("same outputs up to float16 rounding") == len(RUNTIMES)
    file = tmp_path / "onnx" / "onnx" / "model_fp16.onnx"
    kinds = {one.data_type for one in onnx.load(file).graph.initializer}
    assert onnx.TensorProto.FLOAT16 in kinds
    stored = sum(weights.stat().st_size for weights in out.glob("*.safetensors"))
    assert file.stat().st_size < 0.6 * stored


@pytest.mark.slow
def test_weights_that_were_rounded_further_than_the_file(
    converted: Converted, tmp_path: Path
) -> None:
    fold(source_of(converted("gpt2")), tmp_path / "out", dtype="bfloat16", verify=False)
    with pytest.raises(VerificationFailed, match=r"is stored in bfloat16; fold with --dtype float"):
        export(tmp_path / "out", tmp_path / "onnx", dtype="float32")
    assert os.listdir(tmp_path) == ["out"]


def test_a_norm_that_computes_layer_norm_is_refused(outs: Outs) -> None:
    model = from_pretrained(outs["gpt2"])
    with torch.no_grad():
        model.transformer.h[0].mlp.c_proj.weight += 1
        model(torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(UnsupportedModel, match=r"h\.0\.ln_1 of GPT2.* exported as LayerNorm: "):
        onnx_program.require_rms_norms((), model, {"transformer.h.0.ln_1"})


def test_a_fold_for_one_class_is_opened_as_that_class(tmp_path: Path) -> None:
    """The config names a masked language model, and the fold is proven for its encoder alone."""
    source, out = tmp_path / "source", tmp_path / "out"
    live("MPNetForMaskedLM", MPNetConfig(**BERT)).save_pretrained(source)
    fold(source, out, model_class="MPNetModel", dtype="float32", verify=False)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["MPNetForMaskedLM"]
    found = open_to_export(str(out), ExportOptions(), OPENED_PLAINLY)
    assert found.model_class == "MPNetModel"
    for opened in (found.opened, found.original):
        assert type(found.load(opened, torch.float32)).__name__ == "MPNetModel"


@pytest.mark.slow
def test_a_model_that_torch_cannot_export_is_refused_by_name() -> None:
    class Branching(GPT2LMHeadModel):
        """Takes another way if the sum of its inputs is large, which no graph can hold."""

        def forward(self, input_ids: Any = None, **options: Any) -> Any:
            if input_ids.sum() > 1000:
                input_ids = input_ids + 1
            return super().forward(input_ids, **options)

    config = GPT2Config(vocab_size=37, n_embd=24, n_layer=1, n_head=3)
    with pytest.raises(UnsupportedModel, match=r"^torch.onnx cannot export Branching: .+") as found:
        programs_of(Branching(config).eval(), torch.float32)
    assert "\x1b" not in str(found.value)


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        (
            {"dtype": "bfloat16"},
            UnsupportedModel,
            "bfloat16 cannot be exported: .*pass --dtype",
        ),
        ({"dtype": "float64"}, UnsupportedModel, "float64 cannot be exported"),
        ({"model_class": "GPT2ForQuestionAnswering"}, EnjoyLNError, "GPT2ForQuestionAnswering"),
        ({"model_class": "BertModel"}, EnjoyLNError, "BertModel"),
        ({"against": CHECKPOINTS / "bert"}, BadCheckpoint, "of type bert"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    how: dict[str, Any], kind: type[EnjoyLNError], said: str, outs: Outs, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=said):
        export(outs["gpt2"], tmp_path / "onnx", **how)
    assert os.listdir(tmp_path) == []


def test_missing_libraries_are_named() -> None:
    with pytest.raises(
        UnsupportedModel,
        match=r'needs no_such_b: pip install "\.\[onnx\]" in the clone of enjoyln$',
    ):
        require_packages(("onnx", "no_such_b"))
    require_packages(("onnx", "onnxscript"))


def test_options_of_the_check_need_it(outs: Outs, tmp_path: Path) -> None:
    ask = partial(refused, "export", outs["gpt2"], "-o", tmp_path / "onnx", "--no-verify")
    for option in (("--against", "gpt2"), ("--max-ratio", "2")):
        assert f"{option[0]} needs the check" in ask(*option, status=2)
