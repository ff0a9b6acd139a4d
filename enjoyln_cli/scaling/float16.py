"""What has to be scaled so that no norm squares or sums beyond float16.

A stream whose norms overflow is held at ``2^-k`` of its scale, by its weights. Where its weights
cannot do that, each norm that overflows gets a multiplication in front of it, which programs can
carry: ``LN(x; eps) = LN(2^-k x; 4^-k eps)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from enjoyln_cli.analysis.analyze import analyze_config
from enjoyln_cli.comparison.data_files import UserData
from enjoyln_cli.comparison.user_data import batches_of
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.rewrite.opened_model import OpenedModel
from enjoyln_cli.scaling.ranges import NormRange, norm_ranges
from enjoyln_cli.scaling.scaled_streams import ScaledStream, calls_of_norms, scaled_streams

WINDOWS = 16
"""How many windows of a running text are calibration data."""


@dataclass(frozen=True, eq=False)
class Float16Edits:
    """The streams and norms that have to be scaled, with the ``k`` of each."""

    streams: tuple[tuple[ScaledStream, int], ...]
    norms: Mapping[str, int]
    """Norms in front of which a multiplication by ``2^-k`` has to stand, by their paths."""
    ranges: Mapping[str, NormRange]
    """What each norm met on the calibration data."""

    @property
    def overflowing(self) -> tuple[str, ...]:
        """The norms that overflow without the edits."""
        return tuple(norm for norm, found in self.ranges.items() if found.overflows)


def edits_for(opened: OpenedModel, model: Any, data: UserData) -> Float16Edits:
    """What to scale in ``model``, a float32 model of ``opened``, for the calibration ``data``.

    Raises as ``analyze_config`` does, and as ``batches_of`` for data that the model cannot take.
    """
    problem = analyze_config(
        opened.config,
        model_class=type(model).__name__,
        checkpoint=opened.checkpoint,
        options=Options(fold=False, rotate=True),
    ).problem
    batches = batches_of(model, data, opened.source.path, torch.float32, WINDOWS).batches
    ranges = norm_ranges(model, calls_of_norms(problem.flow), batches)
    return float16_edits(scaled_streams(problem), ranges)


def float16_edits(streams: list[ScaledStream], ranges: Mapping[str, NormRange]) -> Float16Edits:
    """What to scale for the ``ranges`` that norms met on calibration data."""
    overflowing = {norm: found.shift for norm, found in ranges.items() if found.overflows}
    scaled = []
    for stream in streams:
        shifts = [ranges[norm].shift for norm in stream.norms if norm in ranges]
        if stream.is_scaled and overflowing.keys() & stream.norms.keys():
            scaled.append((stream, max(shifts)))
            for norm in stream.norms:
                overflowing.pop(norm, None)
    return Float16Edits(tuple(scaled), overflowing, ranges)
