"""A product with the matrix of a rotation, in front of a block of a live model.

Checkpoints have no place for it, programs that are exported from the model have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from enjoyln_cli.graph.insertion_points import change_input
from enjoyln_cli.models.norm_modules import first_input
from enjoyln_cli.plan.orthogonal_matrices import Rotation, matrix

NAME = "rotation_product"
"""The name of the layer in the block."""


def insert_rotation(block: nn.Module, rotation: Rotation) -> None:
    """Multiply the first input of ``block`` by the matrix of ``rotation`` from now on.

    That input is of shape ``(..., size)``. The matrix is rounded once to the dtype of the block.
    """
    parameter = next(block.parameters())
    layer = nn.Linear(rotation.size, rotation.size, bias=False)
    layer.weight = nn.Parameter(matrix(rotation).to(parameter), requires_grad=False)
    block.add_module(NAME, layer)
    first = first_input(type(block).forward)

    def rotate_input(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        return change_input(layer, first, args, kwargs)

    block.register_forward_pre_hook(rotate_input, with_kwargs=True)
