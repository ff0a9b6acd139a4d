"""What ``paper_training.py`` trains on: models and data that are at hand without a network.

Digits are those of scikit-learn. Texts are Python's standard library, its source and its language
reference, so they depend on the release of Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from train_tiny import STDLIB, Batch, encode, stdlib_files
from training_runs import with_norms
from transformers import PreTrainedTokenizerFast

CHECKPOINT = Path(__file__).parents[1] / "tests" / "checkpoints" / "gpt2"
PACKAGES = ("asyncio", "email", "tkinter", "unittest")
"""The classes of the text classification: which package of Python a piece of source is from."""
HELD_OUT = 5
"""One piece in so many is for testing."""
DIGITS_BATCH = 256


@dataclass(frozen=True)
class Task:
    """What is learned: a model, its batches, and its score on batches that it does not train on."""

    build: Callable[[], Any]
    batches: Callable[[], Iterator[Batch]]
    """Draws batches without end."""
    unseen: Callable[[], list[Batch]]
    plans: dict[Any, Any] = field(default_factory=dict)
    """The plans of its models, by variant and options."""

    def model(self, seed: int, variant: str, **options: Any) -> Any:
        """A new model with the initial weights of ``seed``."""
        torch.manual_seed(seed)
        model = self.build()
        key = variant, *options.items()
        batch = next(self.batches())
        self.plans[key] = with_norms(model, variant, batch, self.plans.get(key), **options)
        return model

    def draw(self, seed: int, steps: int) -> list[Batch]:
        """The first batches of ``seed``."""
        torch.manual_seed(seed)
        return list(islice(self.batches(), steps))


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The digits of scikit-learn: pixels ``(1797, 64)`` in float64, 0 to 1, and labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data / 16), torch.tensor(found.target)


@cache
def made_up_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Noise around ten random patterns, for a quick run without scikit-learn."""
    source = torch.Generator().manual_seed(0)
    labels = torch.arange(160) % 10
    patterns = torch.rand(10, 64, generator=source, dtype=torch.float64)
    noise = torch.rand(160, 64, generator=source, dtype=torch.float64)
    return (patterns[labels] + noise) / 2, labels


def mlp(depth: int, width: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """``depth`` linear layers; all but the last are followed by LayerNorm and an activation."""
    sizes = [64] + [width] * (depth - 1)
    layers: list[nn.Module] = []
    for inputs, features in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(inputs, features), nn.LayerNorm(features), activation()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


def digits_task(
    depth: int,
    width: int,
    dtype: torch.dtype,
    made_up: bool = False,
    activation: type[nn.Module] = nn.ReLU,
) -> Task:
    """The digits, one fifth held out, in random batches of ``DIGITS_BATCH``; an epoch has all."""
    pixels, labels = made_up_digits() if made_up else digits()
    pixels = pixels.to(dtype)
    test = torch.arange(len(labels)) % HELD_OUT == 0

    def batches() -> Iterator[Batch]:
        while True:
            order = (~test).nonzero()[:, 0]
            order = order[torch.randperm(len(order))]
            for chosen in order.split(DIGITS_BATCH):
                yield {"pixels": pixels[chosen], "labels": labels[chosen]}

    def build() -> nn.Sequential:
        return mlp(depth, width, activation).to(dtype)

    return Task(build, batches, lambda: [{"pixels": pixels[test], "labels": labels[test]}])


def digits_epoch(made_up: bool = False) -> int:
    """Steps of one epoch."""
    labels = (made_up_digits() if made_up else digits())[1]
    training = len(labels) - math.ceil(len(labels) / HELD_OUT)
    return math.ceil(training / DIGITS_BATCH)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(CHECKPOINT)


@cache
def source_code(files: int) -> torch.Tensor:
    """Tokens of the first modules of Python's standard library."""
    return encode(tokenizer(), stdlib_files()[:files])


@cache
def reference_manual(topics: int) -> torch.Tensor:
    """Tokens of Python's language reference in English, as ``help()`` shows it."""
    from pydoc_data.topics import topics as texts

    return encode(tokenizer(), [texts[name] for name in sorted(texts)[:topics]])


@cache
def package_tokens(package: str, files: int) -> torch.Tensor:
    """Tokens of the modules of one of ``PACKAGES``."""
    paths = sorted((STDLIB / package).glob("*.py"))[:files]
    return encode(tokenizer(), [path.read_text("utf-8") for path in paths])


def pieces(tokens: torch.Tensor, length: int, test: bool) -> torch.Tensor:
    """Rows of ``length`` tokens; the held-out fifth, or the others."""
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    return rows[(torch.arange(len(rows)) % HELD_OUT == 0) == test]


@dataclass(frozen=True)
class TextSizes:
    """Sizes of a transformer and its batches."""

    layers: int = 6
    width: int = 64
    heads: int = 4
    tokens: int = 64
    rows: int = 8
    files: int = 60
    """How many modules, or topics of the language reference, the text is."""
    test_rows: int = 256

    def config(self, dropout: float, **more: Any) -> transformers.GPT2Config:
        return transformers.GPT2Config(
            vocab_size=len(tokenizer()), n_positions=self.tokens, n_embd=self.width,
            n_layer=self.layers, n_head=self.heads, embd_pdrop=dropout, resid_pdrop=dropout,
            attn_pdrop=dropout, bos_token_id=0, eos_token_id=0, use_cache=False, **more,
        )  # fmt: skip


def language_task(sizes: TextSizes, dropout: float, dtype: torch.dtype = torch.float32) -> Task:
    """Predict the next token of Python's own source."""
    config = sizes.config(dropout)
    return text_task(
        lambda: transformers.GPT2LMHeadModel(config).to(dtype), source_code(sizes.files), sizes
    )


def fine_tuning_task(sizes: TextSizes, dropout: float) -> Task:
    """The trained GPT-2 of the tests, which knows source code, learns the language reference."""

    def build() -> Any:
        kinds = ("embd_pdrop", "resid_pdrop", "attn_pdrop")
        return transformers.GPT2LMHeadModel.from_pretrained(
            CHECKPOINT, use_cache=False, **dict.fromkeys(kinds, dropout)
        )

    return text_task(build, reference_manual(sizes.files), sizes)


def text_task(build: Callable[[], Any], tokens: torch.Tensor, sizes: TextSizes) -> Task:
    """Predict the next token."""
    training, test = (pieces(tokens, sizes.tokens, held_out) for held_out in (False, True))
    return Task(
        build,
        partial(_random_rows, {"input_ids": training, "labels": training}, sizes.rows),
        partial(_all_rows, {"input_ids": test, "labels": test}, sizes.test_rows),
    )


def classification_task(sizes: TextSizes, dropout: float) -> Task:
    """Which of ``PACKAGES`` a piece of source is from; each class is drawn equally often."""
    config = sizes.config(dropout, num_labels=len(PACKAGES), pad_token_id=0)

    def labelled(held_out: bool) -> Batch:
        rows = [
            pieces(package_tokens(name, sizes.files), sizes.tokens, held_out) for name in PACKAGES
        ]
        fewest = min(map(len, rows))
        return {
            "input_ids": torch.cat([part[:fewest] for part in rows]),
            "labels": torch.arange(len(PACKAGES)).repeat_interleave(fewest),
        }

    return Task(
        lambda: transformers.GPT2ForSequenceClassification(config),
        partial(_random_rows, labelled(False), sizes.rows),
        partial(_all_rows, labelled(True), sizes.test_rows),
    )


def _random_rows(data: Batch, rows: int) -> Iterator[Batch]:
    while True:
        chosen = torch.randint(len(data["labels"]), (rows,))
        yield {name: values[chosen] for name, values in data.items()}


def _all_rows(data: Batch, most: int) -> list[Batch]:
    """At most ``most`` rows, spread evenly over the data."""
    count = len(data["labels"])
    chosen = torch.arange(0, count, max(1, math.ceil(count / most)))
    return [{name: values[part] for name, values in data.items()} for part in chosen.split(64)]
