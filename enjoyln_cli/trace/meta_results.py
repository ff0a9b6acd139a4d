"""A cache for results of operations on the meta device.

On the meta device, an operation only computes layouts: shapes, strides and dtypes. The layouts of
new tensors depend on the operands' layouts alone, so they are computed once. This makes models with
many equal layers twice as fast to trace. Views of operands are made anew each time.
"""

from __future__ import annotations

from typing import Any

import torch

from enjoyln_cli.models.meta_device import tensors_of
from enjoyln_cli.models.norm_modules import PLAIN_TENSORS

MAX_RESULTS = 20_000
_VALUES = (
    bool, int, float, complex, str, type(None),
    torch.device, torch.dtype, torch.layout, torch.memory_format,
)  # fmt: skip

_New = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor with memory of its own."""

_results: dict[Any, tuple[Any, list[_New]]] = {}
"""What an operation returns (``torch.Tensor``, ``tuple`` or ``list``), and the layout of each
tensor."""


class _Unknown(Exception):
    """The result does not only depend on the layouts of the operands."""


def compute(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)``, from the cache if operands of the same layout were seen before."""
    try:
        key = _key_of(func, args, kwargs)
    except _Unknown:
        return func(*args, **kwargs)
    if known := _results.get(key):
        made = [
            torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            for shape, strides, dtype in known[1]
        ]
        return made[0] if known[0] is torch.Tensor else known[0](made)
    value = func(*args, **kwargs)
    if (layouts := _layouts(value, (args, kwargs))) is not None:
        if len(_results) >= MAX_RESULTS:
            _results.clear()
        _results[key] = type(value), layouts
    return value


def _key_of(func: Any, args: Any, kwargs: Any) -> Any:
    """A key with everything that the result of an op depends on.

    Raises ``_Unknown`` if the result may depend on more, such as an active mode or transform.
    """
    if (
        func.namespace != "aten"
        or torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
        or torch._C._is_any_autocast_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        raise _Unknown
    kernels = (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )
    return func, _described((args, *kwargs.items())), torch.get_default_dtype(), kernels


def _described(value: Any) -> Any:
    kind = type(value)
    if kind in _VALUES:
        return kind, value
    if kind in PLAIN_TENSORS and is_plain(value):
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    if kind is tuple or kind is list:
        return kind, *[_described(part) for part in value]
    raise _Unknown


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor of torch's own class has no values, and strides in place of any."""
    strided = type(tensor) in PLAIN_TENSORS and tensor.is_meta and tensor.layout == torch.strided
    return strided and not (tensor.is_conj() or tensor.is_neg())


def _layouts(value: Any, given: Any) -> list[_New] | None:
    """The layouts of the tensors in ``value``; ``None`` unless each has all of its own memory."""
    parts = list(value) if type(value) in (tuple, list) else [value]
    if not all(type(part) is torch.Tensor and is_plain(part) for part in parts):
        return None
    memory = {x.untyped_storage()._cdata for x in tensors_of(given)}
    layouts: list[_New] = []
    for part in parts:
        storage = part.untyped_storage()
        layout = (tuple(part.shape), part.stride(), part.dtype)
        whole = torch.empty_strided(layout[0], layout[1], dtype=part.dtype, device="meta")
        if (
            storage._cdata in memory
            or part.storage_offset()
            or storage.nbytes() != whole.untyped_storage().nbytes()
        ):
            return None
        memory.add(storage._cdata)
        layouts.append(layout)
    return layouts
