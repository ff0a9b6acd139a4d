"""Whether a class still computes the same function after its config changed.

Some classes scale the input of a tied head, or scale by the number of hidden units. Both models
therefore run without weights, and every op of the two runs has to be the same, on the same
operands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from enjoyln_cli.calls.calls import Call
from enjoyln_cli.effects.isolated_run import Steps, ready
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.meta_device import on_cpu, weightless, without_weights
from enjoyln_cli.trace.failure_reasons import say_why

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def require_same(tied: nn.Module, model: nn.Module, call: Call) -> None:
    """Raises ``UnsupportedModel`` if ``model``, the untied form of ``tied``, runs other ops."""
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
    """Every op of one run as text, with its operands; ``groups`` gives the names of parameters.

    The second run is listed: in the first one, a model may still change its parts (as BigBird
    chooses its attention).
    """
    bare = without_weights(model)
    run = Steps(bare, call.flags, None, cache=call.cache)
    with ready(bare), weightless():
        run(*on_cpu(call.steps))
        held = chain(bare.named_buffers(), bare.named_parameters(remove_duplicate=False))
        with _Listing({id(t): groups.get(n, n) for n, t in held}) as found:
            run(*on_cpu(call.steps))
    return found.ops


class _Listing(TorchDispatchMode):
    """Lists every op as text; tensors appear by name, or as the result of the op that made them."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.ops: list[str] = []
        self.made: list[Any] = []
        """Keeps all results alive, so that no two tensors get the same ``id``."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = pytree.tree_map_only(torch.Tensor, self._name, (args, kwargs or {}))
        results = func(*args, **(kwargs or {}))
        for i, result in enumerate(pytree.tree_leaves(results)):
            if isinstance(result, torch.Tensor) and id(result) not in self.names:
                self.names[id(result)] = f"result {i} of op {len(self.ops)}"
        self.made.append(results)
        self.ops.append(f"{func} {given}")
        return results

    def _name(self, tensor: torch.Tensor) -> str:
        return self.names.get(id(tensor), f"given {tuple(tensor.shape)}")
