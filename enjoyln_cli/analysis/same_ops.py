"""Whether a class still computes the same function after its config changed.

Some classes scale the input of a tied head, or scale by the number of hidden units. Both models
therefore run without weights, and every op of the two runs has to be the same, on the same
operands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.fx.node import map_arg

from enjoyln_cli.calls.calls import Call
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.meta_device import copy_without_weights
from enjoyln_cli.trace.failure_reasons import say_why
from enjoyln_cli.trace.recorder import record
from enjoyln_cli.trace.steps import Steps, quiet

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def require_same(tied: nn.Module, model: nn.Module, call: Call) -> None:
    """Raise ``UnsupportedModel`` if ``model``, which is ``tied`` but untied, runs other ops."""
    first: dict[int, str] = {}
    named = tied.named_parameters(remove_duplicate=False)
    groups = {name: first.setdefault(id(parameter), name) for name, parameter in named}
    try:
        same = _ops(tied, call, groups) == _ops(model, call, groups)
    except Exception as error:  # a model may raise anything
        raise UnsupportedModel(
            f"{type(tied).__name__} does not run without its weights, so it cannot be checked "
            f"whether untying would change its results; fold it without --untie: {say_why(error)}"
        ) from error
    if not same:
        raise UnsupportedModel(
            f"{type(tied).__name__} would give other results with untied weights, so they stay "
            "tied; fold it without --untie"
        )


def same_but_for_sizes(narrow: nn.Module, wide: nn.Module, call: Call, size: int, to: int) -> bool:
    """Whether two models differ in nothing but sizes, which grow from ``size`` to ``to``.

    Multiples of ``size`` may grow in proportion. Only numbers inside lists count as sizes; a number
    outside, such as a factor or the end of a slice, has to be the same.
    """
    try:
        pairs = zip(_ops(narrow, call, {}), _ops(wide, call, {}), strict=True)
        return all(one == other or _grown(one, other, size, to) for one, other in pairs)
    except Exception:  # a model may raise anything
        return False


def _grown(one: str, other: str, size: int, to: int) -> bool:
    numbers = zip(_NUMBER.finditer(one), _NUMBER.finditer(other), strict=False)
    return _NUMBER.sub("0", one) == _NUMBER.sub("0", other) and all(
        a[0] == b[0]
        or a[0].isdigit()
        and b[0].isdigit()
        and int(a[0]) * to == int(b[0]) * size
        and one.count("[", 0, a.start()) > one.count("]", 0, a.start())
        for a, b in numbers
    )


def _ops(model: nn.Module, call: Call, groups: Mapping[str, str]) -> list[str]:
    """Every op of one call as text, with its operands; ``groups`` gives the names of parameters."""
    bare = copy_without_weights(model).eval()
    with quiet():
        found, _ = record(Steps(bare, call.flags, None, cache=call.cache), call.steps)
    nodes: dict[Any, str] = {}
    ops: list[str] = []
    others = 0
    for node in found.graph.nodes:
        if node in found.parameters:
            name = found.parameters[node]
            nodes[node] = groups.get(name, name)
        elif node.op == "placeholder":
            constant = found.constants.get(node)
            value = "" if constant is None or constant.is_meta else constant.tolist()
            nodes[node], others = f"given {others} {value}", others + 1
        elif node.op == "call_function":
            nodes[node] = f"result of op {len(ops)}"
            ops.append(f"{node.target} {map_arg((node.args, node.kwargs), nodes.__getitem__)}")
    return ops
