"""Load a model with transformers, in any dtype: in memory, or with weights left on disk."""

from __future__ import annotations

import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from enjoyln_cli.errors import BadCheckpoint, EnjoyLNError
from enjoyln_cli.models.classes import apply_experts, class_named
from enjoyln_cli.models.offload import Offload, read_when_needed
from enjoyln_cli.text import first_line


def load(
    folder: Path,
    model_class: Any,
    config: Any,
    dtype: torch.dtype,
    offload: Offload | None = None,
    missing: set[str] | None = None,
) -> Any:
    """Load the checkpoint in ``folder`` as ``model_class``, in eval mode on the CPU.

    With ``dtype`` float64 the whole model is float64; otherwise transformers may keep some weights
    in float32. Weights that are missing in the checkpoint get values that depend only on their
    name and are exact in every dtype; their names are added to ``missing``. With ``offload``,
    weights stay on disk until they are needed. Raises ``BadCheckpoint`` if transformers cannot load
    the directory.
    """
    where: dict[str, Any] = {}
    if offload:
        weights = offload.folder / "weights"
        shutil.rmtree(weights, ignore_errors=True)
        where = {"device_map": {"": "disk"}, "offload_folder": weights}
    words = f"{folder}: {model_class.__name__} cannot be loaded"
    with silent(), refusing(BadCheckpoint, words):  # transformers does not check files
        model, info = model_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            local_files_only=True,
            **where,
        )
    reader = read_when_needed(model, offload.free_bytes) if offload else None
    values = values_of(model)
    for name in info["missing_keys"]:
        if name not in values or not values[name].is_floating_point():
            continue
        make = partial(_filling, name, values[name].shape)
        if reader and values[name].is_meta:
            reader.make(name, make)
        else:
            values[name].data.copy_(make())
        if missing is not None:
            missing.add(name)
    if dtype == torch.float64:
        model = _in_float64(model)
    return model.eval()


def said_by(error: BaseException) -> str:
    """The first line of an exception; its type comes first if the line alone may say nothing."""
    says_enough = isinstance(error, OSError | RuntimeError | ValueError)
    return first_line(error) if says_enough else f"{type(error).__name__}: {first_line(error)}"


@contextmanager
def refusing(
    kind: type[EnjoyLNError], words: str, why: Callable[[Exception], str] = said_by
) -> Iterator[None]:
    """Turn any exception of a library or of a model's code into ``kind``, inside the block.

    Its message is ``words`` and, after a colon, ``why`` of the exception. A lack of memory and the
    refusals of this package stay what they are.
    """
    try:
        yield
    except (EnjoyLNError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # neither checks what it is given, and both may raise anything
        raise kind(f"{words}: {why(error)}") from error


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers by name; a shared tensor appears under each of its names."""
    values: dict[str, torch.Tensor] = dict(model.named_buffers(remove_duplicate=False))
    values.update(model.named_parameters(remove_duplicate=False))
    return values


def stored_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a plan may edit: all parameters, then the floating-point buffers that are stored.

    They are listed by name; a shared tensor appears under each of its names.
    """
    weights: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            stored = name not in module._non_persistent_buffers_set
            if buffer is not None and stored and buffer.is_floating_point():
                weights[f"{path}.{name}" if path else name] = buffer
    return weights


def _in_float64(model: Any) -> Any:
    """The model in float64, which computes experts singly: grouped products lack float64."""
    with silent():
        apply_experts(model, "eager")
    return model.double()


def class_in(
    folder: Path | str, name: str, config: Any, trust_remote_code: bool, **access: Any
) -> Any:
    """The class ``name`` of the code that comes with a checkpoint, or else of transformers.

    ``access`` are arguments that loading this code takes, such as ``revision``.
    """
    for reference in (getattr(config, "auto_map", None) or {}).values():
        if trust_remote_code and str(reference).rpartition(".")[2] == name:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            return get_class_from_dynamic_module(reference, folder, **access)
    return class_named(name)


def _filling(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Random values for a weight, which depend only on its ``name``."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = 0.02 * torch.randn(tuple(shape), generator=generator, dtype=torch.float32)
    return values.to(torch.bfloat16).to(torch.float16)


@contextmanager
def silent() -> Iterator[None]:
    """Keep transformers and accelerate from printing bars and messages inside the block."""
    if os.environ.get("ENJOYLN_DEBUG"):
        yield
        return
    from transformers.utils import logging as chatter

    level, bars = chatter.get_verbosity(), chatter.is_progress_bar_enabled()
    hub = chatter.hf_hub_utils  # transformers switches the bars of the Hub along with its own
    hidden = hub.are_progress_bars_disabled()
    placing = logging.getLogger("accelerate")
    before = placing.level
    placing.setLevel(logging.CRITICAL)
    chatter.set_verbosity(logging.CRITICAL)
    chatter.disable_progress_bar()
    try:
        yield
    finally:
        chatter.set_verbosity(level)
        placing.setLevel(before)
        if bars:
            chatter.enable_progress_bar()
        if hidden:
            hub.disable_progress_bars()
