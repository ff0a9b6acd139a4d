"""Detect custom code that queries global modes: gradients, autocast, a compiler, default dtypes.

A graph is valid for the modes during the trace. In a later call they may differ, and the code may
take another branch although all arguments are the same. So a model whose own code calls one of
these functions is refused, and the function is named. Code of torch, transformers and related
libraries (``HOMES``) is exempt: it uses these modes to choose how to compute something, not what.
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
"""Functions whose result may differ in a later call."""
OF_TENSORS = {"requires_grad", "is_leaf", "grad_fn", "is_inference", "data_ptr"}
"""Properties of computed tensors that depend on these modes, or on memory addresses."""
HOMES = ("torch", "transformers", "enjoyln_cli", "accelerate", "peft", "bitsandbytes")
"""Packages whose code may use these functions."""


def from_outside(caller: FrameType | None) -> bool:
    """Whether the code of a frame is custom code, i.e. belongs to none of ``HOMES``."""
    return caller is not None and not _is_home(caller.f_globals.get("__name__"))


def _is_home(module: Any) -> bool:
    """Whether a Python module, given by name, belongs to one of ``HOMES``."""
    return str(module).partition(".")[0] in HOMES


@contextmanager
def watch_mode_queries(model: nn.Module) -> Iterator[dict[str, None]]:
    """Inside the block, collect the names of those functions in ``NAMES`` that custom code calls.

    Calls are observed by a profile function, so it does not matter under which name the code holds
    a function. A model without custom code is not observed, since this doubles the time of a trace.
    """
    found: dict[str, None] = {}
    if all(map(_is_at_home, _code_of(model))):
        yield found
        return
    functions = {name: _function(name) for name in NAMES}
    written_in_c = {id(one): name for name, one in functions.items()}
    codes = {id(getattr(one, "__code__", one)): name for name, one in functions.items()}

    def note(frame: FrameType, event: str, function: Any) -> None:  # runs millions of times
        if event == "c_call":
            if id(function) in written_in_c and from_outside(frame):
                found[written_in_c[id(function)]] = None
        elif event == "call" and id(frame.f_code) in codes and from_outside(frame.f_back):
            found[codes[id(frame.f_code)]] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        if callable(before):
            sys.setprofile(before)
        elif before is not None:
            before.enable()  # cProfile


def _function(name: str) -> Any:
    """The function of this name; if there is none, an object that is never called."""
    home, _, last = name.rpartition(".")
    return getattr(sys.modules.get(home), last, last)


def _code_of(model: nn.Module) -> Iterator[Any]:
    """The classes of all modules, and the functions that run when they are called."""
    for module in model.modules():
        yield from (type(module), type(module).forward, vars(module).get("forward"))
        yield from (*module._forward_pre_hooks.values(), *module._forward_hooks.values())


def _is_at_home(code: Any) -> bool:
    while hasattr(code, "func"):  # unwrap functools.partial
        code = code.func
    return code is None or _is_home(getattr(code, "__module__", type(code).__module__))
