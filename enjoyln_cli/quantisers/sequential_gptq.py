"""GPTQ of a whole model, block by block.

The layers of one block of a model are rounded together, on what the blocks before it compute with
their rounded weights. What blocks return is stored, so that each runs twice for each input: before
its layers are rounded and afterwards. Memory is bounded by the matrices ``H`` of one block, beside
what is stored and the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from enjoyln_cli.clock import Countdown, Progress, no_progress
from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.run import run
from enjoyln_cli.comparison.simulated_rounding import input_dimension
from enjoyln_cli.models.memory import give_back
from enjoyln_cli.models.offload import on_disk
from enjoyln_cli.quantisers.gptq import RoundedWeight, Squares, rounded


def round_model(
    model: Any,
    groups: Mapping[str, int],
    batches: Sequence[Batch],
    symmetric: bool = False,
    on_progress: Progress = no_progress,
    folder: Path | None = None,
) -> dict[str, RoundedWeight]:
    """Round the weights of linear layers of ``model``, in place.

    ``groups`` has the paths of the layers, and how many inputs of each share a scale. ``batches``
    are the calibration data: inputs of ``forward``. A layer that no batch reaches is rounded to the
    nearest integers. ``on_progress`` is called after each block. What blocks return is stored in
    files in ``folder``, and so are the integers; without a ``folder``, they stay in memory. Returns
    the integers by the paths of the layers.
    """
    give_back()
    modules = {path: model.get_submodule(path) for path in groups}
    blocks_called = {name: model.get_submodule(name) for name in map(_block_of, groups)}
    called = _calls(model, modules | blocks_called, batches[0]) if batches else []
    calls = [path for path in called if path in modules]
    order = [*dict.fromkeys((*calls, *groups))]
    blocks: dict[str, list[str]] = {}
    for path in order:
        blocks.setdefault(_block_of(path), []).append(path)
    countdown, found = Countdown(len(blocks), on_progress), {}
    known = [_KnownBlocks({}, {}, folder) for _ in batches]
    for name, paths in blocks.items():
        block = {path: modules[path] for path in paths}
        many = sum(path in block for path in calls)
        inputs = _squares(model, block, [*zip(batches, known, strict=True)], many)
        for path, module in block.items():
            result = _round_layer(module, inputs.get(path), groups[path], symmetric)
            found[path] = result.on_disk(folder) if folder else result
        for each in known if called.count(name) == 1 else ():
            each.modules[name] = blocks_called[name]
        countdown.count()
    return found


def _block_of(path: str) -> str:
    """The path up to its first number, ``h.3`` of ``h.3.mlp.c_fc``; all of it if it has none."""
    numbered = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", path)
    return numbered[0] if numbered else path


def _round_layer(
    module: nn.Module, inputs: Squares | None, group: int, symmetric: bool
) -> RoundedWeight:
    weight: Any = module.weight
    transposed = input_dimension(module) == 0
    matrix = weight.detach().T if transposed else weight.detach()
    result = rounded(matrix, inputs, group, symmetric)
    with torch.no_grad():
        weight.copy_(result.matrix.T if transposed else result.matrix)
    return result


def _calls(model: Any, modules: Mapping[str, nn.Module], batch: Batch) -> list[str]:
    """The paths of the ``modules`` in the order in which the model calls them."""
    called: list[str] = []
    with _watched(modules, lambda path, x: called.append(path)):
        run(model, [batch])
    return called


@dataclass(frozen=True, eq=False)
class _KnownBlocks:
    """The blocks with rounded layers that a run calls once, and what they return for one input."""

    modules: dict[str, nn.Module]
    results: dict[str, Any]
    folder: Path | None

    @contextmanager
    def skipped(self, calls_left: Callable[[], int]) -> Iterator[None]:
        """Let the blocks return what is known, inside the context; the other blocks run.

        What these return is known from then on, unless a layer that is not rounded yet was called
        inside of them, by which ``calls_left`` changes.
        """

        def store(x: torch.Tensor) -> torch.Tensor:
            return on_disk(x, self.folder) if self.folder else x.clone()

        def result(path: str, forward: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
            if path in self.results:  # a copy, since the model may write to it
                return tree_map_only(torch.Tensor, torch.clone, self.results[path])
            before = calls_left()
            found = forward(*args, **inputs)
            if calls_left() == before:
                self.results[path] = tree_map_only(torch.Tensor, store, found)
            return found

        own = {module: vars(module).get("forward") for module in self.modules.values()}
        for path, module in self.modules.items():
            module.forward = partial(result, path, module.forward)
        try:
            yield
        finally:
            for module, forward in own.items():
                del module.forward
                if forward is not None:
                    module.forward = forward


def _squares(
    model: Any,
    block: Mapping[str, nn.Module],
    inputs: Sequence[tuple[Batch, _KnownBlocks]],
    calls: int,
) -> dict[str, Squares]:
    """``H`` of each layer of a block that a run reaches; a run ends after so many ``calls``."""
    found: dict[str, Squares] = {}
    left = 0

    def add(path: str, x: torch.Tensor) -> None:
        nonlocal left
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        width = rows.shape[1]
        before = found.get(path) or Squares(rows.new_zeros(width, width), 0)
        found[path] = Squares(before.sums.addmm_(rows.T, rows), before.count + len(rows))
        left -= 1
        if not left:
            raise _Reached

    def calls_left() -> int:
        return left

    for batch, known in inputs if calls else ():
        left = calls
        with _watched(block, add), known.skipped(calls_left), suppress(_Reached):
            run(model, [batch])
    return found


class _Reached(Exception):
    """Ends a run of a model after the last call of a block's layers."""


@contextmanager
def _watched(modules: Mapping[str, nn.Module], see: Callable[[str, Any], None]) -> Iterator[None]:
    """Give ``see`` the path and the input of each layer before its call, inside the block."""
    with ExitStack() as stack:
        for path, module in modules.items():

            def before(_: Any, args: Any, named: Mapping[str, Any], at: str = path) -> None:
                see(at, args[0] if args else next(iter(named.values()), None))

            hook = module.register_forward_pre_hook(before, with_kwargs=True)
            stack.callback(hook.remove)
        yield
