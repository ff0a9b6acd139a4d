"""Hold a residual stream of ``d`` features, whose mean no norm sees, as ``d - 1`` numbers.

Pre-RMSNorm and Pre-CRMSNorm Transformers, section 3.2 and appendix C. Two bases:

    last          z = the first d - 1 features of P x, as in the paper; x_d is minus their sum
    orthonormal   z = E^T x, with orthonormal columns of E that are orthogonal to the vector of ones

``E`` is the first ``d - 1`` columns of the reflection ``H`` that swaps the last unit vector and
``1 / sqrt(d)``, so products with it take ``O(d)`` operations. ``streams`` says what is compressed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.calls.calls import ExampleCalls
from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel
from enjoyln_cli.models.load import stored_weights
from enjoyln_cli.plan.cache_argument import in_plans
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.runtime.scope import InputRules
from enjoyln_cli.train.compressed_norm import CRMSNorm, orthonormal_norm
from enjoyln_cli.train.parametrize import as_call, require_unconverted
from enjoyln_cli.train.streams import (
    MERGED,
    CompressedTensor,
    Stream,
    StreamBasis,
    plan_streams,
    state_sizes,
)


@dataclass(frozen=True, eq=False)
class CompressedStreams:
    """What ``compress_streams`` has done, and ``decompress_streams`` undoes."""

    basis: StreamBasis
    streams: tuple[Stream, ...]
    """Streams that are held as ``size - 1`` numbers."""
    norms: Mapping[str, nn.Module] = field(repr=False)
    """The LayerNorm modules by path, with a weight of ones and a bias of zeros."""
    guard: Any = field(repr=False)


def compress_streams(
    model: nn.Module,
    example: Any = None,
    *,
    basis: StreamBasis = "orthonormal",
    example_calls: ExampleCalls = (),
) -> CompressedStreams:
    """Convert ``model`` to streams of ``d - 1`` features with CRMSNorm, in place.

    The function stays the same, up to rounding: in float64 to about 1e-15. Weights and biases of
    norms are merged into the layers after them; a linear layer without a bias gets one. In the
    orthonormal basis each norm is a ``torch.nn.RMSNorm``, in the paper's it is a ``CRMSNorm``.
    ``example`` and ``example_calls`` are as for ``reparametrize``.

    Returns what ``decompress_streams`` needs. Raises ``NothingToFold`` if there is no stream with
    LayerNorms, and ``UnsupportedModel`` with the layer that prevents it; nothing is changed then.
    """
    if basis not in ("orthonormal", "last"):
        raise UnsupportedModel(f"basis is {basis!r}, but must be 'orthonormal' or 'last'")
    require_unconverted(model)
    args, kwargs = as_call(example)
    analysis = analyze_module(model, *args, options=MERGED, example_calls=example_calls, **kwargs)
    steps = plan_streams(model, analysis, basis)
    centre_parameters(model, steps.merges)
    for merge, readers in steps.biases:
        _move_bias(model.get_submodule(merge.norm), readers)
    norms = {path: model.get_submodule(path) for stream in steps.streams for path in stream.norms}
    for stream in steps.streams:
        _compress(model, stream, basis)
    guard = _guard(model, analysis.plan, steps.streams)
    return CompressedStreams(basis, steps.streams, norms, guard)


def decompress_streams(model: nn.Module, compressed: CompressedStreams) -> nn.Module:
    """Undo ``compress_streams``: the LayerNorm model of the same function, with zero-mean streams.

    It holds what was learned in between. The affine of norms stays where it was moved to.
    Returns ``model``. Raises ``BadCheckpoint`` if it is not the model that was compressed.
    """
    for stream in compressed.streams:
        tensors = stored_weights(model)
        for named in stream.tensors:
            tensor = tensors.get(named.parameter)
            if tensor is None or tensor.shape[named.dim] != stream.size - 1:
                raise BadCheckpoint(
                    f"{named.parameter}: should have {stream.size - 1} features in dimension "
                    f"{named.dim}; pass the model that was compressed"
                )
    for stream in compressed.streams:
        _change(model, stream.tensors, compressed.basis, decompressed_tensor)
        like = model.get_parameter(stream.tensors[0].parameter)
        for path in stream.norms:
            _replace(model, path, compressed.norms[path].to(like.device, like.dtype))
    compressed.guard.remove()
    return model


def _compress(model: nn.Module, stream: Stream, basis: StreamBasis) -> None:
    _change(model, stream.tensors, basis, compressed_tensor)
    like = model.get_parameter(stream.tensors[0].parameter)
    features = stream.size - 1
    for path, form in stream.norms.items():
        norm: nn.Module = CRMSNorm(features, form.eps)
        if basis == "orthonormal":
            norm = orthonormal_norm(features, form.eps, like)
        _replace(model, path, norm)


def _replace(model: nn.Module, path: str, norm: nn.Module) -> None:
    """Put ``norm`` in the place of the module at ``path``, under all names of that module."""
    old = model.get_submodule(path)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module is old:
            above, _, last = name.rpartition(".")
            setattr(model.get_submodule(above), last, norm.train(old.training))


Change = Callable[[torch.Tensor, StreamBasis, bool], torch.Tensor]


def _change(
    model: nn.Module, tensors: Iterable[CompressedTensor], basis: StreamBasis, change: Change
) -> None:
    """Change each tensor once along its dimension: in float64, rounded once."""
    weights = stored_weights(model)
    done: set[tuple[int, int]] = set()
    for named in tensors:
        tensor = weights[named.parameter]
        if (id(tensor), named.dim) not in done:
            done.add((id(tensor), named.dim))
            moved = tensor.detach().double().movedim(named.dim, -1)
            new = change(moved, basis, named.reads).movedim(-1, named.dim)
            tensor.data, tensor.grad = new.contiguous().to(tensor.dtype), None
    state_sizes(model)


def compressed_tensor(x: torch.Tensor, basis: StreamBasis, reads: bool) -> torch.Tensor:
    """From ``(..., d)`` to ``(..., d - 1)``: a vector of a stream, or one that multiplies them."""
    if basis == "orthonormal":
        return _reflected(x)[..., :-1]
    return x[..., :-1] - (x[..., -1:] if reads else x.mean(-1, keepdim=True))


def decompressed_tensor(z: torch.Tensor, basis: StreamBasis, reads: bool) -> torch.Tensor:
    """From ``(..., d - 1)`` to ``(..., d)``: a zero-mean vector, or one that multiplies them."""
    zero = torch.zeros_like(z[..., :1])
    if basis == "orthonormal":
        return _reflected(torch.cat((z, zero), -1))
    return torch.cat((z, zero if reads else -z.sum(-1, keepdim=True)), -1)


def _reflected(x: torch.Tensor) -> torch.Tensor:
    """``H x`` along the last dimension; ``H`` swaps ``e_d`` and ``1 / sqrt(d)``."""
    v = x.new_full(x.shape[-1:], -(x.shape[-1] ** -0.5))
    v[-1] += 1
    return x - (x @ v).unsqueeze(-1) * (2 / v.dot(v)) * v


def _move_bias(norm: Any, readers: Iterable[nn.Linear]) -> None:
    """Give linear layers the bias ``W b``, where ``b`` is the bias of the norm that they read."""
    with torch.no_grad():
        for reader in readers:
            bias = reader.weight.double() @ norm.bias.double()
            reader.bias = nn.Parameter(bias.to(reader.weight.dtype))
        norm.bias.zero_()


def _guard(model: nn.Module, plan: Plan, streams: Iterable[Stream]) -> Any:
    """Refuse calls that are not proven, and inputs that would have to be compressed.

    Returns the handle that removes the hook.
    """
    order = tuple(inspect.signature(model.forward).parameters)
    inside = {name for stream in streams for name in stream.inputs}
    names = {*map(in_plans, (*plan.unproven, *inside))} & {*map(in_plans, order)}
    covered = plan.covered
    if covered is not None:
        forms = (form for form in covered.forms if inside.isdisjoint(dict(form.arguments)))
        covered = replace(covered, forms=tuple(forms))
    proven = None if covered is None else covered.calls_of(model)
    rules = InputRules(order, tuple(sorted(names)), merged=True, proven=proven)
    return model.register_forward_pre_hook(rules.guard, with_kwargs=True)
