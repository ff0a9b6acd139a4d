"""Calls with labels, from which a model computes its loss.

Code that only training runs, such as an auxiliary loss, may run only then. The shape of ``labels``
is that of a head's targets: one class for each token, row or pixel.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from enjoyln_cli.calls.calls import Call, example
from enjoyln_cli.calls.input_spec import Spec

LABEL = "with labels"
_OF_ROWS = (
    "end_positions", "labels", "mc_labels", "next_sentence_label", "sentence_order_label",
    "start_positions",
)  # fmt: skip
"""Arguments of transformers' heads that hold one class or position for each row."""


def calls_with_labels(model: Any, main: Call) -> Iterator[Call]:
    """``main`` with all labels that ``forward`` takes, in several forms; a model may reject some.

    All forms have the same name, so that ``trace_calls`` traces the first that works. None for a
    model that takes no labels. Labels that are lists (those of detection) are left out.
    """
    accepted = inspect.signature(model.forward).parameters
    inputs = main.steps[0][1]
    rows = next(iter(inputs.values())).shape[0]
    read = next((n for n in ("decoder_input_ids", "input_ids") if n in inputs), None)
    flags = {"use_cache": False} if "use_cache" in main.flags else {}
    if "return_loss" in accepted:
        yield Call("with its loss", (((), inputs),), flags | {"return_loss": True}, required=False)
    names = [name for name in _OF_ROWS if name in accepted]
    shapes = [inputs[read].shape] if read else []
    shapes.append((rows,))
    if "pixel_values" in inputs:
        shapes.append((rows, *inputs["pixel_values"].shape[-2:]))
    for shape in shapes if names else ():
        labels = {n: example(model, Spec(shape if n == "labels" else (rows,), 2)) for n in names}
        yield Call(LABEL, (((), {**inputs, **labels}),), flags, required=False)
