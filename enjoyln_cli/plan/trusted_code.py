"""Whose code is trusted, by the name of the Python module that defines it.

Trust is needed in two places. A hook may change what a module computes, unless it comes from code
that only records, moves weights or asks for gradients. And a model may use its arguments in any
way, unless all of its classes follow the conventions of transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

HOOKS = (
    "enjoyln_cli",
    "torch.distributed.fsdp",
    "torch.utils",
    "transformers.debug_utils",
    "transformers.integrations.neftune",
    "transformers.modeling_utils",
    "transformers.utils.output_capturing",
)
"""Their hooks change no values in eval mode: they record, request gradients or gather split
weights."""
MODELS = ("transformers",)
"""Their models follow transformers' conventions about arguments."""
LAYERS = ("torch", "timm")
"""Their modules are parts of transformers' own models (timm: the backbones of DETR)."""


def foreign_hooks(hooks: Iterable[Any]) -> list[Any]:
    """The ``hooks`` that code outside of ``HOOKS`` defines."""
    return [hook for hook in hooks if not _is_from(_home(hook), HOOKS)]


def _home(hook: Any) -> str:
    while hasattr(hook, "func"):  # functools.partial
        hook = hook.func
    return str(getattr(hook, "__module__", ""))


def is_stock(model: nn.Module) -> bool:
    """Whether all modules are transformers' own classes, or layers of torch and timm."""
    return is_defined_in(type(model), MODELS) and all(
        is_defined_in(type(module), (*MODELS, *LAYERS)) for module in model.modules()
    )


def is_defined_in(cls: type, packages: tuple[str, ...]) -> bool:
    """Whether a class and its ``forward`` are both defined in one of ``packages``."""
    code = getattr(cls, "forward", cls)
    homes = (cls.__module__, getattr(code, "__module__", cls.__module__))
    return all(_is_from(home, packages) for home in homes)


def _is_from(home: str, packages: tuple[str, ...]) -> bool:
    return any(f"{home}.".startswith(f"{package}.") for package in packages)
