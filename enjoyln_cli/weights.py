"""Are the stored tensors what the plan makes of the original's?

Decides it tensor by tensor, for every tensor of both checkpoints: the same bytes, or the same
values in the new dtype, where nothing was edited; ``P W`` rounded once, within half a step of the
stored dtype, where the plan centres. So the mean left is below the rounding. Where the plan merges
a scale ``s``, it is ``P diag(s) W``, and the scale is all ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from enjoyln_cli.axis import Axis, centre, group_means, scaled
from enjoyln_cli.checkpoint import Checkpoint, read_tensor
from enjoyln_cli.plan import Writer

SLICE = 1 << 24
"""Elements of a tensor that are held in float64 at once."""


def check_tensors(
    original: Checkpoint, folded: Checkpoint, writers: Iterable[Writer]
) -> tuple[dict[str, float], list[str]]:
    """Every stored tensor against the original's.

    Returns the mean that is left in each edited tensor, relative to its rms, and what is wrong, in
    sentences; there are none where everything is right.
    """
    writers = tuple(writers)
    axes: dict[str, list[Axis]] = {}
    for writer in writers:
        known = axes.setdefault(writer.tensor, [])
        if writer.axis not in known:
            known.append(writer.axis)
    scales = {w.tensor: w.scale.tensor for w in writers if w.scale}
    names = sorted(set(original.tensors) ^ set(folded.tensors))
    failures = [f"{name} is stored in one of the two checkpoints only" for name in names[:3]]
    drift: dict[str, float] = {}
    wrong: list[str] = []
    for name in original.tensors:
        if name not in folded.tensors:
            continue
        old, new = read_tensor(original, name), read_tensor(folded, name)
        if old.shape != new.shape or old.is_floating_point() != new.is_floating_point():
            wrong.append(name)
            continue
        if name in scales.values():
            old = torch.ones_like(old)
        if name not in axes:
            if not _same_bytes(old.to(new.dtype), new):
                wrong.append(name)
            continue
        edits, scale = axes[name], None
        if name in scales:
            scale = read_tensor(original, scales[name]).double()
        parts = list(_slices(old, new, edits))
        if not all(_is_rounded(a, b, edits, scale) for a, b in parts):
            wrong.append(name)
        drift[name] = max(_drift([b for _, b in parts], axis) for axis in edits)
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        failures.append(
            f"{', '.join(wrong[:3])}{more}: not what the recipe makes of the original's tensor"
        )
    return drift, failures


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(
        a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
    )


def _slices(
    old: torch.Tensor, new: torch.Tensor, axes: list[Axis]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both tensors in parts of bounded size that hold whole groups."""
    free = [d for d in range(old.ndim) if d not in {axis.dim for axis in axes}]
    if old.numel() <= SLICE or not free:
        yield old, new
        return
    dim = max(free, key=lambda d: old.shape[d])
    step = max(1, SLICE * old.shape[dim] // old.numel())
    yield from zip(old.split(step, dim), new.split(step, dim), strict=True)


def _is_rounded(
    old: torch.Tensor, new: torch.Tensor, axes: list[Axis], scale: torch.Tensor | None
) -> bool:
    """``new`` is the exact edit rounded to its dtype: within half a step, ties either way."""
    exact = old.double()
    if scale is not None:
        exact = scaled(exact, scale, axes[0].dim)
    size = float(exact.abs().max()) if exact.numel() else 0.0
    for axis in axes:
        exact = centre(exact, axis)
    info = torch.finfo(new.dtype)
    step = info.eps * exact.abs() + info.smallest_normal * info.eps
    return bool(((new.double() - exact).abs() <= 0.5001 * step + 1e-14 * size).all())


def _drift(parts: list[torch.Tensor], axis: Axis) -> float:
    """Root mean square of the groups' means over that of the elements."""
    means = torch.cat([group_means(part.double(), axis).flatten() for part in parts])
    covered = [part.narrow(axis.dim, axis.start, axis.length).double() for part in parts]
    size = sum(float(part.square().sum()) for part in covered)
    count = sum(part.numel() for part in covered)
    rms = math.sqrt(size / max(count, 1))
    return float(means.square().mean().sqrt()) / rms if rms else 0.0
