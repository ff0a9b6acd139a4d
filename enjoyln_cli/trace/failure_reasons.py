"""Explain in one sentence why a model could not be traced, from the exception.

The sentence says where in the model's code it happened, what the code does there, and what to do
instead. The first line of the exception follows in parentheses, for readers who know torch.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from torch import nn

from enjoyln_cli.errors import EnjoyLNError, TraceFailed

_MAX_QUOTED_CHARS = 120
"""At most this many characters of the exception are shown."""
_NOT_THE_MODELS = sys.stdlib_module_names | {
    "torch", "numpy", "enjoyln_cli", "transformers.exporters", "onnxscript", "onnx_ir", "openvino"
}  # fmt: skip
"""Libraries, and packages in them, whose code calls the model's code."""

_NOWHERE = "the model"
_RUNS = "make sure that the model runs with them"
_CAUSES = [
    (
        r"cannot cast .* to number|data-dependent|item\(\)|tolist\(\)|is_nonzero|boolean value of"
        r"|local_scalar_dense|unbacked",
        "needs a tensor's value as a Python number, or in an if, a loop or a shape",
        "compute with the tensor itself, for instance with torch.where",
    ),
    (
        r"numpy",
        "makes a NumPy array of a tensor",
        "use the functions of torch there",
    ),
    (
        r"writes what has no values into what has",
        "writes computed values into a tensor that is not a parameter or buffer of the model",
        "register that tensor as a buffer",
    ),
    (
        r"couldn't swap",
        "converts a module to another dtype",
        "convert it once, before the first call",
    ),
    (
        r"storage|data_ptr|data pointer|'meta' device type|\.data\b",
        "reads or replaces the memory of a tensor",
        "compute with the tensor itself, and not with its .data, storage or pointer",
    ),
    (
        r"higherorderoperator|torch\.cond|while_loop|active mode .* not registered",
        "uses a control flow operator of torch, which cannot be recorded",
        "choose with torch.where, or with an if on a plain Python number",
    ),
    (
        r"dynamicoutputshape|dynamic output shape|nonzero|shape mismatch: value tensor",
        "makes a tensor whose shape depends on values",
        "use a mask of a fixed shape",
    ),
]
"""A pattern of the exception's text, what the code does to cause it, and what to do instead."""


def say_why(error: BaseException) -> str:
    """One sentence for an exception raised by a model's code, or by torch while tracing it."""
    if isinstance(error, EnjoyLNError):
        return str(error)
    place, raised_there = _place(error)
    does, do = _cause(error) or ("fails with these inputs", _RUNS)
    if raised_there:
        does, do = "raises an error with these inputs", _RUNS
    return f"{place} {does}; {do} ({_text(error)})"


def say_why_not_exported(error: BaseException) -> str | None:
    """Where and why the code of a model that runs cannot be exported; ``None`` for other errors.

    An exporter raises an exception of its own, caused by the model's exception.
    """
    found = None
    while error is not None:
        place, raised_there = _place(error)
        if place != _NOWHERE:
            does = None if raised_there else _cause(error)
            found = f"{place} {does[0] if does else 'fails in an export'} ({_text(error)})"
        error = error.__cause__  # type: ignore[assignment]
    return found


def _cause(error: BaseException) -> tuple[str, str] | None:
    """What the code does to cause an exception, and what to do instead."""
    text = _whole_text(error)
    causes = ((does, do) for pattern, does, do in _CAUSES if re.search(pattern, text, re.I))
    return next(causes, None)


def _text(error: BaseException) -> str:
    text = _whole_text(error)
    return text if len(text) <= _MAX_QUOTED_CHARS else f"{text[:_MAX_QUOTED_CHARS]}..."


def _whole_text(error: BaseException) -> str:
    text = re.sub(r"0x[0-9a-f]+", "...", str(error).strip().partition("\n")[0])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _place(error: BaseException) -> tuple[str, bool]:
    """The last function of the model's own code with its line, and whether it raised the error."""
    place, raised_there = _NOWHERE, False
    for frame, line, step in _steps(error.__traceback__):
        raised_there = False
        first, _, rest = str(frame.f_globals.get("__name__")).partition(".")
        names = {first, f"{first}.{rest.partition('.')[0]}"}
        if _NOT_THE_MODELS.isdisjoint(names):
            code = frame.f_code
            name = str(getattr(code, "co_qualname", code.co_name)).rpartition("<locals>.")[2]
            place = f"{name.replace('<lambda>', 'a lambda')}, line {line},"
            raised_there = dis.opname[code.co_code[step]] == "RAISE_VARARGS"
    return place, raised_there


def _steps(found: TracebackType | None) -> Iterator[tuple[FrameType, int, int]]:
    while found is not None:
        yield found.tb_frame, found.tb_lineno, found.tb_lasti
        found = found.tb_next


@contextmanager
def foreign_code(model: nn.Module) -> Iterator[None]:
    """Make any exception of the model's code, or of torch, inside the block a ``TraceFailed``."""
    try:
        yield
    except EnjoyLNError:
        raise
    except Exception as error:
        raise TraceFailed(
            f"{type(model).__name__} could not be analysed: {say_why(error)}"
        ) from error
