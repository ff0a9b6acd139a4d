"""What ``report --mappings json`` says of norms, streams and values, tried out on the stock models.

A number multiplies what a model computes at one place. The outputs stay the same only if exactly
the listed weights take it back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import good
from live_models import moved
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from enjoyln_cli.conversion.open_and_analyse import open_and_analyse
from enjoyln_cli.plan.fold_options import FoldOptions, Options

pytestmark = pytest.mark.one_case
FACTOR = 1.7
TOLERANCE = 1e-5
"""Relative: Mixtral's norms compute in float32."""
TOKENS = {"input_ids": torch.tensor([[3, 17, 8, 25, 11, 2]])}
SIZES = {
    "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 31, "hidden_size": 12,
    "intermediate_size": 20,
}  # fmt: skip


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "GPT-2": lambda: (
        GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=12, vocab_size=31, n_positions=9)),
        TOKENS,
    ),
    "Mixtral": lambda: (
        MixtralForCausalLM(
            MixtralConfig(
                **SIZES, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2
            )
        ),
        TOKENS,
    ),
    "ViT": lambda: (
        ViTForImageClassification(ViTConfig(**SIZES, image_size=12, patch_size=4)),
        {"pixel_values": torch.randn(1, 3, 12, 12, dtype=torch.float64)},
    ),
}


class Experiment:
    """A model with random weights, and what ``--mappings json`` prints for it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.model, self.call = MODELS[name]()
        self.model = moved(self.model)
        if name == "Mixtral":  # its other way to compute experts has no float64
            self.model.set_experts_implementation("eager")
        self.model.save_pretrained(folder)
        self.printed = json.loads(good("report", folder, "--mappings", "json"))
        for copy in self.printed["untied"]:
            module, _, weight = copy["parameter"].rpartition(".")
            source = self.model.get_parameter(copy["source"])
            setattr(self.model.get_submodule(module), weight, nn.Parameter(source.clone()))
        self.norms = [fusion["norm"] for fusion in self.printed["fused"]]
        with torch.no_grad():
            self.expected = self.model(**self.call).logits

    def tensors(self, group: dict[str, Any], use: str) -> list[dict[str, Any]]:
        """The tensors that write or read a rotation group, without the biases of norms."""
        default = {"writes": True, "reads": False}[use]
        tensors = {  # a parameter that is stored in parts has an entry for each
            tensor["parameter"]: tensor
            for tensor in group["tensors"]
            if tensor.get(use, default) and module_of(tensor["parameter"]) not in self.norms
        }
        return list(tensors.values())

    @contextmanager
    def multiplied(self, tensors: Iterable[dict[str, Any]], factor: float) -> Any:
        """Multiply tensors along their axes, and take it back afterwards."""
        before = {name: p.clone() for name, p in self.model.named_parameters()}
        with torch.no_grad():
            for tensor in tensors:
                weight = self.model.get_parameter(tensor["parameter"])
                axis = tensor.get("module_axis", tensor["axis"])
                length = axis["outer"] * axis["size"] * axis["inner"]
                weight.narrow(axis["dim"], axis["start"], length).mul_(factor)
        yield
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(before[name])

    @contextmanager
    def norms_divided(self, norms: Iterable[str]) -> Any:
        """Divide the results of norms by ``FACTOR``."""
        hooks = [
            self.model.get_submodule(norm).register_forward_hook(lambda *a: a[2] / FACTOR)
            for norm in norms
        ]
        yield
        for hook in hooks:
            hook.remove()

    def keeps_outputs(self) -> bool:
        with torch.no_grad():
            logits = self.model(**self.call).logits
        return bool((logits - self.expected).norm() < TOLERANCE * self.expected.norm())

    def require_exactly(self, tensors: list[dict[str, Any]], factor: float) -> None:
        """All of the tensors together take back what was done, and no fewer do."""
        assert tensors
        with self.multiplied(tensors, factor):
            assert self.keeps_outputs()
        for left_out in tensors:
            with self.multiplied([t for t in tensors if t is not left_out], factor):
                assert not self.keeps_outputs(), left_out["parameter"]


def module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


@pytest.fixture(params=MODELS, scope="module")
def experiment(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return Experiment(request.param, tmp_path_factory.mktemp("model") / "saved")


def test_every_norm_has_all_of_its_readers(experiment: Experiment) -> None:
    kinds = ("LayerNorm", "RMSNorm")
    named = [n for n, m in experiment.model.named_modules() if type(m).__name__.endswith(kinds)]
    assert sorted(experiment.norms) == sorted(named)
    for fusion in experiment.printed["fused"]:
        readers = {}
        for reader in fusion["readers"]:
            name, dim = reader["weight"]["parameter"], reader.get("module_axis", reader["dim"])
            size = experiment.model.get_parameter(name).shape[dim]
            axis = {"dim": dim, "start": 0, "outer": 1, "size": size, "inner": 1}
            readers[name] = {"parameter": name, "axis": axis}
        with experiment.norms_divided([fusion["norm"]]):
            experiment.require_exactly(list(readers.values()), FACTOR)


def test_a_stream_has_all_of_its_readers(experiment: Experiment) -> None:
    (stream,) = [
        group for group in experiment.printed["rotation_groups"] if group["kind"] == "residual"
    ]
    with experiment.norms_divided(experiment.norms):
        experiment.require_exactly(experiment.tensors(stream, "reads"), FACTOR)


def test_a_stream_has_all_of_its_writers(experiment: Experiment) -> None:
    (stream,) = [
        group for group in experiment.printed["rotation_groups"] if group["kind"] == "residual"
    ]
    modules = [experiment.model.get_submodule(norm) for norm in experiment.norms]
    names = ["eps" if hasattr(norm, "eps") else "variance_epsilon" for norm in modules]
    for norm, name in zip(modules, names, strict=True):
        setattr(norm, name, getattr(norm, name) * FACTOR**2)
    experiment.require_exactly(experiment.tensors(stream, "writes"), FACTOR)
    for norm, name in zip(modules, names, strict=True):
        setattr(norm, name, getattr(norm, name) / FACTOR**2)


def test_the_values_of_each_attention_are_pairs(experiment: Experiment) -> None:
    values = [group for group in experiment.printed["rotation_groups"] if group["kind"] == "values"]
    assert len(values) == 2
    for group in values:
        with experiment.multiplied(experiment.tensors(group, "writes"), 1 / FACTOR):
            experiment.require_exactly(experiment.tensors(group, "reads"), FACTOR)
        with experiment.multiplied(experiment.tensors(group, "reads"), FACTOR):
            experiment.require_exactly(experiment.tensors(group, "writes"), 1 / FACTOR)


@pytest.mark.slow
def test_a_tied_weight_writes_and_reads(tmp_path: Path) -> None:
    config = OlmoConfig(**SIZES, tie_word_embeddings=True)
    OlmoForCausalLM(config).save_pretrained(tmp_path / "olmo")
    options = Options(fold=False, rotate=True, values=False)
    plan = open_and_analyse(
        str(tmp_path / "olmo"), folding=FoldOptions(options=options)
    ).analysis.plan
    uses = {
        t.parameter: (t.writes, t.reads) for group in plan.rotation_groups for t in group.tensors
    }
    assert uses["model.embed_tokens.weight"] == (True, True)
    assert uses["model.layers.0.mlp.down_proj.weight"] == (True, False)
    assert uses["model.layers.0.mlp.gate_proj.weight"] == (False, True)
