"""The experiments of ``paper_training.py`` that measure time, on one thread of the CPU.

It is processor time, so that other programs do not count that keep the CPU from this one.

    step_times   one training step of a GPT-2: LayerNorm, CBWC, and LayerNorm kept centred
    break_even   from how many tokens per step on CBWC may pay off, for the paper's six models

CBWC centres each weight ``W`` of shape ``(d, p)`` once per step; a LayerNorm centres ``s b``
rows of ``d``. So the paper expects a gain where ``s b > p`` (section 5.3). A model has several
weights for each norm, and our plan may need explicit centrings, which cost what a norm saves. For
all of it together, the same count of operations gives::

    s b  >  sum of p over all centred weights / (norms that become RMSNorm - explicit centrings)
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from bench_models import MODELS, plan_of
from paper_tables import PAPER_MODELS
from torch import nn
from torch.nn.utils import parametrize
from training_runs import CBWC, LAYER_NORM, outputs
from training_sizes import Sizes, Tell

from enjoyln_cli import kernels
from enjoyln_cli.benchmark.timing import (
    Limit,
    Task,
    median_interval,
    quartiles,
    ratios,
    time_rounds,
)
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.train import keep_centred, reparametrize
from enjoyln_cli.train.parametrize import Centre

CENTRED_LATER = "LayerNorm, centred for evaluation"
CENTRED_EACH_STEP = "LayerNorm, centred after each step"
PARAMETRISATION = "V = P W alone"
BREAK_EVEN_MODELS = {
    "GPT-2": MODELS["gpt2"], "BERT": MODELS["bert"], "BLOOM-560m": MODELS["bloom-560m"],
    "OPT-125m": MODELS["opt-125m"], "Phi-2": PAPER_MODELS["Phi"], "ViT": MODELS["vit"],
    "tiny": MODELS["tiny"],
}  # fmt: skip
NORM_ROWS = 512
"""Rows of the inputs on which single norms are timed."""
NORM, RMS = "layer_norm", "rms_norm"


def step_times(sizes: Sizes, tell: Tell) -> dict[str, Any]:
    """Processor time of a training step with AdamW, for several numbers of tokens."""
    width, tokens_of_cases = sizes.step_width, sizes.step_tokens
    config = transformers.GPT2Config(
        vocab_size=509, n_embd=width, n_layer=2, n_head=max(1, width // 64), resid_pdrop=0,
        embd_pdrop=0, attn_pdrop=0, n_positions=max(tokens_of_cases), bos_token_id=0,
        eos_token_id=0, use_cache=False,
    )  # fmt: skip
    models: dict[str, Any] = {}
    tasks: dict[str, Callable[[torch.Tensor], None]] = {}
    for name in (LAYER_NORM, CBWC, CENTRED_LATER, CENTRED_EACH_STEP):
        torch.manual_seed(0)
        models[name] = model = transformers.GPT2LMHeadModel(config).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if name == CBWC:
            reparametrize(model)
        elif name != LAYER_NORM:
            keep_centred(
                model, optimizer, every="step" if name == CENTRED_EACH_STEP else "evaluation"
            )
        tasks[name] = _step(model, optimizer)
    found: dict[str, Any] = {"width": width, "layers": 2, "cases": {}}
    for number, tokens in enumerate(tokens_of_cases):
        ids = partial(torch.randint, 509, (1, tokens))
        timed = {name: Task(run, ids) for name, run in tasks.items()}
        timed[PARAMETRISATION] = Task(_parametrisation(models[CBWC]))
        times = time_rounds(
            timed, sizes.rounds, limit=Limit(sizes.case_seconds), now=time.process_time,
            on_round=lambda done, n=number, t=tokens: tell(  # type: ignore[misc]
                (n + done / sizes.rounds) / len(tokens_of_cases), f"{t} tokens"),
        )  # fmt: skip
        found["cases"][str(tokens)] = _compare(times, LAYER_NORM)
    return found


def _step(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    def run(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        outputs(model, {"input_ids": ids, "labels": ids})[0].backward()
        optimizer.step()

    return run


def _parametrisation(model: nn.Module) -> Callable[[Any], None]:
    """Compute every ``V = P W`` of ``model``, and its gradient."""
    places = [
        (module, name)
        for module in model.modules()
        if parametrize.is_parametrized(module)
        for name in module.parametrizations  # type: ignore[union-attr]
    ]
    grads = [torch.randn_like(getattr(module, name)) for module, name in places]

    def run(_: Any) -> None:
        for (module, name), grad in zip(places, grads, strict=True):
            original = module.parametrizations[name].original  # type: ignore[index,union-attr]
            torch.autograd.grad(getattr(module, name), original, grad)

    return run


def _compare(times: Mapping[str, list[float]], first: str) -> dict[str, Any]:
    """Quartiles in milliseconds, and each median ratio to ``first`` with its 95 % interval."""
    return {
        name: {
            "rounds": len(values),
            "ms": quartiles(values).times(1e3).rounded(3),
            "ratio": round(statistics.median(ratios(times, name, first)), 4),
            "ratio_interval": median_interval(ratios(times, name, first)),
        }
        for name, values in times.items()
    }


def break_even(sizes: Sizes, tell: Tell) -> dict[str, Any]:
    """The count of operations, and what its parts take here, for real sizes."""
    found: dict[str, Any] = {}
    models = {name: BREAK_EVEN_MODELS[name] for name in sizes.break_even}
    norm_times: dict[int, dict[str, Any]] = {}
    weight_times: dict[tuple[tuple[int, ...], Axis], float] = {}
    for number, (name, (kind, cls, settings)) in enumerate(models.items()):
        plan = plan_of(kind, cls, settings)
        width = transformers.CONFIG_MAPPING[kind](**settings).hidden_size
        writers = {writer.parameter: writer for writer in plan.writers}.values()
        kinds = Counter((writer.shape, writer.held or writer.axis) for writer in writers)
        if width not in norm_times:
            norm_times[width] = _norm_times(width, sizes)
        for weight in kinds.keys() - weight_times.keys():
            weight_times[weight] = _weight_time(*weight, sizes)
        per_step = sum(count * weight_times[weight] for weight, count in kinds.items())
        columns = sum(count * math.prod(shape) // width for (shape, _), count in kinds.items())
        times = norm_times[width]
        ends = times["ratio_interval"]
        saved = times["saved_ns_per_row"] * len(plan.folded)
        found[name] = {
            "width": width,
            "norms": len(plan.norms),
            "folded": len(plan.folded),
            "centrings": len(plan.ops),
            "weights": len(writers),
            "columns": columns,
            "counted_tokens": columns / max(1, len(plan.folded) - len(plan.ops)),
            "parametrisation_ms": 1e3 * per_step,
            "norm_times": times,
            "measured_tokens": 1e9 * per_step / saved if ends and ends[1] < 1 else None,
        }
        tell((number + 1) / len(models), name)
    return found


def _weight_time(shape: tuple[int, ...], axis: Axis, sizes: Sizes) -> float:
    """Median seconds of ``V = P W`` and its gradient."""
    weight, grad, centre = (
        torch.randn(shape, requires_grad=True),
        torch.randn(shape),
        Centre((axis,)),
    )
    task = Task(lambda _: torch.autograd.grad(centre(weight), weight, grad))
    times = time_rounds({"": task}, sizes.rounds, now=time.process_time)
    return statistics.median(times[""])


def _norm_times(width: int, sizes: Sizes) -> dict[str, Any]:
    """Nanoseconds per row of both norms with their gradients, and what RMSNorm saves."""
    x, grad = torch.randn(NORM_ROWS, width), torch.randn(NORM_ROWS, width)
    x = (x - x.mean(-1, keepdim=True)).requires_grad_()
    weight, bias = torch.rand(width, requires_grad=True), torch.rand(width, requires_grad=True)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        NORM: lambda: nn.functional.layer_norm(x, (width,), weight, bias),
        RMS: lambda: torch.ops.enjoyln.rms_norm(x, weight, bias, 1e-5),
    }
    tasks = {
        name: Task(lambda _, call=call: torch.autograd.grad(call(), (x, weight, bias), grad))
        for name, call in calls.items()
    }
    times = time_rounds(tasks, 5 * sizes.rounds, now=time.process_time)
    per_row = 1e9 / NORM_ROWS
    saved = [a - b for a, b in zip(times[NORM], times[RMS], strict=True)]
    return {
        NORM: statistics.median(times[NORM]) * per_row,
        RMS: statistics.median(times[RMS]) * per_row,
        "ratio": statistics.median(ratios(times, RMS, NORM)),
        "ratio_interval": median_interval(ratios(times, RMS, NORM)),
        "saved_ns_per_row": statistics.median(saved) * per_row,
        "kernel": kernels.native.status("cpu").what,
    }
