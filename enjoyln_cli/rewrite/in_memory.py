"""Carry out a plan on a model in memory.

The edits are the same as for files. Offloaded weights are edited when they are
read. Only the model that was analysed is changed; any other is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from enjoyln_cli.calls.composition import what_changed
from enjoyln_cli.checkpoint.config import set_entry
from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.finite import require_finite
from enjoyln_cli.edits.needed_tensors import fitting_edits
from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel
from enjoyln_cli.graph.insertion_points import change_input
from enjoyln_cli.models.extents import identity_of
from enjoyln_cli.models.load import values_of
from enjoyln_cli.models.norm_modules import first_input
from enjoyln_cli.models.offload import LoadTensor, WeightsOnDemand, reader_of
from enjoyln_cli.plan.edited_tensors import ScaledEps
from enjoyln_cli.plan.orthogonal_matrices import Rotation, matrix
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.rewrite.edit_pieces import apply_in_pieces, in_threads
from enjoyln_cli.rewrite.editable import require_editable

ROTATION_LAYER = "rotation_product"
"""The name of the layer in a block that ``insert_rotation`` adds."""


def centre_parameters(model: nn.Module, plan: Plan, *, allow_nonfinite: bool = False) -> None:
    """Carry out every edit of ``plan`` in place: in float64, rounded once.

    Parameters that the plan unties get their own copies first. A parameter with several names is
    edited once, and so are parameters that are the same elements of the same memory.
    ``allow_nonfinite`` accepts NaN and Inf in edited weights; they spread over the group that is
    edited, and results beyond the range of the dtype.

    Raises ``BadCheckpoint`` if ``model`` lacks a parameter, holds it in another shape, or if an
    edit would write a number that is not finite; and ``UnsupportedModel`` if no call is proven, the
    model has changed since it was analysed (see ``calls.composition``), a weight cannot be
    written, or bytes would change that another weight covers too (see ``rewrite.editable``).
    Nothing is changed then.
    """
    if plan.covered is not None and (plan.centred_weights or plan.rotated):
        plan.covered.require_any(type(model).__name__)
    edits_by_name = require_fit(model, plan)
    reader = reader_of(model)
    untied = {copy.parameter for copy in plan.untied}
    require_editable(model, edits_by_name, replaced=untied, read_on_demand=reader is not None)
    for group in plan.rotated:
        if group.online_rotation:
            model.get_submodule(group.online_rotation)
    if not allow_nonfinite:
        _require_finite(model, plan, edits_by_name, reader)
    eps = {
        norm: eps_attribute(model.get_submodule(norm.norm), norm)
        for stream in plan.scaled
        for norm in stream.norms
    }
    _untie(model, plan, reader)
    for setting in plan.settings:
        set_entry(getattr(model, "config", None), setting.name, setting.value)
    tensors = values_of(model)
    edits = {identity_of(tensors[name]): edit for name, edit in edits_by_name.items()}
    names: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(identity_of(tensor), []).append(name)

    def read(name: str) -> torch.Tensor:
        return reader[name] if reader and tensors[name].is_meta else tensors[name]

    with torch.no_grad():
        edits = {key: edit.loaded(read) for key, edit in edits.items()}
        in_place: list[Callable[[], None]] = []
        for key, edit in edits.items():
            tensor = tensors[names[key][0]]
            if reader and tensor.is_meta:
                for name in names[key]:
                    reader.make(name, _lazily_edited(reader.source(name), edit))
                tensor.data = tensor.new_empty(edit.shape(tuple(tensor.shape)))
                continue
            if tensor.ndim and edit.append is None:
                values = tensor.detach()  # a thread of its own does not know of ``no_grad``
                in_place.append(
                    partial(apply_in_pieces, values, edit, values, allow_nonfinite=True)
                )
                continue
            grown = edit.apply(tensor.double()).to(tensor.dtype)
            for name in names[key]:
                tensors[name].data = grown
        for _ in in_threads(in_place, torch.get_num_threads()):
            pass
    for group in plan.rotated:
        if group.online_rotation:
            insert_rotation(model.get_submodule(group.online_rotation), group.rotation(plan.seed))
    for norm, attribute in eps.items():
        setattr(model.get_submodule(norm.norm), attribute, norm.value)
    for mlp in plan.widened:
        for part in mlp.parts:
            update_size(model, part.parameter, mlp.size, mlp.to)


def _require_finite(
    model: nn.Module, plan: Plan, edits: Mapping[str, Edit], reader: WeightsOnDemand | None
) -> None:
    """Raise ``BadCheckpoint`` if an edit would write a number that is not finite."""
    tensors = values_of(model)
    for untied in plan.untied:
        if untied.parameter in tensors:
            tensors[untied.parameter] = tensors[untied.source]

    def read(name: str) -> torch.Tensor:
        return reader[name] if reader and tensors[name].is_meta else tensors[name]

    with torch.no_grad():
        once = {(identity_of(tensors[name]), edit): name for name, edit in edits.items()}
        for (_, edit), name in once.items():
            if not read(name).is_meta:
                require_finite(name, read(name), edit.loaded(read), read)


def require_fit(model: nn.Module, plan: Plan) -> Mapping[str, Edit]:
    """The edits of ``plan`` by parameter.

    Raises ``BadCheckpoint`` if ``plan`` was made for another model than ``model``, and
    ``UnsupportedModel`` if ``model`` has changed since it was analysed.
    """
    known = plan.compositions if type(model).__name__ == plan.model_class else ()
    changes = [what_changed(then, model) for then in known]
    if changes and all(changes):
        raise UnsupportedModel(f"{changes[0]} since the model was analysed; analyse it again")
    shapes = {name: tuple(tensor.shape) for name, tensor in values_of(model).items()}
    try:
        return fitting_edits(plan, shapes, in_memory=True)
    except ValueError as error:
        raise BadCheckpoint(
            f"the plan does not fit {type(model).__name__}: {error}; pass the model that was "
            "analysed"
        ) from None


def eps_attribute(module: nn.Module, norm: ScaledEps) -> str:
    """The name of the attribute of a norm's ``module`` that holds its eps.

    Raises ``UnsupportedModel`` unless there is exactly one.
    """
    held = vars(module).items()
    names = [name for name, value in held if type(value) is float and value == norm.eps]
    if len(names) != 1:
        raise UnsupportedModel(
            f"{norm.norm} has no attribute of its own for its eps of {norm.eps:g}, so its input "
            "cannot be held at another scale"
        )
    return names[0]


def _lazily_edited(source: LoadTensor, edit: Edit) -> LoadTensor:
    """A reader of an offloaded weight that applies the loaded ``edit`` after reading."""
    return lambda: edit.apply(source().double())


def update_size(model: nn.Module, parameter: str, size: int, to: int) -> None:
    """Set the size attributes of a layer whose parameter has grown."""
    owner: Any = model.get_submodule(parameter.rpartition(".")[0])
    if isinstance(owner, nn.Linear):
        owner.out_features, owner.in_features = owner.weight.shape
        return
    for name, value in list(vars(owner).items()):
        if type(value) is int and value == size:
            setattr(owner, name, to)


def _untie(model: nn.Module, plan: Plan, reader: WeightsOnDemand | None) -> None:
    """Give each parameter that the plan unties its own copy, if the model has the parameter."""
    tensors = values_of(model)
    for untied in plan.untied:
        if untied.parameter not in tensors:
            continue  # the head of another class
        owner, _, name = untied.parameter.rpartition(".")
        shared = tensors[untied.source]
        copied = nn.Parameter(shared.detach().clone(), shared.requires_grad)
        setattr(model.get_submodule(owner), name, copied)
        if reader and shared.is_meta:
            reader.make(untied.parameter, reader.source(untied.source))
        getattr(model, "all_tied_weights_keys", {}).pop(untied.parameter, None)


def insert_rotation(block: nn.Module, rotation: Rotation) -> None:
    """Multiply the first input of ``block`` by the matrix of ``rotation`` from now on.

    That input is of shape ``(..., size)``. The matrix is rounded once to the dtype of the block.
    Checkpoints have no place for this product, programs that are exported from the model have.
    """
    parameter = next(block.parameters())
    layer = nn.Linear(rotation.size, rotation.size, bias=False)
    layer.weight = nn.Parameter(matrix(rotation).to(parameter), requires_grad=False)
    block.add_module(ROTATION_LAYER, layer)
    first = first_input(type(block).forward)

    def rotate_input(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        return change_input(layer, first, args, kwargs)

    block.register_forward_pre_hook(rotate_input, with_kwargs=True)
