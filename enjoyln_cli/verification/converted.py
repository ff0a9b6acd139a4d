"""A converted checkpoint that is exported, and its original."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.analysis.stored_class import require_weights
from enjoyln_cli.checkpoint.marker import Marker, read_marker
from enjoyln_cli.checkpoint.open_options import OpenOptions
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.classes import apply_experts
from enjoyln_cli.rewrite.opened_model import OpenedModel, open_model
from enjoyln_cli.runtime.loading import saved_class_of
from enjoyln_cli.text import dtype_name
from enjoyln_cli.verification.verify import (
    RATIO,
    ROTATED_RATIO,
    compute_dtype,
    original_of,
)

DTYPES = (torch.float32, torch.float16)
"""The dtypes that are exported."""


@dataclass(frozen=True)
class Converted:
    """The checkpoint that is exported, and its original, which it is compared with."""

    folded: OpenedModel
    marker: Marker
    model_class: str
    stored: torch.dtype
    """The dtype of most of its weights."""
    dtype: torch.dtype
    """The dtype of the export."""
    original: OpenedModel | None
    """``None`` without a check."""
    max_ratio: float
    """How many times the original's rounding error the error may be."""

    def load(self, opened: OpenedModel, dtype: torch.dtype) -> Any:
        """The result or its original, as ``model_class``, ready for an exporter.

        Raises ``BadCheckpoint`` if its outputs depend on weights that are not stored.
        """
        missing: set[str] = set()
        model = opened.load(dtype, missing=missing)
        require_weights(model, missing, opened.source.model)
        apply_experts(model, "eager" if dtype == torch.float64 else "batched_mm")
        return model


def open_converted(
    out: str,
    *,
    dtype: str | torch.dtype | None,
    model_class: str | None,
    against: str | Path | None,
    max_ratio: float | None,
    verify: bool,
    opening: OpenOptions,
) -> Converted:
    """Open the converted checkpoint ``out`` and its original (see ``export``)."""
    folded = open_model(out, opening)
    marker = read_marker(folded.checkpoint.raw_config, folded.source.model)
    if max_ratio is None:
        max_ratio = ROTATED_RATIO if marker.plan.rotated else RATIO
    model_class = model_class or saved_class_of(folded).__name__

    def to_export(opened: OpenedModel) -> OpenedModel:
        return opened.as_class(model_class).returning(marker.plan.outputs)

    access = replace(opening, revision=None)
    return Converted(
        folded=to_export(folded),
        marker=marker,
        model_class=model_class,
        stored=compute_dtype(folded.checkpoint, None),
        dtype=_as_exported(compute_dtype(folded.checkpoint, dtype)),
        original=to_export(original_of(folded, marker, access, against)) if verify else None,
        max_ratio=max_ratio,
    )


def _as_exported(dtype: torch.dtype) -> torch.dtype:
    if dtype not in DTYPES:
        raise UnsupportedModel(
            f"{dtype_name(dtype)} cannot be exported: onnxruntime has no operators for it on a "
            "CPU; fold with --dtype float32 or float16"
        )
    return dtype
