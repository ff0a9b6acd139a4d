"""Are the stored tensors the original's, edited as the plan says?

Checks every tensor of both checkpoints. An unedited tensor must have the same bytes, or the same
values in the new dtype. An edited tensor must be the result of its ``Edit`` in float64, rounded
once. So any mean that remains is smaller than the rounding.

Two machines may sum in another order, and so get float64 results that round to different
neighbours. A sum of ``n`` products is off by at most ``n u`` times the sum of their absolute
values, with ``u = 2**-53``; in a product with an orthogonal matrix, that sum is at most the norm of
the vector. Every value is accepted that a result within four times this bound rounds to: two
results differ by at most twice the bound, and the entries of the matrix are rounded too. This
margin is far smaller than a rounding step of float32 or 16 bits, so nearly always only one value is
accepted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch

from enjoyln_cli.checkpoint.reader import Checkpoint, read_tensor
from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.linear_steps import CentreAxis
from enjoyln_cli.edits.step import Step
from enjoyln_cli.plan.axis import group_means
from enjoyln_cli.rewrite.edit_pieces import divide
from enjoyln_cli.rewrite.tensor_parts import without_appended
from enjoyln_cli.text import listed_briefly

SLICE = 1 << 22
"""Number of elements of a tensor that are converted to float64 at a time."""


def check_tensors(
    original: Checkpoint, folded: Checkpoint, edits: Mapping[str, Edit]
) -> tuple[dict[str, float], list[str]]:
    """Compare every stored tensor with the original's; ``edits`` are by name in ``folded``.

    Returns the mean that remains in each centred tensor, relative to its rms, and the failures as
    sentences. The list is empty if every tensor is right.
    """
    all_edits = {name: Edit() for name in original.tensors} | dict(edits)
    names = sorted(set(all_edits) ^ set(folded.tensors))
    failures = [f"{name} is stored in one of the two checkpoints only" for name in names[:3]]
    drift: dict[str, float] = {}
    wrong: list[str] = []
    for name, edit in all_edits.items():
        if name not in folded.tensors or (edit.source or name) not in original.tensors:
            continue
        old, new = read_tensor(original, edit.source or name), read_tensor(folded, name)
        shape = edit.shape(tuple(old.shape))
        if shape != new.shape or old.is_floating_point() != new.is_floating_point():
            wrong.append(name)
        elif not edit.steps:
            if not _same_bytes(old.to(new.dtype), new):
                wrong.append(name)
        else:
            if not _is_edited(original, edit, old, new):
                wrong.append(name)
            centring = edit.only(_centres)
            if centring.steps:
                drift[name] = _drift(without_appended(new, tuple(old.shape)), centring)
    if wrong:
        failures.append(
            f"{listed_briefly(wrong)}: not the original's tensor, edited as the plan says"
        )
    return drift, failures


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(
        a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
    )


def _is_edited(original: Checkpoint, edit: Edit, old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether ``new`` is ``old`` after ``edit``, which changes it, up to rounding."""
    if edit.append:
        length = old.shape[edit.append.dim]
        appended = new.narrow(edit.append.dim, length, len(edit.append.values))
        expected = edit.append.slices(tuple(old.shape)).to(new.dtype)
        if not torch.equal(appended, expected):
            return False
    new = without_appended(new, tuple(old.shape))
    old, new = torch.atleast_1d(old), torch.atleast_1d(new)
    read = partial(read_tensor, original)
    edit = edit.without_append.loaded(read).sized(read)
    terms = 1 + sum(step.terms for step in edit.steps)
    terms += sum(old.shape[dim] for dim in edit.mixed_dims)
    return all(
        _is_rounded(old.narrow(*bounds), new.narrow(*bounds), edit.part(*bounds), terms)
        for bounds in divide(edit, tuple(old.shape), SLICE)
    )


def _is_rounded(old: torch.Tensor, new: torch.Tensor, edit: Edit, terms: int) -> bool:
    """Whether ``new`` is a result of the loaded ``edit`` in float64, rounded to its dtype.

    ``terms`` is how many numbers each element is a sum of. Where the result is NaN or infinite,
    because the original is, ``new`` must be the same.
    """
    wide = old.double()
    exact, size = edit.apply(wide), edit.bound(wide)
    margin = 2 * terms * torch.finfo(torch.float64).eps * size
    if new.dtype.itemsize == 2:  # torch rounds to 16 bits by way of float32
        margin = margin + torch.finfo(torch.float32).eps * exact.abs()
    low, high = (exact - margin).to(new.dtype), (exact + margin).to(new.dtype)
    right = torch.where(exact.isfinite(), (low <= new) & (new <= high) & new.isfinite(), False)
    wide = new.double()
    return bool((right | (wide == exact) | (wide.isnan() & exact.isnan())).all())


def _centres(step: Step) -> bool:
    """Whether a step only centres."""
    return type(step) is CentreAxis


def _drift(tensor: torch.Tensor, centring: Edit) -> float:
    """Root mean square of the means of all centred groups, divided by the elements' own."""
    means: list[torch.Tensor] = []
    squares, count = 0.0, 0
    for bounds in divide(centring, tuple(tensor.shape), SLICE):
        wide = tensor.narrow(*bounds).double()
        for step in centring.part(*bounds).steps:
            if isinstance(step, CentreAxis):
                means.append(group_means(wide, step.axis).flatten())
            for covered in step.computed(wide):
                squares, count = squares + float(covered.square().sum()), count + covered.numel()
    if not squares:
        return 0.0
    return math.sqrt(float(torch.cat(means).square().mean()) * count / squares)
