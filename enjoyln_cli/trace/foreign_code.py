"""Errors of a live module's own code while it is analysed become one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from enjoyln_cli.errors import EnjoyLNError, TraceFailed
from enjoyln_cli.trace.failure_reasons import say_why


@contextmanager
def foreign_code(model: nn.Module) -> Iterator[None]:
    """Inside the block, any exception of the model's code, or of torch, becomes ``TraceFailed``.

    If torch compiled a function meanwhile (as for ``torch.cond``), all compiled functions are
    dropped, because torch allows only a few compiled forms of each; the next call compiles again.
    """
    compiled = _graphs_compiled()
    try:
        yield
    except EnjoyLNError:
        raise
    except Exception as error:
        raise TraceFailed(
            f"{type(model).__name__} could not be analysed: {say_why(error)}"
        ) from error
    finally:
        if _graphs_compiled() != compiled:
            torch.compiler.reset()


def _graphs_compiled() -> int:
    """How many graphs ``torch.compile`` has captured in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0
