"""Run the exporters of other libraries, which print and raise what they like."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.load import silent
from enjoyln_cli.text import first_line
from enjoyln_cli.trace.failure_reasons import say_why_not_exported


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers and other libraries from printing and warning inside the block."""
    with (
        silent(),
        warnings.catch_warnings(),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def exporting(model: Any, exporter: str, advice: str = "") -> Iterator[None]:
    """Let an ``exporter`` run on ``model`` inside the block, and print nothing.

    torch prints the whole graph that it has so far if it cannot export a model. Its cache of fake
    tensors, which costs more than it saves if sizes are symbols, is off. Any exception of the
    exporter or of the model's code becomes ``UnsupportedModel``, with ``advice`` behind it.
    """
    from torch._dynamo import config as uncached

    kind = type(model).__name__
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with torch.no_grad(), quiet(), uncached.patch(fake_tensor_cache_enabled=False):
            yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # the exporter and a model's code may raise anything
        why = say_why_not_exported(error) or _first_cause(error)
        raise UnsupportedModel(f"{exporter} cannot export {kind}: {why}{advice}") from error
    finally:
        log.setLevel(level)


def _first_cause(error: BaseException) -> str:
    """The first line of the exception that started it, with the next after a colon."""
    while error.__cause__ is not None:
        error = error.__cause__
    first, _, rest = str(error).strip().partition("\n")
    line = first_line(f"{first} {first_line(rest)}" if first.endswith(":") else first)
    return line if isinstance(error, RuntimeError) else f"{type(error).__name__}: {line}"


def exported(exporter: Any, model: Any, inputs: Mapping[str, Any], config: Any) -> Any:
    """The ``transformers.exporters.ExportedModel`` of one call of ``model`` with ``inputs``.

    ``exporter`` and ``config`` are an exporter of transformers and its settings. Raises
    ``UnsupportedModel`` if the model cannot be exported.
    """
    advice = "; --format torchao quantises a model without exporting it"
    with exporting(model, "transformers", advice):
        return exporter.export(model, dict(inputs), config)
