"""A checkpoint that is exported, and the original that it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from enjoyln_cli.analysis.stored_class import require_weights
from enjoyln_cli.checkpoint.config import MARKER
from enjoyln_cli.checkpoint.marker import read_marker
from enjoyln_cli.checkpoint.open_options import OpenOptions
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.classes import apply_experts
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.rewrite.opened_model import OpenedModel, open_model
from enjoyln_cli.runtime.loading import saved_class_of
from enjoyln_cli.text import dtype_name
from enjoyln_cli.verification.verify import (
    RATIO,
    ROTATED_RATIO,
    compute_dtype,
    original_of,
)
from enjoyln_cli.verification.verify_options import ExportOptions

DTYPES = (torch.float32, torch.float16)
"""The dtypes that are exported."""
PROGRAM_RATIO = 16.0
"""How many times torch's rounding error of an original its error in a program may be.

Functions such as tanh are less accurate in some programs. ALBERT's error is 3.5 times
torch's in both."""


@dataclass(frozen=True)
class ModelToExport:
    """A checkpoint that is exported, and the original that it is compared with."""

    opened: OpenedModel
    """The checkpoint, as the class ``model_class``."""
    plan: Plan | None
    """How it was folded or rotated; ``None`` if it is an original itself."""
    origin: str
    """The original: a Hub id, or the path of a directory."""
    revision: str | None
    """The commit of the original, if it is a Hub id."""
    stored: torch.dtype
    """The dtype of most of its weights."""
    dtype: torch.dtype
    """The dtype of the export."""
    original: OpenedModel | None
    """``None`` without a check."""
    max_ratio: float
    """How many times the original's rounding error the error may be."""

    @property
    def model_class(self) -> str:
        """The class that is exported."""
        return self.opened.model_class

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that are exported; empty for all."""
        return self.plan.outputs if self.plan else ()

    def load(self, opened: OpenedModel, dtype: torch.dtype) -> Any:
        """The checkpoint or its original, ready for an exporter.

        Raises ``BadCheckpoint`` if its outputs depend on weights that are not stored.
        """
        missing: set[str] = set()
        model = opened.load(dtype, missing=missing)
        require_weights(model, missing, opened.source.model)
        apply_experts(model, "eager" if dtype == torch.float64 else "batched_mm")
        return model


def open_to_export(model: str, options: ExportOptions, opening: OpenOptions) -> ModelToExport:
    """Open ``model`` and its original (see ``onnx_export.export``).

    A model that was not converted is its own original.
    """
    opened = open_model(model, opening)
    source = opened.source
    kind = _as_exported(compute_dtype(opened.checkpoint, options.dtype))
    stored = compute_dtype(opened.checkpoint, None)
    if MARKER not in opened.checkpoint.raw_config:
        if options.against is not None:
            raise UnsupportedModel(f"{model} was not converted: drop --against")
        opened = opened.as_class(options.model_class or opened.stored_class.name)
        return ModelToExport(
            opened=opened,
            plan=None,
            origin=source.origin,
            revision=source.revision,
            stored=stored,
            dtype=kind,
            original=opened if options.verify else None,
            max_ratio=PROGRAM_RATIO if options.max_ratio is None else options.max_ratio,
        )
    marker = read_marker(opened.checkpoint.raw_config, source.model)
    name = options.model_class or saved_class_of(opened).__name__
    default = ROTATED_RATIO if marker.plan.rotated else RATIO

    def to_export(one: OpenedModel) -> OpenedModel:
        return one.as_class(name).returning(marker.plan.outputs)

    original = None
    if options.verify:
        access = replace(opening, revision=None)
        original = to_export(original_of(opened, marker, access, options.against))
    return ModelToExport(
        opened=to_export(opened),
        plan=marker.plan,
        origin=marker.source,
        revision=marker.revision,
        stored=stored,
        dtype=kind,
        original=original,
        max_ratio=default if options.max_ratio is None else options.max_ratio,
    )


def _as_exported(dtype: torch.dtype) -> torch.dtype:
    if dtype not in DTYPES:
        raise UnsupportedModel(
            f"{dtype_name(dtype)} cannot be exported: onnxruntime has no operators for it on a "
            "CPU; pass --dtype float32 or float16"
        )
    return dtype
