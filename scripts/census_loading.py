"""Does a folded checkpoint load through ``from_pretrained`` and ``optimize``, and run RMSNorm?"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from enjoyln_cli import from_pretrained
from enjoyln_cli.checkpoint.reader import open_checkpoint
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.models.classes import apply_experts
from enjoyln_cli.rewrite.directory import fold_checkpoint
from enjoyln_cli.runtime.modules import Folded


def loading(
    model: Any,
    plan: Any,
    runs: Iterable[Callable[[Any], Any]],
    outputs_of: Callable[..., list[Any]],
    differing: Callable[..., float],
    dtype: torch.dtype,
    bound: float,
) -> dict[str, Any]:
    """A row about the result of folding the checkpoint that ``model`` saves.

    ``loaded`` is "ok", or says in words why the result does not load or what it computes instead.
    ``loading_error`` is the largest relative difference to the stock class with the original
    weights, over the ``runs`` that this class accepts; rounding explains at most ``bound``. The
    first run that computes a norm decides which norm is computed: later runs may pass an input with
    which the plan is not proven.
    """
    name = type(model).__name__
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        source, out = Path(folder, "source"), Path(folder, "out")
        model.save_pretrained(source)
        stock = getattr(transformers, name).from_pretrained(source, dtype=dtype).eval()
        fold_checkpoint(open_checkpoint(open_source(str(source))), plan, out, recipe_text="")
        try:
            folded = from_pretrained(out, getattr(transformers, name), dtype=dtype).eval()
        except Exception as error:  # the row records it
            return {"loaded": f"{type(error).__name__}: {str(error).strip()[:300]}"}
        for one in (stock, folded):
            apply_experts(one)
        computed: set[bool] = set()

        def note(norm: Folded, *_: Any) -> None:
            computed.add(norm.shifted)

        note.__module__ = "enjoyln_cli.census"  # another hook would bring LayerNorm back
        for module in folded.modules():
            if isinstance(module, Folded):
                module.register_forward_hook(note)
        error, usual = 0.0, set[bool]()
        for run in runs:
            try:
                expected = outputs_of(run, stock, dtype)
            except Exception:  # not every model takes every optional input
                continue
            error = max(error, differing(outputs_of(run, folded, dtype), expected))
            usual = usual or set(computed)
    troubles = [str(one.message) for one in said if "computing LayerNorm" in str(one.message)]
    if troubles:
        loaded = troubles[0]
    elif usual != {False}:
        loaded = "computes LayerNorm" if usual else "runs no folded norm"
    else:
        loaded = "ok" if error <= bound else "differs"
    return {"loaded": loaded, "loading_error": error}
