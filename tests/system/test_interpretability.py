"""A converted GPT-2 in nnsight and in TransformerLens gives the original's outputs.

Both libraries are too large for the development dependencies, so that these tests are skipped where
they are not installed. ``docs/interpretability.md`` says with which versions they were run.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from live_models import ROOT
from rounding import TIMES
from transformers import AutoModelForCausalLM

from enjoyln_cli import fold, from_pretrained
from enjoyln_cli.plan.plan import Options
from enjoyln_cli.runtime.modules import RMSNorm

ORIGINAL = ROOT / "tests" / "checkpoints" / "gpt2"
RESULTS = {
    "folded": Options(),
    "untied": Options(untie=True),
    "merged": Options(untie=True, merge="affine"),
}
IDS = torch.arange(3, 19)[None]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a converted checkpoint for each of ``RESULTS``."""
    if not any(map(find_spec, ("nnsight", "transformer_lens"))):
        pytest.skip("neither nnsight nor transformer_lens is installed")
    place = tmp_path_factory.mktemp("converted")
    for name, options in RESULTS.items():
        fold(ORIGINAL, place / name, options=options, verify=False)
    return place


def stock(path: Path, dtype: torch.dtype = torch.float64) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


# nnsight.


def read_and_steer(model: Any, push: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits, and the input of a norm, with ``push`` added to what the first block returns."""
    nnsight = pytest.importorskip("nnsight")
    wrapped = nnsight.NNsight(model)
    with torch.no_grad(), wrapped.trace(input_ids=IDS):
        wrapped.transformer.h[0].output[:] = wrapped.transformer.h[0].output + push
        read = wrapped.transformer.h[1].ln_1.input.save()
        found = wrapped.output.logits.save()
    return found, read


@pytest.mark.parametrize("name", RESULTS)
def test_nnsight_reads_the_same_logits(results: Path, name: str) -> None:
    exact = logits(stock(ORIGINAL))
    rounding = apart(logits(stock(results / name)), exact)
    found, read = read_and_steer(stock(results / name), 0.0)
    assert apart(found, exact) <= 1.01 * rounding
    mean = read.mean(-1).abs().max() / read.abs().max()
    small = 2 * TIMES * torch.finfo(torch.float32).eps
    assert (mean < small) == (name != "folded")  # the tied embedding keeps its mean


@pytest.mark.parametrize("name", RESULTS)
def test_nnsight_may_steer_a_model_that_computed_rms_norm(results: Path, name: str) -> None:
    """What is added has a mean, which LayerNorm ignores and RMSNorm would not."""
    exact = logits(stock(ORIGINAL))
    steered, _ = read_and_steer(stock(ORIGINAL), 0.5)
    model = from_pretrained(results / name)
    assert isinstance(model.transformer.h[0].ln_1, RMSNorm)
    assert apart(logits(model), exact) < 3 * apart(logits(stock(ORIGINAL, torch.float32)), exact)
    assert not model.transformer.h[0].ln_1.shifted
    found, _ = read_and_steer(model, 0.5)
    alone, _ = read_and_steer(stock(ORIGINAL, torch.float32), 0.5)
    assert apart(found, steered) < 3 * apart(alone, steered)
    assert model.transformer.h[0].ln_1.shifted


# TransformerLens.


def bridge(path: Path, processed: bool | None = None, live: bool = False) -> Any:
    """The model in TransformerLens; ``processed``: with the hooks and the weights of its version 2,
    or with its hooks alone."""
    sources = pytest.importorskip("transformer_lens.model_bridge.sources")
    model = from_pretrained(path, dtype=torch.float64).eval() if live else stock(path)
    found = sources.build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=model.config)
    if processed is not None:
        found.enable_compatibility_mode(disable_warnings=True, no_processing=not processed)
    return found


def outputs(found: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = found(IDS)
    return result


@pytest.mark.parametrize("live", [False, True], ids=["stock", "from_pretrained"])
@pytest.mark.parametrize("name", RESULTS)
def test_transformer_lens_gives_the_same_logits(results: Path, name: str, live: bool) -> None:
    exact = logits(stock(ORIGINAL))
    rounding = apart(logits(stock(results / name)), exact)
    assert apart(outputs(bridge(results / name, live=live)), exact) <= 1.01 * rounding


@pytest.mark.parametrize("name", RESULTS)
def test_transformer_lens_may_process_the_weights_again(results: Path, name: str) -> None:
    """Its processing centres the head: each token's logits move by a constant."""
    exact = logits(stock(ORIGINAL)).log_softmax(-1)
    own = outputs(bridge(ORIGINAL, processed=True))
    found = outputs(bridge(results / name, processed=True))
    assert apart(own, logits(stock(ORIGINAL))) > 0.1
    assert apart(found.log_softmax(-1), exact) < 4 * apart(own.log_softmax(-1), exact)


def test_an_untied_result_has_the_residual_stream_that_transformer_lens_makes(
    results: Path,
) -> None:
    def stream(found: Any) -> torch.Tensor:
        with torch.no_grad():
            _, cache = found.run_with_cache(IDS)
        last: torch.Tensor = cache["blocks.2.hook_resid_post"]
        return last

    theirs = stream(bridge(ORIGINAL, processed=True))
    ours = stream(bridge(results / "untied", processed=False))
    raw = stream(bridge(ORIGINAL, processed=False))
    assert apart(ours, theirs) < 1e-4 * apart(raw, theirs)
    assert apart(raw - raw.mean(-1, keepdim=True), theirs) < 1e-4 * apart(raw, theirs)
