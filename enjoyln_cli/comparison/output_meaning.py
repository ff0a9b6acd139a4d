"""What the outputs of a class mean to its users, and how far apart two runs are in these terms.

Logits of classes, of which one is right, are compared by their KL divergence and by the most likely
class. Logits that are yes or no, each by itself (labels, pixels of a mask), are compared by their
KL divergence and by their sign, embeddings by cosines and neighbours, boxes by their overlap, and
heat maps by the place of their peak. Other outputs have a relative error only, which all outputs
have (``comparison.metrics``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn import functional as F

LOGITS = "logits"
KL, TOP1, DECISIONS = "KL divergence", "top-1 agreement", "same decisions"
MEAN_COSINE, LEAST_COSINE = "mean cosine", "lowest cosine"
NEIGHBOURS = "nearest neighbours kept"
OVERLAP, PEAKS = "mean overlap of boxes", "same peaks"

AT_ONCE = 1 << 22
"""Number of logits that are converted to float64 at a time."""

_INSIDE = re.compile(
    r"(.*_)?(hidden_states?|attentions|reference_points)([_.].*)?"
    r"|(aux|auxiliary|denoising|enc|encoder|init|initial|intermediate|router)_.*"
    r"|pooler_output|.*\.\D.*"
)
"""Outputs of the inside of a model, which come along with its results; the last names are fields of
nested outputs. If a model has no other outputs, these are its results."""


class Kind(Enum):
    """What the numbers of an output are."""

    ONE_OF = "logits of classes, of which one is right"
    EACH = "logits that are yes or no, each by itself"
    EMBEDDING = "a vector whose direction counts"
    BOXES = "centre, width and height"
    PEAK = "a map whose highest point counts"
    VALUES = "numbers"


@dataclass(frozen=True)
class Meaning:
    """What one output means."""

    kind: Kind
    dim: int = -1
    """The dimension of the classes."""


VALUES = Meaning(Kind.VALUES)

NAMES = (
    ("*masks*", Kind.EACH),
    ("*boxes*", Kind.BOXES),
    ("*heatmaps*", Kind.PEAK),
    ("*_embeds", Kind.EMBEDDING),
    ("*embedding*", Kind.EMBEDDING),
    ("pooler_output", Kind.EMBEDDING),
    ("*logits*", Kind.ONE_OF),
)
"""Patterns of names, and the kind of an output whose name matches; the first match counts."""

PAIRS, ADDED_TO_PAIRS = "logits_*", "logit_bias"
"""The names of logits of pairs, as of pictures and texts, and of a parameter added to them all."""

Named = Mapping[str, torch.Tensor]
"""The inputs or outputs of one batch, by name."""
Sums = dict[str, tuple[float, int]]
"""For each measure its sum over some positions, and their number."""


def results(names: Sequence[str]) -> tuple[str, ...]:
    """The outputs that users read, without by-products; all outputs if nothing else is left."""
    return tuple(name for name in names if not _INSIDE.fullmatch(name)) or tuple(names)


def meanings(model: Any, outputs: Named, batch: Named) -> dict[str, Meaning]:
    """What each of the ``outputs`` of a ``model`` means.

    ``batch`` are the inputs that the outputs were computed from. A number that is added to all
    logits of pairs changes no softmax: a model that has learnt one asks of each pair by itself
    whether it fits (SigLIP).
    """
    found = {name: _meaning(model.config, name, outputs, batch) for name in outputs}
    if any(name.endswith(ADDED_TO_PAIRS) for name, _ in model.named_parameters()):
        found |= {name: Meaning(Kind.EACH) for name in outputs if fnmatchcase(name, PAIRS)}
    return found


def _meaning(config: Any, name: str, outputs: Named, batch: Named) -> Meaning:
    kind = next((kind for pattern, kind in NAMES if fnmatchcase(name, pattern)), Kind.VALUES)
    shape = outputs[name].shape
    if kind is Kind.BOXES:
        return Meaning(kind) if shape[-1] == 4 else VALUES
    if kind is Kind.EMBEDDING:
        return Meaning(kind) if len(shape) == 2 else VALUES
    if kind is not Kind.ONE_OF:
        return Meaning(kind)
    problem, classes = (getattr(config, key, None) for key in ("problem_type", "num_labels"))
    if name == LOGITS and problem == "regression":
        return VALUES
    if name == LOGITS and problem == "multi_label_classification":
        return Meaning(Kind.EACH)
    if name == LOGITS and len(shape) == 4 and shape[1] == classes:  # a class for each pixel
        return Meaning(Kind.ONE_OF, 1) if classes > 1 else Meaning(Kind.EACH)
    pixels = batch.get("pixel_values")
    if (
        len(shape) == 3
        and pixels is not None
        and pixels.ndim == 4
        and shape[1:] == pixels.shape[2:]
    ):
        return Meaning(Kind.EACH)  # a mask of the picture
    if any(fnmatchcase(other, "*boxes*") for other in outputs) and not (
        shape[-1] == (classes or 0) + 1 and not hasattr(config, "text_config")
    ):
        return Meaning(Kind.EACH)  # without a class for "nothing", each class is asked by itself
    return Meaning(Kind.ONE_OF) if len(shape) > 1 and shape[-1] > 1 else VALUES


def in_same_order(
    found: Mapping[str, Meaning], got: dict[str, torch.Tensor], exact: Named
) -> dict[str, torch.Tensor]:
    """The outputs ``got``; each detection takes the place of the most similar in ``exact``.

    Detections have no order, and a model that selects its best queries returns them by scores that
    rounding may exchange. Other outputs stay as they are. ``found`` are the meanings.
    """
    boxes = [name for name, meaning in found.items() if meaning.kind is Kind.BOXES]
    if not boxes or any(got[n].shape != exact[n].shape for n in found if n in got):
        return got
    rows, queries = exact[boxes[0]].shape[:2]
    listed = [name for name in found if name in got and exact[name].shape[:2] == (rows, queries)]
    ordered = {name: got[name].clone() for name in listed}
    for row in range(rows):
        kinds = {name: found[name] for name in listed if found[name].kind is not Kind.VALUES}
        one, other = (
            torch.cat([_probable(kinds[name], of[name][row]).flatten(1) for name in kinds], 1)
            for of in (exact, got)
        )
        place = _most_similar(torch.cdist(one, other, p=1.0))
        for name in listed:
            ordered[name][row] = got[name][row][place]
    return {**got, **ordered}


def _probable(meaning: Meaning, values: torch.Tensor) -> torch.Tensor:
    """Logits as probabilities; other values as they are."""
    if meaning.kind is Kind.ONE_OF:
        return values.float().softmax(-1)
    return values.float().sigmoid() if meaning.kind is Kind.EACH else values.float()


def _most_similar(distances: torch.Tensor) -> torch.Tensor:
    """A column of its own for each row: the closest pairs of all that are left, again and again.

    ``distances`` is a square matrix. Returns indices of columns, shape ``(rows,)``.
    """
    left = distances.nan_to_num(nan=torch.inf)
    place = torch.full((len(left),), -1)
    while (place < 0).any():
        nearest, back = left.argmin(1), left.argmin(0)
        rows = torch.arange(len(left))
        mutual = (place < 0) & (back[nearest] == rows) & left[rows, nearest].isfinite()
        if not mutual.any():  # what is left cannot be compared
            free = torch.ones(len(left), dtype=torch.bool)
            free[place[place >= 0]] = False
            place[place < 0] = free.nonzero().flatten()
            break
        place[mutual] = nearest[mutual]
        left[mutual] = torch.inf
        left[:, nearest[mutual]] = torch.inf
    return place


def sums(meaning: Meaning, got: torch.Tensor, exact: torch.Tensor) -> Sums:
    """The measures of one output, summed over positions; empty if it has none.

    Embeddings have ``embedding_measures``.
    """
    if got.shape != exact.shape:
        return {}
    if meaning.kind is Kind.ONE_OF:
        return _of_classes(got.movedim(meaning.dim, -1), exact.movedim(meaning.dim, -1))
    if meaning.kind is Kind.EACH:
        return _of_decisions(got.reshape(-1), exact.reshape(-1))
    if meaning.kind is Kind.BOXES:
        overlaps = _overlaps(got.reshape(-1, 4).double(), exact.reshape(-1, 4).double())
        return {OVERLAP: (float(overlaps.sum()), len(overlaps))}
    if meaning.kind is Kind.PEAK:
        peaks, others = (value.flatten(-2).argmax(-1) for value in (exact, got))
        return {PEAKS: (float((peaks == others).sum()), peaks.numel())}
    return {}


def divergence(
    config: Any, batches: Iterable[Named], got: Iterable[Named], own: Iterable[Named]
) -> tuple[float | None, float | None]:
    """Mean KL divergence of the output ``logits`` from the original's ``own``, and the agreement.

    The divergence is in nats. The agreement is the fraction of logits, or of positions, with the
    same answer. ``(None, None)`` if there is no such output, or if it has no classes.
    """
    found: list[Sums] = []
    for batch, a, b in zip(batches, got, own, strict=True):
        if LOGITS not in b or LOGITS not in a:
            return None, None
        meaning = _meaning(config, LOGITS, b, batch)
        found.append(sums(meaning, a[LOGITS], b[LOGITS]))
    pooled = means(found)
    return pooled.get(KL), pooled.get(TOP1, pooled.get(DECISIONS))


def means(found: Sequence[Sums]) -> dict[str, float]:
    """The mean of each measure over all positions; empty if some of the sums are."""
    if not all(found):
        return {}
    return {
        name: sum(each[name][0] for each in found) / max(sum(each[name][1] for each in found), 1)
        for name in (found[0] if found else ())
    }


def _of_classes(got: torch.Tensor, exact: torch.Tensor) -> Sums:
    width, divergence, agreed = exact.shape[-1], 0.0, 0.0
    got, exact = got.reshape(-1, width), exact.reshape(-1, width)
    rows = max(1, AT_ONCE // width)
    for x, y in zip(got.split(rows), exact.split(rows), strict=True):
        p, q = y.double().log_softmax(-1), x.double().log_softmax(-1)
        divergence += float((p.exp() * (p - q)).nan_to_num().sum())
        agreed += float((x.argmax(-1) == y.argmax(-1)).sum())
    return {KL: (divergence, len(exact)), TOP1: (agreed, len(exact))}


def _of_decisions(got: torch.Tensor, exact: torch.Tensor) -> Sums:
    divergence = agreed = 0.0
    for x, y in zip(got.split(AT_ONCE), exact.split(AT_ONCE), strict=True):
        x, y = x.double(), y.double()
        yes = y.sigmoid() * (F.logsigmoid(y) - F.logsigmoid(x))
        no = (-y).sigmoid() * (F.logsigmoid(-y) - F.logsigmoid(-x))
        divergence += float((yes.nan_to_num() + no.nan_to_num()).sum())
        agreed += float(((x > 0) == (y > 0)).sum())
    return {KL: (divergence, len(exact)), DECISIONS: (agreed, len(exact))}


def _overlaps(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Intersection over union of each pair of boxes, given by centre, width and height."""
    corners = [(box[:, :2] - box[:, 2:] / 2, box[:, :2] + box[:, 2:] / 2) for box in (got, exact)]
    (low, high), (other_low, other_high) = corners
    sides = (torch.minimum(high, other_high) - torch.maximum(low, other_low)).clamp(min=0)
    common = sides.prod(1)
    union = got[:, 2:].prod(1) + exact[:, 2:].prod(1) - common
    return torch.where(union > 0, common / union, 1.0)


def embedding_measures(
    got: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Cosines between two runs' embeddings, and how many inputs keep their nearest neighbour.

    Each tensor has shape ``(rows, features)``; a neighbour is another row of the same run.
    """
    a, b = (F.normalize(torch.cat(list(rows)).double(), dim=1) for rows in (got, exact))
    cosines = (a * b).sum(1)
    found = {MEAN_COSINE: float(cosines.mean()), LEAST_COSINE: float(cosines.min())}
    if len(a) > 2:  # with two rows, each has only one neighbour
        nearest = [(rows @ rows.T).fill_diagonal_(-2.0).argmax(1) for rows in (a, b)]
        found[NEIGHBOURS] = float((nearest[0] == nearest[1]).double().mean())
    return found
