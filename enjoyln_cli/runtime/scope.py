"""Which call of a folded model is running in this thread, and may its norms compute RMSNorm?

They may inside a call of a model whose weights, modules and inputs were checked and match the proof
(see ``entries``). Everywhere else the model computes what its stock class computes, with LayerNorm
and without explicit centrings: in a block or tower that is called directly, in another thread, in
training mode. With centred weights that is the same function, since LayerNorm ignores a shift of
its input. Training mode is different for a model whose weights a parametrisation centres (see
``Fold.training_plan``).

The state of a call belongs to its thread. Compiled code reads the same state: Dynamo reads, writes
and guards attributes of an object that is stored in a ``threading.local`` as Python does. (It does
not do so for attributes of the ``threading.local`` itself, which it reads once per graph.)
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from enjoyln_cli.plan.plan import Plan


class Called(Protocol):
    """A module whose calls are calls of a folded model; an ``Entry`` (see ``entries``)."""

    fold: Fold
    trouble: str


class Running:
    """The innermost call of a folded model that is running in one thread."""

    def __init__(self) -> None:
        self.entry: Called | None = None
        """That of the model."""
        self.proven: Fold | None = None
        """The ``Fold`` of the model, if its norms may compute RMSNorm now; otherwise ``None``."""


class Thread(threading.local):
    """Holds one ``Running`` for each thread."""

    def __init__(self) -> None:
        self.running = Running()


thread = Thread()


class Fold:
    """What the norms, the explicit centrings and the entries of one folded model share."""

    training_plan: Plan | None = None
    """The plan whose weights a parametrisation centres (see ``train.reparametrize``).

    If set, the weights are centred whatever an optimizer does, so that the norms compute RMSNorm in
    training mode, too.
    """
    was_proven = False
    """With a ``training_plan``: whether the norms computed RMSNorm in the last call."""

    def __init__(self) -> None:
        self.entries: list[Called] = []
        self.trained = 0
        """How often the model was put into training mode, in which its weights may change."""
        self.checked = 0
        """``trained`` when the weights were last checked."""


NOT_INSTALLED = Fold()
"""The ``Fold`` of a norm that is installed in no model: no call of it ever runs."""


def runs_proven(fold: Fold) -> bool:
    """Whether norms and explicit centrings of ``fold`` compute now what the plan says.

    So they do in a proven call, and where gradient checkpointing computes a part of such a call
    again in the backward pass of a parametrised model.
    """
    if thread.running.proven is fold:
        return True
    again = fold.training_plan is not None and fold.was_proven
    return again and torch._C._current_graph_task_id() != -1


def compute_layer_norm() -> None:
    """Compute LayerNorm in the rest of the call that is running.

    For a call that turns out not to be proven.
    """
    thread.running.proven = None


def computes_layer_norm(fold: Fold) -> bool:
    """Whether norms of ``fold`` compute LayerNorm in the call that runs in this thread.

    Outside of a call: whether the last checks found a reason for it, or no model was installed.
    """
    running = thread.running
    if running.entry is not None and running.entry.fold is fold:
        return running.proven is not fold
    unchecked = fold.training_plan is None and fold.checked != fold.trained
    return unchecked or not fold.entries or any(entry.trouble for entry in fold.entries)
