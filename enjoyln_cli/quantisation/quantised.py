"""What ``quantize`` reports: the candidates that were compared, the result, and its gain."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from enjoyln_cli.quantisation.layer_bits import FinerLayer
from enjoyln_cli.quantisation.measure import Differences
from enjoyln_cli.quantisers.quantised_checkpoints import WeightCount
from enjoyln_cli.quantisers.speed import Speed
from enjoyln_cli.text import number
from enjoyln_cli.verification.generated_tokens import Agreement
from enjoyln_cli.version import __version__


@dataclass(frozen=True)
class Compared:
    """A candidate as it was written, on the calibration data."""

    name: str
    differences: Differences
    size: int
    """Bytes of the program and its weights."""
    weights: WeightCount | None = None
    """How many weights were rounded, in a checkpoint."""


@dataclass(frozen=True)
class Quantised:
    """The result of ``quantize``."""

    out: str
    source: str
    revision: str | None
    """The commit of a ``source`` on the Hub."""
    model_class: str
    outputs: tuple[str, ...]
    """The outputs that were compared."""
    format: str
    scheme: str
    target: str | None
    """What runs the ONNX file; ``None`` for a processor like the processor that made it."""
    suffix: str
    """What the names of ONNX files end with."""
    chosen: str
    """The name of the candidate that was written."""
    candidates: tuple[Compared, ...]
    held_out: Differences
    """Of the result, on the held-out data."""
    plain: Differences
    """Of the original, quantised in the same way, on the held-out data."""
    inputs: int
    """Number of held-out inputs."""
    most_inputs: int
    """At most so many were wanted in each half."""
    chosen_by: tuple[str, ...]
    """Digests of the calibration inputs."""
    measured_on: tuple[str, ...]
    """Digests of the held-out inputs."""
    perplexity: float | None
    """Of the original in float32."""
    size: int
    """Bytes of the program and its weights."""
    float_size: int
    speed: Speed | None
    """``None`` if transformers only simulates the format."""
    float_speed: Speed | None
    """Of the original in float32, in the same program; both take turns."""
    threads: int
    max_error: float
    generated: Agreement | None
    """Of the result's generated tokens with the original's; ``None`` if it generates none."""
    kept: tuple[str, ...]
    """Patterns of the layers that the user wanted to keep more precise."""
    finer: tuple[FinerLayer, ...]
    """Layers that got more bits than the scheme says, the costliest first."""
    max_size: int | None
    scaled_norms: tuple[str, ...]
    """Norms that read their input at a smaller scale, so that float16 does not overflow."""
    seconds: float
    version: str = __version__

    @property
    def summary(self) -> str:
        """What the user gains, or loses, compared with float32: time and size."""
        words = []
        if self.speed and self.float_speed:
            ratio = number(self.speed.milliseconds / self.float_speed.milliseconds)
            what = f"{self.speed.what}{' on this processor' if self.target else ''}"
            words.append(
                f"slower than float32 ({what} takes {ratio} times as long)"
                if self.speed.is_slower_than(self.float_speed)
                else f"{what} takes {ratio} of float32's time"
            )
        larger = self.size >= self.float_size
        part = number(self.size / self.float_size)
        words.append(
            f"no smaller than float32 ({part} of its size)" if larger else f"{part} of its size"
        )
        return f"{self.scheme} in {self.format}: {', '.join(words)}"

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)
