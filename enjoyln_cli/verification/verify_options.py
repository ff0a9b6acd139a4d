"""The options of checks, and of exports, which are checked. Nothing slow is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from enjoyln_cli.plan.option_field import (
    ABOVE_ZERO,
    InRange,
    keyword,
    measuring_option,
    option,
    plan_option,
)
from enjoyln_cli.text import bytes_in

if TYPE_CHECKING:
    import torch

CHECK_SECONDS = 60.0
"""Default time for the check of a fold."""


def seconds_option(seconds: float | None) -> Any:
    """The option for the time of a check; ``seconds`` is the default, ``None`` for no limit."""
    default = "no limit" if seconds is None else f"about {seconds:g}"
    return measuring_option(
        seconds,
        f"Time for the check; fewer inputs run if it is short (default: {default}).",
        metavar="S",
        is_in_card=False,
    )


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The check of a new result."""

    verify: bool = option(True, "Skip the check.", flags=("--no-verify",))
    seconds: Annotated[float, ABOVE_ZERO] | None = seconds_option(CHECK_SECONDS)


CHECK_DEFAULTS = CheckOptions()


AGAINST = "The original, if it has moved since the conversion."
MAX_RATIO = "Fail above this error ratio (default: 1.25; 2 if OUT is rotated)."


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """How a result is compared with its original."""

    against: str | Path | None = option(None, AGAINST, metavar="MODEL")
    dtype: str | torch.dtype | None = option(
        None,
        "Run in this dtype (default: the dtype of OUT).",
        flags=("--compute-dtype",),
        choices=("float64", "float32", "float16", "bfloat16"),
    )
    max_ratio: Annotated[float, ABOVE_ZERO] | None = option(None, MAX_RATIO, metavar="R")
    accept: tuple[str, ...] = option(
        (),
        "Files that you have changed on purpose, such as generation_config.json.",
        metavar="NAMES",
    )
    seconds: Annotated[float, ABOVE_ZERO] | None = seconds_option(None)
    device_map: Literal["auto", "cpu", "disk"] = option(
        "auto",
        "Weights in memory: as many as fit (auto), all (cpu), none (disk).",
        shows_default=True,
    )
    max_memory: int | None = option(
        None,
        "Memory limit of the process, such as 8GB (default: all free memory).",
        metavar="SIZE",
        parse=bytes_in,
    )
    seed: int = keyword(0, "Seed of the inputs that are made up.")
    write: bool = keyword(True, "Write the result to ``enjoyln_verify.json``.")


VERIFY_DEFAULTS = VerifyOptions()


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How a checkpoint is written as ONNX, and how the files are checked."""

    dtype: str | torch.dtype | None = option(
        None,
        "Convert all weights to this dtype (default: the dtype of MODEL).",
        choices=("float32", "float16"),
    )
    model_class: str | None = plan_option(
        None, "Export this class of the same family, e.g. GPT2Model.", metavar="CLASS"
    )
    against: str | Path | None = option(None, AGAINST, metavar="MODEL")
    max_ratio: Annotated[float, ABOVE_ZERO] | None = option(
        None,
        "Fail above this error ratio (default: 1.25; 2 if MODEL is rotated, 16 if it is an "
        "original).",
        metavar="R",
    )
    verify: bool = option(True, "Skip the check.", flags=("--no-verify",))
    opset: Annotated[int, InRange(18, 23)] | None = option(
        None,
        "Version of the operators, 18 to 23 (default: 23, or 20 without folded norms); below 23, "
        "a folded norm is a LayerNormalization.",
        metavar="N",
    )
    force: bool = option(False, "Replace DIR if it exists.")
    seed: int = keyword(0, "Seed of the inputs that are made up.")
