"""Edits of live models whose parameters share memory, or whose weights cannot be written."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from eight_models import far, given, pair, run, source
from live_models import computed_rms, moved
from torch import nn

from enjoyln_cli import analyze, fold_in_memory, refold, rotate
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.train import merge, reparametrize

T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 41}
LLAMA = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "vocab_size": 41, "tie_word_embeddings": True,
}  # fmt: skip


def model_of(name: str) -> Any:
    if name == "t5":
        config = transformers.T5Config(**T5, decoder_start_token_id=0)
        return moved(transformers.T5ForConditionalGeneration(config))
    if name == "llama":
        return moved(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)))
    return source(name)


def outputs(model: Any, name: str) -> torch.Tensor:
    inputs: dict[str, Any] = {"input_ids": torch.arange(3, 15)[None]}
    if name == "t5":
        inputs["decoder_input_ids"] = torch.arange(5, 12)[None]
    with torch.no_grad():
        return model(**inputs).logits


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def unchanged(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    values = model.state_dict().items()
    return all(value.is_meta or torch.equal(value, before[name]) for name, value in values)


def assign(model: Any) -> None:
    """As tied weights are after such a load: two parameters over one memory."""
    model.load_state_dict(model.state_dict(), assign=True)


def head_over_the_embedding(model: Any) -> None:
    table = model.get_input_embeddings().weight
    model.get_output_embeddings().weight = nn.Parameter(table.data)


def head_some_rows_further(model: Any) -> None:
    table = model.get_input_embeddings()
    memory = torch.cat([table.weight.data, table.weight.data[:3]])
    model.get_output_embeddings().weight = nn.Parameter(memory[3:])
    table.weight = nn.Parameter(memory[:-3])


def transposed_layers(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.fc2.weight = nn.Parameter(mlp.fc1.weight.data.t())


def equal_layers(model: Any) -> None:
    layers = model.model.layers
    layers[1].mlp.fc2.weight = nn.Parameter(layers[0].mlp.fc2.weight.data)


def layer_that_is_an_attribute(model: Any) -> None:
    """Code of the model could read it."""
    model.model.kept = model.model.layers[0].mlp.fc2.weight.data


def slices_side_by_side(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    memory = torch.cat([attention.q_proj.weight.data, attention.k_proj.weight.data])
    attention.q_proj.weight, attention.k_proj.weight = map(nn.Parameter, memory.chunk(2))


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("phi", equal_layers),
        ("phi", head_over_the_embedding),
        ("gpt2", assign),
        ("llama", assign),
        ("t5", assign),
        ("phi", slices_side_by_side),
    ],
)
def test_rotate_edits_shared_memory_once(name: str, share: Callable[[Any], None]) -> None:
    model = model_of(name)
    share(model)
    expected = outputs(model, name)
    assert rotate(model).rotated
    assert far(outputs(model, name), expected) < 1e-6  # Llama's norm computes in float32


def test_a_tied_head_that_was_parametrised_is_left_alone() -> None:
    model = model_of("gpt2")
    nn.utils.parametrizations.weight_norm(model.get_output_embeddings())
    expected = outputs(model, "gpt2")
    assert {group.kind for group in rotate(model).rotated} == {"values"}
    assert far(outputs(model, "gpt2"), expected) < 1e-6


@pytest.mark.one_case
@pytest.mark.parametrize(
    "share", [transposed_layers, head_some_rows_further, layer_that_is_an_attribute]
)
def test_rotate_refuses_memory_of_two_layouts(share: Callable[[Any], None]) -> None:
    model = model_of("phi")
    share(model)
    before, config = state_of(model), model.config.to_dict()
    with pytest.raises(UnsupportedModel, match=r"^model\.\S+ shares its memory with \S+, which"):
        rotate(model)
    assert unchanged(model, before) and model.config.to_dict() == config


@pytest.mark.parametrize("share", [assign, slices_side_by_side, equal_layers])
def test_a_fold_of_shared_memory(share: Callable[[Any], None]) -> None:
    """Shared when it was analysed: both names are edited alike."""
    name = "gpt2" if share is assign else "phi"
    model = model_of(name)
    share(model)
    expected = outputs(model, name)
    plan = analyze(model).plan
    fold_in_memory(model, plan)
    assert all(computed_rms(model, lambda: outputs(model, name)))
    assert far(outputs(model, name), expected) < 1e-9


@pytest.mark.parametrize(
    "share", [head_over_the_embedding, transposed_layers, head_some_rows_further]
)
@pytest.mark.parametrize("edit", [fold_in_memory, lambda model, plan: reparametrize(model, plan)])
def test_memory_that_is_shared_after_the_analysis(
    share: Callable[[Any], None], edit: Callable[[Any, Any], Any], plans: dict[Any, Any]
) -> None:
    model = model_of("phi")
    share(model)
    before = state_of(model)
    with pytest.raises(UnsupportedModel, match=r"\S+ shares its memory with \S+, which"):
        edit(model, plans[edit is fold_in_memory])
    assert unchanged(model, before)
    assert type(model.model.final_layernorm) is nn.LayerNorm


@pytest.fixture(scope="module")
def plans() -> dict[bool, Any]:
    """For ``fold_in_memory`` if true, and for ``reparametrize``."""
    return {True: analyze(model_of("phi")).plan, False: reparametrize(model_of("phi"))}


def test_a_parametrisation_of_shared_memory() -> None:
    model = model_of("phi")
    equal_layers(model)
    expected = outputs(model, "phi")
    reparametrize(model)
    assert far(outputs(model, "phi"), expected) < 1e-9
    merge(model)
    assert far(outputs(model, "phi"), expected) < 1e-9


@pytest.mark.parametrize("share", [head_over_the_embedding, transposed_layers, equal_layers])
def test_refold_of_shared_memory(eight: Path, share: Callable[[Any], None]) -> None:
    """Two layers that are both centred may share memory; a head may not share the embedding's."""
    model, _ = pair("phi", eight)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter) + 0.1
    share(model)
    before, inputs = state_of(model), given("phi")
    with pytest.warns(UserWarning, match="computing LayerNorm"):
        expected = run(model, inputs)
    if share is equal_layers:
        assert all(computed_rms(refold(model), lambda: run(model, inputs)))
    else:
        with pytest.raises(UnsupportedModel, match=r"\S+ shares its memory with \S+, which"):
            refold(model)
        assert unchanged(model, before)
    assert far(run(model, inputs), expected) < 1e-9


# Weights that cannot be written.


def made_in_inference_mode(model: Any) -> Any:
    with torch.inference_mode():
        return copy.deepcopy(model)


def expanded(model: Any) -> Any:
    norm = model.model.layers[1].input_layernorm
    norm.weight = nn.Parameter(torch.tensor([1.5], dtype=torch.float64).expand(16))
    bias = model.model.layers[0].mlp.fc2
    bias.bias = nn.Parameter(torch.tensor([0.5], dtype=torch.float64).expand(16))
    return model


def rows_overlap(model: Any) -> Any:
    """Each row of a weight begins an element after the row before."""
    fc2 = model.model.layers[0].mlp.fc2
    rows, columns = fc2.weight.shape
    torch.manual_seed(3)
    values = torch.randn(rows + columns - 1, dtype=torch.float64)
    fc2.weight = nn.Parameter(values.unfold(0, columns, 1))
    return model


def on_a_map(model: Any, mode: Any = "r") -> Any:
    """A weight on a mapped file. A write to a file that is mapped read-only ends the process."""
    weight = model.model.layers[1].mlp.fc2.weight
    with tempfile.TemporaryFile() as file:
        weight.detach().numpy().tofile(file)
        mapped = numpy.memmap(file, weight.detach().numpy().dtype, mode, shape=weight.shape)
    weight.data = torch.from_numpy(mapped)
    return model


def offloaded(model: Any) -> Any:
    from accelerate import cpu_offload

    return cpu_offload(model, torch.device("cpu"))


def one_on_meta(model: Any) -> Any:
    fc2 = model.model.layers[1].mlp.fc2
    fc2.weight = nn.Parameter(fc2.weight.to("meta"))
    return model


@pytest.mark.one_case
@pytest.mark.parametrize("edit", [rotate, fold_in_memory, reparametrize])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (made_in_inference_mode, "inference_mode"),
        (expanded, "elements share memory"),
        (rows_overlap, "elements share memory"),
        (on_a_map, "read-only"),
        (offloaded, "not in memory"),
        (one_on_meta, "not in memory"),
    ],
)
def test_weights_that_cannot_be_written_are_refused_first(
    change: Callable[[Any], Any], words: str, edit: Any, plans: dict[bool, Any]
) -> None:
    model = change(model_of("phi"))
    before = state_of(model)
    config = model.config.to_dict()
    given = () if edit is rotate else (plans[edit is fold_in_memory],)
    with pytest.raises(UnsupportedModel, match=rf"^\S+: .*{words}"):
        edit(model, *given)
    assert unchanged(model, before) and model.config.to_dict() == config
    if change is made_in_inference_mode:
        edit(copy.deepcopy(model), *given)


@pytest.mark.parametrize("change", [made_in_inference_mode, expanded, on_a_map, offloaded])
def test_refold_of_weights_that_cannot_be_written(
    eight: Path, change: Callable[[Any], Any]
) -> None:
    model = change(pair("phi", eight)[0])
    before = state_of(model)
    with pytest.raises(UnsupportedModel, match=r"^\S+: .*(infer|expanded|read-only|not in)"):
        refold(model)
    assert unchanged(model, before)


def test_a_weight_on_a_file_whose_changes_stay_in_memory() -> None:
    model = on_a_map(model_of("phi"), mode="c")
    expected = outputs(model, "phi")
    assert rotate(model).rotated
    assert far(outputs(model, "phi"), expected) < 1e-9


@pytest.mark.parametrize("edit", [fold_in_memory, refold])
def test_a_norm_that_cannot_change_is_refused_first(
    eight: Path, edit: Any, plans: dict[bool, Any]
) -> None:
    model = pair("phi", eight)[0] if edit is refold else model_of("phi")
    with torch.no_grad():
        model.model.layers[0].mlp.fc2.weight += 0.1
    model.model.final_layernorm.register_forward_hook(lambda module, args, output: output * 2)
    before = state_of(model)
    with pytest.raises(UnsupportedModel, match="final_layernorm: a forward hook"):
        edit(model, *([] if edit is refold else [plans[True]]))
    assert unchanged(model, before)
