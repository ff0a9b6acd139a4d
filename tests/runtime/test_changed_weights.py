"""Weights that change after a result was loaded: LayerNorm until it is folded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from converted_checkpoints import (
    falls_back_until_refolded,
    inputs,
    original,
    run,
    same,
    shift_writers,
)
from live_models import computes_rms, folded_norms
from torch import nn
from transformers import AutoModelForCausalLM

from enjoyln_cli import from_pretrained, optimize, refold
from enjoyln_cli.errors import NotCentred, UnsupportedModel

pytestmark = [
    pytest.mark.filterwarnings("error:computing LayerNorm"),
    pytest.mark.usefixtures("seeded"),
]


@pytest.mark.parametrize("name", ["gpt2", "phi"])
def test_a_fine_tuned_result_is_refused_until_it_is_refolded(
    outs: dict[str, Path], tmp_path: Path, name: str
) -> None:
    given = inputs(name)
    load = AutoModelForCausalLM.from_pretrained
    tuned = load(outs[name])
    shift_writers(tuned)
    tuned.save_pretrained(tmp_path / "tuned")
    with pytest.raises(NotCentred, match=r"\w\.\w+: its mean is .*refold"):
        from_pretrained(tmp_path / "tuned")
    other = load(tmp_path / "tuned")
    assert refold(other) is other
    assert computes_rms(other, **given)
    assert same(other, tuned, given)
    other.save_pretrained(tmp_path / "refolded")
    again = from_pretrained(tmp_path / "refolded")
    assert computes_rms(again, **given) and same(again, tuned, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_and_then_evaluating(outs: dict[str, Path], dtype: torch.dtype) -> None:
    model, given = from_pretrained(outs["gpt2"], dtype=dtype), inputs("gpt2")
    assert not computes_rms(model.train(), **given)
    steps = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(5):
        model(**given, labels=given["input_ids"]).loss.backward()
        steps.step()
        steps.zero_grad()
    model.eval()
    stock = AutoModelForCausalLM.from_pretrained(outs["gpt2"], dtype=dtype)
    stock.load_state_dict(model.state_dict())
    falls_back_until_refolded(model, stock, given, "computing LayerNorm: .*refold")


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("part", ["", "transformer"])
def test_an_update_that_leaves_no_trace_is_seen(
    outs: dict[str, Path], trains: bool, part: str
) -> None:
    """By the first call, as of an adapter that is merged right after loading, and after training.

    Of the whole model, and of its base model.
    """
    model = from_pretrained(outs["gpt2"])
    model.train(trains)
    model.transformer.h[1].mlp.c_proj.weight.data.add_(0.1)
    model.eval()
    with pytest.warns(UserWarning, match=r"h\.1\.mlp\.c_proj\.weight: its mean is"):
        run(model.get_submodule(part), inputs("gpt2"))


@pytest.mark.parametrize("assign", [False, True])
def test_other_weights_loaded_into_it(outs: dict[str, Path], assign: bool) -> None:
    model, given = from_pretrained(outs["gpt2"]), inputs("gpt2")
    run(model, given)
    stock = original("gpt2")
    model.load_state_dict(stock.state_dict(), assign=assign)
    falls_back_until_refolded(model, stock, given, "computing LayerNorm")


@pytest.mark.parametrize("name, folds", [("gpt2", True), ("phi", False)])
def test_new_embedding_rows(outs: dict[str, Path], name: str, folds: bool) -> None:
    """GPT-2 centres rows at run time. Phi's rows are centred in the weights; new rows are not."""
    model, stock = (
        load(outs[name]) for load in (from_pretrained, AutoModelForCausalLM.from_pretrained)
    )
    for one in (model, stock):
        torch.manual_seed(3)
        one.resize_token_embeddings(517, mean_resizing=False)
        with torch.no_grad():
            one.get_input_embeddings().weight[509:] += 0.3
    given = {"input_ids": torch.tensor([[5, 510, 7, 516]])}
    if folds:
        assert computes_rms(model, **given) and same(model, stock, given)
        assert computes_rms(refold(model), **given) and same(model, stock, given)
    else:
        falls_back_until_refolded(model, stock, given, r"embed_tokens\.weight: its mean is")


def test_an_embedding_that_loses_its_centring(outs: dict[str, Path]) -> None:
    model, given = from_pretrained(outs["gpt2"]), inputs("gpt2")
    plain = nn.Embedding(509, 96)
    plain.weight = model.transformer.wte.weight
    model.set_input_embeddings(plain)
    falls_back_until_refolded(model, original("gpt2"), given, r"transformer\.wte: its added mean")


class Quantised(nn.Linear):
    """A layer as in bitsandbytes: another class, int8 values and a scale for each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.bias = linear.bias
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale, persistent=False)
        values = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(values, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * self.scale, self.bias)


def quantise(model: Any) -> Any:
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and "lm_head" not in path:
            above, _, name = path.rpartition(".")
            setattr(model.get_submodule(above), name, Quantised(module))
    return model


def test_linears_that_are_quantised_after_loading(outs: dict[str, Path]) -> None:
    """Rounding to int8 leaves means in the weights, which LayerNorm removes."""
    given = inputs("phi")
    stock = quantise(AutoModelForCausalLM.from_pretrained(outs["phi"]))
    model = quantise(from_pretrained(outs["phi"]))
    with pytest.warns(UserWarning, match=r"\.q_proj: is quantised \(int8\), so"):
        assert same(model, stock, given)
    assert not computes_rms(model, **given)
    with pytest.raises(NotCentred, match=r"q_proj: is quantised \(int8\), so its output"):
        optimize(stock)
    with pytest.raises(NotCentred, match=r"q_proj: is quantised \(int8\), so its output"):
        refold(model)


def test_a_block_that_the_config_adds_is_refused(outs: dict[str, Path]) -> None:
    layers = transformers.AutoConfig.from_pretrained(outs["gpt2"]).n_layer
    model = AutoModelForCausalLM.from_pretrained(outs["gpt2"], n_layer=layers + 1).eval()
    with pytest.raises(NotCentred, match="was not there when the model was converted"):
        optimize(model)
    assert not folded_norms(model)


def test_a_layer_whose_weight_is_gone_is_refused_first(
    outs: dict[str, Path],
) -> None:
    class Linear(nn.Module):
        """Hides the weight, as the layers of ``torch.ao.quantization.quantize_dynamic`` do."""

        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.hidden = [inner.weight.detach(), inner.bias]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, *self.hidden)

    model = AutoModelForCausalLM.from_pretrained(outs["phi"])
    model.model.layers[0].mlp.fc2 = Linear(model.model.layers[0].mlp.fc2)
    with pytest.raises(NotCentred, match=r"has no '\S+fc2.weight'.*the layer was replaced"):
        optimize(model)
    assert type(model.model.final_layernorm) is nn.LayerNorm


@pytest.mark.slow
def test_weights_that_are_split_over_processes(outs: dict[str, Path]) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    model, given = from_pretrained(outs["phi"]), inputs("phi")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        fully_shard(model, mesh=mesh)
        with pytest.warns(
            UserWarning, match=r"computing LayerNorm: .*was a Phi\w+ and is now a FSDP"
        ):
            assert same(model, original("phi"), given)
        with pytest.raises(UnsupportedModel, match="not for FSDPPhiForCausalLM"):
            refold(model)
        split = AutoModelForCausalLM.from_pretrained(outs["phi"])
        weight = distribute_tensor(split.model.layers[0].mlp.fc2.weight.detach(), mesh)
        split.model.layers[0].mlp.fc2.weight = nn.Parameter(weight)
        with pytest.raises(NotCentred, match=r"fc2\.weight: is split over processes"):
            optimize(split)
    finally:
        dist.destroy_process_group()


# Inputs that were never centred, or never proven.
