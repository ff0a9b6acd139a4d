"""Pre-CRMSNorm: residual streams of ``d - 1`` features, which zero-mean values do not need more of.

A folded stream ``x`` has ``1'x = 0``, so ``x = U z`` for ``d - 1`` numbers ``z = D x``. With
``U D = P`` and ``D U = I``:

    writers  W <- D W        readers  W <- W diag(g) U, with the weight g of the norm before
    norm     z / sqrt(|U z|^2 / d + eps)

* ``last``: ``z`` is ``x`` without its last feature, which is minus the sum ``s`` of the others, so
  ``|U z|^2 = |z|^2 + s^2`` (CRMSNorm: Pre-RMSNorm and Pre-CRMSNorm Transformers, Eq. 5).
* ``orthonormal``: the columns of ``U`` are orthonormal, so ``|U z|^2 = |z|^2``: an RMSNorm.

``D W`` and ``W diag(g) U`` are parametrisations, so the parameters stay as in the LayerNorm
model. They are trained as in it, step by step and under any optimizer (Enjoy-LN, Proposition 2).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from enjoyln_cli.calls.calls import ExampleCalls
from enjoyln_cli.comparison.batches import unpadded_batches
from enjoyln_cli.errors import NothingToFold, UnsupportedModel
from enjoyln_cli.plan.axis import scale_along
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.plan.plan import NormFusion, Plan, RotationGroup
from enjoyln_cli.rewrite.editable import require_editable
from enjoyln_cli.rewrite.in_memory import update_size
from enjoyln_cli.text import first_line
from enjoyln_cli.train.parametrize import as_call, require_unconverted
from enjoyln_cli.train.training_plan import analyze_training

Coordinates = Literal["orthonormal", "last"]
WeightOfNorm = Callable[[], Tensor | None]


class CRMSNorm(nn.Module):
    """The norm of ``d`` features of mean zero that are held as ``d - 1`` numbers, without affine.

    ``weight`` and ``bias`` are the LayerNorm's, which the next layers apply.
    """

    def __init__(self, norm: Any, features: int, coordinates: Coordinates) -> None:
        super().__init__()
        self.features = features
        self.weight, self.bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        self.eps, self.is_last = float(norm.eps), coordinates == "last"

    def forward(self, z: Tensor) -> Tensor:
        """``z`` is ``(..., d - 1)``; computed in float32 or wider, rounded once."""
        if z.shape[-1] != self.features:
            raise UnsupportedModel(f"a norm of {self.features} features reads {z.shape[-1]}")
        wide = z.to(torch.promote_types(z.dtype, torch.float32))
        squares = wide.square().sum(-1, keepdim=True)
        if self.is_last:
            squares = squares + wide.sum(-1, keepdim=True).square()
        return (wide * torch.rsqrt(squares / (z.shape[-1] + 1) + self.eps)).to(z.dtype)


class Compress(nn.Module):
    """Along ``dim``, ``d`` features become ``d - 1``: a matrix, after the weight of a norm."""

    def __init__(self, dim: int, matrix: Tensor, gain: WeightOfNorm | None = None) -> None:
        super().__init__()
        self.dim, self.matrix, self.gain = dim, matrix, gain

    def forward(self, weight: Tensor) -> Tensor:
        """``weight`` has ``d`` slices along ``dim``; computed in float32 or wider, rounded once."""
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        if self.gain and (gain := self.gain()) is not None:
            wide = scale_along(wide, gain.to(wide), self.dim)
        matrix = self.matrix.to(wide)
        return torch.tensordot(matrix, wide, ([1], [self.dim])).movedim(0, self.dim).to(weight)


@dataclass
class CompressedStreams:
    """What ``compress`` changed."""

    plan: Plan
    parametrised: list[tuple[nn.Module, str]] = field(default_factory=list)
    sizes: list[tuple[str, int]] = field(default_factory=list)
    norms: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    """The owner and name of each norm, and the norm itself."""
    hooks: list[Any] = field(default_factory=list)


def coordinates_of(features: int, kind: Coordinates) -> tuple[Tensor, Tensor]:
    """``D`` and the transpose of ``U``, both ``(features - 1, features)`` in float64."""
    first = torch.eye(features - 1, features, dtype=torch.float64)
    up = first - torch.eye(features, dtype=torch.float64)[-1]
    if kind == "orthonormal":
        up = torch.linalg.qr(up.T).Q.T.contiguous()
        return up, up
    return first - 1.0 / features, up


def compress(
    model: nn.Module,
    coordinates: Coordinates = "orthonormal",
    *,
    example: Any = None,
    example_calls: ExampleCalls = (),
) -> CompressedStreams:
    """Hold the residual streams of ``model`` as ``d - 1`` features, in place, also for training.

    Parameters stay the same objects, as in the LayerNorm model. Their names change until
    ``decompress`` undoes it. ``example`` and ``example_calls`` are as for ``reparametrize``;
    ``inputs_embeds`` cannot be passed any more.

    Raises ``NothingToFold`` if there is no stream that LayerNorms read, and ``UnsupportedModel`` if
    a stream cannot lose a feature; nothing is changed then.
    """
    require_unconverted(model)
    args, kwargs = as_call(example)
    options = Options(rotate=True, values=False)
    plan = analyze_training(model, args, kwargs, example_calls, options).plan
    groups = _require_streams(plan, type(model).__name__)
    norms = {path: model.get_submodule(path) for group in groups for path in group.norms}
    readers = _require_readers(model, plan, norms)
    done = CompressedStreams(plan)
    sizes = {n: g.size - 1 for g in groups for n in g.norms}
    before = _outputs(model, args, kwargs)
    for group in groups:
        down, up = coordinates_of(group.size, coordinates)
        for tensor in group.tensors:
            path, _, name = tensor.parameter.rpartition(".")
            if path in norms:  # whose weight and bias the next layers apply
                continue
            axis = tensor.module_axis or tensor.axis
            fusion = readers.get(tensor.parameter)
            gain = partial(_gain, norms[fusion.norm], fusion.offset) if fusion else None
            owner = model.get_submodule(path)
            step = Compress(axis.dim, up if tensor.reads else down, gain)
            parametrize.register_parametrization(owner, name, step, unsafe=True)
            owner.parametrizations.train(owner.training)  # type: ignore[operator,union-attr]
            if fusion and getattr(norms[fusion.norm], "bias", None) is not None:
                hook = partial(_add_bias, axis.dim, norms[fusion.norm])
                done.hooks.append(owner.register_forward_hook(hook))
            done.parametrised.append((owner, name))
            done.sizes.append((tensor.parameter, group.size))
            update_size(model, tensor.parameter, group.size, group.size - 1)
    for path, norm in norms.items():
        owner, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        setattr(owner, name, CRMSNorm(norm, sizes[path], coordinates).train(norm.training))
        done.norms.append((owner, name, norm))
    try:
        if not _same(before, _outputs(model, args, kwargs)):
            raise UnsupportedModel(f"{type(model).__name__} returns something else")
    except Exception as error:  # code that needs ``d`` features may raise anything
        decompress(model, done)
        raise UnsupportedModel(f"its code needs all features: {first_line(error)}") from error
    return done


def decompress(model: nn.Module, done: CompressedStreams) -> nn.Module:
    """Undo ``compress``: ``model`` is the LayerNorm model again, with its parameters as trained."""
    for owner, name in done.parametrised:
        parametrize.remove_parametrizations(owner, name, leave_parametrized=False)
    for owner, name, norm in done.norms:
        setattr(owner, name, norm.train(getattr(owner, name).training))
    for hook in done.hooks:
        hook.remove()
    for parameter, size in done.sizes:
        update_size(model, parameter, size - 1, size)
    return model


def _require_streams(plan: Plan, name: str) -> list[RotationGroup]:
    """The streams. Raises ``UnsupportedModel`` unless all of them can lose a feature."""
    for verdict in plan.norms:
        if verdict.status != "in_weights":
            why = verdict.reason or "its mean can only be subtracted by an added operation"
            raise UnsupportedModel(f"{verdict.norm} would not read zero-mean values: {why}")
    streams = [g for g in plan.rotation_groups if g.kind == "residual" and g.fixes_ones]
    if not any(group.norms for group in streams):
        raise NothingToFold(f"{name} has no residual stream that LayerNorms read")
    folded = {verdict.norm for verdict in plan.folded}
    for group in streams:
        if other := next((norm for norm in group.norms if norm not in folded), None):
            raise UnsupportedModel(f"{other} on the stream is no LayerNorm")
        if why := group.why_not_compressed:
            raise UnsupportedModel(why)
    return streams


def _require_readers(
    model: nn.Module, plan: Plan, norms: Container[str]
) -> Mapping[str, NormFusion]:
    """The fusion of each of ``norms``, by the parameters that read it."""
    from transformers.pytorch_utils import Conv1D

    require_editable(model, {tensor.parameter: tensor for tensor in plan.edited_tensors})
    found: dict[str, NormFusion] = {}
    fused = (fusion for fusion in plan.fused if fusion.norm in norms)
    for fusion, reader in ((one, reader) for one in fused for reader in one.readers):
        path, _, name = reader.weight.parameter.rpartition(".")
        is_linear = isinstance(model.get_submodule(path), nn.Linear | Conv1D)
        is_whole = reader.outputs is None and reader.outer == reader.inner == 1
        if not is_linear or name != "weight" or not is_whole:
            raise UnsupportedModel(
                f"{reader.weight.parameter} reads {fusion.norm}, and is no weight of a linear layer"
            )
        found[reader.weight.parameter] = fusion
    return found


def _outputs(model: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """What ``model`` returns for a call, by default for a small seeded batch, in eval mode."""
    if not args and not kwargs:
        (kwargs,) = unpadded_batches(model, ((2, 5),), next(model.parameters()).dtype)
    mode = model.training
    try:
        with torch.no_grad():
            found = tree_leaves(model.eval()(*args, **kwargs))
    finally:
        model.train(mode)
    return [x for x in found if isinstance(x, Tensor) and x.is_floating_point()]


def _same(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether two models return the same up to rounding."""
    return len(before) == len(after) and all(
        x.shape == y.shape
        and float((x - y).abs().max()) <= torch.finfo(x.dtype).eps ** 0.5 * float(x.abs().max())
        for x, y in zip(before, after, strict=True)
    )


def _gain(norm: Any, offset: float) -> Tensor | None:
    """The weight of a norm, as it multiplies."""
    return None if norm.weight is None else norm.weight + offset


def _add_bias(dim: int, norm: Any, layer: Any, _: Any, result: Tensor) -> Tensor:
    """Add what ``layer`` makes of the bias of the norm before it."""
    weight = layer.parametrizations.weight.original
    return result + torch.tensordot(norm.bias.to(weight), weight, ([0], [dim]))
