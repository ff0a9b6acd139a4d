"""Where a model overflows in float16 on the user's data, and where another scale prevents it.

The model runs in float32 on a CPU, op by op, before and after its streams are scaled. Numbers that
float16 does not hold are noted. So are the squares and sums of a norm, and the cubes of GELU's tanh
form, which only an engine computes that takes these ops apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from enjoyln_cli.comparison.batches import Batch, complete_batch
from enjoyln_cli.comparison.data_files import UserData
from enjoyln_cli.comparison.run import Outputs, run
from enjoyln_cli.graph.nodes import aten
from enjoyln_cli.models.load import silent
from enjoyln_cli.rewrite.opened_model import OpenedModel
from enjoyln_cli.scaling.float16 import (
    analysis_for,
    calibration_batches,
    edits_for,
    scale_streams,
    scaled_inputs,
)
from enjoyln_cli.scaling.float16_engine import MASKED, engine_in_float16
from enjoyln_cli.scaling.ranges import FLOAT16_MAX, run_batch
from enjoyln_cli.text import counted, listed_briefly, number

OverflowKind = Literal["norm", "stream", "product", "activation"]
_PRODUCTS = {
    aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.convolution, aten.mul,
    aten._scaled_dot_product_flash_attention_for_cpu,
}  # fmt: skip
_SUMS = {aten.add, aten.sub, aten.sum, aten.mean, aten.embedding}
"""A number too large in their result belongs to a stream."""
_MOVES = {
    aten.cat, aten.view, aten.expand, aten.permute, aten.transpose, aten.t, aten.slice, aten.select,
    aten.clone, aten._to_copy, aten.unsqueeze, aten.split, aten._unsafe_view, aten.native_dropout,
    aten.detach, aten.alias, aten.unbind, aten.squeeze, aten.empty_like, aten.new_empty,
}  # fmt: skip
"""Their results have no numbers of their own."""


@dataclass(frozen=True)
class Overflow:
    """Numbers of one module that float16 does not hold."""

    kind: OverflowKind
    """A norm's squares or sums, a residual stream (or another sum), a product, or what else is
    computed from one number at a time."""
    module: str
    largest: float
    """The largest absolute value."""
    after: float
    """The largest with the scales of ``--fp16-safe``."""

    @property
    def is_mended(self) -> bool:
        return self.after <= FLOAT16_MAX


@dataclass(frozen=True)
class OverflowReport:
    """Where a model overflows in float16."""

    model_class: str
    inputs: int
    overflows: tuple[Overflow, ...]
    """Empty if all of float16's range is enough."""
    cosine: float
    """Between the outputs in float32 and in an engine in float16 that takes norms apart: of the
    worst output; 0 if it has a NaN."""
    cosine_after: float
    """The same with the scales of ``--fp16-safe``."""

    @property
    def lines(self) -> list[str]:
        """What the table means, in sentences."""
        ran = counted(self.inputs, "input")
        left = [o for o in self.overflows if not o.is_mended]
        if not self.overflows:
            return [f"nothing overflows in float16 on {ran}"]
        kinds = Counter(found.kind for found in self.overflows)
        many = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        said = [f"overflows in float16 on {ran}: {many}"]
        said.append(
            f"cosine of the outputs in float16, norms taken apart: {number(self.cosine)}; with "
            f"--fp16-safe {number(self.cosine_after)}"
        )
        if any(found.is_mended for found in self.overflows):
            said.append(
                "--fp16-safe of export and quantize mends it, and of fold where the weights can"
            )
        kept = [found.module for found in left if found.kind == "activation"]
        if kept:
            names = listed_briefly(kept)
            said.append(f"no scale of a stream mends an activation, so keep in float32: {names}")
        others = [found.module for found in left if found.kind in ("product", "stream")]
        if others:
            names = listed_briefly([*dict.fromkeys(others)])
            said.append(
                f"too large with --fp16-safe too, so compute in float32 or bfloat16: {names}"
            )
        return said


def overflows_of(opened: OpenedModel, data: UserData) -> OverflowReport:
    """Run ``opened``, a model with its class, on ``data``, as it is and with scaled streams.

    Raises as ``analyze_config`` and ``calibration_batches`` do.
    """
    model = opened.load(torch.float32)
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")  # which shows the scores
    batches = calibration_batches(opened, model, data)
    edits = edits_for(model, batches, analysis_for(opened, model))
    whole = [complete_batch(model, batch, torch.float32) for batch in batches]
    exact = run(model, whole)
    before = _largest(model, batches, edits.ranges)
    cosine = _cosine(model, whole, exact)
    scale_streams(model, edits.streams)
    with scaled_inputs(model, edits.norms):
        after = _largest(model, batches, edits.ranges)
        cosine_after = _cosine(model, whole, exact)
    shifts = {norm: k for stream, k in edits.streams.items() for norm in stream.norms}
    shifts |= edits.norms
    norms = [
        Overflow("norm", norm, size, size * scale)
        for norm, found in edits.ranges.items()
        for size, scale in [_of_norm(found.squares, found.total, shifts.get(norm, 0))]
        if found.overflows
    ]
    others = [
        Overflow(kind, module, size, after.get((kind, module), 0.0))
        for (kind, module), size in before.items()
        if size > FLOAT16_MAX
    ]
    inputs = sum(len(next(iter(batch.values()))) for batch in batches)
    places = (*norms, *others)
    return OverflowReport(type(model).__name__, inputs, places, cosine, cosine_after)


def _cosine(model: nn.Module, batches: Sequence[Batch], exact: Sequence[Outputs]) -> float:
    """The smallest cosine between an exact output and the engine's output; 0 for a NaN."""
    with engine_in_float16(model):
        rounded = run(model, batches)
    pairs = [
        (other[name].double().flatten(), one[name].double().flatten())
        for one, other in zip(exact, rounded, strict=True)
        for name in one
    ]
    cosines = (float(torch.cosine_similarity(x, y, dim=0)) for x, y in pairs)
    return min(value if isfinite(value) else 0.0 for value in cosines)


def _of_norm(squares: float, total: float, shift: int) -> tuple[float, float]:
    """The larger number of both, and what a scale of ``2^-shift`` multiplies it by."""
    return (squares, 4.0**-shift) if squares >= total else (total, 2.0**-shift)


def _largest(
    model: nn.Module, batches: Iterable[Batch], norms: Mapping[str, Any]
) -> dict[tuple[OverflowKind, str], float]:
    """The largest absolute value of each kind in each module but the ``norms``."""
    with _entered(model) as path, torch.no_grad(), silent(), _Largest(path, norms) as found:
        for batch in batches:
            run_batch(model, batch)
    return found.largest


@contextmanager
def _entered(model: nn.Module) -> Iterator[list[str]]:
    """The paths of the modules that run at the moment, the innermost last."""
    path, handles = [""], []
    for name, module in model.named_modules():

        def enter(*_: Any, name: str = name) -> None:
            path.append(name)

        def leave(*_: Any) -> None:
            path.pop()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield path
    finally:
        for handle in handles:
            handle.remove()


class _Largest(TorchDispatchMode):
    """Notes the largest result of every op."""

    def __init__(self, path: list[str], norms: Mapping[str, Any]) -> None:
        super().__init__()
        self.path, self.norms = path, norms
        self.largest: dict[tuple[OverflowKind, str], float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        module, op = self.path[-1], func.overloadpacket
        reads = any(isinstance(x, torch.Tensor) for x in args)
        if reads and module not in self.norms and op not in _MOVES:
            is_tanh = op is aten.gelu and (kwargs or {}).get("approximate") == "tanh"
            self.note(_kind(op), module, args[0].double() ** 3 if is_tanh else result)
        return result

    def note(self, kind: OverflowKind, module: str, x: Any) -> None:
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() and not x.is_meta:
            sizes = x.abs()
            largest = float(torch.where(sizes < MASKED, sizes, 0.0).max())
            self.largest[kind, module] = max(self.largest.get((kind, module), 0.0), largest)


def _kind(op: Any) -> OverflowKind:
    if op in _PRODUCTS:
        return "product"
    return "stream" if op in _SUMS else "activation"
