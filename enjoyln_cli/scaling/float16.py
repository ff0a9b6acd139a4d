"""What has to be scaled so that no norm squares or sums beyond float16.

A stream whose norms overflow is held at ``2^-k`` of its scale, by its weights. If its weights
cannot do that, the input of each norm that overflows is multiplied in the program:
``LN(x; eps) = LN(2^-k x; 4^-k eps)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import nn

from enjoyln_cli.analysis.analyze import Analysis, analyze_config
from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.data_files import UserData
from enjoyln_cli.comparison.user_data import batches_of
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.graph.insertion_points import change_input
from enjoyln_cli.models.load import values_of
from enjoyln_cli.models.norm_modules import first_input
from enjoyln_cli.plan.edited_tensors import NamedParameter, ScaledEps, ScaledTensor, StreamScale
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.rewrite.opened_model import OpenedModel
from enjoyln_cli.runtime.modules import Folded
from enjoyln_cli.scaling.ranges import NormRange, norm_ranges, shifts_of
from enjoyln_cli.scaling.scaled_streams import ScaledStream, calls_of_norms, scaled_streams

WINDOWS = 16
"""How many windows of a running text are calibration data."""
TensorsOf = Callable[[str], Iterable[NamedParameter]]
"""From a parameter to the tensors that hold it."""


@dataclass(frozen=True, eq=False)
class Float16Edits:
    """The streams and norms that have to be scaled, with the ``k`` of each."""

    streams: Mapping[ScaledStream, int]
    norms: Mapping[str, int]
    """Norms in front of which a multiplication by ``2^-k`` has to stand, by their paths."""
    ranges: Mapping[str, NormRange]
    """What each norm met on the calibration data."""
    found: Sequence[ScaledStream]
    """All streams, scaled or not."""

    @property
    def overflowing(self) -> tuple[str, ...]:
        """The norms that overflow without the edits."""
        return tuple(norm for norm, found in self.ranges.items() if found.overflows)


def analysis_for(opened: OpenedModel, model: Any) -> Analysis:
    """The analysis of ``model``, a model of ``opened``, for what its class is used for."""
    return analyze_config(
        opened.config,
        model_class=type(model).__name__,
        checkpoint=opened.checkpoint,
        options=Options(fold=False, rotate=True),
    )


def calibration_batches(opened: OpenedModel, model: Any, data: UserData) -> list[Batch]:
    """The calibration ``data`` as inputs of ``model``, a float32 model of ``opened``.

    Raises as ``batches_of`` does for data that the model cannot take.
    """
    return batches_of(model, data, opened.source.path, torch.float32, WINDOWS).batches


def edits_for(
    model: Any, batches: Sequence[Batch], analysis: Analysis, *, keeps_all: bool = True
) -> Float16Edits:
    """What to scale in a float32 ``model`` for the calibration ``batches``.

    Without ``keeps_all``, outputs that the analysis does not protect may be at another scale.
    """
    ranges = norm_ranges(model, calls_of_norms(analysis.problem.flow), batches)
    return float16_edits(scaled_streams(analysis.problem, keeps_all=keeps_all), ranges)


def float16_edits(streams: list[ScaledStream], ranges: Mapping[str, NormRange]) -> Float16Edits:
    """What to scale for the ``ranges`` that norms met on calibration data."""
    overflowing = shifts_of(ranges)
    scaled = {}
    for stream in streams:
        shifts = [ranges[norm].shift for norm in stream.norms if norm in ranges]
        if stream.is_scaled and overflowing.keys() & stream.norms.keys():
            scaled[stream] = max(shifts)
            for norm in stream.norms:
                overflowing.pop(norm, None)
    return Float16Edits(scaled, overflowing, ranges, streams)


def planned_scale(
    stream: ScaledStream, shift: int, stored: TensorsOf, order: Sequence[str]
) -> StreamScale:
    """How ``stream`` is held at ``2^-shift`` of its scale; ``order`` has all parameters in order.

    Raises ``UnsupportedModel`` if a weight would be multiplied by no power of two.
    """
    powers = {name: (e, 0.0) for name, e in stream.parameters.items()} | stream.shifted
    powers = {name: powers[name] for name in order if name in powers}
    return StreamScale(
        next(iter(powers), stream.norm),
        shift,
        tuple(
            ScaledTensor(named.parameter, named.tensor, _power(exponent, shift), offset)
            for name, (exponent, offset) in powers.items()
            for named in stored(name)
        ),
        tuple(
            ScaledEps(norm, eps, _power(exponent, shift))
            for norm, (exponent, eps) in stream.norms.items()
        ),
    )


def scale_streams(model: nn.Module, streams: Mapping[ScaledStream, int]) -> None:
    """Hold each stream of a live model at ``2^-k`` of its scale, in place.

    Raises ``UnsupportedModel`` if a norm has no attribute with its eps, or if a weight would be
    rounded; nothing is changed then.
    """
    values, name = values_of(model), type(model).__name__
    scales = tuple(
        planned_scale(stream, shift, lambda name: [NamedParameter(name)], list(values))
        for stream, shift in streams.items()
    )
    for tensor in (tensor for scale in scales for tensor in scale.tensors):
        require_exact(tensor, values[tensor.parameter])
    centre_parameters(model, Plan(name, name, (name,), (), (), (), scaled=scales))


@contextmanager
def scaled_inputs(model: nn.Module, shifts: Mapping[str, int]) -> Iterator[None]:
    """Multiply the input of each norm by ``2^-k``, and its eps by ``4^-k``, inside the block.

    A norm without an attribute for its eps keeps it.
    """
    undo: list[Callable[[], object]] = []
    try:
        for path, shift in shifts.items():
            norm: Any = model.get_submodule(path)
            first = first_input(type(norm).forward)

            def scale(_: Any, args: Any, kwargs: Any, k: int = shift, name: str = first) -> Any:
                return change_input(lambda x: x * 2.0**-k, name, args, kwargs)

            undo.append(norm.register_forward_pre_hook(scale, with_kwargs=True).remove)
            for name, eps in _eps_of(norm).items():
                undo.append(partial(setattr, norm, name, eps))
                setattr(norm, name, eps * 4.0**-shift)
        yield
    finally:
        for step in undo:
            step()


def computed_in_parts(model: nn.Module, shifts: Mapping[str, int]) -> dict[str, int]:
    """The norms of ``shifts`` that are several operators of a program, and have their own eps."""
    norms = {path: model.get_submodule(path) for path in shifts}
    return {
        path: shifts[path]
        for path, norm in norms.items()
        if not isinstance(norm, (nn.LayerNorm, Folded)) and _eps_of(norm)
    }


def _eps_of(norm: nn.Module) -> dict[str, float]:
    found = {name: vars(norm).get(name) for name in ("eps", "variance_epsilon")}
    return {name: eps for name, eps in found.items() if isinstance(eps, float)}


def require_exact(tensor: ScaledTensor, weight: torch.Tensor) -> None:
    """Raise ``UnsupportedModel`` if the scaled ``weight`` is not exact in its dtype.

    Elements so small that they are lost count if they are above a rounding of the largest element.
    """
    if tensor.offset:
        return
    scaled = weight.detach().double() * 2.0**tensor.power
    lost = (scaled.to(weight.dtype).double() - scaled).abs().max()
    if not bool(lost <= torch.finfo(weight.dtype).eps / 4 * scaled.abs().max()):
        raise UnsupportedModel(
            f"{tensor.parameter} would be rounded at {2.0**tensor.power:g} of its scale; "
            "convert with --dtype float32"
        )


def _power(exponent: Fraction, shift: int) -> int:
    power = exponent * shift
    if power.denominator != 1:
        raise UnsupportedModel(f"a weight would be scaled by 2^({power}), no power of two")
    return int(power)
