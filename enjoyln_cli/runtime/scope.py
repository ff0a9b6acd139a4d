"""Which call of a folded model is running in this thread, and may its norms compute RMSNorm?

They may inside a call of a hooked model whose weights, modules and inputs were checked and match
the proof. Everywhere else the model computes what its stock class computes, with LayerNorm and
without explicit centrings: in a block or tower that is called directly, in another thread, in a
backward pass that computes a forward again (gradient checkpointing), in training mode. With centred
weights that is the same function, since LayerNorm ignores a shift of its input. The last two do not
hold for a model whose weights a parametrisation centres (see ``Fold.training_plan``).

The state of a call belongs to its thread. Compiled code reads the same state: Dynamo reads, writes
and guards attributes of an object that is stored in a ``threading.local`` as Python does. (It does
not do so for attributes of the ``threading.local`` itself, which it reads once per graph.)
"""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch._dynamo.comptime import comptime
from torch._dynamo.exc import SkipFrame
from torch.compiler import is_dynamo_compiling

from enjoyln_cli.plan.plan import Plan


class Running:
    """The calls of hooked models that are running in one thread."""

    def __init__(self) -> None:
        self.proven: Fold | None = None
        """The model whose norms may compute RMSNorm now."""
        self.is_checked = False
        """Whether the model of the innermost call is checked each time that it is called.

        False if the call was compiled with the code around it: then it was checked once.
        """
        self.calls: tuple[Enter, Fold | None, bool, Any] | None = None
        """A linked list: the innermost call, ``proven`` and ``is_checked`` of the code around it,
        and the calls around it."""
        self.frame: FrameType | None = None
        """The Python frame in which the outermost call began, unless it was compiled."""


class Thread(threading.local):
    """Holds one ``Running`` for each thread."""

    def __init__(self) -> None:
        self.running = Running()


thread = Thread()


class Fold:
    """What the norms, the explicit centrings and the hooks of one folded model share."""

    training_plan: Plan | None = None
    """The plan whose weights a parametrisation centres (see ``train.reparametrize``).

    If set, the weights are centred whatever an optimizer does, so that the norms compute RMSNorm in
    training mode, too.
    """
    was_proven = False
    """With a ``training_plan``: whether the norms computed RMSNorm in the last call."""

    def __init__(self) -> None:
        self.entries: list[Enter] = []


NOT_INSTALLED = Fold()
"""The ``Fold`` of a norm that is installed in no model: no call of it ever runs."""


class Look(Protocol):
    """A check of a model's weights and modules."""

    def look(self, entry: Enter, model: nn.Module) -> None:
        """Check ``model``, and set ``trouble`` and ``moved`` of ``entry`` to the result."""


class Enter:
    """The forward pre-hook that starts a call of a folded model; ``Leave`` ends it.

    A call inside another call of the same ``fold`` belongs to that call: it is not checked again.
    """

    def __init__(self, fold: Fold) -> None:
        self.fold = fold
        self.check: Look | None = None
        self.moved = False
        """Whether the model has been in training mode since its weights were last checked."""
        self.trouble = ""
        """The reason why the norms have to compute LayerNorm; empty if there is none."""

    def __call__(self, module: Any, args: Any) -> None:
        running = thread.running
        compiling = is_dynamo_compiling()
        if compiling:
            comptime(_skip_if_outermost)
        else:
            _forget_interrupted(running)
        above, around, checked = running.calls, running.proven, running.is_checked
        if above is not None and above[0].fold is self.fold:
            proven = around
        else:
            stays = module.training and self.fold.training_plan is None
            if stays or self.check is None:
                pass
            elif compiling:
                comptime(_look_while_compiling)
            else:
                self.check.look(self, module)
            ready = not (stays or self.moved or self.trouble)
            proven = self.fold if ready else None
            if self.fold.training_plan is not None:
                self.fold.was_proven = ready
            running.is_checked = not compiling
        if above is None and not compiling:
            running.frame = sys._getframe(1)
        running.calls = (self, around, checked, above)
        running.proven = proven


class Leave:
    """The forward hook that ends the call that ``Enter`` started, also after an exception."""

    def __init__(self, enter: Enter) -> None:
        self.enter = enter

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        running = thread.running
        if running.calls is None or running.calls[0] is not self.enter:
            return  # another pre-hook raised before ``Enter`` ran
        _, around, running.is_checked, above = running.calls
        within = above is not None and above[0].fold is self.enter.fold
        if not (within and running.proven is None):  # an unproven inner call makes the outer one so
            running.proven = around
        running.calls = above
        if above is None and not is_dynamo_compiling():
            running.frame = None


def runs_proven(fold: Fold) -> bool:
    """Whether norms and explicit centrings of ``fold`` compute now what the plan says.

    So they do in a proven call, and where gradient checkpointing computes a part of such a call
    again in the backward pass of a parametrised model.
    """
    if thread.running.proven is fold:
        return True
    again = fold.training_plan is not None and fold.was_proven
    return again and torch._C._current_graph_task_id() != -1


def is_nested() -> bool:
    """Whether the innermost call runs inside another call of the same model."""
    running = thread.running
    if running.calls is None:
        return False
    enter, _, _, above = running.calls
    return above is not None and above[0].fold is enter.fold


def compute_layer_norm() -> None:
    """Compute LayerNorm in the rest of the innermost call and of the same model's calls around it.

    For a call that turns out not to be proven.
    """
    thread.running.proven = None


def computes_layer_norm(fold: Fold) -> bool:
    """Whether norms of ``fold`` compute LayerNorm in the call that runs in this thread.

    Outside of a call: whether the last checks found a reason for it, or no model was hooked.
    """
    running = thread.running
    if running.calls is not None and running.calls[0].fold is fold:
        return running.proven is not fold
    return not fold.entries or any(entry.moved or entry.trouble for entry in fold.entries)


def _forget_interrupted(running: Running) -> None:
    """Resets the state if the last call was interrupted: Ctrl-C ends a call without its hooks.

    ``frame.clear()`` tells whether the frame of that call has ended: it raises for a running one.
    A running frame refers to nothing for the garbage collector. That is asked first, since it takes
    much less time.
    """
    if running.frame is None or not gc.get_referents(running.frame):
        return
    try:
        running.frame.clear()
    except RuntimeError:
        return
    running.proven = running.calls = running.frame = None
    running.is_checked = False


def _skip_if_outermost(context: Any) -> None:
    """Tells Dynamo not to compile the hook if the model itself is the compiled function.

    Then the hook runs in Python and checks the model at every call. The hook of a model that is
    called inside compiled code is compiled with that code.
    """
    if getattr(context, "_ComptimeContext__tx").parent is None:  # noqa: B009
        raise SkipFrame("checks the model at every call")


def _look_while_compiling(context: Any) -> None:
    """Checks the model once, while Dynamo compiles the hook; takes the real objects from Dynamo.

    ``comptime`` is needed here: before torch 2.13, functions that Dynamo treats as constant do not
    get the real objects.
    """
    entry, module = (
        context.get_local(name)._ComptimeVar__variable.value for name in ("self", "module")
    )
    entry.check.look(entry, module)
