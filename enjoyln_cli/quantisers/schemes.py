"""The options, formats and schemes of ``enjoyln quantize``, and how much error each may cost.

Imports nothing slow, so that a command can refuse wrong names at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.onnx_export.requirements import require_packages, require_transformers
from enjoyln_cli.plan.option_field import ABOVE_ZERO, InRange, measuring_option, option
from enjoyln_cli.text import bytes_in

FLOAT_BITS = 32
"""Bits of layers that are not rounded, whatever dtype they are stored in."""
RoundingMethod = Literal["nearest", "gptq"]
"""How weights of 4 bits are rounded: each to the nearest integer, or by the outputs' error.

Integers are symmetric in static schemes, and, to the nearest, in checkpoints."""


@dataclass(frozen=True)
class QuantisationScheme:
    """How many bits weights and inputs of linear layers get, and how inputs are scaled."""

    weight_bits: int
    input_bits: int | None
    """``None`` if the inputs stay floating-point numbers."""
    is_static: bool
    """Whether the scales of inputs are fixed, from the ranges that the user's data show."""
    max_error: float
    """Default for the largest relative error of the outputs that the result may have."""
    suffix: str
    """What the names of ONNX files end with, as in transformers.js if it has the scheme."""
    group: int | None = None
    """How many weights, or inputs, share a scale, if the name of the scheme says so."""
    is_reduced: bool = False
    """Whether weights of 8 bits use 7 of them, for programs whose sums would saturate."""
    rounds_results: bool = False
    """Whether results of products are rounded as well, as NPUs need them."""

    @property
    def is_in_groups(self) -> bool:
        """Whether a few weights of an output share a scale; otherwise all of them do."""
        if self.is_static:
            return False
        return bool(self.group) or self.weight_bits == 4 or self.input_bits is None

    @property
    def rounds_tied_heads(self) -> bool:
        """Whether a tied head in ONNX is rounded as layers are, and not as the embedding is."""
        return not self.is_in_groups

    def can_be_smoothed(self, format_name: str) -> bool:
        """Whether large features of inputs may be moved into the weights; NNCF does so itself."""
        return self.input_bits == 8 and not self.is_in_groups and format_name != OPENVINO

    @property
    def finer_bits(self) -> tuple[int, ...]:
        """The bits that single layers may have instead, the fewest first."""
        return (8, FLOAT_BITS) if self.weight_bits == 4 else (FLOAT_BITS,)

    def bits_to_keep(self, format_name: str) -> int:
        """The bits of a layer that a user keeps more precise."""
        return 8 if format_name == ONNX and self.weight_bits == 4 else FLOAT_BITS


SCHEMES: Mapping[str, QuantisationScheme] = {
    "w8a8": QuantisationScheme(8, 8, False, 0.15, "_quantized"),
    "w8a8-static": QuantisationScheme(8, 8, True, 0.15, "_int8"),
    "w8a16-static": QuantisationScheme(8, 16, True, 0.05, "_w8a16_static", rounds_results=True),
    "w4a16-static": QuantisationScheme(4, 16, True, 0.3, "_w4a16_static", rounds_results=True),
    "w8a8-g32": QuantisationScheme(8, 8, False, 0.05, "_w8a8_g32", group=32),
    "w8a16": QuantisationScheme(8, None, False, 0.05, "_w8a16"),
    "w4a8": QuantisationScheme(4, 8, False, 0.3, "_w4a8"),
    "w4a16": QuantisationScheme(4, None, False, 0.3, "_q4"),
}


SIMULATED: Mapping[str, QuantisationScheme] = {
    **{name: s for name, s in SCHEMES.items() if s.group is None and s.input_bits != 16},
    "w4a4": QuantisationScheme(4, 4, False, 0.5, "_w4a4"),
}
"""What ``enjoyln rotate`` can simulate: schemes without groups, and a scheme that no format
stores."""


@dataclass(frozen=True)
class TargetFormat:
    """A kind of result."""

    packages: tuple[str, ...]
    """What has to be installed, besides what enjoyln needs itself."""
    schemes: tuple[str, ...]
    packages_to_run: tuple[str, ...] = ()
    """What has to be installed to run a result; ``packages`` by default."""
    transformers: tuple[int, int] = (5, 24)
    """The oldest version that it was tested with."""
    is_checkpoint: bool = False
    """Whether ``from_pretrained`` loads it; otherwise the result is programs."""
    is_timed: bool = True
    """Whether the time of a call says something about the engine that the format is for."""
    rounds_untied_heads: bool = False
    """Whether a head is rounded in another way if it has a copy of the embedding's weights."""


ONNX, OPENVINO, TORCHAO, COMPRESSED = "onnx", "openvino", "torchao", "compressed-tensors"
FORMATS: Mapping[str, TargetFormat] = {
    ONNX: TargetFormat(
        ("onnx", "onnxscript", "onnxruntime"),
        tuple(SCHEMES),
    ),
    OPENVINO: TargetFormat(
        ("nncf", "openvino", "openvino_tokenizers", "onnx", "onnxscript"),
        ("w8a8-static", "w8a16", "w4a16"),
        ("openvino",),
        rounds_untied_heads=True,
    ),
    TORCHAO: TargetFormat(("torchao",), ("w8a8", "w8a16", "w4a8", "w4a16"), is_checkpoint=True),
    COMPRESSED: TargetFormat(
        ("llmcompressor",),
        ("w8a8", "w8a16", "w4a16"),
        ("compressed_tensors",),
        transformers=(5, 17),
        is_checkpoint=True,
        is_timed=False,
    ),
}


@dataclass(frozen=True)
class Target:
    """What runs an ONNX file, as far as the numbers that it computes depend on it."""

    saturates: bool
    """Whether it adds products of 8-bit numbers in 16 bits, so that sums may saturate."""
    is_npu: bool = False
    """Whether it computes with fixed scales alone, and rounds results of products."""


TARGETS: Mapping[str, Target] = {
    "vnni": Target(saturates=False),
    "avx2": Target(saturates=True),
    "wasm": Target(saturates=False),
    "qnn": Target(saturates=False, is_npu=True),
}
"""The processors and engines that results can be made for."""


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """What a model is quantised to, and how a candidate is chosen."""

    scheme: str = option(
        "w8a8",
        "Bits of weights and of the inputs of linear layers.",
        choices=tuple(SCHEMES),
        shows_default=True,
    )
    format: str = option(
        ONNX, "What the result is stored as.", choices=tuple(FORMATS), shows_default=True
    )
    target: str | None = option(
        None,
        "What runs an ONNX file (default: a processor like this one).",
        flags=("--for",),
        choices=tuple(TARGETS),
    )
    inputs: Annotated[int, InRange(4)] = measuring_option(
        16,
        "Use at most N inputs to choose by, and N others to measure on.",
        metavar="N",
        shows_default=True,
    )
    rotations: Annotated[int, InRange(0)] = measuring_option(
        3, "Number of rotations to try.", metavar="N", shows_default=True
    )
    keep: tuple[str, ...] = option(
        (),
        "Layers to leave in floating point (in ONNX in 8 bits if weights have 4), such as *.fc2.",
        metavar="NAMES",
    )
    max_error: Annotated[float, ABOVE_ZERO] | None = measuring_option(
        None,
        "The largest relative error of the outputs (default: the scheme's limit).",
        metavar="R",
    )
    max_size: int | None = measuring_option(
        None, "The largest size of the result, such as 40MB.", metavar="S", parse=bytes_in
    )
    fp16_safe: bool = option(False, "Scale what norms read, for engines in float16.")
    force: bool = option(False, "Replace OUT if it exists.")


def require_target(target: str | None, scheme: str, format_name: str) -> None:
    """Raise ``UnsupportedModel`` if a target does not run what the format and scheme store."""
    if target and format_name != ONNX:
        raise UnsupportedModel(f"--for is for --format {ONNX}; leave it out for {format_name}")
    if target and TARGETS[target].is_npu and not SCHEMES[scheme].is_static:
        static = ", ".join(name for name in FORMATS[ONNX].schemes if SCHEMES[name].is_static)
        raise UnsupportedModel(f"{target} computes with fixed scales alone; choose one of {static}")


def for_target(
    scheme: QuantisationScheme, target: str | None, saturates_here: bool
) -> QuantisationScheme:
    """The scheme as it is for a target, by default for this processor.

    Weights of 7 bits have the same sums everywhere, so that a target that saturates can be measured
    on any processor. Raises ``UnsupportedModel`` for weights of 8 bits if this processor would
    saturate and the target would not.
    """
    saturates = TARGETS[target].saturates if target else saturates_here
    is_affected = scheme.weight_bits == 8 and scheme.input_bits == 8 and not scheme.group
    if is_affected and saturates_here and not saturates:
        raise UnsupportedModel(
            f"8-bit sums saturate on this processor, so what {target} would compute cannot be "
            "measured here; leave --for out, or use a processor with VNNI"
        )
    is_npu = bool(target) and TARGETS[target or ""].is_npu
    return replace(
        scheme,
        is_reduced=saturates and is_affected,
        rounds_results=scheme.rounds_results or is_npu,
    )


def bits_at(path: str, bits: Mapping[str, int], otherwise: int) -> int:
    """How many bits the layer at this path gets; ``bits`` has paths or patterns, the last counts.

    ``otherwise`` is for a layer that no pattern matches.
    """
    found = [count for pattern, count in bits.items() if fnmatchcase(path, pattern)]
    return found[-1] if found else otherwise


def require_scheme(scheme: str, format_name: str, to_run: bool = False) -> QuantisationScheme:
    """The scheme of this name, to quantise by or, with ``to_run``, to run a result of.

    Raises ``UnsupportedModel`` if the format does not have it, or if a library is missing.
    """
    if format_name not in FORMATS:
        raise UnsupportedModel(f"unknown format {format_name}; choose {', '.join(FORMATS)}")
    if scheme not in FORMATS[format_name].schemes:
        can = ", ".join(FORMATS[format_name].schemes)
        raise UnsupportedModel(f"{format_name} cannot store {scheme}; choose one of {can}")
    target = FORMATS[format_name]
    packages = target.packages_to_run if to_run and target.packages_to_run else target.packages
    what = f"{'running' if to_run else 'quantising to'} {format_name}"
    where = " in an environment of its own" if format_name == COMPRESSED else ""
    require_packages(packages, what, format_name, where)
    require_transformers(target.transformers, format_name)
    return SCHEMES[scheme]
