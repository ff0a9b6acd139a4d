"""The edits of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from enjoyln_cli.edits.baked_rows import EncodeRows, FillLevel, NormRows
from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.linear_steps import (
    AddProduct,
    CentreAxis,
    LayerScale,
    RotateAxis,
    Scale,
    TimesPower,
)
from enjoyln_cli.edits.new_values import Append, Fill
from enjoyln_cli.plan.axis import blocks
from enjoyln_cli.plan.edited_tensors import (
    EditedTensor,
    GrownParameter,
    NamedParameter,
    ScaledTensor,
)
from enjoyln_cli.plan.mean_units import UNITS, Widening, read_by_units, written_by_units
from enjoyln_cli.plan.orthogonal_matrices import Rotation
from enjoyln_cli.plan.plan import NormFusion, Plan


def edits_of(plan: Plan, *, in_memory: bool = False) -> Mapping[str, Edit]:
    """The edits of a plan by name of the stored tensor, or of the parameter with ``in_memory``.

    A model in memory has the axes of its parameters, and untied parameters are not copied, since
    each is a parameter of its own already.
    """
    edits: dict[str, Edit] = {}
    copies = {} if in_memory else {copy.tensor: copy.stored for copy in plan.untied}

    def add(tensor: EditedTensor, rotation: Rotation | None) -> None:
        name = tensor.parameter if in_memory else tensor.tensor
        axis = tensor.module_axis if in_memory and tensor.module_axis else tensor.axis
        edit = edits.get(name, Edit())
        if rotation is None:
            edit = edit.adding(*map(CentreAxis, blocks(axis)))
        else:
            edit = edit.adding(RotateAxis(axis, rotation))
        if tensor.scale:
            scale = tensor.scale.parameter if in_memory else tensor.scale.tensor
            edit = edit.adding(LayerScale(scale, axis.dim))
            edits[scale] = Edit((Fill(1.0),))
        if tensor.baked:
            weight, bias = (
                named.parameter if in_memory else named.tensor
                for named in (tensor.baked.weight, tensor.baked.bias)
            )
            norm = copies.get(name, name), weight, bias, tensor.baked.eps
            edit = edit.adding(NormRows(*norm), EncodeRows(*norm))
            edits.update({weight: Edit((FillLevel(*norm),)), bias: Edit((Fill(0.0),))})
        edits[name] = edit

    for writer in plan.centred_weights:
        add(writer, None)
    for group in plan.rotated:
        rotation = group.rotation(plan.seed)
        for rotated in group.tensors:
            add(rotated, rotation)
    for mlp in plan.widened:
        for part, values in _new_units(mlp):
            name = part.parameter if in_memory else part.tensor
            edits[name] = edits.get(name, Edit()).adding(Append(part.dim, values))
    for copy, stored in copies.items():
        if copy != stored:
            edits[copy] = replace(edits.get(copy, Edit()), source=stored)
    for norm in plan.fused:
        _fusion(edits, norm, in_memory)
    for scaled in (tensor for stream in plan.scaled for tensor in stream.tensors):
        name = scaled.parameter if in_memory else scaled.tensor
        edits[name] = _scaled(edits.get(name, Edit()), scaled)
    return edits


def _scaled(edit: Edit, tensor: ScaledTensor) -> Edit:
    """``edit`` of a tensor that is held at another scale, with slices that are appended to it."""
    steps = (
        replace(step, values=tuple(2.0**tensor.power * value for value in step.values))
        if isinstance(step, Append)
        else step
        for step in edit.steps
    )
    return replace(edit, steps=(*steps, TimesPower(tensor.power, tensor.offset)))


def _fusion(edits: dict[str, Edit], norm: NormFusion, in_memory: bool) -> None:
    """Add the fusion of one norm to the edits of the norm and of the layers that read it."""

    def name_of(named: NamedParameter) -> str:
        return named.parameter if in_memory else named.tensor

    weight = f"{norm.norm}.weight" if in_memory else norm.weight
    bias = f"{norm.norm}.bias" if in_memory else norm.bias or norm.divided
    if norm.weight:
        edits[weight] = Edit((Fill(1.0 - norm.offset),))
    if norm.bias:
        edits[bias] = Edit((Fill(0.0),))
    if norm.divided:
        by_weight = Scale(weight, 0, norm.offset, divides=True)
        edits[bias] = edits.get(bias, Edit()).adding(by_weight)
    for reader in norm.readers:
        matrix = name_of(reader.weight)
        dim = reader.module_dim if in_memory and reader.module_dim is not None else reader.dim
        before = edits.get(matrix, Edit())
        where = reader.outer, reader.inner, reader.outputs
        if norm.weight:
            edits[matrix] = before.adding(Scale(weight, dim, norm.offset, False, *where))
        if reader.bias:
            name, source = name_of(reader.bias), before.source or matrix
            added = AddProduct(source, dim, bias, *where)
            edits[name] = edits.get(name, Edit()).adding(added)


def _new_units(mlp: Widening) -> Iterator[tuple[GrownParameter, tuple[float, ...]]]:
    """Each parameter of a widened MLP, with the value for all features of each new hidden unit."""
    zeros = (0.0,) * (mlp.to - mlp.size)
    unused = zeros[UNITS:] if mlp.subtracts else zeros
    yield mlp.first, (*read_by_units(mlp.features), *unused) if mlp.subtracts else unused
    yield mlp.second, (*written_by_units(mlp.features), *unused) if mlp.subtracts else unused
    if mlp.bias:
        yield mlp.bias, zeros
