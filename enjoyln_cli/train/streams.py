"""Which residual streams can be held as ``d - 1`` numbers, and which tensors write and read them.

Which tensors take part is what ``rotation.bases`` finds, for any architecture. There, a stream is
turned by an orthogonal matrix; here the matrix is not square. That asks for more:

* LayerNorms are the only ops that may depend on how many features there are.
* What is multiplied by a weight has passed a norm: then it has zero mean, which is left out.
* Nothing is added to the result of a norm: its weight and bias move into the layers that read it.
* The code of the model computes the same for ``d - 1`` features: it is run with both sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from enjoyln_cli.analysis.analyze import Analysis
from enjoyln_cli.analysis.same_ops import same_but_for_sizes
from enjoyln_cli.errors import NothingToFold, UnsupportedModel
from enjoyln_cli.graph.nodes import shape_of
from enjoyln_cli.models.load import stored_weights
from enjoyln_cli.models.meta_device import without_weights
from enjoyln_cli.models.norm_probe import LayerNormForm
from enjoyln_cli.plan.axis import feature_axis
from enjoyln_cli.plan.plan import Basis, Merge, Options, Plan
from enjoyln_cli.proof.flow import Flow, Value, origin
from enjoyln_cli.proof.layer_norms import layer_norms, norm_calls
from enjoyln_cli.proof.pullback import Opaque
from enjoyln_cli.rotation.bases import FoundBasis, find_bases

StreamBasis = Literal["orthonormal", "last"]
MERGED = Options(fold=False, rotate=True, values=False, merge="affine")
"""The options of an analysis that finds streams, and how their norms are merged."""


@dataclass(frozen=True)
class CompressedTensor:
    """A parameter that writes or reads a stream, in all of dimension ``dim``."""

    parameter: str
    dim: int
    reads: bool
    """Whether it reads the stream. One that is tied may do both."""


@dataclass(frozen=True, eq=False)
class Stream:
    """A stream that can be compressed."""

    size: int
    """``d``, the number of its features."""
    tensors: tuple[CompressedTensor, ...]
    norms: Mapping[str, LayerNormForm]
    """The LayerNorms that norm it, by path."""
    inputs: tuple[str, ...]
    """Inputs of the model that would have to have ``size - 1`` features, such as
    ``inputs_embeds``."""


@dataclass(frozen=True, eq=False)
class CompressionPlan:
    """How the streams of a model are compressed."""

    streams: tuple[Stream, ...]
    merges: Plan
    """Merges the weights and biases of the norms into the layers after them."""
    biases: tuple[tuple[Merge, list[nn.Linear]], ...]
    """For each norm whose bias is left: the linear layers that get it as their bias."""


def plan_streams(model: nn.Module, analysis: Analysis, basis: StreamBasis) -> CompressionPlan:
    """The steps for all streams of ``model``, from an analysis of it with the options ``MERGED``.

    Values of weights are not read. Raises ``NothingToFold`` if there is no stream with LayerNorms,
    and ``UnsupportedModel`` with the layer that prevents the conversion.
    """
    streams = _streams(model, analysis, basis)
    merges = _merges(analysis.plan, streams)
    biases = _readers_without_bias(model, analysis, merges)
    _require_same_code(model, analysis, streams)
    return CompressionPlan(tuple(streams), merges, tuple(biases))


def _streams(model: nn.Module, analysis: Analysis, basis: StreamBasis) -> list[Stream]:
    flow, forms = analysis.problem.flow, layer_norms(model)
    inputs, _ = norm_calls(flow, *forms)
    bases = find_bases(flow, analysis.problem.groups, values=False)
    streams = []
    for group, turned in zip(bases, analysis.plan.bases, strict=True):
        if turned.kind != "stream" or not turned.fixes_ones:
            continue
        if reason := turned.reason or ("the model returns it" if turned.outputs else ""):
            raise _refusal(turned.culprit or type(model).__name__, reason)
        norms = {path: form for path, form in forms[0].items() if _meet(inputs.get(path), group)}
        for path, form in norms.items():
            if form.dim != -1 or not group.values.issuperset(inputs[path]):
                raise _refusal(path, "it also normalises something else than this stream")
        streams.append(_stream(flow, group, turned, norms, inputs, basis))
    if not streams:
        raise NothingToFold(f"{type(model).__name__}: has no residual stream with LayerNorms")
    return streams


def _meet(values: tuple[Value, ...] | None, group: FoundBasis) -> bool:
    return not group.values.isdisjoint(values or ())


def _stream(
    flow: Flow,
    group: FoundBasis,
    turned: Basis,
    norms: Mapping[str, LayerNormForm],
    inputs: Mapping[str, tuple[Value, ...]],
    basis: StreamBasis,
) -> Stream:
    for trace, node in group.whole:
        module = flow.traces[trace].module_of(node)
        if module not in norms:
            raise _refusal(module, "it depends on the number of features, and is no LayerNorm")
    for value in group.values:
        if value.axis != feature_axis(shape_of(value.node) or (0,), value.axis.dim):
            module = flow.traces[value.trace].module_of(value.node)
            raise _refusal(module, "it holds the stream beside other features")
    readers: set[str] = set()
    for pair in group.sums:
        operands = [_sources(flow, norms, value) for value in pair]
        if all(operands):
            module = flow.traces[pair[0].trace].module_of(pair[0].node)
            raise _refusal(module, "a product reads the stream before a norm")
        readers |= {name for names in operands for name in names}
    writers = {
        name for path in norms for value in inputs[path] for name in _sources(flow, norms, value)
    }
    tensors = []
    for tensor in turned.tensors:
        name, axis = tensor.parameter, tensor.axis
        if name.rpartition(".")[0] in norms:
            continue
        if tensor.scale:
            raise _refusal(
                tensor.scale.parameter, "it scales the features of the stream one by one"
            )
        if basis == "last" and (name in readers) == (name in writers):
            raise _refusal(name, "it is tied, and both writes and reads the stream")
        tensors.append(CompressedTensor(name, axis.dim, name in readers))
    return Stream(group.size, tuple(tensors), norms, turned.inputs)


def _sources(flow: Flow, norms: Mapping[str, Any], value: Value) -> set[str]:
    """The parameters and inputs that a value is computed from without passing one of ``norms``.

    All names of a parameter; empty if every path to the value passes a norm.
    """
    names: set[str] = set()
    waiting, seen = [value], {value}
    while waiting:
        this = waiting.pop()
        trace, node = flow.traces[this.trace], this.node
        if node.op != "call_function":
            names.update(trace.parameters.get(node, (node.name,)))
        elif trace.module_of(node) not in norms:
            pairs = origin(node, this.axis)
            if isinstance(pairs, Opaque):
                names.add(node.name)
                continue
            below = {Value(this.trace, *pair) for pair in pairs} - seen
            seen |= below
            waiting += below
    return names


def _merges(plan: Plan, streams: Iterable[Stream]) -> Plan:
    """The part of a plan that merges the norms of the streams; refuses norms that stay as is."""
    norms = {path: form for stream in streams for path, form in stream.norms.items()}
    merged = {merge.norm: merge for merge in plan.merged}
    reasons = {merge.norm: merge.reason for merge in plan.unmerged}
    for path, form in norms.items():
        merge = merged.get(path)
        weight = form.gain == "1" or (merge is not None and merge.weight)
        bias = not form.biased or (merge is not None and (merge.bias or merge.divided))
        if not weight or not bias:
            raise _refusal(path, reasons.get(path, "its weight and bias cannot be merged"))
    return replace(plan, bases=(), merged=tuple(m for m in plan.merged if m.norm in norms))


def _readers_without_bias(
    model: nn.Module, analysis: Analysis, plan: Plan
) -> list[tuple[Merge, list[nn.Linear]]]:
    """For each norm that keeps its bias: its readers, which are linear layers to get one."""
    result = []
    for merge in (merge for merge in plan.merged if merge.divided):
        owners = []
        for reader in merge.readers:
            path, _, name = reader.weight.parameter.rpartition(".")
            owner: Any = model.get_submodule(path)
            plain = type(owner) is nn.Linear and owner.bias is None and name == "weight"
            calls = [
                trace.module_of(user) == path
                for trace in analysis.problem.flow.traces
                for node, names in trace.parameters.items()
                if reader.weight.parameter in names
                for user in node.users
            ]
            if not plain or not all(calls):
                raise _refusal(merge.norm, f"its bias cannot move into {path}")
            owners.append(owner)
        result.append((merge, owners))
    return result


def _refusal(culprit: str, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{culprit}: {reason}; so its stream cannot be compressed")


def _require_same_code(model: nn.Module, analysis: Analysis, streams: Iterable[Stream]) -> None:
    """Raises ``UnsupportedModel`` if code computes something else for another number of features.

    For example, it may divide by the root of the size that its input has.
    """
    wide = without_weights(model)
    for stream in streams:
        narrow = copy.deepcopy(wide)
        tensors = stored_weights(narrow)
        dims = [(tensor.parameter, tensor.dim) for tensor in stream.tensors]
        of_norms = [
            (f"{path}.{name}", dim)
            for path in stream.norms
            for name, tensor in stored_weights(narrow.get_submodule(path)).items()
            for dim, size in enumerate(tensor.shape)
            if size == stream.size
        ]
        done: set[int] = set()
        for name, dim in (*dims, *of_norms):
            tensor = tensors[name]
            if id(tensor) not in done:
                done.add(id(tensor))
                tensor.data = tensor.data.narrow(dim, 0, stream.size - 1)
        state_sizes(narrow)
        for norm in map(narrow.get_submodule, stream.norms):
            if isinstance(norm, nn.LayerNorm):
                norm.normalized_shape = (stream.size - 1,)
        for trace in analysis.problem.flow.traces:
            if stream.inputs and not {*trace.inputs.values()}.isdisjoint(stream.inputs):
                continue  # such a call is refused
            if not same_but_for_sizes(narrow, wide, trace.call, stream.size - 1, stream.size):
                raise _refusal(
                    type(model).__name__,
                    f"its code computes something else for {stream.size - 1} features",
                )
        wide = narrow


def state_sizes(model: nn.Module) -> None:
    """Set the attributes in which layers state the sizes of their parameters."""
    for module in model.modules():
        layer: Any = module
        if isinstance(module, nn.Linear):
            layer.out_features, layer.in_features = module.weight.shape
        elif isinstance(module, nn.Embedding):
            layer.num_embeddings, layer.embedding_dim = module.weight.shape
        elif type(module).__name__ == "Conv1D":  # of transformers
            layer.nx, layer.nf = layer.weight.shape
        elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            layer.out_channels = module.weight.shape[0]
            layer.in_channels = module.weight.shape[1] * module.groups
