"""The four models that are timed, and the modes in which they run.

Two models with the same weights are timed besides the original and the folded model::

    torch_rms_norm  the folded model with torch's own RMSNorm, F.rms_norm, and the bias added after
    no_norm         the original with norms that return their input; it computes something else

``original - no_norm`` is what norms cost, so no change to norms can save more. Each mode runs all
four in the same way, so that what compiling saves by itself is not counted for the fold::

    eager       as they are
    fused       captured as one graph; of the folded one additions are computed with their norms
    compile     by Inductor
    cudagraphs  as fused, recorded as one CUDA graph and replayed: the host costs nothing
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from enjoyln_cli.benchmark.choices import MODES
from enjoyln_cli.benchmark.timing import WARM_UP, Task, prepare_nothing
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.norm_probe import LayerNormForm, layer_norm_form
from enjoyln_cli.runtime.dynamo_backend import enjoyln
from enjoyln_cli.runtime.install import locate
from enjoyln_cli.runtime.modules import Folded, affine
from enjoyln_cli.text import first_line

LABELS = {
    "original": "original",
    "folded": "folded",
    "torch_rms_norm": "torch's RMSNorm",
    "no_norm": "no norm",
}
"""The four models by their names in JSON, and as people read them."""
COLUMNS = tuple(LABELS)
RECOMPILED = 64
"""Times that one function may be compiled: once for each model, phase and size."""


def share_weights(model: Any) -> Any:
    """A copy of a model that has modules of its own and shares all weights."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def variants(original: Any, folded: Any, norms: Iterable[str]) -> dict[str, nn.Module]:
    """``COLUMNS`` to models; ``norms`` are the paths of all LayerNorms, folded or kept.

    Paths may be those of a class around the model's, as ``install.locate`` has them.
    """
    no_norm, with_torch, names = share_weights(original), share_weights(folded), tuple(norms)
    for path in (locate(original, name, names) for name in names):
        form = None if path is None else layer_norm_form(original.get_submodule(path))
        if path is None or form is None:
            continue
        _become(no_norm.get_submodule(path), _pass_on)
        if isinstance(with_torch.get_submodule(path), Folded):
            _become(with_torch.get_submodule(path), _torch_forward(form))
    return dict(zip(COLUMNS, (original, folded, with_torch, no_norm), strict=True))


def _become(module: nn.Module, forward: Callable[..., torch.Tensor]) -> None:
    """Give a module another ``forward``; its attributes stay, as others may read them."""
    module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})


def _pass_on(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return x


def _torch_forward(form: LayerNormForm) -> Callable[..., torch.Tensor]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        gain, bias = affine(self, form)
        x = x.movedim(form.dim, -1)
        y = F.rms_norm(x, x.shape[-1:] if gain is None else gain.shape, gain, form.eps)
        return (y if bias is None else y + bias).to(x.dtype).movedim(-1, form.dim)

    return forward


def require(mode: str, device: torch.device) -> None:
    """Raises ``UnsupportedModel`` for a mode that ``device`` does not have."""
    if mode == "cudagraphs" and device.type != "cuda":
        others = ", ".join(name for name in MODES if name != mode)
        raise UnsupportedModel(f"--mode {mode} needs a CUDA GPU, not {device}; use {others}")


def in_mode(models: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """The models, run in ``mode``; they are compiled when they are first called."""
    if mode == "eager":
        return dict(models)
    plain: Any = "inductor" if mode == "compile" else "eager"
    ways = dict.fromkeys(models, plain)
    if mode != "compile":
        ways["folded"] = enjoyln
    return {name: torch.compile(share_weights(m), backend=ways[name]) for name, m in models.items()}


def record_graphs(task: Task, device: torch.device) -> Task:
    """``task`` recorded as CUDA graphs, which use the same memory whenever they are replayed.

    What it prepares is a graph of its own, so that a cache begins anew each time. (Torch's backend
    ``cudagraphs`` would copy all weights for every call: Dynamo hands them on as inputs.) What
    waits for the device is refused before anything is recorded: a recording that breaks off leaves
    torch's allocator and generator in it.

    Raises ``UnsupportedModel`` where something is done that cannot be recorded.
    """
    before, graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    prepares = task.prepare is not prepare_nothing
    stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    waiting = torch.cuda.get_sync_debug_mode()
    try:
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):  # models are compiled, and their kernels chosen
                task.run(task.prepare())
            torch.cuda.set_sync_debug_mode("error")
            task.run(task.prepare())
            torch.cuda.set_sync_debug_mode(waiting)  # a recording frees memory first, and waits
            given = None
            if prepares:
                with torch.cuda.graph(before, stream=stream):
                    given = task.prepare()
            pool = before.pool() if prepares else None
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                task.run(given)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        first = first_line(error.__context__ or error)
        raise UnsupportedModel(f"cannot be recorded: {first}") from error
    finally:
        torch.cuda.set_sync_debug_mode(waiting)
    current.wait_stream(stream)
    # The graphs read what ``task`` holds, so each replay holds it too.
    return Task(
        lambda _, held=task: graph.replay(),  # type: ignore[misc]
        before.replay if prepares else prepare_nothing,
        task.steps,
    )


@contextmanager
def compile_anew(mode: str) -> Iterator[None]:
    """Within the block models are compiled anew; a compiler's failure is one line.

    Raises ``UnsupportedModel``.
    """
    if mode == "eager":
        yield
        return
    torch._dynamo.reset()
    chatter = logging.getLogger("torch._dynamo")  # of what it does not compile, and runs as it is
    level = chatter.level
    chatter.setLevel(logging.ERROR)
    try:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILED):
            yield
    except torch._dynamo.exc.TorchDynamoException as error:
        first = first_line(error)
        raise UnsupportedModel(f"--mode {mode} does not work for this model: {first}") from error
    finally:
        chatter.setLevel(level)
        torch._dynamo.reset()
