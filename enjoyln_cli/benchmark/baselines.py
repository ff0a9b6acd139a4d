"""The four models that are timed, and the modes in which they run.

Two more models with the same weights are timed, for comparison::

    torch_rms_norm  the folded model with torch's own RMSNorm, F.rms_norm, and the bias added after
    no_norm         the original with norms that return their input; its outputs are meaningless

``original - no_norm`` is the time that norms cost, so no change to norms can save more. Each mode
runs all four models in the same way, so the time saved by compiling is not counted as a gain::

    eager    not compiled
    compile  compiled by Inductor
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
from enjoyln_cli.models.classes import locate
from enjoyln_cli.models.norm_probe import LayerNormForm, layer_norm_form
from enjoyln_cli.runtime.modules import Folded, affine
from enjoyln_cli.text import first_line

LABELS = {
    "original": "original",
    "folded": "folded",
    "torch_rms_norm": "torch's RMSNorm",
    "no_norm": "no norm",
}
"""From each model's name in JSON to its name in tables."""
COLUMNS = tuple(LABELS)
RECOMPILED = 64
"""How often one function may be compiled: once for each model, phase and size."""


def share_weights(model: Any) -> Any:
    """A copy of a model with new modules, which shares all weights with the model."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def variants(original: Any, folded: Any, norms: Iterable[str]) -> dict[str, nn.Module]:
    """From each of ``COLUMNS`` to its model; ``norms`` are the paths of all LayerNorms.

    The paths may start in a class that contains the model's class; see ``classes.locate``.
    """
    no_norm, with_torch, names = share_weights(original), share_weights(folded), tuple(norms)
    for path in (locate(original, name, names) for name in names):
        form = None if path is None else layer_norm_form(original.get_submodule(path))
        if path is None or form is None:
            continue
        _replace_forward(no_norm.get_submodule(path), _return_input)
        if isinstance(with_torch.get_submodule(path), Folded):
            _replace_forward(with_torch.get_submodule(path), _torch_forward(form))
    return dict(zip(COLUMNS, (original, folded, with_torch, no_norm), strict=True))


def _replace_forward(module: nn.Module, forward: Callable[..., torch.Tensor]) -> None:
    """Give a module another ``forward``; other code can still read its attributes."""
    module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})


def _return_input(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return x


def _torch_forward(form: LayerNormForm) -> Callable[..., torch.Tensor]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        gain, bias = affine(self, form)
        x = x.movedim(form.dim, -1)
        y = F.rms_norm(x, x.shape[-1:] if gain is None else gain.shape, gain, form.eps)
        return (y if bias is None else y + bias).to(x.dtype).movedim(-1, form.dim)

    return forward


def in_mode(models: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """The models, prepared for ``mode``. They are compiled when they are first called."""
    if mode == "eager":
        return dict(models)
    return {name: torch.compile(share_weights(model)) for name, model in models.items()}


@contextmanager
def fresh_compiler(mode: str) -> Iterator[None]:
    """Compile models again within the block, without earlier results.

    Raises ``UnsupportedModel``, with one line, if the compiler fails.
    """
    if mode == "eager":
        yield
        return
    torch._dynamo.reset()
    chatter = logging.getLogger("torch._dynamo")  # it lists code that is not compiled
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
