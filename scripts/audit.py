"""Checks by experiment whether the reason that keeps a LayerNorm is true.

A reason names a source whose mean cannot be removed. If the source is a weight whose shift would be
noticed, the weight is shifted, a little or a lot, and an output has to change. If the source is an
op that does not keep a zero mean, the op is run on random numbers: it must not commute with
centring, ``f(P x) = P f(x)``, whichever of its operands are centred. If it does, a rule is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import combinations, product
from typing import Any

import torch
from torch.fx import Node, map_arg

from enjoyln_cli.analysis.analyze import Analysis
from enjoyln_cli.plan.axis import Axis, centre
from enjoyln_cli.proof import explain
from enjoyln_cli.proof.flow import Value
from enjoyln_cli.proof.min_cut import Parameter

SEEN = 1e-9
"""Least relative change of an output that counts as noticing a shift."""
SHIFTS = (1.0, 1e3, 1e5)
"""Sizes of the shifts of a weight: a clamp, a softmax or a codebook can hide a small one."""
ELEMENTS = 1 << 22
"""Most elements of an operand or result with which an op is run."""


Runs = Sequence[tuple[Callable[[], list[torch.Tensor]], list[torch.Tensor]]]
"""Functions that run the model on fixed inputs, each with its outputs before any shift."""


def audited(analysis: Analysis, model: torch.nn.Module, runs: Runs) -> dict[str, str]:
    """From each kept norm to the result of the experiment on its reason.

    * ``true``, or ``true of another source`` (the reason does not name that source)
    * ``not exercised``: no call runs the norm
    * that the norm runs, and no output depends on it
    * ``missing rule: OP``
    * ``unseen: PARAMETER``: no output changes although one should
    * ``given``: the source is an input or a constant
    * the reason itself, if it is about the program and not about numbers
    """
    found: dict[str, str] = {}
    answer = cache(partial(_answer, analysis, model, runs))
    for verdict in analysis.plan.kept:
        if verdict.norm not in analysis.problem.norms:
            unread = verdict.reason == "no traced call runs it"
            found[verdict.norm] = _unread(model, runs, verdict.norm) if unread else verdict.reason
            continue
        obstacles = explain.obstacles(analysis.problem, analysis.cut, verdict.norm)
        told = (answer(one.source) for one in obstacles)
        found[verdict.norm] = next(told, verdict.reason)  # for the source that the reason names
        if found[verdict.norm].startswith("unseen") and "true" in told:
            found[verdict.norm] = "true of another source"
    return found


def _answer(analysis: Analysis, model: torch.nn.Module, runs: Runs, source: Any) -> str:
    if isinstance(source, Parameter):
        if analysis.problem.observer(source) is None:
            return str(analysis.problem.obstacle(source))
        return "true" if _is_seen(model, runs, source) else f"unseen: {source.name}"
    if isinstance(source, Value):
        return _of_op(source.node, source.axis)
    return "true"


def _is_seen(model: torch.nn.Module, runs: Runs, source: Parameter) -> bool:
    parameter = model.get_parameter(source.name)
    before = parameter.detach().clone()
    random = torch.randn(before.shape, dtype=before.dtype)
    shift = random - centre(random, source.axis)
    with torch.no_grad():
        for size in SHIFTS:
            parameter.copy_(before + size * shift)
            least = SEEN * max(1.0, size / SHIFTS[1])  # a large shift causes larger rounding errors
            seen = any(_changed(outputs(), expected, least) for outputs, expected in runs)
            parameter.copy_(before)
            if seen:
                break
    return seen


def _unread(model: torch.nn.Module, runs: Runs, norm: str) -> str:
    """For a norm in no graph: whether it runs, and if so, whether an output depends on it."""
    called: list[str] = []
    module = model.get_submodule(norm)
    hook = module.register_forward_hook(lambda *_: called.append(norm))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
        seen = any(_changed(outputs(), expected) for outputs, expected in runs)
        for parameter, value in zip(module.parameters(), before, strict=True):
            parameter.copy_(value)
    hook.remove()
    if not called:
        return "not exercised"
    return "untraced: an output depends on it" if seen else "it runs, and no output depends on it"


def _changed(found: list[torch.Tensor], expected: list[torch.Tensor], least: float = SEEN) -> bool:
    pairs = zip(found, expected, strict=True)
    real = [(a, b) for a, b in pairs if b.is_floating_point() and b.numel()]
    return any(a.shape != b.shape or _differs(a, b, least) for a, b in real)


def _differs(a: torch.Tensor, b: torch.Tensor, least: float) -> bool:
    finite = torch.isfinite(b)
    change = (a - b)[finite].abs()
    return bool(change.numel() and not change.max() <= least * b[finite].abs().max())


def _of_op(node: Node, axis: Axis) -> str:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return "given" if node.op != "call_function" else "true"
    if node.meta.get("written"):
        return "its memory is written in place"
    operands = [n for n in node.all_input_nodes if _is_real(n)]
    value = node.meta.get("val")
    if not operands:
        return "given"
    if not _fits(value) or not all(_fits(n.meta["val"]) for n in operands):
        return "not run: shapes depend on values, or are large"
    try:
        if _commutes(node, axis, operands):
            return f"missing rule: {node.target.overloadpacket.__name__}"
    except Exception as error:  # the op refuses random operands
        return f"not run: {type(error).__name__}"
    return "true"


def _is_real(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _fits(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape):
        return False
    return 0 < value.numel() <= ELEMENTS


def _commutes(node: Node, axis: Axis, operands: list[Node]) -> bool:
    """Whether centring some operands, over some of their dimensions, centres the result.

    This is tried at two magnitudes, since a clamp is the identity near zero.
    """
    choices = [
        (chosen, axes)
        for chosen in _choices(operands)
        for axes in product(*(_axes(n.meta["val"], axis) for n in chosen))
    ]
    return any(
        all(_centres(node, axis, chosen, axes, magnitude) for magnitude in (1.0, 1e5))
        for chosen, axes in [((), ()), *choices]
    )


def _centres(
    node: Node, axis: Axis, chosen: tuple[Node, ...], axes: tuple[Axis, ...], magnitude: float
) -> bool:
    """Whether ``f(P x) = P f(x)``; if nothing is chosen, whether ``f(x)`` is zero-mean."""
    generator = torch.Generator().manual_seed(0)
    values = {
        n: _random(n.meta["val"], generator, magnitude)
        for n in node.all_input_nodes
        if isinstance(n.meta.get("val"), torch.Tensor)
    }

    def run() -> torch.Tensor:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
        result: torch.Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
        return result

    with torch.no_grad():
        plain = run()
        wanted = centre(plain, axis)
        values |= {n: centre(values[n], a) for n, a in zip(chosen, axes, strict=True)}
        difference = (run() - wanted).abs().max()
        scale = plain.abs().max() if not chosen else (plain - wanted).abs().max()
        return bool(difference <= 1e-9 * scale)


def _choices(operands: list[Node]) -> Iterator[tuple[Node, ...]]:
    for count in range(1, min(len(operands), 3) + 1):
        yield from combinations(operands, count)


def _axes(operand: torch.Tensor, axis: Axis) -> list[Axis]:
    """The same group structure on any dimension that is long enough."""
    fitting = [dim for dim in range(operand.dim()) if operand.shape[dim] >= axis.stop]
    whole = [Axis(dim, 0, 1, operand.shape[dim], 1) for dim in range(operand.dim())]
    return list(
        dict.fromkeys(
            [Axis(dim, axis.start, axis.outer, axis.size, axis.inner) for dim in fitting]
            + [a for a in whole if a.size == axis.size]
        )
    )


def _random(value: torch.Tensor, generator: torch.Generator, magnitude: float) -> torch.Tensor:
    if value.is_floating_point():
        drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        return magnitude * (drawn + 0.3)
    return torch.randint(0, 2, value.shape, generator=generator).to(value.dtype)
