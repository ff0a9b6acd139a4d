"""Choose what computes the norms of a model on the GPU at hand: check, measure, decide, remember.

For each kind of norm and a few numbers of rows there are several candidates (``choices``). Each is
compared with the float64 formula. Those that are right are timed by replaying CUDA graphs, in
turns. What the norm would compute without a measurement stays, unless another candidate is faster
by ``MARGIN``. The result is stored in the cache; of processes that start together, one measures and
the others read.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from enjoyln_cli.kernels import build, choices, formula, native
from enjoyln_cli.kernels.choices import (
    KERNEL,
    LAYER_NORM,
    LIGER,
    RMS_NORM,
    SEPARATE,
    Choice,
    Norms,
)

ROWS = (1, 32, 1024, 8192)
"""The numbers of rows that are measured: a token, a batch of tokens, and prompts."""
MOST_ELEMENTS = 1 << 24
"""Larger tensors are not measured; the choice for fewer rows holds for them."""
SECONDS = 10.0
"""How long a measurement may take. Norms that were not reached keep what they compute now."""
MARGIN = 0.05
"""How much faster than another candidate one has to be to replace it: a share of its time."""
ORDER = (LAYER_NORM, RMS_NORM, LIGER, KERNEL)
"""The order in which candidates may replace what was taken: this project's kernel is the last."""
EPS = 1e-5

Compute = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Any]
"""Computes a norm of rows, residual, weight and bias; ``(norm, sum)`` for the norm of a sum."""


class Device(Protocol):
    """A GPU (``gpu.Gpu``), or a simulated one in tests."""

    index: int
    place: torch.device

    def key(self) -> choices.Key: ...

    def clock(self) -> float:
        """Seconds since some moment."""

    def candidates(self, norms: Norms) -> Mapping[str, Compute | str]:
        """For each candidate what it computes, or why it cannot be used."""

    def fused(self, norms: Norms) -> Compute | str:
        """This project's kernel for the norm of a sum, or why it cannot be used."""

    def seconds(self, calls: Mapping[str, Callable[[], Any]]) -> Mapping[str, Sequence[float]]:
        """How long each call takes, in each of several turns; empty if that cannot be measured."""


def fastest(default: str, seconds: Mapping[str, Sequence[float]]) -> str:
    """The candidate that is taken: ``default``, unless others beat it, one after the other."""
    taken = default
    for name in ORDER:
        if name in seconds and beats(seconds[name], seconds[taken]):
            taken = name
    return taken


def beats(times: Sequence[float], others: Sequence[float]) -> bool:
    """Whether a candidate is faster than another by ``MARGIN``, from their times in each turn.

    It is so in the median of the ratios of one turn, and faster at all in four of five turns. So
    noise does not decide between candidates that are alike.
    """
    ratios = [a / b for a, b in zip(times, others, strict=True)]
    often = sum(ratio < 1 for ratio in ratios) * 5 >= 4 * len(ratios)
    return often and statistics.median(ratios) <= 1 - MARGIN


@dataclass(frozen=True)
class Values:
    """Random arguments of a norm; the rows of ``x`` and ``residual`` have zero mean."""

    x: Tensor
    residual: Tensor
    weight: Tensor | None
    bias: Tensor | None

    def call(self, compute: Compute) -> Any:
        return compute(self.x, self.residual, self.weight, self.bias)


def values_for(norms: Norms, rows: int, place: torch.device) -> Values:
    generator = torch.Generator().manual_seed(norms.width)
    dtype, parameters = (getattr(torch, name) for name in (norms.dtype, norms.parameters))

    def centred() -> Tensor:
        x = torch.randn(min(rows, 64), norms.width, generator=generator)
        x = (x - x.mean(-1, keepdim=True)).to(place)
        return x.repeat(-(-rows // len(x)), 1)[:rows].to(dtype)

    weight, bias = (torch.randn(norms.width, generator=generator) for _ in range(2))
    return Values(
        centred(),
        centred(),
        (1 + weight / 4).to(place, parameters) if norms.weight else None,
        bias.to(place, parameters) if norms.bias else None,
    )


def fault(values: Values, compute: Compute, added: bool) -> str:
    """Why a candidate's result is not taken, or ``""`` if it is right.

    The bounds are those of the check of the CPU's kernels (``formula.is_close``).
    """
    try:
        result = values.call(compute)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    total = values.x + values.residual if added else values.x
    y, kept = result if added else (result, None)
    w, b = (None if t is None else t.double() for t in (values.weight, values.bias))
    exact = formula.rms_norm(total.double(), w, b, EPS)
    if y.shape != total.shape or y.dtype != total.dtype or not formula.is_close(y, exact):
        return "its result is wrong"
    if kept is not None and not torch.equal(kept, total):
        return "its sum is wrong"
    return ""


def default_for(norms: Norms) -> str:
    """What computes a folded norm on a GPU without a measurement (see ``ops``)."""
    return LAYER_NORM if norms.bias else RMS_NORM


def measure(device: Device, norms: Norms, rows: int) -> tuple[Choice, Choice]:
    """The choices for ``norms`` of ``rows`` rows, alone and after an addition."""
    values, candidates = values_for(norms, rows, device.place), device.candidates(norms)
    alone = Choice(norms, rows, False, *_contest(device, values, candidates, default_for(norms)))
    taken = candidates[alone.taken]
    separate = taken if isinstance(taken, str) else _after_addition(taken)
    both = {SEPARATE: separate, KERNEL: device.fused(norms)}
    return alone, Choice(norms, rows, True, *_contest(device, values, both, SEPARATE, added=True))


def untimed(norms: Norms, rows: int) -> tuple[Choice, Choice]:
    """As ``measure``, without measuring: the norms keep what they compute now."""
    alone = Choice(norms, rows, False, default_for(norms), {}, {})
    return alone, Choice(norms, rows, True, SEPARATE, {}, {})


def _after_addition(compute: Compute) -> Compute:
    def both(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
        total = x + residual
        return compute(total, residual, weight, bias), total

    return both


def _contest(
    device: Device,
    values: Values,
    candidates: Mapping[str, Compute | str],
    default: str,
    added: bool = False,
) -> tuple[str, dict[str, float], dict[str, str]]:
    """What is taken, the median time of each candidate in microseconds, and who was left out."""
    right: dict[str, Callable[[], Any]] = {}
    left_out: dict[str, str] = {}
    for name, compute in candidates.items():
        reason = compute if isinstance(compute, str) else fault(values, compute, added)
        if reason or isinstance(compute, str):
            left_out[name] = reason
        else:
            right[name] = partial(values.call, compute)
    seconds = device.seconds(right) if len(right) > 1 else {}
    counts = {len(turns) for turns in seconds.values()}
    measured = all(0 < turn < math.inf for turns in seconds.values() for turn in turns)
    if default not in seconds or len(counts) != 1 or not measured:
        return default, {}, left_out
    medians = {name: statistics.median(turns) * 1e6 for name, turns in seconds.items()}
    return fastest(default, seconds), medians, left_out


def choose(device: Device, wanted: Sequence[Norms], again: bool = False) -> tuple[Choice, ...]:
    """The choices for the norms ``wanted``, from the cache where they are known.

    ``again`` measures those that are known too. Warns if the result cannot be stored.
    """
    key = device.key()
    try:
        path = build.writable_folder(choices.file_name(key)) / choices.file_name(key)
    except build.NoLibrary as error:
        warnings.warn(f"measured norms are not stored: {error}", stacklevel=2)
        return _measured(device, wanted)
    known = () if again else choices.read(path, key)
    if not _unknown(wanted, known):
        return known
    with build.locked(path.with_suffix(".lock")):
        before = choices.read(path, key)
        known = () if again else before
        missing = _unknown(wanted, known)
        if missing:
            found = _measured(device, missing)
            fresh = {one.norms for one in found}
            known = (*(one for one in before if one.norms not in fresh), *found)
            try:
                choices.write(path, key, known)
            except OSError as error:
                warnings.warn(f"measured norms are not stored: {error}", stacklevel=2)
    return known


def _unknown(wanted: Sequence[Norms], known: Iterable[Choice]) -> list[Norms]:
    names = {one.norms for one in known}
    return [norms for norms in dict.fromkeys(wanted) if norms not in names]


def _measured(device: Device, wanted: Sequence[Norms]) -> tuple[Choice, ...]:
    """The choices for the norms that can be reached in ``SECONDS``.

    Each of them has a choice for all its numbers of rows: where the time or the memory is not
    enough, it is not measured.
    """
    found: list[Choice] = []
    end, longest = device.clock() + SECONDS, 0.0
    for norms in wanted:
        if device.clock() + longest >= end:
            break
        device.candidates(norms)  # compiles kernels, which takes longer than one measurement
        for rows in ROWS:
            if rows * norms.width > MOST_ELEMENTS:
                continue
            begin = device.clock()
            try:
                timely = begin + longest < end
                found += measure(device, norms, rows) if timely else untimed(norms, rows)
            except torch.OutOfMemoryError:
                found += untimed(norms, rows)
            longest = max(longest, device.clock() - begin)
    return tuple(found)


def apply(device: Device, found: Iterable[Choice]) -> None:
    """Compute norms on a GPU as chosen."""
    kinds: dict[tuple[Norms, bool], dict[int, str]] = {}
    for one in found:
        kinds.setdefault((one.norms, one.added), {})[one.rows] = one.taken
    for (norms, added), taken in kinds.items():
        if KERNEL in taken.values() and isinstance(device.fused(norms), str):
            instead = SEPARATE if added else default_for(norms)
            taken = {rows: instead if name == KERNEL else name for rows, name in taken.items()}
        if not added:
            choices.use(device.place, norms, taken)
        rows = sorted(taken)
        ends = choices.bounds(rows)
        starts = (1, *(end + 1 for end in ends))
        ranges = [(a, b) for n, a, b in zip(rows, starts, ends, strict=False) if taken[n] == KERNEL]
        dtypes, affine = (norms.dtype, norms.parameters), (norms.weight, norms.bias)
        native.choose(device.index, added, dtypes, affine, norms.width, *ranges)
