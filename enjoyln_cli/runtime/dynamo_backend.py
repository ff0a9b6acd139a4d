"""``torch.compile(model, backend="enjoyln")``: residual additions go into the norms that read them.

Decides which additions of the graph that Dynamo captures are computed together with a norm::

    s = a + b;  y = norm(s)     becomes   y, s = add_norm(a, b)     pre-LN: the next block reads s
                                          y = sum_norm(a, b)        post-LN: nobody else does

for every folded norm and for every LayerNorm that was kept, whatever the model. The two operands
have one shape and dtype; a view between sum and norm that keeps the last dimension is moved behind
the norm; dropout that drops nothing is left out. Without gradients, s and y are written over a and
b where the graph made these itself and nobody reads them later: new memory costs as much time as
the norm. All else runs as it is, or in another backend: ``options={"inner": "inductor"}``.
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
"""Norm to what also returns the sum, and what does not."""
IN_PLACE: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {
    kernels.add_rms_norm: (kernels.add_rms_norm_, kernels.add_rms_norm_over),
    kernels.add_layer_norm: (kernels.add_layer_norm_, kernels.add_layer_norm_over),
}
"""What returns the sum to what writes it over the second operand, and the result over the first."""
OVER: dict[Any, Callable[..., Any]] = {
    kernels.sum_rms_norm: kernels.sum_rms_norm_over,
    kernels.sum_layer_norm: kernels.sum_layer_norm_over,
}
"""What does not keep the sum to what writes the result over the first operand."""
NEW: set[Any] = {F.linear, F.embedding, torch.addmm, torch.matmul, operator.matmul, *ADDITIONS}
NEW |= {*OVER, *OVER.values(), *(function for pair in IN_PLACE.values() for function in pair)}
"""Functions whose result lies in memory of its own or in memory that is free again, if they are not
given ``out``."""
MODES = ("set_grad_enabled", "inference_mode", "stream", "event")
"""Parts of the names of calls after which gradients could be on, or other work at the same time."""

torch.compiler.allow_in_graph(rms_norm)


def enjoyln(
    gm: fx.GraphModule, example_inputs: list[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend. ``options`` may name the ``inner`` backend that the fused graph goes on to.

    Raises ``EnjoyLNError`` for any other option.
    """
    asked = dict(options or {})
    inner = asked.pop("inner", None)
    if asked:
        raise EnjoyLNError(
            f"the backend {NAME} has no option {next(iter(asked))!r}; its one option is inner, the "
            "name of another backend"
        )
    fuse(gm)
    if inner is None:
        write_over(gm)
        return gm.forward
    return registry.lookup_backend(inner)(gm, example_inputs)  # type: ignore[no-any-return]


def fuse(gm: fx.GraphModule) -> int:
    """Fuses what can be fused in ``gm``, in place; returns how many additions that were."""
    done = 0
    if not _casts_by_itself(gm.graph):
        for node in list(gm.graph.nodes):
            _skip_dropout(node)
        for node in list(gm.graph.nodes):
            done += _fuse_at(node)
        for node in list(gm.graph.nodes):
            _call_kernel(node)
    gm.recompile()
    return done


def write_over(gm: fx.GraphModule) -> int:
    """Writes sums and results over operands that nobody needs any more; returns at how many norms.

    For graphs that run as they are. None where a gradient could be wanted, and where not all runs
    in the order of the graph.
    """
    if torch.is_grad_enabled() or _calls(gm.graph, *MODES):
        return 0
    nodes = list(gm.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    done = 0
    for node in nodes:
        if node.target in IN_PLACE or node.target in OVER:
            a, b, *affine = node.args
            pairs = ((a, b), (b, a)) if _made(b) is b else ((b, a), (a, b))
            spare = [(x, y) for x, y in pairs if _is_spare(x, [y, *affine], node, place)]
            if spare:
                place[_write_over(node, spare, affine)] = place[node]
                done += 1
    gm.recompile()
    return done


def _write_over(fused: fx.Node, spare: list[tuple[fx.Node, fx.Node]], affine: list[Any]) -> fx.Node:
    """Puts another function in the place of ``fused``; returns what it gives, the normed rows.

    ``spare`` holds each spare operand with the other one. The sum, where it is kept, takes the
    place of the last.
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
    """Whether ``fused``, which reads ``others`` too, is the last to read the memory of ``operand``.

    Whatever is not known to return new memory counts as another name of what it reads. A view is
    not spare where a caller would get it: it could not be written to with gradients.
    """
    value, made = _value(operand), _made(operand)
    ordinary = all(type(_value(one)) is FakeTensor for one in (operand, others[0]))
    if not ordinary or not value.is_contiguous() or not _is_new(made):
        return False
    if made is not operand and _is_returned(fused):
        return False
    names = _names([made], fused)
    readers = (user for name in names for user in name.users)
    if any(place[one] > place[fused] or not (_is_new(one) or _only_reads(one)) for one in readers):
        return False
    return not any(other in names for other in others)


def _names(nodes: Iterable[fx.Node], but: fx.Node | None = None) -> list[fx.Node]:
    """``nodes`` and all that could be other names of their memory; ``but`` is not followed."""
    names = list(nodes)
    for name in names:
        for user in name.users:
            if not _is_new(user) and user not in (but, *names):
                names.append(user)
    return names


def _made(node: fx.Node) -> fx.Node:
    """What ``node`` is a view of, or itself."""
    while node.op == "call_method" and node.target in VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _is_returned(fused: fx.Node) -> bool:
    """Whether the graph returns the sum or the normed rows, or a view of them."""
    results = [fused] if fused.target in OVER else fused.users
    return any(name.op == "output" for name in _names(results))


def _is_new(node: fx.Node) -> bool:
    """Whether nobody else has the memory in which the value of ``node`` lies, when it is made."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return node.args[0].target in IN_PLACE
    known = node.target in NEW or (node.op == "call_method" and node.target == "add")
    return known and "out" not in node.kwargs and _value(node) is not None


def _casts_by_itself(graph: fx.Graph) -> bool:
    """Under autocast an addition and a norm may be of two dtypes, which no node tells."""
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
    given = node.args[0] if node.args else node.kwargs.get("input")
    if training is False and isinstance(given, fx.Node):
        node.replace_all_uses_with(given)
        node.graph.erase_node(node)


def _fuse_at(norm: fx.Node) -> bool:
    """Fuses the addition that ``norm`` reads, where ``norm`` is one and reads one."""
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
    if not _fits(total, weight, bias) or not _comes_first(total, norm, weight, bias, eps):
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
    """Kind, input, weight, bias and eps of a norm over the last dimension; ``None`` of others."""
    given: dict[str, Any]
    if node.op != "call_function":
        return None
    if node.target is rms_norm:
        given = _named(node, ("x", "weight", "bias", "eps", "dims"))
        kind, read, over = "rms_norm", given["x"], given.get("dims", 1)
    elif node.target in LAYER_NORMS:
        given = _named(node, ("input", "normalized_shape", "weight", "bias", "eps"))
        kind, read, over = "layer_norm", given["input"], len(given["normalized_shape"])
    else:
        return None
    eps = given.get("eps", 1e-5)
    if over != 1 or not isinstance(read, fx.Node) or not isinstance(eps, float | fx.Node):
        return None
    return kind, read, given.get("weight"), given.get("bias"), eps


def _named(node: fx.Node, names: tuple[str, ...]) -> dict[str, Any]:
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _views_above(node: fx.Node) -> list[fx.Node]:
    """The views that lead to ``node``, it included, none of which cuts or joins rows."""
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
    """Whether weight and bias are absent, or vectors as long as a row of the sum."""
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


def _comes_first(total: fx.Node, norm: fx.Node, *parameters: Any) -> bool:
    """Whether the norm can be computed where the sum is: nothing is written in between.

    Parameters that are made in between, of others, are made before.
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


def _call_kernel(node: fx.Node) -> None:
    """A norm that stays alone goes to its kernel without a detour."""
    found = _norm_arguments(node)
    if found is not None and found[0] == "rms_norm":
        value = _value(found[1])
        if value is not None and value.dtype != torch.float64:
            node.target, node.args, node.kwargs = kernels.rms_norm, found[1:], {}


def _value(node: Any) -> Any:
    """The fake tensor that a node stands for; ``None`` where it is no tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
