"""Load a model, run it, and say how far two runs are apart.

Decides what is compared: every floating tensor that ``forward`` returns by default, the cache
apart, or of these the outputs that a user has chosen (how far they are apart: ``distances``). A run
is exact when weights, activations and every place where a class asks for float32 are in float64.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import shutil
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from enjoyln_cli.calls import dtype_of
from enjoyln_cli.classes import apply_experts, build, class_named
from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel
from enjoyln_cli.inputs import Batch, masked
from enjoyln_cli.kernels import literally
from enjoyln_cli.offload import Offload, Reader, on_disk, read_when_needed
from enjoyln_cli.returned import CACHE, by_field, named_by

Outputs = list[dict[str, torch.Tensor]]
"""One dict per batch: the name of an output to its values, on the CPU or mapped from the disk."""


class Float64(TorchFunctionMode):
    """Float32 means float64: softmax, rotary angles and norms that widen keep up with the rest."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **wide)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def load(
    folder: Path,
    model_class: str,
    config: Any,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    offload: Offload | None = None,
    missing: set[str] | None = None,
) -> Any:
    """The checkpoint in ``folder`` as ``model_class``, in eval mode on the CPU.

    In float64 everything is float64; otherwise transformers decides what stays in float32. Weights
    that the checkpoint does not hold get values that depend on their name alone and are exact in
    every dtype; ``missing`` receives their names. With ``offload`` weights stay on the disk until
    they are needed. Raises ``BadCheckpoint`` where transformers cannot load the directory.
    """
    cls: Any = _class(folder, model_class, config, trust_remote_code)
    where: dict[str, Any] = {}
    if offload:
        again = offload.folder / "weights"
        shutil.rmtree(again, ignore_errors=True)
        where = {"device_map": {"": "disk"}, "offload_folder": again}
    with silent():
        try:
            model, info = cls.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                output_loading_info=True,
                local_files_only=True,
                **where,
            )
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # of transformers, which believes what the files say
            first = str(error).strip().split("\n")[0]
            known = isinstance(error, OSError | RuntimeError | ValueError)
            what = first if known else f"{type(error).__name__}: {first}"
            raise BadCheckpoint(f"{folder}: {model_class} cannot be loaded: {what}") from error
    reader = read_when_needed(model, offload.room) if offload else None
    values = values_of(model)
    for name in info["missing_keys"]:
        if name not in values or not values[name].is_floating_point():
            continue
        fill(values[name], name, reader, name)
        if missing is not None:
            missing.add(name)
    if dtype == torch.float64:
        model = _in_float64(model)
    return model.eval()


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, under each of its names."""
    found: dict[str, torch.Tensor] = dict(model.named_buffers(remove_duplicate=False))
    found.update(model.named_parameters(remove_duplicate=False))
    return found


def fill(tensor: torch.Tensor, name: str, reader: Reader | None, seed: str) -> None:
    """Give a weight made-up values, which depend on the text ``seed`` alone."""
    if reader and tensor.is_meta:
        reader.make(name, partial(_filling, seed, tensor.shape))
        return
    with torch.no_grad():
        tensor.copy_(_filling(seed, tensor.shape))


def elements(
    folder: Path, model_class: str, config: Any, trust_remote_code: bool = False
) -> dict[str, int]:
    """How many each parameter of ``model_class`` has, by name. No weights are read."""
    model = build(_class(folder, model_class, config, trust_remote_code), config)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def _in_float64(model: Any) -> Any:
    """All in float64; experts are applied one by one, as grouped products do not know the dtype."""
    with silent():
        apply_experts(model, "eager")
    return model.double()


def _class(folder: Path, name: str, config: Any, trust_remote_code: bool) -> type:
    for reference in (getattr(config, "auto_map", None) or {}).values():
        if trust_remote_code and str(reference).rpartition(".")[2] == name:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            return get_class_from_dynamic_module(reference, folder)
    return class_named(name)


def _filling(name: str, shape: Sequence[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = 0.02 * torch.randn(tuple(shape), generator=generator)
    return values.to(torch.bfloat16).to(torch.float16)


@contextmanager
def silent() -> Iterator[None]:
    """transformers and accelerate without progress bars and notes on the weights they load."""
    if os.environ.get("ENJOYLN_DEBUG"):
        yield
        return
    from transformers.utils import logging as chatter

    level, bars = chatter.get_verbosity(), chatter.is_progress_bar_enabled()
    hub = chatter.hf_hub_utils  # whose bars transformers switches along with its own
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


def run(model: nn.Module, batches: Sequence[Batch], folder: Path | None = None) -> Outputs:
    """What ``model`` returns for every batch, in the dtype in which it returns it.

    Floating inputs are cast to the model's dtype. A float64 model runs exactly (``Float64``). With
    a ``folder`` outputs are kept on its disk.
    """

    def kept(value: torch.Tensor) -> torch.Tensor:
        return on_disk(value, folder) if folder else value.cpu()

    dtype = dtype_of(model)
    outputs: Outputs = []
    with torch.no_grad(), silent(), literally():
        for batch in batches:
            given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
            if dtype == torch.float64:
                with Float64():
                    output = model(**given, **_flags(model))
            else:
                output = model(**given, **_flags(model))
            outputs.append({name: kept(value) for name, value in tensors(output)})
            del output
    return outputs


def _flags(model: Any) -> dict[str, Any]:
    """No cache: it would be kept in memory and is not compared."""
    return {"use_cache": False} if getattr(model.config, "use_cache", None) is not None else {}


def tensors(output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Floating tensors of a model's output with their names, without the cache and losses."""
    for name, values in by_field(output).items():
        for value in values:
            if value.is_floating_point() and value.ndim and CACHE not in name.split("."):
                yield name, value


def chosen(outputs: Outputs, names: Sequence[str]) -> Outputs:
    """The outputs that ``names`` (or patterns) choose; all of them where there are no names.

    Raises ``UnsupportedModel`` where a batch then has nothing to compare.
    """
    if not names:
        return outputs
    kept = [
        {name: value for name, value in batch.items() if name in named_by(names, batch)}
        for batch in outputs
    ]
    if not all(kept):
        known = ", ".join(dict.fromkeys(name for batch in outputs for name in batch))
        raise UnsupportedModel(
            f"nothing to compare: the model returns {known}, and {', '.join(names)} matches "
            "none of these"
        )
    return kept


def divergence(got: Outputs, own: Outputs) -> tuple[float | None, float | None]:
    """Mean KL divergence of the folded model's logits from the original's, and top-1 agreement.

    Over the last dimension of the output ``logits``, in nats; ``(None, None)`` where there is none.
    """
    total = agreed = 0.0
    count = 0
    for a, b in zip(got, own, strict=True):
        if "logits" not in b or b["logits"].shape[-1] < 2 or a["logits"].shape != b["logits"].shape:
            return None, None
        width = b["logits"].shape[-1]
        rows = max(1, (1 << 22) // width)
        folded, original = a["logits"].reshape(-1, width), b["logits"].reshape(-1, width)
        for x, y in zip(folded.split(rows), original.split(rows), strict=True):
            p, q = y.double().log_softmax(-1), x.double().log_softmax(-1)
            total += float((p.exp() * (p - q)).nan_to_num().sum())
            agreed += float((x.argmax(-1) == y.argmax(-1)).sum())
            count += len(x)
    return (total / count, agreed / count) if count else (None, None)


def head_kind(model: nn.Module) -> str:
    """``causal`` or ``masked``: what a text can be scored by. ``UnsupportedModel`` for others."""
    from transformers.models.auto import modeling_auto as auto

    name = type(model).__name__
    if name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or name.endswith("ForCausalLM"):
        return "causal"
    if name in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values() or name.endswith("ForMaskedLM"):
        return "masked"
    raise UnsupportedModel(f"{name} has no language head, so --text gives no perplexity")


def perplexity(
    model: nn.Module, batches: Sequence[Batch], mask_token: int | None, seed: int
) -> tuple[float, int]:
    """Exponential of the mean loss per token in float64, and the number of tokens it is over.

    Causal heads predict each next token; masked heads the 15 % of tokens that are masked.
    """
    kind, loss, count = head_kind(model), 0.0, 0
    if kind == "masked" and mask_token is None:
        raise UnsupportedModel("the tokenizer has no mask token, so --text gives no perplexity")
    for index, batch in enumerate(batches):
        ids = batch["input_ids"]
        chosen = torch.ones_like(ids[:, 1:], dtype=torch.bool)
        if kind == "masked":
            batch, chosen = masked(batch, int(mask_token or 0), seed + index)
        (output,) = run(model, [batch])
        for row, (logits, target, use) in enumerate(
            zip(output["logits"], ids if kind == "masked" else ids[:, 1:], chosen, strict=True)
        ):
            del row
            wanted = logits[: len(target)][use].double().log_softmax(-1)
            loss -= float(wanted.gather(1, target[use][:, None]).sum())
            count += int(use.sum())
    return math.exp(min(loss / max(count, 1), 700.0)), count


def release(gone: weakref.ref[Any]) -> None:
    """Make sure that a model without names is out of memory before the next one is loaded."""
    if gone() is not None:
        gc.collect()
