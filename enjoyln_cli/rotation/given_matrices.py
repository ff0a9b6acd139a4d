"""Matrices that the user gives instead of a seed, for example learned (SpinQuant's ``R.bin``).

A file names a matrix ``Q`` of shape ``(size, size)`` for each of some rotation groups, whose values
become ``Q x``. SpinQuant's names are known as well: ``R1`` for every residual stream, and
``model.layers.0.self_attn.R2`` for the values of an attention. Its matrices multiply row vectors
from the right, so they are transposed.

A matrix that was learned in float32 is orthogonal up to rounding only. The nearest orthogonal
matrix in float64 replaces it: ``U V^T`` of its singular value decomposition ``U S V^T``. If
the group has a LayerNorm inside, ``Q 1 = 1`` has to hold as well; then the same is done with the
part of ``Q`` that acts on vectors of mean zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.plan.orthogonal_matrices import GivenMatrix
from enjoyln_cli.plan.plan import Plan, RotationGroup
from enjoyln_cli.text import did_you_mean, first_line

LIMIT = 1e-3
"""Largest entry of ``Q Q^T - I`` and of ``Q 1 - 1`` that is taken for rounding."""


def give_matrices(plan: Plan, path: Path) -> Plan:
    """The plan with the matrices of a file; groups that the file does not name keep their seed's.

    ``path`` is a safetensors file, or a file by ``torch.save``. Raises ``BadCheckpoint`` if it
    cannot be read, or if one of its matrices belongs to no rotated group, has another size, is not
    orthogonal, or does not fix the vector of ones where it has to.
    """
    given: dict[str, GivenMatrix] = {}
    for key, found in _read(path).items():
        rotation_groups = list(_groups_named(key, plan))
        if not rotation_groups:
            names = [group.name for group in plan.rotated]
            remedy = did_you_mean(key, names, 1) or "the recipe of a rotation lists them"
            raise BadCheckpoint(f"{path}: {key} names nothing that is rotated; {remedy}")
        for group, transposed in rotation_groups:
            matrix = found.T if transposed and found.ndim == 2 else found
            given[group.name] = nearest_orthogonal(f"{path}: {key}", matrix, group)
    rotated = tuple(replace(one, given=given.get(one.name)) for one in plan.rotation_groups)
    return replace(plan, rotation_groups=rotated)


def _groups_named(key: str, plan: Plan) -> Iterator[tuple[RotationGroup, bool]]:
    """The rotated groups that a matrix is for, and whether it is transposed there."""
    module, _, last = key.rpartition(".")
    for group in plan.rotated:
        is_learned_stream = key == "R1" and group.kind == "residual"
        within = last == "R2" and group.name.startswith(f"{module}.")
        if key == group.name:
            yield group, False
        elif is_learned_stream or (within and group.kind == "values"):
            yield group, True


def _read(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            found = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise BadCheckpoint(f"{path}: no such file") from None
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError) as error:
        raise BadCheckpoint(f"{path}: cannot be read ({first_line(error)})") from error
    except Exception as error:  # pickle raises many kinds
        raise BadCheckpoint(
            f"{path}: neither a safetensors file (by its suffix) nor one that torch.save wrote"
        ) from error
    if not isinstance(found, dict) or not all(torch.is_tensor(one) for one in found.values()):
        raise BadCheckpoint(f"{path}: not a dictionary of tensors")
    return {name: _dense(f"{path}: {name}", one.detach()) for name, one in found.items()}


def _dense(where: str, matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` in float64; raises ``BadCheckpoint`` if it is not a plain real tensor."""
    if matrix.is_meta:
        raise BadCheckpoint(f"{where} is on the meta device and has no values; save the weights")
    kinds = {
        "complex": matrix.is_complex(),
        "quantised": matrix.is_quantized,
        "a nested tensor": matrix.is_nested,
    }
    if kind := next((name for name, applies in kinds.items() if applies), ""):
        raise BadCheckpoint(f"{where} is {kind}; save a matrix of real numbers")
    return matrix.to_dense().double()


def nearest_orthogonal(where: str, matrix: torch.Tensor, group: RotationGroup) -> GivenMatrix:
    """The orthogonal matrix nearest to ``matrix``, a float64 tensor, for the values of ``group``.

    Raises ``BadCheckpoint`` if it is none up to rounding; ``where`` names it in the message.
    """
    size = group.size
    if matrix.shape != (size, size):
        raise BadCheckpoint(f"{where} has shape {list(matrix.shape)}, but needs {[size, size]}")
    one = torch.eye(size, dtype=torch.float64)
    off = float((matrix @ matrix.T - one).abs().max())
    if not off <= LIMIT:
        raise BadCheckpoint(
            f"{where} is not orthogonal: an entry of Q Q^T is off by {off:.1g} (limit {LIMIT})"
        )
    ones = torch.ones(size, dtype=torch.float64)
    if group.fixes_ones:
        off = float((matrix @ ones - ones).abs().max())
        if not off <= LIMIT:
            raise BadCheckpoint(
                f"{where} moves the vector of ones by {off:.1g} (limit {LIMIT}), but {group.name} "
                "is read by a LayerNorm, whose result would change; use a matrix with Q 1 = 1"
            )
        rest = torch.linalg.qr(torch.cat([ones.unsqueeze(1), one[:, 1:]], 1))[0][:, 1:]
        matrix = rest @ _orthogonal(rest.T @ matrix @ rest) @ rest.T + 1 / size
    else:
        matrix = _orthogonal(matrix)
    matrix = matrix.contiguous()
    return GivenMatrix(hashlib.sha256(matrix.numpy().tobytes()).hexdigest(), matrix)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    left, _, right = torch.linalg.svd(matrix)
    return left @ right
