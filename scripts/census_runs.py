"""Runs of a model for the census: its calls, what they return, how far two results are apart.

``loading`` runs a folded checkpoint, loaded through ``from_pretrained``.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Container, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

SEEDS = (0, 1, 2)
Run = Callable[[Any], Any]
"""Runs a model on fixed inputs, and returns its outputs."""


def seeded_runs(model: Any, dtype: Any) -> dict[Run, list[Any]]:
    """A run for each seed and batch, and its outputs; text has two rows, one of them padded."""
    from enjoyln_cli.calls.input_sets import accepted_by
    from enjoyln_cli.comparison.batches import seeded_batches

    rows = 2 if "input_ids" in accepted_by(model) else 1
    batches = (batch for seed in SEEDS for batch in seeded_batches(model, rows, seed, dtype))
    runs: list[Run] = [lambda m, b=batch: m(**b) for batch in batches]
    return {run: outputs_of(run, model, dtype) for run in runs}


def without_cache(model: Any) -> None:
    """Make and return no caches: what a rotated model stores there is rotated as well."""
    from transformers import Cache

    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", None):
            module.config.use_cache = False

    leave_out(model, lambda name, value: isinstance(value, Cache))  # some return one in any case


def without_outputs(model: Any, fields: Iterable[str]) -> None:
    """Return none of the outputs that hold ``fields``, which a rotation changes."""
    changed = {field.partition(".")[0] for field in fields}
    leave_out(model, lambda name, value: name in changed)


def leave_out(model: Any, chosen: Callable[[str, Any], bool]) -> None:
    """Make ``model`` return none of its named outputs for which ``chosen(name, value)`` holds."""

    def hook(model: Any, inputs: Any, output: Any) -> Any:
        if not hasattr(output, "items"):
            return output
        return type(output)(**{k: v for k, v in output.items() if not chosen(k, v)})

    model.register_forward_hook(hook)


def proof_runs(model: Any, dtype: Any, omitted: Container[str] | None = None) -> list[Run]:
    """Every call that a proof covers, with random real inputs.

    These are prefill and decoding with the cache, and the optional inputs. For a rotated model,
    ``omitted`` has the inputs to leave out: inputs that have to be rotated, as caches are, and
    inputs for which the result refuses calls.
    """
    import torch
    from torch.utils import _pytree as pytree

    from enjoyln_cli.models.meta_device import without_weights
    from enjoyln_cli.trace.capture import Recorder
    from enjoyln_cli.trace.steps import Steps
    from enjoyln_cli.trace.traced_calls import accepted_calls

    generator, runs = torch.Generator().manual_seed(7), []

    def filled(value: Any) -> Any:
        if not value.is_floating_point():
            return value
        return torch.randn(value.shape, generator=generator).to(dtype)

    for call in accepted_calls(Recorder(without_weights(model))) or []:
        cached = len(call.steps) > 1 or call.flags.get("use_cache")
        names = {*call.steps[0][1], *call.flags}
        if omitted is not None and (cached or any(name in omitted for name in names)):
            continue
        steps = pytree.tree_map_only(torch.Tensor, filled, call.steps)

        def run(model: Any, call: Any = call, steps: Any = steps) -> Any:
            own = pytree.tree_map_only(torch.Tensor, torch.clone, steps)  # a model may write there
            return Steps(model, call.flags, None)(*own)[: len(own)]  # without its state

        runs.append(run)
    return runs


def outputs_of(run: Run, model: Any, dtype: Any) -> list[Any]:
    """Every tensor that ``model`` returns in this run; exact if ``dtype`` is float64."""
    import torch

    from enjoyln_cli.models.arithmetic import Float64
    from enjoyln_cli.models.outputs import tensors_in
    from enjoyln_cli.runtime.call_guards import call_guards

    for _, guard in call_guards(model):
        guard.state.literal = True  # an input with a mean has to show
    torch.manual_seed(0)
    with torch.no_grad(), Float64() if dtype == torch.float64 else nullcontext():
        return [tensor.clone() for tensor in tensors_in(run(model))]


def differing(found: list[Any], expected: list[Any]) -> float:
    """The largest difference of any tensor, relative to that tensor's largest element."""
    import torch

    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if not b.is_floating_point() or not b.numel():
            continue
        finite = torch.isfinite(b)
        if not torch.equal(finite, torch.isfinite(a)):
            return float("inf")
        if finite.any():
            scale = b[finite].abs().max().clamp_min(1e-30)
            worst = max(worst, float((a - b)[finite].abs().max() / scale))
    return worst


def is_lost(runs: Iterable[list[Any]]) -> bool:
    """Whether some tensor is all NaN. A tensor with some NaN, from padding, is still compared."""
    return any(bool(t.isnan().all()) for outputs in runs for t in outputs if t.numel())


def rounded(model: Any) -> Any:
    """A copy with every weight off by up to one unit in the last place."""
    import torch

    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.is_floating_point():
                off = (
                    torch.rand_like(parameter).sub_(0.5).mul_(2 * torch.finfo(parameter.dtype).eps)
                )
                parameter.mul_(1 + off)
    return copied


def untied(model: Any, plan: Any) -> Any:
    """A copy in which the weights that ``plan`` unties are separate; nothing else differs."""
    from enjoyln_cli.rewrite.in_memory import centre_parameters

    copied = copy.deepcopy(model)
    centre_parameters(copied, replace(plan, centred_weights=(), widened=(), fused=(), settings=()))
    return copied


def loading(
    model: Any,
    plan: Any,
    runs: Iterable[Run],
    dtype: Any,
    bound: float,
) -> dict[str, Any]:
    """A row about the result of folding the checkpoint that ``model`` saves.

    ``loaded`` is "ok", or says in words why the result does not load or what it computes instead.
    ``loading_error`` is the largest relative difference to the stock class with the original
    weights, over the ``runs`` that this class accepts; rounding explains at most ``bound``. The
    first run that computes a norm decides which norm is computed: later runs may pass an input with
    which the plan is not proven.
    """
    import transformers

    from enjoyln_cli import from_pretrained
    from enjoyln_cli.checkpoint.reader import open_checkpoint
    from enjoyln_cli.checkpoint.source import open_source
    from enjoyln_cli.models.classes import apply_experts
    from enjoyln_cli.rewrite.directory import fold_checkpoint
    from enjoyln_cli.runtime.modules import Folded

    name = type(model).__name__
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        source, out = Path(folder, "source"), Path(folder, "out")
        model.save_pretrained(source)
        stock = getattr(transformers, name).from_pretrained(source, dtype=dtype).eval()
        fold_checkpoint(open_checkpoint(open_source(str(source))), plan, out, recipe_text="")
        try:
            folded = from_pretrained(out, getattr(transformers, name), dtype=dtype).eval()
        except Exception as error:  # the row records it
            return {"loaded": f"{type(error).__name__}: {str(error).strip()[:300]}"}
        for one in (stock, folded):
            apply_experts(one)
        computed: set[bool] = set()

        def note(norm: Folded, *_: Any) -> None:
            computed.add(norm.shifted)

        note.__module__ = "enjoyln_cli.census"  # another hook would bring LayerNorm back
        for module in folded.modules():
            if isinstance(module, Folded):
                module.register_forward_hook(note)
        error, usual = 0.0, set[bool]()
        for run in runs:
            try:
                expected = outputs_of(run, stock, dtype)
            except Exception:  # not every model takes every optional input
                continue
            error = max(error, differing(outputs_of(run, folded, dtype), expected))
            usual = usual or set(computed)
    troubles = [str(one.message) for one in said if "computing LayerNorm" in str(one.message)]
    if troubles:
        loaded = troubles[0]
    elif usual != {False}:
        loaded = "computes LayerNorm" if usual else "runs no folded norm"
    else:
        loaded = "ok" if error <= bound else "differs"
    return {"loaded": loaded, "loading_error": error}
