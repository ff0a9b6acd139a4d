"""Converted models in pipelines, adapters and quantisation libraries."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from live_models import CHECKPOINTS, folded_norms
from rounding import TIMES, as_exact, in_float64, logits, lost_by, relative
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from enjoyln_cli import analyze, fold, from_pretrained, optimize, refold
from enjoyln_cli.errors import NotCentred, UnsupportedModel
from enjoyln_cli.plan.fold_options import Options

QUANTISED = r"q_proj: is quantised \(\w+\), so its output no longer has zero mean; load"


@pytest.fixture
def phi(outs: dict[str, Path]) -> Path:
    return outs["phi"]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return relative(a, b) <= TIMES * lost_by(CHECKPOINTS / "phi")


def test_a_pipeline_is_optimised_inside(phi: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "phi").eval()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "phi")
    pipe = pipeline(
        "text-generation",
        model=AutoModelForCausalLM.from_pretrained(phi).eval(),
        tokenizer=tokenizer,
    )
    plan = analyze(pipe).plan
    assert plan.folded and plan == analyze(pipe.model).plan
    assert optimize(pipe) is pipe and len(folded_norms(pipe.model)) == 13
    assert close(logits(pipe.model), logits(stock))
    assert refold(pipe) is pipe
    reference = pipeline("text-generation", model=stock, tokenizer=tokenizer)
    given = {"max_new_tokens": 5, "do_sample": False}
    assert pipe("You may", **given) == reference("You may", **given)


def test_an_object_without_a_model_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="dict is not a model and has no model"):
        optimize({})


def test_a_sentence_transformer_is_optimised_inside(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    parts = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    modules = [parts.Transformer(str(CHECKPOINTS / "bert")), parts.Pooling(80)]
    library.SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "encoder"))
    options = Options(widen_mlp=True)
    fold(tmp_path / "encoder", tmp_path / "out", verify=False, options=options)
    stock = library.SentenceTransformer(str(tmp_path / "encoder"), device="cpu")
    encoder = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert optimize(encoder) is encoder and len(folded_norms(encoder)) == 4
    texts = ["You may copy this work.", "There is no warranty."]
    found, expected = (one.encode(texts, convert_to_tensor=True) for one in (encoder, stock))
    exact = in_float64(stock).encode(texts, convert_to_tensor=True)
    assert as_exact(found, expected, exact)
    assert analyze(stock).plan.folded


@pytest.fixture
def torchao() -> Any:
    pytest.importorskip("torchao")
    from torchao import quantization

    return quantization


def test_torchao_in_place(phi: Path, torchao: Any) -> None:
    """The result equals the stock class's with the same layers quantised."""
    model, stock = from_pretrained(phi), AutoModelForCausalLM.from_pretrained(phi).eval()
    logits(model)
    for one in (model, stock):
        torchao.quantize_(one, torchao.Int8WeightOnlyConfig())
    with pytest.warns(UserWarning, match=f"computing LayerNorm: .*{QUANTISED}"):
        assert close(logits(model), logits(stock))


def test_bitsandbytes(phi: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    with pytest.raises(NotCentred, match=QUANTISED):
        from_pretrained(phi, quantization_config=BitsAndBytesConfig(load_in_8bit=True))


ADAPTER = r"has an adapter \(peft\.tuners\.lora\.layer\.Linear\) whose output may have a mean"


def lora(layers: str) -> tuple[Any, Any]:
    """The library, and a random adapter for all layers of this name."""
    peft = pytest.importorskip("peft")
    options = {"r": 4, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return peft, peft.LoraConfig(target_modules=[layers], **options)


def test_the_advice_for_an_adapter_can_be_followed(phi: Path) -> None:
    peft, config = lora("dense")
    model = peft.get_peft_model(from_pretrained(phi), config).eval()
    with pytest.warns(UserWarning, match=ADAPTER):
        tuned = logits(model)
    with pytest.raises(NotCentred, match=ADAPTER):
        optimize(model)
    refold(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="computing LayerNorm")
        assert close(logits(model), tuned)
        with model.disable_adapter():
            assert not close(logits(model), tuned)
    model.add_adapter("other", config)
    with pytest.warns(
        UserWarning, match=r"dense\S+other: .*for an adapter call enjoyln_cli.refold"
    ):
        logits(model)
    merged = refold(model.merge_and_unload())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="computing LayerNorm")
        assert close(logits(merged), tuned)


def test_a_hook_on_an_adapter_is_noticed(phi: Path) -> None:
    """The hook may add a mean to what the adapter adds."""
    peft, config = lora("dense")
    model = refold(peft.get_peft_model(from_pretrained(phi), config).eval())
    layer = model.get_base_model().model.layers[0].self_attn.dense.lora_B["default"]
    logits(model)
    layer.register_forward_hook(lambda module, args, output: output + 1)
    with pytest.warns(UserWarning, match=r"computing LayerNorm: .*lora_B.* hook"):
        logits(model)


def test_an_adapter_on_a_reader_is_optimised_inside(phi: Path) -> None:
    peft, config = lora("fc1")
    stock = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(phi), config).eval()
    expected = logits(stock)
    assert optimize(stock) is stock
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="computing LayerNorm")
        assert close(logits(stock), expected)
