"""What the code of a model asks about the call that runs it: gradients, autocast, a compiler.

A graph tells what a call computes under the answers that there are while it is traced. A later call
may have others, and take another branch where no argument tells. So a model whose code asks one of
these questions is refused by name. Torch, transformers and the libraries that carry their models
out ask them to choose how to compute something, and not what.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn

NAMES = (
    "torch.is_grad_enabled", "torch.is_inference_mode_enabled",
    "torch.is_autocast_enabled", "torch.is_autocast_cpu_enabled",
    "torch.get_autocast_dtype", "torch.get_autocast_gpu_dtype", "torch.get_autocast_cpu_dtype",
    "torch.get_default_dtype", "torch.get_default_device",
    "torch.are_deterministic_algorithms_enabled", "torch.get_deterministic_debug_mode",
    "torch.get_num_threads", "torch.get_num_interop_threads",
    "torch.get_float32_matmul_precision", "torch.is_anomaly_enabled",
    "torch.compiler.is_compiling", "torch.compiler.is_dynamo_compiling",
    "torch.compiler.is_exporting", "torch._dynamo.is_compiling", "torch._utils.is_compiling",
    "transformers.utils.is_torchdynamo_compiling", "transformers.utils.is_torchdynamo_exporting",
    "transformers.utils.import_utils.is_tracing",
)  # fmt: skip
"""Functions whose answer may be another in a later call."""
OF_TENSORS = {"requires_grad", "is_leaf", "grad_fn", "is_inference", "data_ptr"}
"""What a computed tensor tells of the same, or of where it lies."""
HOMES = ("torch", "transformers", "enjoyln_cli", "accelerate", "peft", "bitsandbytes")
"""Packages whose code may ask."""


def from_outside(caller: FrameType | None) -> bool:
    """Whether the code of a frame belongs to none of ``HOMES``."""
    return caller is not None and not _is_home(caller.f_globals.get("__name__"))


def _is_home(module: Any) -> bool:
    """Whether the name of a Python module is that of one in ``HOMES``."""
    return str(module).partition(".")[0] in HOMES


@contextmanager
def watch_mode_queries(model: nn.Module) -> Iterator[dict[str, None]]:
    """Within it, the names of the functions that code from outside of ``HOMES`` asks are collected.

    They are watched where they are called, however that code has come by them. A model that
    holds no such code is not watched: that takes about as long as the trace.
    """
    found: dict[str, None] = {}
    if all(map(_is_at_home, _code_of(model))):
        yield found
        return
    functions = {name: _function(name) for name in NAMES}
    written_in_c = {id(one): name for name, one in functions.items()}
    codes = {id(getattr(one, "__code__", one)): name for name, one in functions.items()}

    def note(frame: FrameType, event: str, function: Any) -> None:
        caller: FrameType | None
        if event == "c_call":
            name, caller = written_in_c.get(id(function)), frame
        else:
            name, caller = codes.get(id(frame.f_code)) if event == "call" else None, frame.f_back
        if name is not None and from_outside(caller):
            found[name] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        if callable(before):
            sys.setprofile(before)
        elif before is not None:
            before.enable()  # of cProfile


def _function(name: str) -> Any:
    """The function of this name; something that nobody calls where there is none."""
    home, _, last = name.rpartition(".")
    return getattr(sys.modules.get(home), last, last)


def _code_of(model: nn.Module) -> Iterator[Any]:
    """The classes of modules, and the functions that calls of these run."""
    for module in model.modules():
        yield from (type(module), type(module).forward, vars(module).get("forward"))
        yield from (*module._forward_pre_hooks.values(), *module._forward_hooks.values())


def _is_at_home(code: Any) -> bool:
    while hasattr(code, "func"):  # of functools.partial
        code = code.func
    return code is None or _is_home(getattr(code, "__module__", type(code).__module__))
