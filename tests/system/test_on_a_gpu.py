"""Tests that need a GPU: folded models, their training, and matrices that are learned there."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import ignore
from live_models import CHECKPOINTS, FOLDED, computed_rms
from rounding import as_exact, in_float64, relative
from tiny_models import PHI, live
from torch import nn
from training import differences, square_loss
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

from enjoyln_cli import fold_in_memory, from_pretrained, optimize
from enjoyln_cli.comparison.data_files import UserData
from enjoyln_cli.conversion.fold import prepare
from enjoyln_cli.conversion.open_and_analyse import analyze
from enjoyln_cli.kernels import gpu
from enjoyln_cli.plan.fold_options import FoldOptions, Options
from enjoyln_cli.quantisation.measure import Differences
from enjoyln_cli.rotation_search.learned_matrices import learn_matrices
from enjoyln_cli.rotation_search.seed_search import search_seeds
from enjoyln_cli.rotation_search.trials import trials

DEVICE = "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IDS = torch.randint(3, 37, (4, 9), generator=torch.Generator().manual_seed(1))

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")


def inputs(name: str) -> dict[str, Any]:
    """A call of a checkpoint of the tests, on the GPU."""
    if name == "vit":
        images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        return {"pixel_values": images.to(DEVICE)}
    return {"input_ids": IDS.to(DEVICE)}


def result(model: Any, given: dict[str, Any]) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    given = {
        key: value.to(dtype) if value.is_floating_point() else value for key, value in given.items()
    }
    with torch.no_grad():
        outputs = model(**given)
    logits: torch.Tensor = outputs.logits
    return logits


def stock(name: str, dtype: torch.dtype) -> Any:
    auto: Any = AutoModelForImageClassification if name == "vit" else AutoModelForCausalLM
    return auto.from_pretrained(CHECKPOINTS / name, dtype=dtype).to(DEVICE)


def is_right(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Whether the model computes what the original does, on the GPU, and in RMSNorm."""
    original, given = stock(name, dtype), inputs(name)
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    assert all(computed_rms(model, lambda: result(model, given)))
    exact = result(in_float64(original), given)
    return as_exact(result(model, given), result(original, given), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FOLDED)
def test_a_folded_model_computes_the_original(
    name: str, dtype: torch.dtype, outs: dict[str, Path]
) -> None:
    gpu.measured.clear()
    assert is_right(from_pretrained(outs[name], dtype=dtype, device_map=DEVICE), name, dtype)
    fused = from_pretrained(outs[f"{name} merge bias"], dtype=dtype).to(DEVICE)
    assert is_right(optimize(fused), name, dtype)
    assert gpu.measured, "loading a model measures what computes its norms"


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_compiled_model_computes_the_original(mode: str | None, outs: dict[str, Path]) -> None:
    model = from_pretrained(outs["gpt2"], dtype=torch.float32, device_map=DEVICE)
    original, given = stock("gpt2", torch.float32), inputs("gpt2")
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    found = [result(compiled, given).clone() for _ in range(3)][-1]
    assert as_exact(found, result(original, given), result(in_float64(original), given))


def test_generation_and_half_of_the_blocks_on_the_cpu(outs: dict[str, Path]) -> None:
    original, given = stock("gpt2", torch.float32), inputs("gpt2")
    names = [name for name, _ in original.transformer.named_children()]
    places: dict[str, Any] = {f"transformer.{name}": 0 for name in names if name != "h"}
    blocks = range(len(original.transformer.h))
    places |= {f"transformer.h.{i}": "cpu" if i else 0 for i in blocks} | {"lm_head": 0}
    split = from_pretrained(outs["gpt2"], dtype=torch.float32, device_map=places)
    whole = from_pretrained(outs["gpt2"], dtype=torch.float32, device_map=DEVICE)
    exact = result(in_float64(original), given)
    assert as_exact(result(split, given), result(original, given), exact)
    assert all(computed_rms(split, lambda: result(split, given)))
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
    texts = [model.generate(**given, **options).tolist() for model in (original, split, whole)]
    assert texts[0] == texts[1] == texts[2]


def test_a_model_on_the_gpu_is_folded_there() -> None:
    original = live("PhiForCausalLM", transformers.PhiConfig(**PHI)).to(DEVICE)
    folded = fold_in_memory(copy.deepcopy(original), analyze(original).plan)
    given = inputs("phi")
    assert all(computed_rms(folded, lambda: result(folded, given)))
    assert relative(result(folded, given), result(original, given)) < 1e-12


def test_training_in_rms_norm() -> None:
    batches = [torch.randn(5, 7, dtype=torch.float64, device=DEVICE) for _ in range(5)]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 24), nn.LayerNorm(24), nn.Linear(24, 3)).double().to(DEVICE)
    apart, weights, plan = differences(net, square_loss, batches, "AdamW", example=batches[0])
    assert plan.folded and apart < 1e-11 and weights < 1e-10


def costs(compared: Iterable[Differences]) -> torch.Tensor:
    return torch.tensor([each.cost for each in compared])


def test_matrices_are_chosen_and_learned_as_on_the_cpu(tmp_path: Path) -> None:
    """Learning goes another way after the first value that is rounded otherwise."""
    options = Options(fold=False, rotate=True, untie=True)
    ready = prepare(
        CHECKPOINTS / "gpt2", None, folding=FoldOptions(options=options), on_event=ignore
    )
    rows = torch.randint(0, 500, (16, 24), generator=torch.Generator().manual_seed(0)).tolist()
    data = UserData(tokens=tuple(map(tuple, rows)))
    searched, learned = {}, {}
    for place in ("cpu", DEVICE):
        with trials(ready, data, "w4a8", None, ignore, torch.device(place)) as tried:
            searched[place] = search_seeds(tried, 3, ignore, ignore).calibration.values()
            choice = learn_matrices(tried, 30, tmp_path / place, ignore, ignore)
            learned[place] = choice.calibration.values()
    assert torch.allclose(*map(costs, searched.values()), rtol=0.05)
    assert torch.allclose(*map(costs, learned.values()), rtol=0.3)
    with trials(ready, data, "w4a8", None, ignore) as tried:
        again = learn_matrices(tried, 30, tmp_path / DEVICE, ignore, ignore, resume=True)
    assert torch.allclose(costs(again.calibration.values()), costs(learned[DEVICE]), rtol=0.05)
