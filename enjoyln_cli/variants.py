"""The models that a speed is told from, and the ways in which they are run.

Beside the original and the folded model, with the same weights, stand two that compute something
else and are there to be timed::

    stock   the folded model with torch's own RMSNorm, F.rms_norm, and the bias added after it
    bare    the original with every norm handing on its input: what is left when norms cost nothing

``original - bare`` is what norms cost at all, so nothing that is done to norms can save more. Each
mode runs all four in the same way, so that what compiling saves by itself is no merit of the fold::

    eager       as they are
    fused       captured as one graph; of the folded one additions are computed with their norms
    compile     by Inductor
    cudagraphs  recorded and replayed; of the folded one with fused additions
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

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.fusion import enjoyln
from enjoyln_cli.norms import Folded, locate
from enjoyln_cli.probe import LayerNormForm, layer_norm_form

COLUMNS = ("original", "folded", "stock", "bare")
MODES = ("eager", "fused", "compile", "cudagraphs")
RECOMPILED = 64
"""Times that one function may be compiled: once for each model, phase and size."""


def shared(model: Any) -> Any:
    """A copy of a model that has modules of its own and shares all weights."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def variants(original: Any, folded: Any, norms: Iterable[str]) -> dict[str, nn.Module]:
    """``COLUMNS`` to models; ``norms`` are the paths of all LayerNorms, folded or kept.

    Paths may be those of a class around the model's, as ``norms.locate`` has them.
    """
    bare, stock, names = shared(original), shared(folded), tuple(norms)
    for path in (locate(original, name, names) for name in names):
        form = None if path is None else layer_norm_form(original.get_submodule(path))
        if path is None or form is None:
            continue
        _become(bare.get_submodule(path), _pass_on)
        if isinstance(stock.get_submodule(path), Folded):
            _become(stock.get_submodule(path), _stock_forward(form))
    return {"original": original, "folded": folded, "stock": stock, "bare": bare}


def _become(module: nn.Module, forward: Callable[..., torch.Tensor]) -> None:
    """Give a module another ``forward``; its attributes stay, as others may read them."""
    module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})


def _pass_on(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return x


def _stock_forward(form: LayerNormForm) -> Callable[..., torch.Tensor]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
        gain = None if form.gain == "1" else weight
        gain = 1 + gain if gain is not None and form.gain == "1 + weight" else gain
        x = x.movedim(form.dim, -1)
        shape = x.shape[-1:] if gain is None else gain.shape
        y = F.rms_norm(x, getattr(self, "normalized_shape", shape), gain, form.eps)
        return (y if bias is None else y + bias).to(x.dtype).movedim(-1, form.dim)

    return forward


def require(mode: str, device: torch.device) -> None:
    """Raises ``UnsupportedModel`` for a mode that ``device`` does not have."""
    if mode == "cudagraphs" and device.type != "cuda":
        others = ", ".join(name for name in MODES if name != mode)
        raise UnsupportedModel(f"--mode {mode} needs a GPU, and this is {device}; take {others}")


def in_mode(models: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """The models, run in ``mode``; they are compiled when they are first called."""
    if mode == "eager":
        return dict(models)
    plain: Any = {"fused": "eager", "compile": "inductor"}.get(mode, mode)
    ways: dict[str, dict[str, Any]] = {name: {"backend": plain} for name in models}
    if mode == "fused":
        ways["folded"] = {"backend": enjoyln}
    elif mode == "cudagraphs":
        ways["folded"] = {"backend": enjoyln, "options": {"inner": mode}}
    return {name: torch.compile(shared(model), **ways[name]) for name, model in models.items()}


@contextmanager
def compiling(mode: str) -> Iterator[None]:
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
        first = str(error).strip().split("\n")[0]
        raise UnsupportedModel(f"--mode {mode} does not work for this model: {first}") from error
    finally:
        chatter.setLevel(level)
        torch._dynamo.reset()
