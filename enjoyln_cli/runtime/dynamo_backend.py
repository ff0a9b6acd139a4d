"""``torch.compile(model, backend="enjoyln")``: fuses residual additions with the norms after them.

Decides which additions in the graph that Dynamo captures are computed together with a norm::

    s = a + b;  y = norm(s)     becomes   y, s = add_norm(a, b)     pre-LN: the next block reads s
                                          y = sum_norm(a, b)        post-LN: only the norm reads s

This applies to every converted norm and to every remaining LayerNorm, in any model. The two
operands must have the same shape and dtype. A view between sum and norm that keeps the last
dimension is moved behind the norm. Inactive dropout is removed.

Without gradients, s and y overwrite a and b if the graph computed these itself and nothing reads
them later: allocating new memory takes as long as the norm. All other nodes run unchanged, or in
another backend: ``options={"inner": "inductor"}``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends import registry
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq
from torch.nn import functional as F

from enjoyln_cli import kernels
from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.runtime.modules import rms_norm

NAME = "enjoyln"
ADDITIONS = (operator.add, torch.add)
LAYER_NORMS = (F.layer_norm, torch.layer_norm)
VIEWS = ("view", "reshape")
AUGMENTED = (
    "iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor"
)
WRITES = {getattr(operator, name) for name in (*AUGMENTED.split(), "setitem", "delitem")}
FUSED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "rms_norm": (kernels.add_rms_norm, kernels.sum_rms_norm),
    "layer_norm": (kernels.add_layer_norm, kernels.sum_layer_norm),
}
"""For each norm: the kernel that returns norm and sum, and the one that returns the norm only."""
IN_PLACE: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {
    kernels.add_rms_norm: (kernels.add_rms_norm_, kernels.add_rms_norm_over),
    kernels.add_layer_norm: (kernels.add_layer_norm_, kernels.add_layer_norm_over),
}
"""For each kernel that returns norm and sum: the kernel that writes the sum over the second
operand, and the kernel that also writes the norm over the first."""
OVER: dict[Any, Callable[..., Any]] = {
    kernels.sum_rms_norm: kernels.sum_rms_norm_over,
    kernels.sum_layer_norm: kernels.sum_layer_norm_over,
}
"""For each kernel that returns the norm only: the kernel that writes it over the first operand."""
NEW: set[Any] = {F.linear, F.embedding, torch.addmm, torch.matmul, operator.matmul, *ADDITIONS}
NEW |= {*OVER, *OVER.values(), *(function for pair in IN_PLACE.values() for function in pair)}
"""Functions whose result shares memory with no value that is still needed (without ``out=``)."""
MODES = ("set_grad_enabled", "inference_mode", "stream", "event")
"""Parts of names of functions that could enable gradients, or run work in parallel."""

torch.compiler.allow_in_graph(rms_norm)


def enjoyln(
    gm: fx.GraphModule, example_inputs: list[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend. ``options["inner"]`` may name another backend that compiles the fused graph.

    Raises ``EnjoyLNError`` for any other option.
    """
    unknown = dict(options or {})
    inner = unknown.pop("inner", None)
    if unknown:
        raise EnjoyLNError(
            f"the backend {NAME} has no option {next(iter(unknown))!r}; its only option is inner, "
            "the name of another backend"
        )
    fuse(gm)
    if inner is None:
        write_over(gm)
        return gm.forward
    return registry.lookup_backend(inner)(gm, example_inputs)  # type: ignore[no-any-return]


def fuse(gm: fx.GraphModule) -> int:
    """Fuses additions with norms in ``gm``, in place; returns the number of fused additions."""
    done = 0
    if not _uses_autocast(gm.graph):
        for node in list(gm.graph.nodes):
            _skip_dropout(node)
        for node in list(gm.graph.nodes):
            done += _fuse_at(node)
        for node in list(gm.graph.nodes):
            _call_kernel_directly(node)
    gm.recompile()
    return done


def write_over(gm: fx.GraphModule) -> int:
    """Lets fused norms overwrite operands that nothing reads later; returns the number of norms.

    Only for graphs that run as they are, without another backend. Changes nothing where gradients
    may be enabled, or where nodes may not run in the order of the graph.
    """
    if torch.is_grad_enabled() or _calls(gm.graph, *MODES):
        return 0
    nodes = list(gm.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    done = 0
    for node in nodes:
        if node.target in IN_PLACE or node.target in OVER:
            a, b, *affine = node.args
            pairs = ((a, b), (b, a)) if _view_base(b) is b else ((b, a), (a, b))
            spare = [(x, y) for x, y in pairs if _is_spare(x, [y, *affine], node, place)]
            if spare:
                place[_write_over(node, spare, affine)] = place[node]
                done += 1
    gm.recompile()
    return done


def _write_over(fused: fx.Node, spare: list[tuple[fx.Node, fx.Node]], affine: list[Any]) -> fx.Node:
    """Replaces ``fused`` by its in-place kernel; returns the node of the normed rows.

    ``spare`` holds, for each operand that may be overwritten, the pair (operand, other operand). If
    the sum is needed, it overwrites the operand of the last pair.
    """
    graph, (last, other) = fused.graph, spare[-1]
    with graph.inserting_before(fused):
        if fused.target in OVER:
            y = graph.call_function(OVER[fused.target], (last, other, *affine))
            y.meta = dict(fused.meta)
            fused.replace_all_uses_with(y)
        else:
            function = IN_PLACE[fused.target][len(spare) - 1]
            y = graph.call_function(function, (other, last, *affine))
            for result in list(fused.users):
                y.meta = dict(result.meta)
                result.replace_all_uses_with(last if result.args[1] else y)
                graph.erase_node(result)
    graph.erase_node(fused)
    return y


def _is_spare(
    operand: fx.Node, others: list[Any], fused: fx.Node, place: dict[fx.Node, int]
) -> bool:
    """Whether ``fused``, which also reads ``others``, is the last reader of ``operand``'s memory.

    A function that is not known to return new memory is taken to return a view of its arguments. A
    view is not overwritten if the graph would return it, since autograd restricts later in-place
    writes to a view.
    """
    value, base = _value(operand), _view_base(operand)
    ordinary = all(type(_value(one)) is FakeTensor for one in (operand, others[0]))
    if not ordinary or not value.is_contiguous() or not _is_new(base):
        return False
    if base is not operand and _is_returned(fused):
        return False
    aliases = _aliases([base], fused)
    readers = (user for alias in aliases for user in alias.users)
    if any(place[one] > place[fused] or not (_is_new(one) or _only_reads(one)) for one in readers):
        return False
    return not any(other in aliases for other in others)


def _aliases(nodes: Iterable[fx.Node], but: fx.Node | None = None) -> list[fx.Node]:
    """``nodes`` and all nodes that may share memory with them; ``but`` is not followed."""
    aliases = list(nodes)
    for alias in aliases:
        for user in alias.users:
            if not _is_new(user) and user not in (but, *aliases):
                aliases.append(user)
    return aliases


def _view_base(node: fx.Node) -> fx.Node:
    """The node that ``node`` is a view of, or ``node`` itself."""
    while node.op == "call_method" and node.target in VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _is_returned(fused: fx.Node) -> bool:
    """Whether the graph returns the sum or the normed rows, or a view of them."""
    results = [fused] if fused.target in OVER else fused.users
    return any(alias.op == "output" for alias in _aliases(results))


def _is_new(node: fx.Node) -> bool:
    """Whether the value of ``node`` shares memory with no other value when it is computed."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return node.args[0].target in IN_PLACE
    known = node.target in NEW or (node.op == "call_method" and node.target == "add")
    return known and "out" not in node.kwargs and _value(node) is not None


def _uses_autocast(graph: fx.Graph) -> bool:
    """Whether autocast is on: then an addition and a norm may run in two dtypes, without a cast."""
    cast = torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu")
    return cast or _calls(graph, "autocast")


def _calls(graph: fx.Graph, *words: str) -> bool:
    """Whether the graph calls anything with one of ``words`` in its name."""
    called = (node.target for node in graph.nodes if node.op.startswith("call_"))
    names = [str(getattr(target, "__name__", target)) for target in called]
    return any(word in name for name in names for word in words)


def _skip_dropout(node: fx.Node) -> None:
    if node.op != "call_function" or node.target is not F.dropout:
        return
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
    source = node.args[0] if node.args else node.kwargs.get("input")
    if training is False and isinstance(source, fx.Node):
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)


def _fuse_at(norm: fx.Node) -> bool:
    """Fuses ``norm`` with the addition that it reads; returns whether there were both."""
    found = _norm_arguments(norm)
    if found is None:
        return False
    kind, read, weight, bias, eps = found
    views = _views_above(read)
    total = views[0].args[0] if views else read
    if not isinstance(total, fx.Node) or not _is_addition(total):
        return False
    a, b = (arg for arg in total.args if isinstance(arg, fx.Node))
    others = set(total.users) - ({views[0]} if views else {norm})
    others |= {user for view in views for user in set(view.users) - {norm, *views}}
    if not _fits(total, weight, bias) or not _can_move_up(total, norm, weight, bias, eps):
        return False
    with_sum, alone = FUSED[kind]
    graph = norm.graph
    with graph.inserting_before(total):
        fused = graph.call_function(with_sum if others else alone, (a, b, weight, bias, eps))
        y = graph.call_function(operator.getitem, (fused, 0)) if others else fused
        if others:
            kept = graph.call_function(operator.getitem, (fused, 1))
            kept.meta = dict(total.meta)
            total.replace_all_uses_with(kept)
    y.meta = dict(total.meta)
    with graph.inserting_before(norm):
        for view in views:
            y = graph.call_method(view.target, (y, *view.args[1:]), dict(view.kwargs))  # type: ignore
            y.meta = dict(view.meta)
    norm.replace_all_uses_with(y)
    for node in (norm, *reversed(views), total):
        if not node.users:
            graph.erase_node(node)
    return True


def _norm_arguments(node: fx.Node) -> tuple[str, fx.Node, Any, Any, Any] | None:
    """Kind, input, weight, bias and eps of a norm over the last dimension; ``None`` for others."""
    arguments: dict[str, Any]
    if node.op != "call_function":
        return None
    if node.target is rms_norm:
        arguments = _named_arguments(node, ("x", "weight", "bias", "eps", "dims"))
        kind, read, dims = "rms_norm", arguments["x"], arguments.get("dims", 1)
    elif node.target in LAYER_NORMS:
        names = ("input", "normalized_shape", "weight", "bias", "eps")
        arguments = _named_arguments(node, names)
        kind, read, dims = "layer_norm", arguments["input"], len(arguments["normalized_shape"])
    else:
        return None
    eps = arguments.get("eps", 1e-5)
    if dims != 1 or not isinstance(read, fx.Node) or not isinstance(eps, float | fx.Node):
        return None
    return kind, read, arguments.get("weight"), arguments.get("bias"), eps


def _named_arguments(node: fx.Node, names: tuple[str, ...]) -> dict[str, Any]:
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _views_above(node: fx.Node) -> list[fx.Node]:
    """The chain of views that ends in ``node``, all of which keep the last dimension."""
    views: list[fx.Node] = []
    while node.op == "call_method" and node.target in VIEWS and isinstance(node.args[0], fx.Node):
        before, after = _value(node.args[0]), _value(node)
        if before is None or after is None or not before.ndim or not after.ndim:
            break
        if not statically_known_true(sym_eq(before.shape[-1], after.shape[-1])):
            break
        views.insert(0, node)
        node = node.args[0]
    return views


def _is_addition(node: fx.Node) -> bool:
    """Whether ``node`` adds two tensors of one shape, floating dtype and device."""
    plain = (node.op == "call_function" and node.target in ADDITIONS) or (
        node.op == "call_method" and node.target == "add"
    )
    if not plain or len(node.args) != 2 or node.kwargs:
        return False
    values = [_value(arg) for arg in (*node.args, node)]
    if any(value is None or not value.is_floating_point() for value in values):
        return False
    first, *rest = values
    return all(
        value.dtype == first.dtype
        and value.device == first.device
        and value.ndim == first.ndim
        and statically_known_true(sym_eq(tuple(value.shape), tuple(first.shape)))
        for value in rest
    )


def _fits(total: fx.Node, weight: Any, bias: Any) -> bool:
    """Whether weight and bias are each absent, or a vector as long as a row of the sum."""
    width = _value(total).shape[-1:]
    return all(
        one is None
        or (
            (value := _value(one)) is not None
            and value.ndim == 1
            and statically_known_true(sym_eq(tuple(value.shape), tuple(width)))
        )
        for one in (weight, bias)
    )


def _can_move_up(total: fx.Node, norm: fx.Node, *parameters: Any) -> bool:
    """Whether the norm can be computed where the sum is; if so, moves its parameters before it.

    It can if no node in between writes to memory, and if no parameter that is computed in between
    depends on the sum or on another node in between.
    """
    between: list[fx.Node] = []
    node = total.next
    while node is not norm:
        between.append(node)
        node = node.next
    late = [one for one in parameters if isinstance(one, fx.Node) and one in between]
    ready = all({total, *between}.isdisjoint(one.all_input_nodes) for one in late)
    if not ready or not all(map(_only_reads, between)):
        return False
    for one in late:
        total.prepend(one)
    return True


def _only_reads(node: fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", node.target))
    if node.op in ("placeholder", "get_attr"):
        return True
    if node.op not in ("call_function", "call_method") or node.kwargs.get("inplace"):
        return False
    if "out" in node.kwargs or (name.endswith("_") and not name.endswith("__")):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target._schema.is_mutable
    return node.target not in WRITES and name != "__setitem__"


def _call_kernel_directly(node: fx.Node) -> None:
    """Lets a norm that was not fused call its kernel directly, not through ``rms_norm``."""
    found = _norm_arguments(node)
    if found is not None and found[0] == "rms_norm":
        value = _value(found[1])
        if value is not None and value.dtype != torch.float64:
            node.target, node.args, node.kwargs = kernels.rms_norm, found[1:], {}


def _value(node: Any) -> Any:
    """The fake tensor that a node stands for; ``None`` if its value is not a tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
