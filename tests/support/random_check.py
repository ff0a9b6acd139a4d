"""Folds a model in memory, and compares it with the original.

All that leaves a call is compared in float64: what is returned, and what is written into inputs
and buffers. A call that the analysis does not cover has to be refused.
"""

from __future__ import annotations

import contextlib
import math
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from live_models import literally
from random_models import Call, Written, floats, write
from torch import nn

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.runtime.install import fold_in_memory

FAILURES = ("wrong", "apart", "raised", "changed")


@dataclass(frozen=True)
class Result:
    """What became of one model."""

    seed: int
    outcome: str
    """``folded``, ``kept`` (all norms stay), ``refused``, ``invalid`` (it does not run), or a
    failure: ``wrong``, ``apart`` (wrong where a block is called by itself), ``raised`` (an
    exception that is no refusal), or ``changed`` (the analysis changed the model)."""
    norms: int = 0
    folded: int = 0
    error: float = 0.0
    """The largest difference of all calls, relative to the largest element of its tensor."""
    place: str = ""
    """The call, and the value that differs, or what raised."""
    reason: str = ""
    """Why norms stay."""
    odd: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return self.outcome in FAILURES


def check(written: Written) -> Result:
    """Analyse and fold a model, and compare every call."""
    torch.compiler.reset()
    result = Result(written.seed, "invalid", odd=tuple(": ".join(p) for p in written.odd.items()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = written.build()
            run(written.build(), written.calls[0])
        except Exception:
            return replace(result, place=traceback.format_exc()[-1500:])
        args, kwargs = written.calls[0].arguments()
        try:
            plan = analyze_module(model, *args, **kwargs).plan
            result = replace(result, norms=len(plan.norms), folded=len(plan.folded))
            result = replace(result, reason="; ".join(sorted({v.reason for v in plan.kept})))
            if not _is_same(model, written.build()):
                return replace(result, outcome="changed")
            if not plan.folded:
                return replace(result, outcome="kept")
            folded = fold_in_memory(written.build(), plan)
        except EnjoyLNError as error:
            return replace(result, outcome="refused", reason=f"{type(error).__name__}: {error}")
        except Exception:
            return replace(result, outcome="raised", place=traceback.format_exc()[-1500:])
        error, place = _largest_difference(written, folded)
        if error > written.tolerance:
            return replace(result, outcome="wrong", error=error, place=place)
        apart, place = _largest_difference_of_blocks(written, plan)
        if apart > max(1e-6, written.tolerance):
            return replace(result, outcome="apart", error=apart, place=place)
    return replace(result, outcome="folded", error=error)


def run(model: nn.Module, call: Call) -> dict[str, Any]:
    """All that leaves a call: its results, and the inputs and buffers that it has written."""
    args, kwargs = call.arguments()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with getattr(torch, call.context)(), literally():
        returned = model(*args, **kwargs)
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    buffers = {name: b for name, b in after.items() if not torch.equal(b, before[name])}
    return dict(_opened({"returned": returned, "inputs": (args, kwargs), "buffers": buffers}, ""))


def _opened(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every tensor, number and text in ``value``, however it is packed."""
    if isinstance(value, torch.Tensor):
        yield path, value.detach()
    elif isinstance(value, (bool, int, float, str, type(None))):
        yield path, value
    else:
        packed = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
        items = enumerate(value) if isinstance(value, (list, tuple)) else (packed or {}).items()
        for key, item in items:
            yield from _opened(item, f"{path}.{key}")


def _largest_difference(written: Written, folded: nn.Module) -> tuple[float, str]:
    """Over all calls that the original takes and the folded model does not refuse."""
    worst, original = (0.0, ""), written.build()
    for number, call in enumerate(written.calls):
        try:
            after = run(folded, call)
        except EnjoyLNError:
            continue  # neither of the two models runs this call
        except Exception:
            after = {"raised": traceback.format_exc()[-1500:]}
        try:
            before = run(original, call)
        except Exception:
            continue
        error, place = difference(before, after)
        if error > written.tolerance:
            error -= 100 * _sensitivity(written, number)
        worst = max(worst, (error, f"{call}: {place} {after.get('raised', '')}"))
    return worst


def _sensitivity(written: Written, number: int) -> float:
    """How far rounding of the weights alone moves what leaves call ``number``."""
    original, rounded = written.build(), written.build()
    step = 1e-15 if written.tolerance < 1e-6 else torch.finfo(torch.float32).eps
    with torch.no_grad():
        for seed, parameter in enumerate(rounded.parameters()):
            parameter.mul_((1 + step * floats(*parameter.shape, seed=seed)).to(parameter.dtype))
    for call in written.calls[: number + 1]:
        with contextlib.suppress(Exception):
            error, _ = difference(run(original, call), run(rounded, call))
    return error if math.isfinite(error) else 0.0


def _largest_difference_of_blocks(written: Written, plan: Plan) -> tuple[float, str]:
    """Each block called by itself, beside the block with the same weights and LayerNorm."""
    worst = (0.0, "")
    centred = fold_in_memory(written.build(), replace(plan, norms=()))
    folded = fold_in_memory(written.build(), plan)
    for path, block in centred.named_modules():
        if path.rpartition(".")[2].startswith("block") or path.startswith("blocks."):
            width = next(m for m in block.modules() if isinstance(m, nn.LayerNorm))
            call = Call("by itself", f"floats(2, 4, {width.normalized_shape[-1]}, seed=3)")
            with contextlib.suppress(Exception):
                before = run(block, call)
                error, place = difference(before, run(folded.get_submodule(path), call))
                worst = max(worst, (error, f"{path}: {place}"))
    return worst


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[float, str]:
    """The largest difference, relative to the largest element of its tensor, and its place."""
    if "raised" in after:
        return math.inf, "raised"
    keys = before.keys() | after.keys()
    return max(((_distance(before.get(k), after.get(k)), k) for k in keys), default=(0.0, ""))


def _distance(a: Any, b: Any) -> float:
    if isinstance(a, float) and isinstance(b, float):
        a, b = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return 0.0 if type(a) is type(b) and a == b else math.inf
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else math.inf
    finite = a.isfinite() & b.isfinite()
    if not ((a == b) | (a.isnan() & b.isnan()) | finite).all():
        return math.inf
    largest, gap = (float(t[finite].abs().max()) if finite.any() else 0.0 for t in (a, a - b))
    return gap / largest if largest else gap


def _is_same(model: nn.Module, other: nn.Module) -> bool:
    """Whether both have the same modules, and the same values in every parameter and buffer."""
    if [type(m).__name__ for m in model.modules()] != [type(m).__name__ for m in other.modules()]:
        return False
    mine, theirs = (dict(_opened(m.state_dict(), "")) for m in (model, other))
    return mine.keys() == theirs.keys() and all(
        not v.is_meta and torch.equal(v, theirs[k]) for k, v in mine.items()
    )


def shrunk(written: Written) -> Written:
    """The same failure with as few odd productions as possible."""
    failure, without = check(written).outcome, set[str]()
    for place in written.odd:
        if check(write(written.seed, {*without, place})).outcome == failure:
            without.add(place)
    return write(written.seed, without)
