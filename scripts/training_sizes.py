"""How much ``paper_training.py`` runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from training_runs import METHODS, Method
from training_tasks import TextSizes

Tell = Callable[[float, str], None]
"""Receives which share of an experiment is done, and what was done last."""


def tell_of_part(tell: Tell, number: int, count: int, name: str) -> Tell:
    """For part ``number`` of ``count`` equal parts of an experiment."""
    return lambda done, text: tell((number + done) / count, f"{name}, {text}")


@dataclass(frozen=True)
class Sizes:
    """How much is run."""

    methods: tuple[Method, ...]
    epochs: int
    depth: int
    width: int
    depths: tuple[int, ...]
    norm_epochs: int
    norm_seeds: int
    made_up: bool
    """Patterns with noise in place of the digits, which need scikit-learn."""
    text: TextSizes
    classification: TextSizes
    fine_tuning: TextSizes
    steps: int
    moving_steps: int
    dropout_steps: int
    every: int
    """Steps between two points of a curve."""
    seeds: int
    step_width: int
    step_tokens: tuple[int, ...]
    break_even: tuple[str, ...]
    """Models of ``training_times.BREAK_EVEN_MODELS``."""
    rounds: int
    case_seconds: float
    """After this time, no more rounds than a 95 % interval needs."""


FULL = Sizes(
    methods=METHODS,
    epochs=40,
    depth=6,
    width=256,
    depths=(6, 15, 35),
    norm_epochs=30,
    norm_seeds=3,
    made_up=False,
    text=TextSizes(),
    classification=TextSizes(layers=3),
    fine_tuning=TextSizes(files=79),
    steps=200,
    moving_steps=60,
    dropout_steps=200,
    every=20,
    seeds=5,
    step_width=768,
    step_tokens=(128, 512, 1024),
    break_even=("GPT-2", "BERT", "BLOOM-560m", "OPT-125m", "Phi-2", "ViT"),
    rounds=9,
    case_seconds=40,
)
_FEW = TextSizes(layers=2, width=16, heads=2, tokens=16, rows=4, files=1, test_rows=8)
QUICK = Sizes(
    methods=METHODS[3:4],
    epochs=3,
    depth=3,
    width=16,
    depths=(3,),
    norm_epochs=2,
    norm_seeds=1,
    made_up=True,
    text=_FEW,
    classification=_FEW,
    fine_tuning=_FEW,
    steps=6,
    moving_steps=6,
    dropout_steps=4,
    every=2,
    seeds=2,
    step_width=32,
    step_tokens=(8,),
    break_even=("tiny",),
    rounds=3,
    case_seconds=1,
)
"""Runs every line in seconds. Its numbers mean nothing."""
