"""Round the weights of linear layers by the error that rounding makes in their outputs (GPTQ).

Frantar et al. (2022), arXiv 2210.17323. Of a layer ``y = W x`` only ``H = sum(x xᵀ)`` over the
calibration data matters: rounding ``W`` to ``Q`` changes the outputs by ``tr((W - Q) H (W - Q)ᵀ)``.
The columns of ``W`` are rounded singly, beginning with the largest inputs. The columns that are not
rounded yet make up for the error of each column:

    W[:, j:] -= (W[:, j] - Q[:, j]) / U[j, j] · U[j, j:]        UᵀU = (H + λI)⁻¹, U upper triangular

Weights are scaled in groups of neighbouring columns. A group gets its scale when its first column
is rounded, from the weights as they are then.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from enjoyln_cli.models.offload import on_disk

BITS = 4
DAMPING = (0.01, 0.2)
"""``λ`` relative to the mean of the diagonal of ``H``: if a layer gets many inputs, and if few."""
AT_ONCE = 128
"""How many columns are rounded before their errors reach the columns after them."""


@dataclass(frozen=True, eq=False)
class Squares:
    """``H`` of a layer: the products of its inputs' features, summed over the inputs."""

    sums: torch.Tensor
    """``(inputs, inputs)``, float32."""
    count: int
    """How many inputs the layer got: one for each token, frame or patch."""


@dataclass(frozen=True, eq=False)
class RoundedWeight:
    """A matrix of shape ``(outputs, inputs)`` as integers in groups of neighbouring inputs.

    The matrix is ``(integers - zero_points) * scales``, with the values of its group.
    """

    integers: torch.Tensor
    """``(outputs, inputs)``, uint8: from 0 to ``2 ** BITS - 1``."""
    scales: torch.Tensor
    """``(outputs, groups)``, float32."""
    zero_points: torch.Tensor
    """``(outputs, groups)``, uint8."""
    group: int
    """How many inputs share a scale; the last group may have fewer."""

    @property
    def matrix(self) -> torch.Tensor:
        """The rounded weights, float32."""
        scales, zeros = (
            part.repeat_interleave(self.group, 1)[:, : self.integers.shape[1]]
            for part in (self.scales, self.zero_points.float())
        )
        return (self.integers.float() - zeros) * scales

    def on_disk(self, folder: Path) -> RoundedWeight:
        """A copy in files in ``folder``."""
        integers, scales = on_disk(self.integers, folder), on_disk(self.scales, folder)
        zero_points = on_disk(self.zero_points, folder)
        return RoundedWeight(integers, scales, zero_points, self.group)


def rounded(
    weight: torch.Tensor,
    inputs: Squares | None,
    group: int,
    symmetric: bool = False,
) -> RoundedWeight:
    """Round ``weight``, of shape ``(outputs, inputs)``, to integers of 4 bits.

    Without ``inputs``, each weight is rounded to the nearest integer. ``symmetric`` integers have
    their zero point in the middle. If all inputs share a scale, these are from -7 to 7 around it,
    and the scale is positive, as NPUs need it.
    """
    weight = weight.float().clone()
    rows, width = weight.shape
    groups = -(-width // group)
    result = RoundedWeight(
        torch.empty(rows, width, dtype=torch.uint8),
        torch.empty(rows, groups),
        torch.empty(rows, groups, dtype=torch.uint8),
        group,
    )
    inputs = inputs or Squares(torch.eye(width), width)
    order = inputs.sums.diagonal().argsort(descending=True, stable=True)
    place = order.argsort()
    inverse = _factor_of_inverse(Squares(inputs.sums[order][:, order], inputs.count))
    weight = weight[:, order]
    started: set[int] = set()
    least = 1 if symmetric and groups == 1 else 0
    for begin in range(0, width, AT_ONCE):
        end = min(begin + AT_ONCE, width)
        errors = torch.zeros(rows, end - begin)
        for at in range(begin, end):
            column, done = int(order[at]), at - begin
            its_group = column // group
            if its_group not in started:
                started.add(its_group)
                members = place[its_group * group : (its_group + 1) * group]
                now = weight[:, members] - errors[:, :done] @ inverse[begin:at][:, members]
                scale, zero = _scale_of(now, symmetric, least)
                result.scales[:, its_group], result.zero_points[:, its_group] = scale, zero
            value = weight[:, at] - errors[:, :done] @ inverse[begin:at, at]
            scale, zero = result.scales[:, its_group], result.zero_points[:, its_group].float()
            steps = (value / scale + zero).round().clamp(least, 2**BITS - 1)
            result.integers[:, column] = steps.to(torch.uint8)
            errors[:, done] = (value - (steps - zero) * scale) / inverse[at, at]
        weight[:, end:] -= errors @ inverse[begin:end, end:]
    return result


def _factor_of_inverse(inputs: Squares) -> torch.Tensor:
    """The upper triangular ``U`` with ``UᵀU = (H + λI)⁻¹``; ``H`` is at least semidefinite.

    With few inputs for each feature, ``H`` of other data would be another, so ``λ`` is larger.
    """
    matrix = inputs.sums.double()  # one name for all steps, so that each frees the step before
    mean = matrix.diagonal().mean()
    least, most = DAMPING
    share = min(most, max(least, most * len(matrix) / inputs.count))
    matrix.diagonal().add_(share * (mean if mean > 0 else 1.0))
    matrix = torch.linalg.cholesky(matrix)
    matrix = torch.cholesky_inverse(matrix)
    matrix = torch.linalg.cholesky(matrix, upper=True)
    return matrix.float()


def _scale_of(
    weights: torch.Tensor, symmetric: bool, least: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and the zero point of each row; all weights are within its range, and so is 0.

    ``least`` is the least integer.
    """
    if symmetric:
        largest = weights.gather(1, weights.abs().argmax(1, keepdim=True))[:, 0]
        scale = largest.abs() / (2 ** (BITS - 1) - 1) if least else -largest / 2 ** (BITS - 1)
        scale = torch.where(scale == 0, 1.0, scale)
        return scale, torch.full_like(scale, 2 ** (BITS - 1))
    low, high = weights.amin(1).clamp(max=0), weights.amax(1).clamp(min=0)
    scale = (high - low) / (2**BITS - 1)
    scale = torch.where(scale == 0, 1.0, scale)
    return scale, (-low / scale).round()
