"""From a model to graphs: which calls are captured, and how the parameters in them are named.

A model class is built on the meta device (no weights) and captured by ``torch.export``. A proof
covers the paths traced, so every class is called as it is used: prefill and a decoding step with
the cache in one graph, then once more with the optional inputs it takes. Names are those of the
plan's reference class, whichever class a graph came from.
"""

from __future__ import annotations

import gc
import inspect
import logging
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx import config as fx_config
from torch.utils import _pytree as pytree

from enjoyln_cli.errors import TraceFailed

Naming = Callable[[str], str]

BATCH, TOKENS = 2, 7


@dataclass(frozen=True)
class Call:
    """One way to call a model: ``steps`` run in turn, each handing its cache to the next."""

    label: str
    steps: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]
    flags: dict[str, Any] = field(default_factory=dict)
    required: bool = True


@dataclass(frozen=True, eq=False)
class Trace:
    """One captured graph, functional, with its placeholders named."""

    label: str
    graph: Graph
    parameters: dict[Node, tuple[str, ...]]
    """All names of the parameter behind a placeholder: several where weights are tied."""
    inputs: dict[Node, str]
    naming: Naming
    required: bool
    """Whether every user makes this call; otherwise it only adds optional inputs."""
    leaves: frozenset[str]
    """Paths of the modules without children, whose output can be replaced by class."""

    def module_of(self, node: Node) -> str:
        """Path of the innermost module whose forward computed the node."""
        stack = list(node.meta.get("nn_module_stack", {}).values())
        return self.naming(_inner(stack[-1][0])) if stack else ""

    def calls_of(self, node: Node) -> tuple[tuple[str, str], ...]:
        """``(call, module path)`` from the outermost module call around the node inwards.

        ``call`` tells several calls of one module apart.
        """
        stack = node.meta.get("nn_module_stack", {})
        return tuple((key, self.naming(_inner(path))) for key, (path, _) in stack.items())

    def entering(self, paths: Container[str]) -> Iterator[tuple[str, list[Node]]]:
        """For every call of the modules ``paths``: the values from outside that it computes with.

        The module's own parameters and constants of the model are not among them.
        """
        found: dict[str, tuple[str, dict[Node, None]]] = {}
        for node in self.graph.nodes:
            for call, path in self.calls_of(node):
                if path in paths:
                    values = found.setdefault(call, (path, {}))[1]
                    values.update(dict.fromkeys(self._from_outside(node, call, path)))
        yield from ((path, list(values)) for path, values in found.values())

    def _from_outside(self, node: Node, call: str, path: str) -> list[Node]:
        return [
            operand
            for operand in node.all_input_nodes
            if isinstance(operand.meta.get("val"), torch.Tensor)
            and call not in dict(self.calls_of(operand))
            and not self._held_by(uncast(operand), path)
        ]

    def _held_by(self, node: Node, path: str) -> bool:
        """Whether a module brings the value along: as its parameter, or as a constant."""
        if node.op == "get_attr":
            return True
        names = self.parameters.get(node)
        if names is None:
            return node.op == "placeholder" and node not in self.inputs
        return any(name.rpartition(".")[0] == path for name in names)


def uncast(node: Node) -> Node:
    """The value behind casts; one that changes nothing hands out the tensor it was given."""
    while getattr(node.target, "overloadpacket", None) in (aten.to, aten._to_copy, aten.alias):
        node = node.args[0]  # type: ignore[assignment]
    return node


class _Steps(nn.Module):
    """Runs a model's calls in one graph and returns every tensor that it gives out."""

    def __init__(self, model: nn.Module, flags: Mapping[str, Any], inner: str | None) -> None:
        super().__init__()
        self.model = model
        self.flags = dict(flags)
        self.inner = inner

    def forward(self, *steps: Any) -> list[list[torch.Tensor]]:
        returned: list[list[torch.Tensor]] = []
        cache: dict[str, Any] = {}
        inside: list[Any] = []
        if self.inner is not None:
            base = self.model.get_submodule(self.inner)
            hook = base.register_forward_hook(lambda *call: inside.append(call[-1]))
        for args, kwargs in steps:
            result = self.model(*args, **kwargs, **cache, **self.flags)
            returned.append(tensors_in([result, inside]))
            if getattr(result, "past_key_values", None) is None:
                break
            cache = {"past_key_values": result.past_key_values}
        if self.inner is not None:
            hook.remove()
        return returned


def _inner(path: str) -> str:
    return path.removeprefix("model").removeprefix(".")


def tensors_in(value: Any, seen: set[int] | None = None) -> list[torch.Tensor]:
    """Every tensor that a model returned, those inside of caches and nested outputs too."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        return [value]
    if id(value) in seen or value is None or isinstance(value, (str, int, float, type)):
        return []
    seen.add(id(value))
    if isinstance(value, Mapping):
        parts: Sequence[Any] = list(value.values())
    elif isinstance(value, (list, tuple, set)):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    return [tensor for part in parts for tensor in tensors_in(part, seen)]


def capture(model: nn.Module, call: Call, naming: Naming = str, inner: str | None = None) -> Trace:
    """The graph of one call in eval mode, with ``aten.linear``, ``layer_norm`` and others whole.

    What the submodule ``inner`` returns counts as returned, so that the graph also proves the class
    of that submodule.

    Raises ``TraceFailed`` where the model does not export, or writes into tensors in place in a
    way that functionalisation cannot undo.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with warnings.catch_warnings(), torch.no_grad(), _brief_export():
            warnings.simplefilter("ignore")
            runner = _Steps(model, call.flags, inner)
            program = torch.export.export(runner, call.steps, strict=False)
            _replace_private_writes(program.graph)
            if _mutating(program.graph):
                program = program.run_decompositions({})
    except Exception as error:  # torch.export raises what it meets, of any class
        first = str(error).strip().split("\n")[0][:300]
        raise TraceFailed(
            f"{type(model).__name__} could not be traced ({call.label}): "
            f"{type(error).__name__}: {first}"
        ) from error
    finally:
        for module in training:
            module.training = True
    if left := _mutating(program.graph):
        raise TraceFailed(
            f"{type(model).__name__} ({call.label}): {left[0].target} writes in place, "
            "so the graph cannot be analysed"
        )
    return _named(program, model, call, naming)


@contextmanager
def _brief_export() -> Iterator[None]:
    """Without what torch logs about exceptions that it raises anyway, and a quarter faster.

    No Python stack is recorded with each node, and nothing looks for garbage while a graph grows.
    """
    logged, collecting = logging.root.manager.disable, gc.isenabled()
    unrecorded = getattr(fx_config, "do_not_emit_stack_traces", False)  # since torch 2.13
    logging.disable(logging.ERROR)
    fx_config.do_not_emit_stack_traces = True
    gc.disable()
    try:
        yield
    finally:
        logging.disable(logged)
        fx_config.do_not_emit_stack_traces = unrecorded
        if collecting:
            gc.enable()


def _mutating(graph: Graph) -> list[Node]:
    harmless = {torch.ops.aten.detach_.default}
    return [
        node
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and node.target not in harmless
    ]


aten = torch.ops.aten
_FRESH = {
    aten.add, aten.addmm, aten.baddbmm, aten.bmm, aten.cat, aten.conv1d, aten.conv2d, aten.div,
    aten.embedding, aten.gelu, aten.layer_norm, aten.linear, aten.matmul, aten.mm, aten.mul,
    aten.sub,
}  # fmt: skip
"""Ops whose result never shares memory with an operand."""


def _replace_private_writes(graph: Graph) -> None:
    """``x.add_(y)`` becomes ``x.add(y)`` where nothing else can see the memory of ``x`` any more.

    That is so if ``x`` is fresh and its other readers came before and gave out fresh memory. It
    spares a model with a residual ``+=`` the full functionalisation, ten times as slow.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in _mutating(graph):
        target: Any = node.target
        written: Any = node.args[0] if node.args else None
        plain = getattr(aten, target.overloadpacket.__name__.rstrip("_"), None)
        if plain not in _FRESH or not isinstance(written, Node):
            continue
        others = [user for user in written.users if user is not node]
        private = all(_is_fresh(user) and position[user] < position[node] for user in others)
        if private and _is_fresh(written) and node.all_input_nodes.count(written) == 1:
            node.target = getattr(plain, target._overloadname)


def _is_fresh(node: Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _FRESH


def _named(program: Any, model: nn.Module, call: Call, naming: Naming) -> Trace:
    aliases: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(tensor), []).append(naming(name))
    by_name = {
        name: aliases[id(tensor)] for name, tensor in model.named_parameters(remove_duplicate=False)
    }
    inputs = iter([_key(path) for path, _ in pytree.tree_flatten_with_path((call.steps, {}))[0]])
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    parameters: dict[Node, tuple[str, ...]] = {}
    named_inputs: dict[Node, str] = {}
    for spec in program.graph_signature.input_specs:
        node = nodes.get(getattr(spec.arg, "name", ""))
        if spec.kind.name == "USER_INPUT":
            name = next(inputs)
            if node is not None:
                named_inputs[node] = name
        elif spec.kind.name == "PARAMETER" and node is not None:
            parameters[node] = tuple(by_name[_inner(spec.target)])
    leaves = {naming(path) for path, module in model.named_modules() if not any(module.children())}
    return Trace(
        call.label,
        program.graph,
        parameters,
        named_inputs,
        naming,
        call.required,
        frozenset(leaves),
    )


def _key(path: Any) -> str:
    last = path[-1]
    return str(getattr(last, "key", getattr(last, "idx", last)))


def calls_of(model: Any, batch: int = BATCH) -> list[Call]:
    """The calls that a proof for a transformers model has to cover, from its forward's signature.

    ``batch`` is the number of rows. Raises ``TraceFailed`` for a main input that is neither tokens
    nor pixels.
    """
    accepted = inspect.signature(model.forward).parameters
    main = model.main_input_name
    if main == "input_ids":
        return _text_calls(model, accepted, batch)
    if main == "pixel_values":
        return _image_calls(model, accepted)
    raise TraceFailed(
        f"{type(model).__name__} takes {main}; only input_ids and pixel_values can be made up. "
        "Pass example inputs to analyze() in Python"
    )


def _ids(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.long, device="meta")


def _text_calls(model: Any, accepted: Mapping[str, Any], batch: int) -> list[Call]:
    def step(tokens: int, seen: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = {"input_ids": _ids(batch, tokens), "attention_mask": _ids(batch, seen)}
        if "decoder_input_ids" in accepted:  # the encoder's input stays, its decoder advances
            given = {"input_ids": _ids(batch, TOKENS), "attention_mask": _ids(batch, TOKENS)}
            given["decoder_input_ids"] = _ids(batch, tokens)
        return (), {name: value for name, value in given.items() if name in accepted}

    caches = {"past_key_values", "use_cache"} <= set(accepted)
    steps = (step(TOKENS, TOKENS), step(1, TOKENS + 1)) if caches else (step(TOKENS, TOKENS),)
    calls = [Call("prefill and decode", steps, {"use_cache": True} if caches else {})]
    optional = {"token_type_ids": _ids(batch, TOKENS), "position_ids": _ids(batch, TOKENS)}
    if "inputs_embeds" in accepted:
        table = model.get_input_embeddings()
        width = int(getattr(table, "embedding_dim", table.weight.shape[-1]))
        optional["inputs_embeds"] = torch.zeros(
            batch, TOKENS, width, dtype=table.weight.dtype, device="meta"
        )
    optional = {name: value for name, value in optional.items() if name in accepted}
    if optional:
        given = {**steps[0][1], **optional}
        if "inputs_embeds" in optional:
            given.pop("input_ids")
        flags = {"use_cache": False} if caches else {}
        calls.append(Call("optional inputs", (((), given),), flags, required=False))
    return calls


def _image_calls(model: Any, accepted: Mapping[str, Any]) -> list[Call]:
    config = model.config
    size, patch = _pair(config.image_size), _pair(getattr(config, "patch_size", 1))

    def pixels(height: int, width: int) -> dict[str, Any]:
        channels = config.num_channels
        return {"pixel_values": torch.zeros(BATCH, channels, height, width, device="meta")}

    calls = [Call("images", (((), pixels(*size)),))]
    if "bool_masked_pos" in accepted:
        patches = (size[0] // patch[0]) * (size[1] // patch[1])
        masked = torch.zeros(BATCH, patches, dtype=torch.bool, device="meta")
        given = {**pixels(*size), "bool_masked_pos": masked}
        calls.append(Call("masked positions", (((), given),), required=False))
    if "attention_mask" in accepted:
        tokens = (size[0] // patch[0]) * (size[1] // patch[1]) + 1
        given = {**pixels(*size), "attention_mask": _ids(BATCH, tokens)}
        calls.append(Call("attention mask", (((), given),), required=False))
    if "interpolate_pos_encoding" in accepted:
        larger = pixels(size[0] + patch[0], size[1] + patch[1])
        flags = {"interpolate_pos_encoding": True}
        calls.append(Call("other image size", (((), larger),), flags, required=False))
    return calls


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


_NEVER_PROVEN = ("label", "start_positions", "end_positions", "return_", "output_", "kwargs")


def optional_inputs(model: Any) -> list[str]:
    """Inputs of ``forward`` that can change what a graph reads: neither targets nor switches."""
    accepted = inspect.signature(model.forward).parameters.values()
    switches = {"use_cache", "logits_to_keep", "past_key_values", "interpolate_pos_encoding"}
    return [
        parameter.name
        for parameter in accepted
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        and parameter.name not in switches
        and not any(part in parameter.name for part in _NEVER_PROVEN)
    ]
