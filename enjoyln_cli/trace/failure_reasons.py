"""Why code could not be recorded, as one sentence, from the exception that it ended in.

The sentence says where in the model's own code that was, what is done there, and what to do
instead. The first line of the exception comes last, for whoever knows torch.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType

from enjoyln_cli.errors import EnjoyLNError

_LONGEST = 120
"""Characters of the exception that are shown."""
_NOT_THE_MODELS = sys.stdlib_module_names | {"torch", "numpy", "enjoyln_cli"}

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
        "writes what it computes into a tensor that is no parameter or buffer of the model",
        "register that tensor as a buffer",
    ),
    (
        r"storage|data_ptr|data pointer|'meta' device type|\.data\b",
        "reads or replaces the memory of a tensor",
        "compute with the tensor itself, and not with its .data, storage or pointer",
    ),
    (
        r"higherorderoperator|torch\.cond|while_loop",
        "uses a control flow operator of torch that cannot be recorded with these inputs",
        "choose with torch.where, or with an if on a number that is no tensor",
    ),
    (
        r"dynamicoutputshape|dynamic output shape|nonzero|shape mismatch: value tensor",
        "makes a tensor whose shape depends on values",
        "use a mask of a fixed shape",
    ),
    (
        r"^keyerror: \w+\(",
        "calls a copy of a module that it made in this call",
        "make the copy once, in __init__",
    ),
]
"""What an exception says, what the code does that ends in it, and what can be done."""


def say_why(error: BaseException) -> str:
    """One sentence for an exception of a model's code, or of torch while it records that code."""
    if isinstance(error, EnjoyLNError):
        return str(error)
    text = re.sub(r"0x[0-9a-f]+", "...", str(error).strip().partition("\n")[0])
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    causes = ((does, do) for said, does, do in _CAUSES if re.search(said, text, re.IGNORECASE))
    does, do = next(causes, ("fails with these inputs", _RUNS))
    place, itself = _place(error)
    if itself:
        does, do = "raises an error with these inputs", _RUNS
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"{place} {does}; {do} ({shown})"


def _place(error: BaseException) -> tuple[str, bool]:
    """The last function of the model's own code with its line, and whether it raised the error."""
    place, itself = "the model", False
    for frame, line, step in _steps(error.__traceback__):
        itself = False
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_THE_MODELS:
            code = frame.f_code
            name = str(getattr(code, "co_qualname", code.co_name)).rpartition("<locals>.")[2]
            place = f"{name.replace('<lambda>', 'a lambda')}, line {line},"
            itself = dis.opname[code.co_code[step]] == "RAISE_VARARGS"
    return place, itself


def _steps(found: TracebackType | None) -> Iterator[tuple[FrameType, int, int]]:
    while found is not None:
        yield found.tb_frame, found.tb_lineno, found.tb_lasti
        found = found.tb_next
