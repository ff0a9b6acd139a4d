"""Which call of a folded model is running in this thread, and may its norms compute RMSNorm?

They may inside of a call of a hooked model whose weights, modules and inputs have been looked at
and found to be those of the proof. Everywhere else the model computes what its stock class
computes, with LayerNorm and without explicit centrings: in a block or tower that is called by
itself, in another thread, in a backward pass that computes a forward again, in training mode. On
centred weights that is the same function, since a LayerNorm does not see that its input was
shifted.

The state of a call belongs to its thread. Dynamo reads, writes and guards an object that is held in
a ``threading.local`` as Python does, so compiled code asks the same question. (What is set on the
``threading.local`` itself it does not read again in the same graph.)
"""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType
from typing import Any, Protocol

from torch import nn
from torch._dynamo.comptime import comptime
from torch._dynamo.exc import SkipFrame
from torch.compiler import is_dynamo_compiling


class Running:
    """The calls of hooked models that are running in one thread."""

    def __init__(self) -> None:
        self.proven: Fold | None = None
        """The model whose norms may compute RMSNorm now."""
        self.looked = False
        """Whether the model of the innermost call is looked at each time that it is called.

        Where the call was compiled with the code around it, the look was taken once.
        """
        self.calls: tuple[Enter, Fold | None, bool, Any] | None = None
        """The innermost call, what was proven and looked at around it, and the call around it."""
        self.frame: FrameType | None = None
        """Where the outermost call began, unless that was compiled."""


class Thread(threading.local):
    """Each thread sees what runs in it."""

    def __init__(self) -> None:
        self.running = Running()


thread = Thread()


class Fold:
    """What the norms, the explicit centrings and the hooks of one folded model share."""

    def __init__(self) -> None:
        self.entries: list[Enter] = []


NOT_INSTALLED = Fold()
"""That of a norm which belongs to no hooked model: no call of it ever runs."""


class Look(Protocol):
    """Sets ``trouble`` and ``moved`` of an entry, after a look at its model."""

    def look(self, entry: Enter, model: nn.Module) -> None: ...


class Enter:
    """The forward pre-hook with which a call of a folded model begins; ``Leave`` ends it.

    A model called from within another call of the same ``fold`` belongs to that call.
    """

    def __init__(self, fold: Fold) -> None:
        self.fold = fold
        self.check: Look | None = None
        self.moved = False
        """Whether the model has been in training mode since its weights were looked at."""
        self.trouble = ""
        """Why the norms have to compute LayerNorm; empty if they need not."""

    def __call__(self, module: Any, args: Any) -> None:
        running = thread.running
        compiling = is_dynamo_compiling()
        if compiling:
            comptime(_run_when_called_alone)
        else:
            _forget_interrupted(running)
        above, around, looked = running.calls, running.proven, running.looked
        if above is not None and above[0].fold is self.fold:
            proven = around
        else:
            if module.training or self.check is None:
                pass
            elif compiling:
                comptime(_look_while_compiling)
            else:
                self.check.look(self, module)
            ready = not (module.training or self.moved or self.trouble)
            proven = self.fold if ready else None
            running.looked = not compiling
        if above is None and not compiling:
            running.frame = sys._getframe(1)
        running.calls = (self, around, looked, above)
        running.proven = proven


class Leave:
    """The forward hook, always called, that goes with ``Enter``."""

    def __init__(self, enter: Enter) -> None:
        self.enter = enter

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        running = thread.running
        if running.calls is None or running.calls[0] is not self.enter:
            return  # another pre-hook failed before the call began
        _, around, running.looked, above = running.calls
        within = above is not None and above[0].fold is self.enter.fold
        if not (within and running.proven is None):  # what was found inside counts around it, too
            running.proven = around
        running.calls = above
        if above is None and not is_dynamo_compiling():
            running.frame = None


def is_nested() -> bool:
    """Whether the innermost call runs inside of another call of the same model."""
    running = thread.running
    if running.calls is None:
        return False
    enter, _, _, above = running.calls
    return above is not None and above[0].fold is enter.fold


def compute_layer_norm() -> None:
    """The rest of the innermost call, and of those of the same model around it, is not proven."""
    thread.running.proven = None


def computes_layer_norm(fold: Fold) -> bool:
    """Whether norms of ``fold`` do so in the call that runs in this thread.

    Where none runs, whether a call has found a reason that still holds.
    """
    running = thread.running
    if running.calls is not None and running.calls[0].fold is fold:
        return running.proven is not fold
    return not fold.entries or any(entry.moved or entry.trouble for entry in fold.entries)


def _forget_interrupted(running: Running) -> None:
    """Ctrl-C ends a call without its hooks. Only a frame that has ended can be cleared.

    One that runs owns nothing yet, which is asked first, since it takes much less time.
    """
    if running.frame is None or not gc.get_referents(running.frame):
        return
    try:
        running.frame.clear()
    except RuntimeError:
        return
    running.proven = running.calls = running.frame = None
    running.looked = False


def _run_when_called_alone(context: Any) -> None:
    """The hook of a compiled model is a call of its own, which looks each time: it is not compiled.

    That of a model inside is compiled with the call around it.
    """
    if getattr(context, "_ComptimeContext__tx").parent is None:  # noqa: B009
        raise SkipFrame("looks at the model at every call")


def _look_while_compiling(context: Any) -> None:
    """Where Dynamo compiles the call of a hook: with the objects that its names stand for.

    Functions that Dynamo takes for constant get no such objects before torch 2.13.
    """
    entry, module = (
        context.get_local(name)._ComptimeVar__variable.value for name in ("self", "module")
    )
    entry.check.look(entry, module)
